"""Supervises one node of a run: passes messages between the coordinator and the workers.

The supervisor makes no decisions about the group. The event loop delivers the coordinator's messages and the
ends of processes; the supervisor calls its worker group, which controls the node's workers, and the worker
group returns reports through one function. Waits are bounded as follows:

* The supervisor never blocks. Messages to workers and to the coordinator are buffered, and the worker group's
  tick finds a worker that does not read.
* A worker waits for its supervisor only while it is in no group, and for its peers only as long as their
  operations take.
* The coordinator waits for a node's ``ready`` up to its own limits, and then continues without the node.
* At the end of the run the supervisor waits ``_KILL_SECONDS`` for its workers, and for no other process.
"""

import asyncio
import gc
import logging
import sys
import time
from collections.abc import Callable

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from evergrad_common.contract import ErrorKind, ExitCode
from evergrad_coordinator.edge.stacks import read_stacks_of
from evergrad_coordinator.protocol import (
    Broken,
    Capacity,
    Done,
    End,
    Finished,
    Finishing,
    Go,
    Leave,
    Left,
    Message,
    Plan,
    Ready,
    Refused,
    Restoring,
    Result,
    Up,
)
from evergrad_trainer.base.errors import HostError
from evergrad_trainer.node.coordinator_link import Conversation
from evergrad_trainer.node.drain import Departure
from evergrad_trainer.node.metrics import NodeMetrics
from evergrad_trainer.node.node_end import NodeEnd
from evergrad_trainer.node.processes import WorkerProcesses
from evergrad_trainer.node.progress import ProgressSender, RecordReader
from evergrad_trainer.node.reports import NoWorkers, Report, WorkersLeft, WorkersReady
from evergrad_trainer.node.settings import NodeSettings
from evergrad_trainer.node.stop_requests import StopRequests
from evergrad_trainer.node.tasks import TaskWatch
from evergrad_trainer.node.worker_group import WorkerGroup
from evergrad_trainer.node.workers import Worker, adopt_orphans, name_process
from evergrad_trainer.worker import channel

_log = logging.getLogger(__name__)
_TICK_SECONDS = 0.25
_TURNS = 8
"""Event-loop iterations to wait after a process exits, so that its connection is accepted and its last
messages are read."""
_KILL_SECONDS = 10.0
"""Seconds that workers have to end when the run is over."""
_KILLED_SECONDS = 1.0
"""Seconds to wait for workers that were killed."""


def open_store(address: str) -> TCPStore:
    """Open a store for one round of a rendezvous, on a free port of ``address``.

    The port is new, so late members of an older group cannot connect to members of a newer group. Raises
    HostError if the store cannot be opened.
    """
    try:
        return TCPStore(address, 0, is_master=True, wait_for_workers=False)
    except (OSError, RuntimeError) as error:  # torch's own is a RuntimeError
        raise HostError(
            f"{address}: no store of a group can be opened here; {error}"
        ) from error


class RoundStores:
    """The stores that this node opens, one for each generation; the newest store stays open."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._newest: tuple[int, TCPStore] | None = None

    def open(self, generation: int) -> TCPStore:
        """Return the store of ``generation``, and open it if necessary.

        Raises HostError if the store cannot be opened.
        """
        if self._newest is None or self._newest[0] != generation:
            self._newest = generation, open_store(self._address)
        return self._newest[1]


def order_of(plan: Plan) -> channel.WorkerPlan:
    """Return the workers' message for a plan of the coordinator."""
    return channel.WorkerPlan(plan.generation, plan.hard, plan.patience_seconds, plan.saves)


def describe_ranks(go: Go) -> str:
    """Return a text that names this node's ranks in the new group.

    For example, ``generation 3: ranks 0-1 of 4``.
    """
    last = go.first_rank + go.workers - 1
    ranks = str(last) if go.workers == 1 else f"{go.first_rank}-{last}"
    return f"generation {go.generation}: ranks {ranks} of {go.world_size}"


