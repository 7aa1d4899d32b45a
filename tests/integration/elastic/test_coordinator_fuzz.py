"""More than 100,000 invalid messages while a real group trains: the group is not affected, and no memory
grows."""

import asyncio
import contextlib
import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from coordinator_processes import (
    Coordinator,
    Node,
    Start,
    end_nodes,
    hello_line,
    poll,
    run_coordinators,
)
from patience import PATIENCE

from evergrad_common.codec import LongText, to_camel
from evergrad_coordinator.protocol import FROM_COORDINATOR, FROM_NODES, Go, Plan

WELL_FORMED_CONNECTIONS, LINES_EACH = 115, 900
HOSTILE_CONNECTIONS, HOSTILE_LINES = 400, 40
CAUSES = (
    "worker_crash",
    "out_of_memory",
    "peer_lost",
    "user_error",
    "setup_failed",
    "stuck",
)
WEIRD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**53, 2**64, 1e308, -0.0, "", "0", "\x00", "é" * 99,
    "\ud800", [], [[]], {}, {"a": "b"}, "in-process",
)  # fmt: skip
GARBAGE = (
    b"\x00",
    b"\xff\xfe",
    b"[" * 3000,
    b"{" * 3000,
    b'{"type":',
    b"NaN",
    b"1e999",
    b'"',
    b"\r",
    b"9" * 6000,
    b"x" * 70_000,
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from run_coordinators(tmp_path)


def build_values(rng: random.Random) -> dict[str, float]:
    """A few numbers by name."""
    return {
        f"value-{rng.randrange(99)}": rng.uniform(-1e9, 1e9)
        for _ in range(rng.randrange(3))
    }


def build_well_formed(rng: random.Random) -> bytes:
    """A message that is right in form and in bounds, and wrong in every other respect."""
    kind = rng.choice(
        [one for one in FROM_NODES if one.TYPE not in ("hello", "left", "beat")]
    )
    found: dict[str, Any] = {"type": kind.TYPE}
    for field in dataclasses.fields(kind):
        value: Any = rng.choice([0, 1, 1, 2, 3, rng.randrange(2**50)])
        if field.type is bool:
            value = rng.random() < 0.5
        elif field.type in (str, LongText):
            value = "".join(chr(rng.randrange(1, 0xD7FF)) for _ in range(rng.randrange(20)))
        elif field.name == "cause":
            value = rng.choice(CAUSES)
        elif field.name in ("workers", "port"):
            value = rng.randrange(4)
        elif field.name == "values":
            value = build_values(rng)
        elif field.name == "evaluations":
            value = {"x": {"step": rng.randrange(9), "values": build_values(rng)}}
        found[to_camel(field.name)] = value
    return json.dumps(found).encode() + b"\n"


def build_hostile(rng: random.Random) -> bytes:
    """Anything: fields missing, of wrong types, bytes flipped, or no JSON at all."""
    if rng.random() < 0.1:
        return rng.choice(GARBAGE) + b"\n"
    kind = rng.choice([*FROM_NODES, *FROM_COORDINATOR])
    found = {
        to_camel(field.name): rng.choice(WEIRD)
        for field in dataclasses.fields(kind)
        if rng.random() < 0.9
    }
    line = bytearray(json.dumps({"type": kind.TYPE, **found}).encode() + b"\n")
    for _ in range(rng.choice([0, 0, 1, 3])):
        line[rng.randrange(len(line))] = rng.randrange(256)
    return bytes(line)


async def send(port: int, data: bytes, *, pieces: int = 1) -> None:
    """One connection, cut at any point by either end."""
    while True:
        # A coordinator with its maximum of connections may reset a connection before it is established.
        with contextlib.suppress(ConnectionResetError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            break
        await asyncio.sleep(0.05)
    draining = asyncio.create_task(reader.read())
    with contextlib.suppress(OSError):
        size = len(data) // pieces + 1
        for begin in range(0, len(data), size):
            writer.write(data[begin : begin + size])
            await writer.drain()
        writer.write_eof()
        await asyncio.wait_for(asyncio.shield(draining), PATIENCE)
    writer.close()
    draining.cancel()
    with contextlib.suppress(asyncio.CancelledError, OSError):
        await draining


async def attack(coordinator: Coordinator, rng: random.Random, *, share: float) -> int:
    """Number of lines sent."""
    jobs, num_lines = [], 0
    for number in range(round(WELL_FORMED_CONNECTIONS * share)):
        # Its hello is valid, as a spare, so that its later messages reach the rules.
        lines = [hello_line(f"spare-{number}-{rng.random()}", workers=rng.randrange(2))]
        lines += [build_well_formed(rng) for _ in range(LINES_EACH)]
        jobs.append((b"".join(lines), rng.choice([1, 3, 50])))
        num_lines += len(lines)
    for _ in range(round(HOSTILE_CONNECTIONS * share)):
        lines = [hello_line(f"spare-{rng.random()}")] if rng.random() < 0.7 else []
        lines += [build_hostile(rng) for _ in range(HOSTILE_LINES)]
        jobs.append((b"".join(lines), rng.choice([1, 7])))
        num_lines += len(lines)
    rng.shuffle(jobs)
    for begin in range(0, len(jobs), 20):
        await asyncio.gather(
            *(
                send(coordinator.port, data, pieces=pieces)
                for data, pieces in jobs[begin : begin + 20]
            )
        )
    return num_lines


@pytest.mark.slow
def test_a_hundred_thousand_bad_messages_harm_no_node(start: Start) -> None:
    # One core for all: a node that answers in time needs its turn, not a faster coordinator.
    silence, lease = str(PATIENCE), str(2 * PATIENCE)
    coordinator = start("--silence", silence, "--lease", lease).wait_until_listening()
    try:
        asyncio.run(run_next_to_a_group(coordinator))
    except OSError as error:
        error.add_note(f"{coordinator.process.poll()=}\n{coordinator.log_text()[-3000:]}")
        raise


async def run_next_to_a_group(coordinator: Coordinator) -> None:
    rng = random.Random(5)
    nodes = [Node(coordinator.port, str(name)) for name in range(3)]
    await poll(lambda: all(node.had for node in nodes), "the group")
    await attack(coordinator, rng, share=0.15)
    before = coordinator.resident_megabytes()
    num_lines = await attack(coordinator, rng, share=1.0)
    after = coordinator.resident_megabytes()
    assert num_lines > 100_000
    assert coordinator.metric("evergrad_coordinator_messages_total") > 50_000, (
        "most of it must have reached the rules"
    )
    assert coordinator.metric("evergrad_coordinator_internal_errors_total") == 0, (
        coordinator.log_text()[-3000:]
    )
    assert after - before < 6
    assert coordinator.process.poll() is None
    assert [
        (node.count(Plan), node.count(Go), node.client.is_connected) for node in nodes
    ] == [(1, 1, True)] * 3
    assert coordinator.status()["phase"] == "Running"
    await poll(
        lambda: coordinator.status()["nodes"]["connected"] == 3, "the end of all others"
    )
    assert len(coordinator.log_text()) < 1_000_000
    await end_nodes(*nodes)
