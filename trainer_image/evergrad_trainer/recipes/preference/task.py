"""The task of preferences: pairs of rows, the frozen reference, the loss of pairs and what is measured."""

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
"""Most runs of which each continues with the state of the next: more would be runs that name one another."""
_WHY_READ: Final = (
    "with everything loaded, the reference is that of the run which is gone on with"
)
_NAME_IT: Final = "Name that reference as preference.reference"


class Preference(Pretrain):
    """The loss of pairs beside a frozen model, which is the one that the run begins with or another one."""

    metrics: ClassVar[Mapping[str, str]] = METRICS
    loss_items: ClassVar[str] = "pairs"

    @property
    def settings(self) -> PreferenceSection:
        """Loss and reference."""
        return self.setup.training.pair_settings or PreferenceSection()

    def stages(self, prepared: Prepared) -> Sequence[Stage]:
        """All sources by their weights, from the first step to the last.

        Raises DataError, and ModelError where there is no reference of the name that the file has.
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
        """The file's model, and another of its kind that stays as it is.

        Raises ModelError and CheckpointError where the reference cannot be read.
        """
        model, reference = build_model(), build_model()
        named = self._find_reference()
        if named is not None and any(one.is_meta for one in reference.parameters()):
            # Made later, one by one, by whoever cuts the model: the whole one is asked for then.
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
        """The sums over pairs."""
        inputs, labels = batch[INPUT_IDS].flatten(0, 1), batch[LABELS].flatten(0, 1)
        chunk_tokens = self.setup.training.runtime.loss_chunk
        # First the one without gradients: what it computes on the way is gone before the other begins.
        with torch.no_grad():
            its = row_log_probs(
                modules.frozen[REFERENCE], inputs, labels, chunk_tokens=chunk_tokens
            )
        model = modules.trained[MODEL]
        own = row_log_probs(model, inputs, labels, chunk_tokens=chunk_tokens)
        sums = (LogProbs.of(own.view(-1, 2)), LogProbs.of(its.view(-1, 2)))

        # A row that fills up a batch of an evaluation has no label, and a loss that does not count.
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
        """The reference that the file names; None where it is what ``model`` describes."""
        training, base = self.setup.training, self.setup.base_directory
        if self.settings.reference is not None:
            path = base / self.settings.reference
            return _Named(REFERENCE_FIELD, path)
        # The weights that a run begins with are not those that ``model`` describes. One that continues behind
        # another run's step continues beside that run's reference.
        begun: BegunFrom | None = None
        if self.setup.run_directory is not None:
            own = RunDirectory(self.setup.run_directory)
            # Read each time: another node may have begun the run since this one opened its task.
            if (record := own.read_resolved()) is not None:
                begun = read_optional(own, record, BEGUN_FROM, BegunFrom)
        for number in range(_LONGEST_CHAIN):
            wanted = training.init_from
            if wanted is None:
                return None
            path = base / wanted.path
            if number > 0 and begun is not None and not path.exists():
                # Older versions wrote base directories that lead elsewhere behind a link.
                path = Path(begun.path)
            if not wanted.goes_on:
                # The newest checkpoint of a run that trains on is another one at each start.
                has_begun = begun is not None and bool(begun.checkpoint)
                step = begun.step if begun is not None and has_begun else wanted.step
                return _Named(
                    _INITIAL_FIELD,
                    path,
                    step,
                    has_begun=has_begun,
                    is_own=number == 0,
                )
            # Behind links, as the load reads it: the folders above a link are not the run's.
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
    """Weights that a field of the file names. ``step``: of a run directory, instead of its newest.

    ``has_begun``: a run has begun with that step. ``is_own``: this run begins with these weights.
    """

    field: str
    path: Path
    step: int | None = None
    has_begun: bool = False
    is_own: bool = False

    def load(self, tensors: dict[str, Tensor], config: Any) -> int | None:
        """Load them from a checkpoint into a model of ``config``.

        Returns the step that this run has to begin behind, if it is to begin with them. Raises
        CheckpointError.
        """
        try:
            loaded = load_weights(self.path, tensors, step=self.step)
        except CheckpointError as error:
            if not self.has_begun:
                raise
            # Without its remedy, which is to name another one: that would be another reference.
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
