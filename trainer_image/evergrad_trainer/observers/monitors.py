"""Monitors of a run: they watch metrics on every rank, and warn, save or stop."""

import time
from collections.abc import Collection, Mapping
from typing import Any

from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_manifest.model.spelling import nearest
from evergrad_manifest.training import Training
from evergrad_manifest.training.observing import STEP_METRICS
from evergrad_trainer.base.records import (
    EvaluationRecord,
    Event,
    EventType,
    StepRecord,
    Wish,
)
from evergrad_trainer.observers.base import BaseObserver, Observer
from evergrad_trainer.observers.watches import (
    Watch,
    WatchAlert,
    rule_of,
    rule_of_early_stop,
)


class Monitors(BaseObserver):
    """All watches of a run. Their state is in the checkpoint, and all ranks carry out their requests."""

    def __init__(self, watches: Collection[Watch]) -> None:
        self._watches = {watch.rule.name: watch for watch in watches}
        self._step = 0
        self.listener: Observer = BaseObserver()
        """Receives an event for each alert: on rank 0 the run's own observers, on other ranks no observer."""

    def step_end(self, record: StepRecord) -> None:
        measured = {"loss": record.loss, "grad_norm": record.grad_norm, **record.metrics}
        self._look(record, measured)

    def evaluation_end(self, record: EvaluationRecord) -> None:
        values = {"loss": record.loss, "perplexity": record.perplexity, **record.metrics}
        self._look(record, {f"{record.name}/{name}": one for name, one in values.items()})

    def wishes(self) -> frozenset[Wish]:
        """Request a stop while an alert with policy stop lasts, and one save when an alert with policy save
        begins."""
        wishes = set[Wish]()
        for watch in self._watches.values():
            policy = watch.rule.policy
            if watch.since is None or policy == "warn":
                continue
            if policy == "stop":
                wishes.add("stop")
            elif watch.since == self._step:
                wishes.add("save")
        return frozenset(wishes)

    def state(self) -> Mapping[str, Any]:
        watches = {name: watch.state() for name, watch in self._watches.items()}
        return {"step": self._step, "watches": watches} if self._step else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._step = int(state.get("step", 0))
        kept = state.get("watches", {})
        for name, watch in self._watches.items():
            watch.load_state(kept.get(name, {}))

    def repeat(self, record: StepRecord) -> None:
        """Report the alerts that began with the newest step, ``record``, to the listener again."""
        for watch in self._watches.values():
            alert = watch.alert_of(record.step)
            if alert is not None:
                self.listener.event(_event_of(alert, record.generation))

    def _look(
        self, record: StepRecord | EvaluationRecord, measured: Mapping[str, float]
    ) -> None:
        self._step = record.step
        for watch in self._watches.values():
            # A record may lack a metric; for example, metrics of an evaluation exist only at some steps.
            if watch.rule.metric not in measured:
                continue
            alert = watch.look(record.step, measured)
            if alert is not None:
                self.listener.event(_event_of(alert, record.generation))


def build_monitors(training: Training) -> Monitors | None:
    """Build the monitors of the manifest, with its early stop, or None."""
    rules = [rule_of(monitor) for monitor in training.monitors]
    if training.stop.early is not None:
        rules.append(rule_of_early_stop(training.stop.early))
    return Monitors([Watch(rule) for rule in rules]) if rules else None


def check_watched(
    training: Training, metrics: Collection[str], evaluations: Mapping[str, Collection[str]]
) -> None:
    """Raise ConfigurationError if a monitor watches a metric that this run never measures.

    ``metrics``: the recipe's metrics. ``evaluations``: all metrics of each evaluation set.
    """
    known = [*STEP_METRICS, *metrics]
    for name, own in evaluations.items():
        known += [f"{name}/{metric}" for metric in own]
    watched = [
        (f"spec.training.monitors[{index}].{key}", metric)
        for index, monitor in enumerate(training.monitors)
        for key, metric in (("metric", monitor.metric), ("of", monitor.of))
        if metric is not None
    ]
    if training.stop.early is not None:
        watched.append(("spec.training.stop.early.metric", training.stop.early.metric))
    problems = []
    for where, metric in watched:
        if metric in known:
            continue
        near = nearest(metric, known)
        hint = f"did you mean `{near}`? " if near else ""
        why = f"{hint}Known here: {', '.join(known)}"
        remedy = "" if near else "Write one of them"
        problems.append(
            Problem(where, f"{metric!r} is not a metric of this run", why, remedy)
        )
    if problems:
        raise ConfigurationError(*problems)


def _event_of(alert: WatchAlert, generation: int) -> Event:
    fields = {
        "monitor": alert.rule.kind,
        "metric": alert.rule.metric,
        "value": alert.value,
        "threshold": alert.threshold,
        "policy": alert.rule.policy,
        "message": alert.describe(),
    }
    return Event(EventType.ALERT, time.time(), alert.step, generation, fields)
