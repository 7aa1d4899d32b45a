"""The task of two stages: their mixtures, the reference at the boundary, the loss of each stage, and its
metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from torch import Tensor, nn

from evergrad_manifest.derive import loss_chunk, stage_ends
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.training import TwoStageKl as StageSection
from evergrad_manifest.training.two_stage_kl import DEFAULT_BETA, STAGE_SETS
from evergrad_trainer.data.mixture import quantise_weights
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.data.token_source import IGNORE_INDEX, LABELS
from evergrad_trainer.objectives.linear_kl import KlSums, Penalty
from evergrad_trainer.recipes.pretrain import Pretrain
from evergrad_trainer.recipes.two_stage_kl.loss import sum_divergences, sum_losses
from evergrad_trainer.task import Evaluator, Loss, Modules, Snapshot, Stage, Tensors

MODEL: Final = "model"
REFERENCE: Final = "reference"


@dataclass(frozen=True)
class StageOptions:
    """Options of a stage's loss. ``penalty``: None in the first stage, which has no reference."""

    penalty: Penalty | None


class TwoStageKl(Pretrain):
    """Next-token loss; in the second stage with a penalty relative to the model at the boundary."""

    metrics: ClassVar[Mapping[str, str]] = {
        "policy_loss": "Mean token loss of the model, without the penalty, in nats.",
        "reference_loss": "Mean token loss of the reference on the same tokens, in nats.",
        "penalty": "What the estimator adds, a token; multiplied by beta it is a part of the loss.",
        "kl": "Mean KL(model ‖ reference) over the vocabulary, in nats a token, whatever the penalty is.",
        "beta": "Weight of the penalty.",
    }
    measured: ClassVar[Mapping[str, str]] = {
        "reference_loss": metrics["reference_loss"],
        "kl": metrics["kl"],
    }

    def stages(self, prepared: Prepared) -> Sequence[Stage]:
        """Return the two mixtures. The first ends with the step that reaches its number of tokens.

        Raises DataError if the data were prepared with another tokenizer, and ConfigurationError if a share
        is too small.
        """
        (whole,) = super().stages(prepared)
        declared = self._section.stages
        (end,) = stage_ends(self.setup.training)
        # Refuse shares that would be rounded to 0 here, with their fields in the file, because the stream
        # knows only weights. Use the order of the stream, which decides ties.
        for number, stage in enumerate(declared):
            path = ("spec", "training", "twoStageKl", "stages", number, "mixture")
            names = [name for name in whole.sources if name in stage.mixture]
            if names:
                fields = [format_path((*path, name)) for name in names]
                quantise_weights([stage.mixture[name] for name in names], fields=fields)

        # Use the order of data.sources, which determines the samples. The order of a mixture's keys is not a
        # part of the run's identity, and changes if the file is written with sorted keys.
        first, second = (
            {
                name: (source, one.mixture[name])
                for name, (source, _) in whole.sources.items()
                if name in one.mixture
            }
            or whole.sources
            for one in declared
        )
        beta = DEFAULT_BETA if declared[1].beta is None else float(declared[1].beta)
        penalty = Penalty(self._section.estimator, beta)
        return [
            replace(
                whole,
                sources=first,
                until=end,
                options=StageOptions(None),
                # There is no reference yet, so these metrics have no meaning.
                without=tuple(self.metrics),
            ),
            replace(whole, sources=second, options=StageOptions(penalty)),
        ]

    def evaluators(self, prepared: Prepared) -> Mapping[str, Evaluator]:
        """Return the loss of the model without the penalty, so that both stages can be compared.

        The sets are the held-out documents of each stage's sources, then each evaluation source of the file.
        """
        found: dict[str, Evaluator] = {}
        # One set per stage: the documents of the first stage show what the second stage forgets.
        for name, stage in zip(STAGE_SETS, self._section.stages, strict=True):
            held_out = [
                self._open(one, one.held_out)
                for one in prepared.sources
                if one.held_out is not None
                and (not stage.mixture or one.name in stage.mixture)
            ]
            if held_out:
                found[name] = self._evaluator(held_out)
        for one in prepared.evaluation:
            found[one.name] = self._evaluator([self._open(one, one.train)])
        return found

    def build(self, build_model: Callable[[], nn.Module]) -> Modules:
        """Build the file's model, and a second model that becomes the reference at the boundary."""
        # Build both in the same way, so that the snapshot at the boundary fits by name, shape and type.
        (end,) = stage_ends(self.setup.training)
        return Modules(
            trained={MODEL: build_model()},
            frozen={REFERENCE: build_model()},
            snapshots={REFERENCE: Snapshot(of=MODEL, after=end)},
        )

    def loss(self, modules: Modules, batch: Tensors, stage: Stage) -> Loss:
        """Return the sum of token losses in nats and, in the second stage, of penalties."""
        penalty = stage.options.penalty
        if penalty is None:
            return Loss(self._plain(modules, batch))
        sums = self._compare(modules, batch, penalty)
        # Multiply by the number of tokens, because the other parts are sums; the mean in the report is then
        # beta.
        num_tokens = (batch[LABELS] != IGNORE_INDEX).sum()
        return Loss(
            sums.total,
            {
                "policy_loss": sums.policy,
                "reference_loss": sums.reference,
                "penalty": sums.penalty,
                "kl": sums.divergence,
                "beta": penalty.beta * num_tokens,
            },
        )

    def _evaluator(self, sources: Sequence[Any]) -> Evaluator:
        """Build a measurement of the model's loss and, with a reference, of the divergence from it."""

        def measure(modules: Modules, batch: Tensors, stage: Stage) -> Loss:
            # Measure without the penalty, so that losses of both stages can be compared.
            penalty = stage.options.penalty
            if penalty is None:
                return Loss(self._plain(modules, batch))
            sums = self._compare(modules, batch, penalty)
            return Loss(
                sums.policy, {"reference_loss": sums.reference, "kl": sums.divergence}
            )

        return Evaluator(sources, measure, self.measured)

    def _plain(self, modules: Modules, batch: Tensors) -> Tensor:
        return sum_losses(modules.trained[MODEL], batch, chunk_tokens=self._chunk_tokens)

    def _compare(self, modules: Modules, batch: Tensors, penalty: Penalty) -> KlSums:
        return sum_divergences(
            modules.trained[MODEL],
            modules.frozen[REFERENCE],
            batch,
            penalty=penalty,
            chunk_tokens=self._chunk_tokens,
        )

    @property
    def _chunk_tokens(self) -> int:
        found = loss_chunk(self.setup.training)
        assert found is not None  # noqa: S101 - there is a reference
        return found

    @property
    def _section(self) -> StageSection:
        section = self.setup.training.two_stage_kl
        assert section is not None  # noqa: S101 - a rule of the manifest
        return section
