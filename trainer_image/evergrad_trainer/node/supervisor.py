"""One node of a run: passes the words of the coordinator and of the workers on. It decides nothing itself.

Who calls whom: the coordinator's messages and the processes' ends come in by the event loop; the supervisor
calls its worker group (the keeper of the node's workers), and the worker group hands reports back through one
function. Who waits for whom:

* the supervisor never blocks: messages to workers and to the coordinator are left in buffers, and a
  worker that does not read is found by the worker group's tick;
* a worker waits for its supervisor only while it is out of every group, and for its peers no longer than
  their operations take;
* the coordinator waits for a node's ``ready`` as long as its own limits say, and then continues without it;
* at the end of the run the supervisor waits ``_KILL_SECONDS`` for its workers, and for no one else.
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
"""Turns of the event loop, from the end of a process until what it had said is read: a connection is accepted
first."""
_KILL_SECONDS = 10.0
"""How long workers may take to end once the run is over …"""
_KILLED_SECONDS = 1.0
"""… and once they are killed."""


def open_store(address: str) -> TCPStore:
    """Open a store for one round of a rendezvous. Raises HostError.

    It has a port that nobody knew before: late members of an older group cannot meet those of a newer one.
    """
    try:
        return TCPStore(address, 0, is_master=True, wait_for_workers=False)
    except (OSError, RuntimeError) as error:  # torch's own is a RuntimeError
        raise HostError(
            f"{address}: no store of a group can be opened here; {error}"
        ) from error


class RoundStores:
    """The stores that this node opens, one a generation; the newest stays open."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._newest: tuple[int, TCPStore] | None = None

    def open(self, generation: int) -> TCPStore:
        """Open the store of the newest plan, unless it is open. Raises HostError."""
        if self._newest is None or self._newest[0] != generation:
            self._newest = generation, open_store(self._address)
        return self._newest[1]


def order_of(plan: Plan) -> channel.WorkerPlan:
    """Tell workers what they need to know of a plan."""
    return channel.WorkerPlan(plan.generation, plan.hard, plan.patience_seconds, plan.saves)


def describe_ranks(go: Go) -> str:
    """Say which ranks of the new group are this node's."""
    last = go.first_rank + go.workers - 1
    ranks = str(last) if go.workers == 1 else f"{go.first_rank}-{last}"
    return f"generation {go.generation}: ranks {ranks} of {go.world_size}"


