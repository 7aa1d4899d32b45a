"""The types that a recipe and the core exchange: items of a source, stages that mix them, micro-batches."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from evergrad_trainer.data.order import SampleId


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the CPU. The step moves it to the device without other changes.

    ``tensors``: tensors by names that the task chooses, with one row per sample. ``weight``: the divisor of
    sums over the batch, for example the number of tokens or pairs. ``samples``: the ids of the rows.
    ``hash``: the sum of the samples' hashes modulo 2**64.
    """

    tensors: Mapping[str, Tensor]
    weight: int
    samples: tuple[SampleId, ...]
    hash: int


def pin(batch: Batch) -> Batch:
    """Return ``batch`` in page-locked memory, from which copies to an accelerator are asynchronous."""
    tensors = {name: tensor.pin_memory() for name, tensor in batch.tensors.items()}
    return replace(batch, tensors=tensors)


@dataclass(frozen=True)
class Rows:
    """Some items of a source: ``tensors`` with one row per item, and the total weight of all rows."""

    tensors: Mapping[str, Tensor]
    weight: int


class Source(Protocol):
    """Provides items by index. A source has no position: the core handles order, mixture, hash and cursor.

    Rows of all items must have the same shapes, so that any items can form a batch. Several threads may read
    at the same time.
    """

    @property
    def fingerprint(self) -> str:
        """A text that is equal for two sources if and only if all their items are equal."""

    @property
    def fill(self) -> Mapping[str, int]:
        """Values, by names of tensors, that fill a row without weight."""

    def __len__(self) -> int: ...

    def read(self, items: Sequence[int]) -> Rows:
        """Read the items with these numbers (from 0), in this order, into new memory."""

    def describe(self, item: int) -> str:
        """Return the origin of an item, for messages. For example, its file and line."""


@dataclass(frozen=True)
class Stage:
    """A range of steps with the same sources and options. The step alone determines the active stage.

    ``until``: the last step of the stage; None for the last stage, which is open. ``sources``: the sources by
    name, each with its weight in the mixture. ``options``: options of the task. ``facts``: other JSON values
    that affect the samples (for example packing and tokenizer), for the fingerprint of the data.
    ``without``: metrics of the task that the losses of this stage do not provide. ``counts_passes``: whether
    a weight is the number of passes over its source per epoch, instead of a share.
    """

    sources: Mapping[str, tuple[Source, float]]
    until: int | None = None
    options: Any = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    without: Collection[str] = ()
    counts_passes: bool = False
