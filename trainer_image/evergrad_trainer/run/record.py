"""Reads the values of ``run.json``. If a value is damaged or missing, the error names its key."""

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
"""Key of the state that a fresh run began with."""
ANNOUNCED: Final = "announced"
"""Key of the manifest and horizon that the changes of a start are compared with. It is removed after the
start has announced its changes."""
FIRST_MODEL: Final = "firstModel"
"""Key of the model's description at the first start; missing if ``model`` is the same."""

CORRECTED: Final = "corrected"
"""Key of a model's description: the values in a directory's configuration that its weights contradict.
``config`` has the values that are trained."""

_REMEDY: Final = (
    "Restore it from a backup. Without one, begin another run with the weights or the optimizer of this one "
    "(spec.training.initFrom.load), which needs no run.json"
)

BASE: Final = "baseDirectory"
"""Key of the directory that relative paths of the manifest refer to, relative to the run directory."""

Value = TypeVar("Value")
# Cached, because building an adapter takes longer than reading a value with it.
_adapter: Final = functools.cache(TypeAdapter[Any])


@dataclass(frozen=True)
class BegunFrom:
    """The state that a run began with: a checkpoint, or a directory of weights if ``checkpoint`` is empty."""

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
    """The parts of a model's description that are compared with another description."""

    transformers: str
    config: dict[str, Any]


def comparable_configs(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the comparable parts of two descriptions of a model.

    If the versions of transformers differ, their sets of keys may differ too. Then only shared keys are
    returned.
    """
    old, new = before["config"], now["config"]
    if before["transformers"] == now["transformers"]:
        return old, new
    shared = old.keys() & new.keys()
    return {key: old[key] for key in shared}, {key: new[key] for key in shared}


def read_key(
    directory: RunDirectory, record: Mapping[str, Any], key: str, kind: type[Value]
) -> Value:
    """Read the value of ``key`` from ``record``, which is the ``run.json`` of ``directory``.

    Dots in ``key`` separate nested keys, for example ``derived.totalSteps``. ``kind``: a type, a dataclass or
    a pydantic model, to which the value is converted; unknown keys are ignored. Raises RunDirectoryError,
    naming each key, if a key is missing or has a value of another type.
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

    # Strict validation of JSON does not convert a text to a number, but converts a list to a tuple and a text
    # to a path.
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
    """Read a key as ``read_key`` does; returns None if it is missing, as in records of older versions."""
    return read_key(directory, record, key, kind) if key in record else None


def read_announced(directory: RunDirectory, record: Mapping[str, Any]) -> Announced:
    """Read the manifest and horizon of the newest start that has announced its changes.

    This is the start that wrote the record, unless it was killed before it announced its changes.
    Raises RunDirectoryError if the record is damaged.
    """
    return read_optional(directory, record, ANNOUNCED, Announced) or Announced(
        record["manifest"], int(record["derived"]["totalSteps"])
    )


def describe_base(base: Path, run_directory: Path) -> str:
    """Return the value of ``BASE`` for a run in ``run_directory``, which must exist.

    Symbolic links are resolved first, because ``..`` in a relative path starts at the target of a link.
    """
    return os.path.relpath(base.resolve(), run_directory.resolve())


def read_base(directory: RunDirectory, record: Mapping[str, Any]) -> Path:
    """Return the directory that relative paths in the manifest of ``record`` refer to.

    Raises RunDirectoryError if the key is missing or damaged.
    """
    value = read_key(directory, record, BASE, str)
    base = directory.path / value
    if not base.exists():
        # Older versions did not resolve symbolic links in the run directory's path.
        by_name = Path(os.path.normpath(directory.path.absolute() / value))
        return by_name if by_name.exists() else base
    return base


def read_run(directory: RunDirectory, resolved: Mapping[str, Any]) -> TrainingRun:
    """Parse the run in ``run.json``.

    Raises RunDirectoryError if it is invalid, and not ConfigurationError, because the user's manifest is not
    the cause.
    """
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
    """Build the error for a key of ``run.json`` that is missing or has the invalid ``value``."""
    what = "is missing" if value is ABSENT else f"is {show_value(value)}"
    return RunDirectoryError(_problem(directory, key, what, why))


def _problem(directory: RunDirectory, key: str, what: str, why: str = "") -> Problem:
    return Problem(str(directory.resolved), f"{key} {what}", why, _REMEDY)
