"""Results of ``evergrad evaluate``: one file for each checkpoint and set, written once, and partial results.

::

    evaluations/step-1200.heldOut.3f9c….json          a result; never written over
    evaluations/.cut/step-1200.heldOut.3f9c….json     what was measured before an evaluation was cut

The digits are a hash of the checkpoint's content, the set's items and the measuring code. If one of them
changes, the result gets another file.
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
    """The location of one result: its run directory and its file name."""

    directory: Path
    name: str

    @property
    def path(self) -> Path:
        """The file of the result."""
        return self.directory / RunFile.EVALUATIONS / self.name

    @property
    def cut(self) -> Path:
        """The file of the partial result, if the evaluation was interrupted."""
        return self.directory / RunFile.EVALUATIONS / CUT / self.name


def place_of(
    directory: Path, *, checkpoint: str, checksum: str, name: str, key: str
) -> ResultPlace:
    """Return the location of the result of the checkpoint with ``checksum`` on the set ``name``.

    ``key``: identifies the set's items and the measuring code.
    """
    text = json.dumps([checksum, name, key])
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    # A task's own evaluators may have names with characters that are not valid in file names.
    plain = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:64]
    return ResultPlace(directory, f"{checkpoint}.{plain}.{digest}.json")


def read_result(place: ResultPlace) -> dict[str, Any] | None:
    """Read the result; None if it does not exist yet. Raises RunDirectoryError if it cannot be read."""
    return read_json_object(place.path)


def write_result(place: ResultPlace, values: Mapping[str, Any]) -> dict[str, Any]:
    """Write a result if its file does not exist; returns the file's content, which another evaluator may have
    written.

    Raises RunDirectoryError or VolumeError if it cannot be written.
    """
    data = encode_text(dumps_strict({"format": FORMAT, **values}, indent=1)) + b"\n"
    temporary = place.path.with_name(f".{place.name}.{unique_suffix()}.tmp")
    with reported(place.path, what="cannot be written"):
        place.path.parent.mkdir(exist_ok=True)
        try:
            write_new(temporary, data)
            # If another evaluator has written the file in the meantime, its numbers are kept.
            publish_once(temporary, place.path)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_directory(place.path.parent)
    with contextlib.suppress(OSError):
        place.cut.unlink(missing_ok=True)
    written = read_result(place)
    assert written is not None  # noqa: S101 - it was written, and results are never removed
    return written


def read_cut(place: ResultPlace) -> dict[str, Any]:
    """Read the partial result of an interrupted evaluation; empty if there is none or it cannot be read."""
    try:
        value = json.loads(place.cut.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_cut(place: ResultPlace, values: Mapping[str, Any]) -> None:
    """Write the partial result. Raises RunDirectoryError or VolumeError if it cannot be written."""
    with reported(place.cut, what="cannot be written"):
        place.cut.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(place.cut, encode_text(dumps_strict(dict(values))))


def remove_stale_cuts(directory: Path, list_names: Callable[[], Collection[str]]) -> None:
    """Remove partial results of checkpoints that no longer exist, because they cannot be continued.

    ``list_names``: returns the names of the existing checkpoints.
    """
    try:
        cuts = list((directory / RunFile.EVALUATIONS / CUT).iterdir())
    except OSError:
        return
    # List the checkpoints after the partial results: another evaluator may begin with a new checkpoint in the
    # meantime.
    names = list_names()
    for path in cuts:
        # The file name is the checkpoint's name, the set's name and the digits. It starts with a dot while
        # another evaluator writes the file.
        name = path.name.removeprefix(".")
        if not any(name.startswith(f"{one}.") for one in names):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
