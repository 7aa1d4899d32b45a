"""The node's only Prometheus endpoint. It exports the node's own series and, on the node of rank 0, the
series of the run.

It survives all restarts of workers.
"""

import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge

from evergrad.report_values import read_values
from evergrad_common.causes import read_trouble
from evergrad_common.metrics import NODE, SHOWN, Throughput
from evergrad_common.step_rate import Pace
from evergrad_coordinator.protocol import MAX_GENERATION, EvaluationReport, Progress
from evergrad_trainer.base.device_memory import KINDS as MEMORY_KINDS
from evergrad_trainer.base.device_memory import Sizes
from evergrad_trainer.base.records import EventType
from evergrad_trainer.checkpoint.layout import parse_checkpoint_name
from evergrad_trainer.node.workers import Worker
from evergrad_trainer.observers.events import parse_event_row, seconds_of
from evergrad_trainer.observers.instruments import build_series
from evergrad_trainer.observers.prometheus import PrometheusExporter
from evergrad_trainer.observers.relay import deliver

_log = logging.getLogger(__name__)
_MOST_SETS = 16
_MOST_RESULTS = 8
_LONGEST_REASON = 512
"""Longest reason of a failed save, in characters: the error of one rank with its path."""
_MOST_CHARACTERS = 64
"""Bounds of the evaluations in a message: about 12 KB of the 64 KB that a line may have."""


