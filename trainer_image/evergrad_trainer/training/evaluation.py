"""Means over a fixed set of samples, shared by all ranks, the same bits in every world."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from evergrad_trainer.base.errors import HostError
from evergrad_trainer.data.batch import Batch, Stage
from evergrad_trainer.data.evaluation_sets import EvaluationSet
from evergrad_trainer.distributed.world import World
from evergrad_trainer.models.parallel import reshard
from evergrad_trainer.state.replicas import find_suspects
from evergrad_trainer.task import Loss, Tensors
from evergrad_trainer.training.evaluation_counts import EvaluationCounts

_ROUNDS_BETWEEN_EXCHANGES = 4
"""Batches of each rank between two exchanges of what was measured: at most so many are measured again where a
world ends."""


@dataclass(frozen=True)
class EvaluationResult:
    """``loss`` a unit of weight over the whole set, and ``metrics``, the means of its parts.

    ``weight``: what all of it weighs. ``seconds``: of the try that has ended it alone, since a process can
    account for its own time only.
    """

    loss: float
    metrics: dict[str, float]
    weight: int
    seconds: float


@dataclass(frozen=True)
class Measure:
    """The measurement of a set.

    ``names``: those of the parts that ``loss_of`` gives, in the order in which they travel. ``summarize``:
    makes the metrics of their means in a stage. ``is_own``: it is not the loss of a step, and may call the
    model often.
    """

    loss_of: Callable[[Tensors, Stage], Loss]
    names: Sequence[str] = ()
    summarize: Callable[[Mapping[str, float], Stage], Mapping[str, float]] = (
        lambda means, stage: means
    )
    is_own: bool = False

    def within(self, stage: Stage) -> "Measure":
        """The measurement in ``stage``, which may be without some of the parts."""
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
    code: str = ""
    """Hash of the task's own files: what another version of them has measured is not gone on with."""
    averaging: Callable[[], AbstractContextManager[object]] | None = None
    """Puts an average in the place of the weights; None: the weights themselves are evaluated."""

    def key(self, evaluation_set: EvaluationSet) -> str:
        """The measurement and its set: tallies of one key can be added up, and others cannot."""
        names = self.measures[evaluation_set.name].names
        # Written at the end and only where it is one: tallies of earlier versions have their keys.
        weights = [] if self.averaging is None else ["average"]
        text = json.dumps([evaluation_set.fingerprint, list(names), self.code, *weights])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def open_tally(
        self, evaluation_set: EvaluationSet, values: Mapping[str, Any], *, stage: Stage
    ) -> EvaluationCounts:
        """The tally at which an evaluation of this set in ``stage`` was cut; an empty one if it was of
        anything else."""
        names = self.measures[evaluation_set.name].within(stage).names
        return EvaluationCounts.from_json(values, key=self.key(evaluation_set), names=names)

    def run(
        self,
        evaluation_set: EvaluationSet,
        world: World,
        tally: EvaluationCounts,
        *,
        stage: Stage,
        is_stopping: Callable[[], bool],
        on_progress: Callable[[int, int], None],
    ) -> EvaluationResult | None:
        """Evaluate what ``tally`` lacks of one set.

        Returns None, on all ranks, when any rank is stopping: ``tally`` then holds what was measured. Where
        the world ends in between, it holds what this rank knows that all have measured. Raises HostError
        where this rank's set is not that of the others.
        """
        # Collective: once a set. With other tallies or batches the ranks' sums would be of parts of several
        # sets, and those with fewer batches would leave the others in an exchange.
        rows = world.gather_json([tally.key, tally.done])
        if world.rank in find_suspects([rows.index(row) for row in rows]):
            raise HostError(
                f"evaluation set {evaluation_set.name}: its content here, or the code that measures it, is "
                "not that of the other ranks. Give all hosts the same files."
            )
        begun = time.perf_counter()
        measure = self.measures[evaluation_set.name].within(stage)
        was_training = self.model.training
        self.model.eval()
        try:
            with (
                self._looking(world) if measure.is_own else nullcontext(),
                nullcontext() if self.averaging is None else self.averaging(),
            ):
                is_whole = self._count(
                    evaluation_set,
                    world,
                    tally,
                    stage,
                    is_stopping=is_stopping,
                    on_progress=on_progress,
                )
        finally:
            self.model.train(was_training)
            if self.is_sharded:
                # FSDP2 leaves modules gathered for a backward pass, which does not come.
                reshard(self.model, *self.frozen)
        if not is_whole:
            return None
        loss, *parts = tally.means()
        return EvaluationResult(
            loss=loss,
            metrics=dict(
                measure.summarize(dict(zip(tally.names, parts, strict=True)), stage)
            ),
            weight=tally.weight,
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

    def _count(
        self,
        evaluation_set: EvaluationSet,
        world: World,
        tally: EvaluationCounts,
        stage: Stage,
        *,
        is_stopping: Callable[[], bool],
        on_progress: Callable[[int, int], None],
    ) -> bool:
        """Add the batches that ``tally`` lacks, some rounds at a time; whether all of them are in it."""
        measure = self.measures[evaluation_set.name].within(stage)
        num_batches = evaluation_set.num_batches
        # A measure of the task's own may take long for one batch.
        rounds = 1 if measure.is_own else _ROUNDS_BETWEEN_EXCHANGES
        # Collective: no rank continues if one is asked to stop, since it would wait for that one in the end.
        if tally.done < num_batches and not world.all_agree(not is_stopping()):
            return False

        while tally.done < num_batches:
            begun = time.perf_counter()
            first = tally.done
            last = min(num_batches, first + rounds * world.size)
            sums = torch.zeros(1 + len(measure.names), last - first, dtype=torch.float64)
            weight = 0
            for place in range(first, last, world.size):
                number = place + world.rank
                if number < last:
                    with self.reading():
                        batch = evaluation_set.batch(number)
                    sums[:, number - first] = self._measure(
                        measure, batch, stage, world.device
                    )
                    weight += batch.weight
                elif self.is_sharded:
                    # Collectives of FSDP2: one without a batch of its own runs one that does not count.
                    batch = evaluation_set.batch(0)
                    self._measure(measure, batch, stage, world.device)
                on_progress(min(last, place + world.size), num_batches)

            # Collective: as in a step, each place is filled by one rank, so summing the bits gathers the
            # values; and whether anybody is asked to stop.
            own = torch.tensor([weight, int(is_stopping())])
            vector = world.sum_integers(torch.cat([sums.flatten().view(torch.int64), own]))
            gathered = vector[:-2].clone().view(torch.float64).view_as(sums)
            tally.add(gathered.tolist(), num_batches=last - first, weight=int(vector[-2]))
            tally.seconds += time.perf_counter() - begun
            if int(vector[-1]) and tally.done < num_batches:
                return False
        return True

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
