"""The history of a run for its page: readings of the group and its training, and events. Pure.

All data is bounded, and no function changes the group. ``observe`` adds a reading of the group to the
history; ``take_update`` returns the changes since its last call.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from evergrad_common.causes import CHANGES, USES, read_change
from evergrad_common.text import plural
from evergrad_coordinator.rules.downsampled_series import Track
from evergrad_coordinator.rules.group import Group
from evergrad_coordinator.rules.status import build_status, count_current_workers

MOST_EVENTS: Final = 200
MOST_CHECKPOINTS: Final = 100
_MOST_CHARACTERS: Final = 300
"""Maximum length of an event's text."""
_TEXTS: Final[Mapping[str, str]] = {
    "hello": "node {node} connected with {workersText}",
    "gone": "node {node} is gone: {why}",
    "leaving": "node {node} was asked to leave: {reason}",
    "leave": "node {node} may leave",
    "refused": "node {node} was refused: {reason}",
    "lease_lost": "the lease of node {node} expired",
    "plan": "a group of {membersText} is planned: {reason}",
    "waiting": "{readyText} ready, {needed} needed",
    "go": "generation {generation} begins: {nodesText}, {worldSizeText}",
    "adopted": "generation {adopted} was found running: {nodesText}, {worldSizeText}",
    "up": "generation {generation} is up, {stepText}",
    "broken": "generation {generation} broke on node {node}, {rankText}: {causeText}",
    "bounds": "the bounds of the run were changed",
    "empty": "all nodes have left",
    "finished": "the run has ended: {reason}",
}
"""Text of each event of the coordinator's log that the page shows. All other events are omitted."""
SHOWN_EVENTS: Final = frozenset(_TEXTS)
_COUNTED: Final[Mapping[str, str]] = {
    "members": "node",
    "nodes": "node",
    "ready": "node",
    "workers": "process",
    "worldSize": "process",
}
"""Fields of these events that are numbers, and their nouns."""


class _Ring:
    """The newest ``most`` entries of a list, and the number of all entries that were added."""

    def __init__(self, most: int) -> None:
        self.newest: deque[list[Any]] = deque(maxlen=most)
        self.num = 0
        self.num_sent = 0

    def add(self, one: list[Any]) -> None:
        self.newest.append(one)
        self.num += 1

    def take(self) -> list[list[Any]]:
        """Return the kept entries that have not been sent."""
        # Entries that left the ring before they were sent are never sent to the page.
        num_unsent = min(self.num - self.num_sent, len(self.newest))
        self.num_sent = self.num
        known = list(self.newest)
        return known[len(known) - num_unsent :]


@dataclass
class RunHistory:
    """The history that the page shows next to the newest status. Times are seconds since ``began_at``."""

    began_at: float
    """Time of the first reading, on the clock of ``now``."""
    steps: Track = field(default_factory=Track)
    """Loss, speed and the recipe's metrics over the step."""
    times: Track = field(default_factory=Track)
    """Number of training processes and of connected nodes over the time."""
    evaluations: dict[str, Track] = field(default_factory=dict)
    """Results by evaluation set, over the step."""
    checkpoints: _Ring = field(default_factory=lambda: _Ring(MOST_CHECKPOINTS))
    events: _Ring = field(default_factory=lambda: _Ring(MOST_EVENTS))
    reported_at: float | None = None
    """Time of the newest progress report that was read."""
    checkpoint_step: int = -1
    evaluated: dict[str, int] = field(default_factory=dict)
    """Newest step that was read of each evaluation set."""
    sent: dict[str, Any] = field(default_factory=dict)
    """The status that was last sent."""


