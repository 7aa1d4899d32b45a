"""Pretraining: packed documents, every token predicted from those before it."""

from evergrad_trainer.data.build import build_data
from evergrad_trainer.objectives.causal_lm import causal_lm_loss
from evergrad_trainer.recipes.base import Recipe

PRETRAIN = Recipe(open_data=build_data, build_loss=causal_lm_loss)
