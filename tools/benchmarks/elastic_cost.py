"""The cost of elasticity without events: tokens/s of two nodes compared with plain torchrun, and a
supervisor's memory.

Both groups exist at the same time and alternate: the inactive group is stopped (SIGSTOP), so that other load
on the machine affects both equally. Only steps that began and ended within a turn count. Turns continue until
the interval of the ratio is narrow enough, or until a maximum number of turns.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import interval_of_median
from elastic_nodes import (
    LENGTH,
    BenchmarkError,
    ElasticNodes,
    NodesSettings,
    Steps,
    descendants,
    end_process,
    free_port,
    running,
    start_process,
    training_manifest,
)

from evergrad_cli.huge_pages import VARIABLE

NUM_NODES = 2
_SAMPLES = 4
_STEPS_A_TURN = 5
HALF_WIDTH = 0.01
"""Half of the width of the ratio's 95 % interval at which the turns end."""
_BLOCK = 10
"""Turns between two checks of the interval. Only its width is checked, so that stopping does not favour a
result."""
_MOST_BLOCKS_AN_EVENT = 4
Sample = dict[str, Any]


def measure_cost(
    folder: Path,
    *,
    events: int,
    is_tiny: bool,
) -> dict[str, list[Sample]]:
    """Measure both in turns. A sample contains the tokens/s of each in one turn."""
    # A node that is stopped for seconds must not count as lost.
    patience = ("--silence", "900", "--lease", "900", "--up-limit", "900")
    manifest = training_manifest(
        num_nodes=NUM_NODES,
        is_tiny=is_tiny,
        samples=_SAMPLES,
    )
    nodes = ElasticNodes(
        NodesSettings(
            folder / "elastic",
            manifest,
            NUM_NODES,
            extra=patience,
        )
    )
    with running(nodes, num_nodes=NUM_NODES) as first:
        nodes.steps.wait_further(first, 2)
        elastic = [
            nodes.coordinator.pid,
            *(pid for index in nodes.nodes for pid in _with_descendants(nodes.pid(index))),
        ]
        with (
            _stopped(elastic),
            _static(folder / "static", nodes.directory.parent) as (agent, steps),
        ):
            static = _with_descendants(agent.pid)
            _signal(static, signal.SIGSTOP)
            groups = {"elastic": (elastic, nodes.steps), "static": (static, steps)}
            _pair(groups, is_turned=False)  # warms up
            samples: list[Sample] = []
            blocks = 1 if is_tiny else _MOST_BLOCKS_AN_EVENT * events
            for _ in range(blocks):
                # Alternate the order, because the second finds warm caches.
                samples += [
                    _pair(groups, is_turned=bool(turn % 2)) for turn in range(_BLOCK)
                ]
                low, high = interval_of_ratio(samples)
                print(f"  {len(samples)} turns: ratio {low:.4f} to {high:.4f}", flush=True)
                if high - low < 2 * HALF_WIDTH:
                    break
            _signal(static, signal.SIGCONT)
    return {"turn": samples}


def interval_of_ratio(samples: list[Sample]) -> tuple[float, float]:
    """Return the 95 % interval of elastic tokens/s divided by static tokens/s."""
    return interval_of_median([one["elastic"] / one["static"] for one in samples])


def _pair(groups: dict[str, tuple[list[int], Steps]], *, is_turned: bool) -> Sample:
    """Run one turn of each group; return tokens/s by name."""
    order = sorted(groups, reverse=is_turned)
    return {name: _turn(*groups[name]) for name in order}


@contextlib.contextmanager
def _static(folder: Path, elastic: Path) -> Iterator[tuple[subprocess.Popen[bytes], Steps]]:
    """Start the same trainer and file with plain torchrun, in a world that cannot change."""
    folder.mkdir(parents=True)
    for name in ("run.yaml", "documents.jsonl"):
        (folder / name).write_bytes((elastic / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(NUM_NODES),
        "--master-port",
        str(free_port()),
    ]
    command += ["-m", "evergrad_cli", "run", "run.yaml", "--run-directory", "run"]
    # Use the setting of the nodes, which are forked from this process: `evergrad run` would request huge
    # pages.
    tunables = {VARIABLE: os.environ.get(VARIABLE, "glibc.malloc.hugetlb=0")}
    agent = start_process(command, output=folder / "torchrun.log", variables=tunables)

    def check() -> None:
        if agent.poll() is not None:
            raise BenchmarkError(
                f"torchrun has ended: {(folder / 'torchrun.log').read_text(encoding='utf-8')[-2000:]}"
            )

    try:
        steps = Steps(folder / "run" / "metrics.jsonl")
        steps.wait(
            lambda row: row["step"] >= 3, "the first steps under torchrun", check=check
        )
        yield agent, steps
    finally:
        end_process(agent)


@contextlib.contextmanager
def _stopped(pids: list[int]) -> Iterator[None]:
    """Stop the processes, and continue them at the end, so that they can be terminated."""
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


def _turn(pids: list[int], steps: Steps) -> float:
    """Let these processes run for some steps; return tokens/s of the steps that began and ended in the
    turn."""
    steps.read()
    begun = time.time()
    _signal(pids, signal.SIGCONT)
    try:
        # Skip the step in progress, whose duration contains the time for which it was stopped.
        first = steps.wait(lambda row: row["time"] > begun, "a step of this turn")
        seconds = steps.wait_further(first, _STEPS_A_TURN)
    finally:
        _signal(pids, signal.SIGSTOP)
    return _SAMPLES * LENGTH * len(seconds) / sum(seconds)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _with_descendants(pid: int) -> list[int]:
    return [pid, *descendants(pid)]


# ---- memory ------------------------------------------------------------------------------------------------


def measure_memory(
    folder: Path,
    *,
    events: int,
    is_tiny: bool,
) -> dict[str, list[Sample]]:
    """Return the megabytes of a node's supervisor and of its only worker, with no other process sharing their
    pages.

    This is the proportional set size: a page that n processes share counts 1/n in each.
    """
    manifest = training_manifest(num_nodes=1, is_tiny=is_tiny)
    nodes = ElasticNodes(NodesSettings(folder, manifest, 1))
    port = nodes.port
    command = [
        sys.executable,
        "-m",
        "evergrad_cli",
        "node",
        "run.yaml",
        "--join",
        f"127.0.0.1:{port}",
        "--node",
        "0",
    ]
    command += ["--address", "127.0.0.1", "--run-directory", "run", "--workers", "1"]
    samples: list[Sample] = []
    try:
        supervisor = start_process(command, output=folder / "node.log")
        try:
            first = nodes.steps.wait(
                lambda row: row["step"] >= 2, "the first steps of a node"
            )
            for _ in range(min(events, 3)):
                nodes.steps.wait_further(first, 2)
                (worker,) = descendants(supervisor.pid)
                samples.append(
                    _memory(supervisor.pid, "supervisor") | _memory(worker, "worker")
                )
        finally:
            end_process(supervisor)
    finally:
        nodes.close()
    print(
        f"  supervisor {statistics.median(one['supervisor_Pss'] for one in samples):.0f} MB",
        flush=True,
    )
    return {"memory": samples}


def _memory(pid: int, name: str) -> dict[str, float]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    kib = {words[0].rstrip(":"): int(words[1]) for words in map(str.split, lines[1:])}
    # Private_Dirty is memory that only this process has written. The share of read-only library files depends
    # on which other processes use them.
    figures = {"Rss": kib["Rss"], "Pss": kib["Pss"], "own": kib["Private_Dirty"]}
    return {f"{name}_{key}": value * 1024 / 1e6 for key, value in figures.items()}
