"""The task of fine-tuning: rows packed into samples, the losses of their completions, and what is generated
from their prompts."""

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
    """Model, loss and stages are pretraining's; its samples are rows."""

    def __init__(self, setup: Setup) -> None:
        """Raises ConfigurationError for a file by which the task's sources are texts."""
        super().__init__(setup)
        training = setup.training
        has_sources = training.data.sources or training.evaluation.sources
        # A file says by this section that a task of the user's own reads rows. Tokens of texts have no marks:
        # read as rows, every id would be halved, and the loss would look plausible.
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
        """How rows are read and what of them is learned."""
        return self.setup.training.row_settings or RowSettings()

    def stages(self, prepared: Prepared) -> Sequence[Stage]:
        """All sources by their weights, from the first step to the last. Raises DataError."""
        (stage,) = super().stages(prepared)
        facts = {**stage.facts, "learn": self.settings.learn}
        return [replace(stage, facts=facts)]

    def evaluators(self, prepared: Prepared) -> Mapping[str, Evaluator]:
        """The mean loss over each set, and what is generated from its prompts where the file asks for it.

        Raises ModelError if the base's settings of generation cannot be read.
        """
        found = dict(super().evaluators(prepared))
        training = self.setup.training
        settings = training.evaluation.generation
        if settings is None:
            return found
        # A completion ends here where it ends for users of an export.
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
