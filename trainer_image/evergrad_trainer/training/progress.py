"""All that a run remembers besides tensors, in one place.

:meth:`Progress.values` is the part that belongs to the state: saved, restored and given to newcomers.
:func:`describe_rank` is the part that one process knows and others may not: ranks exchange it when they meet,
and :func:`adopt` makes it the same for all of them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from evergrad_trainer.base.records import StepRecord
from evergrad_trainer.checkpoint.manager import CheckpointManager
from evergrad_trainer.state.registry import MAX_VALUES_BYTES

MOST_TALLIES_BYTES = MAX_VALUES_BYTES // 2
"""Most bytes that an evaluation which was cut short may take in a checkpoint."""
Row = Mapping[str, Any]
"""Facts that one rank reports when ranks meet: see :func:`describe_rank`."""


@dataclass
class TrainingProgress:
    """The counters of the state registry, and what this process knows of its own saves."""

    # The state after ``finished_steps``, the same on every rank.
    finished_steps: int = 0
    run_id: str = ""
    """Drawn once: names this run to others through every restart and change of rank 0."""
    evaluated_step: int = -1
    best: dict[str, Any] | None = None
    """The best evaluation so far: metric, mode, value and step."""
    best_before: dict[str, Any] | None = None
    """The one that it has replaced: the best again where the save of the better one is lost."""
    updates: int = 0
    """Updates of the optimizer: finished steps less skipped ones."""
    skipped: int = 0
    """Steps without an update."""
    non_finite: int = 0
    """How many of the newest steps in a row were not finite."""
    evaluation_asked: int = -1
    """Newest step after which an observer has asked for an evaluation."""
    save_asked: int = -1
    """Newest step after which an observer has asked for a save."""
    stop_asked: int = -1
    """Newest step after which an observer has asked for a stop."""
    tallies: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Sums that the evaluation after ``finished_steps`` has measured before it was cut short, by set."""

    # Facts that this process has, and others may not.
    saved_step: int = -1
    """Step of the newest save that was begun; once the loop has ended, of the newest published one."""
    resumed_step: int = -1
    """Step of the newest checkpoint known to be published when this world began."""
    is_save_lost: bool = False
    """A save was begun and ended with its world."""
    is_tally_unsaved: bool = False
    """More was measured of the newest step than its newest save knows."""
    steps_here: int = 0
    """Trained since the run's processes were started."""
    last_record: StepRecord | None = None
    """Record of the newest finished step, on every rank."""
    refusal: str = ""
    """Why the loop ended with "non_finite"."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return nothing: counters are no tensors."""
        return {}

    def values(self) -> Mapping[str, Any]:
        """Return what belongs to the state after ``finished_steps``, by the names that checkpoints use.

        A wish is a part of it for as long as it has not been done: another world may have to do it.
        """
        values: dict[str, Any] = {
            "step": self.finished_steps,
            "evaluated_step": self.evaluated_step,
            "best": self.best,
            "updates": self.updates,
            "skipped": self.skipped,
            "non_finite": self.non_finite,
        }
        if self.best_before is not None:
            values["best_before"] = self.best_before
        if self.run_id:
            values["run_id"] = self.run_id
        if self.evaluation_asked > self.evaluated_step:
            values["evaluation_asked"] = self.evaluation_asked
        if self.save_asked == self.finished_steps > self.saved_step:
            values["save_asked"] = self.save_asked
        if self.stop_asked == self.finished_steps:
            values["stop_asked"] = self.stop_asked
        # Exact sums are small; those of very many metrics are left out, and measured again.
        if self.tallies and len(json.dumps(self.tallies)) <= MOST_TALLIES_BYTES:
            values["tallies"] = self.tallies
        return values

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Take over what :meth:`values` said of a state; older versions said less."""
        self.finished_steps = int(values["step"])
        # A checkpoint of an older version has none, and the run keeps the one that it was given since.
        self.run_id = str(values.get("run_id", self.run_id))
        self.evaluated_step = int(values["evaluated_step"])
        self.best = values["best"]
        self.best_before = values.get("best_before")
        self.updates = int(values.get("updates", self.finished_steps))
        self.skipped = int(values.get("skipped", 0))
        self.non_finite = int(values.get("non_finite", 0))
        self.evaluation_asked = int(values.get("evaluation_asked", -1))
        self.save_asked = int(values.get("save_asked", -1))
        self.stop_asked = int(values.get("stop_asked", -1))
        self.tallies = dict(values.get("tallies", {}))

    def forget_tallies(self) -> None:
        """Forget what was measured: the evaluation has ended, or another step is the newest."""
        self.tallies = {}
        self.is_tally_unsaved = False

    def reset(self) -> None:
        """Forget everything, also of this process: the state it belonged to is gone."""
        fresh = TrainingProgress()
        vars(self).update(vars(fresh))


def published_step(progress: TrainingProgress, checkpoints: CheckpointManager) -> int:
    """Step of the newest checkpoint this process knows to be published; -1 without one."""
    if checkpoints.published is None:
        return progress.resumed_step
    return max(progress.resumed_step, checkpoints.published.step)


def describe_rank(
    progress: TrainingProgress, checkpoints: CheckpointManager, *, held_step: int
) -> dict[str, Any]:
    """The facts that a rank sends to the others when they meet. ``held_step``: -1 where it holds no state."""
    record: dict[str, Any] | None = None
    if progress.last_record is not None:
        record = asdict(progress.last_record)
    return {
        "step": held_step,
        "failures": checkpoints.failures,
        "published": published_step(progress, checkpoints),
        "begun": progress.saved_step,
        "is_tally_unsaved": progress.is_tally_unsaved,
        "steps_here": progress.steps_here,
        "evaluated_step": progress.evaluated_step,
        "record": record,
    }


def choose_source(rows: list[dict[str, Any]]) -> int:
    """The rank whose memory of the newest step counts.

    An evaluation whose end only some have seen is done again.
    """
    newest = max(int(row["step"]) for row in rows)
    sources = [rank for rank, row in enumerate(rows) if row["step"] == newest]
    return min(sources, key=lambda rank: int(rows[rank]["evaluated_step"]))


def adopt(progress: TrainingProgress, rows: list[dict[str, Any]]) -> None:
    """Agree on what the processes know of their saves; the values of the state itself are loaded already."""
    newest = max(int(row["step"]) for row in rows)
    sources = [row for row in rows if row["step"] == newest]
    published = max(int(row["published"]) for row in rows)
    # A save that a rank without a state has begun belongs to a state that is gone.
    begun = max(int(row["begun"]) for row in rows if int(row["step"]) >= 0)

    # At most twice. Its save ended with the world, and its state is gone: the one before it is the best
    # again, whose checkpoint still has the mark.
    while progress.best is not None and published < progress.best["step"] < newest:
        progress.best, progress.best_before = progress.best_before, None

    # The newest record is the state's; counts of processes that were there longest are the run's.
    record = rows[choose_source(rows)]["record"]
    progress.last_record = None
    if record is not None:
        progress.last_record = StepRecord(**record)
    progress.steps_here = max(int(row["steps_here"]) for row in sources)

    # Nothing newer than the newest published checkpoint counts as saved: a save that was under way has ended
    # with its world.
    progress.resumed_step = published
    progress.saved_step = published
    progress.is_save_lost = begun > published
    # A newcomer has got the tallies and would not save them with the others.
    progress.is_tally_unsaved = any(bool(row["is_tally_unsaved"]) for row in sources)
