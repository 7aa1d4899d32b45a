"""One node of a run: speaks with the coordinator, and does to its crew what the coordinator says."""

import asyncio
import contextlib
import gc
import logging
import socket
import sys
import time
import uuid
from collections.abc import Callable

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from evergrad_coordinator.contract import ErrorKind, ExitCode
from evergrad_coordinator.edge.client import CoordinatorClient
from evergrad_coordinator.protocol import (
    Broken,
    Capacity,
    Done,
    End,
    Go,
    Had,
    Hello,
    Leave,
    Leaving,
    Left,
    Message,
    Plan,
    Ready,
    Refused,
    Result,
    Up,
    Welcome,
)
from evergrad_coordinator.wire import ProtocolError
from evergrad_manifest.errors import EvergradError
from evergrad_trainer.errors import HostError
from evergrad_trainer.host_trouble import is_host_trouble
from evergrad_trainer.node.crew import LOCAL_GENERATION, Crew
from evergrad_trainer.node.failures import kind_of, write_termination_message
from evergrad_trainer.node.metrics import NodeMetrics
from evergrad_trainer.node.output import WorkerOutput
from evergrad_trainer.node.progress import ProgressSender
from evergrad_trainer.node.settings import NodeSettings
from evergrad_trainer.node.stopping import StopRequests
from evergrad_trainer.node.tasks import TaskWatch
from evergrad_trainer.node.workers import Worker, adopt_orphans, end_orphans, name_process
from evergrad_trainer.observers.events import parse_event_row, saved_step
from evergrad_trainer.records import EventType
from evergrad_trainer.worker import channel as say

_log = logging.getLogger(__name__)
_TICK_SECONDS = 0.25
_UNREACHABLE_SECONDS = 3.0
"""After so long without the coordinator a node that must go leaves on its own."""
_REFUSED_SECONDS = (1.0, 2.0, 4.0)
"""Pauses before a node that was refused asks again; then it leaves its place to another host."""
_TURNS = 8
"""Of the event loop, from the end of a process until what it had said is read: a connection is accepted first."""
_KILL_SECONDS = 10.0
"""How long workers may take to end once the run is over …"""
_KILLED_SECONDS = 1.0
"""… and once they are killed."""


