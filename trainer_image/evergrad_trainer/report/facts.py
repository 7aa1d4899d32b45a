"""Gathers the facts of a report from a run directory. Both renderers show them and compute nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from evergrad_trainer.base.records import (
    TOKENS,
    EvaluationRecord,
    Event,
    EventType,
    unit_read,
)
from evergrad_trainer.observers.account_files import account
from evergrad_trainer.observers.goodput import Goodput
from evergrad_trainer.observers.history import History, StepTable, read_history
from evergrad_trainer.report.figures import (
    Figure,
    RunStatus,
    Share,
    as_mapping,
    describe_run,
    describe_status,
    environment_rows,
    summary_figures,
    time_shares,
)
from evergrad_trainer.report.pod_time import PodTime, read_pod_time
from evergrad_trainer.report.tables import (
    Table,
    change_table,
    checkpoint_table,
    evaluation_table,
    last_evaluations,
    restart_table,
    warnings_of,
    world_cause_table,
    world_table,
)
from evergrad_trainer.run.directory import RunDirectory, reported
from evergrad_trainer.run.provenance import read_processes
from evergrad_trainer.run.redaction import hide_home


@dataclass(frozen=True)
class ReportFacts:
    """All facts that a report shows, except its plots."""

    name: str
    subtitle: tuple[str, ...]
    status: RunStatus
    figures: tuple[Figure, ...]
    shares: tuple[Share, ...]
    evaluations: Table
    results: Table
    """Results of ``evergrad evaluate``; without rows if it was not used."""
    checkpoints: Table
    restarts: Table
    changes: Table
    """Fields of the manifest that changed during the run."""
    worlds: Table
    """Each change of the world; without rows if there was no change."""
    world_causes: Table
    warnings: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    configuration: str
    goodput: Goodput
    steps: StepTable
    """The valid rows, in order of the steps."""
    superseded: StepTable
    """The superseded rows, in the order of the file."""
    history: History
    metrics: Mapping[str, Mapping[str, str]]
    """Metrics of the recipe except the loss: ``unit`` and ``help`` by name, from its start event."""
    loss_items: str
    """Items over which the loss is averaged."""
    unit_read: str
    """Unit of the data that the run read: tokens, or samples if they are not text."""
    pod_time: PodTime | None = None
    """Time of the run's pods; None if the run's object of a cluster was not given."""

    @property
    def loss_unit(self) -> str:
        """Unit of the loss. Only a loss of tokens is known to be in nats."""
        return (
            "nats per token"
            if self.loss_items == TOKENS
            else f"mean over {self.loss_items}"
        )


def gather_facts(
    directory: RunDirectory, *, cluster_run: Path | None = None
) -> ReportFacts:
    """Read everything. ``cluster_run``: file with the run's object of a cluster, if there is one.

    Raises RunDirectoryError if the files do not belong to a run. A run without steps is valid.
    """
    directory.require_run()
    history = read_history(directory)
    goodput = account(history.steps, history.events, history.evaluations)
    resolved = directory.read_resolved() or {}
    step = history.steps.newest_step

    # A step that was trained again after a kill is in the file twice; figures and curves show the valid row.
    # If training went back, rows after the newest row's step have not been trained again yet. Leave them out.
    last = history.steps.last_rows()
    last = last[history.steps.step[last] <= step]
    is_counting = np.zeros(len(history.steps), np.bool_)
    is_counting[last] = True
    counting = history.steps.take(last)
    history = _leave_out_lost(history, counting)

    started = _find_started(resolved, history.events)
    # Show the resolved manifest, without home directories, because its paths may contain the user's name.
    manifest = resolved.get("manifest", resolved)
    text = yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True, width=110)
    named = as_mapping(started.get("metrics"))
    items = str(started.get("loss_items", TOKENS))
    unit = unit_read(
        tokens_per_step=started.get("tokens_per_step"),
        samples_per_step=started.get("samples_per_step"),
    )
    pod_time = None
    if cluster_run is not None:
        with reported(cluster_run, what="cannot be read"):
            content = cluster_run.read_text("utf-8")
        pod_time = read_pod_time(content, source=str(cluster_run), run=started.get("run"))
    return ReportFacts(
        name=str(started.get("run") or directory.path.resolve().name),
        subtitle=describe_run(started, goodput),
        status=describe_status(goodput, is_complete=directory.is_complete(), step=step),
        figures=summary_figures(history, counting, goodput, started, unit=unit),
        shares=time_shares(goodput),
        evaluations=evaluation_table(last_evaluations(history.evaluations), items=items),
        results=evaluation_table(history.results, items=items),
        checkpoints=checkpoint_table(history.events),
        restarts=restart_table(goodput),
        changes=change_table(history.events),
        worlds=world_table(goodput),
        world_causes=world_cause_table(goodput),
        warnings=warnings_of(history, goodput, steps=counting),
        environment=environment_rows(read_processes(directory)),
        configuration=hide_home(text) if manifest else "",
        goodput=goodput,
        steps=counting,
        superseded=history.steps.take(~is_counting),
        history=history,
        metrics={str(key): one for key, one in named.items() if isinstance(one, Mapping)},
        loss_items=items,
        unit_read=unit,
        pod_time=pod_time,
    )


def _leave_out_lost(history: History, steps: StepTable) -> History:
    """Return the history without evaluations and skipped steps that are lost because training went back.

    ``steps``: the valid rows. The measured state is lost, and other steps may follow.
    """

    def counts(one: EvaluationRecord | Event) -> bool:
        place = int(np.searchsorted(steps.step, one.step))
        if place == len(steps):
            # After the newest step. A run without steps measures its initial state.
            return place == 0
        is_trained_here = steps.step[place] == one.step
        return not is_trained_here or one.generation >= int(steps.generation[place])

    return replace(
        history,
        evaluations=tuple(one for one in history.evaluations if counts(one)),
        events=tuple(
            one for one in history.events if one.type != EventType.SKIPPED or counts(one)
        ),
    )


def _find_started(resolved: Mapping[str, Any], events: Sequence[Event]) -> dict[str, Any]:
    """Find the facts of the newest start event; missing facts are from the manifest, which exists even if a
    run failed before its first start event."""
    training = _dig(resolved, "manifest", "spec", "training")
    model = _dig(training, "model", "config", "model_type") or _dig(
        training, "model", "path"
    )
    known = {
        "run": _dig(resolved, "manifest", "metadata", "name"),
        "model": model,
        "precision": _dig(training, "runtime", "precision"),
        "parallelism": _dig(training, "runtime", "parallelism"),
        "total_steps": _dig(resolved, "derived", "totalSteps"),
    }
    started = {key: value for key, value in known.items() if value is not None}
    starts = [event for event in events if event.type == EventType.START]
    if starts:
        started |= starts[-1].fields
    return started


def _dig(value: Any, *keys: str) -> Any:
    for key in keys:
        value = as_mapping(value).get(key)
    return value
