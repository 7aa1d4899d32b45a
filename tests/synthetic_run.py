"""Writes a run directory as a run would, from a plan of its processes and a clock that the test sets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergrad_trainer.base.records import (
    EvaluationRecord,
    Event,
    EventType,
    StepRecord,
    record_row,
)
from evergrad_trainer.observers.history import StepTable, tabulate
from evergrad_trainer.observers.jsonl import RunLog
from evergrad_trainer.observers.time_account import Record
from evergrad_trainer.run.directory import RunDirectory

BEGIN = 1_770_000_000.0
STEP_SECONDS = 0.5
PAUSE_SECONDS = 0.01
STARTUP_SECONDS = 4.0
RESTORE_SECONDS = 1.0
BLOCKING_SECONDS = 0.25
EVALUATION_SECONDS = 2.0


def _noise(seed: float) -> float:
    """Return a number between -0.5 and 0.5 that depends only on the seed."""
    return (math.sin(seed * 12.9898) * 43758.5453) % 1.0 - 0.5


def step_record(step: int, **changes: Any) -> StepRecord:
    """Return a plausible row. Its loss falls with noise and depends only on the step."""
    values: dict[str, Any] = {
        "step": step,
        "generation": 1,
        "world_size": 2,
        "loss": 2.1 + 3.4 * math.exp(-step / 60) + 0.3 * _noise(step),
        "tokens": 8192,
        "valid_tokens": 8192 - step % 7,
        "sample_hash": f"{(step * 0x9E3779B97F4A7C15) % 2**64:016x}",
        "learning_rate": 1e-3 * min(1.0, step / 20),
        "grad_norm": 0.6 + 0.4 * _noise(step + 0.5),
        "step_seconds": STEP_SECONDS,
        "data_seconds": 0.002,
        "forward_backward_seconds": 0.4,
        "communication_seconds": 0.06,
        "optimizer_seconds": 0.03,
        "other_seconds": 0.008,
        "rank_skew_seconds": 0.004,
        "time": BEGIN + step,
    }
    return StepRecord(**values | changes)


def step_table(records: Sequence[StepRecord]) -> StepTable:
    """Return the records as the columns that a reader of their file would return."""
    return tabulate([record_row(record) for record in records])


@dataclass(frozen=True)
class Process:
    """A process that trains the steps after ``resumed_from`` up to ``last``.

    ``ended``: killed, signal, complete or failed. ``restores_first``: whether the restore event is written
    before the start event.
    """

    last: int
    resumed_from: int | None = None
    ended: str = "complete"
    downtime_seconds: float = 0.0
    restores_first: bool = False


@dataclass(frozen=True)
class World:
    """Another world that resumes ``forgotten`` steps before the newest row and trains up to ``last``.

    Training was paused for ``paused_seconds`` before the event of the world, and for ``settle_seconds``
    between the event and the first step.
    """

    last: int
    world_size: int = 2
    cause: str = "node_lost"
    detail: str = "node 0 lost"
    paused_seconds: float = 0.25
    settle_seconds: float = 0.05
    forgotten: int = 0
    ended: str = "complete"


class RunWriter:
    """Writes the records of processes one after the other, as the training loop would."""

    def __init__(
        self,
        path: Path,
        *,
        total_steps: int = 200,
        save_every: int = 50,
        evaluate_every: int = 40,
        name: str = "docs-lm",
    ) -> None:
        self.directory = RunDirectory(path)
        self.directory.create()
        self.now = BEGIN
        self.seconds: dict[str, float] = {}
        self.heard: list[Record] = []
        """The records that the observers of all processes would receive, in order."""
        self._total_steps, self._save_every, self._evaluate_every, self._name = (
            total_steps,
            save_every,
            evaluate_every,
            name,
        )
        self._generation = 0
        self._step_now = 0
        self._world_size = 2
        self.set_name = "heldOut"

    def write(self, process: Process) -> "RunWriter":
        self._generation += 1
        self._pass("downtime", process.downtime_seconds)
        log = RunLog(self.directory)
        begun = self.now
        self._pass("startup", STARTUP_SECONDS)
        self._world_size, self._step_now = 2, process.resumed_from or 0
        fields = {
            "run": self._name,
            "process_start_time": begun,
            "resumed_from": process.resumed_from,
            "pid": 1000 + self._generation,
        }
        if process.resumed_from is not None and process.restores_first:
            self._restored(log, process.resumed_from)
        self._event(
            log, EventType.START, 0, total_steps=self._total_steps, world_size=2, **fields
        )
        if process.resumed_from is not None and not process.restores_first:
            self._restored(log, process.resumed_from)
        first = (process.resumed_from or 0) + 1
        for step in range(first, process.last + 1):
            self._step(log, step, is_first=step == first)
        self._end(log, process)
        log.close()
        return self

    def _restored(self, log: RunLog, step: int) -> None:
        self._pass("restore", RESTORE_SECONDS)
        facts = {"checkpoint": f"step-{step}", "seconds": RESTORE_SECONDS}
        self._event(log, EventType.RESTORED, step, **facts)

    def change_world(self, world: World) -> "RunWriter":
        """Continue training from memory in another world, whose rank 0 may be another process."""
        self._generation += 1
        log = RunLog(self.directory)
        self._pass("reconfiguration", world.paused_seconds)
        self._step_now -= world.forgotten
        sizes = {"world_size": world.world_size, "from_world_size": self._world_size}
        self._world_size = world.world_size
        paused = {
            "cause": world.cause,
            "detail": world.detail,
            "paused_seconds": world.paused_seconds,
            "pid": 1000 + self._generation,
        }
        self._event(log, EventType.WORLD, self._step_now, **sizes, **paused)
        first = self._step_now + 1
        if world.last >= first:
            self._pass("reconfiguration", world.settle_seconds)
        for step in range(first, world.last + 1):
            self._step(log, step, is_first=step == first)
        self._end(log, world)
        log.close()
        return self

    def _step(self, log: RunLog, step: int, *, is_first: bool) -> None:
        if not is_first:
            self._pass("other", PAUSE_SECONDS)
        self._pass("step", STEP_SECONDS)
        self._step_now = step
        record = step_record(
            step, generation=self._generation, world_size=self._world_size, time=self.now
        )
        log.step_end(record)
        self.heard.append(record)
        if step % self._evaluate_every == 0:
            self._pass("evaluation", EVALUATION_SECONDS)
            loss = 2.2 + 3.3 * math.exp(-step / 60)
            evaluation = EvaluationRecord(
                step,
                self._generation,
                self.set_name,
                loss,
                math.exp(loss),
                40960,
                EVALUATION_SECONDS,
                self.now,
            )
            log.evaluation_end(evaluation)
            self.heard.append(evaluation)
        if step % self._save_every == 0:
            self._save(log, step)

    def _save(self, log: RunLog, step: int) -> None:
        self._pass("checkpoint", BLOCKING_SECONDS)
        saved = {"seconds": 1.5, "blocking_seconds": BLOCKING_SECONDS, "bytes": 123_456_789}
        self._event(
            log,
            EventType.SAVE,
            step,
            checkpoint=f"step-{step}",
            kept=3,
            best=step == 100,
            **saved,
        )

    def _end(self, log: RunLog, process: Process | World) -> None:
        if process.ended == "killed":
            return
        if process.ended == "failed":
            self._event(
                log,
                EventType.FAILED,
                process.last,
                error="SaveError",
                message="3 saves in a row have failed.",
                exit_code=70,
            )
            self._event(log, EventType.END, process.last, exit_code=64)
            return
        if process.last % self._save_every:
            self._save(log, process.last)
        self._event(log, EventType.STOP, process.last, reason=process.ended, saved=True)
        if process.ended == "complete":
            self._event(
                log, EventType.COMPLETE, process.last, total_steps=self._total_steps
            )
            self.directory.mark_complete({"total_steps": self._total_steps})
        self._event(
            log,
            EventType.END,
            process.last,
            exit_code=0 if process.ended == "complete" else 75,
        )

    def _event(self, log: RunLog, type_: str, step: int, **fields: Any) -> None:
        event = Event(type_, self.now, step, self._generation, fields)
        log.event(event)
        self.heard.append(event)

    def _pass(self, what: str, seconds: float) -> None:
        self.now += seconds
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds
