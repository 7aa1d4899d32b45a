"""A node's heartbeat: a slow node is distinguished from a silent node, and a frozen or lost node is still
detected."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from coordinator_processes import (
    PATIENCE,
    TOKEN,
    Coordinator,
    Start,
    read_until_closed,
    run_coordinators,
    wait_for,
)

from bed.process_state import children_of, is_alive
from evergrad_common.codec import encode
from evergrad_coordinator.protocol import Beat, Capacity

NODE = """
import asyncio, sys, time
from pathlib import Path
from evergrad_coordinator.edge.client import CoordinatorClient
from evergrad_coordinator.edge.heartbeat_process import Heartbeat
from evergrad_coordinator.protocol import Beat, Hello

port, token, folder = int(sys.argv[1]), Path(sys.argv[2]).read_text(), Path(sys.argv[3])

async def be_node():
    heartbeat = Heartbeat("127.0.0.1", port, Beat("r", "0", "i0", token=token))
    hello = Hello("r", "0", "i0", "127.0.0.1", 1, "in-process", token=token)
    client = CoordinatorClient("127.0.0.1", port, hello=lambda: hello, on_message=lambda message: None)
    heartbeat.start()
    running = [asyncio.create_task(client.run()), asyncio.create_task(heartbeat.keep())]
    while True:
        await asyncio.sleep(0.01)
        while (folder / "block").exists():
            time.sleep(0.01)  # as an import or a fork does: nothing else happens here

asyncio.run(be_node())
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from run_coordinators(tmp_path)


@pytest.fixture
def coordinator(start: Start) -> Coordinator:
    """One that takes a second's silence for a loss, and would wait a minute for the lease."""
    return start("--silence", "1", "--lease", "60", "--min", "2").wait_until_listening()


@pytest.fixture
def node(coordinator: Coordinator, tmp_path: Path) -> Iterator[int]:
    """The process of a node that is connected and beats."""
    with run_node(coordinator, tmp_path) as pid:
        yield pid


