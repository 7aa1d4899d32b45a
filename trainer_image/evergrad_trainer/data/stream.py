"""The training stream: a pure function from a step and a slot to a micro-batch.

It has no ranks and no current position: any rank of any world can compute any slot.
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch
import xxhash

from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_trainer.data.batch import Batch, Rows, Source, Stage
from evergrad_trainer.data.epochs import Order, PassMixture, count_passes, exhausted_after
from evergrad_trainer.data.mixture import Mixture
from evergrad_trainer.data.order import SampleId, absorb, sample_hash
from evergrad_trainer.data.start_positions import DataStart, SourcePosition, place_sources


@dataclass(frozen=True)
class BatchShape:
    """The shape of a step: G samples (``global_batch_size``) in micro-batches of b (``micro_batch_size``).

    ``overfits``: every step of a stage uses the samples of its first step.
    """

    global_batch_size: int
    micro_batch_size: int
    overfits: bool = False


class TrainingStream:
    """The samples of all sources, mixed and permuted per stage, and divided into steps of M = G / b slots."""

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        seed: int,
        batching: BatchShape,
        start: DataStart | None = None,
    ) -> None:
        """``start``: the position at which another run left its data.

        Raises ValueError if the ends of the stages do not increase, or if a stage before the last is open.
        Raises ConfigurationError if ``start`` is given and there are several stages.
        """
        self.stages = tuple(stages)
        self._seed = seed
        self.slots_per_step = batching.global_batch_size // batching.micro_batch_size
        self._batching = batching
        ends = [stage.until for stage in stages[:-1]]
        # The last step of each stage except the last stage.
        self._ends = [end for end in ends if end is not None]
        is_open_too_early = len(self._ends) < len(ends)
        is_rising = sorted({0, *self._ends}) == [0, *self._ends]
        if not stages or is_open_too_early or not is_rising:
            raise ValueError(
                f"stages end at steps that rise, and only the last one is open; these end at {ends}"
            )
        self.start: DataStart | None = None
        """The start positions of the sources; None with several stages, which start at their first items."""
        if len(stages) == 1:
            named = [
                (name, one.fingerprint) for name, (one, _) in stages[0].sources.items()
            ]
            self.start = place_sources(start, named)
        elif start is not None:
            what = f"position is that of one mixture, and the task has {len(stages)} stages"
            remedy = "Load everything to continue in the same data, or only the optimizer"
            raise ConfigurationError(
                Problem("spec.training.initFrom.load", what, "", remedy)
            )
        places = self.start.sources if self.start is not None and self.start.goes_on else ()
        self._orders: list[_StageOrder] = []
        for number, stage in enumerate(stages):
            # Each stage has a separate order. The first stage has the order of a run without stages.
            own_seed = absorb(seed, number) >> 1 if number else seed
            self._orders.append(_StageOrder(stage, own_seed, places))
        # Number the sources of all stages consecutively, so that the id of a sample is unique in the run.
        self._first_source = [0]
        for order in self._orders:
            self._first_source.append(self._first_source[-1] + len(order.sources))
        self._named = [pair for order in self._orders for pair in order.sources]
        # Count each source only one time for epochs, also if several stages use it.
        sizes = {(name, source.fingerprint): len(source) for name, source in self._named}
        self.num_samples = sum(sizes.values())
        if len(self._orders) == 1 and isinstance(self._orders[0].mixture, PassMixture):
            self.num_samples = self._orders[0].mixture.epoch
        self.fingerprint = self._compute_fingerprint(seed)

    @property
    def first_step(self) -> int:
        """The first step of this stream: 1, or the step after the position of another run."""
        return self._steps_before(0) + 1

    def starting_at(self, start: DataStart) -> "TrainingStream":
        """Return a stream of the same stages that starts at the position of another run.

        Raises ConfigurationError if there are several stages.
        """
        return TrainingStream(
            self.stages, seed=self._seed, batching=self._batching, start=start
        )

    def slot(self, step: int, slot: int) -> Batch:
        """Return the micro-batch of a slot (from 0) of a step (from ``first_step``).

        Raises IndexError if the step or the slot is out of range, and DataError if a file can no longer be
        read.
        """
        if step < self.first_step or not 0 <= slot < self.slots_per_step:
            raise IndexError(
                f"step {step}, slot {slot}: steps count from {self.first_step}, "
                f"slots from 0 to {self.slots_per_step - 1}"
            )
        number = self.stage_number(step)
        order = self._orders[number]
        size = self._batching.micro_batch_size
        whole = self._batching.global_batch_size
        before = self._steps_before(number)
        # Every step of an overfitting stage reads its first step, so all steps have the same hash.
        read = before + 1 if self._batching.overfits else step
        first = (read - 1) * whole + slot * size
        positions = range(first, first + size)

        # Use positions within the stage, because the order of a stage does not depend on earlier stages.
        skipped = before * whole
        located = [order.mixture.locate(position - skipped) for position in positions]
        rows = order.read(located)

        # Use the number of the source among the sources of all stages.
        offset = self._first_source[number]
        samples = tuple(
            SampleId(offset + one.source, one.epoch, one.window) for one in located
        )
        # Use a sum, so that the hash of a step does not depend on the assignment of slots to ranks.
        total = sum(map(sample_hash, positions, samples)) % 2**64
        return Batch(tensors=rows.tensors, weight=rows.weight, samples=samples, hash=total)

    def stage_number(self, step: int) -> int:
        """Return the number of the stage (from 0) of a step (from 1)."""
        return bisect_left(self._ends, step)

    def stage(self, step: int) -> Stage:
        """Return the stage of a step (from 1)."""
        return self.stages[self.stage_number(step)]

    def entered_after(self, finished_step: int) -> Stage | None:
        """Return the stage that starts after ``finished_step``; None if no stage starts there."""
        if finished_step not in self._ends:
            return None
        return self.stage(finished_step + 1)

    def cursor(self, finished_step: int) -> dict[str, int]:
        """Return the number of samples used from each source after ``finished_step`` steps, by name.

        The number is the next index of the source, and includes samples that earlier runs used. With several
        stages, names begin with the number of the stage; for example, ``0/web``.
        """
        # Compute the numbers in closed form per stage, so that resuming does not replay the stream.
        found: dict[str, int] = {}
        for number, order in enumerate(self._orders):
            before = self._steps_before(number)
            # The last stage is open, so count its steps up to finished_step.
            end = self._ends[number] if number < len(self._ends) else finished_step
            done = max(0, min(finished_step, end) - before)
            if self._batching.overfits:
                done = min(done, 1)
            counts = order.mixture.cursor(done * self._batching.global_batch_size)
            prefix = f"{number}/" if len(self._orders) > 1 else ""
            for (name, _), count in zip(order.sources, counts, strict=True):
                found[f"{prefix}{name}"] = count
        return found

    def exhausted_after(self, epochs: Fraction, which: Literal["first", "all"]) -> int:
        """Return the number of samples after which a source has been used for ``epochs`` epochs.

        ``which``: whether the first source or all sources must have reached this number of epochs. Raises
        ValueError if there are several stages.
        """
        if len(self._orders) > 1:
            raise ValueError(
                "horizon.exhausted needs a single stage, and the task has several"
            )
        before = self._steps_before(0) * self._batching.global_batch_size
        return before + exhausted_after(self._orders[0].mixture, epochs, which)

    def describe(self, sample: SampleId) -> str:
        """Return the sample's id and its position in its source, for messages."""
        name, source = self._named[sample.source]
        place = source.describe(sample.window)
        return f"{name}/epoch {sample.epoch}/window {sample.window} ({place})"

    def _steps_before(self, number: int) -> int:
        if number:
            return self._ends[number - 1]
        return 0 if self.start is None else self.start.after_step

    def _compute_fingerprint(self, seed: int) -> str:
        """Return a hash that is equal if and only if each step has the same samples with the same content."""
        facts: list[dict[str, Any]] = [
            {
                **order.stage.facts,
                "order": 1,
                "global_batch_size": self._batching.global_batch_size,
                "micro_batch_size": self._batching.micro_batch_size,
                "seed": seed,
                **order.mixture.facts,
                "sources": [source.fingerprint for _, source in order.sources],
            }
            for order in self._orders
        ]
        for one in facts if self._batching.overfits else ():
            one["overfit"] = True
        if self.start is not None and self.start.goes_on:
            places = [[one.number, one.taken] for one in self.start.sources]
            facts[0]["start"] = {"after": self.start.after_step, "places": places}
        # Runs of one stage keep the fingerprint from the versions before there were stages.
        known = facts[0]
        if len(facts) > 1:
            known = {"stages": facts, "ends": self._ends}
        text = json.dumps(known, sort_keys=True)
        return xxhash.xxh3_128_hexdigest(text.encode())


