"""The coordinator's process with real nodes, and with peers that are not nodes."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from coordinator_processes import (
    TOKEN,
    Coordinator,
    Node,
    Start,
    end_nodes,
    hello_line,
    poll,
    read_until_closed,
    run_coordinators,
    wait_for,
)
from patience import PATIENCE

from evergrad_common.codec import MAX_LINE_BYTES, encode
from evergrad_coordinator.protocol import (
    End,
    Go,
    Leave,
    Plan,
    Ready,
    Refused,
    Result,
    Up,
    Welcome,
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from run_coordinators(tmp_path)


def in_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Run an async test with its own nodes; the fixture is its only argument."""

    def run(start: Start) -> None:
        asyncio.run(test(start))

    run.__name__ = test.__name__
    return run


async def form_group(
    coordinator: Coordinator, number: int = 3, **changes: Any
) -> list[Node]:
    coordinator.wait_until_listening()
    nodes = [Node(coordinator.port, str(name), **changes) for name in range(number)]
    await poll(lambda: all(node.had for node in nodes), "the first group")
    return nodes


# ---- life of a run -----------------------------------------------------------------------------------------


@in_loop
async def test_three_nodes_form_a_group_lose_one_and_finish(start: Start) -> None:
    coordinator = start()
    nodes = await form_group(coordinator)
    assert sorted(node.had.first_rank for node in nodes if node.had) == [0, 1, 2]
    nodes[0].client.close()
    await poll(lambda: all(node.count(Go) == 2 for node in nodes[1:]), "the smaller group")
    assert await nodes[1].client.commit(2)
    assert not await nodes[1].client.commit(1)
    assert coordinator.status()["restarts"] == {"node_lost": 1}
    nodes[1].client.send(Result(2, 9))
    await poll(lambda: all(node.exit_code == 0 for node in nodes[1:]), "the end")
    await end_nodes(*nodes)
    assert await asyncio.to_thread(coordinator.process.wait, PATIENCE) == 0


@in_loop
async def test_a_late_joiner_of_a_finished_run_exits_0(start: Start) -> None:
    coordinator = start("--linger", "20")
    nodes = await form_group(coordinator)
    nodes[0].client.send(Result(1, 9))
    await poll(lambda: all(node.exit_code == 0 for node in nodes), "the end")
    late = Node(coordinator.port, "9")
    await poll(lambda: late.exit_code == 0, "the late joiner's end")
    assert coordinator.status()["phase"] == "Complete"
    await end_nodes(*nodes, late)


@in_loop
async def test_a_join_is_planned_softly(start: Start) -> None:
    coordinator = start("--expect", "2")
    nodes = await form_group(coordinator, 2)
    nodes.append(Node(coordinator.port, "2"))
    await poll(
        lambda: all(node.had and node.had.world_size == 3 for node in nodes),
        "the larger group",
    )
    assert [one.hard for one in nodes[0].received if isinstance(one, Plan)] == [
        False,
        False,
    ]
    await end_nodes(*nodes)


@in_loop
async def test_if_all_nodes_drain_one_saves_and_the_process_exits_with_75(
    start: Start,
) -> None:
    coordinator = start("--exit-when-empty")
    nodes = await form_group(coordinator)
    for node in nodes:
        node.leave()
    await asyncio.wait_for(asyncio.gather(*(node.task for node in nodes)), PATIENCE)
    saves = [one.save for node in nodes for one in node.received if isinstance(one, Leave)]
    assert sorted(saves) == [False, False, True]
    assert await asyncio.to_thread(coordinator.process.wait, PATIENCE) == 75


@in_loop
async def test_a_second_process_of_a_node_ends_the_older_one(start: Start) -> None:
    coordinator = start()
    nodes = await form_group(coordinator)
    twin = Node(coordinator.port, "1", incarnation="newer")
    await poll(lambda: nodes[1].exit_code == 75 and twin.had, "the change")
    again = Node(coordinator.port, "1", incarnation="i1")
    await poll(lambda: again.exit_code == 75, "the older one's end")
    await end_nodes(*nodes, twin, again)


@in_loop
async def test_nodes_of_other_runs_are_refused_with_a_reason(start: Start) -> None:
    coordinator = start("--expect", "1")
    first = await form_group(coordinator, 1, fingerprint={"torch": "2.13"})
    for changes, words in (
        ({"run": "other"}, "this coordinator serves r"),
        ({"token": "wrong"}, "hello.token"),
        ({"fingerprint": {"torch": "2.14"}}, "2.14; the group's first member has 2.13"),
    ):
        stranger = Node(coordinator.port, "7", **changes)
        await asyncio.wait_for(stranger.task, PATIENCE)
        refused = next(one for one in stranger.received if isinstance(one, Refused))
        assert words in refused.message
        assert stranger.exit_code == 70
    await end_nodes(*first)


# ---- restart -----------------------------------------------------------------------------------------------


@in_loop
async def test_a_restarted_coordinator_adopts_the_running_group(start: Start) -> None:
    state = str(start.folder / "state")
    coordinator = start("--state", state)
    nodes = await form_group(coordinator)
    port = str(coordinator.port)
    coordinator.end()
    again = start("--state", state, "--port", port)
    await asyncio.to_thread(again.wait_until_listening)
    await poll(lambda: again.status()["phase"] == "Running", "adoption")
    assert again.status()["generation"] == 1
    assert [node.count(Go) for node in nodes] == [1, 1, 1]
    # A node knows that it is connected only after the coordinator's answer has arrived.
    await poll(lambda: all(node.client.is_connected for node in nodes), "all connections")
    await end_nodes(*nodes)


@in_loop
async def test_after_a_restart_with_a_lost_node_the_next_generation_is_higher(
    start: Start,
) -> None:
    state = str(start.folder / "state")
    coordinator = start("--state", state)
    nodes = await form_group(coordinator)
    port = str(coordinator.port)
    coordinator.end()
    await end_nodes(nodes[0])
    again = start("--state", state, "--port", port, "--lease", "4")
    await asyncio.to_thread(again.wait_until_listening)
    await poll(
        lambda: all(node.had and node.had.generation == 2 for node in nodes[1:]),
        "the smaller group",
    )
    await end_nodes(*nodes[1:])


def test_two_coordinators_cannot_use_one_state_file(start: Start, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    first = start("--state", state).wait_until_listening()
    second = start("--state", state)
    assert second.process.wait(PATIENCE) == 70
    assert f"held by process {first.process.pid}" in second.log()[-1]["message"]
    first.end()
    start("--state", state).wait_until_listening()


@in_loop
async def test_losing_the_compare_and_set_ends_the_coordinator_before_it_announces(
    start: Start,
) -> None:
    state = start.folder / "state"
    coordinator = start("--state", str(state), "--expect", "2")
    nodes = await form_group(coordinator, 2)
    state.write_text(json.dumps({"generation": 40}))
    nodes.append(Node(coordinator.port, "2"))
    assert await asyncio.to_thread(coordinator.process.wait, PATIENCE) == 70
    assert all(node.count(Plan) <= 1 for node in nodes)
    assert all(node.exit_code is None for node in nodes)
    await end_nodes(*nodes)


@in_loop
async def test_an_unwritable_journal_stops_changes_but_not_training(
    start: Start,
) -> None:
    folder = start.folder / "journal"
    folder.mkdir()
    coordinator = start("--state", str(folder / "state"), "--expect", "2")
    nodes = await form_group(coordinator, 2)
    # Another file with that name, as after a restore: it should be created again, but cannot be.
    (folder / "copy").write_bytes((folder / "state").read_bytes())
    (folder / "copy").replace(folder / "state")
    (folder / "state.tmp").mkdir()
    nodes.append(Node(coordinator.port, "2"))
    await poll(lambda: coordinator.get("/readyz")[0] == 503, "readiness to end")
    assert nodes[0].client.is_connected and nodes[0].had
    (folder / "state.tmp").rmdir()
    await poll(
        lambda: all(node.had and node.had.generation == 2 for node in nodes),
        "the larger group",
    )
    assert coordinator.get("/readyz")[0] == 200
    await end_nodes(*nodes)


# ---- bad peers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff\xfe garbage\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"type": "ping"}\n',
        b'{"type": "hello"}\n',
        hello_line() + hello_line(),
        hello_line("5") + b'{"type": "capacity", "workers": -5}\n',
        b'{"type": "of a later version"}\n',
        hello_line("5") + b'{"type": 5}\n',
        hello_line("5") + b'{"type": "ping"}\n' * 5000,
    ],
)
def test_a_peer_that_violates_the_protocol_loses_its_connection(
    start: Start, data: bytes
) -> None:
    coordinator = start().wait_until_listening()
    with coordinator.connect() as peer:
        peer.sendall(data)
        read_until_closed(peer)
    assert coordinator.get("/healthz") == (200, "ok\n")
    assert coordinator.metric("evergrad_coordinator_internal_errors_total") == 0


