"""Updates the Prometheus metrics from the run's records and events, and serves them."""

import time
from collections import deque
from collections.abc import Callable
from importlib import metadata

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

from evergrad_common.addresses import ANY
from evergrad_common.causes import SKIPS, read_change, read_trouble
from evergrad_common.metrics import Throughput
from evergrad_trainer import __version__
from evergrad_trainer.base.records import (
    EvaluationRecord,
    Event,
    EventType,
    RunInfo,
    StepRecord,
)
from evergrad_trainer.observers.base import BaseObserver
from evergrad_trainer.observers.events import describe_metrics, saved_step, seconds_of
from evergrad_trainer.observers.goodput import CAUSES
from evergrad_trainer.observers.history import Before
from evergrad_trainer.observers.instruments import KINDS, NON_FINITE, Instruments
from evergrad_trainer.observers.metrics_server import MetricsServer
from evergrad_trainer.observers.time_account import Account
from evergrad_trainer.observers.utilisation import flops_per_second, utilisation

LOSS_WINDOW_STEPS = 10
"""Number of steps over which the training loss is averaged. A scrape reads one of many steps, and the loss of
a single step is noisy."""

MOST_STEPS = 2**20
"""Number of steps whose seconds are stored (16 MiB), so that a restart can subtract them. No run keeps an
older checkpoint."""
_LINGER_POLL_SECONDS = 0.1


