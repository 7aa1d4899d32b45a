"""The preference task: pairs of rows, the frozen reference model, the loss of pairs and the metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from evergrad_manifest.errors import Problem, raise_if
from evergrad_manifest.training import REFERENCE_FIELD
from evergrad_manifest.training import Preference as PreferenceSection
from evergrad_manifest.training.preference import METRICS
from evergrad_trainer.base.errors import CheckpointError, ModelError
from evergrad_trainer.checkpoint.weights import WEIGHTS, load_weights
from evergrad_trainer.data.pair_source import PairSource
from evergrad_trainer.data.prepared import Prepared, PreparedSource, TokenSequence
from evergrad_trainer.data.row_source import RowReader
from evergrad_trainer.data.token_source import IGNORE_INDEX, INPUT_IDS, LABELS
from evergrad_trainer.models.build import ModelPlan
from evergrad_trainer.models.compatibility import compare_functions
from evergrad_trainer.models.weights import load_model_directory
from evergrad_trainer.objectives.token_log_probs import row_log_probs
from evergrad_trainer.recipes.preference.loss import LogProbs, pair_losses, pair_metrics
from evergrad_trainer.recipes.pretrain import Pretrain
from evergrad_trainer.run.directory import RunDirectory, find_record
from evergrad_trainer.run.record import (
    BEGUN_FROM,
    BegunFrom,
    read_base,
    read_optional,
    read_run,
)
from evergrad_trainer.state.providers import module_tensors
from evergrad_trainer.state.registry import DESCRIPTION, from_extra
from evergrad_trainer.task import Loss, Modules, Source, Stage, Tensors

MODEL: Final = "model"
REFERENCE: Final = "reference"
_INITIAL_FIELD: Final = "spec.training.initFrom.path"
_LONGEST_CHAIN: Final = 64
"""Longest chain of runs of which each continues the next; a longer chain would be a cycle."""
_WHY_READ: Final = (
    "with everything loaded, the reference is that of the run which is gone on with"
)
_NAME_IT: Final = "Name that reference as preference.reference"


class Preference(Pretrain):
    """Trains a model on pairs, compared with a frozen reference: the run's initial model or another model."""

    metrics: ClassVar[Mapping[str, str]] = METRICS
    loss_items: ClassVar[str] = "pairs"

    @property
    def settings(self) -> PreferenceSection:
        """The section of the manifest with the loss and the reference."""
        return self.setup.training.pair_settings or PreferenceSection()

    def stages(self, prepared: Prepared) -> Sequence[Stage]:
        """Return one stage with all sources by their weights, from the first step to the last.

        Raises DataError if a source cannot be read, and ModelError if the named reference does not exist.
        """
        found = self._find_reference()
        if found is not None and not found.path.is_dir():
            field, path = found.field, found.path
            what, why = (
                f"{path} is no directory",
                "the reference is read from it at each start",
            )
            raise ModelError(
                Problem(field, what, why, "Correct the path, or bring it back")
            )
        return super().stages(prepared)

    def build(self, build_model: Callable[[], nn.Module]) -> Modules:
        """Build the model that is trained, and a second, frozen model of the same architecture.

        Raises ModelError or CheckpointError if the reference cannot be read.
        """
        model, reference = build_model(), build_model()
        named = self._find_reference()
        if named is not None and any(one.is_meta for one in reference.parameters()):
            # These weights are created later, one by one. The caller of ``build`` catches this error and
            # builds the model with its weights instead.
            raise NotImplementedError
        begins_behind: int | None = None
        if named is not None:
            tensors = {
                f"{WEIGHTS}{name}": one for name, one in module_tensors(reference).items()
            }
            if (named.path / "config.json").is_file():
                config: Any = reference.config
                load_model_directory(named.path, tensors, config=config, field=named.field)
            else:
                begins_behind = named.load(tensors, getattr(reference, "config", None))
        return Modules(
            trained={MODEL: model},
            frozen={REFERENCE: reference},
            counterparts=(REFERENCE,),
            begins_behind=begins_behind,
        )

    def loss(self, modules: Modules, batch: Tensors, stage: Stage) -> Loss:
        """Return the loss and the metrics as sums over the pairs of the batch.

        ``batch[INPUT_IDS]`` and ``batch[LABELS]`` have the shape [pairs, 2, tokens].
        """
        inputs, labels = batch[INPUT_IDS].flatten(0, 1), batch[LABELS].flatten(0, 1)
        chunk_tokens = self.setup.training.runtime.loss_chunk
        # Run the reference first: it needs no gradients, so its activations are freed before the model runs.
        with torch.no_grad():
            its = row_log_probs(
                modules.frozen[REFERENCE], inputs, labels, chunk_tokens=chunk_tokens
            )
        model = modules.trained[MODEL]
        own = row_log_probs(model, inputs, labels, chunk_tokens=chunk_tokens)
        sums = (LogProbs.of(own.view(-1, 2)), LogProbs.of(its.view(-1, 2)))

        # Padding rows of an evaluation batch have no labels, and their losses do not count.
        is_pair = (batch[LABELS] != IGNORE_INDEX).flatten(1).any(dim=1)
        total = _sum_where(is_pair, pair_losses(*sums, self.settings))
        with torch.no_grad():
            parts = {
                name: _sum_where(is_pair, values)
                for name, values in pair_metrics(*sums, self.settings).items()
            }
        return Loss(total, parts)

    def _open(self, source: PreparedSource, sequence: TokenSequence) -> Source:
        return PairSource(
            RowReader(source, sequence),
            sequence_length=self.setup.training.data.sequence_length,
            vocab_size=self.tokenizer.vocab_size,
        )

    def _find_reference(self) -> "_Named | None":
        """Return the reference that the manifest names, or None if ``spec.training.model`` describes it."""
        training, base = self.setup.training, self.setup.base_directory
        if self.settings.reference is not None:
            path = base / self.settings.reference
            return _Named(REFERENCE_FIELD, path)
        # With ``initFrom``, a run does not begin with the weights that ``model`` describes. A run that
        # continues after another run's step uses the other run's reference.
        begun: BegunFrom | None = None
        if self.setup.run_directory is not None:
            own = RunDirectory(self.setup.run_directory)
            # Read the record each time: another node may have begun the run since this task was opened.
            if (record := own.read_resolved()) is not None:
                begun = read_optional(own, record, BEGUN_FROM, BegunFrom)
        for number in range(_LONGEST_CHAIN):
            wanted = training.init_from
            if wanted is None:
                return None
            path = base / wanted.path
            if number > 0 and begun is not None and not path.exists():
                # Older versions recorded base directories that are wrong behind a link.
                path = Path(begun.path)
            if not wanted.goes_on:
                # Use the recorded step, because the newest checkpoint of a run that still trains changes.
                has_begun = begun is not None and bool(begun.checkpoint)
                step = begun.step if begun is not None and has_begun else wanted.step
                return _Named(
                    _INITIAL_FIELD,
                    path,
                    step,
                    has_begun=has_begun,
                    is_own=number == 0,
                )
            # Resolve links as the load does: the parents of a link are not the directories of the run.
            if (found := find_record(path.resolve())) is None:
                what = f"{path} is not in the directory of a run"
                raise ModelError(Problem(_INITIAL_FIELD, what, _WHY_READ, _NAME_IT))
            directory, record = found
            training = read_run(directory, record).training
            base = read_base(directory, record)
            begun = read_optional(directory, record, BEGUN_FROM, BegunFrom)
            other = training.pair_settings
            if other is not None and other.reference is not None:
                return _Named(_INITIAL_FIELD, base / other.reference)
        what = f"leads from one run to another more than {_LONGEST_CHAIN} times"
        raise ModelError(Problem(_INITIAL_FIELD, what, _WHY_READ, _NAME_IT))


