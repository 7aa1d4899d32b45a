"""Retention: which checkpoints are kept and which may go. Pure: candidates in, names out."""

from collections.abc import Collection, Sequence

from evergrad_trainer.checkpoint.layout import Version
from evergrad_trainer.checkpoint.manifest import Candidate


def choose_best(candidates: Sequence[Candidate], pointer: str | None) -> str | None:
    """The name of the best checkpoint: the newest of those saved as the best and of the one in ``best.json``.

    The manifests count too, because a kill between publishing and writing the pointer must not unpin the new
    best.
    """
    marked = [
        candidate
        for candidate in candidates
        if candidate.name == pointer
        or (candidate.manifest is not None and candidate.manifest.best)
    ]
    return max(marked, key=_version).name if marked else None


def choose_removals(
    valid: Sequence[Candidate], *, keep: int, pinned: Collection[str]
) -> list[str]:
    """Names to remove so that the ``keep`` newest of the ``valid`` candidates and all ``pinned`` ones stay;
    oldest first.

    Candidates that do not validate must not be passed: they neither count nor are removed.
    """
    # Oldest first, so that a kill half-way leaves the newer ones.
    ordered = sorted(valid, key=_version, reverse=True)
    return [
        candidate.name
        for candidate in reversed(ordered[keep:])
        if candidate.name not in pinned
    ]


def choose_next_removal(
    valid: Sequence[Candidate], *, pinned: Collection[str]
) -> str | None:
    """The name that ``choose_removals`` would give next if there were more checkpoints: the oldest that is
    not pinned. Never the newest of the ``valid`` candidates, which a restart needs."""
    ordered = sorted(valid, key=_version)
    return next((one.name for one in ordered[:-1] if one.name not in pinned), None)


def _version(candidate: Candidate) -> Version:
    return candidate.version
