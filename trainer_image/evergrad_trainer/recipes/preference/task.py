"""The task of preferences: pairs of rows, the frozen reference, the loss of pairs and what is measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from evergrad_manifest.errors import Problem
from evergrad_manifest.identity import from_wire
from evergrad_manifest.training import Preference as PreferenceSection
from evergrad_manifest.training.preference import METRICS
from evergrad_trainer.checkpoint.weights import WEIGHTS, load_weights
from evergrad_trainer.data.pair_source import PairSource
from evergrad_trainer.data.prepared import Prepared, PreparedSource, TokenSequence
from evergrad_trainer.data.row_source import RowReader
from evergrad_trainer.data.token_source import IGNORE_INDEX, INPUT_IDS, LABELS
from evergrad_trainer.errors import ModelError
from evergrad_trainer.models.weights import load_model_directory
from evergrad_trainer.objectives.token_log_probs import row_log_probs
from evergrad_trainer.recipes.preference.loss import LogProbs, pair_losses, pair_metrics
from evergrad_trainer.recipes.pretrain import Pretrain
from evergrad_trainer.run_directory import find_record
from evergrad_trainer.run_record import read_base, read_key
from evergrad_trainer.state.providers import module_tensors
from evergrad_trainer.task import Loss, Modules, Source, Stage, Tensors

MODEL: Final = "model"
REFERENCE: Final = "reference"
_INITIAL_FIELD: Final = "spec.training.initFrom.path"
_LONGEST_CHAIN: Final = 64
"""Most runs of which each goes on with the state of the next: more would be runs that name one another."""
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
        if named is not None:
            tensors = {
                f"{WEIGHTS}{name}": one for name, one in module_tensors(reference).items()
            }
            if (named.path / "config.json").is_file():
                config: Any = reference.config
                load_model_directory(named.path, tensors, config=config, field=named.field)
            else:
                load_weights(named.path, tensors, step=named.step)
        return Modules(
            trained={MODEL: model}, frozen={REFERENCE: reference}, counterparts=(REFERENCE,)
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
            return _Named("spec.training.preference.reference", path)
        # The weights that a run begins with are not those that ``model`` describes. One that goes on behind
        # another run's step goes on beside that run's reference.
        for _ in range(_LONGEST_CHAIN):
            begun = training.init_from
            if begun is None:
                return None
            path = base / begun.path
            if not begun.goes_on:
                return _Named(_INITIAL_FIELD, path, begun.step)
            if (found := find_record(path)) is None:
                what = f"{path} is not in the directory of a run"
                raise ModelError(Problem(_INITIAL_FIELD, what, _WHY_READ, _NAME_IT))
            directory, record = found
            manifest = read_key(directory, record, "manifest", dict[str, Any])
            training = from_wire(manifest).training
            base = read_base(directory, record)
            other = training.pair_settings
            if other is not None and other.reference is not None:
                return _Named(_INITIAL_FIELD, base / other.reference)
        what = f"leads from one run to another more than {_LONGEST_CHAIN} times"
        raise ModelError(Problem(_INITIAL_FIELD, what, _WHY_READ, _NAME_IT))


@dataclass(frozen=True)
class _Named:
    """Weights that a field of the file names. ``step``: of a run directory, instead of its newest."""

    field: str
    path: Path
    step: int | None = None


def _sum_where(is_pair: Tensor, values: Tensor) -> Tensor:
    return torch.where(is_pair, values, 0.0).sum()
