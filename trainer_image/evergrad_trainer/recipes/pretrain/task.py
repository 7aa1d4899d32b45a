"""The task of pretraining: windows of packed documents, the sum of token losses, and held-out documents for
evaluation."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import HELD_OUT
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.base.records import TOKENS
from evergrad_trainer.data.prepared import Prepared, PreparedSource, TokenSequence
from evergrad_trainer.data.sample_subset import choose_samples
from evergrad_trainer.data.token_source import INPUT_IDS, LABELS, POSITIONS, TokenSource
from evergrad_trainer.data.tokenizers import TextTokenizer, load_tokenizer
from evergrad_trainer.objectives.causal_lm import causal_lm_loss
from evergrad_trainer.observers.base import Observer
from evergrad_trainer.recipes.pretrain.options import PretrainOptions
from evergrad_trainer.task import (
    Evaluator,
    Loss,
    Modules,
    Section,
    Setup,
    Source,
    Stage,
    Tensors,
)


class Pretrain:
    """One stage, one module and one sum. A recipe of your own can be derived from this class."""

    Options: ClassVar[type[Section]] = PretrainOptions
    metrics: ClassVar[Mapping[str, str]] = {}
    loss_items: ClassVar[str] = TOKENS

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The run's tokenizer, opened once."""
        return load_tokenizer(self.setup.training.tokenizer, self.setup.base_directory)

    def prepare(self, prepared: Prepared, folder: Path) -> Mapping[str, Any]:
        """Prepare nothing in addition to the text."""
        return {}

    def stages(self, prepared: Prepared) -> Sequence[Stage]:
        """Return one stage with all sources by their weights, from the first step to the last.

        Raises DataError if there are no sources or they were prepared with another tokenizer.
        """
        if not prepared.sources:
            why = "the task has no stages of its own, and so it trains on text"
            remedy = "Add `data`, or give the task stages"
            raise DataError(Problem("spec.training.data", "missing", why, remedy))
        if prepared.tokenizer_identity != self.tokenizer.identity:
            # The ids would mean other texts, but every loss would look plausible.
            what = f"the data was prepared with the tokenizer {prepared.tokenizer_identity}"
            why = f"this one is {self.tokenizer.identity}"
            raise DataError(
                Problem("spec.training.tokenizer", what, why, "Prepare the data again")
            )

        data = self.setup.training.data
        sources = {}
        pairs = zip(prepared.sources, data.sources, strict=True)
        for index, (source, declared) in enumerate(pairs):
            # Use the seed of the data: another seed of the weights must not change the samples.
            used = choose_samples(
                self._open(source, source.train),
                declared.samples,
                seed=self.setup.training.reproducibility.seed_of_data,
                field=f"spec.training.data.sources[{index}].samples",
            )
            sources[source.name] = (used, declared.weight)
        # Facts that determine the samples in addition to the sources and the order. They are part of the
        # fingerprint of the data.
        facts = {
            "packing": data.packing,
            "sequence_length": data.sequence_length,
            "tokenizer": self.tokenizer.identity,
        }
        counts_passes = data.mixing == "passes"
        return [
            Stage(
                sources,
                options=self.setup.options,
                facts=facts,
                counts_passes=counts_passes,
            )
        ]

    def observers(self) -> Sequence[Observer]:
        """Return nothing in addition to the observers of every run."""
        return ()

    def evaluators(self, prepared: Prepared) -> Mapping[str, Evaluator]:
        """Return the mean loss over the held-out split, if there is one, and over each evaluation source of
        the file."""
        found: dict[str, Evaluator] = {}
        held_out = [
            self._open(one, one.held_out)
            for one in prepared.sources
            if one.held_out is not None
        ]
        # One set for the held-out documents of all sources. It is first, because reports keep this order.
        if held_out:
            found[HELD_OUT] = Evaluator(held_out)
        # One set per evaluation source, because their losses are not comparable.
        for one in prepared.evaluation:
            found[one.name] = Evaluator([self._open(one, one.train)])
        return found

    def build(self, build_model: Callable[[], nn.Module]) -> Modules:
        """Build the file's model; all of it is trained."""
        return Modules(trained={"model": build_model()})

    def loss(self, modules: Modules, batch: Tensors, stage: Stage) -> Loss:
        """Return the sum of token losses in nats."""
        chunk_tokens = self.setup.training.runtime.loss_chunk
        # Compute by chunks of tokens if requested, because the logits of a whole micro-batch may not fit.
        loss_sum = causal_lm_loss(modules.trained["model"], chunk_tokens=chunk_tokens)
        total = loss_sum(batch[INPUT_IDS], batch[LABELS], batch.get(POSITIONS))
        return Loss(total)

    def enter(self, modules: Modules, stage: Stage) -> None:
        """Prepare nothing, because there is only one stage."""

    def after_update(self, modules: Modules, metrics: Mapping[str, float]) -> None:
        """Keep nothing."""

    def _open(self, source: PreparedSource, sequence: TokenSequence) -> Source:
        return TokenSource(
            source,
            sequence,
            sequence_length=self.setup.training.data.sequence_length,
            end_of_document=self.tokenizer.end_of_document,
            keeps_apart=self.setup.training.data.packing == "documents",
        )
