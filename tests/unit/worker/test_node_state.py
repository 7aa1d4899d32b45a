"""The node state: a record that is never seen half-written, and a socket that answers for the right generation."""

import asyncio
import contextlib
import gc
import json
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

from evergrad import node_state
from evergrad.node_messages import CODEC, KINDS, MAX_LINE_BYTES, ScriptReport
from evergrad.node_state import (
    RECORD_NAME,
    SOCKET_NAME,
    NodeState,
    NodeStateError,
    decode_node_state,
    encode_node_state,
    read_node_state,
)
from evergrad.report_values import FIELDS
from evergrad_trainer.worker.node_state import NodeStateServer

NOTICE = NodeState(
    newest_generation=7,
    own_generation=6,
    contact=12.5,
    lease_seconds=10.0,
    is_draining=True,
)

GRANTED: dict[str, object] = {"type": "answer", "granted": True}
REFUSED: dict[str, object] = {"type": "answer", "granted": False}


def run_with_server(
    directory: Path,
    body: Callable[[NodeStateServer, list[dict[str, object]]], Coroutine[Any, Any, None]],
) -> None:
    """Runs ``body`` with a started server whose coordinator grants generation 6 only."""

    async def main() -> None:
        reports: list[dict[str, object]] = []

        async def may_commit(generation: int) -> bool:
            return generation == 6

        server = NodeStateServer(directory, on_report=reports.append, may_commit=may_commit)
        await server.start()
        try:
            await body(server, reports)
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


async def ask(directory: Path, *messages: dict[str, object] | bytes) -> dict[str, object]:
    """Sends the messages on one connection and returns the answer to the last; {} when the server hung up
    instead."""
    reader, writer = await asyncio.open_unix_connection(directory / SOCKET_NAME)
    for message in messages:
        writer.write(
            message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"
        )
    try:
        line = await reader.readline()
    except ConnectionResetError:
        line = b""
    writer.close()
    return json.loads(line) if line else {}


def test_a_notice_is_decoded_unchanged() -> None:
    assert decode_node_state(encode_node_state(NOTICE)) == NOTICE


@pytest.mark.parametrize("offset", range(node_state.RECORD_BYTES))
def test_a_record_with_one_wrong_byte_is_refused(offset: int) -> None:
    record = bytearray(encode_node_state(NOTICE))
    record[offset] ^= 0x10
    with pytest.raises(NodeStateError):
        decode_node_state(bytes(record))


@pytest.mark.parametrize(
    "length", [0, 1, node_state.RECORD_BYTES - 1, node_state.RECORD_BYTES + 1]
)
def test_a_record_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(NodeStateError):
        decode_node_state((encode_node_state(NOTICE) * 2)[:length])


def test_readers_see_complete_records_during_a_write(tmp_path: Path) -> None:
    seen: list[NodeState] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            seen.append(read_node_state(tmp_path))

    async def body(server: NodeStateServer, _: list[dict[str, object]]) -> None:
        reader = threading.Thread(target=read)
        reader.start()
        number = 0
        # A busy machine lets the reader begin late.
        while number < 3000 or (len(seen) <= 10 and reader.is_alive()):
            number += 1
            server.announce(
                newest_generation=number,
                own_generation=number,
                contact=float(number),
                is_draining=number % 2 == 0,
            )
        is_over.set()
        await asyncio.to_thread(reader.join)

    run_with_server(tmp_path, body)
    assert len(seen) > 10
    assert all(one.newest_generation == one.own_generation == one.contact for one in seen)
    assert [one.newest_generation for one in seen] == sorted(
        one.newest_generation for one in seen
    )


def test_a_report_reaches_the_node_unchanged(tmp_path: Path) -> None:
    async def body(_: NodeStateServer, reports: list[dict[str, object]]) -> None:
        answer = await ask(
            tmp_path,
            {"type": "report", "step": 3, "loss": 0.5},
            {"type": "commit", "generation": 6},
        )
        assert answer == GRANTED
        assert reports == [{"step": 3, "loss": 0.5}]

    run_with_server(tmp_path, body)


@pytest.mark.parametrize(
    "text", ['{"type": "report"}', '{"type": "report", "step": NaN, "loss": ["x"]}']
)
def test_a_report_of_odd_values_does_not_disconnect_its_sender(
    tmp_path: Path, text: str
) -> None:
    async def body(_: NodeStateServer, reports: list[dict[str, object]]) -> None:
        assert (
            await ask(tmp_path, text.encode() + b"\n", {"type": "commit", "generation": 6})
            == GRANTED
        )
        assert len(reports) == 1

    run_with_server(tmp_path, body)


