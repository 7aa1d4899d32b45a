"""The task of edits: items of a corpus, a frozen encoder, a predictor, and trivial baselines beside it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from evergrad_latent_edit.corpus import TRAIN, read_corpus
from evergrad_latent_edit.encoder import Encoder, encode
from evergrad_latent_edit.loss import measure_spread, prediction_losses
from evergrad_latent_edit.modules import (
    ActionEncoder,
    MeanTarget,
    Predictor,
)
from evergrad_latent_edit.preparation import MEAN, prepare
from evergrad_latent_edit.source import (
    AFTER,
    AFTER_SPAN,
    ALTERNATE,
    BEFORE,
    BEFORE_SPAN,
    MASK,
    POSITION,
    REFERENCE,
    STATE,
    TARGET,
    TYPE,
    EditSource,
)
from evergrad_manifest.errors import InputError, Problem
from evergrad_manifest.training import LatentEdit as EditSection
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.task import (
    Evaluator,
    Loss,
    Modules,
    Observer,
    Section,
    Setup,
    Stage,
    Tensors,
)

PREDICTOR: Final = "predictor"
ACTIONS: Final = "actions"
ENCODER: Final = "encoder"
BASELINE: Final = "baseline"
MEAN_LOSS: Final = "mean_loss"

_OF_SETS: Final = ("cosine", "squared_distance", "unchanged_loss", MEAN_LOSS)
_MOMENTS: Final = (
    "predicted",
    "targets",
    "products",
    "predicted_squares",
    "target_squares",
)


class LatentEditOptions(Section):
    """``spec.training.options`` of this recipe: none, since the section ``latentEdit`` has its settings."""


class LatentEditTask:
    """One stage, two trained modules, one source; a model of the file that stays as it is."""

    Options: ClassVar[type[Section]] = LatentEditOptions
    metrics: ClassVar[Mapping[str, str]] = {
        "cosine": "Mean cosine of predicted states and those of the encoder.",
        "squared_distance": "Mean squared distance between them.",
        "target_variance": "Variance of the encoder's states, a dimension; in a micro-batch.",
        "prediction_variance": "Variance of predicted states, a dimension; in a micro-batch.",
        "correlation": "Correlation of all numbers of predicted states and the encoder's; in a micro-batch.",
        "pairwise_distance": "Mean distance between two predicted states of a micro-batch.",
        "gaussian_kl": "KL of the encoder's states of a micro-batch from a standard Gaussian.",
        "unchanged_loss": "Loss of the prediction that an edit changes nothing.",
        MEAN_LOSS: "Loss of the prediction that every state is the mean one.",
    }
    loss_items: ClassVar[str] = "edits"
    measured: ClassVar[Mapping[str, str]] = {
        "cosine": metrics["cosine"],
        "squared_distance": metrics["squared_distance"],
        "target_variance": "Variance of the encoder's states, a dimension.",
        "prediction_variance": "Variance of predicted states, a dimension.",
        "correlation": "Correlation of all numbers of predicted states and the encoder's.",
        "unchanged_loss": metrics["unchanged_loss"],
        MEAN_LOSS: metrics[MEAN_LOSS],
        "gain": "Share of the loss of an unchanged state that the prediction saves.",
    }

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._facts: Mapping[str, Any] = {}
        self._folder = Path()

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder, whose model is made only where it computes."""
        return Encoder(self.setup)

    def check_files(self) -> Sequence[Problem]:
        """What is wrong with the corpus: its manifest, and each file by size and checksum. Trains nothing."""
        section = self._section
        try:
            read_corpus(self.setup.base_directory / section.corpus, windows=section.windows)
        except InputError as error:
            return error.problems
        return ()

    def prepare(self, prepared: Prepared, folder: Path) -> Mapping[str, Any]:
        """Read the corpus, make all items, and encode them unless that is done in each step."""
        return prepare(self.setup, self._section, folder)

    def stages(self, prepared: Prepared) -> Sequence[Stage]:
        """One stage on all items that are trained on."""
        self._read(prepared)
        # In the fingerprint of the data: a corpus or an encoder that has changed gives other samples.
        facts = {key: self._facts[key] for key in ("snapshotId", "manifestHash", "encoder")}
        # The mean state is known where all states are.
        without = () if self._is_cached else (MEAN_LOSS,)
        return [Stage({TRAIN: (self._open(TRAIN), 1.0)}, facts=facts, without=without)]

    def evaluators(self, prepared: Prepared) -> Mapping[str, Evaluator]:
        """The loss on each other split of the corpus, and on what is held out."""
        self._read(prepared)
        without = () if self._is_cached else (MEAN_LOSS,)
        metrics = {key: text for key, text in self.measured.items() if key not in without}
        width = int(self._facts["stateWidth"])
        to_metrics = functools.partial(summarize, width=width, section=self._section)
        return {
            name: Evaluator(
                [self._open(name)],
                measure=self._measure,
                metrics=metrics,
                parts=self._parts,
                summarize=to_metrics,
            )
            for name in self._facts["splits"]
            if name != TRAIN
        }

    def observers(self) -> Sequence[Observer]:
        """None besides those of every run: the file's monitors watch for a collapse."""
        return ()

    def build(self, build_model: Callable[[], nn.Module]) -> Modules:
        """The two trained modules; the encoder where it computes in each step, else the mean state.

        Raises ModelError for a width that the heads do not divide.
        """
        settings = self._section.predictor
        state_width = int(self._facts["stateWidth"])
        width = settings.width or state_width
        if width % settings.heads:
            where = "spec.training.latentEdit.predictor.heads"
            what = f"{settings.heads} do not divide the width {width}"
            why, remedy = "each head has an equal part", "Use another number, or set width"
            raise ModelError(Problem(where, what, why, remedy))
        actions = ActionEncoder(
            width=settings.action_width, allele_width=settings.allele_width
        )
        predictor = Predictor(
            state_width=state_width,
            action_width=settings.action_width,
            width=width,
            layers=settings.layers,
            heads=settings.heads,
        )
        # The encoder is built where it computes alone: cached states need no memory for it.
        frozen: dict[str, nn.Module]
        if self._is_cached:
            mean = torch.from_numpy(np.load(self._folder / MEAN))
            frozen = {BASELINE: MeanTarget(mean)}
        else:
            frozen = {ENCODER: self.encoder.build()}
        return Modules(
            trained={ACTIONS: actions, PREDICTOR: predictor},
            frozen=frozen,
            blocks=(*actions.blocks, *predictor.blocks),
            # One sequence at a time: parts of it would be gathered for each.
            replicated=tuple(frozen),
        )

    def loss(self, modules: Modules, batch: Tensors, stage: Stage) -> Loss:
        """The sum of the losses of all edits, with the numbers that tell a collapse."""
        state, target = self._states(modules, batch)
        predicted, mask = self._predict(modules, batch, state), batch[MASK]
        total = self._losses(predicted, target, mask).sum()
        # Outside of the graph and of autocast: numbers to look at must neither cost memory nor lose digits.
        with torch.no_grad(), torch.autocast(state.device.type, enabled=False):
            # Times the weight: the step divides all parts by it, as it does the loss.
            weight = mask.sum()
            spread = measure_spread(predicted.detach(), target, mask)
            parts = {
                name: (value * weight).float()
                for name, value in dataclasses.asdict(spread).items()
            }
            parts |= self._baselines(modules, state, target, mask)
        return Loss(total, parts)

    def enter(self, modules: Modules, stage: Stage) -> None:
        """Nothing to prepare: there is one stage."""

    def after_update(self, modules: Modules, metrics: Mapping[str, float]) -> None:
        """Nothing to keep."""

    def _predict(self, modules: Modules, batch: Tensors, state: Tensor) -> Tensor:
        mask = batch[MASK]
        actions = modules.trained[ACTIONS](
            batch[POSITION],
            batch[TYPE],
            batch[REFERENCE],
            batch[ALTERNATE],
            mask,
        )
        predicted: Tensor = modules.trained[PREDICTOR](
            state, actions, mask, normalize=self._normalizes
        )
        return predicted

    def _losses(self, predicted: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        section = self._section
        return prediction_losses(
            predicted, target, mask, alpha=float(section.alpha), beta=float(section.beta)
        )

    def _baselines(
        self, modules: Modules, state: Tensor, target: Tensor, mask: Tensor
    ) -> dict[str, Tensor]:
        """The losses of predictions that need no training."""
        unchanged = state[:, None].expand_as(target)
        found = {"unchanged_loss": self._losses(unchanged, target, mask).sum()}
        if self._is_cached:
            mean = torch.as_tensor(modules.frozen[BASELINE].mean)
            if self._normalizes:
                mean = functional.normalize(mean, dim=0)
            found[MEAN_LOSS] = self._losses(mean.expand_as(target), target, mask).sum()
        return found

    def _states(self, modules: Modules, batch: Tensors) -> tuple[Tensor, Tensor]:
        """The states before and after the edits, [B, D] and [B, K, D], without gradients."""
        if self._is_cached:
            return batch[STATE], batch[TARGET]
        # One sequence at a time, in the same order on all ranks: a batch would have to be padded, which
        # may change the last bits of a state.
        model = modules.frozen[ENCODER]
        before = [
            self._encode(model, ids, span)
            for ids, span in zip(batch[BEFORE], batch[BEFORE_SPAN], strict=True)
        ]
        after = [
            torch.stack([self._encode(model, *one) for one in zip(ids, spans, strict=True)])
            for ids, spans in zip(batch[AFTER], batch[AFTER_SPAN], strict=True)
        ]
        return torch.stack(before), torch.stack(after)

    def _encode(self, model: nn.Module, ids: Tensor, span: Tensor) -> Tensor:
        first, last = span.tolist()
        if first == last:
            # No edit, or a row that counts nothing.
            return torch.zeros(int(self._facts["stateWidth"]), device=ids.device)
        layer = self.encoder.layer
        return encode(model, ids, (first, last), layer=layer, normalize=self._normalizes)

    def _measure(self, modules: Modules, batch: Tensors, stage: Stage) -> Loss:
        """The loss, and sums from which the numbers of the whole set follow."""
        # In float64, as the sums below are added up over a whole set before they are subtracted.
        state, target = self._states(modules, batch)
        mask = batch[MASK]
        predicted = self._predict(modules, batch, state).double()
        target = target.double()
        cosines = functional.cosine_similarity(predicted, target, dim=-1)
        parts = {
            "cosine": (cosines * mask).sum(),
            "squared_distance": (predicted - target).square().sum(),
            **self._baselines(modules, state, target, mask),
            "predicted": predicted.sum(),
            "targets": target.sum(),
            "products": (predicted * target).sum(),
            "predicted_squares": predicted.square().sum(),
            "target_squares": target.square().sum(),
        }
        for name, states in (("predicted", predicted), ("target", target)):
            sums = states.sum((0, 1))
            parts |= {f"{name}_{index}": sums[index] for index in range(len(sums))}
        total = self._losses(predicted, target, mask).sum()
        return Loss(total, {name: parts[name] for name in self._parts})

    @property
    def _parts(self) -> list[str]:
        """Names of the sums of an evaluation, in their order."""
        width = int(self._facts["stateWidth"])
        means = [
            f"{name}_{one}" for name in ("predicted", "target") for one in range(width)
        ]
        of_sets = [one for one in _OF_SETS if self._is_cached or one != MEAN_LOSS]
        return [*of_sets, *_MOMENTS, *means]

    def _open(self, split: str) -> EditSource:
        encoder = None if self._is_cached else self.encoder
        return EditSource(self._folder, split, self._facts, encoder)

    def _read(self, prepared: Prepared) -> None:
        assert prepared.folder is not None  # noqa: S101 - prepare has returned facts
        self._facts = prepared.facts
        self._folder = prepared.folder / str(prepared.facts["folder"])

    @property
    def _section(self) -> EditSection:
        section = self.setup.training.latent_edit
        assert section is not None  # noqa: S101 - a rule of the manifest
        return section

    @property
    def _is_cached(self) -> bool:
        return self._section.features == "cached"

    @property
    def _normalizes(self) -> bool:
        return self._section.encoder.normalize


def summarize(
    means: Mapping[str, float], *, width: int, section: EditSection
) -> Mapping[str, float]:
    """The metrics of a set from the means of its parts an edit: exact over the whole set, not by batches."""
    found = {name: means[name] for name in _OF_SETS if name in means}
    for metric, name, squares in (
        ("target_variance", "target", "target_squares"),
        ("prediction_variance", "predicted", "predicted_squares"),
    ):
        # Rounding may leave less than nothing of a set whose states are all alike.
        length = sum(means[f"{name}_{index}"] ** 2 for index in range(width))
        found[metric] = max(0.0, means[squares] - length) / width

    # Over all numbers: the mean of an edit's sum is so many times the mean of its numbers.
    one, other = means["predicted"] / width, means["targets"] / width
    together = means["products"] / width - one * other
    own = means["predicted_squares"] / width - one**2
    theirs = means["target_squares"] / width - other**2
    product = max(0.0, own) * max(0.0, theirs)
    found["correlation"] = together / product**0.5 if product > 0 else 0.0

    loss = float(section.alpha) * (1 - means["cosine"])
    loss += float(section.beta) * means["squared_distance"] / width
    unchanged = means["unchanged_loss"]
    found["gain"] = 1 - loss / unchanged if unchanged > 0 else 0.0
    return found