class NodeMetrics:
    """Collects the reports of the node's workers and supervisor, and serves them if there is an exporter."""

    def __init__(
        self,
        run: str,
        node: str,
        exporter: PrometheusExporter | None = None,
        *,
        hurry: threading.Event | None = None,
    ) -> None:
        """``hurry``: the exporter checks this event; set it if the process must end without lingering."""
        self._exporter = exporter
        self.hurry = hurry or threading.Event()
        self._warned: set[str] = set()
        """Names of reported values that were left out before, so that each is logged once."""
        self._throughput = Throughput()
        self._total_steps: int | None = None
        self._checkpoint_step: int | None = None
        self._failed_saves: int | None = None
        """Number of failed saves in a row; None if no save has ended on this node."""
        self._save_trouble = self._save_message = ""
        self._evaluations: dict[str, EvaluationReport] = {}
        """The newest results of each set; at most _MOST_SETS sets."""
        self._evaluation_seconds = self._saving_seconds = 0.0
        """Seconds in which training paused for evaluations and saves, from records; scripts send no such
        records."""
        self._pace = Pace()
        self.progress: Progress | None = None
        """Newest progress that rank 0 reported; None while rank 0 is not on this node."""
        self._workers: dict[int, Worker] = {}
        """The newest process of each local rank."""
        self._series: _Series | None = (
            None if exporter is None else _Series(exporter, run, node)
        )

    def tell(self, kind: str, record: dict[str, Any]) -> None:
        """Process a record of rank 0; ``kind`` is the name of an observer's method."""
        if self._exporter is not None:
            deliver(self._exporter, kind, record)
        if kind == "run_start":
            self._total_steps = int(record["total_steps"])
        elif kind == "event" and record.get("type") in (
            EventType.SAVE,
            EventType.SAVE_FAILED,
        ):
            self._saving_seconds += seconds_of(parse_event_row(record), "blocking_seconds")
            self._note_save(record)
        elif kind == "evaluation_end":
            self._evaluation_seconds += max(0.0, _finite(record).get("seconds", 0.0))
            self._note_evaluation(record)
        elif kind == "step_end":
            self._note_step(record)

    def _note_step(self, record: dict[str, Any]) -> None:
        """Build the progress that is sent to the coordinator."""
        step = int(record["step"])
        per_second = self._throughput.add(
            generation=int(record["generation"]),
            tokens=record["tokens"],
            step_seconds=record["step_seconds"],
            time=record["time"],
        )
        left = None
        if self._total_steps is not None and per_second:
            left = (self._total_steps - step) * record["tokens"] / per_second
        self.progress = Progress(
            generation=int(record["generation"]),
            step=step,
            total_steps=self._total_steps,
            # Leave out a loss that is not a finite number, but still report the step.
            loss=read_values(record)[0].get("loss"),
            tokens_per_second=per_second,
            eta_seconds=left,
            checkpoint_step=self._checkpoint_step,
            values=_finite(
                {name: record[name] for name in SHOWN if name in record and name != "loss"}
                | record.get("metrics", {})
            ),
            evaluations=dict(self._evaluations),
            evaluation_seconds=self._evaluation_seconds,
            saving_seconds=self._saving_seconds,
            failed_saves=self._failed_saves,
            save_trouble=self._save_trouble,
            save_message=self._save_message,
        )

    def _note_save(self, record: Mapping[str, Any]) -> None:
        """Record the outcome of a save, and add it to the newest progress."""
        if record["type"] == EventType.SAVE_FAILED:
            self._failed_saves = max(1, int(record.get("failures", 1)))
            self._save_trouble = read_trouble(record.get("trouble"))
            self._save_message = str(record.get("reason", ""))[:_LONGEST_REASON]
        else:
            version = parse_checkpoint_name(str(record.get("checkpoint", "")))
            self._checkpoint_step = version.step if version else None
            self._failed_saves, self._save_trouble, self._save_message = 0, "", ""
        if self.progress is not None:
            # Do not wait for the next step, because no step follows the last save of a run.
            self.progress = dataclasses.replace(
                self.progress,
                checkpoint_step=self._checkpoint_step,
                failed_saves=self._failed_saves,
                save_trouble=self._save_trouble,
                save_message=self._save_message,
            )

    def _note_evaluation(self, record: Mapping[str, Any]) -> None:
        """Record the results of a set, and add them to the newest progress."""
        name, values = (
            str(record["name"]),
            {"loss": record["loss"], **record.get("metrics", {})},
        )
        # Bound the length of names and the number of sets, so that the message fits into a line.
        if len(name) > _MOST_CHARACTERS or (
            name not in self._evaluations and len(self._evaluations) >= _MOST_SETS
        ):
            return
        shown = dict(list(_finite(values).items())[:_MOST_RESULTS])
        self._evaluations[name] = EvaluationReport(int(record["step"]), shown)
        if self.progress is not None:
            self.progress = dataclasses.replace(
                self.progress, evaluations=dict(self._evaluations)
            )

    def report(self, report: Mapping[str, object]) -> Progress | None:
        """Process a script's own report, whose values may have any type, and return the progress in it.

        Returns None if the report is not from rank 0 or has no step.
        """
        if report.get("rank", 0) != 0:
            return None
        found, left_out = read_values(report)
        for name in [one for one in left_out if one not in self._warned]:
            self._warned.add(name)
            _log.warning("a script's report has %s", left_out[name])
        self._with(lambda series: series.show(found))

        # Without a readable step, keep the previous step, so that the other values are not lost.
        before = self.progress
        step = found.get("step", None if before is None else before.step)
        if "checkpoint_step" in found:
            self._checkpoint_step = int(found["checkpoint_step"])
        if step is None:
            return None
        total = found.get("total_steps")
        now = time.monotonic()
        self._pace.note(int(step), now=now)
        self.progress = Progress(
            generation=read_generation(report),
            step=int(step),
            total_steps=None if total is None else int(total),
            loss=found.get("loss"),
            tokens_per_second=found.get("tokens_per_second"),
            eta_seconds=self._pace.remaining_seconds(
                int(step), None if total is None else int(total), now=now
            ),
            checkpoint_step=self._checkpoint_step,
        )
        return self.progress

    def rank_0_left(self) -> None:
        """Discard the run's values, because rank 0 has moved to another node and they are outdated."""
        self.progress = None
        if self._exporter is not None:
            self._exporter.rank_0_left()

    def worker_started(self, worker: Worker) -> None:
        """Count the start of a worker, and replace the previous worker with its local rank."""
        self._workers[worker.local_rank] = worker
        self._with(lambda series: series.add("node_worker_starts_total", 1))

    def show_memory(self) -> None:
        """Show each worker's memory: device memory as the worker last reported it, host memory from the
        kernel."""
        # Called at each tick; without an endpoint, do not read anything.
        if self._series is None:
            return
        for local_rank, worker in self._workers.items():
            # A process that has ended holds nothing, and a process on a CPU reports no device memory: show no
            # value instead of 0.
            sizes = None if worker.state == "ended" else worker.heartbeat.held_bytes
            resident = None if worker.state == "ended" else read_resident_bytes(worker.pid)
            self._series.show_memory(str(local_rank), sizes, resident)

    def set_workers(self, count: int) -> None:
        self._with(lambda series: series.set("node_workers", count))

    def set_generation(self, generation: int) -> None:
        self._with(lambda series: series.set("node_generation", generation))

    def broken(self, cause: str) -> None:
        self._with(lambda series: series.add("node_breaks_total", 1, cause))

    def close(self) -> None:
        """Serve for the lingering time, then stop."""
        if self._exporter is not None:
            self._exporter.close()

    def _with(self, act: Callable[["_Series"], object]) -> None:
        if self._series is not None:
            act(self._series)


