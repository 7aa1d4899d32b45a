"""Loads a checkpoint into existing tensors, on all ranks together.

Rank 0 reads the checkpoint. The other ranks receive it in the same way as new members receive their state,
and do not need the volume. If the state is sharded (DTensors), each rank reads its own part instead.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.tensor import DTensor

from evergrad_manifest.errors import Problem, raise_if
from evergrad_trainer.base.errors import CheckpointError, VolumeError
from evergrad_trainer.base.volume import retry
from evergrad_trainer.checkpoint.cached_files import HeldFiles, room_for_files
from evergrad_trainer.checkpoint.dcp_storage import StoreReader
from evergrad_trainer.checkpoint.layout import TENSORS, Version, checkpoint_names
from evergrad_trainer.checkpoint.manifest import (
    InvalidCheckpointError,
    Manifest,
    UnknownFormatError,
)
from evergrad_trainer.checkpoint.reader import CheckpointReader
from evergrad_trainer.checkpoint.save import ignore_solo_warning
from evergrad_trainer.checkpoint.search import Choice, Rejected, Search, choose_together
from evergrad_trainer.checkpoint.tensor_table import Table, decode_table
from evergrad_trainer.distributed.world import World
from evergrad_trainer.state.registry import EMA, OPTIMIZER
from evergrad_trainer.state.transfer import pass_along

NAMED_TENSORS = 5
"""Maximum number of tensor names per kind of problem in an error message."""

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True)
class LoadFailure:
    """The reason why a validated checkpoint could not be loaded, equal on all ranks.

    ``is_damage``: whether a rank found damage. Otherwise the checkpoint may be valid and readable later.
    """

    reason: str
    is_damage: bool


Load = Callable[[Search, Choice, Mapping[str, torch.Tensor], World], LoadFailure | None]
"""A function that loads the chosen checkpoint on all ranks and returns None if all ranks succeeded."""
_REFUSALS = (InvalidCheckpointError, UnknownFormatError, OSError, VolumeError)
"""Errors that one rank's part of a load may raise."""


@dataclass(frozen=True)
class Restored:
    """A loaded checkpoint.

    ``extra`` are the values that were passed to the save. ``checksum`` is the checksum of the manifest, which
    covers all files of the checkpoint.
    """

    step: int
    generation: int
    path: Path
    extra: dict[str, Any]
    seconds: float
    checksum: str = ""
    data_fingerprint: str = ""


def load_newest(
    search: Search, state: Mapping[str, torch.Tensor], *, world: World
) -> tuple[Restored, list[Rejected]] | None:
    """Load the newest valid checkpoint into ``state`` in place. Every rank calls this.

    Returns the loaded checkpoint and the checkpoints that were skipped, or None. Raises CheckpointError on
    all ranks if none of the checkpoints can be used, if they have another identity, or if their tensors do
    not match ``state``. Raises VolumeError if the volume cannot be read, or if every checkpoint that may be
    valid could not be read.
    """
    started = time.monotonic()
    is_sharded = any(isinstance(value, DTensor) for value in state.values())
    # Hold files in memory only if rank 0 both validates and reads all of them. If each rank reads only its
    # part of a sharded state, whole files would need too much memory.
    with contextlib.ExitStack() as stack:
        if world.is_main and not is_sharded:
            held = search.ahead or HeldFiles(limit_bytes=room_for_files())
            stack.callback(held.release)
            stack.enter_context(search.store.reader.holding(held))
        load = _load_parts if is_sharded or world.size == 1 else _load_and_pass_along
        choice, rejected = _load_first_whole(search, state, world, load=load)
    if not choice.checkpoint:
        return None

    for passed in rejected if world.is_main else ():
        _log.error(
            "fell back from step %d (%s) to step %d, losing %d steps",
            passed.step,
            passed.reason,
            choice.step,
            passed.step - choice.step,
        )
    restored = Restored(
        step=choice.step,
        generation=choice.generation,
        path=Path(search.store.reader.locate(choice.checkpoint)),
        extra=choice.extra,
        seconds=time.monotonic() - started,
        checksum=choice.checksum,
        data_fingerprint=choice.data_fingerprint,
    )
    return restored, rejected