@contextlib.contextmanager
def run_node(coordinator: Coordinator, tmp_path: Path) -> Iterator[int]:
    """Run a node in a separate process that is connected and sends heartbeats; yield the process."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            NODE,
            str(coordinator.port),
            str(tmp_path / "token"),
            str(tmp_path),
        ]
    )
    try:
        wait_for(
            lambda: (
                is_connected(coordinator)
                and coordinator.metric("evergrad_coordinator_messages_total") > 3
            ),
            "the node",
        )
        wait_for(lambda: children_of(process.pid), "its heartbeat")
        yield process.pid
    finally:
        process.kill()
        process.wait(PATIENCE)


def num_sockets(coordinator: Coordinator) -> int:
    found = 0
    for name in os.listdir(f"/proc/{coordinator.process.pid}/fd"):
        # One that is closed meanwhile is none.
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{coordinator.process.pid}/fd/{name}")
            found += target.startswith("socket:")
    return found


def is_connected(coordinator: Coordinator) -> bool:
    return bool(coordinator.status()["nodes"]["connected"] == 1)


def losses(coordinator: Coordinator) -> list[str]:
    return [line["why"] for line in coordinator.log() if line["event"] == "gone"]


def wait_for_messages(coordinator: Coordinator, number: int) -> None:
    """Wait for this many more heartbeats; a heartbeat process sends two per second."""
    before = coordinator.metric("evergrad_coordinator_messages_total")
    wait_for(
        lambda: (
            coordinator.metric("evergrad_coordinator_messages_total") >= before + number
        ),
        f"{number} messages",
    )


def test_a_node_that_is_delayed_for_longer_than_a_silence_is_not_lost(
    coordinator: Coordinator, node: int, tmp_path: Path
) -> None:
    (tmp_path / "block").touch()
    wait_for_messages(coordinator, 8)
    assert (is_connected(coordinator), losses(coordinator)) == (True, [])
    (tmp_path / "block").unlink()
    wait_for_messages(coordinator, 8)
    assert losses(coordinator) == []


@pytest.mark.parametrize("whole", [False, True])
def test_a_frozen_node_is_lost_with_and_without_a_frozen_heartbeat_process(
    coordinator: Coordinator, node: int, whole: bool
) -> None:
    pids = [node, *(children_of(node) if whole else [])]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: losses(coordinator) == ["silent"], "the loss")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: is_connected(coordinator), "its return")


def test_a_host_that_vanishes_leaves_no_heartbeat_connection(start: Start) -> None:
    coordinator = start("--silence", "1", "--lease", "1").wait_until_listening()
    with coordinator.connect() as peer:
        peer.sendall(encode(Beat("r", "0", "i0", token=TOKEN)))
        # No further data and no end arrive, as from a host without power.
        read_until_closed(peer)
        closed = [line["why"] for line in coordinator.log() if line["event"] == "closed"]
    assert closed == ["silent"]
    assert coordinator.metric("evergrad_coordinator_rejected_total") == 0


def test_a_node_frozen_for_longer_than_a_lease_restores_both_connections(
    start: Start, tmp_path: Path
) -> None:
    coordinator = start("--silence", "1", "--lease", "1", "--min", "2")
    coordinator.wait_until_listening()
    before = num_sockets(coordinator)
    with run_node(coordinator, tmp_path) as node:
        wait_for(lambda: num_sockets(coordinator) == before + 2, "its connections")
        os.kill(node, signal.SIGSTOP)
        wait_for(lambda: num_sockets(coordinator) == before, "their end")
        os.kill(node, signal.SIGCONT)
        wait_for(lambda: num_sockets(coordinator) == before + 2, "its return")


def test_a_heartbeat_process_ends_with_its_node_and_is_restarted_if_it_ends_alone(
    coordinator: Coordinator, node: int
) -> None:
    (first,) = children_of(node)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: [one for one in children_of(node) if one != first], "another")
    (second,) = children_of(node)
    assert losses(coordinator) == []
    os.kill(node, signal.SIGKILL)
    wait_for(
        lambda: not is_alive(second) and losses(coordinator), "its end, and the node's"
    )
    assert losses(coordinator) in (["connection closed"], ["ConnectionResetError"]), (
        "not silent: the end of a node is seen"
    )


def test_the_token_is_in_no_argument_and_no_variable_of_a_heartbeat_process(
    node: int, coordinator: Coordinator
) -> None:
    (beat,) = children_of(node)
    for name in ("cmdline", "environ"):
        assert TOKEN.encode() not in Path(f"/proc/{beat}/{name}").read_bytes()


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (encode(Beat("r", "0", "i0", token="no")), "wrong_token"),
        (encode(Beat("other", "0", "i0", token=TOKEN)), "wrong_token"),
        (encode(Beat("r", "0", "i0", token=TOKEN)) * 2, "malformed"),
        (encode(Beat("r", "0", "i0", token=TOKEN)) + encode(Capacity(1)), "malformed"),
    ],
)
def test_a_heartbeat_connection_can_do_nothing_else(
    start: Start, lines: bytes, reason: str
) -> None:
    coordinator = start().wait_until_listening()
    with coordinator.connect() as peer:
        peer.sendall(lines)
        read_until_closed(peer)
    assert [
        line["reason"] for line in coordinator.log() if line["event"] == "rejected"
    ] == [reason]


def test_a_heartbeat_message_of_a_newer_version_keeps_its_connection(
    start: Start,
) -> None:
    coordinator = start().wait_until_listening()
    with coordinator.connect() as peer, peer.makefile("rb") as lines:
        peer.settimeout(PATIENCE)
        peer.sendall(encode(Beat("r", "0", "i0", token=TOKEN)))
        assert b'"pong"' in lines.readline()
        peer.sendall(b'{"type": "of a later version"}\n{"type": "ping"}\n')
        assert b'"pong"' in lines.readline()
    assert coordinator.metric("evergrad_coordinator_rejected_total") == 0
