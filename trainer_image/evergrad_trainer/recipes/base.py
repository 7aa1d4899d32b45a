"""What a recipe supplies to the one loop that all of them share."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from evergrad_manifest.training import Training
from evergrad_trainer.data.build import Data
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.data.tokenizers import TextTokenizer
from evergrad_trainer.objectives.causal_lm import LossSum


@dataclass(frozen=True)
class Recipe:
    """``open_data`` opens prepared data as streams of slots; ``build_loss`` makes the objective of a model."""

    open_data: Callable[[Training, Prepared, TextTokenizer], Data]
    build_loss: Callable[[nn.Module], LossSum]
