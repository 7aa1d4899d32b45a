"""Runs one save, from a snapshot in host memory to a published checkpoint.

A save runs in a separate thread on every rank.
"""

import contextlib
import functools
import importlib.metadata
import logging
import os
import platform
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from evergrad_common.causes import Trouble, read_trouble
from evergrad_trainer.base.errors import FencedError
from evergrad_trainer.base.host_errors import is_host_trouble, is_no_space, trouble_of
from evergrad_trainer.checkpoint.dcp_storage import SnapshotPlanner, StoreWriter
from evergrad_trainer.checkpoint.faults import AFTER_SHARDS
from evergrad_trainer.checkpoint.layout import BEST, LATEST, TENSORS, Version
from evergrad_trainer.checkpoint.manifest import (
    Candidate,
    FileEntry,
    Identity,
    InvalidCheckpointError,
    Manifest,
    UnknownFormatError,
)
from evergrad_trainer.checkpoint.retention import (
    choose_best,
    choose_next_removal,
    choose_removals,
)
from evergrad_trainer.checkpoint.store import CheckpointStore
from evergrad_trainer.checkpoint.tensor_table import Table, encode_table

BACKGROUND_NICENESS = 10
"""Niceness of a background save. Training takes precedence, and the save still ends within seconds if all
cores are busy.

With a niceness of 19, a save of 600 MB did not end while training kept both cores busy (over 20 s), and the
checkpoint was not durable during this time.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveOrder:
    """The parameters of one save, except for the tensors.

    ``group`` is a gloo group, or None in a world of one process. No other code may use it until the save has
    ended. ``anchors`` are steps whose checkpoints are never removed. ``keep`` is the number of newest
    checkpoints to keep.
    """

    version: Version
    identity: Identity
    extra: dict[str, Any]
    best: bool
    keep: int
    rank: int
    world_size: int
    group: dist.ProcessGroup | None
    anchors: frozenset[int] = frozenset()


@dataclass(frozen=True)
class PublishedCheckpoint:
    """A checkpoint that this process has published.

    ``bytes`` is the size of all files. ``seconds`` is the time from the snapshot to the publication.
    """

    step: int
    generation: int
    path: Path
    bytes: int
    seconds: float


@dataclass(frozen=True)
class SaveResult:
    """The result of a save: the ``published`` checkpoint, or the ``reason`` of the failure.

    ``kept`` (rank 0) is the number of valid checkpoints now. ``is_peer_lost``: whether the group failed,
    which does not mean that the volume failed. ``is_of_host``: whether only temporary problems of a volume or
    a host caused the failure. ``trouble`` is the reason as a value. ``is_agreed``: whether all ranks have the
    same outcome. ``serials`` is the number of attempts, each of which used one serial. ``removed`` (rank 0)
    is the name of the checkpoint that was removed to free space for this save, or empty.
    """

    published: PublishedCheckpoint | None = None
    kept: int = 0
    reason: str = ""
    fenced: FencedError | None = None
    is_peer_lost: bool = False
    is_of_host: bool = False
    trouble: Trouble = "other"
    is_agreed: bool = False
    serials: int = 1
    removed: str = ""


class BackgroundSave:
    """A save that runs in a daemon thread. If ``yields`` is true, the thread has a lower priority.

    This does not use the executor of dcp.async_save, because the interpreter joins its threads at exit. A
    thread that waits for a frozen peer would then delay the exit of a failed process by the timeout of the
    group.
    """

    def __init__(self, run: Callable[[], SaveResult], *, name: str, yields: bool) -> None:
        self._outcome = SaveResult(reason="its thread ended with an unexpected error")

        def work() -> None:
            # Only Linux has priorities for single threads.
            if yields and sys.platform == "linux":
                with contextlib.suppress(OSError):
                    thread = threading.get_native_id()
                    own = os.getpriority(os.PRIO_PROCESS, thread)
                    os.setpriority(os.PRIO_PROCESS, thread, max(BACKGROUND_NICENESS, own))
            self._outcome = run()

        self._thread = threading.Thread(target=work, name=name, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the save has ended."""
        return not self._thread.is_alive()

    @property
    def outcome(self) -> SaveResult:
        """The result of the save. Valid only after the save has ended."""
        return self._outcome

    def join(self, timeout_seconds: float | None = None) -> None:
        """Wait until the save has ended, or until the timeout has passed."""
        self._thread.join(timeout_seconds)


def ignore_solo_warning() -> None:
    """Suppress DCP's warning that there is no process group, which is intended in a world of one process.

    Call this only in the main thread, because warning filters belong to the whole process.
    """
    warnings.filterwarnings(
        "ignore",
        message="torch.distributed is disabled, unavailable or uninitialized",
        category=UserWarning,
    )


