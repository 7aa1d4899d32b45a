"""A torchrun agent's connection to the coordinator, in a separate thread with an event loop."""

import asyncio
import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from evergrad_common.codec import ProtocolError
from evergrad_common.contract import ExitCode
from evergrad_common.secret import read_token
from evergrad_coordinator.edge.client import CoordinatorClient
from evergrad_coordinator.edge.heartbeat_process import Heartbeat
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
from evergrad_trainer.torchrun.agent_members import AgentMembers
from evergrad_trainer.torchrun.agent_state import AgentSettings, AgentState
from evergrad_trainer.torchrun.agent_workers import say
from evergrad_trainer.worker.node_state import NodeStateServer

_TICK_SECONDS = 0.2
_PROGRESS_SECONDS = 0.5
_CLOSE_SECONDS = 2.0
_STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals on which torchrun ends the agent."""


class WakeupPipe:
    """A pipe to which Python's C signal handler writes the number of each signal.

    With it the agent reports a stop to the coordinator before its teardown begins.
    """

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        for descriptor in (self.read_end, self.write_end):
            os.set_blocking(descriptor, False)

    def read(self) -> bytes:
        """Return the numbers of the signals since the last read, one byte per signal."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.read_end, 256)
        return b""


class AgentLoop:
    """Exchanges messages with the coordinator and with the workers of the agent's node.

    Private methods run on the loop's thread. An error in that thread ends the run, or ``start`` raises it.
    """

    def __init__(
        self, settings: AgentSettings, state: AgentState, *, directory: Path
    ) -> None:
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
        self.wakeup = WakeupPipe()
        self._thread = threading.Thread(
            target=self._run, name="evergrad-rendezvous", daemon=True
        )

    def start(self) -> None:
        """Start the thread. Raises the error if the token file or the node state's socket fails."""
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
        """List the descriptors that a forked child must close: the pipe and the connection.

        While a child holds the connection open, the coordinator does not notice that the agent closed it.
        """
        connection = self._client.fileno() if self._client is not None else -1
        ends = (connection, self.wakeup.read_end, self.wakeup.write_end)
        return [number for number in ends if number >= 0]

    def _run(self) -> None:
        try:
            asyncio.run(self._converse())
        except BaseException as error:  # noqa: BLE001 - handed to the agent's thread, which is waiting
            self._failure = error
            words = f"the rendezvous thread ended: {error!r}"
            with self.state.changed:
                end = End(int(ExitCode.INTERNAL), "internal", words)
                self.state.end = self.state.end or end
                self.state.changed.notify_all()
        finally:
            self._is_started.set()

    async def _converse(self) -> None:
        # Errors of the token file and the socket occur before ``start`` returns, which raises them.
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

        # Start the heartbeat process before the first message. It shows that the node is alive even if this
        # process is slow.
        settings = self.settings
        beat = Beat(settings.run, settings.node, self._incarnation, token=self._token)
        heartbeat = Heartbeat(settings.host, settings.port, beat)
        heartbeat.start()
        self._loop.add_reader(self.wakeup.read_end, self._take_signals)
        self._is_started.set()

        # Wait until the agent stops. The client and the ticks end earlier only after an error.
        client = asyncio.create_task(self._client.run())
        ticks = asyncio.create_task(self._tick())
        beats = asyncio.create_task(heartbeat.keep())
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait(
                (client, ticks, stopped), return_when=asyncio.FIRST_COMPLETED
            )
            if not self._stopped.is_set():
                if self.state.end is None:
                    await asyncio.gather(*(task for task in (client, ticks) if task.done()))
                    raise RuntimeError("the conversation with the coordinator ended early")
                await stopped
        finally:
            # Close the heartbeat process first, because the node has left from here on.
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
                address=settings.find_address(),
                workers=0 if self.state.is_leaving else 1,
                recovery="fresh",
                fingerprint=settings.fingerprint,
                token=self._token,
                had=self.state.place,
                known_generation=self.state.newest,
            )

    def _greet(self) -> None:
        """Send, on every new connection, the messages that the coordinator may have missed."""
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
                    self.state.newest = max(self.state.newest, message.generation)
                    self.state.plan = message
                    # No worker answers for an agent that is done or is leaving, so answer here.
                    if self.state.done_generation:
                        self.send(Ready(message.generation, workers=0, port=0))
                    elif self.state.is_leaving:
                        self.members.say_ready_to_leave()
                case Go():
                    self.state.newest = max(self.state.newest, message.generation)
                    self.state.go = message
                case Leave() if self._client is not None:
                    # The agent has no state to transfer: a script's state is only in its checkpoints.
                    self._client.send(Left(message.generation, is_saved=False))
                    self._client.close()
                    self.state.end = End(int(ExitCode.STOPPED_SAVED), "left")
                case End():
                    self._finish(message)
                case Refused(reason=why, message=words):
                    # A refusal, for any reason, is not an outcome of the run.
                    self._finish(End(int(ExitCode.INTERNAL), why, words))
            self._announce()
            self.state.changed.notify_all()

    def _finish(self, end: End) -> None:
        self.state.end = self.state.end or end
        if end.message:
            say(end.message)

    def _take_signals(self) -> None:
        if any(number in _STOPPING_SIGNALS for number in self.wakeup.read()):
            with self.state.changed:
                if self.state.is_leaving:
                    return
                self.state.is_leaving = True
                if self._client is not None:
                    self._client.send(Leaving())
                self._announce()

    async def _tick(self) -> None:
        last_flush = 0.0
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            with self.state.changed:
                # Announce even without changes: workers exit if the contact time in the record is too old.
                self._announce()
                if self.state.is_leaving:
                    self.members.say_ready_to_leave()
            if time.monotonic() - last_flush >= _PROGRESS_SECONDS:
                last_flush = time.monotonic()
                self.members.flush_report()

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
        # Do not schedule this on the loop: the last progress must be sent before a vote that may end the run.
        for message in messages:
            try:
                if self._client is not None:
                    self._client.send(message)
            except ProtocolError as error:
                # A retry would fail too. Continue, so that the messages after it are still sent.
                say(f"{message.TYPE} could not be told to the coordinator: {error}")

    async def _may_commit(self, generation: int) -> bool:
        place = self.state.place
        if self._client is None or place is None or place.generation != generation:
            return False
        # Wait for a coordinator that is unreachable for less than the lease, because otherwise the save is
        # lost.
        while not self._client.is_connected:
            if (
                self.seconds_since_contact() > self.state.lease_seconds
                or self._stopped.is_set()
            ):
                return False
            await asyncio.sleep(_TICK_SECONDS)
        return await self._client.commit(generation)

    def drains(self) -> bool:
        """Whether the planned change can wait until the workers have saved and exited."""
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
            # If the loop has ended, the call is not needed any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function, *arguments)

    def seconds_since_contact(self) -> float:
        """Seconds since the last message from the coordinator; infinite before the first connection."""
        client = self._client
        return float("inf") if client is None else client.seconds_since_contact
