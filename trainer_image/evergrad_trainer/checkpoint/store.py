"""The store of one run's checkpoints: a POSIX directory, local or shared between nodes.

A store handles names and bytes, without torch. ``dcp_storage.py`` handles tensors. ``manager.py`` decides
when to save, how many checkpoints to keep and how to handle failures.
"""

from dataclasses import dataclass
from pathlib import Path

from evergrad_trainer.checkpoint.attempts import FilesystemAttempts, Medium
from evergrad_trainer.checkpoint.catalog import Catalog
from evergrad_trainer.checkpoint.faults import FaultPoints
from evergrad_trainer.checkpoint.reader import CheckpointReader


@dataclass(frozen=True)
class CheckpointStore:
    """Access to one directory of checkpoints.

    ``attempts`` writes and publishes checkpoints, ``catalog`` lists and removes them, ``reader`` reads them.
    Any rank may use ``reader`` and ``attempts.create_shard``. Only rank 0 may use the other methods.
    """

    attempts: FilesystemAttempts
    catalog: Catalog
    reader: CheckpointReader
    faults: FaultPoints


def open_store(
    directory: Path, *, medium: Medium | None = None, keep_waiting: int = 0
) -> CheckpointStore:
    """Return the store in ``directory``, a run's ``checkpoints`` directory, without any file operation.

    ``keep_waiting`` is the number of newest checkpoints that retention keeps until they are evaluated.
    """
    medium = medium or Medium()
    reader = CheckpointReader(directory, stale_seconds=medium.stale_seconds)
    catalog = Catalog(
        directory, reader=reader, faults=medium.faults, keep_waiting=keep_waiting
    )
    attempts = FilesystemAttempts(directory, catalog=catalog, reader=reader, medium=medium)
    return CheckpointStore(attempts, catalog, reader, medium.faults)


_MOST_STEPS = 12
"""Maximum number of steps in a message, the newest ones, because a run may keep hundreds of checkpoints."""


def suggest_steps(store: CheckpointStore) -> str:
    """Return a remedy that lists the steps with a checkpoint; empty if there are no checkpoints."""
    steps = sorted({one.version.step for one in store.catalog.scan()})
    if not steps:
        return ""
    left_out = "" if len(steps) <= _MOST_STEPS else f"{len(steps) - _MOST_STEPS} more, "
    return f"Name one of the steps {left_out}{', '.join(map(str, steps[-_MOST_STEPS:]))}"