def test_a_member_message_of_a_newer_version_keeps_its_connection(
    start: Start,
) -> None:
    coordinator = start().wait_until_listening()
    with coordinator.connect() as peer, peer.makefile("rb") as lines:
        peer.settimeout(PATIENCE)
        peer.sendall(
            hello_line("5") + b'{"type": "of a later version"}\n{"type": "ping"}\n'
        )
        while b'"pong"' not in (line := lines.readline()):
            assert line, "the connection was closed"
    assert coordinator.metric("evergrad_coordinator_rejected_total") == 0


def test_an_endless_line_is_dropped_early(start: Start) -> None:
    coordinator = start().wait_until_listening()
    before = coordinator.resident_megabytes()
    sent = 0
    with coordinator.connect() as peer:
        try:
            while sent < 1 << 30:
                sent += peer.send(b"x" * 65536)
        except ConnectionError:
            pass
    assert sent < 32 << 20, "the kernel's buffers hold some; the coordinator reads no more"
    assert coordinator.resident_megabytes() - before < 8
    assert coordinator.metric("evergrad_coordinator_rejected_total") == 1


def test_an_incomplete_message_is_dropped_and_other_connections_continue(
    start: Start,
) -> None:
    coordinator = start("--silence", "0.5").wait_until_listening()
    with coordinator.connect() as peer:
        peer.sendall(hello_line("4") + b'{"type": "rea')
        assert b"welcome" in read_until_closed(peer)
    assert coordinator.status()["nodes"]["connected"] == 0


def test_a_connection_without_a_hello_is_closed(start: Start) -> None:
    coordinator = start().wait_until_listening()
    begun = time.monotonic()
    with coordinator.connect() as slow, coordinator.connect() as mute:
        for byte in hello_line()[:40]:
            if time.monotonic() - begun > PATIENCE:
                break
            try:
                slow.sendall(bytes([byte]))
            except ConnectionError:
                break
            time.sleep(0.2)
        read_until_closed(slow)
        read_until_closed(mute)
    assert time.monotonic() - begun >= 4
    assert coordinator.metric("evergrad_coordinator_rejected_total") == 2


def test_silent_connections_do_not_keep_nodes_out(start: Start) -> None:
    coordinator = start("--expect", "1").wait_until_listening()
    crowd: list[socket.socket] = []
    try:
        crowd.extend(coordinator.connect() for _ in range(1200))
        with coordinator.connect() as peer:
            peer.sendall(hello_line())
            assert b'"welcome"' in peer.recv(4096)
    finally:
        for one in crowd:
            one.close()