def run_save(
    store: CheckpointStore, order: SaveOrder, planner: SnapshotPlanner
) -> SaveResult:
    """Write and publish a checkpoint, write the pointers, and remove old checkpoints. Never raises.

    If the volume is full, one old checkpoint is removed and the save is retried once. A failure on any rank
    produces the same result on all ranks.
    """
    outcome = _save_once(store, order, planner)
    if outcome.trouble != "no_space" or not outcome.is_agreed:
        return outcome

    # The volume may have space for all kept checkpoints, but not for one additional checkpoint.
    try:
        has_room, removed = _make_room(store, order)
    except RuntimeError as error:
        # The broadcast fails only if a peer is lost. The next world saves again.
        return replace(
            outcome,
            reason=f"rank {order.rank}: {error}",
            trouble="peer_lost",
            is_peer_lost=True,
            is_of_host=False,
        )
    if not has_room:
        return outcome
    # A new serial gives the second attempt its own directory, without any files of the first attempt.
    version = replace(order.version, serial=order.version.serial + 1)
    again = _save_once(store, replace(order, version=version), planner)
    return replace(again, removed=removed, serials=2)


def _save_once(
    store: CheckpointStore, order: SaveOrder, planner: SnapshotPlanner
) -> SaveResult:
    """Make one attempt to write and publish, and clean up afterwards."""
    started = time.monotonic()
    publish = functools.partial(_publish, store, order)
    writer = StoreWriter(
        store.attempts, version=order.version, rank=order.rank, publish=publish
    )
    failed = SaveResult()

    # Collectives of DCP, on all ranks: DCP plans, each rank writes, rank 0 publishes, and then DCP broadcasts
    # the metadata, which contain rank 0's outcome.
    try:
        metadata = dcp_save(
            {},
            storage_writer=writer,
            planner=planner,
            process_group=order.group,
            no_dist=order.group is None,
        )
        answer = metadata.storage_data
    except CheckpointException as error:
        answer, failed = writer.outcome, _describe_failures(error)
    except (OSError, RuntimeError, ValueError) as error:
        # If there is a group, a RuntimeError means that a peer is gone. Rank 0 may have published before the
        # error, in which case the checkpoint is valid.
        lost = isinstance(error, RuntimeError) and order.group is not None
        answer = writer.outcome
        failed = SaveResult(
            reason=f"rank {order.rank}: {error}",
            is_peer_lost=lost,
            is_of_host=is_host_trouble(error),
            trouble="peer_lost" if lost else trouble_of(error),
        )

    if answer is None:
        # Readers cannot see the attempt. Remove it now to free its space before the next start.
        if writer.attempt is not None:
            store.attempts.discard(writer.attempt)
        return failed
    published = PublishedCheckpoint(
        step=order.version.step,
        generation=order.version.generation,
        path=Path(store.reader.locate(answer["checkpoint"])),
        bytes=answer["bytes"],
        seconds=time.monotonic() - started,
    )
    kept = 0
    if order.rank == 0:
        # The checkpoint is valid even if the pointers or the retention fail. Such an error is only logged,
        # because the next save tries again.
        try:
            kept = _settle(store, order, answer["checkpoint"])
        except OSError as error:
            name = answer["checkpoint"]
            _log.warning("%s is published; tidying up after it failed: %s", name, error)
    return SaveResult(published, kept=kept)


def _publish(
    store: CheckpointStore,
    order: SaveOrder,
    attempt: str,
    table: Table,
    shards: tuple[FileEntry, ...],
) -> dict[str, Any]:
    """Publish the attempt: write the table, then the manifest with all files and their hashes."""
    store.faults.reached(AFTER_SHARDS, order.rank)
    # The table comes before the manifest, because the manifest contains its hash.
    document = store.attempts.write_document(attempt, TENSORS, encode_table(table))
    manifest = Manifest(
        version=order.version,
        world_size=order.world_size,
        identity=order.identity,
        extra=order.extra,
        best=order.best,
        files=(*shards, document),
        libraries={
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "evergrad-trainer": importlib.metadata.version("evergrad-trainer"),
            "numpy": importlib.metadata.version("numpy"),
        },
        finished=time.time(),
    )
    name = store.attempts.publish(attempt, manifest)
    return {"checkpoint": name, "bytes": manifest.bytes}


