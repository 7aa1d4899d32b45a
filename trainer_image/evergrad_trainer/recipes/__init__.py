"""Recipes: what is trained. Each supplies the loop with data and an objective, and is one entry in ``RECIPES``."""

from evergrad_trainer.recipes.base import Recipe
from evergrad_trainer.recipes.pretrain import PRETRAIN

__all__ = ["RECIPES", "Recipe"]

RECIPES: dict[str, Recipe] = {"pretrain": PRETRAIN}
"""By the name that stands in ``spec.training.recipe``."""
