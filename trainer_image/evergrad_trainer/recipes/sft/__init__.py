"""Supervised fine-tuning: rows of messages or of prompts, in which completions are learned."""

from evergrad_trainer.recipes.sft.task import Sft

__all__ = ["Sft"]
