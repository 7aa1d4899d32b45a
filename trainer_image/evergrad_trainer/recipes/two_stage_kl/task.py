"""The task of two stages: their mixtures, the reference of the boundary, the loss of each, and what is
measured."""

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
    """Next-token loss; in the second stage with a penalty beside the model as it was at the boundary."""

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
        """The two mixtures; the first ends with the step that reaches its tokens.

        Raises DataError for data of another tokenizer, ConfigurationError for a share that is too small.
        """
        (whole,) = super().stages(prepared)
        declared = self._section.stages
        (end,) = stage_ends(self.setup.training)
        # Shares that would be none are refused here, by their places in the file: the stream knows only
        # weights. In the order of the stream, which decides about ties.
        for number, stage in enumerate(declared):
            path = ("spec", "training", "twoStageKl", "stages", number, "mixture")
            names = [name for name in whole.sources if name in stage.mixture]
            if names:
                fields = [format_path((*path, name)) for name in names]
                quantise_weights([stage.mixture[name] for name in names], fields=fields)

        # In the order of data.sources, which decides about the samples: that of a mixture's keys is no part
        # of the run's identity, and changes where the file is written with sorted keys.
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
                # There is nothing to compare with yet: numbers would be of no meaning.
                without=tuple(self.metrics),
            ),
            replace(whole, sources=second, options=StageOptions(penalty)),
        ]

    def evaluators(self, prepared: Prepared) -> Mapping[str, Evaluator]:
        """The loss of the model alone, so that both stages compare: on the held-out documents of each stage's
        sources, then on each evaluation source of the file."""
        found: dict[str, Evaluator] = {}
        # A set a stage: what the second stage forgets shows on the documents of the first.
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
        """The file's model, and another of its kind that becomes the reference at the boundary."""
        # Built alike, so that the snapshot at the boundary fits by name, shape and type.
        (end,) = stage_ends(self.setup.training)
        return Modules(
            trained={MODEL: build_model()},
            frozen={REFERENCE: build_model()},
            snapshots={REFERENCE: Snapshot(of=MODEL, after=end)},
        )

    def loss(self, modules: Modules, batch: Tensors, stage: Stage) -> Loss:
        """The sum of token losses in nats and, in the second stage, of penalties."""
        penalty = stage.options.penalty
        if penalty is None:
            return Loss(self._plain(modules, batch))
        sums = self._compare(modules, batch, penalty)
        # Times the tokens, as the other parts are sums over them: the mean in the report is beta itself.
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
        """Build a measurement of the model's loss and, with a reference, of the distance from it."""

        def measure(modules: Modules, batch: Tensors, stage: Stage) -> Loss:
            # Without the penalty: losses of both stages can be compared.
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
