"""Converts events to lines of events.jsonl and back, and derives facts from events. Pure."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evergrad_common.contract import step_of_checkpoint
from evergrad_common.text import size
from evergrad_trainer.base.records import Event, EventType

_KEYS = ("type", "time", "step", "generation")


def event_row(event: Event) -> dict[str, Any]:
    """Return the line of an event: type, time, step, generation and its fields.

    Raises ValueError if a field has one of these names.
    """
    # Fields share one JSON object with the event's own keys, so their names must not collide.
    taken = event.fields.keys() & set(_KEYS)
    if taken:
        raise ValueError(
            f"event {event.type!r} has fields named {', '.join(sorted(taken))}, which every event has already"
        )
    return {
        "type": event.type,
        "time": event.time,
        "step": event.step,
        "generation": event.generation,
        **event.fields,
    }


def parse_event_row(row: dict[str, Any]) -> Event:
    """Parse the event of a line. Raises ValueError or TypeError if the line is not an event."""
    # Report all missing names together, because a file of another program lacks all of them.
    missing = [key for key in _KEYS if key not in row]
    if missing:
        raise ValueError(f"has no {' and no '.join(missing)}")
    fields = {key: value for key, value in row.items() if key not in _KEYS}
    return Event(
        type=str(row["type"]),
        time=float(row["time"]),
        step=int(row["step"]),
        generation=int(row["generation"]),
        fields=fields,
    )


def saved_step(event: Event) -> int:
    """Return the saved step of a ``save`` event. A background save is reported some steps later."""
    # The checkpoint's name contains the saved step; the event's step is the step of the report.
    step = step_of_checkpoint(str(event.fields.get("checkpoint", "")))
    return event.step if step is None else step


def words_of(world: Event) -> str:
    """Return the description of a ``world`` event's cause; older versions stored it under ``cause``."""
    return str(world.fields.get("detail") or world.fields.get("cause") or "")


def seconds_of(event: Event, key: str) -> float:
    """Read a duration from an event's fields; returns 0 if it is missing, negative or not a number."""
    value = event.fields.get(key)
    # Files of other versions or broken machines may contain any value, and sums must stay valid.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if 0 <= value < math.inf else 0.0


def describe_metrics(metrics: Mapping[str, Mapping[str, str]]) -> str:
    """Describe the metrics of a recipe, each as ``name (unit): help``."""
    texts = []
    for name, one in metrics.items():
        unit = f" ({one['unit']})" if one.get("unit") else ""
        texts.append(f"{name}{unit}: {one.get('help', '')}".rstrip(".: "))
    return "; ".join(texts)


def _show_known(name: str, value: object) -> str:
    if not value:
        return ""
    return f"{name}={json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"


def describe_event(event: Event) -> str | None:
    """Describe an event in one line, ``kind key=value …``; None for events that logs do not show."""
    fields, num_bytes = event.fields, event.fields.get("bytes")
    # Values have no blanks, so that a line can be split at blanks.
    saved = "unknown"
    if isinstance(num_bytes, int | float):
        saved = size(num_bytes).replace(" ", "")
    before, paused = fields.get("from_world_size"), fields.get("paused_seconds")
    cause = fields.get("detail") or fields.get("cause")
    line = {
        EventType.SAVE: lambda: (
            f"step={saved_step(event)} seconds={_get(fields, 'seconds')} size={saved}"
        ),
        EventType.SAVE_FAILED: lambda: (
            f"step={event.step} failures={fields.get('failures')} reason={fields.get('reason')}"
        ),
        EventType.FALLBACK: lambda: (
            f"checkpoint={fields.get('checkpoint')} reason={fields.get('reason')}"
        ),
        EventType.RESTORED: lambda: (
            f"checkpoint={fields.get('checkpoint')} seconds={_get(fields, 'seconds')}"
        ),
        EventType.BEGUN_FROM: lambda: (
            f"path={fields.get('path')} step={fields.get('from_step')} load={fields.get('load')} "
            + _show_known("sources", fields.get("sources"))
        ),
        EventType.EXTENDED: lambda: (
            f"from={fields.get('from_steps')} to={fields.get('to_steps')}"
        ),
        EventType.CHANGED: lambda: (
            f"step={event.step} "
            + "; ".join(f"{one.field}: {one.old} → {one.new}" for one in changes_of(event))
        ),
        EventType.WARNING: lambda: str(fields.get("message")),
        EventType.ALERT: lambda: (
            f"step={event.step} monitor={json.dumps(fields.get('monitor'))} "
            f"policy={fields.get('policy')} message={fields.get('message')}"
        ),
        EventType.SKIPPED: lambda: f"step={event.step} message={fields.get('message')}",
        EventType.NON_FINITE: lambda: (
            f"step={event.step + 1} message={fields.get('message')}"
        ),
        # Leave out unknown facts of a change.
        EventType.WORLD: lambda: " ".join(
            (
                f"size={fields.get('world_size')}",
                "" if before is None else f"from={before}",
                _show_known("cause", cause),
                f"paused={paused:.2f}s" if isinstance(paused, int | float) else "",
            )
        ),
        EventType.STOP: lambda: (
            f"step={event.step} reason={fields.get('reason')} saved={str(fields.get('saved')).lower()}"
        ),
        EventType.COMPLETE: lambda: f"step={event.step}",
        EventType.FAILED: lambda: (
            f"step={event.step} error={fields.get('error')} message={fields.get('message')}"
        ),
    }.get(event.type)
    return None if line is None else " ".join(f"{event.type} {line()}".split())


@dataclass(frozen=True)
class FieldChange:
    """One changed field of the manifest. The run continued with ``new`` after ``step``. ``old`` and ``new``
    are JSON."""

    step: int
    field: str
    old: str
    new: str


def changes_of(event: Event) -> list[FieldChange]:
    """List the changed fields of a ``changed`` event; empty for other events."""
    changes = event.fields.get("changes") if event.type == EventType.CHANGED else None
    return [
        FieldChange(
            event.step,
            str(one.get("path")),
            json.dumps(one.get("old"), ensure_ascii=False),
            json.dumps(one.get("new"), ensure_ascii=False),
        )
        for one in (changes if isinstance(changes, list) else ())
        if isinstance(one, dict)
    ]


def _get(fields: dict[str, object], key: str) -> str:
    value = fields.get(key)
    return f"{value:.2f}" if isinstance(value, int | float) else "unknown"
