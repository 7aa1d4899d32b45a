"""Supervised fine-tuning: rows of messages or of prompts, with a loss on their completions."""

from evergrad_trainer.recipes.sft.task import Sft

__all__ = ["Sft"]