def observe(history: RunHistory, group: Group, *, now: float) -> None:
    """Add one reading of the group to the history.

    A reading is always added to the series over the time; to the others, only if there is new data.
    """
    training = group.training
    elapsed = round(now - history.began_at, 1)
    # Read each report only once, because several readings may happen between two reports.
    is_new = training.updated_at is not None and training.updated_at != history.reported_at
    if is_new:
        history.reported_at = training.updated_at
        known = {
            "loss": training.loss,
            "tokens_per_second": training.tokens_per_second,
        }
        values = {name: value for name, value in known.items() if value is not None}
        # A report of an evaluation repeats the preceding step, which was already read.
        newest = history.steps.x[-1] if history.steps.x else -1
        if training.step not in (-1, newest):
            history.steps.add(training.step, values | training.values)
    for name, one in training.evaluations.items():
        # ``training`` keeps at most MOST_SETS sets, which also bounds the sets here.
        if history.evaluated.get(name) != one.step:
            history.evaluated[name] = one.step
            track = history.evaluations.setdefault(name, Track())
            track.add(one.step, one.values)
    # The group only keeps the newest checkpoint. Readings are more frequent than saves, so none is missed.
    if training.checkpoint_step not in (-1, history.checkpoint_step):
        history.checkpoint_step = training.checkpoint_step
        history.checkpoints.add([elapsed, training.checkpoint_step])
    # Record the sizes even without a report, so that the page shows when processes were missing.
    sizes = {
        "processes": count_current_workers(group),
        "nodes": len(group.nodes),
    }
    history.times.add(elapsed, sizes)


def note_event(
    history: RunHistory, event: str, fields: Mapping[str, object], *, now: float
) -> None:
    """Record a line of the coordinator's log. ``event`` must be one of SHOWN_EVENTS."""
    # A field that is missing in the log line is shown as "?", because it must not raise an error.
    cause = CHANGES[read_change(fields.get("cause"))].text
    texts = {name: str(value) for name, value in fields.items()}
    known = defaultdict(lambda: "?", texts)
    # The protocol uses -1 for unknown steps and ranks, which the page must not show as a number.
    step, rank = (fields.get(name, -1) for name in ("step", "rank"))
    is_started, has_rank = (type(one) is int and one >= 0 for one in (step, rank))
    known["causeText"] = cause
    known["stepText"] = f"after step {step}" if is_started else "before the first step"
    known["rankText"] = f"rank {rank}" if has_rank else "a worker without a rank"
    for name, noun in _COUNTED.items():
        number = fields.get(name)
        known[f"{name}Text"] = plural(number, noun) if type(number) is int else f"? {noun}"
    said = _TEXTS[event].format_map(known)
    elapsed = round(now - history.began_at, 1)
    history.events.add([elapsed, event, said[:_MOST_CHARACTERS]])


def build_page_status(group: Group, *, now: float) -> dict[str, Any]:
    """Build the status for a page: ``build_status`` with the uses of time as ``uses`` and ``useTexts``."""
    status = build_status(group, now=now)
    # Milliseconds are for programs that compute differences. The page shows whole seconds in the order of the
    # catalogue. It receives the texts only once, because they never change.
    usage = status.pop("usage")["milliseconds"]
    seconds = {use: round(usage.get(use, 0) / 1000) for use in USES}
    status["uses"] = {use: amount for use, amount in seconds.items() if amount}
    status["useTexts"] = dict(USES)
    return status


def rewind(history: RunHistory) -> None:
    """Make the next update contain all data, for a page that has just been opened."""
    for track in (history.steps, history.times, *history.evaluations.values()):
        track.rewind()
    history.checkpoints.num_sent = history.events.num_sent = 0
    history.sent = {}


def take_update(
    history: RunHistory, status: Mapping[str, Any], *, now: float
) -> dict[str, Any]:
    """Return the changes since the last call, as JSON values. Parts without a change are omitted.

    ``status``: the current result of ``build_page_status``.
    """
    # Use an ellipsis as the default, because None is a value that must be sent to the page.
    changed = {
        key: value for key, value in status.items() if history.sent.get(key, ...) != value
    }
    history.sent = dict(status)

    # ``take_change`` and ``take`` return each change only once.
    evaluations = {}
    for name, one in history.evaluations.items():
        change = one.take_change()
        if change is not None:
            evaluations[name] = change
    parts: dict[str, Any] = {
        "status": changed,
        "steps": history.steps.take_change(),
        "times": history.times.take_change(),
        "evaluations": evaluations,
        "checkpoints": history.checkpoints.take(),
        "events": history.events.take(),
    }
    update: dict[str, Any] = {"elapsed": round(now - history.began_at, 1)}
    update |= {key: value for key, value in parts.items() if value}
    return update
