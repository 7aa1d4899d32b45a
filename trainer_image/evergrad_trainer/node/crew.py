"""The workers of one node that outlive their worlds: asks, counts and replaces them. Decides nothing about the group.

The supervisor tells a crew what the coordinator said; the crew tells its :class:`Listener` what the coordinator should hear.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from evergrad_coordinator.contract import ErrorKind
from evergrad_coordinator.protocol import Broken as BrokenGroup
from evergrad_coordinator.protocol import Cause, Go
from evergrad_trainer.node.ends import HostTrouble, WorkerEnd, describe_lasting_end
from evergrad_trainer.node.workers import Worker
from evergrad_trainer.worker import channel as say

_log = logging.getLogger(__name__)
LOCAL_GENERATION = 1 << 62
"""Above every generation a coordinator gives out: for a departure that no coordinator could plan."""
PING_SECONDS = 0.5
FROZEN_SECONDS = 10.0
"""A worker whose guard thread has not answered for so long is frozen: it is killed and replaced."""
STUCK_SECONDS = 10.0
"""At least this long a worker may take to leave a group that is given up; three of its longest slots if that is longer.

A slot lasts until its device has run it: an accelerator's queue is emptied before the group is left. Where no slot has ended
yet, or the worker may be the last that holds the state, the timeout of its operations is the bound.
"""
RESTART_SECONDS = 1.0
"""Before a lost worker is started again: building a model beside them would slow down those that are about to go on."""
_LONGEST_PAUSE = 10.0
_FAILED_STARTS = 3
"""Workers that ended before they were warm, in a row, after which the node gives up."""


class Listener(Protocol):
    """What a crew reports."""

    def capacity_changed(self) -> None:
        """The number of warm workers is another one."""

    def ready(self, generation: int, *, workers: int, step: int) -> None:
        """All warm workers are out of every group older than ``generation``."""

    def up(self, generation: int, step: int) -> None:
        """All workers of this node are in the group."""

    def broken(self, message: BrokenGroup) -> None:
        """The group cannot go on."""

    def ended(self, record: say.Ended) -> None:
        """The run's end is written down."""

    def observed(self, record: say.Observed) -> None:
        """Rank 0 is here, and has something for the metrics."""

    def departed(self, *, is_saved: bool) -> None:
        """All workers have left as they were told."""

    def gone(self, message: str, *, kind: ErrorKind) -> None:
        """This node cannot have workers, or no longer; ``kind`` says whether another host could."""


class Crew(Protocol):
    """The workers of one node, as its supervisor knows them."""

    @property
    def capacity(self) -> int: ...
    @property
    def place(self) -> Go | None: ...
    @property
    def is_empty(self) -> bool: ...
    def start(self) -> None: ...
    def change(self, order: say.Change, *, cause: str, is_only_holder: bool = False) -> None: ...
    def begin(self, go: Go) -> None: ...
    def depart(self, generation: int | None, *, save: bool) -> None: ...
    def finish(self, exit_code: int) -> None: ...
    def kill(self) -> None: ...
    def hear(self, worker: Worker, record: say.Record) -> None: ...
    def end(self, worker: Worker, exit_code: int) -> None: ...
    def tick(self) -> None: ...


@dataclass(frozen=True)
class Bounds:
    """``setup_seconds``: for the members of a group, who are all ready, to meet. ``timeout_seconds``: of its collectives."""

    setup_seconds: float
    timeout_seconds: float


