"""The operator's metrics, built from the catalogue evergrad_common.metrics.OPERATOR.

Metrics of runs are computed from the informer cache at each scrape, so that they end with their runs.
"""

import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from evergrad_common.metrics import OPERATOR, Series
from evergrad_operator.core.observe.facts import RunFacts

_CATALOGUE: Final[Mapping[str, Series]] = {
    one.name.removeprefix("operator_"): one for one in OPERATOR
}
_TIMES: Final[tuple[str, ...]] = ("created", "started", "completed", "last_progress")


@dataclass(frozen=True)
class RunFactsSource:
    """Facts about the operator's queue, cache and runs at one moment."""

    queue_depth: int
    queue_oldest_age: float
    queue_adds: int
    watch_lag: Mapping[str, float]
    objects: Mapping[str, int]
    phases: Mapping[str, int]
    runs: tuple[RunFacts, ...]


class OperatorMetrics:
    """Metrics that are updated when events happen, in a separate registry."""

    def __init__(self, *, revision: str = "unknown") -> None:
        """``revision``: the commit that this program was built from."""
        # Disable the second series of each counter with its creation time, which would double the scrape.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        # Export memory and CPU time of this process under the standard names of Prometheus clients.
        ProcessCollector(registry=self.registry)
        build = self._gauge("build_info")
        build.labels(
            metadata.version("evergrad-operator"),
            revision,
            platform.python_version(),
            metadata.version("kopf"),
        ).set(1)
        self.leader = self._gauge("leader")
        self.last_event = self._gauge("watch_last_event_timestamp_seconds")
        self.reconciles = self._counter("reconcile_total")
        self.reconcile_seconds = self._histogram("reconcile_duration_seconds")
        self.reconcile_errors = self._counter("reconcile_errors_total")
        self.loop_lag = self._histogram("event_loop_lag_seconds")
        self.api_requests = self._counter("api_requests_total")
        self.api_seconds = self._histogram("api_request_duration_seconds")
        self.queue_seconds = self._histogram("run_queue_seconds")
        self.startup_seconds = self._histogram("run_startup_seconds")
        self.recovery_seconds = self._histogram("pod_replacement_seconds")
        self.poll_failures = self._counter("coordinator_poll_failures_total")
        self.events = self._counter("events_total")
        self.reviews = self._counter("admission_reviews_total")
        self.status_writes = self._counter("status_writes_total")
        # Create the series with 0. If a counter first appears with 1, ``rate`` misses that increase.
        for result in ("success", "requeue", "error"):
            self.reconciles.labels(result)

    def observe_request(
        self,
        verb: str,
        resource: str,
        code: str,
        seconds: float,
    ) -> None:
        """Count one request to the API server."""
        self.api_requests.labels(verb, resource, code).inc()
        self.api_seconds.labels(verb, resource).observe(seconds)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str) -> Counter:
        one = _CATALOGUE[name]
        return Counter(
            one.exported,
            _help(one),
            one.labels,
            registry=self.registry,
        )

    def _gauge(self, name: str) -> Gauge:
        one = _CATALOGUE[name]
        return Gauge(
            one.exported,
            _help(one),
            one.labels,
            registry=self.registry,
        )

    def _histogram(self, name: str) -> Histogram:
        one = _CATALOGUE[name]
        return Histogram(
            one.exported,
            _help(one),
            one.labels,
            buckets=one.buckets,
            registry=self.registry,
        )


