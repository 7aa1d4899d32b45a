"""Chooses the held-out documents or tokens of a source, and plans the jobs that split its token files."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import HeldOut
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.order import Permutation
from evergrad_trainer.data.preparation.chunk import WHOLE, Attempt, ChunkResult, SplitJob
from evergrad_trainer.data.preparation.content import Content
from evergrad_trainer.data.preparation.files import SourceEntry
from evergrad_trainer.data.preparation.sources import raise_if_out_of_vocabulary
from evergrad_trainer.data.prepared import WIDTH, Shard, TokenSequence

_HELD_OUT: Final = "spec.training.data.heldOut"


def choose_held_out(
    source: SourceEntry, content: Content, *, held_out: HeldOut, seed: int, documents: int
) -> list[int]:
    """Return the numbers of the held-out documents in the source, sorted.

    Raises DataError if no document would remain for training.
    """
    # Hold out at least one document, also if the fraction of a small source rounds to 0.
    wanted = (
        held_out.count
        if held_out.count is not None
        else max(1, int((held_out.fraction or 0) * documents + 0.5))
    )
    if wanted >= documents:
        what = f"holds {documents} document{'s' if documents > 1 else ''} and {wanted} would be held out"
        why = "none would remain for training"
        raise DataError(
            Problem(
                str(source.path),
                what,
                why,
                "Lower spec.training.data.heldOut, or give more documents",
            )
        )
    # Use the content as the key, not the index in the manifest: adding a source must not change the split of
    # another source.
    order = Permutation(
        seed=seed, source=int(content.content_hash[:16], 16), epoch=0, size=documents
    )
    return sorted(order.many(np.arange(wanted, dtype=np.uint64)).tolist())


def split_jobs(
    attempt: Attempt,
    outcomes: list[ChunkResult],
    chosen: list[int],
    *,
    dtype: str,
    is_done: Callable[[int], bool],
) -> Iterator[SplitJob]:
    """Yield one job for each unfinished chunk. ``chosen``: the result of ``choose_held_out``."""
    # Convert numbers in the whole source to numbers in the chunk.
    starts = np.cumsum([0, *(outcome.documents[WHOLE] for outcome in outcomes)]).tolist()
    places = np.searchsorted(chosen, starts).tolist()
    for at, outcome in enumerate(outcomes):
        if not is_done(outcome.number):
            held_out = tuple(
                document - starts[at] for document in chosen[places[at] : places[at + 1]]
            )
            yield SplitJob(attempt.directory, outcome.number, held_out, dtype)


def cut_tokens(
    source: SourceEntry, content: Content, held_out: HeldOut | None, *, vocab_size: int
) -> tuple[TokenSequence, TokenSequence | None]:
    """Return the training part and the held-out part of token files, which are read in place.

    The held-out part is the end of the source. Raises DataError if an id is not below ``vocab_size``, or if
    no tokens would remain for training.
    """
    shards = []
    for path, scan in content.files:
        raise_if_out_of_vocabulary(source, path, scan, vocab_size)
        shards.append(Shard(path.absolute(), 0, scan.size // WIDTH[source.dtype]))
    whole = TokenSequence(source.dtype, tuple(shards))
    if held_out is None:
        return whole, None
    if held_out.fraction is None:
        why = f"source {source.name!r} is a flat file of tokens, which has no documents"
        raise DataError(
            Problem(
                f"{_HELD_OUT}.count",
                "cannot be kept",
                why,
                "Use heldOut.fraction, or a separate evaluation source",
            )
        )
    wanted = max(2, int(held_out.fraction * whole.tokens + 0.5))
    if whole.tokens - wanted < 2:
        what = f"holds {whole.tokens} tokens and {wanted} would be held out"
        why = "none would remain for training"
        path = source.path.absolute()
        raise DataError(Problem(str(path), what, why, f"Lower {_HELD_OUT}.fraction"))

    # Hold out the end and not random parts, so that no window overlaps both parts.
    left, first, rest = whole.tokens - wanted, [], []
    for shard in shards:
        before = max(0, min(left, shard.tokens))
        if before:
            first.append(replace(shard, tokens=before))
        if before < shard.tokens:
            after = shard.tokens - before
            rest.append(replace(shard, start=shard.start + before, tokens=after))
        left -= before
    return TokenSequence(source.dtype, tuple(first)), TokenSequence(
        source.dtype, tuple(rest)
    )
