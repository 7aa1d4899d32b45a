"""Keeps the Prometheus metrics up to date from the run's records and events, and serves them."""

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

from evergrad_coordinator.causes import read_change, read_trouble
from evergrad_trainer import __version__
from evergrad_trainer.observers.base import BaseObserver
from evergrad_trainer.observers.events import saved_step, seconds_of
from evergrad_trainer.observers.history import Before
from evergrad_trainer.observers.instruments import NON_FINITE, Instruments
from evergrad_trainer.observers.live_accounting import LiveAccounting
from evergrad_trainer.observers.live_state import SHORT_WINDOW_SECONDS, Rate
from evergrad_trainer.observers.metrics_server import MetricsServer
from evergrad_trainer.records import SKIP_REASONS, EvaluationRecord, Event, EventType, RunInfo, StepRecord

LOSS_WINDOW_STEPS = 10
"""The training loss is a mean of this many steps: a scrape sees one step of many, and a single one is noise."""

_LINGER_POLL_SECONDS = 0.1


class PrometheusExporter(BaseObserver):
    """Last values as gauges, all that adds up as counters; one endpoint a run, on rank 0.

    In the supervisor of a node it outlives rank 0, which may go elsewhere and come back: ``run_start`` may be heard many
    times, and no counter ever decreases.
    """

    def __init__(
        self,
        run: str,
        *,
        port: int,
        host: str = "0.0.0.0",
        linger_seconds: float = 0.0,
        before: Before | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start serving on ``port`` (0: a free one).

        ``before``: what earlier processes of the run have left. ``linger_seconds``: how long ``close`` keeps the endpoint
        up, cut short when ``should_stop`` says so. Raises ConfigurationError where the port cannot be used.
        """
        # The classic text format would show each counter's creation time as one more series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        before = before or Before()
        self._run = run
        self._metrics = Instruments(self.registry, run)
        self._live = LiveAccounting(highest_step=before.highest_step, last_time=before.last_time)
        self._published: dict[tuple[str, str], float] = {}
        self._losses: deque[float] = deque(maxlen=LOSS_WINDOW_STEPS)
        self._tokens = Rate(window_seconds=SHORT_WINDOW_SECONDS, clock=time.monotonic)
        self._samples_per_step = 0
        self._linger_seconds = linger_seconds
        self._should_stop = should_stop
        self._server = MetricsServer(self.registry, port=port, host=host)
        self.address = self._server.address
        self.port = self._server.port

    def run_start(self, info: RunInfo) -> None:
        metrics, run = self._metrics, self._run
        self._samples_per_step = info.samples_per_step
        self._live.begin(highest_step=info.highest_step, last_time=info.last_time, takes_over=info.takes_over)
        self._losses.clear()
        self._tokens = Rate(window_seconds=SHORT_WINDOW_SECONDS, clock=time.monotonic)
        if info.takes_over:
            metrics.forget_gauges()
        for gauge in (metrics.info, metrics.exit_code):
            gauge.clear()
        metrics.info.labels(
            run=run,
            attempt=str(info.generation),
            model=info.model,
            precision=info.precision,
            parallelism=info.parallelism,
            framework_version=f"torch {metadata.version('torch')}",
            image_version=__version__,
        ).set(1)
        metrics.step.labels(run).set(info.start_step)
        metrics.max_steps.labels(run).set(info.total_steps)
        metrics.world_size.labels(run).set(info.world_size)

    def rank_0_left(self) -> None:
        """Rank 0 is on another node now, whose endpoint has the last values."""
        self._metrics.forget_gauges()

    def step_end(self, record: StepRecord) -> None:
        metrics, run = self._metrics, self._run
        if record.skipped is None:
            # A step without an update has no loss or norm worth showing: neither would be a number.
            self._losses.append(record.loss)
            metrics.loss.labels(run, "train", "").set(sum(self._losses) / len(self._losses))
            metrics.grad_norm.labels(run).set(record.grad_norm)
            for name, value in record.metrics.items():
                metrics.task_metric.labels(run, name).set(value)
        self._tokens.add(record.tokens, first_seconds=record.step_seconds)
        metrics.step.labels(run).set(record.step)
        metrics.steps.labels(run).inc()
        metrics.tokens.labels(run).inc(record.tokens)
        metrics.samples.labels(run).inc(self._samples_per_step)
        metrics.tokens_per_second.labels(run).set(self._tokens.per_second)
        metrics.learning_rate.labels(run).set(record.learning_rate)
        metrics.world_size.labels(run).set(record.world_size)
        metrics.step_duration.labels(run).observe(record.step_seconds)
        metrics.rank_skew.labels(run).set(record.rank_skew_seconds)
        metrics.last_step_timestamp.labels(run).set(record.time)
        self._live.step(record)
        self._publish()

    def evaluation_end(self, record: EvaluationRecord) -> None:
        self._metrics.loss.labels(self._run, "eval", record.name).set(record.loss)
        self._metrics.eval_metric.labels(self._run, record.name, "perplexity").set(record.perplexity)
        for name, value in record.metrics.items():
            self._metrics.eval_metric.labels(self._run, record.name, name).set(value)
        self._live.evaluation(record)
        self._publish()

    def event(self, event: Event) -> None:
        metrics, run = self._metrics, self._run
        self._live.event(event)
        if event.type == EventType.SAVE:
            self._saved(event)
        elif event.type == EventType.SAVE_FAILED:
            metrics.checkpoint_failures.labels(run, "save", read_trouble(event.fields.get("trouble"))).inc()
            metrics.checkpoint_blocking.labels(run).inc(seconds_of(event, "blocking_seconds"))
        elif event.type == EventType.FALLBACK:
            metrics.checkpoint_failures.labels(run, "load", "invalid").inc()
        elif event.type == EventType.RESTORED:
            metrics.checkpoint_duration.labels(run, "load", "sync").observe(seconds_of(event, "seconds"))
        elif event.type == EventType.EXTENDED:
            metrics.max_steps.labels(run).set(float(event.fields["to_steps"]))
        elif event.type in (EventType.SKIPPED, EventType.NON_FINITE):
            why = str(event.fields.get("why"))
            if why in NON_FINITE:
                metrics.nonfinite.labels(run, why).inc()
            if event.type == EventType.SKIPPED and why in SKIP_REASONS:
                metrics.skipped_steps.labels(run, why).inc()
        elif event.type == EventType.WORLD:
            metrics.world_changes.labels(run, read_change(event.fields.get("cause"))).inc()
            metrics.world_size.labels(run).set(float(event.fields["world_size"]))
            # What has ended was one process; the run goes on.
            metrics.exit_code.clear()
        elif event.type == EventType.END:
            metrics.exit_code.labels(run).set(float(event.fields["exit_code"]))
        self._publish()

    def _saved(self, event: Event) -> None:
        metrics, run = self._metrics, self._run
        seconds, blocking = seconds_of(event, "seconds"), seconds_of(event, "blocking_seconds")
        metrics.checkpoint_duration.labels(
            run, "save", "sync" if blocking >= 0.9 * seconds else "async"
        ).observe(seconds)
        metrics.checkpoint_blocking.labels(run).inc(blocking)
        metrics.checkpoint_size.labels(run).set(seconds_of(event, "bytes"))
        metrics.checkpoint_last_success.labels(run).set(event.time)
        metrics.checkpoint_last_step.labels(run).set(saved_step(event))

    def _publish(self) -> None:
        """Bring the counters up to the live accounts."""
        metrics, run, live = self._metrics, self._run, self._live
        self._increase("productive", "", live.productive, metrics.productive.labels(run).inc)
        for cause, seconds in live.lost.items():
            self._increase("lost", cause, seconds, metrics.lost.labels(run, cause).inc)
        for phase, seconds in live.phases.items():
            self._increase("phase", phase, seconds, metrics.phase_seconds.labels(run, phase).inc)

    def _increase(self, family: str, label: str, total: float, add: Callable[[float], None]) -> None:
        add(total - self._published.get((family, label), 0.0))
        self._published[family, label] = total

    def close(self) -> None:
        """Keep serving for the lingering time, so that the last values are scraped, then stop."""
        until = time.monotonic() + self._linger_seconds
        while time.monotonic() < until and not self._should_stop():
            time.sleep(min(_LINGER_POLL_SECONDS, max(0.0, until - time.monotonic())))
        self._server.close()
