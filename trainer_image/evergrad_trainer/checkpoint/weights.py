"""Reads checkpoints outside their own run, to start another run with the weights or to export them."""

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
"""Prefix of the model's keys in a state."""

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
    """Load another run's tensors in place into the tensors of ``state`` whose keys begin with ``prefix``.

    ``path`` is one checkpoint, a run directory or its ``checkpoints`` directory. For a directory, the newest
    valid checkpoint (of ``step``, if given) is loaded. Floats of another width are converted. No checkpoint
    is changed. A run that trains in ``path`` does not remove the checkpoint during the load. With a
    ``world``, every rank calls this. Raises CheckpointError if no checkpoint can be used or if its tensors do
    not match ``state``.

    For example, ``load_weights(Path("/runs/base"), registry.tensors(), step=1200)``.
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
        raise CheckpointError(
            Problem(str(path), "contains no checkpoint", remedy=_NAME_ONE)
        )
    return found[0]


def look_at(path: Path, *, step: int | None = None) -> tuple[Path, Choice]:
    """Return the checkpoint that ``load_weights`` would load from ``path``, without hashing its shards.

    Only the manifest, the table of tensors and the sizes of the files are read. Raises CheckpointError if no
    checkpoint can be used, and VolumeError if the volume cannot be read now.
    """
    directory, only = _find(path)
    search = Search(open_store(directory), checksums=False, only=only, step=step)
    choice = choose_together(search, [], _ALONE)
    if choice.trouble:
        raise VolumeError(choice.trouble)
    raise_problems(choice.problems)
    if not choice.checkpoint:
        raise CheckpointError(
            Problem(str(path), "contains no checkpoint", remedy=_NAME_ONE)
        )
    return directory / choice.checkpoint, choice


class StoredTensors:
    """The tensors of one checkpoint. Each tensor is read on request and is not cached.

    ``table`` contains their types and shapes by name.
    """

    def __init__(self, reader: CheckpointReader, name: str, table: Table) -> None:
        self.table = table
        self._reader = reader
        self._name = name

    def read(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return one whole tensor on the host, from all shards that contain parts of it.

        If ``dtype`` is given, the tensor is converted slab by slab, so that memory holds only one whole copy.
        Raises CheckpointError if the tensor cannot be read.
        """
        stored = self.table[key]
        tensor = torch.empty(stored.shape, dtype=dtype or stored.dtype)
        with _loading(self._reader.locate(self._name)):
            read_state(self._reader, self._name, {key: stored}, {key: tensor})
        return tensor


def open_tensors(
    checkpoint: Path, *, prefix: str = "", checksums: bool = True
) -> StoredTensors:
    """Return the tensors of one checkpoint whose keys begin with ``prefix``.

    Hashing reads the whole checkpoint. If it has just been validated, pass ``checksums=False``. Raises
    CheckpointError if the checkpoint does not validate.
    """
    # Validate the whole checkpoint first: a wrong hash found later would leave an incomplete export.
    checkpoint = checkpoint.resolve()
    reader = open_store(checkpoint.parent).reader
    with _loading(str(checkpoint)):
        manifest = reader.validate(checkpoint.name, checksums=checksums)
        table = open_table(reader, checkpoint.name, manifest, prefix=prefix)
    return StoredTensors(reader, checkpoint.name, table)


def read_extra(checkpoint: Path) -> Mapping[str, Any]:
    """Return the ``extra`` values of one checkpoint. Raises CheckpointError if it cannot be read."""
    with _loading(str(checkpoint)):
        store = open_store(checkpoint.resolve().parent)
        return store.reader.read_manifest(checkpoint.resolve().name, patient=True).extra


@contextlib.contextmanager
def _loading(where: str) -> Iterator[None]:
    """Convert an error of the body (damage, newer format, OSError) to a CheckpointError for ``where``."""
    try:
        yield
    except (InvalidCheckpointError, UnknownFormatError, OSError) as error:
        raise CheckpointError(Problem(where, "cannot be loaded", why=str(error))) from error


@contextlib.contextmanager
def hold_checkpoint(path: Path, *, step: int | None = None) -> Iterator[Path]:
    """Yield the path of the newest valid checkpoint and hold a lease on it during the body.

    ``path`` is one checkpoint, a run directory or its ``checkpoints`` directory. If ``step`` is given, only
    checkpoints of this step are considered. Raises CheckpointError with the reason for each unusable
    checkpoint.
    """
    directory, only = _find(path)
    store = open_store(directory)
    problems: dict[str, Problem] = {}
    is_stale = True
    # The loop ends, because each name is tried only once.
    while is_stale:
        found = store.catalog.scan() if only is None else [store.catalog.describe(only)]
        is_stale = False
        # Newest first. Damaged checkpoints are reported only if none is valid.
        for candidate in found:
            name, version = candidate.name, candidate.version
            if name in problems or step not in (None, version.step):
                continue
            # Hold the lease before validation, which may take minutes.
            with store.catalog.hold(name):
                try:
                    store.reader.validate(name, checksums=True)
                except (InvalidCheckpointError, UnknownFormatError, OSError) as error:
                    where = str(directory / name)
                    problems[name] = Problem(where, "cannot be loaded", why=str(error))
                    # Retention removed it between the listing and the lease, so there is a newer one.
                    if is_stale := not os.path.lexists(directory / name):
                        break
                else:
                    yield directory / name
                    return
    what = (
        "contains no checkpoint"
        if step is None
        else f"contains no checkpoint of step {step}"
    )
    missing = Problem(str(path), what, remedy=suggest_steps(store))
    raise CheckpointError(*(problems.values() or [missing]))


def _find(path: Path) -> tuple[Path, str | None]:
    """Return the directory of checkpoints for ``path``, and the name of the checkpoint if ``path`` is one."""
    path = path.resolve()
    # Check this first, because a run directory may have the name of a checkpoint.
    inner = path / RunFile.CHECKPOINTS
    if inner.is_dir():
        return inner, None
    # A copied checkpoint may have any name, but its manifest identifies it.
    if (path / MANIFEST).exists() or parse_checkpoint_name(path.name):
        return path.parent, path.name
    return path, None
