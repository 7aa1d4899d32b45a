"""Finding the newest checkpoint that validates and loading it into tensors that exist, all ranks together.

Rank 0 looks, validates and reads; the others get what it has read by the path by which newcomers are fed, and
need no volume. Only where each rank holds a part of its own (DTensors) does each read its part. What others
wait for is bounded by rank 0's progress, not by the size of the state.
"""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.tensor import DTensor

from evergrad_manifest.errors import Problem, raise_if
from evergrad_manifest.identity import changed_fields, problems_of_changes
from evergrad_trainer.checkpoint.dcp_storage import StoreReader
from evergrad_trainer.checkpoint.files import Meter
from evergrad_trainer.checkpoint.layout import QUARANTINE, TENSORS
from evergrad_trainer.checkpoint.manifest import (
    Identity,
    InvalidCheckpointError,
    Manifest,
    UnknownFormatError,
)
from evergrad_trainer.checkpoint.saving import ignore_solo_warning
from evergrad_trainer.checkpoint.store import Candidate, Library
from evergrad_trainer.checkpoint.tensor_table import Table, decode_table
from evergrad_trainer.errors import CheckpointError, VolumeError
from evergrad_trainer.state.registry import recipe_in
from evergrad_trainer.state.transfer import pass_along
from evergrad_trainer.volume import retry, volume_error
from evergrad_trainer.world import World

BEAT_SECONDS = 1.0
"""How often rank 0 says that it is still at it while it validates checkpoints."""
STALL_SECONDS = 600.0
"""How long rank 0 may validate without one more byte read, or one more checkpoint looked at, before all give
up."""
NAMED_TENSORS = 5
"""How many tensor names an error lists of each kind."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """What was loaded. ``extra`` is what the save was given."""

    step: int
    generation: int
    path: Path
    extra: dict[str, Any]
    seconds: float


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
    """What to look for and what one may do meanwhile."""

    library: Library
    checksums: bool
    identity: Identity | None = None
    """Refuse checkpoints of any other; None: anyone's will do."""
    prefix: str = ""
    """Only tensors whose keys begin so are wanted."""
    only: str | None = None
    """Consider this name alone."""
    may_quarantine: bool = False
    """The directory is ours: set damaged checkpoints aside."""
    meter: Meter = field(default_factory=Meter)
    """Counts what validation has read."""


@dataclass(frozen=True)
class _Choice:
    """Rank 0's decision, as it travels to the others.

    Neither checkpoint nor problems: there is nothing to load.
    """

    checkpoint: str = ""
    step: int = 0
    generation: int = 0
    checksum: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    problems: list[dict[str, str]] = field(default_factory=list)
    trouble: str = ""
    """Of the volume; it says nothing about the checkpoints."""


def load_newest(
    search: Search, state: Mapping[str, torch.Tensor], *, world: World
) -> tuple[Restored, list[Rejected]] | None:
    """Load the newest valid checkpoint into ``state`` in place; None if there never was one. Every rank calls
    this.

    Returns also what was passed over. Raises CheckpointError, the same on all ranks, if there are checkpoints
    and none can be used, if they belong to another identity, or if their tensors are not those of ``state``.
    """
    started = time.monotonic()
    rejected: list[Rejected] = []
    while True:
        choice = _choose_together(search, rejected, world)
        if choice.trouble:
            raise VolumeError(choice.trouble)
        _raise_problems(choice.problems)
        if not choice.checkpoint:
            return None
        rejected += [Rejected(**passed) for passed in choice.rejected]
        is_sharded = any(isinstance(value, DTensor) for value in state.values())
        load = _load_parts if is_sharded or world.size == 1 else _load_and_pass_along
        failures = load(search, choice, state, world)
        if not failures:
            if world.is_main:
                _report_fallback(rejected, choice)
            path = Path(search.library.locate(choice.checkpoint))
            seconds = time.monotonic() - started
            return Restored(
                choice.step, choice.generation, path, choice.extra, seconds
            ), rejected
        rejected.append(Rejected(choice.checkpoint, choice.step, "; ".join(failures), None))


