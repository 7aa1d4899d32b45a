"""A torchrun agent's conversation with the coordinator: a thread with a loop, and the state that the agent waits on."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evergrad_coordinator.contract import ExitCode
from evergrad_coordinator.edge.client import CoordinatorClient
from evergrad_coordinator.edge.heartbeat import Heartbeat
from evergrad_coordinator.protocol import (
    Beat,
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
    Pong,
    Ready,
    Refused,
    Up,
    Welcome,
)
from evergrad_coordinator.wire import ProtocolError
from evergrad_trainer.torchrun.agent_reports import WorkerReports
from evergrad_trainer.torchrun.agent_workers import SeenEnd, WorkerWatch, build_broken
from evergrad_trainer.worker.board import NodeBoard

_TICK_SECONDS = 0.2
_PROGRESS_SECONDS = 0.5
_CLOSE_SECONDS = 2.0
_END_SECONDS = 0.5
_DEPART_SECONDS = 1.0
"""For the plan that follows the word of leaving: much longer than the coordinator waits for other events."""
_STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Those that torchrun takes for the end of the agent."""


@dataclass(frozen=True)
class NodeSettings:
    """What a node has to know to join. ``lease_seconds`` holds until the coordinator has told its own.

    ``join_seconds``: how long a rendezvous waits for a coordinator that does not answer.
    """

    run: str
    node: str
    host: str
    port: int
    address: str | None
    token_file: Path
    lease_seconds: float
    fingerprint: dict[str, str]
    join_seconds: float = 900.0


