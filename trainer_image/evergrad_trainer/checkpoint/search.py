"""Finds the checkpoint to load. Rank 0 lists and validates checkpoints and sends its choice to all ranks.

The other ranks wait while rank 0 makes progress, however large the state is.
"""

import contextlib
import functools
import logging
import os
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from evergrad_manifest.errors import Problem
from evergrad_manifest.identity import hash_recipe
from evergrad_manifest.model.differences import changed_fields, problems_of_changes
from evergrad_trainer.base.errors import VolumeError
from evergrad_trainer.base.volume import retry, volume_error
from evergrad_trainer.checkpoint.cached_files import HeldFiles
from evergrad_trainer.checkpoint.files import Meter
from evergrad_trainer.checkpoint.layout import QUARANTINE
from evergrad_trainer.checkpoint.manifest import (
    Candidate,
    Identity,
    InvalidCheckpointError,
    Manifest,
    UnknownFormatError,
)
from evergrad_trainer.checkpoint.store import CheckpointStore
from evergrad_trainer.distributed.world import World
from evergrad_trainer.state.registry import recipe_in

BEAT_SECONDS = 1.0
"""Interval of rank 0's heartbeats to the other ranks while it validates checkpoints."""
STALL_SECONDS = 600.0
"""How long rank 0 may validate without progress (a read block or a further checkpoint) until all ranks give
up."""

_NAMED_STEPS = 8
"""Maximum number of existing steps in an error message."""

_log = logging.getLogger(__name__)
_Damaged: TypeAlias = tuple[Candidate, InvalidCheckpointError | OSError | VolumeError]


@dataclass(frozen=True)
class Rejected:
    """A checkpoint that was skipped. ``quarantined_as`` is its new path, or None if it was not moved."""

    checkpoint: str
    step: int
    reason: str
    quarantined_as: str | None


@dataclass(frozen=True)
class Search:
    """Criteria for the checkpoint to load, and the changes that the search may make."""

    store: CheckpointStore
    checksums: bool
    identity: Identity | None = None
    """Refuse checkpoints with another identity. If this is None, accept any identity."""
    prefix: str | tuple[str, ...] = ""
    """Load only tensors whose keys begin with this prefix or one of these prefixes."""
    only: str | None = None
    """Consider only the checkpoint with this name."""
    step: int | None = None
    """Consider only checkpoints of this step."""
    may_quarantine: bool = False
    """Whether the directory belongs to this run, so that damaged checkpoints may be quarantined."""
    meter: Meter = field(default_factory=Meter)
    """Counts the blocks and checkpoints that validation has read."""
    ahead: HeldFiles | None = None
    """Files of the newest checkpoint whose read was started before the search."""
    leases: contextlib.ExitStack | None = None
    """For the directory of another run, which may still be training: receives a lease on each checkpoint that
    is read, which prevents its removal until the stack is closed."""


@dataclass(frozen=True)
class Choice:
    """Rank 0's decision, in the form in which it is sent to the other ranks.

    If ``checkpoint``, ``problems`` and ``trouble`` are empty, there is nothing to load.
    """

    checkpoint: str = ""
    step: int = 0
    generation: int = 0
    checksum: str = ""
    data_fingerprint: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    problems: list[dict[str, str]] = field(default_factory=list)
    trouble: str = ""
    """A problem of the volume, which does not mean that checkpoints are damaged."""


