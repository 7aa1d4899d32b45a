"""Two stages with one mixture each; in the second, a penalty keeps the model near its state at the
boundary."""

from evergrad_trainer.recipes.two_stage_kl.task import TwoStageKl

__all__ = ["TwoStageKl"]
