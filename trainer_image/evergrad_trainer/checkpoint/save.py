"""One save, from a snapshot in host memory to a published checkpoint.

Runs in a thread of its own on every rank.
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
"""Niceness of a save beside training: training goes first, and the save still ends within seconds on cores
that are all busy.

At 19 a save of 600 MB lasted as long as training kept both cores busy (over 20 s), and was not durable for
that long.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveOrder:
    """One save: the version, the values beside the tensors, and the place of this rank.

    ``group`` (gloo, None in a world of one) belongs to this save alone until it ends. ``anchors``: steps
    whose checkpoints are never removed.
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
    """A checkpoint of this process that exists now.

    ``seconds`` from the snapshot to the end of the publication.
    """

    step: int
    generation: int
    path: Path
    bytes: int
    seconds: float


@dataclass(frozen=True)
class SaveResult:
    """The end of a save: ``published``, or why not. ``kept`` (rank 0) counts the validated checkpoints there
    are now.

    ``is_peer_lost``: its group broke, which says nothing about the volume. ``is_of_host``: trouble of a
    volume or a host, which may pass, was all that was wrong. ``trouble``: the reason as a value.
    ``is_agreed``: all ranks have the same outcome. ``serials``: how many this save has used, one for each
    try. ``removed`` (rank 0): the checkpoint that was removed to make room for this save, empty for none.
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
    """A save under way. With ``yields`` its thread leaves the cores to training.

    The thread is a daemon and not dcp.async_save's executor, whose threads the interpreter joins at its exit:
    a thread that waits for a frozen peer would hold a failed process for the whole timeout of the group.
    """

    def __init__(self, run: Callable[[], SaveResult], *, name: str, yields: bool) -> None:
        self._outcome = SaveResult(reason="its thread ended with an unexpected error")

        def work() -> None:
            # Elsewhere than on Linux threads have no priority of their own.
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
        """Whether ``join`` would return at once."""
        return not self._thread.is_alive()

    @property
    def outcome(self) -> SaveResult:
        """The end of the save. Only once it is done."""
        return self._outcome

    def join(self, timeout_seconds: float | None = None) -> None:
        """Wait for the end, or as long as that."""
        self._thread.join(timeout_seconds)


def ignore_solo_warning() -> None:
    """Silence DCP's advice that a world of one is a world of one.

    Main thread only: filters are the process's.
    """
    warnings.filterwarnings(
        "ignore",
        message="torch.distributed is disabled, unavailable or uninitialized",
        category=UserWarning,
    )


def run_save(
    store: CheckpointStore, order: SaveOrder, planner: SnapshotPlanner
) -> SaveResult:
    """Write, publish, mark, retire old checkpoints; on a full volume, remove one first and try once more.

    Failures of any rank come back as the same outcome on all; never raises.
    """
    outcome = _save_once(store, order, planner)
    if outcome.trouble != "no_space" or not outcome.is_agreed:
        return outcome

    # The volume may have room for all checkpoints that are kept, and not for one more beside them.
    try:
        has_room, removed = _make_room(store, order)
    except RuntimeError as error:
        # Only a lost peer ends the exchange, and the next world saves again.
        return replace(
            outcome,
            reason=f"rank {order.rank}: {error}",
            trouble="peer_lost",
            is_peer_lost=True,
            is_of_host=False,
        )
    if not has_room:
        return outcome
    # Its own directory, so that nothing of the first try can get into it.
    version = replace(order.version, serial=order.version.serial + 1)
    again = _save_once(store, replace(order, version=version), planner)
    return replace(again, removed=removed, serials=2)


def _save_once(
    store: CheckpointStore, order: SaveOrder, planner: SnapshotPlanner
) -> SaveResult:
    """One try to write and publish, and the tidying up after it."""
    started = time.monotonic()
    publish = functools.partial(_publish, store, order)
    writer = StoreWriter(
        store.attempts, version=order.version, rank=order.rank, publish=publish
    )
    failed = SaveResult()

    # All ranks go through DCP's exchange together: it plans, each rank writes, rank 0 publishes in between,
    # and its outcome comes back to all inside the metadata that DCP broadcasts at the end.
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
        # A peer is gone, where there is one. Rank 0 may have published before it noticed: then the checkpoint
        # is valid.
        lost = isinstance(error, RuntimeError) and order.group is not None
        answer = writer.outcome
        failed = SaveResult(
            reason=f"rank {order.rank}: {error}",
            is_peer_lost=lost,
            is_of_host=is_host_trouble(error),
            trouble="peer_lost" if lost else trouble_of(error),
        )

    if answer is None:
        # The attempt is invisible to readers; its room is given back now and not at the next start.
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
        # The checkpoint is valid whatever happens to pointers and retention: trouble there is logged, and the
        # next save tries again.
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
    """Make the attempt a checkpoint: the table, then the manifest that names all files and their hashes."""
    store.faults.reached(AFTER_SHARDS, order.rank)
    # The table before the manifest, which has its hash.
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
    """Write the pointers and retire old checkpoints; how many valid ones there are now. Raises OSError."""
    # Retention continues without the pointers: on a full volume it makes the room that they need.
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
    """Let ``latest``, and ``best.json`` for the best one, name the checkpoint; whether they do.

    Raises OSError for anything but a full volume.
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
    """The name of the newest checkpoint that a restart can use; None where there is none, or none is
    readable now."""
    try:
        return next((one.name for one in _list_valid(store)), None)
    except OSError as error:
        _log.warning("the checkpoints cannot be listed: %s", error)
        return None


def _list_valid(store: CheckpointStore, *, known: str = "") -> list[Candidate]:
    """Checkpoints that a restart can use, newest first. ``known``: one that needs no validation.

    Damaged ones neither count nor are removed: ``keep`` is of checkpoints that a restart can use. Nor do
    those that cannot be read now, which must not keep the others from being retired.
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
    """Names of checkpoints that retention leaves, however old they are. Raises OSError."""
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
    """Remove the checkpoint that retention would remove next, if there is one: whether it is gone, on all
    ranks, and its name, on rank 0.

    Raises RuntimeError where a peer is lost.
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

    # All ranks try again together, or none does.
    has_room = torch.tensor([int(bool(removed))])
    dist.broadcast(has_room, group=order.group, group_src=0)
    return bool(has_room.item()), removed


def _describe_failures(error: CheckpointException) -> SaveResult:
    """The outcome of a save that ranks reported failures of: a fence on any rank decides."""
    failures = sorted(error.failures.items())
    reason = "; ".join(
        f"rank {rank}: {str(failure) or type(failure).__name__}"
        for rank, (failure, _) in failures[:3]
    )
    # A full volume fails all ranks alike: three are enough to see it.
    if len(failures) > 3:
        reason += f"; and {len(failures) - 3} ranks more"
    fences = [failure for _, (failure, _) in failures if isinstance(failure, FencedError)]
    is_of_host = all(is_host_trouble(failure) for _, (failure, _) in failures)
    # The volume is one for all ranks: if it was full for one of them, that explains the save's failure.
    troubles = [trouble_of(failure) for _, (failure, _) in failures]
    known = [one for one in ("fenced", "no_space") if one in troubles]
    return SaveResult(
        reason=reason,
        fenced=fences[0] if fences else None,
        is_of_host=is_of_host,
        trouble=read_trouble(known[0]) if known else troubles[0],
        is_agreed=True,
    )
