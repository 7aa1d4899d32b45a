"""The values that a recipe and the core exchange: items of a source, stages that mix them, micro-batches."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from evergrad_trainer.data.order import SampleId


@dataclass(frozen=True)
class Batch:
    """One micro-batch, on the CPU. The step only moves it to the device.

    ``tensors``: by names of the task's own, one row a sample. ``weight``: what sums over the batch are
    divided by (tokens, pairs, edits). ``samples``: which items the rows are. ``hash``: the sum of the
    samples' hashes modulo 2**64.
    """

    tensors: Mapping[str, Tensor]
    weight: int
    samples: tuple[SampleId, ...]
    hash: int


def pin(batch: Batch) -> Batch:
    """Return ``batch`` in page-locked memory, from which a copy to an accelerator needs no wait."""
    tensors = {name: tensor.pin_memory() for name, tensor in batch.tensors.items()}
    return replace(batch, tensors=tensors)


@dataclass(frozen=True)
class Rows:
    """Some items of a source: ``tensors`` with one row an item, and the weight of all rows together."""

    tensors: Mapping[str, Tensor]
    weight: int


class Source(Protocol):
    """Items by index. Order, mixture, hash and cursor are the core's: a source keeps no position.

    Rows of all items have the same shapes, so that any of them make one batch. Several threads read at the
    same time.
    """

    @property
    def fingerprint(self) -> str:
        """A text that is equal exactly where all items are."""

    @property
    def fill(self) -> Mapping[str, int]:
        """Values, by the names of the tensors, that fill a row which counts nothing."""

    def __len__(self) -> int: ...

    def read(self, items: Sequence[int]) -> Rows:
        """Read the items of these numbers (from 0), in this order, into memory of their own."""

    def describe(self, item: int) -> str:
        """Name the place that the item comes from, for messages."""


@dataclass(frozen=True)
class Stage:
    """A stretch of steps with the same sources and options. Which one is active follows from the step alone.

    ``until``: its last step; None for the last stage, which has no end of its own. ``sources``: each with its
    weight in the mixture, by name. ``options``: the task's own. ``facts``: JSON values that decide the
    samples besides the sources and the order (packing, tokenizer), for the fingerprint of the data.
    ``without``: those of the task's metrics that losses of this stage have no part for. ``counts_passes``: a
    weight is how often an epoch passes over its source, and no share.
    """

    sources: Mapping[str, tuple[Source, float]]
    until: int | None = None
    options: Any = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    without: Collection[str] = ()
    counts_passes: bool = False
