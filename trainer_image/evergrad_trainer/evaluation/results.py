"""Results of ``evergrad evaluate``: a file for each checkpoint and set, written once, and what a cut one has.

::

    evaluations/step-1200.heldOut.3f9c….json          a result; never written over
    evaluations/.cut/step-1200.heldOut.3f9c….json     what was measured before an evaluation was cut

The digits stand for the content of the checkpoint, the items of the set and the code that measures: where one
of them is another, so is the result.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evergrad_common.contract import RunFile
from evergrad_common.publishing import publish_once
from evergrad_trainer.base.durable import (
    fsync_directory,
    replace_durably,
    unique_suffix,
    write_new,
)
from evergrad_trainer.run.directory import (
    dumps_strict,
    encode_text,
    read_json_object,
    reported,
)

CUT: Final = ".cut"
FORMAT: Final = 1


@dataclass(frozen=True)
class ResultPlace:
    """The place of one result: its run directory, and the name that it has there."""

    directory: Path
    name: str

    @property
    def path(self) -> Path:
        """Its file."""
        return self.directory / RunFile.EVALUATIONS / self.name

    @property
    def cut(self) -> Path:
        """The file of what was measured before it was cut."""
        return self.directory / RunFile.EVALUATIONS / CUT / self.name


def place_of(
    directory: Path, *, checkpoint: str, checksum: str, name: str, key: str
) -> ResultPlace:
    """Where the result of a checkpoint with this ``checksum`` on the set ``name`` lies.

    ``key``: what is measured on what.
    """
    text = json.dumps([checksum, name, key])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    # A task's own evaluators may have any names.
    plain = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:64]
    return ResultPlace(directory, f"{checkpoint}.{plain}.{digest}.json")


def read_result(place: ResultPlace) -> dict[str, Any] | None:
    """The result, or None where there is none yet. Raises RunDirectoryError."""
    return read_json_object(place.path)


def write_result(place: ResultPlace, values: Mapping[str, Any]) -> dict[str, Any]:
    """Write a result once; what stands in its file afterwards, which another evaluator may have written.

    Raises RunDirectoryError or VolumeError.
    """
    data = encode_text(dumps_strict({"format": FORMAT, **values}, indent=1)) + b"\n"
    temporary = place.path.with_name(f".{place.name}.{unique_suffix()}.tmp")
    with reported(place.path, what="cannot be written"):
        place.path.parent.mkdir(exist_ok=True)
        try:
            write_new(temporary, data)
            # Where another evaluator has written it meanwhile, its numbers are these.
            publish_once(temporary, place.path)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_directory(place.path.parent)
    with contextlib.suppress(OSError):
        place.cut.unlink(missing_ok=True)
    written = read_result(place)
    assert written is not None  # noqa: S101 - it was written, and nobody removes results
    return written


def read_cut(place: ResultPlace) -> dict[str, Any]:
    """Sums that were measured before an evaluation was cut; empty without it, or where it cannot be read."""
    try:
        value = json.loads(place.cut.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_cut(place: ResultPlace, values: Mapping[str, Any]) -> None:
    """Keep what was measured so far. Raises RunDirectoryError or VolumeError."""
    with reported(place.cut, what="cannot be written"):
        place.cut.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(place.cut, encode_text(dumps_strict(dict(values))))


def remove_stale_cuts(directory: Path, list_names: Callable[[], Collection[str]]) -> None:
    """Remove what belongs to checkpoints that are there no more: nobody can continue with it.

    ``list_names``: names of the checkpoints that are there.
    """
    try:
        cuts = list((directory / RunFile.EVALUATIONS / CUT).iterdir())
    except OSError:
        return
    # Listed behind the cuts: another evaluator may begin with a checkpoint that is published meanwhile.
    names = list_names()
    for path in cuts:
        # Behind the checkpoint's name come those of the set and the digits; before it the dot of a file that
        # another evaluator is writing.
        name = path.name.removeprefix(".")
        if not any(name.startswith(f"{one}.") for one in names):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
