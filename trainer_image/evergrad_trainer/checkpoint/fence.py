"""Checks whether a newer process has claimed the run directory of this process."""

import logging
import time
from pathlib import Path

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import FencedError
from evergrad_trainer.checkpoint.generations import check_fence
from evergrad_trainer.distributed.world import Membership

FENCE_SECONDS = 5.0
"""Interval at which rank 0 checks for a newer claim between saves."""

_log = logging.getLogger(__name__)


class Fence:
    """The newer claim that this rank has seen, if any.

    Ranks may see a claim at different times, so they agree before they stop.
    """

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
        """Record the newer claim that a save has found. Only the first recorded claim is kept."""
        self._error = self._error or error

    def look(self) -> None:
        """Check the directory, at most every FENCE_SECONDS. Call this after each step on rank 0."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + FENCE_SECONDS
        try:
            check_fence(self._directory, self._membership.world.generation)
        except FencedError as error:
            self._error = error
        except OSError as error:
            # This is not an error here: training does not need the volume, and a save would report it.
            _log.warning("%s: cannot be read: %s", self._directory, error)

    def agree(self) -> None:
        """Raise FencedError on all ranks if any rank has seen a newer claim. Every rank calls this."""
        # Collective, before each save: if one rank raised alone, the other ranks would hang in the save.
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
