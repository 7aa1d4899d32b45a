"""Two stages with a mixture each; the second is held near the model of the boundary by a penalty."""

from evergrad_trainer.recipes.two_stage_kl.task import TwoStageKl

__all__ = ["TwoStageKl"]
