"""The coordinator with 1,000 nodes: resident memory, idle load, and the time until all nodes are notified of
a loss.

The nodes are connections of one other process, which answers like nodes. Both processes share this machine's
cores, so the times include the work of the simulated nodes.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Iterator
from pathlib import Path

from common import Row, print_rows

from evergrad_common.codec import encode
from evergrad_coordinator.edge.server import allow_many_files
from evergrad_coordinator.protocol import (
    Go,
    Hello,
    Ping,
    Plan,
    Ready,
    Up,
    decode_from_coordinator,
)

_PING = encode(Ping())
_TOKEN = "benchmark"


class FakeNode(asyncio.Protocol):
    """Answers plans immediately, and counts the messages that it receives."""

    def __init__(self, crowd: "Crowd", number: int) -> None:
        self.crowd, self.number = crowd, number
        self.transport: asyncio.Transport | None = None
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the hello message."""
        self.transport = typing.cast(asyncio.Transport, transport)
        self.write(
            encode(
                Hello(
                    "r",
                    str(self.number),
                    f"i{self.number}",
                    "127.0.0.1",
                    1,
                    "in-process",
                    token=_TOKEN,
                )
            )
        )

    def data_received(self, data: bytes) -> None:
        """Answer like a node that has no workers to stop."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if b'"pong"' in line:
                continue
            message = decode_from_coordinator(line)
            if isinstance(message, Plan):
                self.crowd.planned += 1
                self.write(encode(Ready(message.generation, 1, 1)))
            elif isinstance(message, Go):
                self.crowd.gone += 1
                self.write(encode(Up(message.generation, step=message.generation)))

    def disconnect(self) -> None:
        """Close the connection, as if the node was killed."""
        if self.transport:
            self.transport.abort()

    def write(self, data: bytes) -> None:
        """Send, if still connected."""
        if self.transport and not self.transport.is_closing():
            self.transport.write(data)


class Crowd:
    """All simulated nodes of one process."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.nodes: list[FakeNode] = []
        self.planned = self.gone = 0
        """Numbers of nodes that have received a plan, and a ``go``."""

    async def connect(self, number: int) -> None:
        """Connect one more node."""
        loop = asyncio.get_running_loop()
        _, node = await loop.create_connection(
            lambda: FakeNode(self, number), "127.0.0.1", self.port
        )
        self.nodes.append(node)

    async def ping(self) -> None:
        """Ping twice per second for each node, spread evenly."""
        while True:
            begun = time.monotonic()
            for part in range(20):
                for node in self.nodes[part::20]:
                    node.write(_PING)
                await asyncio.sleep(max(0.0, begun + (part + 1) * 0.025 - time.monotonic()))

    async def wait_for_go(self, number: int) -> tuple[float, float]:
        """Return the seconds until ``number`` nodes have received the plan, and until ``number`` have
        received ``go``."""
        begun, heard = time.perf_counter(), 0.0
        while self.gone < number:
            if time.perf_counter() - begun > 60:
                raise TimeoutError(f"{self.gone} of {number} nodes were told")
            await asyncio.sleep(0.001)
            if self.planned >= number and not heard:
                heard = time.perf_counter() - begun
        return heard, time.perf_counter() - begun


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_megabytes(pid: int) -> float:
    """Return the current resident memory of a process, in megabytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1000


async def measure_crowd(
    port: int, pid: int, *, num_nodes: int, losses: int, idle_seconds: float
) -> dict[str, float]:
    """Form the group, lose nodes one after another, then leave the group idle."""
    crowd = Crowd(port)
    pinger = asyncio.create_task(crowd.ping())
    begun = time.perf_counter()
    for first in range(0, num_nodes, 100):
        await asyncio.gather(
            *(crowd.connect(number) for number in range(first, min(first + 100, num_nodes)))
        )
    await crowd.wait_for_go(num_nodes)
    formed = time.perf_counter() - begun
    heard, told, busy = [], [], []
    for _ in range(losses):
        await asyncio.sleep(1)
        crowd.gone = crowd.planned = 0
        used = cpu_seconds(pid)
        crowd.nodes.pop(0).disconnect()
        seconds = await crowd.wait_for_go(len(crowd.nodes))
        heard.append(seconds[0])
        told.append(seconds[1])
        busy.append(cpu_seconds(pid) - used)
    await asyncio.sleep(1)
    before = cpu_seconds(pid)
    await asyncio.sleep(idle_seconds)
    idle = (cpu_seconds(pid) - before) / idle_seconds
    megabytes = resident_megabytes(pid)
    pinger.cancel()
    medians = {
        "heard": statistics.median(heard),
        "told": statistics.median(told),
        "busy": statistics.median(busy),
    }
    return {
        "formed": formed,
        "most": max(told),
        "idle": idle,
        "megabytes": megabytes,
        **medians,
    }


def measure(
    *,
    num_nodes: int = 1000,
    losses: int = 7,
    idle_seconds: float = 10.0,
) -> list[Row]:
    """Return all rows."""
    allow_many_files()
    with (
        tempfile.TemporaryDirectory() as name,
        _coordinator(Path(name), num_nodes) as started,
    ):
        process, port = started
        alone = resident_megabytes(process.pid)
        job = measure_crowd(
            port,
            process.pid,
            num_nodes=num_nodes,
            losses=losses,
            idle_seconds=idle_seconds,
        )
        found = asyncio.run(job)

    what = f"coordinator of {num_nodes} nodes"
    return [
        Row(
            what,
            "resident memory",
            found["megabytes"],
            "MB",
            goal="<= 40",
            note=f"{alone:.1f} MB without nodes",
        ),
        Row(
            what,
            "one lost, all others told",
            found["told"],
            "s",
            goal="<= 0.3",
            note=f"longest of {losses}: {found['most']:.2f} s",
        ),
        Row(what, "one lost, all others know", found["heard"], "s"),
        Row(what, "its own work on one change", found["busy"], "CPU s"),
        Row(
            what,
            "idle: pings twice a second",
            found["idle"] * 100,
            "% of a core",
            goal="<= 10",
        ),
        Row(what, "formed, from the first connection", found["formed"], "s"),
    ]


@contextlib.contextmanager
def _coordinator(
    folder: Path, num_nodes: int
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a coordinator for ``num_nodes`` nodes, yield its process and port, and kill it afterwards."""
    address, token = folder / "address.json", folder / "token"
    token.write_text(_TOKEN, encoding="ascii")
    command = [
        sys.executable, "-m", "evergrad_coordinator", "--run", "r", "--host", "127.0.0.1",
        "--min", "1", "--max", str(num_nodes), "--state", str(folder / "state"),
        "--address-file", str(address), "--token-file", str(token),
    ]  # fmt: skip
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(command, stderr=log) as process,
    ):
        try:
            while not address.exists():
                time.sleep(0.01)
            yield process, json.loads(address.read_text(encoding="ascii"))["port"]
        finally:
            process.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--losses", type=int, default=7)
    options = parser.parse_args()
    print_rows(measure(num_nodes=options.nodes, losses=options.losses))
