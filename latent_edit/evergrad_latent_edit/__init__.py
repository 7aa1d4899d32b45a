"""A predictor of what edits of a sequence do to the states that a frozen encoder gives it."""

from evergrad_latent_edit.task import LatentEditTask

__all__ = ["LatentEditTask"]
