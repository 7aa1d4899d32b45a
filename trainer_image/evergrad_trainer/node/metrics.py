"""The node's one Prometheus endpoint: the run's series where rank 0 is, and the node's own. Lives through every restart."""

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import Counter, Gauge

from evergrad_coordinator.protocol import Progress
from evergrad_trainer.observers.live_state import SHORT_WINDOW_SECONDS, Rate
from evergrad_trainer.observers.prometheus import PrometheusExporter
from evergrad_trainer.observers.relay import tell


class NodeMetrics:
    """Hears what the node's workers and its supervisor tell; serves it where there is an exporter."""

    def __init__(self, run: str, node: str, exporter: PrometheusExporter | None = None) -> None:
        self._exporter = exporter
        self._rate = Rate(window_seconds=SHORT_WINDOW_SECONDS, clock=time.monotonic)
        self._total_steps: int | None = None
        self._checkpoint_step: int | None = None
        self.progress: Progress | None = None
        """Where training is, as rank 0 said last; None where rank 0 never was on this node."""
        self._series: _Series | None = None if exporter is None else _Series(exporter, run, node)

    def tell(self, kind: str, record: dict[str, Any]) -> None:
        """A record of rank 0."""
        if self._exporter is not None:
            tell(self._exporter, kind, record)
        if kind == "run_start":
            self._total_steps = int(record["total_steps"])
        elif kind == "event" and record.get("type") == "save":
            self._checkpoint_step = _step_of(str(record.get("checkpoint", "")))
        elif kind == "step_end":
            self._rate.add(record["tokens"], first_seconds=record["step_seconds"])
            self.progress = self._describe(record)

    def worker_started(self) -> None:
        self._with(lambda series: series.starts.inc())

    def set_workers(self, count: int) -> None:
        self._with(lambda series: series.workers.set(count))

    def set_generation(self, generation: int) -> None:
        self._with(lambda series: series.generation.set(generation))

    def broken(self, cause: str) -> None:
        self._with(lambda series: series.breaks.labels(series.run, series.node, cause).inc())

    def close(self) -> None:
        """Serve for the lingering time, then stop."""
        if self._exporter is not None:
            self._exporter.close()

    def _with(self, act: Callable[["_Series"], object]) -> None:
        if self._series is not None:
            act(self._series)

    def _describe(self, record: dict[str, Any]) -> Progress:
        step, per_second = int(record["step"]), self._rate.per_second
        left = None if self._total_steps is None or not per_second else (self._total_steps - step) * record["tokens"] / per_second
        return Progress(
            generation=int(record["generation"]),
            step=step,
            total_steps=self._total_steps,
            loss=float(record["loss"]),
            tokens_per_second=per_second,
            eta_seconds=left,
            checkpoint_step=self._checkpoint_step,
        )


class _Series:
    """The node's own series; labels as everywhere: run, and the node's index."""

    def __init__(self, exporter: PrometheusExporter, run: str, node: str) -> None:
        self.run, self.node = run, node
        labels, registry = ("run", "node"), exporter.registry
        self.workers = Gauge("evergrad_node_workers", "Workers of this node that can train.", labels, registry=registry).labels(
            run, node
        )
        self.generation = Gauge(
            "evergrad_node_generation", "Generation this node trained in last.", labels, registry=registry
        ).labels(run, node)
        self.starts = Counter(
            "evergrad_node_worker_starts_total", "Worker processes this node has started.", labels, registry=registry
        ).labels(run, node)
        self.breaks = Counter(
            "evergrad_node_breaks_total", "Times a group broke, as this node saw it.", (*labels, "cause"), registry=registry
        )


def _step_of(checkpoint: str) -> int | None:
    digits = checkpoint.removeprefix("step-").split(".", 1)[0]
    return int(digits) if digits.isdecimal() else None
