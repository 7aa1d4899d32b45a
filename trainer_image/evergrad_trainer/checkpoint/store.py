"""The place of one run's checkpoints: a POSIX directory, local or shared between nodes. No torch here.

A store has names and bytes. Tensors are the matter of ``dcp_storage.py``; when to save, how many to keep
and what to do about a failure are the matter of ``manager.py``.
"""

from dataclasses import dataclass
from pathlib import Path

from evergrad_trainer.checkpoint.attempts import FilesystemAttempts, Medium
from evergrad_trainer.checkpoint.catalog import Catalog
from evergrad_trainer.checkpoint.faults import FaultPoints
from evergrad_trainer.checkpoint.reader import CheckpointReader


@dataclass(frozen=True)
class CheckpointStore:
    """The three parts of one directory of checkpoints.

    ``attempts`` leads to new checkpoints, ``catalog`` lists and retires them, ``reader`` reads them.
    Only ``reader`` and ``attempts.create_shard`` are for every rank; the rest is rank 0's.
    """

    attempts: FilesystemAttempts
    catalog: Catalog
    reader: CheckpointReader
    faults: FaultPoints


def open_store(
    directory: Path, *, medium: Medium | None = None, keep_waiting: int = 0
) -> CheckpointStore:
    """The store in ``directory`` (a run's ``checkpoints``). Touches nothing.

    ``keep_waiting``: how many checkpoints, the newest, retention leaves until they are evaluated.
    """
    medium = medium or Medium()
    reader = CheckpointReader(directory, stale_seconds=medium.stale_seconds)
    catalog = Catalog(
        directory, reader=reader, faults=medium.faults, keep_waiting=keep_waiting
    )
    attempts = FilesystemAttempts(directory, catalog=catalog, reader=reader, medium=medium)
    return CheckpointStore(attempts, catalog, reader, medium.faults)


_MOST_STEPS = 12
"""Steps that a message names, the newest ones: a run may keep hundreds of checkpoints."""


def suggest_steps(store: CheckpointStore) -> str:
    """The remedy for a step that has no checkpoint: the steps that have one; empty if none has."""
    steps = sorted({one.version.step for one in store.catalog.scan()})
    if not steps:
        return ""
    left_out = "" if len(steps) <= _MOST_STEPS else f"{len(steps) - _MOST_STEPS} more, "
    return f"Name one of the steps {left_out}{', '.join(map(str, steps[-_MOST_STEPS:]))}"
