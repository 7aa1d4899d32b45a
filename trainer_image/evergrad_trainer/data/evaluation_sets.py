"""Named sets of samples that are only evaluated on: always the same ones, in the same order."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from evergrad_trainer.data.order import SampleId, sample_hash
from evergrad_trainer.data.prepared import TokenSequence
from evergrad_trainer.data.stream import SlotBatch, build_batch
from evergrad_trainer.data.token_files import TokenReader, Windows


class EvaluationSet:
    """All windows of one or several token sequences, or ``limit`` of them spread evenly, b a batch; the last may be smaller."""

    def __init__(
        self,
        name: str,
        sequences: Sequence[TokenSequence],
        *,
        sequence_length: int,
        micro_batch_size: int,
        end_of_document: int,
        limit: int | None = None,
    ) -> None:
        self.name = name
        self._readers = [
            TokenReader(sequence, sequence_length=sequence_length, end_of_document=end_of_document)
            for sequence in sequences
        ]
        self._starts = [0, *accumulate(reader.num_windows for reader in self._readers)]
        self._total = self._starts[-1]
        self.num_samples = min(limit or self._total, self._total)
        self._micro_batch_size = micro_batch_size
        self.num_batches = -(-self.num_samples // micro_batch_size)

    def batch(self, index: int) -> SlotBatch:
        """Batch ``index`` (from 0) as step 0, slot ``index``. Raises IndexError, DataError."""
        if not 0 <= index < self.num_batches:
            raise IndexError(f"batch {index} of {self.num_batches} of {self.name}")
        first = index * self._micro_batch_size
        samples = tuple(
            map(self._sample, range(first, min(first + self._micro_batch_size, self.num_samples)))
        )
        parts = [self._readers[sample.source].read([sample.window]) for sample in samples]
        windows = Windows(
            np.concatenate([part.tokens for part in parts]), np.concatenate([part.lengths for part in parts])
        )
        total = sum(sample_hash(first + place, sample) for place, sample in enumerate(samples)) % 2**64
        return build_batch(windows, step=0, slot=index, samples=samples, sample_hash=total)

    def close(self) -> None:
        """Close the token files; reading opens them again."""
        for reader in self._readers:
            reader.close()

    def _sample(self, number: int) -> SampleId:
        place = number * self._total // self.num_samples
        source = bisect_right(self._starts, place) - 1
        return SampleId(source=source, epoch=0, window=place - self._starts[source])
