"""Level 1 with events: nodes killed, workers killed, nodes requested to leave, and nodes added, in one long
run of three nodes.

Each event gives one sample. ``recovery.py`` describes what the samples are used for.
"""

import json
import os
import signal
import statistics
import time
from pathlib import Path
from typing import Any

from elastic_nodes import (
    BenchmarkError,
    ElasticNodes,
    NodesSettings,
    Step,
    descendants,
    running,
    training_manifest,
)

NUM_NODES = 3
_UNDISTURBED_STEPS = 4
Sample = dict[str, Any]


def measure_events(
    folder: Path,
    *,
    events: int,
    is_tiny: bool,
) -> dict[str, list[Sample]]:
    """Cause ``events`` events of each kind: ``node_kill``, ``worker_kill``, ``sigterm``, and twice as many
    ``join``."""
    settings = NodesSettings(
        folder, training_manifest(num_nodes=NUM_NODES, is_tiny=is_tiny), NUM_NODES
    )
    samples: dict[str, list[Sample]] = {
        "node_kill": [],
        "worker_kill": [],
        "sigterm": [],
        "join": [],
    }
    nodes = ElasticNodes(settings)
    with running(nodes, num_nodes=NUM_NODES) as first:
        nodes.steps.wait_further(first, _UNDISTURBED_STEPS)
        for number in range(events):
            # Use another node each time, so that rank 0 is affected as often as the others.
            index = number % NUM_NODES
            killed = kill_node(nodes, index)
            joins = [rejoin(nodes, index)]
            crashed = kill_worker(
                nodes, (index + 1) % NUM_NODES, step_seconds=killed["step_seconds"]
            )
            left = ask_to_leave(nodes, (index + 2) % NUM_NODES)
            joins.append(rejoin(nodes, (index + 2) % NUM_NODES))
            samples["node_kill"].append(killed)
            samples["worker_kill"].append(crashed)
            samples["sigterm"].append(left)
            samples["join"] += joins
            print(
                f"  {number + 1}/{events}: node killed {killed['seconds']:.2f} s (a step "
                f"{killed['step_seconds']:.2f}), "
                f"worker killed {crashed['seconds']:.2f}, asked to leave {left['pause_seconds']:.2f}, "
                f"joined {joins[0]['pause_seconds']:.2f} {joins[1]['pause_seconds']:.2f}",
                flush=True,
            )
    return samples


def kill_node(nodes: ElasticNodes, index: int) -> Sample:
    """Kill a node; measure the time to the first step that the others finish together, and the duration of
    undisturbed steps afterwards."""
    # Use the clock of the steps' rows, because all processes are on this machine.
    nodes.steps.read()
    before = time.time()
    nodes.kill(index)
    row = nodes.steps.wait(
        lambda one: one["world_size"] == NUM_NODES - 1 and one["time"] > before,
        "the first step after a node's SIGKILL",
    )
    steps = nodes.steps.wait_further(row, _UNDISTURBED_STEPS)
    return {
        "node": index,
        "seconds": row["time"] - before,
        "step_seconds": statistics.median(steps),
        "steps_lost": _steps_lost(nodes, row),
    }


def kill_worker(nodes: ElasticNodes, index: int, *, step_seconds: float) -> Sample:
    """Kill a node's worker; measure the time to the next finished step.

    ``step_seconds``: duration of a step in a group with one node less.
    """
    nodes.steps.read()
    last = nodes.steps.rows[-1]
    node = nodes.pid(index)
    # A node's own helpers are in its process group; its worker has a process group of its own.
    (pid,) = [one for one in descendants(node) if os.getpgid(one) != os.getpgid(node)]
    before = time.time()
    os.kill(pid, signal.SIGKILL)
    row = nodes.steps.wait(
        lambda one: one["generation"] > last["generation"] and one["time"] > before,
        "the first step after a worker's SIGKILL",
    )
    if row["world_size"] == NUM_NODES:
        # The worker was back before the others had agreed to continue without it.
        step_seconds = statistics.median(nodes.steps.wait_further(row, 3))
    sample = {
        "node": index,
        "seconds": row["time"] - before,
        "world_size": row["world_size"],
        "step_seconds": step_seconds,
        "steps_lost": _steps_lost(nodes, row),
    }
    _wait_until_complete(nodes, newer_than=last["generation"])
    return sample


def ask_to_leave(nodes: ElasticNodes, index: int) -> Sample:
    """Send SIGTERM to a node; measure the time to the agreed boundary and to the others' next step."""
    nodes.steps.read()
    before = time.time()
    nodes.terminate(index)
    row = nodes.steps.wait(
        lambda one: one["world_size"] == NUM_NODES - 1 and one["time"] > before,
        "the first step after a node was asked to leave",
    )
    boundary = max(
        one["time"] for one in nodes.steps.rows if one["generation"] < row["generation"]
    )
    steps = nodes.steps.wait_further(row, _UNDISTURBED_STEPS)
    code = nodes.wait_end(index)
    return {
        "node": index,
        "seconds": row["time"] - before,
        "after_boundary_seconds": row["time"] - boundary,
        "pause_seconds": _pause(nodes, row),
        "step_seconds": statistics.median(steps),
        "steps_lost": _steps_lost(nodes, row),
        "exit_code": code,
    }