def choose_together(search: Search, tried: list[Rejected], world: World) -> Choice:
    """Return rank 0's choice on all ranks, except the checkpoints in ``tried``. Every rank calls this."""
    if world.size == 1:
        return _choose(search, tried)
    chosen: list[Choice] = []
    # A daemon thread, so that a volume that hangs cannot prevent the process from exiting.
    thread = threading.Thread(
        target=lambda: chosen.append(_choose(search, tried)), name="validate", daemon=True
    )
    if world.is_main:
        thread.start()

    # Progress is measured in blocks, not in time, so that a slow volume can take as long as it needs.
    known, since = search.meter.units, time.monotonic()
    while True:
        answer: dict[str, Any] | None = None
        if world.is_main:
            thread.join(BEAT_SECONDS)
            if search.meter.units != known:
                known, since = search.meter.units, time.monotonic()
            if chosen:
                answer = asdict(chosen[0])
            elif not thread.is_alive():
                answer = asdict(
                    Choice(
                        trouble="the checkpoints could not be validated: see rank 0's log"
                    )
                )
            elif time.monotonic() - since > STALL_SECONDS:
                where = search.store.reader.locate("")
                why = (
                    f"{where}: nothing could be read for {STALL_SECONDS:.0f} s. Check the "
                    "volume and its server."
                )
                answer = asdict(Choice(trouble=why))
        # Collective: one broadcast per heartbeat, which is empty while rank 0 validates. The timeout of the
        # other ranks only needs to cover one heartbeat, however large the checkpoints are.
        if (answer := world.broadcast_json(answer)) is not None:
            return Choice(**answer)


def _choose(search: Search, tried: list[Rejected]) -> Choice:
    """Make the choice on rank 0. Never raises: an error becomes a Choice, for which the other ranks wait."""
    where = search.store.reader.locate("")
    what = "the checkpoints cannot be listed"
    try:
        return retry(lambda: _search(search, tried), where=where, what=what)
    except VolumeError as error:
        return Choice(trouble=str(error))
    except OSError as error:
        return Choice(trouble=str(volume_error(error, where, what)))
    except UnknownFormatError as error:
        # This is not damage. Without this checkpoint, the run would repeat steps of the newer program.
        return _refuse([Problem(where, "cannot be read", why=str(error))])


def _search(search: Search, tried: list[Rejected]) -> Choice:
    """Return the newest candidate that validates. If there is none, return the problems of all candidates."""
    store = search.store
    damaged: list[_Damaged] = []
    names = {rejection.checkpoint for rejection in tried}
    candidates = (
        store.catalog.scan()
        if search.only is None
        else [store.catalog.describe(search.only)]
    )
    if search.step is not None and (problem := _pick(search, candidates)) is not None:
        return _refuse([problem])
    for candidate in candidates:
        if (name := candidate.name) in names:
            continue
        if search.leases is not None:
            search.leases.enter_context(store.catalog.hold(name))
        try:
            # Retry for a limited time, because a momentary error of the volume does not mean damage.
            manifest = retry(
                functools.partial(
                    store.reader.validate,
                    name,
                    checksums=search.checksums,
                    meter=search.meter,
                ),
                where=store.reader.locate(name),
                what="the checkpoint cannot be read",
            )
        except (InvalidCheckpointError, OSError, VolumeError) as error:
            # Retention removed it between the listing and the lease, so there is a newer one.
            is_gone = isinstance(error, InvalidCheckpointError) and not os.path.lexists(
                store.reader.locate(name)
            )
            if search.leases is not None and is_gone:
                gone = Rejected(name, candidate.version.step, str(error), None)
                return _search(search, [*tried, gone])
            damaged.append((candidate, error))
            continue
        # The newest valid checkpoint decides. An older one with the right identity would lose its progress.
        if problems := _compare_identity(search, name, manifest):
            return _refuse(problems)
        # Quarantine damaged checkpoints only now. If none is valid, nothing is moved and a user decides.
        passed = [asdict(_set_aside(search, *rejection)) for rejection in damaged]
        version = manifest.version
        return Choice(
            candidate.name,
            version.step,
            version.generation,
            manifest.checksum,
            manifest.identity.data_fingerprint,
            manifest.extra,
            passed,
        )

    return _refuse_all(search, tried, damaged)