def test_unknown_fields_of_a_report_are_ignored(tmp_path: Path) -> None:
    async def body(_: NodeStateServer, reports: list[dict[str, object]]) -> None:
        newer = {"step": 3, "totalSteps": 9, "epoch": 1, "tags": {"a": [1]}}
        answer = await ask(
            tmp_path,
            {"type": "report", **newer},
            {"type": "commit", "generation": 6, "reason": "end of an epoch"},
        )
        assert answer == GRANTED
        assert reports == [{"step": 3, "total_steps": 9}]

    run_with_server(tmp_path, body)


def test_a_report_has_the_values_that_the_helper_reads() -> None:
    given = dict.fromkeys(FIELDS, 1)
    report = CODEC.decode(CODEC.encode(ScriptReport(6, 0, **given)))
    assert isinstance(report, ScriptReport)
    assert report.values == {"generation": 6, "rank": 0, **given}


def test_each_kind_of_message_has_its_own_name() -> None:
    assert [kind.TYPE for kind in KINDS] == [
        "report",
        "commit",
        "answer",
        "guard",
        "stopping",
    ]


def test_only_the_running_generation_may_commit(tmp_path: Path) -> None:
    async def body(_: NodeStateServer, __: list[dict[str, object]]) -> None:
        assert await ask(tmp_path, {"type": "commit", "generation": 5}) == REFUSED
        assert await ask(tmp_path, {"type": "commit", "generation": 6}) == GRANTED

    run_with_server(tmp_path, body)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff\xfe\n",
        b"[]\n",
        b"{}\n",
        b'{"type": "other"}\n',
        b'{"type": "answer", "granted": true}\n',
        b'{"type": "guard"}\n',
        b'{"type": "commit", "generation": "6"}\n',
        b"[" * 3000 + b"\n",
        b"x" * 3 * MAX_LINE_BYTES,
    ],
)
def test_invalid_data_ends_its_own_connection_and_no_other(
    tmp_path: Path, nonsense: bytes
) -> None:
    async def body(_: NodeStateServer, reports: list[dict[str, object]]) -> None:
        assert await ask(tmp_path, nonsense) == {}
        assert await ask(tmp_path, {"type": "commit", "generation": 6}) == GRANTED
        assert reports == []

    run_with_server(tmp_path, body)


def test_a_guard_counts_while_its_connection_is_open(tmp_path: Path) -> None:
    async def body(server: NodeStateServer, _: list[dict[str, object]]) -> None:
        assert not server.has_guard(6)
        with socket.socket(socket.AF_UNIX) as worker:
            worker.connect(str(tmp_path / SOCKET_NAME))
            worker.sendall(b'{"type": "guard", "generation": 6}\n')
            await until(lambda: server.has_guard(6))
            assert not server.has_guard(7)
            assert not server.has_stopped(6)
            worker.sendall(b'{"type": "stopping", "generation": 6}\n')
            await until(lambda: server.has_stopped(6))
        await until(lambda: not server.has_guard(6))
        assert server.has_stopped(6)

    run_with_server(tmp_path, body)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_workers_get_the_directory_and_their_generation(tmp_path: Path) -> None:
    async def body(server: NodeStateServer, _: list[dict[str, object]]) -> None:
        assert server.environment == {"EVERGRAD_NODE_STATE": str(tmp_path)}
        server.announce(
            newest_generation=6, own_generation=6, contact=1.0, is_draining=False
        )
        assert server.environment == {
            "EVERGRAD_NODE_STATE": str(tmp_path),
            "EVERGRAD_GENERATION": "6",
        }

    run_with_server(tmp_path, body)


def test_a_closed_server_leaves_no_files(tmp_path: Path) -> None:
    async def body(_: NodeStateServer, __: list[dict[str, object]]) -> None:
        assert (tmp_path / "one" / RECORD_NAME).stat().st_mode & 0o077 == 0

    run_with_server(tmp_path / "one", body)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("turns", range(6))
def test_a_worker_that_connects_while_the_server_closes_is_disconnected(
    tmp_path: Path, turns: int
) -> None:
    async def body(server: NodeStateServer, _: list[dict[str, object]]) -> None:
        with socket.socket(socket.AF_UNIX) as worker:
            worker.connect(str(tmp_path / SOCKET_NAME))
            worker.setblocking(False)
            # After each number of the loop's turns the connection is somewhere else between the kernel and
            # its handler.
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.close()
            with contextlib.suppress(ConnectionResetError):
                assert (
                    await asyncio.wait_for(
                        asyncio.get_running_loop().sock_recv(worker, 1), PATIENCE
                    )
                    == b""
                )

    run_with_server(tmp_path, body)
    gc.collect()


def test_a_directory_path_too_long_for_a_socket_is_reported(tmp_path: Path) -> None:
    async def body(_: NodeStateServer, __: list[dict[str, object]]) -> None:
        raise AssertionError("the server must not start")

    with pytest.raises(ValueError, match=r"longer than 107 bytes.*Choose a shorter TMPDIR"):
        run_with_server(tmp_path / ("d" * 110), body)
