"""All that a run remembers in addition to tensors.

:meth:`Progress.values` is the part that belongs to the state: it is saved, restored, and sent to joining
ranks. :func:`describe_rank` is the part that differs between processes: ranks exchange it when they form a
world, and :func:`adopt` makes it the same for all of them.
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
"""Largest size in a checkpoint of the partial results of evaluations that were interrupted."""
Row = Mapping[str, Any]
"""Facts that one rank reports when ranks form a world: see :func:`describe_rank`."""


@dataclass
class TrainingProgress:
    """The counters of the state registry, and this process's facts about its own saves."""

    # The state after ``finished_steps``, the same on every rank.
    finished_steps: int = 0
    run_id: str = ""
    """Identity of this run for other runs. Drawn once, and kept through restarts and changes of rank 0."""
    evaluated_step: int = -1
    best: dict[str, Any] | None = None
    """The best evaluation so far: metric, mode, value and step."""
    best_before: dict[str, Any] | None = None
    """The best evaluation before ``best``: it becomes the best again if the save of ``best`` is lost."""
    updates: int = 0
    """Updates of the optimizer: finished steps minus skipped steps."""
    skipped: int = 0
    """Steps without an update."""
    non_finite: int = 0
    """How many of the newest steps in a row were not finite."""
    evaluation_asked: int = -1
    """Newest step after which an observer requested an evaluation."""
    save_asked: int = -1
    """Newest step after which an observer requested a save."""
    stop_asked: int = -1
    """Newest step after which an observer requested a stop."""
    tallies: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Partial sums, by set, of an evaluation after ``finished_steps`` that was interrupted."""

    # Facts about this process, which may differ between ranks.
    saved_step: int = -1
    """Step of the newest save that has begun; after the loop, step of the newest published checkpoint."""
    resumed_step: int = -1
    """Step of the newest checkpoint known to be published when this world began."""
    is_save_lost: bool = False
    """Whether a save began, but ended unpublished with its world."""
    is_tally_unsaved: bool = False
    """Whether more of the newest step was measured than its newest save contains."""
    steps_here: int = 0
    """Steps trained since the run's processes were started."""
    last_record: StepRecord | None = None
    """Record of the newest finished step, on every rank."""
    refusal: str = ""
    """Why the loop ended with "non_finite"."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return nothing, because counters are not tensors."""
        return {}

    def values(self) -> Mapping[str, Any]:
        """Return the part that belongs to the state after ``finished_steps``, by the names used in
        checkpoints.

        A request is included until it is fulfilled, because another world may have to fulfil it.
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
        # Exact sums are small. The sums of very many metrics are left out, and measured again.
        if self.tallies and len(json.dumps(self.tallies)) <= MOST_TALLIES_BYTES:
            values["tallies"] = self.tallies
        return values

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Load what :meth:`values` returned. Values of older versions lack some names."""
        self.finished_steps = int(values["step"])
        # A checkpoint of an older version has no run_id; the run then keeps the one that it was given later.
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
        """Discard partial results, because the evaluation has ended or another step is the newest."""
        self.tallies = {}
        self.is_tally_unsaved = False

    def reset(self) -> None:
        """Discard everything, including facts about this process, because its state no longer exists."""
        fresh = TrainingProgress()
        vars(self).update(vars(fresh))


def published_step(progress: TrainingProgress, checkpoints: CheckpointManager) -> int:
    """Return the step of the newest checkpoint that this process knows to be published, or -1."""
    if checkpoints.published is None:
        return progress.resumed_step
    return max(progress.resumed_step, checkpoints.published.step)


def describe_rank(
    progress: TrainingProgress, checkpoints: CheckpointManager, *, held_step: int
) -> dict[str, Any]:
    """Return the facts that a rank sends to the others when they form a world.

    ``held_step``: step of the state that the rank holds, or -1 without a state.
    """
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
    """Return the rank whose record of the newest step all ranks adopt.

    Of the ranks at the newest step, this is one with the oldest evaluation: an evaluation that only some
    ranks completed is made again.
    """
    newest = max(int(row["step"]) for row in rows)
    sources = [rank for rank, row in enumerate(rows) if row["step"] == newest]
    return min(sources, key=lambda rank: int(rows[rank]["evaluated_step"]))


def adopt(progress: TrainingProgress, rows: list[dict[str, Any]]) -> None:
    """Agree on the processes' facts about their saves. The values of the state itself are loaded already."""
    newest = max(int(row["step"]) for row in rows)
    sources = [row for row in rows if row["step"] == newest]
    published = max(int(row["published"]) for row in rows)
    # A save that was begun by a rank without a state belongs to a state that no longer exists.
    begun = max(int(row["begun"]) for row in rows if int(row["step"]) >= 0)

    # The save of ``best`` ended with its world, and its state is lost. The previous best is the best again,
    # and its checkpoint is still marked. At most two iterations: ``best_before`` is None after the first.
    while progress.best is not None and published < progress.best["step"] < newest:
        progress.best, progress.best_before = progress.best_before, None

    # The newest record belongs to the state. The run's count is the largest of any process at that state.
    record = rows[choose_source(rows)]["record"]
    progress.last_record = None
    if record is not None:
        progress.last_record = StepRecord(**record)
    progress.steps_here = max(int(row["steps_here"]) for row in sources)

    # Only published checkpoints count as saved: a save in progress ended with its world.
    progress.resumed_step = published
    progress.saved_step = published
    progress.is_save_lost = begun > published
    # A joining rank has received the tallies, and must know that they are not saved yet.
    progress.is_tally_unsaved = any(bool(row["is_tally_unsaved"]) for row in sources)
