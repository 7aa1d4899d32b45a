"""Watches, on behalf of a process that saves, whether a newer one has claimed the run directory."""

import logging
import time
from pathlib import Path

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import FencedError
from evergrad_trainer.checkpoint.generations import check_fence
from evergrad_trainer.distributed.world import Membership

FENCE_SECONDS = 5.0
"""How often rank 0 looks between saves whether a newer process has claimed the directory."""

_log = logging.getLogger(__name__)


class Fence:
    """Newer claims, as far as this rank has seen them. Ranks see one at different times and stop together."""

    def __init__(self, directory: Path, membership: Membership) -> None:
        self._directory = directory
        self._membership = membership
        self._error: FencedError | None = None
        self._next_look = 0.0

    @property
    def is_known(self) -> bool:
        """Whether this rank has seen a newer claim."""
        return self._error is not None

    def note(self, error: FencedError | None) -> None:
        """Remember the claim that a save has met; the first one counts."""
        self._error = self._error or error

    def look(self) -> None:
        """Look at the directory, at most every FENCE_SECONDS; to be called each step on rank 0."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + FENCE_SECONDS
        try:
            check_fence(self._directory, self._membership.world.generation)
        except FencedError as error:
            self._error = error
        except OSError as error:
            # A save would fail too, and say so; training itself needs nothing from the volume.
            _log.warning("%s: cannot be read: %s", self._directory, error)

    def agree(self) -> None:
        """Raise FencedError on all ranks if one of them has seen a newer claim. Every rank calls this."""
        # One collective before each save: a rank that raised alone would leave the others in the save.
        if self._membership.world.all_agree(not self.is_known):
            return
        why = f"this process is generation {self._membership.world.generation}"
        raise self._error or FencedError(
            Problem(
                str(self._directory),
                "a newer process has claimed this run directory",
                why=why,
            )
        )