class _StageOrder:
    """The sources of one stage, and their mixture."""

    def __init__(self, stage: Stage, seed: int, places: Sequence[SourcePosition]) -> None:
        self.stage = stage
        self.sources: list[tuple[str, Source]] = [
            (name, one) for name, (one, _) in stage.sources.items()
        ]
        sizes = [len(source) for _, source in self.sources]
        weights = [weight for _, weight in stage.sources.values()]
        self.mixture: Order
        if stage.counts_passes:
            counts = count_passes(sizes, weights)
            self.mixture = PassMixture(sizes, counts=counts, seed=seed, places=places)
        else:
            self.mixture = Mixture(sizes, weights=weights, seed=seed, places=places)

    def read(self, samples: Sequence[SampleId]) -> Rows:
        """Return the rows of the samples, in order. ``source`` of a sample is its number in this stage."""
        sources = [source for _, source in self.sources]
        return read_rows(sources, samples)


def read_rows(sources: Sequence[Source], samples: Sequence[SampleId]) -> Rows:
    """Return the rows of some samples, in order."""
    if len(sources) == 1:
        return sources[0].read([sample.window for sample in samples])
    # Read item by item, because consecutive samples of a mixture come from different sources.
    parts = [sources[sample.source].read([sample.window]) for sample in samples]
    tensors = {
        name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors
    }
    weight = sum(part.weight for part in parts)
    return Rows(tensors, weight=weight)
