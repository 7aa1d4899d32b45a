"""Values that the parts of one training process share: decided before it started, or held by it."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evergrad_manifest.derive import HorizonNumbers
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.identity import hashed_recipe
from evergrad_trainer.base.records import Event
from evergrad_trainer.checkpoint.cached_files import HeldFiles
from evergrad_trainer.checkpoint.manifest import Identity
from evergrad_trainer.data.build import DataStreams
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.data.start_positions import DataStart
from evergrad_trainer.distributed.world import Membership, World
from evergrad_trainer.models.build import ModelPlan
from evergrad_trainer.observers.base import Observer
from evergrad_trainer.recipes.setup import Opened
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.training.progress import TrainingProgress


@dataclass(frozen=True)
class SessionPlan:
    """Everything that is decided before the first process group exists.

    ``marks``: Unix time in seconds at the end of each start-up phase. ``opened``: the recipe as opened by
    this process. Forked processes share it; other processes open the recipe themselves.
    """

    run: TrainingRun
    config_hash: str
    """Hash of the recipe that the run began with, which its checkpoints contain. The path of its data may
    have changed since then."""
    base_directory: Path
    run_directory: Path
    prepared: Prepared
    model: ModelPlan
    numbers: HorizonNumbers
    threads: int
    stop_after_steps: int | None
    command: tuple[str, ...]
    process_start: float
    marks: dict[str, float]
    opened: Opened | None = None
    task_hash: str = ""
    """Hash of the files of a user's task, as they were when this plan was made."""
    task_files: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the single files, by path relative to the task's folder."""
    tokenizer: Mapping[str, str] = field(default_factory=dict)
    """The library that read the tokenizer's files for the trained ids, as in ``provenance.json``."""
    keep_waiting: int = 0
    """Number of checkpoints that are kept until pods have evaluated them; 0 if the run evaluates its sets
    itself."""
    start: DataStart | None = None
    """Position at which the data begin; None: each stage begins at its first samples."""
    doubts: tuple[str, ...] = ()
    """Warnings about sources that begin at their first sample, although an earlier run may have used some
    samples."""
    ahead: HeldFiles | None = None
    """The newest checkpoint's files, which this process begins to read before anything else."""

    def __getstate__(self) -> dict[str, Any]:
        """Drop open files and files that were read, because another process cannot receive them."""
        return {**vars(self), "opened": None, "ahead": None}


@dataclass
class Session:
    """Parts of one training process that several of its stages use."""

    plan: SessionPlan
    directory: RunDirectory
    is_signalled: Callable[[], bool]
    membership: Membership
    observers: Observer
    opened: Opened
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    marks: dict[str, float] = field(default_factory=dict)
    metrics_address: str | None = None
    compiled_bytes: int = 0
    """Size of the compiled kernels that existed when this process started."""
    waiting: list[Event] | None = field(default_factory=list)
    """Events that wait until the start event is written; None afterwards."""
    task_before: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the task's files with which the restored state was trained; empty without a restored
    state."""
    begun_from: Mapping[str, Any] | None = None
    """The settings with which this process began a fresh run, as in ``run.json``."""
    state_from: str = ""
    """The checkpoint of another run from which the whole state was loaded; empty without one."""
    is_announced: bool = False
    """Whether this process has written a start event."""

    @property
    def data(self) -> DataStreams:
        return self.opened.data

    @property
    def identity(self) -> Identity:
        """Identity in this run's checkpoints, which differs from the identity of every other run."""
        return Identity(
            self.plan.run.metadata.name,
            self.plan.config_hash,
            self.data.fingerprint,
            recipe=hashed_recipe(self.plan.run),
        )

    @property
    def world(self) -> World:
        return self.membership.world

    def mark(self, phase: str) -> None:
        self.marks[phase] = time.time()

    def note_task(self, files: Mapping[str, str]) -> None:
        """Store the task's files with which a restored state was trained, for the announcement of the
        start."""
        self.task_before = dict(files)

    def describe_beginning(self) -> dict[str, Any]:
        """Return the facts for the announcement of the start that only a process without a transferred state
        knows."""
        return {"begun_from": self.begun_from, "task_before": dict(self.task_before)}

    def adopt_beginning(self, row: Mapping[str, Any]) -> None:
        """Adopt these facts from a rank that had the state, because a joining rank may become the rank 0 that
        announces."""
        self.begun_from = row["begun_from"]
        self.note_task(row["task_before"])

    def emit(self, type_: str, fields: dict[str, Any]) -> None:
        """Send the observers an event at the newest finished step."""
        step, generation = self.progress.finished_steps, self.world.generation
        event = Event(
            type=type_, time=time.time(), step=step, generation=generation, fields=fields
        )
        if self.waiting is not None:
            self.waiting.append(event)
        else:
            self.observers.event(event)

    def release_events(self) -> None:
        """Write the events that waited for the start event. From here on, events are written immediately."""
        waiting, self.waiting = self.waiting or [], None
        for event in waiting:
            # Use the current time: if times in the log went backwards, the clock would seem to have been
            # changed.
            self.observers.event(
                dataclasses.replace(
                    event, step=self.progress.finished_steps, time=time.time()
                )
            )
