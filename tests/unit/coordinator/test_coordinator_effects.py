"""The server's effects: bounded while the journal cannot be written, and carried out one after the other."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from patience import PATIENCE
from simulated_cluster import TOKEN, make_settings

from evergrad_common.codec import encode
from evergrad_coordinator.edge.journal import MemoryStore
from evergrad_coordinator.edge.peer import ConnectionLimits, Peer
from evergrad_coordinator.edge.server import Server
from evergrad_coordinator.protocol import Commit, Hello, Message, Ping
from evergrad_coordinator.rules import events
from evergrad_coordinator.rules.group import Group, new_group


class Connection(asyncio.Transport):
    """A connection to the server, without a socket."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.sent = b""
        self.is_closed = False
        self._peer = Peer(server, server.limits)
        self._peer.connection_made(self)

    def send(self, *messages: Message) -> None:
        self._peer.data_received(b"".join(encode(one) for one in messages))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return FakeSocket() if name == "socket" else None

    def write(self, data: Any) -> None:
        self.sent += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close


class FakeSocket:
    def setsockopt(self, *_: int) -> None: ...


class FailingStore(MemoryStore):
    """A journal on a disk that is full for some time."""

    is_failing = True

    def advance(self, expected: int, new: int) -> bool:
        if self.is_failing:
            raise OSError(28, "No space left on device")
        return super().advance(expected, new)


def hello(name: str) -> Hello:
    return Hello("r", name, f"i{name}", "127.0.0.1", 1, "in-process", token=TOKEN)


def with_server(
    work: Callable[[Server], Awaitable[None]],
    *,
    store: MemoryStore | None = None,
    num_nodes: int = 2,
    **limits: Any,
) -> None:
    """Run ``work`` with a server that plans a group once ``num_nodes`` are connected. No error may occur."""
    errors: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, error: errors.append(error)
        )
        settings = make_settings(
            expect=num_nodes, max_nodes=num_nodes, silence_seconds=PATIENCE
        )
        group = new_group(settings, generation=0, now=time.monotonic())
        server = Server(
            group,
            store or MemoryStore(),
            log=lambda *_, **__: None,
            limits=ConnectionLimits(persist_retry_seconds=0.01, **limits),
        )
        await work(server)
        await server.close()

    asyncio.run(run())
    assert errors == []


async def poll(is_so: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until, f"{what} did not happen"
        await asyncio.sleep(0.005)


def test_effects_that_wait_for_an_unwritable_journal_are_bounded() -> None:
    store = FailingStore()

    async def work(server: Server) -> None:
        nodes = [Connection(server) for _ in range(2)]
        for number, node in enumerate(nodes):
            node.send(hello(str(number)))
        await poll(lambda: server.effects.num_waiting > 0, "the first plan")
        before = server.effects.num_waiting
        for request in range(500):
            nodes[0].send(Commit(request=request, generation=0))
        assert before < server.effects.num_waiting <= 64

        # Unknown nodes are refused, and connected nodes still get responses to their pings.
        late = Connection(server)
        late.send(hello("2"))
        assert late.is_closed and server.effects.num_waiting <= 64
        assert "again" in server.set_bounds(1, 2)
        nodes[0].sent = b""
        nodes[0].send(Ping())
        assert b'"pong"' in nodes[0].sent and not nodes[0].is_closed

        # The node whose message was lost must send everything again; the other node keeps its connection.
        store.is_failing = False
        await poll(lambda: server.effects.num_waiting == 0, "the plan")
        assert b'"plan"' in nodes[1].sent
        await poll(
            lambda: nodes[0].is_closed, "the end of the connection that was not heard"
        )
        assert not nodes[1].is_closed
        again = Connection(server)
        again.send(hello("0"))
        await poll(lambda: b'"plan"' in again.sent, "the plan on a new connection")

    with_server(work, store=store, waiting_effects=64)


def test_a_node_whose_messages_were_dropped_is_ignored_until_it_reconnects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same after the journal works again: the next message continues after the rejected one."""
    store, taken = FailingStore(), []
    on_message = events.on_message

    def note(group: Group, peer: int, message: Message, *, now: float) -> Any:
        taken.append(message)
        return on_message(group, peer, message, now=now)

    monkeypatch.setattr(events, "on_message", note)

    async def work(server: Server) -> None:
        nodes = [Connection(server) for _ in range(2)]
        for number, node in enumerate(nodes):
            node.send(hello(str(number)))
        await poll(lambda: server.effects.num_waiting > 0, "the first plan")
        for request in range(500):
            nodes[0].send(Commit(request=request, generation=0))
        assert server.effects.is_full

        store.is_failing = False
        await poll(lambda: server.effects.num_waiting == 0, "the plan")
        late = Commit(request=501, generation=0)
        nodes[0].send(late, Ping())
        nodes[1].send(late)
        assert taken.count(late) == 1
        await poll(
            lambda: nodes[0].is_closed, "the end of the connection that was not heard"
        )

    with_server(work, store=store, waiting_effects=64)


def test_any_number_of_nodes_that_do_not_read_is_disconnected() -> None:
    async def work(server: Server) -> None:
        nodes = [Connection(server) for _ in range(600)]
        for number, node in enumerate(nodes):
            node.send(hello(str(number)))
        # From now on, no node reads fast enough: the plan to the first node closes its connection, which
        # affects all others.
        server.limits = dataclasses.replace(server.limits, unsent_bytes=-1)
        await poll(
            lambda: all(node.is_closed for node in nodes), "the end of all connections"
        )
        assert server.num_connections == 0
        assert server.counters.rejected == {"does_not_read": 600}

    with_server(work, num_nodes=600)