def load_of_step(
    search: Search,
    state: Mapping[str, torch.Tensor],
    *,
    step: int,
    world: World,
    is_right: Callable[[], bool],
) -> Path:
    """Load the newest checkpoint of ``step`` for which ``is_right`` returns true, and return its path.

    The checkpoint is loaded into ``state`` in place, and ``is_right`` is called after each load. All ranks
    call this function. No checkpoint is quarantined. Raises CheckpointError on all ranks if no checkpoint
    fits, and VolumeError if the volume cannot be read.
    """
    store = search.store
    where, what = store.reader.locate(""), "the checkpoints cannot be listed"

    def find_names() -> list[str]:
        found = [one.name for one in store.catalog.scan() if one.version.step == step]
        first = next(checkpoint_names(Version(step, 0, 0)))
        if first not in found:
            # A listing of a network volume may be stale, but opening a file by its name is not.
            with contextlib.suppress(InvalidCheckpointError, UnknownFormatError):
                store.reader.read_manifest(first, patient=True)
                found.append(first)
        return found

    names: list[str] | None = None
    if world.is_main:
        # On an error, ``names`` stays None. The other ranks wait for the broadcast, so rank 0 must not raise
        # here.
        with contextlib.suppress(OSError, VolumeError):
            names = retry(find_names, where=where, what=what)
    # Collective: all ranks try the same checkpoints in the same order.
    names = world.broadcast_json(names)
    if names is None:
        raise VolumeError(f"{where}: {what}")
    problems: list[Problem] = []
    for name in names:
        try:
            found = load_newest(replace(search, only=name), state, world=world)
        except CheckpointError as error:
            # The remedy is given only once, for all checkpoints.
            problems += [replace(one, remedy="") for one in error.problems]
            continue
        if found is not None and is_right():
            return found[0].path
        why = "it was saved at that step, and is not the one from which the run continued"
        problems.append(Problem(store.reader.locate(name), "has other weights", why))
    what = f"contains no checkpoint of step {step} from which this run continued"
    why = (
        "later steps were trained together with its weights, which no other checkpoint has"
    )
    remedy = f"Restore step-{step} from a copy, or move all later checkpoints away to train them again"
    raise CheckpointError(Problem(where, what, why, remedy), *problems)


def _load_first_whole(
    search: Search, state: Mapping[str, torch.Tensor], world: World, *, load: Load
) -> tuple[Choice, list[Rejected]]:
    """Choose and load checkpoints until one is loaded on all ranks or none is left.

    Returns the choice and the checkpoints that were skipped.
    """
    rejected: list[Rejected] = []
    unread: list[str] = []
    # The loop ends, because a rejected checkpoint is not chosen again.
    while True:
        choice = choose_together(search, rejected, world)
        if choice.trouble:
            raise VolumeError(choice.trouble)
        if choice.problems and unread:
            # A CheckpointError would end the run permanently, but a checkpoint that could not be read may be
            # valid.
            raise VolumeError(unread[0])
        raise_problems(choice.problems)
        if not choice.checkpoint:
            return choice, rejected
        rejected += [Rejected(**passed) for passed in choice.rejected]
        failure = load(search, choice, state, world)
        if failure is None:
            return choice, rejected
        if not failure.is_damage:
            unread.append(failure.reason)
        # The checkpoint was valid but could not be loaded. All ranks try the next older one together.
        rejected.append(Rejected(choice.checkpoint, choice.step, failure.reason, None))


def read_state(
    reader: CheckpointReader, name: str, table: Table, state: Mapping[str, torch.Tensor]
) -> None:
    """Fill ``state`` in place from a checkpoint, on this rank alone.

    Only this rank's part of a DTensor is read. Raises InvalidCheckpointError or OSError.
    """
    # Disable DCP's flattening of nested states: Evergrad's states are flat and must keep their keys.
    ignore_solo_warning()
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        # The bytes that a rank needs depend only on its own tensors. Without collectives, no rank hangs if
        # another rank fails to read.
        dcp_load(
            dict(state),
            storage_reader=StoreReader(reader, name, table),
            planner=planner,
            no_dist=True,
        )
    except CheckpointException as error:
        raise error.failures[0][0] from None


def open_table(
    reader: CheckpointReader,
    name: str,
    manifest: Manifest,
    *,
    prefix: str | tuple[str, ...] = "",
) -> Table:
    """Return the checkpoint's tensors whose keys begin with ``prefix``.

    Raises InvalidCheckpointError if the table is missing or damaged.
    """
    entries = [file for file in manifest.files if file.name == TENSORS]
    if not entries:
        raise InvalidCheckpointError(f"file {TENSORS}: is not in the manifest")
    table = decode_table(reader.read_document(name, entries[0]))
    return {key: tensor for key, tensor in table.items() if key.startswith(prefix)}


def compare_tensors(
    table: Table, state: Mapping[str, torch.Tensor], *, where: str
) -> list[Problem]:
    """Return the differences that prevent a load of ``table`` into ``state``.

    These are keys that exist on one side only, different shapes, and conversions between integers and floats.
    """
    shared = [(key, table[key], value) for key, value in state.items() if key in table]
    found = {
        "tensors are missing": [key for key in state if key not in table],
        "it holds tensors this model does not have": [
            key for key in table if key not in state
        ],
        "shapes differ": [
            f"{key} (stored {list(stored.shape)}, wanted {list(value.shape)})"
            for key, stored, value in shared
            if tuple(value.shape) != stored.shape
        ],
        # Floats of another width are converted. A conversion from float to integer would change the value.
        "types differ": [
            f"{key} (stored {stored.dtype}, wanted {value.dtype})"
            for key, stored, value in shared
            if value.dtype != stored.dtype
            and not (stored.dtype.is_floating_point and value.dtype.is_floating_point)
        ],
    }
    problems = []
    for what, names in found.items():
        if names:
            rest = len(names) - NAMED_TENSORS
            why = ", ".join(names[:NAMED_TENSORS]) + (
                f" and {rest} more" if rest > 0 else ""
            )
            remedy = "Use a checkpoint of the same model"
            if all(name.startswith(f"{OPTIMIZER}.") for name in names):
                # The optimizer's state depends on its type and on the trained parameters.
                remedy = "Use the same optimizer, or load the weights alone"
            elif all(name.startswith(f"{EMA}.") for name in names):
                remedy = "Set spec.training.ema in both runs or in none, or load the weights alone"
            problems.append(Problem(where, what, why, remedy))
    return problems


