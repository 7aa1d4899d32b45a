"""The one definition of progress, for the coordinator's budget and the operator's. Pure."""

from dataclasses import dataclass

from evergrad_coordinator.protocol import Recovery
from evergrad_coordinator.rules.state import TrainingState


@dataclass
class ProgressCounter:
    """Counts the steps that groups of the run finish for the first time.

    ==========================================  ============================================================
    step                                        counts
    ==========================================  ============================================================
    reported by a whole group that is up        if it is above every step that is known
    a group comes up at it, or it is reported   never: it may have been finished before the group lost its
    by a group that broke or lost a member      member
    ==========================================  ============================================================

    Fresh workers return to their checkpoint and train the steps above it again, so only steps up to a newer
    checkpoint count for them. A budget compares ``num_steps`` with its value at the last failure: the number
    never falls, and it does not depend on a clock.
    """

    recovery: Recovery
    reached: int = -1
    """Highest step (with fresh workers: the newest checkpoint) that is known."""
    num_steps: int = 0
    """Steps that have counted since this coordinator began."""

    def note_training(self, training: TrainingState, *, is_whole: bool) -> None:
        """Take what members have reported. ``is_whole``: their group is up, and no member of it is gone."""
        is_fresh = self.recovery == "fresh"
        self._take(training.checkpoint_step if is_fresh else training.step, is_whole)

    def note_step(self, step: int, *, is_whole: bool) -> None:
        """Take a step that a worker had finished when it failed, or with which its group came up."""
        # The steps of fresh workers say nothing: what was not saved is trained again.
        if self.recovery != "fresh":
            self._take(step, is_whole)

    def _take(self, reached: int, is_whole: bool) -> None:
        if reached > self.reached:
            self.num_steps += reached - self.reached if is_whole else 0
            self.reached = reached
