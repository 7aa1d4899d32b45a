"""The task of pretraining: windows of packed documents, the sum of token losses, held-out documents to
evaluate on."""

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
    """One stage, one module, one sum. A recipe of one's own begins well by deriving from it."""

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
        """Nothing besides the text."""
        return {}

    def stages(self, prepared: Prepared) -> Sequence[Stage]:
        """All sources by their weights, from the first step to the last.

        Raises DataError for data of another tokenizer, and without any.
        """
        if not prepared.sources:
            why = "the task has no stages of its own, and so it trains on text"
            remedy = "Add `data`, or give the task stages"
            raise DataError(Problem("spec.training.data", "missing", why, remedy))
        if prepared.tokenizer_identity != self.tokenizer.identity:
            # The ids would mean other texts, and every loss would look plausible.
            what = f"the data was prepared with the tokenizer {prepared.tokenizer_identity}"
            why = f"this one is {self.tokenizer.identity}"
            raise DataError(
                Problem("spec.training.tokenizer", what, why, "Prepare the data again")
            )

        data = self.setup.training.data
        sources = {}
        pairs = zip(prepared.sources, data.sources, strict=True)
        for index, (source, declared) in enumerate(pairs):
            # By the seed of the data: another seed of the weights must not change the samples.
            used = choose_samples(
                self._open(source, source.train),
                declared.samples,
                seed=self.setup.training.reproducibility.seed_of_data,
                field=f"spec.training.data.sources[{index}].samples",
            )
            sources[source.name] = (used, declared.weight)
        # Facts that decide the samples besides the sources and the order: part of the fingerprint of the
        # data.
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
        """None besides those of every run."""
        return ()

    def evaluators(self, prepared: Prepared) -> Mapping[str, Evaluator]:
        """The mean loss over the held-out split, if there is one, then over each evaluation source of the
        file."""
        found: dict[str, Evaluator] = {}
        held_out = [
            self._open(one, one.held_out)
            for one in prepared.sources
            if one.held_out is not None
        ]
        # One set for the held-out documents of all sources, first: reports show sets in this order.
        if held_out:
            found[HELD_OUT] = Evaluator(held_out)
        # A set for each source of its own: their losses are not comparable.
        for one in prepared.evaluation:
            found[one.name] = Evaluator([self._open(one, one.train)])
        return found

    def build(self, build_model: Callable[[], nn.Module]) -> Modules:
        """The file's model, all of it trained."""
        return Modules(trained={"model": build_model()})

    def loss(self, modules: Modules, batch: Tensors, stage: Stage) -> Loss:
        """The sum of token losses in nats."""
        chunk_tokens = self.setup.training.runtime.loss_chunk
        # By chunks of tokens, if asked for: the logits of a whole micro-batch may not fit.
        loss_sum = causal_lm_loss(modules.trained["model"], chunk_tokens=chunk_tokens)
        total = loss_sum(batch[INPUT_IDS], batch[LABELS], batch.get(POSITIONS))
        return Loss(total)

    def enter(self, modules: Modules, stage: Stage) -> None:
        """Nothing to prepare: there is one stage."""

    def after_update(self, modules: Modules, metrics: Mapping[str, float]) -> None:
        """Nothing to keep."""

    def _open(self, source: PreparedSource, sequence: TokenSequence) -> Source:
        return TokenSource(
            source,
            sequence,
            sequence_length=self.setup.training.data.sequence_length,
            end_of_document=self.tokenizer.end_of_document,
            keeps_apart=self.setup.training.data.packing == "documents",
        )
