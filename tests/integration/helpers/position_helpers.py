"""The order of samples after a position, computed from its definition: the turns of the sources, and a
permutation for each pass of a source."""

from collections.abc import Mapping, Sequence
from typing import Any

SEED = 5
PER_STEP = 4


def sizes_in(record: Mapping[str, Any]) -> dict[str, int]:
    """Return the windows of 16 tokens of each source in ``run.json``. Each token except the first is a label
    once."""
    return {
        one["name"]: -(
            -(sum(shard["tokens"] for shard in one["train"]["shards"]) - 1) // 16
        )
        for one in record["prepared"]["sources"]
    }


def expected_hashes(
    sizes: Sequence[int],
    *,
    weights: Sequence[float],
    numbers: Sequence[int],
    taken: Sequence[int],
    steps: range,
    passes: bool = False,
) -> dict[int, int]:
    """Return the hash of each step's samples.

    ``numbers``: indices of these sources in the whole chain of runs. ``taken``: samples that each source
    gave before ``steps``; the pattern of turns starts at the first of these steps.
    """
    from evergrad_trainer.data.epochs import PassMixture, count_passes
    from evergrad_trainer.data.mixture import Mixture
    from evergrad_trainer.data.order import Permutation, SampleId, sample_hash

    turns: Mixture | PassMixture = Mixture(sizes, weights=weights, seed=0)
    if passes:
        turns = PassMixture(sizes, counts=count_passes(sizes, weights), seed=0)
    given = list(taken)
    hashes: dict[int, int] = {}
    for step in steps:
        total = 0
        for at in range((step - 1) * PER_STEP, step * PER_STEP):
            source = turns.locate(at - (steps.start - 1) * PER_STEP).source
            epoch, index = divmod(given[source], sizes[source])
            given[source] += 1
            order = Permutation(
                seed=SEED, source=numbers[source], epoch=epoch, size=sizes[source]
            )
            total += sample_hash(at, SampleId(source, epoch, order(index)))
        hashes[step] = total % 2**64
    return hashes