class Supervisor:
    """Runs one node in one thread with one event loop, until the node leaves the run or the run ends."""

    def __init__(
        self,
        settings: NodeSettings,
        *,
        metrics: NodeMetrics,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare the supervisor.

        ``on_tick`` is called four times per second, and after each change of the group.
        """
        self._settings = settings
        self._on_tick = on_tick
        self._metrics = metrics
        self._workers: WorkerGroup
        self.conversation = Conversation(
            settings,
            member=lambda: self._workers,
            on_message=self._on_message,
            on_connected=self._on_connected,
        )
        self._end = NodeEnd(settings)
        self._tasks = TaskWatch(self._fail)
        self._processes = WorkerProcesses(settings, self._tasks)
        self._progress = ProgressSender(self.conversation.send)
        self._records = RecordReader(metrics, self._progress)
        self._stores = RoundStores(settings.address)
        self._store: TCPStore | None = None
        self._is_cut_off = False
        self._departure = Departure(
            self.conversation,
            log=self._say,
            grace_seconds=settings.grace_seconds,
        )
        self.is_draining = False
        """Whether the workers leave the running group in order, so that they can save first."""

    async def run(self, worker_group: WorkerGroup) -> int:
        """Serve with ``worker_group`` until this node leaves or the run ends, and return the exit code."""
        self._workers = worker_group
        # This process runs as long as the run. Exclude the objects of imported modules from garbage
        # collection, and collect only objects that are created from here on.
        gc.freeze()
        gc.enable()
        adopt_orphans()
        name_process(f"evergrad-node{self._settings.node}")
        stops = StopRequests(
            asyncio.get_running_loop(),
            on_first=lambda: self._tasks.call(self._departure.leave, worker_group),
            on_last=self._leave_at_once,
            grace_seconds=self._settings.grace_seconds,
        )

        async def converse() -> None:
            if not await self.conversation.converse(is_over=self._end.over.is_set):
                # The coordinator refused this node permanently, but it may accept another host.
                self._stop(ExitCode.INTERNAL)

        stops.install()
        try:
            # Start the workers first: they import and build while the node connects to the coordinator.
            self._tasks.call(worker_group.start)
            self._tasks.begin(
                converse(), "conversation with the coordinator", is_endless=True
            )
            self._tasks.begin(self._tick(), "tick", is_endless=True)
            await self._end.over.wait()

            # Give workers a bounded time to end by themselves, so that their last messages are read.
            seconds = _KILLED_SECONDS if self._end.is_hurried else _KILL_SECONDS
            until = time.monotonic() + seconds
            while not worker_group.is_empty and time.monotonic() < until:
                await asyncio.sleep(0.01)
        finally:
            self.conversation.close()
            self._tasks.close()
            worker_group.kill()
            # Close the metrics in a thread: the exporter still serves for its lingering time, and a second
            # signal must be able to interrupt it.
            await asyncio.to_thread(self._metrics.close)
            stops.uninstall()
        return self._end.write()

    def adopt(self, worker: Worker) -> Worker:
        """Begin to watch a worker that has just started, and return it."""
        self._processes.watch(worker, self._workers)
        self._metrics.worker_started(worker)
        return worker

    def take(self, report: Report) -> None:
        """Process a report of the worker group.

        Most reports are messages for the coordinator; some of them end this node.
        """
        match report:
            case Capacity():
                self._metrics.set_workers(report.workers)
                self.conversation.send(report)
            case WorkersReady():
                self._on_workers_ready(report)
            case Up():
                self._metrics.set_generation(report.generation)
                self.conversation.send(report)
            case Restoring() | Finished():
                self.conversation.send(report)
            case Broken():
                self._metrics.broken(report.cause)
                # A lost peer is only a consequence: the node of that peer reports the cause.
                if report.cause != "peer_lost":
                    self._say(self._end.note_broken(report))
                self.conversation.send(report)
            case channel.WorkerResult():
                # Send the last progress first: the coordinator ignores everything after the run's end.
                self._progress.flush()
                words = Result(
                    report.generation, report.step, report.exit_code, report.reason
                )
                self.conversation.send(words)
            case channel.Observed():
                self._records.take_record(report.kind, report.record)
            case Done() | Result():
                self._send_after_reports(report)
            case WorkersLeft():
                self._progress.flush()
                generation, is_saved = self.conversation.known_generation, report.is_saved
                self.conversation.send(Left(generation, is_saved))
                self._stop(ExitCode.STOPPED_SAVED if is_saved else ExitCode.STOPPED_UNSAVED)
            case NoWorkers():
                text = f": {report.message}"
                self._end.note_host(report.kind, text, report.trouble)
                print(f"error: {self._end.cause}", file=sys.stderr, flush=True)
                self._stop(report.exit_code)

    def _on_workers_ready(self, report: WorkersReady) -> None:
        if report.generation >= channel.LOCAL_GENERATION:
            # This answers a change that the node made itself and that no coordinator has planned.
            if self._departure.is_alone:
                self._workers.depart(None, save=True)
        elif report.workers == 0:
            self.conversation.send(Ready(report.generation, 0, 0, -1))
        else:
            # The members connect to this store when all nodes are ready. Close the store of the old group
            # only now.
            self._store = self._stores.open(report.generation)
            self._progress.flush()
            self.conversation.send(
                Ready(report.generation, report.workers, self._store.port, report.step)
            )

    def _send_after_reports(self, report: Done | Result) -> None:
        """Record a report that may end the run now, but send it a few iterations later.

        A script's process can exit before its last report is read, and no process accepts that report after
        the end of the run.
        """
        self.conversation.remember(report)

        async def send() -> None:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            self._progress.flush()
            self.conversation.send(report)

        self._tasks.begin(send(), "last words")

    def reported(self, report: dict[str, object]) -> None:
        """Process a script's progress report, whose values may have any type; only rank 0's report counts."""
        self._tasks.call(self._records.take_report, report)

    def end_hung(self, worker: Worker) -> None:
        """Log the stacks of a worker that does not end by itself, and then kill the worker."""
        self._tasks.begin(self._log_stacks_and_kill(worker), "stacks of a worker")

    async def _log_stacks_and_kill(self, worker: Worker) -> None:
        text = "rank %d (pid %d) %s; its stacks follow"
        _log.warning(text, worker.rank, worker.pid, worker.why_killed)
        try:
            # Read the stacks in a thread, because a debugger may take a minute.
            stacks = await asyncio.to_thread(read_stacks_of, worker.pid, native=True)
            for line in stacks.splitlines():
                _log.warning("%s", line)
        finally:
            if worker.state != "ended":
                worker.kill()

    def _on_connected(self) -> None:
        self._is_cut_off = False
        self._progress.flush()

    def _on_message(self, message: Message) -> None:
        match message:
            case Plan():
                # Scripts read this from the node state file: if the plan is not hard, they can save.
                self.is_draining = not message.hard
                self._on_tick()
                why, is_only_holder = message.reason, message.is_only_holder
                self._workers.change(
                    order_of(message),
                    cause=message.cause,
                    detail=why,
                    is_only_holder=is_only_holder,
                )
                # Open the store while workers leave the old group, so that no node has to wait for it later.
                self._stores.open(message.generation)
            case Go():
                self.is_draining = False
                # Only the node of rank 0 exports the run's series; otherwise they would be counted twice.
                if message.first_rank != 0:
                    self._metrics.rank_0_left()
                self._workers.begin(message)
                self._on_tick()
                self._say(describe_ranks(message))
            case Finishing():
                self._workers.expect_ends(message.generation)
            case Leave():
                self._workers.depart(message.generation, save=message.save)
            case End():
                self._end.note_outcome(message)
                self._stop(message.exit_code)
            case Refused():
                print(f"error: {message.message}", file=sys.stderr, flush=True)
                # The refusal concerns this host or its image: the run did not fail, and another host may be
                # accepted.
                self._end.note_host(
                    ErrorKind.ENVIRONMENT, f" was refused: {message.message}"
                )

    def _leave_at_once(self) -> None:
        """Kill the workers and leave, after a second stop request or when the grace period has ended."""
        self._end.is_hurried = True
        self._metrics.hurry.set()
        if self._end.exit_code is not None:
            self._tasks.call(self._workers.kill)
        self._stop(ExitCode.STOPPED_UNSAVED)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            # No other component notices workers that are frozen, stuck or due to start.
            self._workers.tick()
            self._processes.end_orphans()
            self._on_tick()
            self._progress.flush_if_due()
            self._metrics.show_memory()
            away = self.conversation.seconds_since_contact
            # Workers that have completed need no coordinator, so do not pause a group that is done.
            is_training = (
                self._workers.place is not None and not self.conversation.has_said(Done)
            )
            if (
                not self._is_cut_off
                and is_training
                and away > self.conversation.lease_seconds
            ):
                # The other nodes may have formed a new group by now. Leave this group at a step boundary, and
                # wait with the state in memory.
                self._is_cut_off = True
                self._say("has lost the coordinator: training pauses")
                order = channel.WorkerPlan(
                    self.conversation.known_generation + 1, hard=False
                )
                self._workers.change(order, cause="coordinator_lost")
            self._departure.tick(self._workers, away)

    def _fail(self, where: str, error: BaseException) -> None:
        """End the node because a part of its supervisor failed; otherwise it would only appear alive."""
        self._end.note_error(where, error)
        _log.error("node %s its %s failed", self._settings.node, where, exc_info=error)
        self._end.is_hurried = True
        self._stop(ExitCode.INTERNAL)

    def _stop(self, exit_code: int) -> None:
        # Keep the first reason to end: later reasons are its consequences.
        if self._end.exit_code is not None:
            return
        self._end.exit_code = int(exit_code)
        self._tasks.expect_ends()
        self._end.over.set()
        if self._end.is_hurried:
            self._tasks.call(self._workers.kill)
        else:
            self._tasks.call(self._workers.finish, int(exit_code))

    def _say(self, text: str) -> None:
        _log.info("node %s %s", self._settings.node, text)
