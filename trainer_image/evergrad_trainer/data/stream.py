"""The training stream: step and slot → one micro-batch, as a pure function. Nothing here knows ranks or keeps a position."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import xxhash
from torch import Tensor

from evergrad_trainer.data.mixture import Mixture
from evergrad_trainer.data.order import SampleId, sample_hash
from evergrad_trainer.data.prepared import PreparedSource
from evergrad_trainer.data.token_files import TokenReader, Windows, read_documents

IGNORE_INDEX: Final = -100
"""The label of positions where nothing is learned."""


@dataclass(frozen=True)
class SlotBatch:
    """One micro-batch of b samples.

    ``input_ids`` and ``labels`` are int64 [b, S] on the CPU. Labels are shifted by one already, and IGNORE_INDEX where nothing
    is learned. ``sample_hash`` is the sum of its samples' hashes modulo 2**64; ``valid_tokens`` counts labels that are learned.
    """

    step: int
    slot: int
    input_ids: Tensor
    labels: Tensor
    samples: tuple[SampleId, ...]
    sample_hash: int
    valid_tokens: int


@dataclass(frozen=True)
class Batching:
    """G samples a step in micro-batches of b, each of S tokens."""

    global_batch_size: int
    micro_batch_size: int
    sequence_length: int


class TrainingStream:
    """Samples of all sources, mixed and permuted, cut into steps of M = G / b slots."""

    def __init__(
        self,
        sources: Sequence[PreparedSource],
        *,
        weights: Sequence[float],
        seed: int,
        batching: Batching,
        end_of_document: int,
        tokenizer_identity: str,
    ) -> None:
        self.source_names = tuple(source.name for source in sources)
        self.slots_per_step = batching.global_batch_size // batching.micro_batch_size
        self._sources = tuple(sources)
        self._batching = batching
        self._readers = [
            TokenReader(
                source.train, sequence_length=batching.sequence_length, end_of_document=end_of_document
            )
            for source in sources
        ]
        self._mixture = Mixture([reader.num_windows for reader in self._readers], weights=weights, seed=seed)
        self.num_samples = sum(self._mixture.sizes)
        self.fingerprint = self._compute_fingerprint(seed, tokenizer_identity)

    def slot(self, step: int, slot: int) -> SlotBatch:
        """The micro-batch of a slot (from 0) of a step (from 1). Raises DataError if a file cannot be read any more."""
        if step < 1 or not 0 <= slot < self.slots_per_step:
            raise IndexError(
                f"step {step}, slot {slot}: steps count from 1, slots from 0 to {self.slots_per_step - 1}"
            )
        size = self._batching.micro_batch_size
        first = (step - 1) * self._batching.global_batch_size + slot * size
        samples = tuple(map(self._mixture.locate, range(first, first + size)))
        total = sum(map(sample_hash, range(first, first + size), samples)) % 2**64
        return build_batch(self._read(samples), step=step, slot=slot, samples=samples, sample_hash=total)

    def cursor(self, finished_step: int) -> dict[str, int]:
        """Samples each source has given when ``finished_step`` steps are done: its next index, by source name."""
        counts = self._mixture.cursor(finished_step * self._batching.global_batch_size)
        return dict(zip(self.source_names, counts, strict=True))

    def describe(self, sample: SampleId) -> str:
        """For messages: the sample's id, and where its text stands in the source file."""
        source = self._sources[sample.source]
        shard, first, end = self._readers[sample.source].place(sample.window)
        name = f"{source.name}/epoch {sample.epoch}/window {sample.window}"
        if shard.documents is None:
            return f"{name} ({source.path.name}, tokens {shard.start + first} to {shard.start + end - 1})"
        documents = read_documents(shard.documents)
        within = np.searchsorted(documents[:, 0], [first, end - 1], side="right") - 1
        lines = documents[within, 1].tolist()
        where = f"line {lines[0]}" if lines[0] == lines[1] else f"lines {lines[0]} to {lines[1]}"
        return f"{name} ({source.path.name}, {where})"

    def close(self) -> None:
        """Close the token files; reading opens them again."""
        for reader in self._readers:
            reader.close()

    def _read(self, samples: Sequence[SampleId]) -> Windows:
        if len(self._readers) == 1:
            return self._readers[0].read([sample.window for sample in samples])
        parts = [self._readers[sample.source].read([sample.window]) for sample in samples]
        return Windows(
            np.concatenate([part.tokens for part in parts]), np.concatenate([part.lengths for part in parts])
        )

    def _compute_fingerprint(self, seed: int, tokenizer_identity: str) -> str:
        """Equal exactly where every step has the same samples with the same tokens."""
        facts = {
            "order": 1,
            "packing": "concatenate",
            "sequence_length": self._batching.sequence_length,
            "global_batch_size": self._batching.global_batch_size,
            "micro_batch_size": self._batching.micro_batch_size,
            "seed": seed,
            "shares": self._mixture.shares,
            "tokenizer": tokenizer_identity,
            "sources": [source.fingerprint for source in self._sources],
        }
        return xxhash.xxh3_128_hexdigest(json.dumps(facts, sort_keys=True).encode())


def build_batch(
    windows: Windows, *, step: int, slot: int, samples: tuple[SampleId, ...], sample_hash: int
) -> SlotBatch:
    """Inputs and shifted labels of some windows; what is filled up has no label."""
    length = windows.tokens.shape[1] - 1
    # A copy in any case: of one row the slice is contiguous already, and marking its labels would change the inputs.
    labels = windows.tokens[:, 1:].copy()
    valid = np.minimum(windows.lengths - 1, length)
    if int(valid.min()) < length:
        labels[np.arange(length) >= valid[:, None]] = IGNORE_INDEX
    return SlotBatch(
        step=step,
        slot=slot,
        input_ids=torch.from_numpy(np.ascontiguousarray(windows.tokens[:, :-1])),
        labels=torch.from_numpy(labels),
        samples=samples,
        sample_hash=sample_hash,
        valid_tokens=int(valid.sum()),
    )
