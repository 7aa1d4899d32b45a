"""Values that the parts of one training process share: decided before it began, or held by it."""

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
    """Everything decided before the first process group exists. ``marks``: Unix seconds at the end of each
    start-up phase.

    ``opened``: the recipe as this process has opened it. Processes forked from this one share it; others open
    their own.
    """

    run: TrainingRun
    config_hash: str
    """Hash of the recipe the run began with, which its checkpoints carry; its data may have lain elsewhere
    then."""
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
    """Hashes of the files of a task of the user's own, as they were when this plan was made."""
    task_files: Mapping[str, str] = field(default_factory=dict)
    """The same file by file: hashes by the paths from the task's folder."""
    tokenizer: Mapping[str, str] = field(default_factory=dict)
    """The reader of the tokenizer's files whose ids are trained, as ``provenance.json`` has it."""
    keep_waiting: int = 0
    """How many checkpoints stay until pods have evaluated them; 0 where the run evaluates its sets itself."""
    start: DataStart | None = None
    """Where the data begin; None: each stage at its first samples."""
    doubts: tuple[str, ...] = ()
    """Warnings about sources that begin at their first sample, and may have given some before."""
    ahead: HeldFiles | None = None
    """The newest checkpoint's files, which this process has begun to read before anything else."""

    def __getstate__(self) -> dict[str, Any]:
        """Open files and read ones do not travel to a process that is started again."""
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
    """Size of the compiled kernels that were there when this process began."""
    waiting: list[Event] | None = field(default_factory=list)
    """Events before the start event, which comes first; None once it is written."""
    task_before: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the task's files that the restored state was trained with; empty without one."""
    begun_from: Mapping[str, Any] | None = None
    """The settings that this process has begun a fresh run with: as ``run.json`` has them."""
    state_from: str = ""
    """The checkpoint of another run whose whole state it was."""
    is_announced: bool = False
    """This process has written a start event."""

    @property
    def data(self) -> DataStreams:
        return self.opened.data

    @property
    def identity(self) -> Identity:
        """Identity in this run's checkpoints, which no other run's have."""
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
        """Remember the task's files that a restored state was trained with, for the start's announcement."""
        self.task_before = dict(files)

    def describe_beginning(self) -> dict[str, Any]:
        """The facts of a start's announcement that this process knows because its state is not a
        transferred one."""
        return {"begun_from": self.begun_from, "task_before": dict(self.task_before)}

    def adopt_beginning(self, row: Mapping[str, Any]) -> None:
        """Take over those facts from a rank that had the state: a newcomer may be the rank 0 that
        announces."""
        self.begun_from = row["begun_from"]
        self.note_task(row["task_before"])

    def emit(self, type_: str, fields: dict[str, Any]) -> None:
        """Give the observers an event at the last finished step."""
        step, generation = self.progress.finished_steps, self.world.generation
        event = Event(
            type=type_, time=time.time(), step=step, generation=generation, fields=fields
        )
        if self.waiting is not None:
            self.waiting.append(event)
        else:
            self.observers.event(event)

    def release_events(self) -> None:
        """Write what has waited for the start event; from here on events are written as they come."""
        waiting, self.waiting = self.waiting or [], None
        for event in waiting:
            # Dated now: in a log whose lines go back in time, the clock would seem to have been set.
            self.observers.event(
                dataclasses.replace(
                    event, step=self.progress.finished_steps, time=time.time()
                )
            )