class PrometheusExporter(BaseObserver):
    """Observer that exports last values as gauges and sums as counters; one endpoint per run, on rank 0.

    In the supervisor of a node the exporter outlives rank 0, which may move to another node and return.
    Therefore ``run_start`` may be called many times, and counters never decrease.
    """

    def __init__(
        self,
        run: str,
        *,
        port: int,
        host: str = ANY,
        linger_seconds: float = 0.0,
        before: Before | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start serving on ``port`` (0: a free one).

        ``before``: facts about earlier processes of the run. ``linger_seconds``: how long ``close`` keeps the
        endpoint open, unless ``should_stop`` returns true earlier. Raises ConfigurationError if the port
        cannot be used.
        """
        # In the classic text format, the creation time of each counter would be an additional series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        # Use a separate registry, so that several exporters in one process, as in tests, do not conflict.
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        before = before or Before()
        self._metrics = Instruments(self.registry, run)
        self._account = Account(
            highest_step=before.highest_step,
            last_time=before.last_time,
            most_steps=MOST_STEPS,
        )
        self._other_in_steps = 0.0
        """Seconds of the steps that belong to no phase."""
        self._published: dict[tuple[str, ...], float] = {}
        self._losses: deque[float] = deque(maxlen=LOSS_WINDOW_STEPS)
        self._throughput = Throughput()
        self._samples_per_step = 0
        self._info: RunInfo | None = None
        self._linger_seconds = linger_seconds
        self._should_stop = should_stop
        # Start the server last, because from here on a scraper may read the metrics.
        self._server = MetricsServer(self.registry, port=port, host=host)
        self.address = self._server.address
        self.port = self._server.port

    def run_start(self, info: RunInfo) -> None:
        metrics = self._metrics
        self._info = info
        self._samples_per_step = info.samples_per_step
        self._account.add(info)
        # Do not mix the values of another rank 0 into means and rates.
        self._losses.clear()
        self._throughput = Throughput()
        if info.takes_over:
            metrics.forget_gauges()
        # These belong to the previous process. With two info series, a join would match twice.
        metrics.clear("info", "exit_code")
        if info.metrics:
            metrics.describe("task_metric", f": {describe_metrics(info.metrics)}")
        versions = (f"torch {metadata.version('torch')}", __version__)
        metrics.set(
            "info",
            1,
            str(info.generation),
            info.model,
            info.precision,
            info.parallelism,
            *versions,
        )
        metrics.set("step", info.start_step)
        metrics.set("max_steps", info.total_steps)
        metrics.set("world_size", info.world_size)

    def rank_0_left(self) -> None:
        """Remove the gauges, because rank 0 is on another node now, whose endpoint exports them."""
        self._metrics.forget_gauges()

    def step_end(self, record: StepRecord) -> None:
        metrics = self._metrics
        if record.skipped is None:
            # A step without an update has no finite loss or norm.
            self._losses.append(record.loss)
            metrics.set(
                "loss",
                sum(self._losses) / len(self._losses),
                "train",
                "",
            )
            metrics.set("grad_norm", record.grad_norm)
            for name, value in record.metrics.items():
                metrics.set("task_metric", value, name)
        per_second = self._throughput.add(
            generation=record.generation,
            tokens=record.tokens,
            step_seconds=record.step_seconds,
            time=record.time,
        )
        metrics.set("step", record.step)
        metrics.add("steps_total", 1)
        metrics.add("tokens_total", record.tokens)
        metrics.add("samples_total", self._samples_per_step)
        metrics.set("tokens_per_second", per_second)
        if self._info is not None:
            for name, share in (
                ("flops_per_second", flops_per_second(self._info, record)),
                ("mfu_ratio", utilisation(self._info, record)),
            ):
                if share is not None:
                    metrics.set(name, share)
        metrics.set("learning_rate", record.learning_rate)
        if record.loss_scale is not None:
            metrics.set("loss_scale", record.loss_scale)
        metrics.set("world_size", record.world_size)
        metrics.observe("step_duration_seconds", record.step_seconds)
        metrics.set("rank_step_skew_seconds", record.rank_skew_seconds)
        metrics.set("last_step_timestamp_seconds", record.time)
        # Phases that the step measures. The time between steps is in the accounts.
        for phase, seconds in (
            ("data", record.data_seconds),
            ("forward_backward", record.forward_backward_seconds),
            ("comm_wait", record.communication_seconds),
            ("optimizer", record.optimizer_seconds),
        ):
            metrics.add("step_phase_seconds_total", seconds, phase)
        self._other_in_steps += record.other_seconds
        self._account.add(record)
        self._publish()

    def evaluation_end(self, record: EvaluationRecord) -> None:
        self._metrics.set("loss", record.loss, "eval", record.name)
        self._metrics.set(
            "eval_metric",
            record.perplexity,
            record.name,
            "perplexity",
        )
        for name, value in record.metrics.items():
            self._metrics.set("eval_metric", value, record.name, name)
        self._account.add(record)
        self._publish()

    def event(self, event: Event) -> None:
        metrics = self._metrics
        self._account.add(event)
        # Count events. The event of a save contains its duration and step.
        if event.type == EventType.SAVE:
            seconds = seconds_of(event, "seconds")
            blocking = seconds_of(event, "blocking_seconds")
            # A save that blocked for at least 90 % of its duration was not a background save.
            mode = "sync" if blocking >= 0.9 * seconds else "async"
            metrics.observe("checkpoint_duration_seconds", seconds, "save", mode)
            metrics.add("checkpoint_blocking_seconds_total", blocking)
            metrics.set("checkpoint_size_bytes", seconds_of(event, "bytes"))
            metrics.set("checkpoint_last_success_timestamp_seconds", event.time)
            metrics.set("checkpoint_last_step", saved_step(event))
        elif event.type == EventType.SAVE_FAILED:
            metrics.add(
                "checkpoint_failures_total",
                1,
                "save",
                read_trouble(event.fields.get("trouble")),
            )
            metrics.add(
                "checkpoint_blocking_seconds_total", seconds_of(event, "blocking_seconds")
            )
        elif event.type == EventType.FALLBACK:
            metrics.add("checkpoint_failures_total", 1, "load", "invalid")
        elif event.type == EventType.RESTORED:
            metrics.observe(
                "checkpoint_duration_seconds", seconds_of(event, "seconds"), "load", "sync"
            )
        elif event.type == EventType.EXTENDED:
            metrics.set("max_steps", float(event.fields["to_steps"]))
        elif event.type in (EventType.SKIPPED, EventType.NON_FINITE):
            why = str(event.fields.get("why"))
            if why in NON_FINITE:
                metrics.add("nonfinite_total", 1, why)
            if event.type == EventType.SKIPPED and why in SKIPS:
                metrics.add("skipped_steps_total", 1, why)
        elif event.type == EventType.ALERT:
            if event.fields.get("monitor") in KINDS:
                metrics.add("alerts_total", 1, str(event.fields["monitor"]))
        elif event.type == EventType.WORLD:
            metrics.add("world_changes_total", 1, read_change(event.fields.get("cause")))
            metrics.set("world_size", float(event.fields["world_size"]))
            # Only one process has ended; the run continues.
            metrics.clear("exit_code")
        elif event.type == EventType.END:
            metrics.set("exit_code", float(event.fields["exit_code"]))
        self._publish()

    def _publish(self) -> None:
        """Update the counters from the current accounts."""
        seconds = self._account.seconds(only_settled=True)
        self._raise("productive_seconds_total", seconds["productive"])
        for cause in CAUSES:
            self._raise("lost_seconds_total", seconds[cause], cause)
        between = seconds["other"] + seconds["reconfiguration"]
        for phase, total in (
            ("checkpoint", seconds["checkpoint"]),
            ("eval", seconds["evaluation"]),
            ("other", self._other_in_steps + between),
        ):
            self._raise("step_phase_seconds_total", total, phase)

    def _raise(self, name: str, total: float, *labels: str) -> None:
        """Raise a counter to ``total``.

        A counter must not decrease. If the accounts subtract seconds, because steps were lost or a save is
        reported late, the counter stays until ``total`` exceeds it again.
        """
        published = self._published.get((name, *labels), 0.0)
        if total > published:
            self._metrics.add(name, total - published, *labels)
            self._published[name, *labels] = total

    def close(self) -> None:
        """Serve the metrics for ``linger_seconds``, then stop."""
        # Scrapers read at intervals, and would otherwise miss the final values.
        until = time.monotonic() + self._linger_seconds
        while time.monotonic() < until and not self._should_stop():
            time.sleep(min(_LINGER_POLL_SECONDS, max(0.0, until - time.monotonic())))
        self._server.close()