def rejoin(nodes: ElasticNodes, index: int) -> Sample:
    """Start a node again; measure how long the others pause between two steps until the larger group
    trains."""
    nodes.steps.read()
    last, before = nodes.steps.rows[-1], time.time()
    nodes.start_node(index)
    row = _wait_until_complete(nodes, newer_than=last["generation"])
    return {
        "node": index,
        "seconds": row["time"] - before,
        "pause_seconds": _pause(nodes, row),
    }


def _wait_until_complete(nodes: ElasticNodes, *, newer_than: int) -> Step:
    """Return the first step of a newer group of all nodes, after the group has trained some more steps."""
    row = nodes.steps.wait(
        lambda one: one["world_size"] == NUM_NODES and one["generation"] > newer_than,
        "a step of all nodes",
    )
    nodes.steps.wait_further(row, 3)
    return row


def _pause(nodes: ElasticNodes, first: Step) -> float:
    """Return the time from the end of the previous step until training continues, as recorded by the run. It
    includes the transfer of the state."""
    lines = (nodes.directory / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [event for event in map(json.loads, lines) if event["type"] == "world"]
    (pause,) = [
        event["paused_seconds"]
        for event in events
        if event["generation"] == first["generation"]
    ]
    return float(pause)


def _steps_lost(nodes: ElasticNodes, first: Step) -> int:
    """Return the number of steps of older groups that this group has trained again."""
    return sum(
        row["generation"] < first["generation"] and row["step"] >= first["step"]
        for row in nodes.steps.rows
    )


# ---- compiled ----------------------------------------------------------------------------------------------


def measure_compiled(
    folder: Path,
    *,
    events: int,
    is_tiny: bool,
) -> dict[str, list[Sample]]:
    """Kill nodes with torch.compile on, and count the graphs that the survivors compile afterwards.

    Uses two layers, because the size does not change the result, and half as many kills: each kill is
    observed in two survivors, and each joining node compiles for seconds.
    """
    events = max(1, events // 2)
    manifest = training_manifest(
        num_nodes=NUM_NODES,
        is_tiny=is_tiny,
        compile_mode="on",
    )
    manifest["spec"]["training"]["model"]["config"] |= {"num_hidden_layers": 2}
    folder.mkdir(parents=True, exist_ok=True)
    graphs = folder / "graphs.jsonl"
    nodes = ElasticNodes(
        NodesSettings(
            folder,
            manifest,
            NUM_NODES,
            on_start=lambda: _count_graphs(graphs),
        )
    )
    samples = []
    with running(nodes, num_nodes=NUM_NODES) as first:
        nodes.steps.wait_further(first, _UNDISTURBED_STEPS)
        for number in range(events):
            index = number % NUM_NODES
            sample = kill_node(nodes, index)
            sample |= _recompiled(graphs, generation=nodes.steps.rows[-1]["generation"])
            rejoin(nodes, index)
            samples.append(sample)
            print(
                f"  {number + 1}/{events}: node killed {sample['seconds']:.2f} s (a step "
                f"{sample['step_seconds']:.2f}), "
                f"graphs compiled by the survivors: {sample['recompiled']}",
                flush=True,
            )
    return {"compiled_kill": samples}


def _count_graphs(path: Path) -> None:
    """Let each worker write, after each step, how many graphs it has compiled. Call this in a node, before it
    forks workers."""
    from torch._dynamo.utils import counters

    from evergrad_trainer.training.step import Stepper

    run = Stepper.run
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def counted(
        self: Stepper,
        step: int,
        world: Any,
        flags: tuple[bool, ...],
    ) -> Any:
        outcome = run(self, step, world, flags)
        graphs = counters["stats"]["unique_graphs"]
        row = {
            "pid": os.getpid(),
            "step": step,
            "generation": world.generation,
            "graphs": graphs,
        }
        os.write(file, json.dumps(row).encode() + b"\n")
        return outcome

    Stepper.run = counted  # type: ignore[method-assign]


def _recompiled(path: Path, *, generation: int) -> dict[str, int]:
    """Return the survivors' numbers of graphs before the group of this generation, and now."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    now = {row["pid"]: row["graphs"] for row in rows if row["generation"] == generation}
    before = {row["pid"]: row["graphs"] for row in rows if row["generation"] < generation}
    if not before or min(before.values()) < 1:
        raise BenchmarkError("no graph was counted before the kill: the count says nothing")
    return {
        # A survivor with a new process has compiled all graphs again.
        "recompiled": sum(graphs - before.get(pid, 0) for pid, graphs in now.items()),
        "graphs": min(now.values()),
        "survivors": len(now),
    }