def read_state(
    library: Library, name: str, table: Table, state: Mapping[str, torch.Tensor]
) -> None:
    """Fill ``state`` from a checkpoint in place, on this rank alone.

    Raises InvalidCheckpointError or OSError.
    """
    ignore_solo_warning()
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        # Which bytes a rank needs follows from its own tensors: no exchange, so nothing hangs if a peer fails
        # to read.
        dcp_load(
            dict(state),
            storage_reader=StoreReader(library, name, table),
            planner=planner,
            no_dist=True,
        )
    except CheckpointException as error:
        raise error.failures[0][0] from None


def open_table(library: Library, name: str, manifest: Manifest, *, prefix: str = "") -> Table:
    """The checkpoint's tensors whose keys begin with ``prefix``. Raises InvalidCheckpointError."""
    entries = [file for file in manifest.files if file.name == TENSORS]
    if not entries:
        raise InvalidCheckpointError(f"file {TENSORS}: is not in the manifest")
    table = decode_table(library.read_document(name, entries[0]))
    return {key: tensor for key, tensor in table.items() if key.startswith(prefix)}


def compare_tensors(
    table: Table, state: Mapping[str, torch.Tensor], *, where: str
) -> list[Problem]:
    """What keeps ``table`` from filling ``state``: keys on one side only, other shapes, integers
    for floats."""
    shapes = [
        f"{key} (stored {list(table[key].shape)}, wanted {list(value.shape)})"
        for key, value in state.items()
        if key in table and tuple(value.shape) != table[key].shape
    ]
    dtypes = [
        f"{key} (stored {table[key].dtype}, wanted {value.dtype})"
        for key, value in state.items()
        if key in table
        and value.dtype != table[key].dtype
        and not _converts(table[key].dtype, value.dtype)
    ]
    found = {
        "tensors are missing": [key for key in state if key not in table],
        "it holds tensors this model does not have": [key for key in table if key not in state],
        "shapes differ": shapes,
        "types differ": dtypes,
    }
    remedy = "Use a checkpoint of the same model"
    return [
        Problem(where, what, why=_shorten(names), remedy=remedy)
        for what, names in found.items()
        if names
    ]


def _choose_together(search: Search, tried: list[Rejected], world: World) -> _Choice:
    """Rank 0's choice on all ranks.

    While it validates, it says so every second: others wait for a beat, not for the end.
    """
    if world.size == 1:
        return _choose(search, tried)
    chosen: list[_Choice] = []
    # A daemon: a volume that hangs must not keep the process from ending.
    thread = threading.Thread(
        target=lambda: chosen.append(_choose(search, tried)), name="validate", daemon=True
    )
    if world.is_main:
        thread.start()
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
                    _Choice(trouble="the checkpoints could not be validated: see rank 0's log")
                )
            elif time.monotonic() - since > STALL_SECONDS:
                where = search.library.locate("")
                why = (
                    f"{where}: nothing could be read for {STALL_SECONDS:.0f} s. Check the "
                    "volume and its server."
                )
                answer = asdict(_Choice(trouble=why))
        # One broadcast a beat: the timeout of each is that of a beat.
        if (answer := world.broadcast_json(answer)) is not None:
            return _Choice(**answer)


def _load_parts(
    search: Search, choice: _Choice, state: Mapping[str, torch.Tensor], world: World
) -> list[str]:
    """Read on every rank what it holds, and agree; the ranks' failures, none if all succeeded."""
    problems, failure = list[Problem](), ""
    try:
        table, problems = _open(search, choice, state)
        if not problems:
            _read(search, choice, table, state)
    except (InvalidCheckpointError, UnknownFormatError, OSError, VolumeError) as error:
        failure = f"rank {world.rank}: {error}"
    answers = world.gather_json(
        {"problems": [asdict(problem) for problem in problems], "failure": failure}
    )
    _raise_problems(next((answer["problems"] for answer in answers if answer["problems"]), []))
    return [answer["failure"] for answer in answers if answer["failure"]][:3]


