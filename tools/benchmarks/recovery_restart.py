"""Recovery with fresh workers: level 2 (``spec.script``) and stock torchrun, with the same kills and the same
script."""

import functools
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import model_config
from elastic_nodes import (
    LENGTH,
    SAMPLES,
    STOCK_SETTINGS,
    ElasticNodes,
    Group,
    NodesSettings,
    StockNodes,
    end_process,
    running,
    start_process,
    training_manifest,
)

NUM_NODES = 3
_SCRIPT = Path(__file__).resolve().with_name("recovery_stock.py")
_STEPS_BETWEEN = 6
"""More than a checkpoint interval, so that each event begins from a newer checkpoint than the previous
event."""
Sample = dict[str, Any]


def measure_script(
    folder: Path,
    *,
    events: int,
    is_tiny: bool,
) -> dict[str, list[Sample]]:
    """Measure ``spec.script`` with kills of nodes, and then the time of the reload alone."""
    command = _command(folder, is_tiny=is_tiny)
    manifest = training_manifest(num_nodes=NUM_NODES, is_tiny=is_tiny)
    # Use exactly the command that stock torchrun starts, so that only the starter differs.
    del manifest["spec"]["training"]
    manifest["spec"]["script"] = {"command": command}
    nodes = ElasticNodes(
        NodesSettings(
            folder,
            manifest,
            NUM_NODES,
            recovery="fresh",
            steps=folder / "output" / "steps.jsonl",
            extra=("--hold-joins",),
        )
    )
    samples = _kill_nodes(nodes, events=events)
    return {
        "node_kill": samples,
        "reload": [
            {"seconds": seconds} for seconds in _time_reloads(folder, command, events)
        ],
    }


def measure_stock(
    folder: Path, *, events: int, is_tiny: bool, settings: str
) -> dict[str, list[Sample]]:
    """Measure stock torchrun with one of the STOCK_SETTINGS."""
    command = _command(folder, is_tiny=is_tiny)
    nodes = StockNodes(
        folder,
        STOCK_SETTINGS[settings],
        steps=folder / "output" / "steps.jsonl",
        command=command,
    )
    return {"node_kill": _kill_nodes(nodes, events=events)}


def _command(folder: Path, *, is_tiny: bool) -> list[str]:
    config = (
        model_config()
        if not is_tiny
        else training_manifest(num_nodes=1, is_tiny=True)["spec"]["training"]["model"][
            "config"
        ]
    )
    (folder / "output").mkdir(parents=True)
    # Use the vocabulary of the typed run: bytes and one more id.
    arguments = [
        "--output",
        str(folder / "output"),
        "--model",
        json.dumps(config | {"vocab_size": 257}),
    ]
    return [
        str(_SCRIPT),
        *arguments,
        "--slots",
        str(SAMPLES),
        "--length",
        str(LENGTH),
        "--save-every",
        str(_STEPS_BETWEEN - 1),
    ]


def _kill_nodes(group: Group, *, events: int) -> list[Sample]:
    """Kill a node; measure the time to the first finished step of the two others; then start the node
    again."""
    samples = []
    with running(group, num_nodes=NUM_NODES) as row:
        for number in range(events):
            group.steps.wait_further(row, _STEPS_BETWEEN)
            samples.append(_kill_node(group, number % NUM_NODES))

            # Evergrad's node is forked from a warm process, and torchrun's imports first, so joins have no
            # ratio.
            before = time.time()
            group.start_node(number % NUM_NODES)
            row = group.steps.wait(
                functools.partial(_is_whole_after, before),
                "a step of all nodes",
            )
            samples[-1]["join_seconds"] = row["time"] - before
            print(
                f"  {number + 1}/{events}: node killed {samples[-1]['seconds']:.2f} s "
                f"(a step {samples[-1]['step_seconds']:.2f}), joined "
                f"{samples[-1]['join_seconds']:.2f}; {samples[-1]['start']}",
                flush=True,
            )
    return samples


def _kill_node(group: Group, index: int) -> Sample:
    # Read before the kill: steps up to this one that are repeated afterwards were lost.
    group.steps.read()
    last = group.steps.rows[-1]["step"]
    before = time.time()
    group.kill(index)
    row = group.steps.wait(
        lambda one: one["world_size"] == NUM_NODES - 1 and one["time"] > before,
        "the first step after a node's SIGKILL",
    )
    steps = group.steps.wait_further(row, 3)
    start = {"launch": row["begun"] - before, **row["start"]}
    return {
        "node": index,
        "seconds": row["time"] - before,
        "step_seconds": statistics.median(steps),
        "steps_lost": max(0, last - row["step"] + 1),
        "start": {name: round(seconds, 2) for name, seconds in start.items()},
    }


def _time_reloads(folder: Path, command: list[str], count: int) -> list[float]:
    """Return the seconds of each of ``count`` reloads in a process that does nothing else."""
    output = folder / "reloads.json"
    process = start_process(
        [sys.executable, *command, "--reloads", str(count)], output=output
    )
    try:
        process.wait(300)
    finally:
        end_process(process)
    return [
        float(seconds)
        for seconds in json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    ]


def _is_whole_after(moment: float, row: Mapping[str, Any]) -> bool:
    """Return whether a step of all nodes ended after ``moment``."""
    return bool(row["world_size"] == NUM_NODES and row["time"] > moment)
