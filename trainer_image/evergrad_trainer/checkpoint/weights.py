"""Reading checkpoints outside the run they belong to: weights to begin another run with, plain tensors to
export."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from evergrad_coordinator.contract import RunFile
from evergrad_manifest.errors import Problem, raise_if
from evergrad_trainer.checkpoint.filesystem import filesystem_store
from evergrad_trainer.checkpoint.layout import MANIFEST, parse_checkpoint_name
from evergrad_trainer.checkpoint.manifest import InvalidCheckpointError, UnknownFormatError
from evergrad_trainer.checkpoint.restoring import (
    Restored,
    Search,
    compare_tensors,
    load_newest,
    open_table,
    read_state,
)
from evergrad_trainer.checkpoint.store import Library
from evergrad_trainer.checkpoint.tensor_table import Table
from evergrad_trainer.errors import CheckpointError
from evergrad_trainer.world import World

WEIGHTS = "model."
"""Keys of a state that are the model's begin so."""


def load_weights(
    path: Path,
    state: Mapping[str, torch.Tensor],
    *,
    world: World | None = None,
    checksums: bool = True,
) -> Restored:
    """Load another run's weights into the ``model.`` tensors of ``state`` in place; floats of another width
    are converted.

    ``path`` is a run directory, its ``checkpoints`` (the newest that validates is taken) or one checkpoint.
    Nothing in it is changed. With a ``world`` every rank calls this. Raises CheckpointError if nothing there
    can be used or if the tensors are not those of ``state``.
    """
    directory, only = _find(path)
    library = filesystem_store(directory).library
    wanted = {key: value for key, value in state.items() if key.startswith(WEIGHTS)}
    search = Search(library, checksums=checksums, prefix=WEIGHTS, only=only)
    alone = World(generation=0, rank=0, size=1, device=torch.device("cpu"))
    found = load_newest(search, wanted, world=world or alone)
    if found is None:
        raise CheckpointError(Problem(str(path), "holds no checkpoint"))
    return found[0]


def read_plain_state(checkpoint: Path, *, prefix: str = "") -> dict[str, torch.Tensor]:
    """All tensors of one checkpoint whose keys begin with ``prefix``, whole, on the host, in this process
    alone.

    Raises CheckpointError if the checkpoint does not validate.
    """
    with _validated(checkpoint, prefix) as (library, table):
        state = {
            key: torch.empty(tensor.shape, dtype=tensor.dtype) for key, tensor in table.items()
        }
        read_state(library, checkpoint.resolve().name, table, state)
    return state


def read_into(checkpoint: Path, state: Mapping[str, torch.Tensor], *, prefix: str) -> None:
    """Fill ``state``, all keys of which begin with ``prefix``, from one checkpoint, in place and in this process alone.

    Floats of another width are converted a slab at a time, so that nothing is held twice. Raises CheckpointError if the
    checkpoint does not validate, or if its tensors of that prefix are not those of ``state``.
    """
    with _validated(checkpoint, prefix) as (library, table):
        raise_if(compare_tensors(table, state, where=str(checkpoint)), CheckpointError)
        read_state(library, checkpoint.resolve().name, table, state)


@contextlib.contextmanager
def _validated(checkpoint: Path, prefix: str) -> Iterator[tuple[Library, Table]]:
    """A checkpoint that validates, and its table; what keeps it from being read is a CheckpointError."""
    checkpoint = checkpoint.resolve()
    library = filesystem_store(checkpoint.parent).library
    try:
        manifest = library.validate(checkpoint.name, checksums=True)
        yield library, open_table(library, checkpoint.name, manifest, prefix=prefix)
    except (InvalidCheckpointError, UnknownFormatError, OSError) as error:
        raise CheckpointError(
            Problem(str(checkpoint), "cannot be loaded", why=str(error))
        ) from error


def find_checkpoint(path: Path, *, step: int | None = None) -> Path:
    """The newest checkpoint (of ``step``) that validates, in a run directory, its ``checkpoints``, or
    ``path`` itself.

    Raises CheckpointError, naming what was found and why it cannot be used.
    """
    directory, only = _find(path)
    library = filesystem_store(directory).library
    found = library.scan() if only is None else [library.describe(only)]
    problems = []
    for candidate in found:
        if step is not None and candidate.version.step != step:
            continue
        try:
            library.validate(candidate.name, checksums=True)
        except (InvalidCheckpointError, UnknownFormatError, OSError) as error:
            problems.append(
                Problem(str(directory / candidate.name), "cannot be loaded", why=str(error))
            )
        else:
            return directory / candidate.name
    what = "holds no checkpoint" if step is None else f"holds no checkpoint of step {step}"
    raise CheckpointError(*(problems or [Problem(str(path), what)]))


def _find(path: Path) -> tuple[Path, str | None]:
    """The directory of checkpoints that ``path`` means, and the one name in it that it means, if it means
    one."""
    path = path.resolve()
    if (path / MANIFEST).exists() or parse_checkpoint_name(path.name):
        return path.parent, path.name
    inner = path / RunFile.CHECKPOINTS
    return (inner if inner.is_dir() else path), None