def test_a_peer_that_does_not_read_is_disconnected(start: Start) -> None:
    coordinator = start("--silence", "60").wait_until_listening()
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.settimeout(PATIENCE)
        peer.connect(("127.0.0.1", coordinator.port))
        peer.sendall(hello_line())
        until = time.monotonic() + PATIENCE
        while coordinator.metric("evergrad_coordinator_rejected_total") == 0:
            assert time.monotonic() < until
            try:
                peer.send(
                    b'{"type": "commit", "request": 1, "generation": 1}\n' * 20,
                    socket.MSG_DONTWAIT,
                )
            except (BlockingIOError, ConnectionError):
                time.sleep(0.01)
    assert coordinator.resident_megabytes() < 60


# ---- status ------------------------------------------------------------------------------------------------


@in_loop
async def test_the_status_names_the_training_nodes(start: Start) -> None:
    coordinator = start()
    nodes = await form_group(coordinator)
    await poll(lambda: coordinator.status()["phase"] == "Running", "the run")
    status = coordinator.status()
    assert status["worldSize"] == 3
    assert [one["node"] for one in status["nodes"]["members"]] == ["0", "1", "2"]
    assert [one["firstRank"] for one in status["nodes"]["members"]] == [0, 1, 2]
    assert {one["state"] for one in status["nodes"]["members"]} == {"running"}
    assert coordinator.metric("evergrad_run_world_size") == 3
    await end_nodes(*nodes)


def test_the_status_server_serves_its_pages_and_refuses_other_requests(
    start: Start,
) -> None:
    coordinator = start("--min", "2").wait_until_listening()
    assert coordinator.get("/healthz") == (200, "ok\n")
    assert coordinator.get("/nothing")[0] == 404
    assert coordinator.status()["reason"] == "WaitingForNodes"
    answers = {
        b"POST /status HTTP/1.1": b"405",
        b"nonsense": b"400",
        b"HEAD /status HTTP/1.1": b"200",
    }
    for request, answer in answers.items():
        with socket.create_connection(
            ("127.0.0.1", coordinator.address["statusPort"]), timeout=PATIENCE
        ) as peer:
            peer.sendall(
                request + b"\r\nAuthorization: Bearer " + TOKEN.encode() + b"\r\n\r\n"
            )
            assert read_until_closed(peer).startswith(b"HTTP/1.1 " + answer)
    with socket.create_connection(
        ("127.0.0.1", coordinator.address["statusPort"]), timeout=PATIENCE
    ) as peer:
        with contextlib.suppress(ConnectionError):
            peer.sendall(b"GET /" + b"x" * 100_000)
        assert read_until_closed(peer) == b""
    assert coordinator.get("/healthz")[0] == 200


@in_loop
async def test_a_client_without_the_token_gets_nothing_from_any_port(start: Start) -> None:
    coordinator = start("--expect", "2", "--max", "2")
    nodes = await form_group(coordinator, 2, fingerprint={"torch": "2.13"})
    before = coordinator.status()

    for token in (None, "", "no", TOKEN[:-1]):
        for path in ("/status", "/readyz", "/bounds", "/nothing"):
            code, said = await asyncio.to_thread(coordinator.get, path, token=token)
            assert (code, said) == (
                401,
                "the run's token is needed: Authorization: Bearer TOKEN\n",
            )
        code, _ = await asyncio.to_thread(
            coordinator.post, "/bounds", b'{"min": 1, "max": 1}', token=token
        )
        assert code == 401
    for path in ("/healthz", "/metrics"):
        assert (await asyncio.to_thread(coordinator.get, path, token=None))[0] == 200

    # Like a restarted node 0: it would take its place, name the store of the next group, and end the run as
    # complete.
    evil = Node(
        coordinator.port, "0", incarnation="evil", token="", fingerprint={"torch": "2.13"}
    )
    await asyncio.wait_for(evil.task, PATIENCE)
    assert [type(one) for one in evil.received] == [Refused]
    with coordinator.connect() as peer:
        peer.sendall(encode(Result(1, 3)) + encode(Ready(1, 1, 6666)))
        assert read_until_closed(peer) == b"", "nothing without a hello"

    after = coordinator.status()
    assert (after["phase"], after["generation"], after["nodes"]) == (
        "Running",
        before["generation"],
        before["nodes"],
    )
    assert not any(
        isinstance(one, Plan | End) for node in nodes for one in node.received[-1:]
    )
    await end_nodes(*nodes)


