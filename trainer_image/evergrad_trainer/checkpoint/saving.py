"""One save, from a snapshot in host memory to a published checkpoint.

Runs in a thread of its own on every rank.
"""

import contextlib
import errno
import functools
import importlib.metadata
import logging
import os
import platform
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from evergrad_coordinator.causes import Trouble
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
from evergrad_trainer.checkpoint.retention import choose_best, choose_removals
from evergrad_trainer.checkpoint.store import Store
from evergrad_trainer.checkpoint.tensor_table import Table, encode_table
from evergrad_trainer.errors import FencedError
from evergrad_trainer.host_trouble import is_host_trouble

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
class Published:
    """A checkpoint of this process that exists now.

    ``seconds`` from the snapshot to the end of the publication.
    """

    step: int
    generation: int
    path: Path
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """The end of a save: ``published``, or why not. ``kept`` (rank 0) counts the validated checkpoints there
    are now.

    ``is_peer_lost``: its group broke, which says nothing about the volume. ``is_of_host``: trouble of a
    volume or a host, which may pass, was all that was wrong. ``trouble``: the reason as a value.
    """

    published: Published | None = None
    kept: int = 0
    reason: str = ""
    fenced: FencedError | None = None
    is_peer_lost: bool = False
    is_of_host: bool = False
    trouble: Trouble = "other"


class BackgroundSave:
    """A save under way. With ``yields`` its thread leaves the cores to training.

    The thread is a daemon and not dcp.async_save's executor, whose threads the interpreter joins at its exit:
    a thread that waits for a frozen peer would hold a failed process for the whole timeout of the group.
    """

    def __init__(self, run: Callable[[], Outcome], *, name: str, yields: bool) -> None:
        self._outcome = Outcome(reason="its thread ended with an unexpected error")

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
    def outcome(self) -> Outcome:
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


def run_save(store: Store, order: SaveOrder, planner: SnapshotPlanner) -> Outcome:
    """Write, publish, mark, retire old checkpoints.

    Failures of any rank come back as the same outcome on all; never raises.
    """
    started = time.monotonic()
    publish = functools.partial(_publish, store, order)
    writer = StoreWriter(
        store.attempts, version=order.version, rank=order.rank, publish=publish
    )
    failed = Outcome()

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
        failed = Outcome(
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
    published = Published(
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
    return Outcome(published, kept=kept)


def _publish(
    store: Store,
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


def _settle(store: Store, order: SaveOrder, name: str) -> int:
    """Write the pointers and retire old checkpoints; how many valid ones there are now. Raises OSError."""
    store.catalog.write_pointer(LATEST, name, order.version)
    if order.best:
        store.catalog.write_pointer(BEST, name, order.version)

    # Damaged ones neither count nor are removed: ``keep`` is of checkpoints that a restart can use. Nor do
    # those that cannot be read now, which must not keep the others from being retired.
    valid: list[Candidate] = []
    for candidate in store.catalog.scan():
        try:
            if candidate.name != name:
                store.reader.validate(candidate.name, checksums=False)
            valid.append(candidate)
        except OSError as error:
            _log.warning("%s cannot be read and is left alone: %s", candidate.name, error)
        except (InvalidCheckpointError, UnknownFormatError):
            pass
    pinned = {name, *store.catalog.leased()}
    pinned |= store.catalog.waiting(valid)
    if (best := choose_best(valid, store.catalog.read_pointer(BEST))) is not None:
        pinned.add(best)
    pinned |= {
        one.name
        for one in valid
        if one.version.step in order.anchors
        or (one.manifest is not None and one.manifest.is_permanent)
    }
    kept = len(valid)
    for one in choose_removals(valid, keep=order.keep, pinned=pinned):
        try:
            store.catalog.remove(one)
            kept -= 1
        except OSError as error:
            _log.warning("%s could not be removed: %s", one, error)
    return kept


def _describe_failures(error: CheckpointException) -> Outcome:
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
    return Outcome(
        reason=reason,
        fenced=fences[0] if fences else None,
        is_of_host=is_of_host,
        trouble="fenced" if fences else trouble_of(failures[0][1][0]),
    )


_TROUBLES: Mapping[int, Trouble] = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EROFS: "read_only",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.ETIMEDOUT: "timeout",
}


def trouble_of(error: BaseException) -> Trouble:
    """The reason that kept a save from being made, as a value of the vocabulary of causes."""
    if isinstance(error, FencedError):
        return "fenced"
    if isinstance(error, InvalidCheckpointError):
        return "invalid"
    cause: BaseException | None = error
    # An error of ours that was raised from one of the operating system.
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    return "other" if cause is None else _TROUBLES.get(cause.errno or 0, "io")
