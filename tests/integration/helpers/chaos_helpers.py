"""Helpers of the chaos test: watch the processes of a disturbed run, and read the files that it leaves."""

import contextlib
import json
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from run_helpers import (
    Experiment,
    Started,
    constant,
    events,
    fault,
    merge,
    metric_rows,
    recipe,
    wait_until,
)

from bed.process_state import is_alive

SAMPLE_SECONDS = 0.5
PACE_SECONDS = 0.04
MIN_SAMPLES = 45
"""Number of samples that are needed to show a trend."""
BURIED = 22, 10
"""File descriptors and threads that a worker keeps for the process groups of one old world, until their last
operation has ended."""


@dataclass(frozen=True)
class Sample:
    """The resources of one process at one moment. ``memory``: private (anonymous) memory in MiB."""

    descriptors: int
    threads: int
    memory: float


@dataclass
class Watch:
    """Samples a command and all its descendants until ``close``."""

    pid: int
    samples: dict[tuple[int, str], list[Sample]] = field(
        default_factory=lambda: defaultdict(list)
    )
    roles: dict[tuple[int, str], str] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> "Watch":
        """Start the sampling thread."""
        self._thread = threading.Thread(target=self._look, name="watch")
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop the sampling thread."""
        self._over.set()
        self._thread.join()

    def old_enough(self) -> dict[str, list[Sample]]:
        """Return the samples of processes with at least :data:`MIN_SAMPLES` samples.

        The keys are the role and the process ID, for example "worker 4711".
        """
        found = {}
        for key, samples in self.samples.items():
            if len(samples) >= MIN_SAMPLES:
                found[f"{self.roles[key]} {key[0]}"] = samples
        return found

    def _look(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            for pid, depth in descendants(self.pid):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    self._sample(pid, depth)

    def _sample(self, pid: int, depth: int) -> None:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, born = fields[0], fields[19]
        if state in "ZTX":
            return
        text = Path(f"/proc/{pid}/status").read_text()
        is_coordinator = (
            b"evergrad_coordinator" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        memory = re.search(r"RssAnon:\s+(\d+)", text)
        if memory is None:  # The process is ending.
            return
        sample = Sample(
            len(os.listdir(f"/proc/{pid}/fd")), int(fields[17]), int(memory[1]) / 1024
        )
        self.samples[pid, born].append(sample)
        self.roles[pid, born] = (
            "coordinator"
            if is_coordinator
            else ("launcher", "node", "worker", "grandchild")[min(depth, 3)]
        )


def descendants(pid: int, *, depth: int = 0) -> list[tuple[int, int]]:
    """Return a process and all its descendants, each with its depth in the tree."""
    found = [(pid, depth)]
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                    found += descendants(int(child), depth=depth + 1)
    return found


def growth(samples: list[Sample], what: str) -> float:
    """Return the minimum of a process's last third of samples minus the maximum of its second third.

    The first third is ignored, because the process still allocates what it keeps. ``what`` is a field of
    :class:`Sample`.
    """
    values = [getattr(sample, what) for sample in samples]
    third = len(values) // 3
    return float(min(values[-third:]) - max(values[third : 2 * third]))


def processes_in(directory: Path) -> list[int]:
    """Return all processes of this machine with this working directory, including orphaned processes."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if Path(os.readlink(f"/proc/{entry}/cwd")) == directory and is_alive(
                int(entry)
            ):
                found.append(int(entry))
    return found


@dataclass
class Disturbed:
    """A run under ``--chaos``: its directory, its output, and the resources of its processes."""

    directory: Path
    seed: int
    started: Started
    watch: Watch
    began: float

    @property
    def printed(self) -> str:
        path = self.started.scratch / "stdout"
        return path.read_text() if path.exists() else ""

    def lines(self) -> list[str]:
        """Return the output lines of the chaos tool."""
        return [line for line in self.printed.splitlines() if line.startswith("chaos: ")]

    def describe(self) -> str:
        """Return the text for the message of a failed test."""
        said = "\n".join(self.lines()[-12:])
        tail = "\n".join(
            (self.directory / "logs" / "coordinator.log").read_text().splitlines()[-25:]
        )
        return f"seed {self.seed}\n{said}\n--- coordinator\n{tail}"


@dataclass(frozen=True)
class Variant:
    """A kind of chaos.

    ``environment``: the variables that choose it. ``training``: changes to the recipe. ``faults``: faults in
    addition to the slower steps. ``calm``: arguments that start the same run undisturbed. ``most``: number of
    events for `make test`.
    """

    num_nodes: int = 3
    max_nodes: int = 4
    most: int = 30
    environment: Mapping[str, str] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    faults: tuple[dict[str, Any], ...] = ()
    calm: tuple[str, ...] = ("--workers", "1")


