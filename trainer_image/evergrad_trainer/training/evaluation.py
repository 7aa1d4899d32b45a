"""Computes means over a fixed set of samples, shared by all ranks, with the same bits in every world."""

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
"""Batches that each rank measures between two exchanges: a world that ends loses at most this many, and they
are measured again."""


@dataclass(frozen=True)
class EvaluationResult:
    """``loss``: mean per unit of weight over the whole set. ``metrics``: the means of its parts.

    ``weight``: total weight of the set. ``seconds``: duration of the attempt that completed the evaluation;
    earlier attempts are not included, because a process accounts only for its own time.
    """

    loss: float
    metrics: dict[str, float]
    weight: int
    seconds: float


@dataclass(frozen=True)
class Measure:
    """How a set is measured.

    ``names``: parts that ``loss_of`` returns, in the order in which they are exchanged. ``summarize``:
    computes the metrics of a stage from the means of the parts. ``is_own``: the task measures something other
    than the loss of a step, and may call the model often.
    """

    loss_of: Callable[[Tensors, Stage], Loss]
    names: Sequence[str] = ()
    summarize: Callable[[Mapping[str, float], Stage], Mapping[str, float]] = (
        lambda means, stage: means
    )
    is_own: bool = False

    def within(self, stage: Stage) -> "Measure":
        """Return the measurement for ``stage``, which may lack some of the parts."""
        names = tuple(name for name in self.names if name not in stage.without)
        return replace(self, names=names)


@dataclass(frozen=True)
class EvaluationRunner:
    """Evaluates sets with the current model. Draws no random numbers and moves no data position.

    ``measures``: how each set is measured, by name of the set. ``reading``: context around each read of a
    source; it adds the place in the task's code to errors.
    """

    model: nn.Module
    measures: Mapping[str, Measure]
    is_sharded: bool
    autocast: Callable[[], AbstractContextManager[object]]
    reading: Callable[[], AbstractContextManager[object]] = nullcontext
    frozen: Sequence[nn.Module] = ()
    """Modules that are sharded like the model, and that measures use."""
    code: str = ""
    """Hash of the task's own files. A measurement by another version of the files is not continued."""
    averaging: Callable[[], AbstractContextManager[object]] | None = None
    """Context that replaces the weights with their average; None: evaluate the weights themselves."""

    def key(self, evaluation_set: EvaluationSet) -> str:
        """Return the identity of the measurement and its set: only tallies with equal keys may be added."""
        names = self.measures[evaluation_set.name].names
        # Append this only for an average, so that tallies of earlier versions keep their keys.
        weights = [] if self.averaging is None else ["average"]
        text = json.dumps([evaluation_set.fingerprint, list(names), self.code, *weights])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def open_tally(
        self, evaluation_set: EvaluationSet, values: Mapping[str, Any], *, stage: Stage
    ) -> EvaluationCounts:
        """Return the tally that an interrupted evaluation of this set in ``stage`` left, or an empty tally if
        ``values`` are of another measurement."""
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
        """Evaluate the batches of one set that ``tally`` does not contain yet.

        Returns None on all ranks if any rank is stopping; ``tally`` then contains what was measured. If the
        world ends meanwhile, ``tally`` contains the batches that this rank knows to be measured on all ranks.
        Raises HostError if this rank's set differs from the set of the other ranks.
        """
        # Collective, once per set. With different tallies or batches, the sums would mix parts of several
        # sets, and ranks with fewer batches would leave the others waiting in an exchange.
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
                # FSDP2 leaves modules gathered for a backward pass, but an evaluation has none.
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
        """Check, before each call of the model, that the group still exists."""
        # A micro-batch of generation calls the model about a hundred times. Without this check, a lost peer
        # would be noticed only after all of them, and the supervisor kills a worker that does not respond for
        # so long.
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
        """Measure the missing batches, some rounds at a time. Return whether ``tally`` now contains all of
        them."""
        measure = self.measures[evaluation_set.name].within(stage)
        num_batches = evaluation_set.num_batches
        # One batch may take long if the task measures it itself.
        rounds = 1 if measure.is_own else _ROUNDS_BETWEEN_EXCHANGES
        # Collective: if one rank is asked to stop, none continues, because the others would wait for it at
        # the end.
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
                    # Collectives of FSDP2: a rank without a batch measures batch 0, and the result is not
                    # counted.
                    batch = evaluation_set.batch(0)
                    self._measure(measure, batch, stage, world.device)
                on_progress(min(last, place + world.size), num_batches)

            # Collective: as in a step, exactly one rank fills each place, so that the sum gathers the values.
            # The last number shows whether any rank is asked to stop.
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
