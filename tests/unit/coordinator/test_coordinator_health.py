"""A coordinator survives an error in its tick or its journal; otherwise its health pages report the error."""

import asyncio
import gc
import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from simulated_cluster import TOKEN, make_settings

from evergrad_common.codec import encode
from evergrad_common.contract import ExitCode
from evergrad_coordinator import __main__ as command
from evergrad_coordinator.edge import server as edge
from evergrad_coordinator.edge.http import StatusServer
from evergrad_coordinator.edge.journal import MemoryStore
from evergrad_coordinator.edge.peer import ConnectionLimits
from evergrad_coordinator.edge.server import Server
from evergrad_coordinator.protocol import Beat, Hello, Message, Ping
from evergrad_coordinator.rules import events
from evergrad_coordinator.rules.group import Group, new_group
from evergrad_coordinator.rules.state import Effect

PATIENCE = 200.0


@dataclass
class Place:
    """A coordinator with its ports, and its log."""

    server: Server
    port: int
    page: int
    logged: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    connections: list["Connection"] = field(default_factory=list)

    async def connect(self, first: Message) -> "Connection":
        """Open a connection until the end of the test, with its first message."""
        one = Connection(*await asyncio.open_connection("127.0.0.1", self.port))
        self.connections.append(one)
        one.send(first)
        return one

    async def join(self, name: str) -> "Connection":
        """Connect a node."""
        return await self.connect(hello(name))

    async def health(self) -> tuple[str, str]:
        """Return the responses of /healthz and /readyz: code and text."""
        return await self._get("/healthz"), await self._get("/readyz")

    async def _get(self, path: str) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.page)
        request = f"GET {path} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        writer.write(request.encode())
        head, _, body = (await asyncio.wait_for(reader.read(), PATIENCE)).partition(
            b"\r\n\r\n"
        )
        writer.close()
        return f"{head.split()[1].decode()} {body.decode().strip()}"

    def find_logged(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.logged if name == event]


@dataclass
class Connection:
    """A connection to the coordinator."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, *messages: Message) -> None:
        self.writer.write(b"".join(encode(one) for one in messages))

    async def receive(self) -> str:
        """Return the kind of the next message."""
        line = await asyncio.wait_for(self.reader.readline(), PATIENCE)
        return str(json.loads(line)["type"])


def hello(name: str) -> Hello:
    return Hello("r", name, f"i{name}", "127.0.0.1", 1, "in-process", token=TOKEN)


def serving(
    scenario: Callable[[Place], Awaitable[None]],
    *,
    store: MemoryStore | None = None,
    silence_seconds: float = PATIENCE,
) -> None:
    """Run a test with a coordinator that plans a group once two nodes are connected."""

    async def run() -> None:
        settings = make_settings(
            expect=2, max_nodes=2, silence_seconds=silence_seconds, lease_seconds=PATIENCE
        )
        logged: list[tuple[str, dict[str, Any]]] = []
        server = Server(
            new_group(settings, generation=0, now=time.monotonic()),
            store or MemoryStore(),
            log=lambda event, **fields: logged.append((event, fields)),
            limits=ConnectionLimits(persist_retry_seconds=0.01),
        )
        status = StatusServer(server)
        place = Place(
            server,
            await server.listen("127.0.0.1", 0),
            await status.listen("127.0.0.1", 0),
            logged,
        )
        try:
            await scenario(place)
        finally:
            status.close()
            await server.close()
            for one in place.connections:
                one.writer.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
                await asyncio.wait([task])

    asyncio.run(run())


async def poll(is_so: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until, f"{what} did not happen"
        await asyncio.sleep(0.005)


def break_ticks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let each tick raise an error while the list is not empty; each tick removes one entry."""
    on_tick, left = events.on_tick, list[int]()

    def tick(group: Group, *, now: float) -> list[Effect]:
        if left:
            left.pop()
            raise RuntimeError("a defect that one tick meets")
        return on_tick(group, now=now)

    monkeypatch.setattr(events, "on_tick", tick)
    return left


def test_after_an_error_in_a_tick_a_silent_node_is_still_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = break_ticks(monkeypatch)

    async def scenario(place: Place) -> None:
        nodes = [await place.join(name) for name in "01"]
        await poll(lambda: len(place.server.group.nodes) == 2, "both nodes")
        left.append(1)
        # Pings alone cause no tick, and nearly all messages of a run are pings.
        until = time.monotonic() + PATIENCE
        while "1" in place.server.group.nodes:
            assert time.monotonic() < until, "the silent node was not dropped"
            nodes[0].send(Ping())
            await asyncio.sleep(0.02)
        assert not left
        assert place.server.counters.internal_errors == 1
        assert "a defect" in place.find_logged("internal_error")[0]["error"]
        assert await place.health() == ("200 ok", "200 ok")

    serving(scenario, silence_seconds=0.6)