VARIANTS = {
    "any": Variant(),
    "asynchronous": Variant(most=8, environment={"EVERGRAD_TRANSPORT": "asynchronous"}),
    # A tiny state is transferred in many slow pieces, so that faults hit the transfer.
    "transfer": Variant(
        num_nodes=2,
        max_nodes=2,
        most=4,
        environment={"EVERGRAD_CHAOS_KIND": "transfer"},
        training={"checkpoint": {"every": {"steps": 10}}},
        faults=(
            constant("evergrad_trainer.state.transfer._CHUNK_BYTES", 4096),
            fault("receive", call=0, action="sleep", rank=None, seconds=0.05),
        ),
    ),
    # Each worker holds a part of the state, so a lost group can be restored only from a checkpoint.
    "coordinator": Variant(
        num_nodes=2,
        max_nodes=2,
        most=4,
        environment={"EVERGRAD_CHAOS_KIND": "coordinator"},
        training={
            "runtime": {"parallelism": "fsdp2"},
            "reproducibility": {"elastic": "fast"},
        },
        calm=("--workers", "2"),
    ),
}


def start_disturbed(experiment: Experiment, variant: Variant, *, seed: int) -> Disturbed:
    """Start a tiny, endless run under chaos: 3 nodes that a fourth node joins, unless the variant differs."""
    training = recipe(
        horizon={"steps": 1_000_000},
        checkpoint={"every": {"steps": 50}, "keep": 5},
        reproducibility={"elastic": "exact"},
        runtime={"collectiveTimeoutSeconds": 30},
    )
    experiment.write(
        merge(training, variant.training), nodes={"min": 1, "max": variant.max_nodes}
    )
    began = time.time()
    # Slow steps down, so that the undisturbed run has fewer steps to repeat, and so that faults hit within
    # a step.
    pace = fault("step", call=0, action="sleep", rank=None, seconds=PACE_SECONDS)
    started = experiment.start(
        "--nodes",
        str(variant.num_nodes),
        "--chaos",
        str(seed),
        directory="disturbed",
        faults=[pace, *variant.faults],
        environment=variant.environment,
    )
    return Disturbed(
        experiment.at("disturbed"), seed, started, Watch(started.pid).start(), began
    )


def await_events(run: Disturbed, *, count: int) -> None:
    """Wait until the run has recovered from ``count`` events.

    The time limit is :data:`PATIENCE` for each event. Raises AssertionError if a recovery takes longer, if
    the run has ended, or if the chaos tool reports that the run does not recover.
    """
    for number in range(1, count + 1):
        try:
            wait_until(
                lambda number=number: _has_recovered(run, number) or time.sleep(0.1),
                what=f"event {number} of {count} took too long",
            )
        except TimeoutError as error:
            raise AssertionError(f"{error}: {run.describe()}") from None


def _has_recovered(run: Disturbed, number: int) -> bool:
    lines = run.lines()
    if any("no recovery" in line for line in lines) or not is_alive(run.started.pid):
        raise AssertionError(f"the run does not go on: {run.describe()}")
    return any(line.startswith(f"chaos: event {number}: the run goes on") for line in lines)


def planned_generations(directory: Path) -> list[int]:
    """Return the generations that the coordinator's processes planned, in order."""
    rows: list[dict[str, Any]] = []
    for line in (directory / "logs" / "coordinator.log").read_text().splitlines():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return [row["generation"] for row in rows if row["event"] == "plan"]


def final_step(directory: Path) -> int:
    """Return the step after which the run was stopped."""
    return int(events(directory, "stop")[-1]["step"])


@dataclass(frozen=True)
class Repeat:
    """Steps that were trained again. ``is_same_writer``: whether the same rank 0 process wrote both rows."""

    step: int
    num_steps: int
    is_from_checkpoint: bool
    is_same_writer: bool


NOBODY = {"type": "none", "pid": None}
"""Placeholder event of a world whose rank 0 was lost before it wrote the start event."""


def find_repeats(directory: Path) -> list[Repeat]:
    """Return a Repeat for each metric row whose step does not follow the step of the previous row."""
    rows = metric_rows(directory)
    # If a generation has both events, its world's rank 0 was lost before the first step. The event of type
    # "world" takes precedence.
    begins = {
        event["generation"]: event
        for type_ in ("start", "world")
        for event in events(directory, type_)
    }
    repeats = []
    for before, after in pairwise(rows):
        if after["step"] == before["step"] + 1:
            continue
        old, new = (begins.get(row["generation"], NOBODY) for row in (before, after))
        is_same = old["pid"] == new["pid"]
        num_steps = before["step"] - after["step"] + 1
        repeats.append(Repeat(after["step"], num_steps, new["type"] == "start", is_same))
    return repeats
