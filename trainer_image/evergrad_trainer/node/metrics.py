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
        self._steps = _Steps()
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

    def report(self, report: dict[str, object]) -> Progress | None:
        """A script's own report; the progress it makes, or None where it is not rank 0's."""
        if report.get("rank", 0) != 0:
            return None
        if isinstance(report.get("checkpoint_step"), int):
            self._checkpoint_step = int(str(report["checkpoint_step"]))
        total, per_second, loss = (_number(report.get(name)) for name in ("total_steps", "tokens_per_second", "loss"))
        step = int(str(report["step"]))
        eta = self._steps.remaining_seconds(step, None if total is None else int(total))
        self.progress = Progress(
            generation=int(_number(report.get("generation")) or 0),
            step=step,
            total_steps=None if total is None else int(total),
            loss=loss,
            tokens_per_second=per_second,
            eta_seconds=eta,
            checkpoint_step=self._checkpoint_step,
        )
        self._with(lambda series: series.show(self.progress))
        return self.progress

    def rank_0_left(self) -> None:
        """Rank 0 is on another node now: what this one knows of the run is old."""
        self.progress = None
        if self._exporter is not None:
            self._exporter.rank_0_left()

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


class _Steps:
    """How fast a script's steps go by, from its reports alone."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def remaining_seconds(self, step: int, total: int | None) -> float | None:
        now = time.monotonic()
        if self._first is None or step < self._first[0]:
            self._first = (step, now)
        done, seconds = step - self._first[0], now - self._first[1]
        return None if total is None or done <= 0 else (total - step) * seconds / done


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


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
        self._script = {
            name: Gauge(f"evergrad_script_{name}", text, labels, registry=registry)
            for name, text in (
                ("step", "Step of a script, as it reports it."),
                ("loss", "Loss of a script, as it reports it."),
                ("tokens_per_second", "Speed of a script, as it reports it."),
            )
        }
        self.breaks = Counter(
            "evergrad_node_breaks_total", "Times a group broke, as this node saw it.", (*labels, "cause"), registry=registry
        )

    def show(self, progress: Progress | None) -> None:
        """A script's progress."""
        for name, gauge in self._script.items():
            value = getattr(progress, name)
            if value is not None:
                gauge.labels(self.run, self.node).set(value)


def _step_of(checkpoint: str) -> int | None:
    digits = checkpoint.removeprefix("step-").split(".", 1)[0]
    return int(digits) if digits.isdecimal() else None
