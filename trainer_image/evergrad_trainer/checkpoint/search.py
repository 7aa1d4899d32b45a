"""Finding the checkpoint to load: rank 0 looks and validates, its choice reaches all ranks.

The wait of the others is bounded by rank 0's progress, not by the size of the state.
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
"""How often rank 0 says that it is still at it while it validates checkpoints."""
STALL_SECONDS = 600.0
"""How long rank 0 may validate without one more byte read, or one more checkpoint looked at, before all give
up."""

_NAMED_STEPS = 8
"""How many steps an error lists of those that there are."""

_log = logging.getLogger(__name__)
_Damaged: TypeAlias = tuple[Candidate, InvalidCheckpointError | OSError | VolumeError]


@dataclass(frozen=True)
class Rejected:
    """A checkpoint that was passed over; ``quarantined_as`` is where it is now, None if it was left where it
    was."""

    checkpoint: str
    step: int
    reason: str
    quarantined_as: str | None


@dataclass(frozen=True)
class Search:
    """The checkpoint that is wanted, and the changes that are allowed meanwhile."""

    store: CheckpointStore
    checksums: bool
    identity: Identity | None = None
    """Refuse checkpoints of any other; None: anyone's will do."""
    prefix: str | tuple[str, ...] = ""
    """Only tensors whose keys begin so, or in one of these ways, are wanted."""
    only: str | None = None
    """Consider this name alone."""
    step: int | None = None
    """Consider checkpoints of this step alone."""
    may_quarantine: bool = False
    """The directory is ours: set damaged checkpoints aside."""
    meter: Meter = field(default_factory=Meter)
    """Counts what validation has read."""
    ahead: HeldFiles | None = None
    """Files of the newest checkpoint that were read, or are being read, since before the search."""
    leases: contextlib.ExitStack | None = None
    """Another run's directory, which may train on: what is read is kept from being retired until this is
    closed."""


@dataclass(frozen=True)
class Choice:
    """Rank 0's decision, as it travels to the others.

    Neither checkpoint nor problems: there is nothing to load.
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
    """Trouble of the volume; it says nothing about the checkpoints."""


def choose_together(search: Search, tried: list[Rejected], world: World) -> Choice:
    """Rank 0's choice on all ranks, none of those ``tried``. Every rank calls this."""
    if world.size == 1:
        return _choose(search, tried)
    chosen: list[Choice] = []
    # A daemon: a volume that hangs must not keep the process from ending.
    thread = threading.Thread(
        target=lambda: chosen.append(_choose(search, tried)), name="validate", daemon=True
    )
    if world.is_main:
        thread.start()

    # Progress is counted in blocks read, not in time: a slow volume may take as long as it needs.
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
        # One broadcast a beat, empty while rank 0 validates: the others' timeout is that of a beat, however
        # large the checkpoints are.
        if (answer := world.broadcast_json(answer)) is not None:
            return Choice(**answer)


def _choose(search: Search, tried: list[Rejected]) -> Choice:
    """Rank 0's part: never raises, so that the others are not left waiting."""
    where = search.store.reader.locate("")
    what = "the checkpoints cannot be listed"
    try:
        return retry(lambda: _search(search, tried), where=where, what=what)
    except VolumeError as error:
        return Choice(trouble=str(error))
    except OSError as error:
        return Choice(trouble=str(volume_error(error, where, what)))
    except UnknownFormatError as error:
        # Not damage: passing it over would train again what a newer program has trained.
        return _refuse([Problem(where, "cannot be read", why=str(error))])


def _search(search: Search, tried: list[Rejected]) -> Choice:
    """The newest candidate that validates; without one, the problems of all there are."""
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
            # Tried again for a while: what a volume refuses for a moment says nothing about a checkpoint.
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
            # Retired between listing and lease: a newer one has come.
            is_gone = isinstance(error, InvalidCheckpointError) and not os.path.lexists(
                store.reader.locate(name)
            )
            if search.leases is not None and is_gone:
                gone = Rejected(name, candidate.version.step, str(error), None)
                return _search(search, [*tried, gone])
            damaged.append((candidate, error))
            continue
        # The newest that is whole decides: an older one of the right identity would lose what this one has.
        if problems := _compare_identity(search, name, manifest):
            return _refuse(problems)
        # Damaged ones are set aside only now: without a valid one nothing moves, and a person decides.
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
    """Name every checkpoint that there is, none of which validates."""
    # One that could not be read may be whole: to call it lost would be to begin again.
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
    """Leave the candidates of the wanted step alone; the problem, where there is none."""
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
    return Problem(where, f"holds {what}", f"there are those of {some}", "Name one of them")


def _refuse(problems: list[Problem]) -> Choice:
    return Choice(problems=[asdict(problem) for problem in problems])


def _set_aside(
    search: Search,
    candidate: Candidate,
    error: InvalidCheckpointError | OSError | VolumeError,
) -> Rejected:
    """Quarantine what is damaged; what could not be read this time may be fine and stays."""
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
        _log.warning("that %s was set aside could not be noted: %s", where, refusal)
    return rejected


_IDENTITY = (
    ("run", "the run's name", "Give every run a directory of its own"),
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
"""Fields a checkpoint must share with the run, what they are called, and what helps where they differ."""


def _compare_identity(search: Search, name: str, manifest: Manifest) -> list[Problem]:
    """Why a checkpoint is not this run's: by fields of the recipe where both sides know theirs, else by
    hashes."""
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
    # Two versions may read one file differently: then no field differs, and the hashes are all there is. One
    # that differs by the form of its numbers alone is the same recipe.
    changes = changed_fields(stored, own)
    if changes or hash_recipe(stored) == search.identity.config_hash:
        del problems["config_hash"]
    return [*problems.values(), *problems_of_changes(changes, directory=where)]
