"""Reading checkpoints outside the run they belong to: weights to begin another run with, or to export."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from evergrad_common.contract import RunFile
from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import CheckpointError, VolumeError
from evergrad_trainer.checkpoint.layout import MANIFEST, parse_checkpoint_name
from evergrad_trainer.checkpoint.manifest import InvalidCheckpointError, UnknownFormatError
from evergrad_trainer.checkpoint.reader import CheckpointReader
from evergrad_trainer.checkpoint.restore import (
    Restored,
    load_newest,
    open_table,
    raise_problems,
    read_state,
)
from evergrad_trainer.checkpoint.search import Choice, Search, choose_together
from evergrad_trainer.checkpoint.store import open_store, suggest_steps
from evergrad_trainer.checkpoint.tensor_table import Table
from evergrad_trainer.distributed.world import World

WEIGHTS = "model."
"""Keys of a state that are the model's begin so."""

_ALONE = World(generation=0, rank=0, size=1, device=torch.device("cpu"))
_NAME_ONE = "Name a run directory that has one, or one checkpoint"


def load_weights(
    path: Path,
    state: Mapping[str, torch.Tensor],
    *,
    world: World | None = None,
    checksums: bool = True,
    step: int | None = None,
    prefix: str | tuple[str, ...] = WEIGHTS,
) -> Restored:
    """Load another run's tensors into those of ``state`` whose keys begin with ``prefix``, in place; floats
    of another width are converted.

    ``path`` is a run directory, its ``checkpoints`` (the newest that validates is taken, of ``step`` where
    one is given) or one checkpoint. Nothing in it is changed; a run that trains there retires none of it
    meanwhile. With a ``world`` every rank calls this. Raises CheckpointError if nothing there can be used or
    if the tensors are not those of ``state``.
    """
    directory, only = _find(path)
    wanted = {key: value for key, value in state.items() if key.startswith(prefix)}
    with contextlib.ExitStack() as leases:
        search = Search(
            open_store(directory),
            checksums=checksums,
            prefix=prefix,
            only=only,
            step=step,
            leases=leases,
        )
        found = load_newest(search, wanted, world=world or _ALONE)
    if found is None:
        raise CheckpointError(Problem(str(path), "holds no checkpoint", remedy=_NAME_ONE))
    return found[0]


def look_at(path: Path, *, step: int | None = None) -> tuple[Path, Choice]:
    """The checkpoint that ``load_weights`` would take of ``path``, as far as the sizes of its files tell.

    Nothing but its manifest is read. Raises CheckpointError, and VolumeError where it cannot be read now.
    """
    directory, only = _find(path)
    search = Search(open_store(directory), checksums=False, only=only, step=step)
    choice = choose_together(search, [], _ALONE)
    if choice.trouble:
        raise VolumeError(choice.trouble)
    raise_problems(choice.problems)
    if not choice.checkpoint:
        raise CheckpointError(Problem(str(path), "holds no checkpoint", remedy=_NAME_ONE))
    return directory / choice.checkpoint, choice


class StoredTensors:
    """The tensors of one checkpoint, each read when it is asked for and held by nobody else.

    ``table`` has their types and shapes by name.
    """

    def __init__(self, reader: CheckpointReader, name: str, table: Table) -> None:
        self.table = table
        self._reader = reader
        self._name = name

    def read(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One whole tensor on the host, whichever shards its parts lie in.

        ``dtype``: what to convert it to, a slab at a time, so that it is held once. Raises CheckpointError
        where it cannot be read.
        """
        stored = self.table[key]
        tensor = torch.empty(stored.shape, dtype=dtype or stored.dtype)
        with _loading(self._reader.locate(self._name)):
            read_state(self._reader, self._name, {key: stored}, {key: tensor})
        return tensor


def open_tensors(
    checkpoint: Path, *, prefix: str = "", checksums: bool = True
) -> StoredTensors:
    """The tensors of one checkpoint whose keys begin with ``prefix``.

    ``checksums=False`` where it was validated a moment ago: hashing reads all of it. Raises CheckpointError
    if it does not validate.
    """
    # Whole before anything is read: a bad hash found half-way would leave half of an export.
    checkpoint = checkpoint.resolve()
    reader = open_store(checkpoint.parent).reader
    with _loading(str(checkpoint)):
        manifest = reader.validate(checkpoint.name, checksums=checksums)
        table = open_table(reader, checkpoint.name, manifest, prefix=prefix)
    return StoredTensors(reader, checkpoint.name, table)


def read_extra(checkpoint: Path) -> Mapping[str, Any]:
    """The values that one checkpoint was saved with. Raises CheckpointError."""
    with _loading(str(checkpoint)):
        store = open_store(checkpoint.resolve().parent)
        return store.reader.read_manifest(checkpoint.resolve().name, patient=True).extra


@contextlib.contextmanager
def _loading(where: str) -> Iterator[None]:
    """Make damage, and a volume that cannot be read, a CheckpointError that names the checkpoint."""
    try:
        yield
    except (InvalidCheckpointError, UnknownFormatError, OSError) as error:
        raise CheckpointError(Problem(where, "cannot be loaded", why=str(error))) from error


@contextlib.contextmanager
def hold_checkpoint(path: Path, *, step: int | None = None) -> Iterator[Path]:
    """The newest checkpoint (of ``step``) that validates, in a run directory, its ``checkpoints``, or
    ``path`` itself; a run that trains there does not retire it meanwhile.

    Raises CheckpointError, naming what was found and why it cannot be used.
    """
    directory, only = _find(path)
    store = open_store(directory)
    problems: dict[str, Problem] = {}
    is_stale = True
    # Ends: each name is tried once.
    while is_stale:
        found = store.catalog.scan() if only is None else [store.catalog.describe(only)]
        is_stale = False
        # Newest first; damaged ones are named only where none is whole.
        for candidate in found:
            name, version = candidate.name, candidate.version
            if name in problems or step not in (None, version.step):
                continue
            # Before it is validated, which may take minutes.
            with store.catalog.hold(name):
                try:
                    store.reader.validate(name, checksums=True)
                except (InvalidCheckpointError, UnknownFormatError, OSError) as error:
                    where = str(directory / name)
                    problems[name] = Problem(where, "cannot be loaded", why=str(error))
                    # Retired between listing and lease: a newer one has come.
                    if is_stale := not os.path.lexists(directory / name):
                        break
                else:
                    yield directory / name
                    return
    what = "holds no checkpoint" if step is None else f"holds no checkpoint of step {step}"
    missing = Problem(str(path), what, remedy=suggest_steps(store))
    raise CheckpointError(*(problems.values() or [missing]))


def _find(path: Path) -> tuple[Path, str | None]:
    """The directory of checkpoints that ``path`` means, and the one name in it that it means, if it means
    one."""
    path = path.resolve()
    # First: a run may have any name, that of a checkpoint too.
    inner = path / RunFile.CHECKPOINTS
    if inner.is_dir():
        return inner, None
    # A checkpoint may have been copied elsewhere under any name: its manifest shows what it is.
    if (path / MANIFEST).exists() or parse_checkpoint_name(path.name):
        return path.parent, path.name
    return path, None
