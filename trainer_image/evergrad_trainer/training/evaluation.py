"""Means over a fixed set of samples, shared by all ranks, the same bits in every world."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from evergrad_trainer.data.batch import Batch, Stage
from evergrad_trainer.data.evaluation_sets import EvaluationSet
from evergrad_trainer.models.parallel import reshard
from evergrad_trainer.task import Loss, Tensors
from evergrad_trainer.world import World

_ROUNDS_BETWEEN_STOP_CHECKS = 4


@dataclass(frozen=True)
class EvaluationResult:
    """``loss`` a unit of weight over the whole set, and ``metrics``, the means of its parts.

    ``weight``: what all of it weighs.
    """

    loss: float
    metrics: dict[str, float]
    weight: int
    seconds: float


@dataclass(frozen=True)
class Measure:
    """What is measured on a set.

    ``names``: those of the parts that ``loss_of`` gives, in the order in which they travel. ``summarize``:
    makes the metrics of their means. ``is_own``: it is not the loss of a step, and may call the model often.
    """

    loss_of: Callable[[Tensors, Stage], Loss]
    names: Sequence[str] = ()
    summarize: Callable[[Mapping[str, float]], Mapping[str, float]] = dict
    is_own: bool = False

    def within(self, stage: Stage) -> "Measure":
        """What is measured in ``stage``, which may be without some of the parts."""
        names = tuple(name for name in self.names if name not in stage.without)
        return replace(self, names=names)


@dataclass(frozen=True)
class EvaluationRunner:
    """Evaluates sets with the model as it is now. Draws no random numbers and moves no cursor.

    ``measures``: what is measured on each set, by its name. ``reading``: around each read of a source, to
    name errors of a task's own.
    """

    model: nn.Module
    measures: Mapping[str, Measure]
    is_sharded: bool
    autocast: Callable[[], AbstractContextManager[object]]
    reading: Callable[[], AbstractContextManager[object]] = nullcontext
    frozen: Sequence[nn.Module] = ()
    """Modules that are cut besides the model, and used by measures."""

    def run(
        self,
        evaluation_set: EvaluationSet,
        world: World,
        *,
        stage: Stage,
        is_stopping: Callable[[], bool],
        on_progress: Callable[[int, int], None],
    ) -> EvaluationResult | None:
        """Evaluate one set.

        Returns None, on all ranks, when any rank is stopping: its result would be of a part only.
        """
        begun = time.perf_counter()
        measure = self.measures[evaluation_set.name].within(stage)
        was_training = self.model.training
        self.model.eval()
        try:
            with self._looking(world) if measure.is_own else nullcontext():
                found = self._sums(
                    evaluation_set,
                    world,
                    measure,
                    stage,
                    is_stopping=is_stopping,
                    on_progress=on_progress,
                )
        finally:
            self.model.train(was_training)
            if self.is_sharded:
                # FSDP2 leaves modules gathered for a backward pass, which does not come.
                reshard(self.model, *self.frozen)
        if found is None:
            return None
        sums, weight = found
        means = [math.nan] * len(sums)
        if weight:
            means = [math.fsum(row) / weight for row in sums]
        loss, *parts = means
        return EvaluationResult(
            loss=loss,
            metrics=dict(measure.summarize(dict(zip(measure.names, parts, strict=True)))),
            weight=weight,
            seconds=time.perf_counter() - begun,
        )

    @contextmanager
    def _looking(self, world: World) -> Iterator[None]:
        """Look at each call of the model whether the group still is."""
        # A micro-batch of generation takes a hundred calls: a peer that is lost meanwhile would be noticed
        # behind all of them, and a worker that does not answer for so long is killed.
        is_several = isinstance(self.model, nn.ModuleDict)
        modules = [*self.model.children()] if is_several else [self.model]
        handles = [
            one.register_forward_pre_hook(lambda *_: world.raise_if_given_up())
            for one in modules
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _sums(
        self,
        evaluation_set: EvaluationSet,
        world: World,
        measure: Measure,
        stage: Stage,
        *,
        is_stopping: Callable[[], bool],
        on_progress: Callable[[int, int], None],
    ) -> tuple[list[list[float]], int] | None:
        """For the total and each part, the sums of all batches in their order; and what they
        weigh together."""
        num_batches = evaluation_set.num_batches
        sums = torch.zeros(1 + len(measure.names), num_batches, dtype=torch.float64)
        weight = 0
        rounds = math.ceil(num_batches / world.size)
        for index in range(rounds):
            # A measure of the task's own may take long for one batch.
            is_check_due = measure.is_own or index % _ROUNDS_BETWEEN_STOP_CHECKS == 0
            # Collective: nobody goes on where one is asked to stop, since it would wait for that one in the
            # end.
            if is_check_due and not world.all_agree(not is_stopping()):
                return None

            number = index * world.size + world.rank
            if number < num_batches:
                with self.reading():
                    batch = evaluation_set.batch(number)
                sums[:, number] = self._measure(measure, batch, stage, world.device)
                weight += batch.weight
            elif self.is_sharded:
                # Collectives of FSDP2: one without a batch of its own runs one that does not count.
                batch = evaluation_set.batch(0)
                self._measure(measure, batch, stage, world.device)
            done = min(num_batches, (index + 1) * world.size)
            on_progress(done, num_batches)

        # Collective: as in a step, each place is filled by one rank, so summing the bits gathers the values.
        vector = torch.cat([sums.flatten().view(torch.int64), torch.tensor([weight])])
        vector = world.sum_integers(vector)
        gathered = vector[:-1].clone().view(torch.float64).view_as(sums)
        return gathered.tolist(), int(vector[-1])

    @torch.no_grad()
    def _measure(
        self, measure: Measure, batch: Batch, stage: Stage, device: torch.device
    ) -> torch.Tensor:
        tensors = {name: tensor.to(device) for name, tensor in batch.tensors.items()}
        with self.autocast():
            loss = measure.loss_of(tensors, stage)
        parts = [loss.parts[name] for name in measure.names]
        values = [value.double() for value in (loss.total, *parts)]
        return torch.stack(values).cpu()
