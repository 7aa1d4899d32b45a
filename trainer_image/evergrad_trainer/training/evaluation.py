"""The mean loss over a fixed set of samples, shared by all ranks, the same bits in every world."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

from evergrad_trainer.data.evaluation_sets import EvaluationSet
from evergrad_trainer.data.stream import IGNORE_INDEX, SlotBatch
from evergrad_trainer.objectives.causal_lm import LossSum
from evergrad_trainer.world import World

_ROUNDS_BETWEEN_STOP_CHECKS = 4


@dataclass(frozen=True)
class EvaluationResult:
    """``loss`` in nats per valid token over the whole set; ``tokens`` are the valid ones.

    ``metrics``: what the evaluator measures besides, by name.
    """

    loss: float
    tokens: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates sets with the model as it is now. Draws no random numbers and moves no cursor."""

    model: nn.Module
    loss_sum: LossSum
    micro_batch_size: int
    is_sharded: bool
    autocast: Callable[[], AbstractContextManager[object]]

    def run(
        self,
        evaluation_set: EvaluationSet,
        world: World,
        *,
        is_stopping: Callable[[], bool],
        on_progress: Callable[[int, int], None],
    ) -> EvaluationResult | None:
        """Evaluate one set. Returns None, on all ranks, when any rank is stopping: its result would be of a part only."""
        begun = time.perf_counter()
        was_training = self.model.training
        self.model.eval()
        try:
            sums = self._sums(evaluation_set, world, is_stopping=is_stopping, on_progress=on_progress)
        finally:
            self.model.train(was_training)
            if self.is_sharded:
                # FSDP2 leaves its root gathered for a backward pass, which does not come: a save would find no shards.
                self.model.reshard()  # type: ignore[operator]
        if sums is None:
            return None
        losses, tokens = sums
        loss = math.fsum(losses) / tokens if tokens else math.nan
        return EvaluationResult(loss=loss, tokens=tokens, seconds=time.perf_counter() - begun)

    def _sums(
        self,
        evaluation_set: EvaluationSet,
        world: World,
        *,
        is_stopping: Callable[[], bool],
        on_progress: Callable[[int, int], None],
    ) -> tuple[list[float], int] | None:
        num_batches = evaluation_set.num_batches
        losses = torch.zeros(num_batches, dtype=torch.float64)
        tokens = 0
        for index in range(math.ceil(num_batches / world.size)):
            if index % _ROUNDS_BETWEEN_STOP_CHECKS == 0 and not world.all_agree(not is_stopping()):
                return None
            number = index * world.size + world.rank
            if number < num_batches:
                batch = evaluation_set.batch(number)
                losses[number] = self._loss(batch, world.device)
                tokens += batch.valid_tokens
            elif self.is_sharded:
                self._loss(evaluation_set.batch(0), world.device)
            on_progress(min(num_batches, (index + 1) * world.size), num_batches)
        # As in a step: each place is filled by one rank, so summing the bits gathers the values.
        vector = torch.cat([losses.view(torch.int64), torch.tensor([tokens])])
        vector = world.sum_integers(vector)
        return vector[:-1].clone().view(torch.float64).tolist(), int(vector[-1])

    @torch.no_grad()
    def _loss(self, batch: SlotBatch, device: torch.device) -> torch.Tensor:
        missing = self.micro_batch_size - batch.input_ids.shape[0]
        # Always the same shape: a shorter last batch would compile another graph.
        input_ids = functional.pad(batch.input_ids, (0, 0, 0, missing))
        labels = functional.pad(batch.labels, (0, 0, 0, missing), value=IGNORE_INDEX)
        with self.autocast():
            return self.loss_sum(input_ids.to(device), labels.to(device)).double().cpu()
