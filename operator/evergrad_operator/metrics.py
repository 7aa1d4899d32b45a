"""The operator's own metrics, ``evergrad_operator_…``.

Those of runs are read off the mirror, so none outlives its run.
"""

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from evergrad_operator.facts import RunFacts

PREFIX: Final = "evergrad_operator_"
_FAST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SLOW = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass(frozen=True)
class Facts:
    """What is exported of the operator's insides at one moment."""

    queue_depth: int
    queue_oldest_age: float
    queue_adds: int
    watch_lag: Mapping[str, float]
    objects: Mapping[str, int]
    phases: Mapping[str, int]
    runs: tuple[RunFacts, ...]


class Metrics:
    """Everything that is counted while it happens."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(PREFIX + name, text, tuple(labels), registry=registry)

        def histogram(
            name: str, text: str, buckets: tuple[float, ...], labels: Iterable[str] = ()
        ) -> Histogram:
            return Histogram(
                PREFIX + name, text, tuple(labels), buckets=buckets, registry=registry
            )

        build = Gauge(
            PREFIX + "build_info",
            "1, with what the operator is made of.",
            ("version", "python", "kopf"),
            registry=registry,
        )
        build.labels(
            metadata.version("evergrad-operator"),
            platform.python_version(),
            metadata.version("kopf"),
        ).set(1)
        self.reconciles = counter("reconcile", "Reconciles by result.", ("result",))
        self.reconcile_seconds = histogram(
            "reconcile_duration_seconds", "Seconds of one reconcile.", _FAST
        )
        self.reconcile_errors = counter(
            "reconcile_errors", "Reconciles that failed, by reason.", ("reason",)
        )
        self.loop_lag = histogram(
            "event_loop_lag_seconds", "How late the event loop is.", (0.001, *_FAST)
        )
        self.last_event = Gauge(
            PREFIX + "watch_last_event_timestamp_seconds",
            "When a watch last told of an object.",
            ("resource",),
            registry=registry,
        )
        self.api_requests = counter(
            "api_requests", "Requests to the API server.", ("verb", "resource", "code")
        )
        self.api_seconds = histogram(
            "api_request_duration_seconds", "Seconds of a request.", _FAST, ("verb", "resource")
        )
        self.leader = Gauge(
            PREFIX + "leader", "1 while this operator may write.", registry=registry
        )
        self.queue_seconds = histogram(
            "run_queue_seconds", "From a run's creation to its first pod.", _SLOW
        )
        self.startup_seconds = histogram(
            "run_startup_seconds", "From a run's creation to its first step.", _SLOW
        )
        self.recovery_seconds = histogram(
            "pod_replacement_seconds",
            "From a pod's end to its replacement's creation.",
            (*_FAST, 30.0, 60.0),
        )
        self.poll_failures = counter(
            "coordinator_poll_failures",
            "Questions to coordinators that were not answered, by cause.",
            ("cause",),
        )
        self.events = counter(
            "events", "Kubernetes events posted, or only counted up.", ("action",)
        )
        self.reviews = counter(
            "admission_reviews", "Answers of the validating webhook.", ("result",)
        )
        self.status_writes = counter("status_writes", "Statuses written.")
        for result in ("success", "requeue", "error"):
            self.reconciles.labels(result)

    def observe_request(self, verb: str, resource: str, code: str, seconds: float) -> None:
        """One request to the API server."""
        self.api_requests.labels(verb, resource, code).inc()
        self.api_seconds.labels(verb, resource).observe(seconds)

    def render(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)


class FactsCollector:
    """Turns ``facts``, as they were when last set, into metrics at each scrape."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are fixed, and a scrape costs too much to learn them."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All of it."""
        facts = self.facts
        yield _gauge("queue_depth", "Runs that are due and not worked on.", facts.queue_depth)
        yield _gauge(
            "queue_oldest_age_seconds",
            "How long the oldest of them waits.",
            facts.queue_oldest_age,
        )
        yield CounterMetricFamily(
            PREFIX + "queue_adds", "Keys that were put into the queue.", value=facts.queue_adds
        )
        yield _by(
            "watch_lag_seconds",
            "How far a watch is behind what the API server has answered.",
            "resource",
            facts.watch_lag,
        )
        yield _by("mirror_objects", "Objects that are known.", "resource", facts.objects)
        yield _by("runs", "Runs by phase.", "phase", facts.phases)
        yield from _collect_runs(facts.runs)


def _collect_runs(runs: Iterable[RunFacts]) -> Iterable[Metric]:
    labels = ("run_namespace", "run")
    phase = GaugeMetricFamily(
        PREFIX + "run_phase", "1 for the phase that a run is in.", labels=(*labels, "phase")
    )
    restarts = CounterMetricFamily(
        PREFIX + "run_restarts",
        "Pods that were replaced, by cause.",
        labels=(*labels, "reason"),
    )
    times = {
        name: GaugeMetricFamily(f"{PREFIX}run_{name}_timestamp_seconds", text, labels=labels)
        for name, text in (
            ("created", "When the run was created."),
            ("started", "When it started."),
            ("completed", "When it came to its end."),
            ("last_progress", "When it last took a step."),
        )
    }
    ratio = GaugeMetricFamily(PREFIX + "run_progress_ratio", "Steps done, of 1.", labels=labels)
    for run in runs:
        who = (run.namespace, run.name)
        phase.add_metric((*who, run.phase), 1)
        for cause, count in run.restarts.items():
            restarts.add_metric((*who, cause), count)
        moments = (run.created_at, run.started_at, run.completed_at, run.progressed_at)
        for family, at in zip(times.values(), moments, strict=True):
            if at is not None:
                family.add_metric(who, at)
        if run.progress is not None:
            ratio.add_metric(who, run.progress)
    yield from (phase, restarts, *times.values(), ratio)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _by(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(PREFIX + name, text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family
