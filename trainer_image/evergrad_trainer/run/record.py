"""Values of ``run.json`` as they are read: a damaged or missing one is refused by its key."""

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_manifest.identity import from_wire
from evergrad_manifest.model.differences import ABSENT, show_value
from evergrad_trainer.base.errors import RunDirectoryError
from evergrad_trainer.run.directory import RunDirectory, dumps_strict

BEGUN_FROM: Final = "begunFrom"
"""Key under which stands what a fresh run began with."""
ANNOUNCED: Final = "announced"
"""Key under which stands what a start announces changes of; there only until it has announced them."""
FIRST_MODEL: Final = "firstModel"
"""Key of the model as it was described at the first start; missing where ``model`` is the same."""

CORRECTED: Final = "corrected"
"""Key of a model's description: what the configuration of a directory says where its weights say something
else. ``config`` has what is trained."""

_REMEDY: Final = (
    "Restore it from a backup. Without one, begin another run with the weights or the optimizer of this one "
    "(spec.training.initFrom.load), which needs no run.json"
)

BASE: Final = "baseDirectory"
"""Key under which stands where relative paths of the manifest start, seen from the run directory."""

Value = TypeVar("Value")
# Kept: building one takes longer than to read a value with it.
_adapter: Final = functools.cache(TypeAdapter[Any])


@dataclass(frozen=True)
class BegunFrom:
    """The state that a run began with: a checkpoint, or a directory of weights where ``checkpoint`` is
    empty."""

    path: str
    checkpoint: str
    step: int
    hash: str
    load: str


@dataclass(frozen=True)
class Announced:
    """The manifest and the horizon of the newest start that has announced its changes."""

    manifest: dict[str, Any]
    steps: int


@dataclass(frozen=True)
class ModelRecord:
    """A description of a model, as far as two of them are compared."""

    transformers: str
    config: dict[str, Any]


def comparable_configs(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configurations of two descriptions of a model, as far as they can differ.

    Another version of transformers knows other keys: then only those that both know are left.
    """
    old, new = before["config"], now["config"]
    if before["transformers"] == now["transformers"]:
        return old, new
    shared = old.keys() & new.keys()
    return {key: old[key] for key in shared}, {key: new[key] for key in shared}


def read_key(
    directory: RunDirectory, record: Mapping[str, Any], key: str, kind: type[Value]
) -> Value:
    """The value under ``key`` of the ``run.json`` of ``directory``; dots lead into objects.

    ``kind``: a type, a dataclass or a model of pydantic, to which it is made; keys that it does not know are
    ignored. Raises RunDirectoryError naming each key that is missing or holds something else.
    """
    names = key.split(".")
    value: Any = record
    for number, name in enumerate(names):
        if not isinstance(value, Mapping):
            raise damaged(
                directory, ".".join(names[:number]), value, "it should be an object"
            )
        if name not in value:
            raise damaged(directory, ".".join(names[: number + 1]))
        value = value[name]

    # As JSON and strictly: a text is no number, while a list may be a tuple, and a text a path.
    try:
        adapter = _adapter(kind)  # type: ignore[arg-type]  # a type is hashable
        read: Value = adapter.validate_json(dumps_strict(value), strict=True)
    except ValidationError as error:
        problems = []
        for one in error.errors(include_url=False):
            where = key + "".join(
                f"[{part}]" if isinstance(part, int) else f".{part}" for part in one["loc"]
            )
            if one["type"] == "missing":
                problems.append(_problem(directory, where, "is missing"))
                continue
            what = f"is {show_value(one['input'])}"
            why = one["msg"].replace("Input should be", "it should be")
            problems.append(_problem(directory, where, what, why))
        raise RunDirectoryError(*problems) from None
    return read


def read_optional(
    directory: RunDirectory, record: Mapping[str, Any], key: str, kind: type[Value]
) -> Value | None:
    """As ``read_key``; None where the key is missing, as in the records of older versions."""
    return read_key(directory, record, key, kind) if key in record else None


def read_announced(directory: RunDirectory, record: Mapping[str, Any]) -> Announced:
    """Read from the ``run.json`` of ``directory`` what the newest start that has announced its changes had.

    It is the start that has written the record, unless that one was killed before it had announced them.
    Raises RunDirectoryError.
    """
    return read_optional(directory, record, ANNOUNCED, Announced) or Announced(
        record["manifest"], int(record["derived"]["totalSteps"])
    )


def describe_base(base: Path, run_directory: Path) -> str:
    """The value of ``BASE`` for a run in ``run_directory``, which exists.

    Links are followed first, as whoever opens a path does: one leads out of the folders that its name is in.
    """
    return os.path.relpath(base.resolve(), run_directory.resolve())


def read_base(directory: RunDirectory, record: Mapping[str, Any]) -> Path:
    """Where relative paths in the manifest of ``record`` start. Raises RunDirectoryError."""
    value = read_key(directory, record, BASE, str)
    base = directory.path / value
    if not base.exists():
        # Older versions did not follow links in the run directory's path.
        by_name = Path(os.path.normpath(directory.path.absolute() / value))
        return by_name if by_name.exists() else base
    return base


def read_run(directory: RunDirectory, resolved: Mapping[str, Any]) -> TrainingRun:
    """The run that ``run.json`` records. Its problems are not the user's manifest's, and are told apart."""
    manifest = read_key(directory, resolved, "manifest", dict[str, Any])
    try:
        return from_wire(manifest)
    except (KeyError, TypeError, ConfigurationError) as error:
        raise RunDirectoryError(
            Problem(
                str(directory.resolved),
                "does not hold a run this version can read",
                " ".join(str(error).split())[:300],
                "Go on with the version of Evergrad that began this run, or choose another --run-directory",
            )
        ) from error


def damaged(
    directory: RunDirectory, key: str, value: Any = ABSENT, why: str = ""
) -> RunDirectoryError:
    """Build the error for a key of ``run.json``: it is missing, or holds ``value``, which it should not."""
    what = "is missing" if value is ABSENT else f"is {show_value(value)}"
    return RunDirectoryError(_problem(directory, key, what, why))


def _problem(directory: RunDirectory, key: str, what: str, why: str = "") -> Problem:
    return Problem(str(directory.resolved), f"{key} {what}", why, _REMEDY)
