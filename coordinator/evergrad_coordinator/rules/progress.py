"""Defines progress for the failure budgets of the coordinator and the operator. Pure."""

from dataclasses import dataclass

from evergrad_coordinator.protocol import Recovery
from evergrad_coordinator.rules.state import TrainingState


@dataclass
class ProgressCounter:
    """Counts the steps that the groups of a run finish for the first time.

    ==========================================  ============================================================
    step                                        counts
    ==========================================  ============================================================
    reported by a whole group that is up        if it is above every known step
    a group comes up at it, or it is reported   never: it may have been finished before the group lost its
    by a group that broke or lost a member      member
    ==========================================  ============================================================

    Fresh workers resume from their checkpoint and train the later steps again. For them, only steps up to a
    newer checkpoint count.

    A budget compares ``num_steps`` with its value at the last failure. The number never decreases and does
    not depend on a clock.
    """

    recovery: Recovery
    reached: int = -1
    """Highest known step; with fresh workers, the step of the newest checkpoint."""
    num_steps: int = 0
    """Number of steps of progress since this coordinator started."""

    def note_training(self, training: TrainingState, *, is_whole: bool) -> None:
        """Count the progress that members have reported.

        ``is_whole``: whether their group is up and has lost no member.
        """
        is_fresh = self.recovery == "fresh"
        self._take(training.checkpoint_step if is_fresh else training.step, is_whole)

    def note_step(self, step: int, *, is_whole: bool) -> None:
        """Record a step that a worker had finished when it failed, or at which its group came up."""
        # For fresh workers such a step does not count, because unsaved steps are trained again.
        if self.recovery != "fresh":
            self._take(step, is_whole)

    def _take(self, reached: int, is_whole: bool) -> None:
        if reached > self.reached:
            self.num_steps += reached - self.reached if is_whole else 0
            self.reached = reached
