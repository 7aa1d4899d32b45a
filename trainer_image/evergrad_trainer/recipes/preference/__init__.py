"""Pairs of completions of the same prompt; the chosen one is preferred, compared with a frozen reference."""

from evergrad_trainer.recipes.preference.task import Preference

__all__ = ["Preference"]