def test_a_coordinator_whose_ticks_all_fail_is_unhealthy_until_one_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = break_ticks(monkeypatch)
    monkeypatch.setattr(edge, "STALL_SECONDS", 0.5)

    async def scenario(place: Place) -> None:
        left.extend([1] * 10**6)
        await poll(lambda: place.server.find_stall() != "", "the stall")
        healthy, ready = await place.health()
        assert healthy.startswith("503 no tick was completed for")
        assert ready.startswith("503 no tick")
        left.clear()
        await poll(lambda: place.server.find_stall() == "", "the next tick")

    serving(scenario)


class FailingStore(MemoryStore):
    """A journal whose writes raise ``error`` while it is set."""

    error: BaseException | None = None

    def advance(self, expected: int, new: int) -> bool:
        if self.error is not None:
            raise self.error
        return super().advance(expected, new)


def test_any_error_of_the_journal_is_retried_until_the_plan_reaches_the_nodes() -> None:
    store = FailingStore()
    store.error = RuntimeError("can't start new thread")

    async def scenario(place: Place) -> None:
        nodes = [await place.join(name) for name in "01"]
        await poll(lambda: place.server.effects.num_failures > 1, "a second try")
        assert "can't start new thread" in place.find_logged("journal_failed")[0]["error"]
        # A restart would not help, and the group continues to train.
        unready = "503 the newest generation cannot be stored"
        assert await place.health() == ("200 ok", unready)
        store.error = None
        for node in nodes:
            while await node.receive() != "plan":
                pass
        assert await place.health() == ("200 ok", "200 ok")

    serving(scenario, store=store)


class Gone(BaseException):
    """An error that ends a task in every case."""


def test_a_coordinator_whose_journal_task_has_ended_is_unhealthy() -> None:
    store = FailingStore()
    store.error = Gone()

    async def scenario(place: Place) -> None:
        for name in "01":
            await place.join(name)
        await poll(lambda: place.server.effects.has_stopped, "the end of the task")
        stopped = "503 the journal's task has ended: no change of the group is carried out"
        assert await place.health() == (stopped, stopped)
        await poll(lambda: bool(place.find_logged("internal_error")), "the report")

    serving(scenario, store=store)


def test_a_journal_write_that_hangs_is_shown_in_the_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(edge, "_JOURNAL_SECONDS", 0.0)
    is_released = threading.Event()

    class HangingStore(MemoryStore):
        def advance(self, expected: int, new: int) -> bool:
            assert is_released.wait(PATIENCE)
            return super().advance(expected, new)

    async def scenario(place: Place) -> None:
        try:
            for name in "01":
                await place.join(name)
            await poll(lambda: place.server.effects.seconds_waiting > 0, "the write")
            healthy, ready = await place.health()
            assert healthy == "200 ok"
            assert ready.startswith(
                "503 the newest generation has been waiting for the disk"
            )
        finally:
            is_released.set()
        await poll(lambda: place.server.effects.seconds_waiting == 0, "the plan")
        assert await place.health() == ("200 ok", "200 ok")

    serving(scenario, store=HangingStore())


class TakenStore(MemoryStore):
    """A journal whose next number another coordinator has already used."""

    def advance(self, expected: int, new: int) -> bool:
        return False


def test_a_superseded_coordinator_answers_no_ping_and_reports_it_on_its_pages() -> None:
    async def scenario(place: Place) -> None:
        node = await place.join("0")
        beats = await place.connect(Beat("r", "0", "i0", token=TOKEN))
        assert await beats.receive() == "pong"
        await place.join("1")
        await poll(place.server.finished.done, "the end")
        assert place.server.finished.result() == ExitCode.INTERNAL

        # All data that arrives before these pings is read when their connections have been counted.
        before = place.server.counters.messages
        for _ in range(5):
            node.send(Ping())
            beats.send(Ping())
        await poll(lambda: place.server.counters.messages == before + 10, "all pings")
        superseded = "503 superseded: another coordinator has taken the next generation"
        assert await place.health() == (superseded, superseded)
        await place.server.close()  # which ends the connections
        assert b"pong" not in await asyncio.wait_for(node.reader.read(), PATIENCE)
        assert b"pong" not in await asyncio.wait_for(beats.reader.read(), PATIENCE)

    serving(scenario, store=TakenStore())


def test_a_superseded_coordinator_exits_for_any_linger_time(tmp_path: Path) -> None:
    address = tmp_path / "address.json"
    (tmp_path / "token").write_text(TOKEN)
    options = command.parse_arguments(
        [
            *("--run", "r", "--min", "1", "--max", "1"),
            *("--host", "127.0.0.1", "--address-file", str(address)),
            *("--token-file", str(tmp_path / "token"), "--linger", "100000000"),
        ]
    )

    async def join() -> None:
        await poll(address.exists, "the address")
        port = json.loads(address.read_text())["port"]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(encode(hello("0")))
        while await asyncio.wait_for(reader.read(100), PATIENCE):
            pass
        writer.close()

    async def run() -> int:
        settings = command.build_settings(options, TOKEN)
        serving = asyncio.create_task(command.serve(options, settings, TakenStore(), 0))
        await join()
        return await asyncio.wait_for(serving, PATIENCE)

    thresholds = gc.get_threshold()
    try:
        assert asyncio.run(run()) == ExitCode.INTERNAL
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