def test_a_token_file_is_created_for_its_owner_only(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "new" / "token"
    path.parent.mkdir()
    coordinator = start("--token-file", str(path)).wait_until_listening()
    assert path.stat().st_mode & 0o777 == 0o600
    token = path.read_text().strip()
    assert len(token) >= 32
    assert coordinator.get("/status", token=token)[0] == 200
    assert token not in coordinator.log_text()
    assert (
        token.encode() not in Path(f"/proc/{coordinator.process.pid}/cmdline").read_bytes()
    )


@in_loop
async def test_the_bounds_of_a_run_can_be_changed_while_it_trains(start: Start) -> None:
    coordinator = start("--max", "3")
    nodes = await form_group(coordinator)
    await poll(lambda: coordinator.status()["phase"] == "Running", "the run")
    assert coordinator.status()["maxFailures"] == 3
    assert coordinator.post("/bounds", b'{"min": 1, "max": 3, "maxFailures": 7}') == (
        200,
        "ok\n",
    )
    assert coordinator.status()["maxFailures"] == 7
    assert coordinator.post("/bounds", b'{"min": 1, "max": 2}') == (200, "ok\n")
    await poll(lambda: coordinator.status()["worldSize"] == 2, "the smaller group")
    bounds = coordinator.status()["nodes"]
    assert (bounds["min"], bounds["max"], bounds["connected"]) == (1, 2, 3)
    assert coordinator.status()["maxFailures"] == 7
    await end_nodes(*nodes)


def test_invalid_bounds_are_refused_with_the_reason(start: Start) -> None:
    coordinator = start("--min", "2", "--max", "3").wait_until_listening()
    for body, words in (
        (b'{"min": 3, "max": 2}', "min 3 and max 2"),
        (b'{"min": 0, "max": 2}', "min 0"),
        (b'{"min": true, "max": 2}', "whole numbers"),
        (b'{"min": 1}', "not a JSON object"),
        (b"[1, 2]", "not a JSON object"),
        (b'{"min": 2, "max": 2, "maxFailures": -1}', "maxFailures -1 is not within 0 and"),
        (
            b'{"min": 2, "max": 2, "maxFailures": 99999999999}',
            "maxFailures 99999999999 is not within",
        ),
        (
            b'{"min": 2, "max": 2, "maxFailures": "3"}',
            "maxFailures is a whole number, at least 0",
        ),
        (b'{"min": 2, "max": 2, "maxFailures": true}', "maxFailures is a whole number"),
        (b'{"min": 2, "max": 2, "maxFailures": null}', "maxFailures is a whole number"),
        (b"[" * 4000, "not a JSON object"),
    ):
        code, text = coordinator.post("/bounds", body)
        assert (code, words in text) == (400, True), text
    assert coordinator.get("/bounds")[0] == 405
    with pytest.raises(OSError):
        coordinator.post("/bounds", b"x" * 100_000)
    assert coordinator.status()["nodes"]["max"] == 3
    assert coordinator.status()["maxFailures"] == 3


def test_idle_connections_do_not_keep_others_from_the_status(
    start: Start,
) -> None:
    coordinator = start().wait_until_listening()
    crowd: list[socket.socket] = []
    try:
        for number in range(200):
            crowd.append(
                socket.create_connection(
                    ("127.0.0.1", coordinator.address["statusPort"]), timeout=PATIENCE
                )
            )
            if number % 2:
                crowd[-1].sendall(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
        assert coordinator.get("/healthz") == (200, "ok\n")
        assert coordinator.status()["run"] == "r"
        assert read_until_closed(crowd[0]) == b"", "the oldest has made way"
        crowd[-1].sendall(b"no\r\n\r\n")
        assert read_until_closed(crowd[-1]).startswith(b"HTTP/1.1 200"), (
            "the youngest has not"
        )
    finally:
        for one in crowd:
            one.close()
    assert coordinator.metric("evergrad_coordinator_internal_errors_total") == 0


# ---- the command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--min", "4"],
            "--max: 3 is below --min 4. Raise --max to at least 4, or lower --min.",
        ),
        (["--expect", "9"], "--expect: 9 is not within"),
        (["--lease", "-1"], "--lease: -1.0 is not above 0"),
        (["--lease", "nan"], "--lease: nan"),
        (["--hold-joins"], "--hold-joins: only fresh workers"),
        (
            ["--token-file", "/nonexistent/token"],
            "--token-file: /nonexistent/token cannot be read or created",
        ),
        (
            ["--token-file", "/dev/null"],
            "--token-file: /dev/null cannot be read or created; it is empty.",
        ),
        (["--host", "no.such.host.invalid"], "cannot listen"),
    ],
)
def test_invalid_arguments_exit_with_64_and_a_remedy(
    start: Start, arguments: list[str], words: str
) -> None:
    coordinator = start(*arguments)
    assert coordinator.process.wait(PATIENCE) == 64
    assert words in coordinator.log()[-1]["message"]