def _load_parts(
    search: Search, choice: Choice, state: Mapping[str, torch.Tensor], world: World
) -> LoadFailure | None:
    """Read each rank's own part, then exchange the results. Returns None if all ranks succeeded."""
    problems = list[Problem]()
    refusal: dict[str, Any] | None = None
    try:
        table, problems = _open(search, choice, state)
        if not problems:
            _read(search, choice, table, state)
    except _REFUSALS as error:
        refusal = _describe(error, world)
    # Collective, the only one here: if one rank has failed, all ranks must reject the checkpoint.
    answers = world.gather_json(
        {"problems": [asdict(problem) for problem in problems], "refusal": refusal}
    )
    raise_problems(
        next((answer["problems"] for answer in answers if answer["problems"]), [])
    )
    refusals = [answer["refusal"] for answer in answers if answer["refusal"]]
    if not refusals:
        return None
    reason = "; ".join(one["reason"] for one in refusals[:3])
    return LoadFailure(reason, any(one["is_damage"] for one in refusals))


def _load_and_pass_along(
    search: Search, choice: Choice, state: Mapping[str, torch.Tensor], world: World
) -> LoadFailure | None:
    """Read the checkpoint on rank 0 and pass it to the other ranks. Returns None if all ranks succeeded."""
    table: Table = {}
    problems = list[Problem]()
    refusal: dict[str, Any] | None = None
    if world.is_main:
        try:
            table, problems = _open(search, choice, state)
        except _REFUSALS as error:
            refusal = _describe(error, world)

    def fill(piece: Mapping[str, torch.Tensor]) -> bool:
        nonlocal refusal
        try:
            _read(search, choice, {key: table[key] for key in piece}, piece)
        except _REFUSALS as error:
            refusal = _describe(error, world)
        return refusal is None

    # Collective, before the first tensor: if the tensors do not match, no rank waits for them. Rank 0's
    # comparison is valid for all ranks, because all replicas have the same tensors.
    opened = world.broadcast_json(
        {"problems": [asdict(problem) for problem in problems], "refusal": refusal}
    )
    raise_problems(opened["problems"])
    if not opened["refusal"] and pass_along(state, world, fill=fill):
        return None
    # Collective: the load has failed on all ranks, but only rank 0 has the reason.
    return LoadFailure(**world.broadcast_json(refusal))


def _describe(error: Exception, world: World) -> dict[str, Any]:
    """Return the fields of a LoadFailure, in the form in which they are sent to the other ranks."""
    is_damage = not isinstance(error, OSError | VolumeError)
    return {"reason": f"rank {world.rank}: {error}", "is_damage": is_damage}


def _open(
    search: Search, choice: Choice, state: Mapping[str, torch.Tensor]
) -> tuple[Table, list[Problem]]:
    """Return the table of the chosen checkpoint and the problems that prevent a load into ``state``.

    Raises the same errors as ``_read_patiently``.
    """
    reader = search.store.reader

    def read() -> Table:
        manifest = reader.read_manifest(choice.checkpoint, patient=True)
        if manifest.checksum != choice.checksum:
            raise InvalidCheckpointError(
                "the manifest differs from the one that rank 0 validated"
            )
        return open_table(reader, choice.checkpoint, manifest, prefix=search.prefix)

    table = _read_patiently(search, choice, read)
    problems = compare_tensors(table, state, where=reader.locate(choice.checkpoint))
    if not problems:
        conversions = {
            (str(table[key].dtype), str(value.dtype))
            for key, value in state.items()
            if table[key].dtype != value.dtype
        }
        for stored, wanted in sorted(conversions):
            _log.warning("stored as %s, loaded as %s: values are converted", stored, wanted)
    return table, problems


def _read(
    search: Search, choice: Choice, table: Table, state: Mapping[str, torch.Tensor]
) -> None:
    """Read the tensors of ``state`` with retries. Raises the same errors as ``_read_patiently``."""
    reader = search.store.reader
    _read_patiently(
        search, choice, lambda: read_state(reader, choice.checkpoint, table, state)
    )


def _read_patiently(search: Search, choice: Choice, read: Callable[[], Result]) -> Result:
    """Read a part of the chosen checkpoint, and retry if the volume has a temporary error.

    Raises InvalidCheckpointError if the checkpoint is damaged, and OSError or VolumeError if the volume
    cannot be read.
    """
    where = search.store.reader.locate(choice.checkpoint)
    return retry(read, where=where, what="the checkpoint cannot be read")


def raise_problems(problems: list[dict[str, Any]]) -> None:
    """Raise CheckpointError if ``problems`` is not empty."""
    raise_if([Problem(**problem) for problem in problems], CheckpointError)