@dataclass(frozen=True)
class _Named:
    """Weights that a field of the manifest names.

    ``step`` selects a checkpoint of a run directory instead of its newest one. ``has_begun``: whether a run
    has begun with this step, and ``is_own``: whether this run begins with these weights.
    """

    field: str
    path: Path
    step: int | None = None
    has_begun: bool = False
    is_own: bool = False

    def load(self, tensors: dict[str, Tensor], config: Any) -> int | None:
        """Load the weights from a checkpoint into ``tensors``, which belong to a model with ``config``.

        Returns the checkpoint's step if this run begins with these weights, and None otherwise. Raises
        CheckpointError if the checkpoint cannot be loaded or its model computes a different function.
        """
        try:
            loaded = load_weights(self.path, tensors, step=self.step)
        except CheckpointError as error:
            if not self.has_begun:
                raise
            # Remove the remedy of this error, to name another checkpoint: it would be another reference.
            why = " ".join(str(replace(one, remedy="")) for one in error.problems)
            what = f"the reference is step {self.step} in {self.path}, which cannot be loaded now"
            remedy = "Bring it back: it is read at each start until the run is complete"
            raise CheckpointError(Problem(self.field, what, why, remedy)) from error
        values = from_extra(loaded.extra) if loaded.extra else {}
        if (stored := values.get(DESCRIPTION)) is not None:
            problems, _ = compare_functions(
                stored,
                ModelPlan(config, None).describe(),
                where=str(self.path),
                field=self.field,
            )
            raise_if(problems, CheckpointError)
        return loaded.step if self.is_own else None


def _sum_where(is_pair: Tensor, values: Tensor) -> Tensor:
    return torch.where(is_pair, values, 0.0).sum()
