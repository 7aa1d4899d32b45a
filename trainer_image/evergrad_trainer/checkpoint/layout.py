"""Names in a run's ``checkpoints`` directory and the order of checkpoints. Pure: no files, no torch.

::

    gen/000007               claimed by exclusive create at each start: the fencing token
    .tmp/step-1200.g7.3/     attempt directory: shards, tensors.json, at last manifest.json
    step-1200/               published, immutable
    latest                   a hint
    best.json                which checkpoint is kept as the best
    .trash/                  removal renames into here first
    quarantine/              what did not validate, kept for inspection
    fallbacks.json           what was set aside and may not be in the run's events yet
    leases/                  which checkpoints readers beside the run hold
    evaluated/               which checkpoints `evergrad evaluate` is done with
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from evergrad_common.contract import CheckpointFile

GENERATIONS = "gen"
ATTEMPTS = CheckpointFile.ATTEMPTS
TRASH = CheckpointFile.TRASH
QUARANTINE = "quarantine"
FALLBACKS = "fallbacks.json"
LEASES = CheckpointFile.LEASES
EVALUATED = "evaluated"
LATEST = "latest"
BEST = CheckpointFile.BEST
MANIFEST = CheckpointFile.MANIFEST
TENSORS = "tensors.json"
ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes in a shard: enough for every dtype and for a later memory
map."""

_CHECKPOINT = re.compile(r"step-([0-9]{1,18})(?:\.g([0-9]{1,18})(?:\.([0-9]{1,18}))?)?")
_ATTEMPT = re.compile(r"step-([0-9]{1,18})\.g([0-9]{1,18})\.([0-9]{1,18})")
_GENERATION = re.compile(r"[0-9]{6,18}")


@dataclass(frozen=True, order=True)
class Version:
    """The save that a checkpoint is of. Versions compare as (step, generation, serial); later is greater.

    ``serial`` numbers the saves of one generation from 1, and their second tries, so that a version is unique
    in a run directory.
    """

    step: int
    generation: int
    serial: int


def checkpoint_names(version: Version) -> Iterator[str]:
    """Names to publish ``version`` under, in the order to try: the first free one is taken, and the last is
    always free."""
    yield f"step-{version.step}"
    yield f"step-{version.step}.g{version.generation}"
    yield f"step-{version.step}.g{version.generation}.{version.serial}"


def parse_checkpoint_name(name: str) -> Version | None:
    """The version in a published name (0 for the parts a name does not say), or None for any other name."""
    match = _CHECKPOINT.fullmatch(name)
    return Version(*(int(part or 0) for part in match.groups())) if match else None


def attempt_name(version: Version) -> str:
    """Name of the attempt directory of ``version``; unique, because a version is."""
    return f"step-{version.step}.g{version.generation}.{version.serial}"


def parse_attempt_name(name: str) -> Version | None:
    """The version whose attempt directory is called ``name``, or None for any other name."""
    match = _ATTEMPT.fullmatch(name)
    return Version(*(int(part) for part in match.groups())) if match else None


def generation_name(generation: int) -> str:
    """Name of the file that claims ``generation``; names sort like their numbers up to 999,999."""
    return f"{generation:06d}"


def parse_generation_name(name: str) -> int | None:
    """The generation claimed by a file called ``name``, or None for any other name."""
    return int(name) if _GENERATION.fullmatch(name) else None


def shard_name(rank: int) -> str:
    """Name of the file that holds what ``rank`` writes."""
    return f"rank-{rank:05d}.bin"
