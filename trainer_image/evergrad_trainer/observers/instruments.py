"""The names, types, labels and buckets of the trainer's Prometheus metrics. docs/reference/metrics.md lists them."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from evergrad_coordinator.causes import CHANGES, LOSSES, TROUBLES
from evergrad_trainer.observers.live_accounting import PHASES
from evergrad_trainer.records import SKIP_REASONS

STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
CHECKPOINT_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)
NON_FINITE = ("loss", "grad")


class Instruments:
    """All metrics of one run in one registry. Counters begin at 0 at once; a gauge appears with its first value."""

    def __init__(self, registry: CollectorRegistry, run: str) -> None:
        self._registry = registry
        self._gauges: list[Gauge] = []
        self.info = self._gauge("info", "Facts about the run, for joins", "attempt", "model", "precision", "parallelism",
                                "framework_version", "image_version")  # fmt: skip
        self.step = self._gauge("step", "Last finished optimizer step")
        self.max_steps = self._gauge("max_steps", "Optimizer steps the run is to reach")
        self.steps = self._counter(
            "steps_total", "Optimizer steps this process has finished, repeated ones included"
        )
        self.tokens = self._counter(
            "tokens_total", "Tokens trained on, over all processes of the run together"
        )
        self.samples = self._counter(
            "samples_total", "Samples trained on, over all processes of the run together"
        )
        self.tokens_per_second = self._gauge(
            "tokens_per_second", "Tokens a second of wall time, over the last minute"
        )
        self.loss = self._gauge(
            "loss", "Nats a token: mean of the last 10 steps, or last evaluation", "split", "dataset"
        )
        self.eval_metric = self._gauge(
            "eval_metric", "Last value of another evaluation metric", "dataset", "metric"
        )
        self.task_metric = self._gauge("task_metric", "What the recipe measures, of the last step", "metric")
        self.grad_norm = self._gauge("grad_norm", "Global gradient norm of the last step, before clipping")
        self.learning_rate = self._gauge("learning_rate", "Learning rate of the last step")
        self.world_size = self._gauge("world_size", "Processes that train together")
        self.step_duration = self._histogram(
            "step_duration_seconds", "Wall time of an optimizer step", STEP_BUCKETS
        )
        self.phase_seconds = self._counter(
            "step_phase_seconds_total", "Wall time since the first step, by its use", "phase"
        )
        self.rank_skew = self._gauge(
            "rank_step_skew_seconds", "How much longer the slowest rank computed than the median one"
        )
        self.last_step_timestamp = self._gauge(
            "last_step_timestamp_seconds", "Unix time of the end of the last step"
        )
        self.nonfinite = self._counter(
            "nonfinite_total", "Steps refused because a loss or a gradient was not finite", "what"
        )
        self.skipped_steps = self._counter("skipped_steps_total", "Steps that made no update", "why")
        self.checkpoint_duration = self._histogram(
            "checkpoint_duration_seconds",
            "Wall time of a save or load, background work included",
            CHECKPOINT_BUCKETS,
            "op",
            "mode",
        )
        self.checkpoint_blocking = self._counter(
            "checkpoint_blocking_seconds_total", "Seconds training stood still for saves"
        )
        self.checkpoint_size = self._gauge("checkpoint_size_bytes", "Size of the last checkpoint")
        self.checkpoint_last_success = self._gauge(
            "checkpoint_last_success_timestamp_seconds",
            "Unix time at which the last checkpoint was published",
        )
        self.checkpoint_last_step = self._gauge("checkpoint_last_step", "Step of the last checkpoint")
        self.checkpoint_failures = self._counter(
            "checkpoint_failures_total", "Checkpoint operations that failed", "op", "reason"
        )
        self.productive = self._counter(
            "productive_seconds_total", "Seconds in steps that were not trained before"
        )
        self.lost = self._counter("lost_seconds_total", "Seconds not in such steps, by cause", "cause")
        self.world_changes = self._counter(
            "world_changes_total",
            "Times training went on in another world without reading a checkpoint",
            "cause",
        )
        self.exit_code = self._gauge("exit_code", "Exit code of the trainer, once it has ended")
        self._begin_at_zero(run)

    def _begin_at_zero(self, run: str) -> None:
        """A counter that first appears with a value above 0 hides that increase from ``rate``."""
        for counter in (self.steps, self.tokens, self.samples, self.checkpoint_blocking, self.productive):
            counter.labels(run)
        for phase in PHASES:
            self.phase_seconds.labels(run, phase)
        for cause in LOSSES:
            self.lost.labels(run, cause)
        for change in CHANGES:
            self.world_changes.labels(run, change)
        for what in NON_FINITE:
            self.nonfinite.labels(run, what)
        for why in SKIP_REASONS:
            self.skipped_steps.labels(run, why)
        for reason in TROUBLES:
            self.checkpoint_failures.labels(run, "save", reason)
        self.checkpoint_failures.labels(run, "load", "invalid")

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        gauge = Gauge(f"evergrad_{name}", f"{text}.", ("run", *labels), registry=self._registry)
        self._gauges.append(gauge)
        return gauge

    def forget_gauges(self) -> None:
        """Last values of what goes on elsewhere by now would be wrong; counters stay."""
        for gauge in self._gauges:
            gauge.clear()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"evergrad_{name}", f"{text}.", ("run", *labels), registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(
            f"evergrad_{name}", f"{text}.", ("run", *labels), buckets=buckets, registry=self._registry
        )