class FactsCollector:
    """Converts ``facts`` into metrics at each scrape. Set ``facts`` before the scrape."""

    def __init__(self, facts: RunFactsSource, *, labels: Sequence[str] = ()) -> None:
        """``labels``: names of the runs' labels that are exported."""
        self.facts = facts
        self._labels = tuple(labels)
        self._shown: dict[tuple[str, ...], float] = {}
        """Seconds of each use in the last scrape."""

    def describe(self) -> Iterable[Metric]:
        """Return nothing. Otherwise the registration would call ``collect`` to find the names."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of queue and cache, then the metrics of the runs."""
        facts = self.facts
        yield _gauge_family("queue_depth", {(): facts.queue_depth})
        yield _gauge_family("queue_oldest_age_seconds", {(): facts.queue_oldest_age})
        adds = _CATALOGUE["queue_adds_total"]
        yield CounterMetricFamily(adds.exported, _help(adds), value=facts.queue_adds)
        for name, values in (
            ("watch_lag_seconds", facts.watch_lag),
            ("mirror_objects", facts.objects),
            ("runs", facts.phases),
        ):
            yield _gauge_family(name, {(key,): value for key, value in values.items()})
        yield from self._collect_runs(facts.runs)
        yield from self._collect_usage(facts.runs)
        yield self._collect_labels(facts.runs)

    @staticmethod
    def _collect_runs(runs: Iterable[RunFacts]) -> Iterable[Metric]:
        """Yield the metrics from the statuses of the runs."""
        # Use one family per metric for all runs, because a family may occur only once in a scrape.
        restarts = _counter_family("run_restarts_total")
        replaced = _counter_family("run_pods_replaced_total")
        phase = _gauge_family("run_phase")
        info = _gauge_family("run_info")
        waits = _gauge_family("run_waiting")
        stalled = _gauge_family("run_stalled")
        ratio = _gauge_family("run_progress_ratio")
        times = [_gauge_family(f"run_{name}_timestamp_seconds") for name in _TIMES]
        evaluated = _gauge_family("run_evaluation_value")
        step = _gauge_family("run_evaluation_step")
        waiting = _gauge_family("run_evaluations_waiting")
        nodes = _gauge_family("run_nodes")
        most = _gauge_family("run_nodes_max")
        prepared = _gauge_family("run_preparation_ratio")
        tokens = _gauge_family("run_preparation_tokens")
        for run in runs:
            labels = (run.namespace, run.name)
            phase.add_metric((*labels, run.phase), 1)
            info.add_metric((*labels, run.kind), 1)
            if run.waiting_reason:
                waits.add_metric((*labels, run.waiting_reason), 1)
            if run.stalled_reason:
                stalled.add_metric((*labels, run.stalled_reason), 1)
            replaced.add_metric(labels, run.replaced)
            for cause, count in run.restarts.items():
                restarts.add_metric((*labels, cause), count)
            moments = (run.created_at, run.started_at, run.completed_at, run.progressed_at)
            # Omit a time that is not set, because 0 would be a date in 1970.
            for family, at in zip(times, moments, strict=True):
                if at is not None:
                    family.add_metric(labels, at)
            if run.progress is not None:
                ratio.add_metric(labels, run.progress)
            if run.evaluated_step is not None:
                step.add_metric(labels, run.evaluated_step)
            if run.waiting is not None:
                waiting.add_metric(labels, run.waiting)
            for (name, metric), value in run.evaluated.items():
                evaluated.add_metric((*labels, name, metric), value)
            for state, count in run.nodes.items():
                nodes.add_metric((*labels, state), count)
            if run.nodes_max is not None:
                most.add_metric(labels, run.nodes_max)
            if run.work:
                prepared.add_metric((*labels, run.work), run.prepared)
                tokens.add_metric(labels, run.prepared_tokens)
        yield from (phase, info, waits, stalled, restarts, replaced, *times, ratio)
        yield from (nodes, most, prepared, tokens, step, evaluated, waiting)

    def _collect_usage(self, runs: Iterable[RunFacts]) -> Iterable[Metric]:
        """Yield the seconds of pods and accelerators.

        If the end of a pod is observed late, its time decreases. A counter must not decrease, so it keeps its
        value until the time has reached this value again.
        """
        shown: dict[tuple[str, ...], float] = {}
        for kind in ("pod", "gpu"):
            entry = _CATALOGUE[f"run_{kind}_seconds_total"]
            family = CounterMetricFamily(entry.exported, _help(entry), labels=entry.labels)
            for run in runs:
                usage = run.usage
                counts = usage.pods if kind == "pod" else usage.accelerators
                for cause, milliseconds in counts.items():
                    # The uid is part of the key, so that a run that is created again starts at 0.
                    place = (kind, run.namespace, run.name, run.uid, cause)
                    shown[place] = max(milliseconds / 1000, self._shown.get(place, 0.0))
                    family.add_metric((run.namespace, run.name, cause), shown[place])
            yield family
        self._shown = shown

    def _collect_labels(self, runs: Iterable[RunFacts]) -> Metric:
        """Return the labels of the runs. Their names are converted to valid names of Prometheus labels."""
        entry = _CATALOGUE["run_labels"]
        by_column = {
            "label_" + re.sub(r"\W", "_", key, flags=re.ASCII): key for key in self._labels
        }
        family = GaugeMetricFamily(
            entry.exported, _help(entry), labels=(*entry.labels, *by_column)
        )
        for run in runs:
            values = [run.labels.get(key, "") for key in by_column.values()]
            if any(values):
                family.add_metric((run.namespace, run.name, *values), 1)
        return family


def _counter_family(name: str) -> CounterMetricFamily:
    one = _CATALOGUE[name]
    return CounterMetricFamily(one.exported, _help(one), labels=one.labels)


def _gauge_family(
    name: str, values: Mapping[tuple[str, ...], float] | None = None
) -> GaugeMetricFamily:
    one = _CATALOGUE[name]
    family = GaugeMetricFamily(one.exported, _help(one), labels=one.labels)
    for labels, value in (values or {}).items():
        family.add_metric(labels, value)
    return family


def _help(one: Series) -> str:
    return f"{one.help}."