class Supervisor:
    """Runs until the node's part in the run is over. One event loop, one thread."""

    def __init__(
        self, settings: NodeSettings, *, metrics: NodeMetrics, on_tick: Callable[[], None] = lambda: None
    ) -> None:
        """``on_tick`` is called some times a second, and after each change of the group."""
        self._settings = settings
        self._on_tick = on_tick
        self._metrics = metrics
        self.incarnation = uuid.uuid4().hex
        self._client = self._new_client()
        self._num_refusals = 0
        """Since the last welcome."""
        self._crew: Crew
        self._outputs: dict[int, WorkerOutput] = {}
        self._pids: set[int] = set()
        self._store: TCPStore | None = None
        self._known_generation = 0
        self._lease_seconds = 10.0
        self._is_cut_off = False
        self._leaving_since: float | None = None
        self._is_leaving_alone = False
        self._result: Result | None = None
        self._exit_code: int | None = None
        self._root_cause = ""
        self._root_kind = ErrorKind.INTERNAL
        self._over = asyncio.Event()
        self._is_hurried = False
        """Whether workers are killed, and nothing lingers, since there is no time or nobody who could look after them."""
        self._progress = ProgressSender(self._send)
        self._tasks = TaskWatch(self._fail)
        self._done: Done | None = None
        self._up: Up | None = None
        self._broken: Broken | None = None
        """The last that was reported: it may have found nobody who listened."""
        self._said: Had | None = None
        """The place that the newest hello named."""
        self._is_draining = False

    async def run(self, crew: Crew) -> int:
        """Serve with ``crew`` until the run, or this node's part in it, is over; returns the exit code."""
        self._crew = crew
        # It lives as long as the run: what was imported stays, what it makes from here on is collected.
        gc.freeze()
        gc.enable()
        adopt_orphans()
        name_process(f"evergrad-node{self._settings.node}")
        stops = StopRequests(
            asyncio.get_running_loop(),
            on_first=lambda: self._tasks.call(self._leave),
            on_last=self._leave_at_once,
            grace_seconds=self._settings.grace_seconds,
        )
        stops.install()
        try:
            await self._serve(crew)
        finally:
            stops.uninstall()
        code = int(ExitCode.INTERNAL) if self._exit_code is None else self._exit_code
        if code not in (ExitCode.DONE, ExitCode.STOPPED_SAVED):
            write_termination_message(self._settings.termination_log, self._root_kind, self._root_cause)
        return code

    async def _serve(self, crew: Crew) -> None:
        try:
            self._tasks.call(crew.start)
            self._tasks.begin(self._converse(), "conversation with the coordinator", is_endless=True)
            self._tasks.begin(self._tick(), "tick", is_endless=True)
            await self._over.wait()
            await self._end_workers()
        finally:
            self._client.close()
            self._tasks.close()
            crew.kill()
            # In a thread, since it lingers: a second signal still cuts it short.
            await asyncio.to_thread(self._metrics.close)

    def _fail(self, where: str, error: BaseException) -> None:
        """End the node: a part of its supervisor is gone, without which it would only look alive."""
        if self._exit_code is None:
            kind = ErrorKind.ENVIRONMENT if is_host_trouble(error) else ErrorKind.INTERNAL
            kind = error.kind if isinstance(error, EvergradError) else kind
            text = str(error) if isinstance(error, EvergradError) else f"{type(error).__name__}: {error}"
            self._note_cause(kind, f"node {self._settings.node}: the supervisor's {where} failed: {text}")
        _log.error("node %s its %s failed", self._settings.node, where, exc_info=error)
        self._is_hurried = True
        self._stop(ExitCode.INTERNAL)

    def _note_cause(self, kind: ErrorKind, text: str) -> None:
        self._root_kind, self._root_cause = kind, text

    def _send(self, message: Message) -> bool:
        """Whether the message is on its way. One that cannot be encoded counts so, too: said again, it would fail again."""
        try:
            return self._client.send(message)
        except ProtocolError as error:
            _log.warning("node %s could not say %r: %s", self._settings.node, message.TYPE, error)
            return True

    def adopt(self, worker: Worker) -> Worker:
        """Listen to a worker that was just started."""
        loop = asyncio.get_running_loop()
        loop.add_reader(worker.channel.socket, self._tasks.call, self._read, worker)
        loop.add_reader(worker.process.sentinel, self._tasks.call, self._reap, worker)
        if worker.output is not None:
            name = f"node-{self._settings.node}-worker-{worker.local_rank}.out"
            output = self._outputs[worker.serial] = WorkerOutput(
                worker.output,
                path=self._settings.run_directory / "logs" / name,
                node=self._settings.node,
                rank=lambda: worker.rank,
                is_forwarded=self._settings.forwards_output,
            )
            worker.last_lines = lambda: "\n".join(output.last_lines)
        self._pids.add(worker.pid)
        self._metrics.worker_started()
        return worker

    # ---- listener of the crew ----------------------------------------------------------------------------------------

    def capacity_changed(self) -> None:
        self._metrics.set_workers(self._crew.capacity)
        self._send(Capacity(self._crew.capacity))

    def ready(self, generation: int, *, workers: int, step: int) -> None:
        if generation >= LOCAL_GENERATION:
            if self._is_leaving_alone:
                self._crew.depart(None, save=True)
            return
        if workers == 0:
            self._send(Ready(generation, 0, 0, -1))
            return
        # A new store for each round, on a port nobody knew before: late members of an older one cannot meet newer ones.
        try:
            self._store = TCPStore(self._settings.address, 0, is_master=True, wait_for_workers=False)
        except (OSError, RuntimeError) as error:  # torch's own is a RuntimeError
            raise HostError(
                f"{self._settings.address}: no store of a group can be opened here; {error}"
            ) from error
        self._progress.flush()
        self._send(Ready(generation, workers, self._store.port, step))

    def up(self, generation: int, step: int) -> None:
        self._metrics.set_generation(generation)
        self._up = Up(generation, step)
        self._send(self._up)

    def broken(self, message: Broken) -> None:
        self._metrics.broken(message.cause)
        if message.cause != "peer_lost":
            self._note_cause(
                kind_of(message), f"node {self._settings.node}, rank {message.rank}: {message.message}"
            )
            self._say(
                f"rank {message.rank} {message.message}" if message.exit_code is not None else message.message
            )
        self._broken = message
        self._send(message)

    def ended(self, record: say.Ended) -> None:
        self._result = Result(record.generation, record.step, record.exit_code, record.reason)
        self._progress.flush()
        self._send(self._result)

    def observed(self, record: say.Observed) -> None:
        self._metrics.tell(record.kind, record.record)
        progress = self._metrics.progress
        if progress is None:
            return
        self._progress.note(progress)
        if record.kind == "event" and record.record.get("type") == EventType.SAVE:
            self._progress.note_checkpoint(progress.generation, saved_step(parse_event_row(record.record)))

    def done(self, message: Done) -> None:
        self._done = message
        self._send_last(message)

    def stopped(self, message: Result) -> None:
        self._result = message
        self._send_last(message)

    def _send_last(self, message: Message) -> None:
        self._tasks.begin(self._send_after_reports(message), "last words")

    async def _send_after_reports(self, message: Message) -> None:
        """The end of a script's process may be seen before its last report is read; after the end of the run nobody listens."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        self._progress.flush()
        self._send(message)

    def reported(self, report: dict[str, object]) -> None:
        """A script says where it is, in whatever values; only the world's rank 0 speaks for the run."""
        self._tasks.call(self._take_report, report)

    def _take_report(self, report: dict[str, object]) -> None:
        progress = self._metrics.report(report)
        if progress is None:
            return
        self._progress.note(progress)
        if progress.checkpoint_step is not None:
            self._progress.note_checkpoint(progress.generation, progress.checkpoint_step)

    async def may_commit(self, generation: int) -> bool:
        """Whether a generation may still write, as the coordinator says."""
        return await self._client.commit(generation)

    @property
    def seconds_since_contact(self) -> float:
        return self._client.seconds_since_contact

    @property
    def lease_seconds(self) -> float:
        return self._lease_seconds

    @property
    def newest_generation(self) -> int:
        return self._known_generation

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def departed(self, *, is_saved: bool) -> None:
        self._progress.flush()
        self._send(Left(self._known_generation, is_saved))
        self._stop(ExitCode.STOPPED_SAVED if is_saved else ExitCode.STOPPED_UNSAVED)

    def gone(self, message: str, *, kind: ErrorKind) -> None:
        self._note_cause(kind, f"node {self._settings.node} on host {socket.gethostname()}: {message}")
        print(f"error: {self._root_cause}", file=sys.stderr, flush=True)
        self._stop(ExitCode.INTERNAL)

    # ---- the coordinator ---------------------------------------------------------------------------------------------

    def _new_client(self) -> CoordinatorClient:
        return CoordinatorClient(
            self._settings.coordinator_host,
            self._settings.coordinator_port,
            hello=self._hello,
            on_message=self._on_message,
            on_connected=self._on_connected,
        )

    async def _converse(self) -> None:
        """Speak with the coordinator until the run is over. A refusal may be of this moment: it is asked again some times."""
        await self._client.run()
        while not self._over.is_set() and 0 < self._num_refusals <= len(_REFUSED_SECONDS):
            await asyncio.sleep(_REFUSED_SECONDS[self._num_refusals - 1])
            self._client = self._new_client()
            await self._client.run()
        if self._num_refusals:
            self._stop(ExitCode.INTERNAL)

    def _hello(self) -> Hello:
        place, settings = self._crew.place, self._settings
        self._said = had = (
            None
            if place is None
            else Had(place.generation, place.first_rank, place.workers, place.world_size)
        )
        return Hello(
            run=settings.run,
            node=settings.node,
            incarnation=self.incarnation,
            address=settings.address,
            workers=self._crew.capacity,
            recovery=settings.recovery,
            fingerprint=settings.fingerprint,
            token=settings.token,
            had=had,
            known_generation=self._known_generation,
        )

    def _on_connected(self) -> None:
        self._is_cut_off = False
        # A worker may have become warm between hello and welcome.
        self._send(Capacity(self._crew.capacity))
        place, said = self._crew.place, self._said
        if said is not None and (place is None or place.generation != said.generation):
            # A hello may wait long for a coordinator that stood still: the group that it named is left by now.
            gone = Broken(
                said.generation, "peer_lost", message="the node left its group while the coordinator was away"
            )
            self._send(
                self._broken
                if self._broken is not None and self._broken.generation == said.generation
                else gone
            )
        if self._up is not None and place is not None and place.generation == self._up.generation:
            self._send(self._up)
        self._progress.flush()
        if self._result is not None:
            self._send(self._result)
        if self._done is not None:
            self._send(self._done)
        if self._leaving_since is not None:
            self._send(Leaving())

    def _on_message(self, message: Message) -> None:
        match message:
            case Welcome():
                self._num_refusals = 0
                self._lease_seconds = message.lease_seconds
                self._known_generation = max(self._known_generation, message.generation)
            case Plan():
                self._known_generation = max(self._known_generation, message.generation)
                self._done = None
                self._is_draining = not message.hard
                self._on_tick()
                order = say.Change(message.generation, message.hard, message.patience_seconds, message.saves)
                self._crew.change(order, cause=message.reason, is_only_holder=message.is_only_holder)
            case Go():
                self._is_draining = False
                if message.first_rank != 0:
                    self._metrics.rank_0_left()
                self._crew.begin(message)
                self._on_tick()
                self._say(f"generation {message.generation}: ranks {_ranks(message)} of {message.world_size}")
            case Leave():
                self._crew.depart(message.generation, save=message.save)
            case End():
                if message.message and message.exit_code != ExitCode.DONE:
                    # The run's verdict, which is no trouble of this host.
                    kind = ErrorKind.INPUT if message.exit_code == ExitCode.USER_ERROR else ErrorKind.INTERNAL
                    self._note_cause(kind, self._root_cause or message.message)
                    print(message.message, file=sys.stderr, flush=True)
                self._stop(message.exit_code)
            case Refused():
                self._num_refusals += 1
                print(f"error: {message.message}", file=sys.stderr, flush=True)
                # It concerns this host or its image: another one may be let in, and the run is not to blame.
                text = f"node {self._settings.node} on host {socket.gethostname()} was refused: {message.message}"
                self._note_cause(ErrorKind.ENVIRONMENT, text)

    # ---- signals and time --------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Asked to go: the coordinator plans a group without this node."""
        if self._leaving_since is not None:
            return
        self._leaving_since = time.monotonic()
        self._say("was asked to leave")
        if not self._send(Leaving()) and self._crew.place is None:
            self._crew.depart(None, save=True)

    def _leave_at_once(self) -> None:
        """Asked twice, or out of time: workers are killed, and nobody is waited for."""
        self._is_hurried = True
        self._metrics.hurry.set()
        if self._exit_code is not None:
            self._tasks.call(self._crew.kill)
        self._stop(ExitCode.STOPPED_UNSAVED)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._crew.tick()
            end_orphans(known=self._pids)
            self._on_tick()
            self._progress.flush_if_due()
            away = self._client.seconds_since_contact
            # Workers that have ended well cannot be ruled by others, and the place they had vouches for their end.
            is_training = self._crew.place is not None and self._done is None
            if not self._is_cut_off and is_training and away > self._lease_seconds:
                # Others may rule by now. The group ends at a step boundary and waits, holding its state.
                self._is_cut_off = True
                self._say("has lost the coordinator: training pauses")
                self._crew.change(
                    say.Change(self._known_generation + 1, hard=False), cause="coordinator_lost"
                )
            self._leave_alone_if_due(away)

    def _leave_alone_if_due(self, away: float) -> None:
        if self._leaving_since is None or self._is_leaving_alone:
            return
        waited = time.monotonic() - self._leaving_since
        is_cut_off = not self._client.is_connected and min(away, waited) > _UNREACHABLE_SECONDS
        if is_cut_off or waited > self._settings.grace_seconds:
            self._is_leaving_alone = True
            if self._crew.place is None:
                self._crew.depart(None, save=True)
            else:
                self._crew.change(say.Change(LOCAL_GENERATION, hard=False), cause="preemption")

    # ---- processes ---------------------------------------------------------------------------------------------------

    def _read(self, worker: Worker) -> None:
        try:
            while (record := worker.channel.receive(0)) is not None:
                self._crew.hear(worker, record)
        except EOFError:
            asyncio.get_running_loop().remove_reader(worker.channel.socket)

    def _reap(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        worker.process.join()
        self._pids.discard(worker.pid)
        worker.end_descendants()
        loop.remove_reader(worker.process.sentinel)
        with contextlib.suppress(EOFError):
            # Its last words may still be in the channel.
            while (record := worker.channel.receive(0)) is not None:
                self._crew.hear(worker, record)
        loop.remove_reader(worker.channel.socket)
        worker.channel.close()
        output = self._outputs.pop(worker.serial, None)
        if output is not None:
            output.drain()
            output.close()
        code = worker.process.exitcode
        self._crew.end(worker, int(ExitCode.INTERNAL) if code is None else code)
        worker.process.close()
        worker.last_lines = None

    def _stop(self, exit_code: int) -> None:
        if self._exit_code is not None:
            return
        self._exit_code = int(exit_code)
        self._tasks.expect_ends()
        self._over.set()
        self._tasks.call(self._crew.kill if self._is_hurried else lambda: self._crew.finish(int(exit_code)))

    async def _end_workers(self) -> None:
        began = time.monotonic()
        while not self._crew.is_empty and time.monotonic() - began < (
            _KILLED_SECONDS if self._is_hurried else _KILL_SECONDS
        ):
            await asyncio.sleep(0.01)

    def _say(self, text: str) -> None:
        _log.info("node %s %s", self._settings.node, text)


def _ranks(go: Go) -> str:
    last = go.first_rank + go.workers - 1
    return str(last) if go.workers == 1 else f"{go.first_rank}-{last}"
