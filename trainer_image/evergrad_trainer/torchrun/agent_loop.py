"""A torchrun agent's conversation with the coordinator: a thread of its own with an event loop."""

import asyncio
import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from evergrad_coordinator.contract import ExitCode
from evergrad_coordinator.edge.client import CoordinatorClient
from evergrad_coordinator.edge.heartbeat import Heartbeat
from evergrad_coordinator.protocol import (
    Beat,
    Done,
    End,
    Go,
    Hello,
    Leave,
    Leaving,
    Left,
    Message,
    Plan,
    Pong,
    Ready,
    Refused,
    Welcome,
)
from evergrad_coordinator.secret import read_token
from evergrad_coordinator.wire import ProtocolError
from evergrad_trainer.torchrun.agent_members import AgentMembers
from evergrad_trainer.torchrun.agent_state import AgentState, NodeSettings
from evergrad_trainer.torchrun.agent_workers import say
from evergrad_trainer.worker.node_state import NodeStateServer
from evergrad_trainer.worker.sockets import address_towards

_TICK_SECONDS = 0.2
_PROGRESS_SECONDS = 0.5
_CLOSE_SECONDS = 2.0
_STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Those that torchrun takes for the end of the agent."""


class AgentLoop:
    """Hears the coordinator and the workers of the agent's own node; its methods run on its thread, except
    the public ones.

    Raises of its thread are handed to the agent's: as the end of the run, or by :meth:`start`.
    """

    def __init__(self, settings: NodeSettings, state: AgentState, *, directory: Path) -> None:
        self.settings = settings
        self.state = state
        self.members = AgentMembers(
            state, say_now=self._say_now, send=self.send, on_change=self._announce
        )
        self.node_state = NodeStateServer(
            directory, on_report=self.members.take_report, may_commit=self._may_commit
        )
        self._token = ""
        self._incarnation = uuid.uuid4().hex
        self._client: CoordinatorClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        self._failure: BaseException | None = None
        self._is_started = threading.Event()
        self.wakeup_read, self.wakeup_write = os.pipe()
        for descriptor in (self.wakeup_read, self.wakeup_write):
            os.set_blocking(descriptor, False)
        self._thread = threading.Thread(
            target=self._run, name="evergrad-rendezvous", daemon=True
        )

    def start(self) -> None:
        """Start the conversation. Raises what the node state's socket and the token's file raise."""
        self._thread.start()
        self._is_started.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Leave the coordinator and remove the node state file."""
        if self._loop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(_CLOSE_SECONDS)

    def inherited_descriptors(self) -> list[int]:
        """What a forked child must close: the connection (its end would stay hidden while the child lives)
        and the pipe."""
        connection = self._client.fileno() if self._client is not None else -1
        return [
            number
            for number in (connection, self.wakeup_read, self.wakeup_write)
            if number >= 0
        ]

    def _run(self) -> None:
        try:
            asyncio.run(self._converse())
        except BaseException as error:  # noqa: BLE001 - handed to the agent's thread, which is waiting
            self._failure = error
            with self.state.changed:
                self.state.end = self.state.end or End(
                    int(ExitCode.INTERNAL),
                    "internal",
                    f"the rendezvous thread ended: {error!r}",
                )
                self.state.changed.notify_all()
        finally:
            self._is_started.set()

    async def _converse(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._token = read_token(self.settings.token_file)
        await self.node_state.start()
        self._client = CoordinatorClient(
            self.settings.host,
            self.settings.port,
            hello=self._hello,
            on_message=self._take,
            on_connected=self._greet,
        )
        settings = self.settings
        beat = Beat(settings.run, settings.node, self._incarnation, token=self._token)
        heartbeat = Heartbeat(settings.host, settings.port, beat)
        heartbeat.start()
        self._loop.add_reader(self.wakeup_read, self._take_signals)
        self._is_started.set()
        client = asyncio.create_task(self._client.run())
        ticks = asyncio.create_task(self._tick())
        beats = asyncio.create_task(heartbeat.keep())
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait((client, ticks, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not self._stopped.is_set():
                if (
                    self.state.end is None
                ):  # one of the two ended, which only an error makes them do
                    await asyncio.gather(*(task for task in (client, ticks) if task.done()))
                    raise RuntimeError("the conversation with the coordinator ended early")
                await stopped
        finally:
            heartbeat.close()
            self._client.close()
            for task in (client, ticks, beats, stopped):
                task.cancel()
            await asyncio.gather(client, ticks, beats, stopped, return_exceptions=True)
            await self.node_state.close()

    def _hello(self) -> Hello:
        settings = self.settings
        with self.state.changed:
            return Hello(
                run=settings.run,
                node=settings.node,
                incarnation=self._incarnation,
                address=self.find_address(),
                workers=0 if self.state.is_leaving else 1,
                recovery="fresh",
                fingerprint=settings.fingerprint,
                token=self._token,
                had=self.state.place,
                known_generation=self.state.newest,
            )

    def _greet(self) -> None:
        """Said again on every connection: what the coordinator may not have heard."""
        with self.state.changed:
            if self.state.is_leaving:
                self.send(Leaving())
            if self.state.done_generation and self.state.place is not None:
                self.send(Done(self.state.done_generation))
            self.state.changed.notify_all()

    def _take(self, message: Message) -> None:
        with self.state.changed:
            match message:
                case Welcome():
                    self.state.lease_seconds = message.lease_seconds
                    self.state.newest = max(self.state.newest, message.generation)
                case Pong():
                    self.state.newest = max(self.state.newest, message.generation)
                case Plan():
                    self._take_plan(message)
                case Go():
                    self.state.newest = max(self.state.newest, message.generation)
                    self.state.go = message
                case Leave() if self._client is not None:
                    # Its state is in checkpoints, if anywhere; and the coordinator is not to be bothered
                    # again.
                    self._client.send(Left(message.generation, is_saved=False))
                    self._client.close()
                    self.state.end = End(int(ExitCode.STOPPED_SAVED), "left")
                case End():
                    self._finish(message)
                case Refused():
                    # Whatever a coordinator of another version says: a refusal is no verdict about the run.
                    self._finish(End(int(ExitCode.INTERNAL), message.reason, message.message))
            self._announce()
            self.state.changed.notify_all()

    def _take_plan(self, plan: Plan) -> None:
        self.state.newest = max(self.state.newest, plan.generation)
        self.state.plan = plan
        if self.state.done_generation:
            self.send(Ready(plan.generation, workers=0, port=0))
        elif self.state.is_leaving:
            self.say_ready_to_leave()

    def _finish(self, end: End) -> None:
        self.state.end = self.state.end or end
        if end.message:
            say(end.message)

    def _take_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self.wakeup_read, 256)
            if (
                any(number in numbers for number in _STOPPING_SIGNALS)
                and not self.state.is_leaving
            ):
                with self.state.changed:
                    self.state.is_leaving = True
                    if self._client is not None:
                        self._client.send(Leaving())
                    self._announce()

    async def _tick(self) -> None:
        last_flush = 0.0
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            with self.state.changed:
                self._announce()
                if self.state.is_leaving:
                    self.say_ready_to_leave()
            if time.monotonic() - last_flush >= _PROGRESS_SECONDS:
                last_flush = time.monotonic()
                self.members.flush_report()

    def say_ready_to_leave(self) -> None:
        """A leaving agent is not going to ask for another group: the end of its workers is told from here."""
        with self.state.changed:
            is_out = (
                self.state.is_out
                or self.state.place is None
                or (self.members.watch is not None and self.members.watch.are_gone)
            )
            if (
                is_out
                and self.state.plan is not None
                and self.state.answered_generation < self.state.plan.generation
            ):
                self.state.answered_generation = self.state.plan.generation
                self.send(Ready(self.state.plan.generation, workers=0, port=0))
                self.state.changed.notify_all()

    def _announce(self) -> None:
        own = self.state.place.generation if self.state.place is not None else 0
        self.node_state.announce(
            newest_generation=self.state.newest,
            own_generation=own,
            contact=time.monotonic() - min(self.seconds_since_contact(), time.monotonic()),
            is_draining=self.drains(),
            lease_seconds=self.state.lease_seconds,
        )

    def _say_now(self, messages: list[Message]) -> None:
        # Not by way of the loop: the last progress has to be said before the vote that may end the run.
        for message in messages:
            try:
                if self._client is not None:
                    self._client.send(message)
            except ProtocolError as error:
                # It would fail again; what follows it must not be lost with it.
                say(f"{message.TYPE} could not be told to the coordinator: {error}")

    async def _may_commit(self, generation: int) -> bool:
        if (
            self._client is None
            or self.state.place is None
            or self.state.place.generation != generation
        ):
            return False
        # A coordinator that is away for less than the lease is waited for: the save would be lost for
        # nothing.
        while not self._client.is_connected:
            if (
                self.seconds_since_contact() > self.state.lease_seconds
                or self._stopped.is_set()
            ):
                return False
            await asyncio.sleep(_TICK_SECONDS)
        return await self._client.commit(generation)

    def drains(self) -> bool:
        """Whether the planned change can wait for workers that save and leave by themselves."""
        place, plan = self.state.place, self.state.plan
        if place is None or not self.node_state.has_guard(place.generation):
            return False
        if self.state.newest > place.generation:
            return plan is not None and not plan.hard
        return self.state.is_leaving

    def send(self, message: Message) -> None:
        self.call(self._say_now, [message])

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        if self._loop is not None:
            with contextlib.suppress(
                RuntimeError
            ):  # the loop has ended, and with it all there was to say
                self._loop.call_soon_threadsafe(function, *arguments)

    def seconds_since_contact(self) -> float:
        """How long ago the coordinator was heard."""
        return self._client.seconds_since_contact if self._client is not None else float("inf")

    def find_address(self) -> str:
        """This node's address as the others see it. Raises OSError."""
        return self.settings.address or address_towards(self.settings.host, self.settings.port)