class AgentLink:
    """What the agent's thread and the loop's thread share.

    The agent's thread reads and waits on ``changed``; only the loop's thread writes, except where a method says otherwise.
    """

    def __init__(self, settings: NodeSettings, *, directory: Path) -> None:
        self.settings = settings
        self.changed = threading.Condition()
        self.newest = 0
        self.place: Had | None = None
        """Held in a running generation; None while out of every group."""
        self.plan: Plan | None = None
        """The newest plan, until its ``go``."""
        self.go: Go | None = None
        self.end: End | None = None
        self.lease_seconds = settings.lease_seconds
        self.board = NodeBoard(directory, on_report=self._take_report, may_commit=self._may_commit)
        self._incarnation = uuid.uuid4().hex
        self._client: CoordinatorClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        self._is_leaving = False
        self._is_out = False
        """The agent is at its end, and has no workers any more."""
        self._is_stopping_workers = False
        self._done_generation = 0
        self._up_generation = 0
        self._broken_generation = 0
        self._answered_generation = 0
        self._first_end: SeenEnd | None = None
        self._watch: WorkerWatch | None = None
        self._reports = WorkerReports()
        self._failure: BaseException | None = None
        self._is_started = threading.Event()
        self.wakeup_read, self.wakeup_write = os.pipe()
        for descriptor in (self.wakeup_read, self.wakeup_write):
            os.set_blocking(descriptor, False)
        self._thread = threading.Thread(target=self._run, name="evergrad-rendezvous", daemon=True)

    # ---- the agent's thread ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the conversation. Raises what the board's start raises."""
        self._thread.start()
        self._is_started.wait()
        if self._failure is not None:
            raise self._failure

    def depart(self) -> None:
        """The agent ends and its workers are gone. One that was asked to leave says so, else it would be taken for lost."""
        with self.changed:
            place = self.place
            if self._is_leaving and self.end is None and place is not None and not self._done_generation:
                self._is_out = True
                self._call(self._say_ready_to_leave)
                self.changed.wait_for(
                    lambda: self.end or self._answered_generation > place.generation, _DEPART_SECONDS
                )
                self._send(Left(self.newest, is_saved=False))
        self.close()

    def close(self) -> None:
        """Leave the coordinator and remove the board."""
        if self._loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(_CLOSE_SECONDS)

    def should_restart_workers(self) -> bool:
        """Whether the workers have to be stopped: another group is planned, the run has ended, or the lease is lost."""
        with self.changed:
            place = self.place
            if place is None:
                return True
            if self._up_generation < place.generation:
                self._up_generation = place.generation
                self._send(Up(place.generation, self._reports.step))
            has_lost = self.seconds_since_contact() > self.lease_seconds
            if has_lost:
                _say(f"no contact with the coordinator for {self.lease_seconds:g} s: stopping the workers")
            self._is_stopping_workers = (
                has_lost or self.end is not None or (self.newest > place.generation and not self._drains())
            )
            return self._is_stopping_workers

    def leave_group(self) -> None:
        """The workers are gone. Unless somebody asked for it, that is the failure of their generation."""
        with self.changed:
            place = self.place
            if (
                place is not None
                and not self._is_stopping_workers
                and self.newest <= place.generation
                and self.end is None
            ):
                # On a busy machine the agent may know of the end before the watch, which knows whose it was.
                self.changed.wait_for(
                    lambda: self._first_end is not None, _END_SECONDS if self._watch is not None else 0
                )
                self._send_broken(place)
            self.place = self.go = None
            self._is_stopping_workers = False

    def answer(self, plan: Plan, *, port: int) -> None:
        """Say that this node's old workers are gone, and where the store for ``plan`` is."""
        self._answered_generation = plan.generation
        self._send(Ready(plan.generation, workers=1, port=port))

    def take_place(self, go: Go) -> None:
        """The group of ``go`` begins: its workers are started next."""
        self.place = Had(
            go.generation, first_rank=go.first_rank, workers=go.workers, world_size=go.world_size
        )
        self.go = self.plan = self._first_end = None
        self._reports.begin(go.generation)
        self._call(self._begin_watch, go.port)

    def vote_done(self) -> None:
        """All of this node's workers have ended well. Raises SystemExit(75) when they did so because they were asked to stop."""
        with self.changed:
            if self.place is None:
                return
            if self.board.has_stopped(self.place.generation):
                # Counted as done it would end the run, unfinished. This way the node comes back and goes on.
                _say(
                    "the script stopped as asked but ended with exit code 0; end it with 75, so that only its workers start anew"
                )
                raise SystemExit(int(ExitCode.STOPPED_SAVED))
            self._done_generation = self.place.generation
            if self._up_generation < self.place.generation:
                self._send(Up(self.place.generation, self._reports.step))
            self._call(self._flush_report)
            self._send(Done(self._done_generation))
            if self.plan is not None:
                # This node is needed no more, but a plan may wait for the word that its workers are gone.
                self._send(Ready(self.plan.generation, workers=0, port=0))

    def report_failure(self) -> None:
        """Tell a failure that the agent is not going to survive (its restarts are used up)."""
        with self.changed:
            if self.place is not None and self._first_end is not None and self.end is None:
                self._send_broken(self.place)

    def seconds_since_contact(self) -> float:
        """How long ago the coordinator was heard."""
        return self._client.seconds_since_contact if self._client is not None else float("inf")

    def find_address(self) -> str:
        """This node's address as the others see it. Raises OSError."""
        return self.settings.address or _address_towards(self.settings.host, self.settings.port)

    def inherited_descriptors(self) -> list[int]:
        """What a forked child must close: the connection (its end would stay hidden while the child lives) and the pipe."""
        connection = self._client.fileno() if self._client is not None else -1
        return [
            descriptor for descriptor in (connection, self.wakeup_read, self.wakeup_write) if descriptor >= 0
        ]

    def _send(self, message: Message) -> None:
        self._call(self._say_now, [message])

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all there was to say
                self._loop.call_soon_threadsafe(function, *arguments)

    def _send_broken(self, place: Had) -> None:
        if self._broken_generation < place.generation and not self._is_leaving:
            self._broken_generation = place.generation
            end, step = self._first_end, self._reports.step
            self._send(
                build_broken(
                    place.generation, end=end, world_size=place.world_size, step=step, now=time.monotonic()
                )
            )

    def _drains(self) -> bool:
        """Whether the planned change can wait for workers that save and leave by themselves."""
        place, plan = self.place, self.plan
        if place is None or not self.board.has_guard(place.generation):
            return False
        if self.newest > place.generation:
            return plan is not None and not plan.hard
        return self._is_leaving

    # ---- the loop's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._converse())
        except BaseException as error:  # noqa: BLE001 - handed to the agent's thread, which is waiting
            self._failure = error
            with self.changed:
                self.end = self.end or End(
                    int(ExitCode.INTERNAL), "internal", f"the rendezvous thread ended: {error!r}"
                )
                self.changed.notify_all()
        finally:
            self._is_started.set()

    async def _converse(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.board.start()
        self._client = CoordinatorClient(
            self.settings.host,
            self.settings.port,
            hello=self._hello,
            on_message=self._take,
            on_connected=self._greet,
        )
        settings = self.settings
        beat = Beat(
            settings.run, settings.node, self._incarnation, token=settings.token_file.read_text().strip()
        )
        heartbeat = Heartbeat(settings.host, settings.port, beat)
        heartbeat.start()
        self._loop.add_reader(self.wakeup_read, self._take_signals)
        self._is_started.set()
        client = asyncio.create_task(self._client.run())
        ticks = asyncio.create_task(self._tick())
        beats = asyncio.create_task(heartbeat.keep())
        stopped = asyncio.create_task(self._wait_stopped())
        try:
            await asyncio.wait((client, ticks, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not self._stopped.is_set():
                if self.end is None:  # one of the two ended, which only an error makes them do
                    await asyncio.gather(*(task for task in (client, ticks) if task.done()))
                    raise RuntimeError("the conversation with the coordinator ended early")
                await stopped
        finally:
            heartbeat.close()
            self._client.close()
            for task in (client, ticks, beats, stopped):
                task.cancel()
            await asyncio.gather(client, ticks, beats, stopped, return_exceptions=True)
            await self.board.close()

    async def _wait_stopped(self) -> None:
        await self._stopped.wait()

    def _hello(self) -> Hello:
        settings = self.settings
        with self.changed:
            return Hello(
                run=settings.run,
                node=settings.node,
                incarnation=self._incarnation,
                address=self.find_address(),
                workers=0 if self._is_leaving else 1,
                recovery="fresh",
                fingerprint=settings.fingerprint,
                token=settings.token_file.read_text().strip(),
                had=self.place,
                known_generation=self.newest,
            )

    def _greet(self) -> None:
        """Said again on every connection: what the coordinator may not have heard."""
        with self.changed:
            if self._is_leaving:
                self._send(Leaving())
            if self._done_generation and self.place is not None:
                self._send(Done(self._done_generation))
            self.changed.notify_all()

    def _take(self, message: Message) -> None:
        with self.changed:
            match message:
                case Welcome():
                    self.lease_seconds = message.lease_seconds
                    self.newest = max(self.newest, message.generation)
                case Pong():
                    self.newest = max(self.newest, message.generation)
                case Plan():
                    self._take_plan(message)
                case Go():
                    self.newest = max(self.newest, message.generation)
                    self.go = message
                case Leave() if self._client is not None:
                    # Its state is in checkpoints, if anywhere; and the coordinator is not to be bothered again.
                    self._client.send(Left(message.generation, is_saved=False))
                    self._client.close()
                    self.end = End(int(ExitCode.STOPPED_SAVED), "left")
                case End():
                    self._finish(message)
                case Refused():
                    # Whatever a coordinator of another version says: a refusal is no verdict about the run.
                    self._finish(End(int(ExitCode.INTERNAL), message.reason, message.message))
            self._announce()
            self.changed.notify_all()

    def _take_plan(self, plan: Plan) -> None:
        self.newest = max(self.newest, plan.generation)
        self.plan = plan
        if self._done_generation:
            self._send(Ready(plan.generation, workers=0, port=0))
        elif self._is_leaving:
            self._say_ready_to_leave()

    def _finish(self, end: End) -> None:
        self.end = self.end or end
        if end.message:
            _say(end.message)

    def _take_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self.wakeup_read, 256)
            if any(number in numbers for number in _STOPPING_SIGNALS) and not self._is_leaving:
                with self.changed:
                    self._is_leaving = True
                    if self._client is not None:
                        self._client.send(Leaving())
                    self._announce()

    def _begin_watch(self, port: int) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = WorkerWatch(port=port, on_end=self._take_worker_end)
        self._finding = asyncio.create_task(self._watch.find())
        self._finding.add_done_callback(self._note_end_of_search)
        self._announce()

    def _note_end_of_search(self, task: asyncio.Task[None]) -> None:
        """An error in it would be logged nowhere, and the ends of workers would go unseen."""
        if not task.cancelled() and task.exception() is not None:
            _say(
                f"the agent's workers cannot be watched, so that their ends are told without a cause: {task.exception()!r}"
            )

    def _take_worker_end(self, end: SeenEnd) -> None:
        if end.exit_code == 0:
            return
        with self.changed:
            place = self.place
            self._first_end = self._first_end or end
            self.changed.notify_all()
            if (
                place is not None
                and self.newest <= place.generation
                and not self._is_stopping_workers
                and end.exit_code is not None
            ):
                self._send_broken(place)

    async def _tick(self) -> None:
        last_flush = 0.0
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            with self.changed:
                self._announce()
                if self._is_leaving:
                    self._say_ready_to_leave()
            if time.monotonic() - last_flush >= _PROGRESS_SECONDS:
                last_flush = time.monotonic()
                self._flush_report()

    def _say_ready_to_leave(self) -> None:
        """A leaving agent is not going to ask for another group: the end of its workers is told from here."""
        with self.changed:
            is_out = self._is_out or self.place is None or (self._watch is not None and self._watch.are_gone)
            if is_out and self.plan is not None and self._answered_generation < self.plan.generation:
                self._answered_generation = self.plan.generation
                self._send(Ready(self.plan.generation, workers=0, port=0))
                self.changed.notify_all()

    def _announce(self) -> None:
        own = self.place.generation if self.place is not None else 0
        self.board.announce(
            newest_generation=self.newest,
            own_generation=own,
            contact=time.monotonic() - min(self.seconds_since_contact(), time.monotonic()),
            is_draining=self._drains(),
            lease_seconds=self.lease_seconds,
        )

    # ---- what workers say --------------------------------------------------------------------------------------------

    def _take_report(self, report: dict[str, object]) -> None:
        with self.changed:
            self._say_now(self._reports.take(report, now=time.monotonic()))

    def _flush_report(self) -> None:
        with self.changed:
            self._say_now(self._reports.flush(now=time.monotonic()))

    def _say_now(self, messages: list[Message]) -> None:
        # Not by way of the loop: the last progress has to be said before the vote that may end the run.
        for message in messages:
            try:
                if self._client is not None:
                    self._client.send(message)
            except ProtocolError as error:
                # It would fail again; what follows it must not be lost with it.
                _say(f"{message.TYPE} could not be told to the coordinator: {error}")

    async def _may_commit(self, generation: int) -> bool:
        if self._client is None or self.place is None or self.place.generation != generation:
            return False
        # A coordinator that is away for less than the lease is waited for: the save would be lost for nothing.
        while not self._client.is_connected:
            if self.seconds_since_contact() > self.lease_seconds or self._stopped.is_set():
                return False
            await asyncio.sleep(_TICK_SECONDS)
        return await self._client.commit(generation)


def _say(text: str) -> None:
    print(f"evergrad: {text}", file=sys.stderr, flush=True)


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to the coordinator: asks the routing table, sends nothing. Raises OSError."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
