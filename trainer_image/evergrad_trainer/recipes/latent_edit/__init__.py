"""A predictor of what edits of a sequence do to the states that a frozen encoder gives it."""

from evergrad_trainer.recipes.latent_edit.task import LatentEdit

__all__ = ["LatentEdit"]
