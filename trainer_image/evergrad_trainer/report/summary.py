"""A run's figures as one JSON document: ``summary.json``, which ``evergrad report --json`` prints, too."""

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

from evergrad_trainer.base.records import EventType, record_row
from evergrad_trainer.observers.events import changes_of
from evergrad_trainer.report.facts import ReportFacts
from evergrad_trainer.report.tables import last_evaluations
from evergrad_trainer.run.directory import RunDirectory, reported

FORMAT = 1


def summarise(facts: ReportFacts) -> dict[str, Any]:
    """Return the figures of the report's page without rounding, so that programs can compare them."""
    goodput, steps, history = facts.goodput, facts.steps, facts.history
    starts = [event for event in history.events if event.type == EventType.START]
    # The step that stopped the run made no update either. Its number is one higher than the event's step.
    skipped = {
        event.step + (event.type == EventType.NON_FINITE): str(event.fields.get("why"))
        for event in history.events
        if event.type in (EventType.SKIPPED, EventType.NON_FINITE)
    }
    samples_per_step = int(starts[-1].fields.get("samples_per_step") or 0) if starts else 0
    resumed_from = int(starts[-1].fields.get("resumed_from") or 0) if starts else 0
    is_trained = len(steps) > 0
    return {
        "format": FORMAT,
        "run": facts.name,
        "status": facts.status.label,
        "step": steps.newest_step,
        "loss": float(steps.loss[-1]) if is_trained else None,
        # Numbers of the whole run, and of the newest process only. A run that continues after another run's
        # step has only rows of its own steps.
        "samples": len(steps) * samples_per_step,
        "newSamples": max(0, steps.newest_step - resumed_from) * samples_per_step,
        "tokens": int(steps.tokens.sum()),
        "validTokens": int(steps.valid_tokens.sum()),
        "metrics": {
            name: float(column[-1]) if is_trained else None
            for name, column in steps.metrics.items()
        },
        # A step that was trained again counts once, with its last result.
        "skippedSteps": dict(Counter(skipped.values())),
        "evaluations": [record_row(one) for one in history.evaluations],
        "newestEvaluations": {
            one.name: record_row(one) for one in last_evaluations(history.evaluations)
        },
        "results": [record_row(one) for one in history.results],
        "goodput": {
            "ratio": goodput.ratio,
            "elapsed_seconds": goodput.elapsed_seconds,
            "productive_seconds": goodput.productive_seconds,
            "lost_seconds": goodput.lost_seconds,
            "process_seconds": goodput.process_seconds,
        },
        "changes": [
            change.__dict__ for event in history.events for change in changes_of(event)
        ],
        "restarts": [dict(restart.__dict__) for restart in goodput.restarts],
        "world_changes": [dict(change.__dict__) for change in goodput.changes],
        "warnings": list(facts.warnings),
        # Use the form of the run's status, in which hours are texts. Omit this without the run's object.
        **({} if facts.pod_time is None else {"usage": dict(facts.pod_time.raw)}),
    }


def hash_files(directory: RunDirectory, *more: Path) -> list[dict[str, Any]]:
    """Return name, size and SHA-256 of each existing record of the run, and of the files in ``more``.

    Raises RunDirectoryError or VolumeError if a file cannot be read.
    """
    records = (
        directory.requested,
        directory.preflight,
        directory.resolved,
        directory.provenance,
        directory.metrics,
        directory.evaluation,
        directory.events,
        *more,
    )
    rows = []
    for path in records:
        if not path.exists():
            continue
        with reported(path, what="cannot be read"), path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            rows.append({"file": path.name, "bytes": file.tell(), "sha256": digest})
    return rows
