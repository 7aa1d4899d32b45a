"""A supervisor and a coordinator that is a script of the test: what it says when, and what it says again after a reconnect."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from evergrad_coordinator.protocol import (
    Capacity,
    End,
    Go,
    Had,
    Hello,
    Leave,
    Left,
    Message,
    Ping,
    Plan,
    Ready,
    Refused,
    Welcome,
    decode_from_node,
    encode,
)
from evergrad_trainer.node.metrics import NodeMetrics
from evergrad_trainer.node.supervisor import Crew, NodeSettings, Supervisor

SECONDS = 20.0
M = TypeVar("M", bound=Message)


@dataclass
class FakeCrew:
    """Workers that are only numbers; keeps what it is told."""

    capacity: int = 0
    place: Go | None = None
    is_empty: bool = True
    told: list[tuple[Any, ...]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self.told.append((name, *args, *kwargs.values()))

    def was_told(self, name: str) -> list[tuple[Any, ...]]:
        return [one[1:] for one in self.told if one[0] == name]


class Peer:
    """The coordinator's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def hear(self, kind: type[M]) -> M:
        """The next message of a kind; pings and others are passed over."""
        while line := await asyncio.wait_for(self._reader.readline(), SECONDS):
            message = decode_from_node(line)
            if isinstance(message, kind):
                return message
        raise EOFError(f"the node has hung up before {kind.TYPE}")

    def say(self, message: Message) -> None:
        self.writer.write(encode(message))


@dataclass
class Scene:
    """A supervisor under test."""

    supervisor: Supervisor
    crew: FakeCrew
    connections: "asyncio.Queue[Peer]"

    async def accept(self) -> Peer:
        return await asyncio.wait_for(self.connections.get(), SECONDS)

    async def welcome(self) -> Peer:
        peer = await self.accept()
        await peer.hear(Hello)
        peer.say(Welcome(generation=0, lease_seconds=10.0, silence_seconds=3.0))
        # Its first sign that it has read this.
        await peer.hear(Ping)
        return peer


def play(directory: Path, script: Callable[[Scene], Awaitable[None]]) -> int:
    """Run ``script`` beside a supervisor; the supervisor's exit code."""

    async def run() -> int:
        connections: asyncio.Queue[Peer] = asyncio.Queue()

        writers: list[asyncio.StreamWriter] = []

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            await connections.put(Peer(reader, writer))

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        settings = NodeSettings(
            run="tiny",
            node="1",
            coordinator_host="127.0.0.1",
            coordinator_port=server.sockets[0].getsockname()[1],
            address="127.0.0.1",
            recovery="in-process",
            run_directory=directory,
            termination_log=directory / "last-words",
        )
        scene = Scene(Supervisor(settings, metrics=NodeMetrics("tiny", "1")), FakeCrew(), connections)
        serving = asyncio.create_task(scene.supervisor.run(cast(Crew, scene.crew)))
        try:
            await script(scene)
            return await asyncio.wait_for(serving, SECONDS)
        finally:
            serving.cancel()
            server.close()
            for writer in writers:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    return asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


def test_workers_that_are_warm_between_hello_and_welcome_are_not_forgotten(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.accept()
        assert (await peer.hear(Hello)).workers == 0
        scene.crew.capacity = 2
        scene.supervisor.capacity_changed()
        peer.say(Welcome(generation=0, lease_seconds=10.0, silence_seconds=3.0))
        assert (await peer.hear(Capacity)).workers == 2
        peer.say(End(exit_code=0, reason="Complete"))

    assert play(tmp_path, script) == 0


def test_a_lost_connection_comes_back_with_the_place_that_is_had(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.welcome()
        peer.say(Plan(7, hard=False, is_member=True, reason="3 nodes are here"))
        await until(lambda: scene.crew.was_told("change") == [(7, False, "3 nodes are here", False)])
        scene.crew.place = Go(7, 2, 1, 3, 1, 3, "10.0.0.1", 4000)
        peer.writer.close()
        again = await scene.accept()
        hello = await again.hear(Hello)
        assert hello.had == Had(generation=7, first_rank=2, workers=1, world_size=3)
        assert hello.known_generation == 7
        again.say(Welcome(generation=7, lease_seconds=10.0, silence_seconds=3.0))
        again.say(End(exit_code=75, reason="stopped"))

    assert play(tmp_path, script) == 75


def test_each_plan_is_answered_with_a_store_of_its_own(tmp_path: Path) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.welcome()
        ports = set()
        for generation in (3, 4):
            scene.supervisor.ready(generation, workers=1, step=5)
            ready = await peer.hear(Ready)
            assert (ready.generation, ready.workers, ready.step) == (generation, 1, 5)
            ports.add(ready.port)
        assert len(ports) == 2
        peer.say(Leave(4, save=True))
        await until(lambda: scene.crew.was_told("depart") == [(4, True)])
        scene.supervisor.departed(is_saved=False)
        assert (await peer.hear(Left)).is_saved is False

    assert play(tmp_path, script) == 76


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (Refused(exit_code=64, reason="fingerprint", message="configuration: here a, there b"), 64),
        (End(exit_code=70, reason="FailuresWithoutProgress", message="rank 1 failed 3 times"), 70),
    ],
)
def test_the_coordinator_s_last_words_are_the_node_s(tmp_path: Path, message: Any, code: int) -> None:
    async def script(scene: Scene) -> None:
        peer = await scene.accept()
        await peer.hear(Hello)
        peer.say(message)

    assert play(tmp_path, script) == code
    assert (tmp_path / "last-words").read_text() == message.message