class _Series:
    """The node's own series. Their labels are the run and the node's index, as in all series."""

    def __init__(self, exporter: PrometheusExporter, run: str, node: str) -> None:
        self._place = (run, node)
        self._shown: set[tuple[str, ...]] = set()
        """Name and labels of the optional gauges that currently have a value."""
        made = build_series(NODE, "run", "node", registry=exporter.registry)
        self._gauges = {name: one for name, one in made.items() if isinstance(one, Gauge)}
        self._counters = {
            name: one for name, one in made.items() if isinstance(one, Counter)
        }
        # A labelled gauge without a value exports no series, so set workers and generation to 0.
        for name in ("node_workers", "node_generation"):
            self.set(name, 0)
        self.add("node_worker_starts_total", 0)

    def set(self, name: str, value: float) -> None:
        self._gauges[name].labels(*self._place).set(value)

    def add(self, name: str, amount: float, *labels: str) -> None:
        self._counters[name].labels(*self._place, *labels).inc(amount)

    def show_memory(
        self, local_rank: str, sizes: Sizes | None, resident: int | None
    ) -> None:
        """Show a worker's device memory and host memory; None removes the series."""
        for kind, size in zip(
            MEMORY_KINDS, sizes or (None,) * len(MEMORY_KINDS), strict=True
        ):
            self._set_or_remove("device_memory_bytes", size, local_rank, kind)
        self._set_or_remove("worker_resident_memory_bytes", resident, local_rank)

    def _set_or_remove(self, name: str, value: int | None, *labels: str) -> None:
        """Set a gauge, or remove its series with these labels if ``value`` is None."""
        if value is not None:
            self._gauges[name].labels(*self._place, *labels).set(value)
            self._shown.add((name, *labels))
        elif (name, *labels) in self._shown:
            self._gauges[name].remove(*self._place, *labels)
            self._shown.remove((name, *labels))

    def show(self, values: Mapping[str, int | float]) -> None:
        """Show the values that a script has reported."""
        for name in ("step", "loss", "tokens_per_second"):
            if name in values:
                self.set(f"script_{name}", values[name])


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that JSON can represent, as floats."""
    numbers = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float)
    }
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def read_resident_bytes(pid: int) -> int | None:
    """Return the host memory of a process in bytes, including shared pages, or None if the process is
    gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    except (OSError, IndexError):
        return None


def read_generation(report: Mapping[str, object]) -> int:
    """Return the generation in a worker's report, or 0 if it is missing or invalid."""
    generation = report.get("generation")
    return generation if type(generation) is int and 0 <= generation < MAX_GENERATION else 0