def _settle(store: CheckpointStore, order: SaveOrder, name: str) -> int:
    """Write the pointers, remove old checkpoints, and return the number of valid ones. Raises OSError."""
    # If the pointers cannot be written to a full volume, retention runs first and frees space for them.
    is_pointed = _write_pointers(store, order, name)

    valid = _list_valid(store, known=name)
    pinned = _find_pinned(store, order, valid) | {name}
    kept = len(valid)
    for one in choose_removals(valid, keep=order.keep, pinned=pinned):
        try:
            store.catalog.remove(one)
            kept -= 1
        except OSError as error:
            _log.warning("%s could not be removed: %s", one, error)

    if not is_pointed and not _write_pointers(store, order, name):
        _log.warning("%s is published; the pointer to it could not be written", name)
    return kept


def _write_pointers(store: CheckpointStore, order: SaveOrder, name: str) -> bool:
    """Write the name of the checkpoint to ``latest``, and to ``best.json`` if it is the best one.

    Returns False if the volume is full. Raises OSError for any other error.
    """
    try:
        store.catalog.write_pointer(LATEST, name, order.version)
        if order.best:
            store.catalog.write_pointer(BEST, name, order.version)
    except OSError as error:
        if not is_no_space(error):
            raise
        return False
    return True


def find_newest_valid(store: CheckpointStore) -> str | None:
    """Return the name of the newest checkpoint that a restart can use.

    Returns None if there is no such checkpoint or if the directory cannot be read now.
    """
    try:
        return next((one.name for one in _list_valid(store)), None)
    except OSError as error:
        _log.warning("the checkpoints cannot be listed: %s", error)
        return None


def _list_valid(store: CheckpointStore, *, known: str = "") -> list[Candidate]:
    """Return the checkpoints that a restart can use, newest first. ``known`` is a name to trust as valid.

    Damaged checkpoints are not counted or removed, because ``keep`` is a number of usable checkpoints.
    Checkpoints that cannot be read now are also skipped, so that they do not block the removal of others.
    """
    valid: list[Candidate] = []
    for candidate in store.catalog.scan():
        try:
            if candidate.name != known:
                store.reader.validate(candidate.name, checksums=False)
            valid.append(candidate)
        except OSError as error:
            _log.warning("%s cannot be read and is left alone: %s", candidate.name, error)
        except (InvalidCheckpointError, UnknownFormatError):
            pass
    return valid


def _find_pinned(
    store: CheckpointStore, order: SaveOrder, valid: list[Candidate]
) -> set[str]:
    """Return the names of checkpoints that retention keeps, however old they are. Raises OSError."""
    pinned = {*store.catalog.leased(), *store.catalog.waiting(valid)}
    if (best := choose_best(valid, store.catalog.read_pointer(BEST))) is not None:
        pinned.add(best)
    return pinned | {
        one.name
        for one in valid
        if one.version.step in order.anchors
        or (one.manifest is not None and one.manifest.is_permanent)
    }


def _make_room(store: CheckpointStore, order: SaveOrder) -> tuple[bool, str]:
    """Remove the checkpoint that retention would remove next, if there is one.

    Returns whether one was removed (equal on all ranks) and, on rank 0, its name. Raises RuntimeError if a
    peer is lost.
    """
    removed = ""
    if order.rank == 0:
        try:
            valid = _list_valid(store)
            pinned = _find_pinned(store, order, valid)
            removed = choose_next_removal(valid, pinned=pinned) or ""
            if removed:
                store.catalog.remove(removed)
        except OSError as error:
            _log.warning("no room could be made for %s: %s", order.version, error)
            removed = ""
    if order.group is None:
        return bool(removed), removed

    # Collective: either all ranks retry the save or none of them does.
    has_room = torch.tensor([int(bool(removed))])
    dist.broadcast(has_room, group=order.group, group_src=0)
    return bool(has_room.item()), removed


def _describe_failures(error: CheckpointException) -> SaveResult:
    """Return the result of a save that failed on one or more ranks.

    If any rank was fenced, the result contains its FencedError.
    """
    failures = sorted(error.failures.items())
    reason = "; ".join(
        f"rank {rank}: {str(failure) or type(failure).__name__}"
        for rank, (failure, _) in failures[:3]
    )
    # List only three ranks, because a full volume causes the same failure on all ranks.
    if len(failures) > 3:
        reason += f"; and {len(failures) - 3} ranks more"
    fences = [failure for _, (failure, _) in failures if isinstance(failure, FencedError)]
    is_of_host = all(is_host_trouble(failure) for _, (failure, _) in failures)
    # All ranks share the volume. If it was full for one of them, this is the cause of the failure.
    troubles = [trouble_of(failure) for _, (failure, _) in failures]
    known = [one for one in ("fenced", "no_space") if one in troubles]
    return SaveResult(
        reason=reason,
        fenced=fences[0] if fences else None,
        is_of_host=is_of_host,
        trouble=read_trouble(known[0]) if known else troubles[0],
        is_agreed=True,
    )