def _load_and_pass_along(
    search: Search, choice: _Choice, state: Mapping[str, torch.Tensor], world: World
) -> list[str]:
    """Read on rank 0, and give what it reads to the others; why that failed, nothing if it did not."""
    table: Table = {}
    problems, failure = list[Problem](), ""
    if world.is_main:
        try:
            table, problems = _open(search, choice, state)
        except (InvalidCheckpointError, UnknownFormatError, OSError, VolumeError) as error:
            failure = str(error)

    def fill(piece: Mapping[str, torch.Tensor]) -> bool:
        nonlocal failure
        try:
            _read(search, choice, {key: table[key] for key in piece}, piece)
        except (InvalidCheckpointError, OSError, VolumeError) as error:
            failure = str(error)
        return not failure

    # All replicas have the same tensors, so that rank 0's comparison speaks for all.
    opened = world.broadcast_json(
        {"problems": [asdict(problem) for problem in problems], "failure": failure}
    )
    _raise_problems(opened["problems"])
    if not opened["failure"] and pass_along(state, world, fill=fill):
        return []
    return [f"rank 0: {world.broadcast_json(failure)}"]


def _open(
    search: Search, choice: _Choice, state: Mapping[str, torch.Tensor]
) -> tuple[Table, list[Problem]]:
    """The chosen checkpoint's table, and what keeps it from filling ``state``.

    Raises InvalidCheckpointError or OSError.
    """
    manifest = search.library.read_manifest(choice.checkpoint, patient=True)
    if manifest.checksum != choice.checksum:
        raise InvalidCheckpointError("the manifest is not the one that rank 0 validated")
    table = open_table(search.library, choice.checkpoint, manifest, prefix=search.prefix)
    problems = compare_tensors(table, state, where=search.library.locate(choice.checkpoint))
    if not problems:
        _report_conversions(table, state)
    return table, problems


def _read(
    search: Search, choice: _Choice, table: Table, state: Mapping[str, torch.Tensor]
) -> None:
    """Raises InvalidCheckpointError; OSError or VolumeError where the volume cannot be read."""
    retry(
        lambda: read_state(search.library, choice.checkpoint, table, state),
        where=search.library.locate(choice.checkpoint),
        what="the checkpoint cannot be read",
    )


def _choose(search: Search, tried: list[Rejected]) -> _Choice:
    """Rank 0's part: never raises, so that the others are not left waiting."""
    where = search.library.locate("")
    try:
        return retry(
            lambda: _search(search, tried), where=where, what="the checkpoints cannot be listed"
        )
    except VolumeError as error:
        return _Choice(trouble=str(error))
    except OSError as error:
        return _Choice(
            trouble=str(volume_error(error, where, "the checkpoints cannot be listed"))
        )
    except UnknownFormatError as error:
        return _refuse([Problem(search.library.locate(""), "cannot be read", why=str(error))])


def _search(search: Search, tried: list[Rejected]) -> _Choice:
    """The newest candidate that validates.

    Damaged ones before it are set aside only now: without a valid one nothing moves.
    """
    damaged: list[tuple[Candidate, InvalidCheckpointError | OSError | VolumeError]] = []
    names = {rejection.checkpoint for rejection in tried}
    for candidate in _candidates(search):
        if candidate.name in names:
            continue
        try:
            manifest = _validate(search, candidate.name)
        except (InvalidCheckpointError, OSError, VolumeError) as error:
            damaged.append((candidate, error))
            continue
        problems = _compare_identity(search, candidate.name, manifest)
        if problems:
            return _refuse(problems)
        passed = [asdict(_set_aside(search, *rejection)) for rejection in damaged]
        version = manifest.version
        return _Choice(
            candidate.name,
            version.step,
            version.generation,
            manifest.checksum,
            manifest.extra,
            passed,
        )
    if unread := [error for _, error in damaged if isinstance(error, OSError | VolumeError)]:
        # They may be whole: to call them lost would be to begin anew.
        raise unread[0]
    library = search.library
    lost = {rejection.checkpoint: rejection.reason for rejection in tried}
    lost |= {candidate.name: str(error) for candidate, error in damaged}
    lost |= {
        f"{QUARANTINE}/{name}": "was set aside as damaged"
        for name in library.set_aside()
        if search.only is None
    }
    remedy = "Restore one of them from a copy, or remove the directory to begin at step 0"
    return _refuse(
        [
            Problem(library.locate(name), "cannot be loaded", why=why, remedy=remedy)
            for name, why in lost.items()
        ]
    )