def _refuse_all(search: Search, tried: list[Rejected], damaged: list[_Damaged]) -> Choice:
    """Return a refusal that names every checkpoint, because none of them validates."""
    # A checkpoint that could not be read may be valid. It must not be reported as lost, so raise the error.
    if unread := [
        error for _, error in damaged if isinstance(error, OSError | VolumeError)
    ]:
        raise unread[0]
    lost = {rejection.checkpoint: rejection.reason for rejection in tried}
    lost |= {candidate.name: str(error) for candidate, error in damaged}
    lost |= {
        f"{QUARANTINE}/{name}": "was set aside as damaged"
        for name in search.store.catalog.set_aside()
        if search.only is None
    }
    where = search.store.reader.locate
    remedy = "Restore one of them from a copy, or remove the directory to begin at step 0"
    if search.only is not None:
        remedy = "Restore it from a copy, or choose another one"
    return _refuse(
        [
            Problem(where(name), "cannot be loaded", why=why, remedy=remedy)
            for name, why in lost.items()
        ]
    )


def _pick(search: Search, candidates: list[Candidate]) -> Problem | None:
    """Keep only the candidates of the wanted step in the list. Returns the problem if none remains."""
    there = sorted({one.version.step for one in candidates}, reverse=True)
    candidates[:] = [one for one in candidates if one.version.step == search.step]
    if candidates or not there:
        return None
    where, what = (
        search.store.reader.locate(search.only or ""),
        f"no checkpoint of step {search.step}",
    )
    some = ", ".join(map(str, there[:_NAMED_STEPS])) + (
        " and older ones" if there[_NAMED_STEPS:] else ""
    )
    return Problem(
        where, f"contains {what}", f"the available steps are {some}", "Name one of them"
    )


def _refuse(problems: list[Problem]) -> Choice:
    return Choice(problems=[asdict(problem) for problem in problems])


def _set_aside(
    search: Search,
    candidate: Candidate,
    error: InvalidCheckpointError | OSError | VolumeError,
) -> Rejected:
    """Quarantine a damaged checkpoint. A checkpoint that could not be read stays, because it may be valid."""
    step, reason = candidate.version.step, str(error)
    rejected = Rejected(candidate.name, step, reason, None)
    if not search.may_quarantine or not isinstance(error, InvalidCheckpointError):
        return rejected
    catalog = search.store.catalog
    where = search.store.reader.locate(candidate.name)
    try:
        moved = catalog.quarantine(candidate.name)
    except OSError as refusal:
        _log.warning("%s could not be set aside: %s", where, refusal)
        return rejected
    rejected = replace(rejected, quarantined_as=moved)
    try:
        catalog.note_fallback(asdict(rejected))
    except OSError as refusal:
        _log.warning("could not record that %s was set aside: %s", where, refusal)
    return rejected


_IDENTITY = (
    ("run", "the run's name", "Give every run its own directory"),
    (
        "config_hash",
        "the recipe's hash",
        "To change the recipe, start a new run with initFrom",
    ),
    (
        "data_fingerprint",
        "the data's fingerprint",
        "Restore the data this run began with, or start a new run with initFrom",
    ),
)
"""Fields that a checkpoint must share with the run: attribute, name in messages, and remedy."""


def _compare_identity(search: Search, name: str, manifest: Manifest) -> list[Problem]:
    """Return the differences between the identities of a checkpoint and of this run.

    If both recipes are known, the differences are listed by field. Otherwise only the hashes are compared.
    """
    if search.identity is None:
        return []
    where, found = search.store.reader.locate(name), manifest.identity
    problems = {
        field_: Problem(
            where,
            f"{what} is {getattr(found, field_)!r}",
            f"this run's is {getattr(search.identity, field_)!r}",
            remedy,
        )
        for field_, what, remedy in _IDENTITY
        if getattr(found, field_) != getattr(search.identity, field_)
    }
    stored, own = recipe_in(manifest.extra), search.identity.recipe
    if "config_hash" not in problems or not stored or not own:
        return list(problems.values())
    # If no field differs, keep the difference of the hashes, because two versions may read one file
    # differently. But if only the form of numbers differs, as in 1 and 1.0, the recipes are the same.
    changes = changed_fields(stored, own)
    if changes or hash_recipe(stored) == search.identity.config_hash:
        del problems["config_hash"]
    return [*problems.values(), *problems_of_changes(changes, directory=where)]
