"""Pretraining: packed documents, every token predicted from those before it."""

from evergrad_trainer.recipes.pretrain.options import PretrainOptions
from evergrad_trainer.recipes.pretrain.task import Pretrain

__all__ = ["Pretrain", "PretrainOptions"]