class Supervisor:
    """Runs until the node's part in the run is over. One event loop, one thread."""

    def __init__(
        self,
        settings: NodeSettings,
        *,
        metrics: NodeMetrics,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_tick`` is called some times a second, and after each change of the group."""
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
        self._processes = WorkerProcesses(
            settings, self._tasks, worker_group=lambda: self._workers
        )
        self._progress = ProgressSender(self.conversation.send)
        self._records = RecordReader(metrics, self._progress)
        self._stores = RoundStores(settings.address)
        self._store: TCPStore | None = None
        self._is_cut_off = False
        self._departure = Departure(
            self.conversation,
            worker_group=lambda: self._workers,
            log=self._say,
            grace_seconds=settings.grace_seconds,
        )
        self.is_draining = False
        """Whether the running group is to be left in order."""

    async def run(self, worker_group: WorkerGroup) -> int:
        """Serve with ``worker_group`` until this node's part in the run is over; returns the exit code."""
        self._workers = worker_group
        # It lives as long as the run: what was imported stays, what it makes from here on is collected.
        gc.freeze()
        gc.enable()
        adopt_orphans()
        name_process(f"evergrad-node{self._settings.node}")
        stops = StopRequests(
            asyncio.get_running_loop(),
            on_first=lambda: self._tasks.call(self._departure.leave),
            on_last=self._leave_at_once,
            grace_seconds=self._settings.grace_seconds,
        )

        async def converse() -> None:
            if not await self.conversation.converse(is_over=self._end.over.is_set):
                # Refused for good: another host may be let in.
                self._stop(ExitCode.INTERNAL)

        stops.install()
        try:
            # Workers first: they import and build while the coordinator is looked for.
            self._tasks.call(worker_group.start)
            self._tasks.begin(
                converse(), "conversation with the coordinator", is_endless=True
            )
            self._tasks.begin(self._tick(), "tick", is_endless=True)
            await self._end.over.wait()

            # Workers end by themselves within a bound, so that their last words are still read.
            seconds = _KILLED_SECONDS if self._end.is_hurried else _KILL_SECONDS
            until = time.monotonic() + seconds
            while not worker_group.is_empty and time.monotonic() < until:
                await asyncio.sleep(0.01)
        finally:
            self.conversation.close()
            self._tasks.close()
            worker_group.kill()
            # In a thread, since it lingers: a second signal still cuts it short.
            await asyncio.to_thread(self._metrics.close)
            stops.uninstall()
        return self._end.write()

    def adopt(self, worker: Worker) -> Worker:
        """Listen to a worker that was just started."""
        self._processes.watch(worker)
        self._metrics.worker_started(worker)
        return worker

    def take(self, report: Report) -> None:
        """Take a report of the worker group: most are messages for the coordinator, some end this node."""
        match report:
            case Capacity():
                self._metrics.set_workers(report.workers)
                self.conversation.send(report)
            case WorkersReady() if report.generation >= channel.LOCAL_GENERATION:
                # Answers to a change of this node's own, which no coordinator has planned.
                if self._departure.is_alone:
                    self._workers.depart(None, save=True)
            case WorkersReady(workers=0):
                self.conversation.send(Ready(report.generation, 0, 0, -1))
            case WorkersReady():
                # The members connect to it once all are ready; only now is that of the old group closed.
                self._store = self._stores.open(report.generation)
                self._progress.flush()
                self.conversation.send(
                    Ready(report.generation, report.workers, self._store.port, report.step)
                )
            case Up():
                self._metrics.set_generation(report.generation)
                self.conversation.send(report)
            case Restoring() | Finished():
                self.conversation.send(report)
            case Broken():
                self._metrics.broken(report.cause)
                # The failure of a peer is a consequence: the node of that peer names the cause.
                if report.cause != "peer_lost":
                    self._say(self._end.note_broken(report))
                self.conversation.send(report)
            case channel.WorkerResult():
                # The last progress first: nothing that comes after the run's end is taken.
                self._progress.flush()
                words = Result(
                    report.generation, report.step, report.exit_code, report.reason
                )
                self.conversation.send(words)
            case channel.Observed():
                self._records.take_record(report.kind, report.record)
            case Done() | Result():
                # Remembered at once, said a moment later: the end of a script's process may be seen before
                # its last report is read, and after the end of the run no process listens.
                self.conversation.remember(report)

                async def send_after_reports() -> None:
                    for _ in range(_TURNS):
                        await asyncio.sleep(0)
                    self._progress.flush()
                    self.conversation.send(report)

                self._tasks.begin(send_after_reports(), "last words")
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

    def reported(self, report: dict[str, object]) -> None:
        """A script says where it is, in whatever values; only the world's rank 0 speaks for the run."""
        self._tasks.call(self._records.take_report, report)

    def end_hung(self, worker: Worker) -> None:
        """Log the stacks of a worker that will not end by itself, then kill it."""
        self._tasks.begin(self._log_stacks_and_kill(worker), "stacks of a worker")

    async def _log_stacks_and_kill(self, worker: Worker) -> None:
        text = "rank %d (pid %d) %s; its stacks follow"
        _log.warning(text, worker.rank, worker.pid, worker.why_killed)
        try:
            # In a thread: a debugger may take a minute.
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
                # Workers of scripts read it from the node state file: a plan that is not hard lets them save.
                self.is_draining = not message.hard
                self._on_tick()
                why, is_only_holder = message.reason, message.is_only_holder
                self._workers.change(
                    order_of(message),
                    cause=message.cause,
                    detail=why,
                    is_only_holder=is_only_holder,
                )
                # While workers leave the old group, and not once all wait for this node.
                self._stores.open(message.generation)
            case Go():
                self.is_draining = False
                # Two nodes that both show the run's series would count everything twice.
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
                # It concerns this host or its image: another one may be let in, and the run is not to blame.
                self._end.note_host(
                    ErrorKind.ENVIRONMENT, f" was refused: {message.message}"
                )

    def _leave_at_once(self) -> None:
        """Asked twice, or out of time: workers are killed, and the node waits for none of them."""
        self._end.is_hurried = True
        self._metrics.hurry.set()
        if self._end.exit_code is not None:
            self._tasks.call(self._workers.kill)
        self._stop(ExitCode.STOPPED_UNSAVED)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            # Workers that are frozen, stuck or due are nobody else's to notice.
            self._workers.tick()
            self._processes.end_orphans()
            self._on_tick()
            self._progress.flush_if_due()
            self._metrics.show_memory()
            away = self.conversation.seconds_since_contact
            # Workers that have ended well cannot be ruled by others, and the place they had vouches for their
            # end.
            is_training = (
                self._workers.place is not None and not self.conversation.has_said(Done)
            )
            if (
                not self._is_cut_off
                and is_training
                and away > self.conversation.lease_seconds
            ):
                # Others may rule by now. The group ends at a step boundary and waits, holding its state.
                self._is_cut_off = True
                self._say("has lost the coordinator: training pauses")
                order = channel.WorkerPlan(
                    self.conversation.known_generation + 1, hard=False
                )
                self._workers.change(order, cause="coordinator_lost")
            self._departure.tick(away)

    def _fail(self, where: str, error: BaseException) -> None:
        """End the node: a part of its supervisor is gone, without which it would only look alive."""
        self._end.note_error(where, error)
        _log.error("node %s its %s failed", self._settings.node, where, exc_info=error)
        self._end.is_hurried = True
        self._stop(ExitCode.INTERNAL)

    def _stop(self, exit_code: int) -> None:
        # The first reason to end is the reason; what follows it are its consequences.
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
