"""Pretraining: packed documents, in which each token is predicted from the previous tokens."""

from evergrad_trainer.recipes.pretrain.options import PretrainOptions
from evergrad_trainer.recipes.pretrain.task import Pretrain

__all__ = ["Pretrain", "PretrainOptions"]
