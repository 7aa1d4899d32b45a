"""The task of fine-tuning: rows packed into samples, the losses of their completions, and completions
generated from their prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_manifest.training import GENERATED, RowSettings
from evergrad_trainer.data.prepared import Prepared, PreparedSource, TokenSequence
from evergrad_trainer.data.row_source import RowReader, RowSource
from evergrad_trainer.recipes.pretrain import Pretrain
from evergrad_trainer.recipes.sft.generation import (
    METRICS,
    PARTS,
    Completions,
    PromptSource,
    summarize,
)
from evergrad_trainer.task import Evaluator, Setup, Source, Stage
from evergrad_trainer.text_ends import find_export_ends


class Sft(Pretrain):
    """Uses the model, loss and stages of pretraining; the samples are rows."""

    def __init__(self, setup: Setup) -> None:
        """Raises ConfigurationError if the task's sources were prepared as texts."""
        super().__init__(setup)
        training = setup.training
        has_sources = training.data.sources or training.evaluation.sources
        # A user's task declares with this section that it reads rows. Tokens of texts have no marks: read as
        # rows, every id would be halved, and the loss would look plausible.
        if has_sources and training.row_settings is None:
            what, why = (
                "missing",
                "the task reads rows, and the sources are prepared as texts",
            )
            raise ConfigurationError(
                Problem("spec.training.rows", what, why, "Add `rows: {}`")
            )

    @property
    def settings(self) -> RowSettings:
        """How rows are read, and which of their tokens are learned."""
        return self.setup.training.row_settings or RowSettings()

    def stages(self, prepared: Prepared) -> Sequence[Stage]:
        """Return one stage with all sources by their weights, from the first step to the last. Raises
        DataError."""
        (stage,) = super().stages(prepared)
        facts = {**stage.facts, "learn": self.settings.learn}
        return [replace(stage, facts=facts)]

    def evaluators(self, prepared: Prepared) -> Mapping[str, Evaluator]:
        """Return the mean loss over each set and, if the file requests it, measures of generated completions.

        Raises ModelError if the base model's generation settings cannot be read.
        """
        found = dict(super().evaluators(prepared))
        training = self.setup.training
        settings = training.evaluation.generation
        if settings is None:
            return found
        # End completions as in an export, so that users of the export get the same completions.
        named = find_export_ends(training, self.setup.base_directory, self.tokenizer)
        ends = tuple(one for one in named if one != self.tokenizer.end_of_document)
        for name, evaluator in list(found.items()):
            sources = [
                PromptSource(
                    source.reader,
                    sequence_length=training.data.sequence_length,
                    settings=settings,
                    ends=ends,
                )
                for source in evaluator.sources
                if isinstance(source, RowSource)
            ]
            found[f"{name}{GENERATED}"] = Evaluator(
                sources,
                measure=Completions(self.tokenizer, settings, training.runtime, ends),
                metrics=METRICS,
                parts=PARTS,
                summarize=summarize,
            )
        return found

    def _open(self, source: PreparedSource, sequence: TokenSequence) -> Source:
        return RowSource(
            RowReader(source, sequence),
            sequence_length=self.setup.training.data.sequence_length,
            is_packed=self.setup.training.data.packing == "documents",
            learns_everything=self.settings.learn == "everything",
        )
