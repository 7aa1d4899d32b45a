"""What the chaos test looks at: the processes of a disturbed run while it lasts, and what it has
left behind."""

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
"""Samples of a process that is old enough to show a trend."""
BURIED = 22, 10
"""Descriptors and threads of the groups of one world that a worker has to keep until their last operation has
ended."""


@dataclass(frozen=True)
class Sample:
    """What one process held at one moment. ``memory``: MiB that are its own."""

    descriptors: int
    threads: int
    memory: float


@dataclass
class Watch:
    """Follows a command and all that descends from it, until ``close``."""

    pid: int
    samples: dict[tuple[int, str], list[Sample]] = field(
        default_factory=lambda: defaultdict(list)
    )
    roles: dict[tuple[int, str], str] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> "Watch":
        """Begin to look."""
        self._thread = threading.Thread(target=self._look, name="watch")
        self._thread.start()
        return self

    def close(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def old_enough(self) -> dict[str, list[Sample]]:
        """The samples of those that lived long, by what they were: launcher, node, worker, coordinator."""
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
        if memory is None:  # it is just ending
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
    """A process and all below it, with how far below."""
    found = [(pid, depth)]
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                    found += descendants(int(child), depth=depth + 1)
    return found


def growth(samples: list[Sample], what: str) -> float:
    """By how much the least that a process held in the last third of its life exceeds the most of its second
    third.

    In the first third it still makes what it will keep.
    """
    values = [getattr(sample, what) for sample in samples]
    third = len(values) // 3
    return float(min(values[-third:]) - max(values[third : 2 * third]))


def processes_in(directory: Path) -> list[int]:
    """All processes of this machine whose working directory is that one, whoever their parents are now."""
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
    """A run under ``--chaos``: where it is, what it printed, and what its processes held."""

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
        """What chaos said."""
        return [line for line in self.printed.splitlines() if line.startswith("chaos: ")]

    def describe(self) -> str:
        """For whoever must find out why a test failed."""
        said = "\n".join(self.lines()[-12:])
        tail = "\n".join(
            (self.directory / "logs" / "coordinator.log").read_text().splitlines()[-25:]
        )
        return f"seed {self.seed}\n{said}\n--- coordinator\n{tail}"


@dataclass(frozen=True)
class Variant:
    """A kind of chaos. ``environment``: what it is chosen by; ``training``: how its recipe differs;
    ``faults``: beside its pace.

    ``calm``: how the same run is started undisturbed. ``most``: events for `make test`.
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
    # A tiny state in many pieces, each of which takes its time.
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
    # Workers that hold parts of the state: what they lose with a group comes back from a checkpoint alone.
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
    """A tiny run of 3 nodes, to which a fourth comes, without an end; or as the variant says."""
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
    # Slower steps, so that there are fewer to repeat without disturbances; long enough ones to be hit within.
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
    """Until the run has recovered from so many events. Fails when chaos has found it to hang.

    Each event has :data:`PATIENCE`, and all of them together as long as they take.
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
    """The generations the coordinator's processes announced, in order."""
    rows: list[dict[str, Any]] = []
    for line in (directory / "logs" / "coordinator.log").read_text().splitlines():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return [row["generation"] for row in rows if row["event"] == "plan"]


def final_step(directory: Path) -> int:
    """The step after which the run was stopped."""
    return int(events(directory, "stop")[-1]["step"])


@dataclass(frozen=True)
class Repeat:
    """Steps that were trained again. ``is_same_writer``: under the rank 0 under which they were finished."""

    step: int
    num_steps: int
    is_from_checkpoint: bool
    is_same_writer: bool


NOBODY = {"type": "none", "pid": None}
"""Event of a world whose rank 0 could not even write that it had begun."""


def find_repeats(directory: Path) -> list[Repeat]:
    """Wherever a row is not the one after the row before it."""
    rows = metric_rows(directory)
    # Where both stand, the start is that of a world whose rank 0 was lost before its first step.
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
