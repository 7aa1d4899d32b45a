"""Named evaluation sets. Every evaluation uses the same samples in the same order."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from torch.nn import functional

from evergrad_trainer.data.batch import Batch, Rows, Source
from evergrad_trainer.data.order import SampleId, sample_hash
from evergrad_trainer.data.stream import read_rows


class EvaluationSet:
    """All items of one or several sources, or ``limit`` of them spread evenly, in batches."""

    def __init__(
        self,
        name: str,
        sources: Sequence[Source],
        *,
        micro_batch_size: int,
        limit: int | None = None,
    ) -> None:
        self.name = name
        self._sources = tuple(sources)
        self._starts = [0, *accumulate(len(source) for source in sources)]
        self._total = self._starts[-1]
        self.num_samples = min(limit or self._total, self._total)
        self._micro_batch_size = micro_batch_size
        self.num_batches = -(-self.num_samples // micro_batch_size)

    @property
    def fingerprint(self) -> str:
        """A hash that is equal if and only if all batches are. It does not depend on names."""
        contents = [source.fingerprint for source in self._sources]
        text = json.dumps([contents, self.num_samples, self._micro_batch_size])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def in_batches_of(self, size: int) -> "EvaluationSet":
        """Return a set with the same samples in the same order, ``size`` per batch."""
        return EvaluationSet(
            self.name, self._sources, micro_batch_size=size, limit=self.num_samples
        )

    def batch(self, index: int) -> Batch:
        """Return batch ``index`` (from 0). The last batch is padded with rows without weight.

        Raises IndexError if the batch does not exist, and DataError if a file cannot be read.
        """
        if not 0 <= index < self.num_batches:
            raise IndexError(f"batch {index} of {self.num_batches} of {self.name}")
        first = index * self._micro_batch_size
        end = min(first + self._micro_batch_size, self.num_samples)
        found = []
        for number in range(first, end):
            # Spread samples evenly over all items: the first items may be of a single source or topic.
            place = number * self._total // self.num_samples
            source = bisect_right(self._starts, place) - 1
            window = place - self._starts[source]
            found.append(SampleId(source=source, epoch=0, window=window))
        samples = tuple(found)
        rows = read_rows(self._sources, samples)

        # Pad the last batch, because a batch of another shape would compile another graph.
        missing = self._micro_batch_size - len(samples)
        if missing:
            fill = self._sources[0].fill
            tensors = {}
            for name, tensor in rows.tensors.items():
                # pad takes pairs of widths from the last dimension to the first. Rows are added at the end.
                widths = (*[0] * (2 * tensor.ndim - 1), missing)
                tensors[name] = functional.pad(tensor, widths, value=fill.get(name, 0))
            rows = Rows(tensors, rows.weight)

        hashes = map(sample_hash, range(first, end), samples)
        total = sum(hashes) % 2**64
        return Batch(tensors=rows.tensors, weight=rows.weight, samples=samples, hash=total)
