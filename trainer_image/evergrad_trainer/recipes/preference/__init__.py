"""Pairs of completions of one prompt: the chosen one is preferred, beside a frozen reference."""

from evergrad_trainer.recipes.preference.task import Preference

__all__ = ["Preference"]