class InProcessCrew:
    """Level 1: a worker's process lasts as long as the node, whatever becomes of its groups."""

    def __init__(
        self,
        start: Callable[[int, int], Worker],
        *,
        num_workers: int,
        listener: Listener,
        describe_place: Callable[[int, int], str],
        bounds: Bounds,
    ) -> None:
        """``start(local_rank, serial)`` starts a process; ``describe_place(step, slot)`` names the samples of a slot."""
        self._start_process = start
        self._num_workers = num_workers
        self._listener = listener
        self._describe_place = describe_place
        self._setup_seconds = bounds.setup_seconds
        self._timeout_seconds = bounds.timeout_seconds
        self._workers: dict[int, Worker] = {}
        self._serial = 0
        self._failed_starts = 0
        self._trouble = HostTrouble()
        self._change = say.Change(-1, hard=False)
        self._asked_at = 0.0
        self._cause = ""
        self._is_only_holder = False
        self._answered = -1
        self._inside: Go | None = None
        self._told_up = -1
        self._is_ending = False
        self._is_departing = False
        self._are_saved = True
        self._saver: Worker | None = None
        self._last_tick = time.monotonic()
        self._due: list[tuple[float, int]] = []
        """Workers to be started at a time of the monotonic clock."""

    # ---- what the supervisor says ------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Workers that could take part in a group."""
        return sum(worker.is_warm for worker in self._workers.values())

    @property
    def place(self) -> Go | None:
        """The running group's message to this node, as long as all its workers are in it."""
        return self._inside

    @property
    def workers(self) -> Sequence[Worker]:
        return tuple(self._workers.values())

    def start(self) -> None:
        """Start all workers."""
        for local_rank in range(self._num_workers):
            self._start(local_rank)

    def change(self, order: say.Change, *, cause: str, is_only_holder: bool = False) -> None:
        """Ask all workers to leave the running group. ``is_only_holder``: no other node holds a state."""
        if order.generation < self._change.generation:
            return
        self._change = order
        self._cause, self._is_only_holder = cause, is_only_holder
        self._asked_at = time.monotonic()
        # A plan that is told again is answered again: the answer, or the coordinator that heard it, may be lost.
        self._answered = min(self._answered, order.generation - 1)
        for worker in self._warm():
            worker.channel.send(self._change, wait=False)
        self._check_ready()

    def begin(self, go: Go) -> None:
        """All nodes are ready: give the ranks out."""
        chosen = [worker for worker in self._warm() if worker.ready_generation == go.generation][: go.workers]
        if len(chosen) < go.workers:
            self._listener.broken(
                BrokenGroup(go.generation, "setup_failed", message="a worker was lost before the group began")
            )
            return
        self._inside = go
        for number, worker in enumerate(chosen):
            worker.state, worker.inside_generation, worker.rank = (
                "inside",
                go.generation,
                go.first_rank + number,
            )
            worker.channel.send(
                say.Begin(
                    go.generation,
                    worker.rank,
                    go.world_size,
                    go.address,
                    go.port,
                    self._setup_seconds,
                    cause=self._cause,
                ),
                wait=False,
            )

    def depart(self, generation: int | None, *, save: bool) -> None:
        """Let all workers leave the run; with ``save`` the one that holds the newest state saves it first.

        Without a ``generation`` no coordinator has planned it.
        """
        self._is_ending = self._is_departing = True
        holders = sorted(self._warm(), key=lambda worker: (-worker.step, worker.local_rank))
        # Until the worker that saves says that it has.
        self._are_saved = not (save and holders)
        for number, worker in enumerate(holders):
            number_given = LOCAL_GENERATION if generation is None else generation
            order = say.Depart(number_given, save and number == 0, is_planned=generation is not None)
            worker.channel.send(order, wait=False)
            if save and number == 0:
                self._saver = worker
        for worker in self._workers.values():
            if not worker.is_warm:
                worker.kill()
        self._check_gone()

    def finish(self, exit_code: int) -> None:
        """The run is over."""
        self._is_ending = True
        for worker in self._workers.values():
            worker.channel.send(say.Finish(exit_code), wait=False)
            if not worker.is_warm:
                worker.kill()

    def kill(self) -> None:
        """End all workers now."""
        self._is_ending = True
        for worker in self._workers.values():
            worker.kill()

    @property
    def is_empty(self) -> bool:
        return not self._workers

    # ---- what the workers say ----------------------------------------------------------------------------------------

    def hear(self, worker: Worker, record: say.Record) -> None:
        """A record from a worker."""
        worker.last_heard = time.monotonic()
        match record:
            case say.Warm():
                worker.state = "idle"
                self._failed_starts = 0
                self._listener.capacity_changed()
                if self._change.generation > self._answered:
                    worker.channel.send(self._change, wait=False)
            case say.Ready():
                worker.state, worker.ready_generation, worker.step = "idle", record.generation, record.step
                if self._inside is not None and self._inside.generation < record.generation:
                    self._inside = None
                self._check_ready()
            case say.Up():
                worker.step = record.step
                worker.up_generation = record.generation
                self._check_up(record)
            case say.Broken():
                worker.step, worker.state = record.step, "idle"
                if self._inside is not None and self._inside.generation == record.generation:
                    # Whoever asks for this node's place in a group hears that it has none.
                    self._inside = None
                cause: Cause = "numeric" if record.kind == ErrorKind.NUMERIC else "peer_lost"
                self._listener.broken(
                    BrokenGroup(
                        record.generation,
                        cause,
                        worker.rank,
                        record.step,
                        message=record.text[: say.MAX_TEXT],
                    )
                )
            case say.Failed():
                self._note_failure(worker, record)
            case say.Ended():
                self._listener.ended(record)
            case say.Observed():
                self._listener.observed(record)
            case say.Saved():
                if worker is self._saver:
                    self._are_saved = record.is_saved

    def end(self, worker: Worker, exit_code: int) -> None:
        """A worker's process has ended."""
        if self._workers.get(worker.local_rank) is worker:
            del self._workers[worker.local_rank]
        if self._is_ending:
            self._check_gone()
            return
        was_warm, was_inside = worker.is_warm, worker.state == "inside"
        worker.state = "ended"
        if was_inside and self._inside is not None and worker.inside_generation == self._inside.generation:
            self._inside = None
        end = self._describe(worker, exit_code)
        if was_inside or end.is_final:
            self._report(worker, end)
        if was_warm:
            self._listener.capacity_changed()
            self._check_ready()
            self._replace(worker, end)
            return
        self._failed_starts += 1
        if self._failed_starts >= _FAILED_STARTS:
            text = f"{self._failed_starts} workers in a row ended before they could train; the last one: {end.text}"
            self._listener.gone(text, kind=end.kind)
            return
        self._later(min(_LONGEST_PAUSE, 0.2 * 2.0**self._failed_starts), worker.local_rank)

    def _replace(self, worker: Worker, end: WorkerEnd) -> None:
        """Start another worker in the place of one that had trained, unless this host has failed too often."""
        pause: float | None = RESTART_SECONDS
        if end.kind is ErrorKind.ENVIRONMENT:
            pause = self._trouble.note(end.step)
        if pause is None:
            self._listener.gone(f"workers failed again and again; the last one: {end.text}", kind=end.kind)
        else:
            self._later(pause, worker.local_rank)

    def tick(self) -> None:
        """Now and then: start workers whose time has come, find those that are frozen or stuck."""
        now = time.monotonic()
        due, self._due = self._due, [entry for entry in self._due if entry[0] > now]
        for at, local_rank in due:
            if at <= now:
                self._start(local_rank)
        if now - self._last_tick > 4 * PING_SECONDS:
            # This process stood still itself, so that silence says nothing about the others.
            for worker in self._workers.values():
                worker.last_heard = now
            self._asked_at = now
        self._last_tick = now
        for worker in self._warm():
            worker.channel.send(say.Ping(), wait=False)
            if now - worker.last_heard > FROZEN_SECONDS:
                _log.warning("worker %d (pid %d) is frozen and is replaced", worker.local_rank, worker.pid)
                worker.kill()
            elif self._change.hard and worker.ready_generation < self._change.generation:
                patience = max(STUCK_SECONDS, 3 * worker.pulse.longest_slot_seconds)
                if self._is_only_holder or worker.pulse.is_in_first_slot:
                    patience = max(patience, self._timeout_seconds)
                if now - self._asked_at > patience:
                    _log.warning(
                        "worker %d (pid %d) does not leave a group that is gone: replaced",
                        worker.local_rank,
                        worker.pid,
                    )
                    worker.kill()

    # ---- within ------------------------------------------------------------------------------------------------------

    def _warm(self) -> list[Worker]:
        return sorted((one for one in self._workers.values() if one.is_warm), key=lambda one: one.local_rank)

    def _start(self, local_rank: int) -> None:
        if self._is_ending:
            return
        self._serial += 1
        self._workers[local_rank] = self._start_process(local_rank, self._serial)

    def _later(self, seconds: float, local_rank: int) -> None:
        self._due.append((time.monotonic() + seconds, local_rank))

    def _check_ready(self) -> None:
        generation = self._change.generation
        warm = self._warm()
        if generation <= self._answered or any(worker.ready_generation < generation for worker in warm):
            return
        self._answered = generation
        # Without a warm worker too: the others wait to hear that nobody of this node is in the old group.
        self._listener.ready(
            generation, workers=len(warm), step=max((worker.step for worker in warm), default=-1)
        )

    def _check_up(self, record: say.Up) -> None:
        inside = [
            worker for worker in self._workers.values() if worker.inside_generation == record.generation
        ]
        is_whole = self._inside is not None and self._inside.generation == record.generation
        if (
            is_whole
            and self._told_up < record.generation
            and all(one.up_generation >= record.generation for one in inside)
        ):
            self._told_up = record.generation
            self._listener.up(record.generation, record.step)

    def _note_failure(self, worker: Worker, record: say.Failed) -> None:
        worker.failure = record
        worker.step = record.step

    def _describe(self, worker: Worker, exit_code: int) -> WorkerEnd:
        """How a worker ended that nobody had asked to."""
        step, slot = worker.pulse.step, worker.pulse.slot
        place = (
            f" in step {step}, slot {slot}; its samples are {self._describe_place(step, slot)}"
            if step >= 0
            else ""
        )
        end = describe_lasting_end(worker, exit_code, place=place)
        return dataclasses.replace(end, step=step)

    def _report(self, worker: Worker, end: WorkerEnd) -> None:
        self._listener.broken(
            BrokenGroup(
                max(worker.inside_generation, 0),
                end.cause,
                rank=worker.rank,
                step=end.step,
                exit_code=end.exit_code,
                message=end.text,
                is_final=end.is_final,
            )
        )

    def _check_gone(self) -> None:
        if self._is_departing and not self._workers:
            self._listener.departed(is_saved=self._are_saved)