def test_sigterm_ends_the_coordinator_without_ending_the_run(start: Start) -> None:
    coordinator = start("--expect", "1").wait_until_listening()
    with coordinator.connect() as peer:
        peer.sendall(hello_line())
        assert b"welcome" in peer.recv(4096)
        os.kill(coordinator.process.pid, signal.SIGTERM)
        assert b'"end"' not in read_until_closed(peer)
    assert coordinator.process.wait(PATIENCE) == 75


def test_a_damaged_state_file_is_reported(start: Start, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("{}")
    coordinator = start("--state", str(tmp_path / "state"))
    assert coordinator.process.wait(PATIENCE) == 70
    assert "contains no generation" in coordinator.log()[-1]["message"]


@in_loop
async def test_a_client_reconnects_by_itself_to_a_coordinator_that_was_away(
    start: Start,
) -> None:
    coordinator = start("--expect", "1").wait_until_listening()
    port = str(coordinator.port)
    node = Node(coordinator.port, "0")
    await poll(lambda: node.count(Welcome) == 1, "the welcome")
    coordinator.end()
    await poll(lambda: not node.client.is_connected, "the loss")
    assert not node.client.send(Up(1, 1))
    assert not await node.client.commit(1)
    start("--port", port, "--expect", "1")
    await poll(lambda: node.count(Welcome) == 2, "the second welcome")
    assert node.client.seconds_since_contact < PATIENCE
    assert node.count(End) == 0
    await end_nodes(node)


@in_loop
async def test_a_client_detects_a_coordinator_that_hangs(start: Start) -> None:
    coordinator = start("--expect", "1").wait_until_listening()
    node = Node(coordinator.port, "0")
    await poll(lambda: node.client.is_connected, "the welcome")
    os.kill(coordinator.process.pid, signal.SIGSTOP)
    await poll(lambda: not node.client.is_connected, "the loss")
    os.kill(coordinator.process.pid, signal.SIGCONT)
    await poll(lambda: node.client.is_connected, "the second welcome")
    await end_nodes(node)


def test_the_log_has_json_lines(start: Start) -> None:
    coordinator = start().wait_until_listening()
    wait_for(coordinator.log_text, "the first line")
    assert coordinator.log()[0]["event"] == "listening"
    assert coordinator.log()[0]["port"] == coordinator.port


def test_the_longest_line_is_within_the_documented_bound() -> None:
    assert len(hello_line()) < MAX_LINE_BYTES
