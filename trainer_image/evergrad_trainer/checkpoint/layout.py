"""Names in a run's ``checkpoints`` directory and the order of checkpoints. Pure: no files, no torch.

::

    gen/000007               claimed by exclusive create at each start: the fencing token
    .tmp/step-1200.g7.3/     attempt directory: shards, tensors.json and, last, manifest.json
    step-1200/               published checkpoint, immutable
    latest                   name of the newest checkpoint, only a hint
    best.json                name of the best checkpoint, which retention keeps
    .trash/                  checkpoints are renamed into this directory before they are deleted
    quarantine/              checkpoints that did not validate, kept for inspection
    fallbacks.json           quarantined checkpoints that may not be in the run's events yet
    leases/                  checkpoints that readers outside the run are using
    evaluated/               checkpoints that `evergrad evaluate` has evaluated
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
"""Tensors begin at multiples of this many bytes in a shard, which suits every dtype and memory mapping."""

_CHECKPOINT = re.compile(r"step-([0-9]{1,18})(?:\.g([0-9]{1,18})(?:\.([0-9]{1,18}))?)?")
_ATTEMPT = re.compile(r"step-([0-9]{1,18})\.g([0-9]{1,18})\.([0-9]{1,18})")
_GENERATION = re.compile(r"[0-9]{6,18}")


@dataclass(frozen=True, order=True)
class Version:
    """The version of a checkpoint. Versions compare as (step, generation, serial); a later one is greater.

    ``serial`` numbers the saves of one generation from 1, including second attempts, so that a version is
    unique in a run directory.
    """

    step: int
    generation: int
    serial: int


def checkpoint_names(version: Version) -> Iterator[str]:
    """Yield the names for a published checkpoint in the order to try them. The last is always free.

    For example, ``step-1200``, ``step-1200.g7`` and ``step-1200.g7.3``.
    """
    yield f"step-{version.step}"
    yield f"step-{version.step}.g{version.generation}"
    yield f"step-{version.step}.g{version.generation}.{version.serial}"


def parse_checkpoint_name(name: str) -> Version | None:
    """Return the version in a published name, or None for any other name. Missing parts are 0.

    For example, the version of ``step-1200.g7`` is ``Version(1200, 7, 0)``.
    """
    match = _CHECKPOINT.fullmatch(name)
    return Version(*(int(part or 0) for part in match.groups())) if match else None


def attempt_name(version: Version) -> str:
    """Return the name of the attempt directory of ``version``, which is unique."""
    return f"step-{version.step}.g{version.generation}.{version.serial}"


def parse_attempt_name(name: str) -> Version | None:
    """Return the version of the attempt directory ``name``, or None for any other name."""
    match = _ATTEMPT.fullmatch(name)
    return Version(*(int(part) for part in match.groups())) if match else None


def generation_name(generation: int) -> str:
    """Return the name of the file that claims ``generation``, such as ``000007``.

    Names sort like their numbers up to 999,999.
    """
    return f"{generation:06d}"


def parse_generation_name(name: str) -> int | None:
    """Return the generation that the file ``name`` claims, or None for any other name."""
    return int(name) if _GENERATION.fullmatch(name) else None


def shard_name(rank: int) -> str:
    """Return the name of the file that contains the tensors of ``rank``, such as ``rank-00003.bin``."""
    return f"rank-{rank:05d}.bin"