def _validate(search: Search, name: str) -> Manifest:
    """Raises InvalidCheckpointError, UnknownFormatError; OSError or VolumeError where the volume cannot be
    read."""
    return retry(
        lambda: search.library.validate(name, checksums=search.checksums, meter=search.meter),
        where=search.library.locate(name),
        what="the checkpoint cannot be read",
    )


def _candidates(search: Search) -> list[Candidate]:
    return (
        search.library.scan() if search.only is None else [search.library.describe(search.only)]
    )


def _refuse(problems: list[Problem]) -> _Choice:
    return _Choice(problems=[asdict(problem) for problem in problems])


def _raise_problems(problems: list[dict[str, Any]]) -> None:
    raise_if([Problem(**problem) for problem in problems], CheckpointError)


def _set_aside(
    search: Search, candidate: Candidate, error: InvalidCheckpointError | OSError | VolumeError
) -> Rejected:
    """Quarantine what is damaged; what could not be read this time may be fine and stays."""
    moved = None
    if search.may_quarantine and isinstance(error, InvalidCheckpointError):
        try:
            moved = search.library.quarantine(candidate.name)
        except OSError as refusal:
            _log.warning(
                "%s could not be set aside: %s", search.library.locate(candidate.name), refusal
            )
    return Rejected(candidate.name, candidate.version.step, str(error), moved)


def _report_fallback(rejected: list[Rejected], choice: _Choice) -> None:
    for passed in rejected:
        _log.error(
            "fell back from step %d (%s) to step %d, losing %d steps",
            passed.step,
            passed.reason,
            choice.step,
            passed.step - choice.step,
        )


def _compare_identity(search: Search, name: str, manifest: Manifest) -> list[Problem]:
    """Why a checkpoint is not this run's: by fields of the recipe where both sides know theirs, else by
    hashes."""
    if search.identity is None:
        return []
    where, found = search.library.locate(name), manifest.identity
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
    # Two versions may read one file differently: then no field differs, and the hashes are all there is.
    changes = changed_fields(stored, own)
    if changes:
        del problems["config_hash"]
    return [*problems.values(), *problems_of_changes(changes, directory=where)]


_IDENTITY = (
    ("run", "the run's name", "Give every run a directory of its own"),
    ("config_hash", "the recipe's hash", "To change the recipe, start a new run with initFrom"),
    (
        "data_fingerprint",
        "the data's fingerprint",
        "Restore the data this run began with, or start a new run with initFrom",
    ),
)


def _report_conversions(table: Table, state: Mapping[str, torch.Tensor]) -> None:
    kinds = {
        (str(table[key].dtype), str(value.dtype))
        for key, value in state.items()
        if table[key].dtype != value.dtype
    }
    for stored, wanted in sorted(kinds):
        _log.warning("stored as %s, loaded as %s: values are converted", stored, wanted)


def _converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    return stored.is_floating_point and wanted.is_floating_point


def _shorten(names: list[str]) -> str:
    rest = len(names) - NAMED_TENSORS
    return ", ".join(names[:NAMED_TENSORS]) + (f" and {rest} more" if rest > 0 else "")
