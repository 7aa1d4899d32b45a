"""A memory of what a pass over a file found, so that an unchanged one is not read again at every start."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

from evergrad_trainer.base.durable import write_json
from evergrad_trainer.data.preparation.content import Content
from evergrad_trainer.data.preparation.files import SourceEntry
from evergrad_trainer.data.preparation.sources import (
    OnBytes,
    Scan,
    is_settled,
    observe_stat,
    scan_file,
)

_FORMAT: Final = 2
_KEPT_EVERY: Final = 2**32
"""Bytes that are read until the memory is written down, so that a kill costs no more than these."""


def scan_cached(
    source: SourceEntry, files: Sequence[Path], directory: Path, *, on_bytes: OnBytes
) -> Content:
    """The content of ``files``, each remembered below ``directory`` while its size and times stay the same.

    Raises DataError.
    """
    key = [os.path.abspath(source.path), source.type, source.dtype]
    if source.type in ("text", "parquet"):
        columns = "\0".join(source.row_fields) or source.text_field
        key.append(source.document if source.type == "text" else columns)
    text = json.dumps(key)
    name = xxhash.xxh3_64_hexdigest(text.encode("utf-8", errors="surrogateescape"))
    memory = directory / f"{name}.json"
    # No memory, a damaged one or another version's: the files are read again.
    remembered: dict[str, Scan] = {}
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        value = json.loads(memory.read_text(encoding="utf-8"))
        if value["format"] == _FORMAT:
            remembered = {
                file: Scan.from_json(scan) for file, scan in value["scans"].items()
            }
    # Also of files that are not reached this time: an interruption would otherwise forget them.
    kept = {name: remembered[name] for name in map(str, files) if name in remembered}
    scans: list[tuple[Path, Scan]] = []
    unwritten = 0
    try:
        for path in files:
            scan, found = remembered.get(str(path)), observe_stat(path)
            if scan is None or scan.stat != found:
                # Judged before it is read: a file that changed a moment ago could change again meanwhile
                # without its times showing it.
                is_old = is_settled(found)
                kept.pop(str(path), None)
                scan = scan_file(source, path, on_bytes=on_bytes)
                if is_old and scan.stat == found:
                    kept[str(path)] = scan
                unwritten += scan.stat.size
            scans.append((path, scan))
            if unwritten >= _KEPT_EVERY:
                _write(memory, kept)
                unwritten = 0
    finally:
        # Also after an error in a later file: it is corrected, and the others are not read again.
        if unwritten:
            _write(memory, kept)
    return Content(tuple(scans))


def _write(memory: Path, scans: Mapping[str, Scan]) -> None:
    if not scans:
        return
    # Only a memory: where it cannot be kept (a read-only volume, a full disk) the next start reads the files
    # again.
    values = {name: scan.to_json() for name, scan in scans.items()}
    with suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_json(memory, {"format": _FORMAT, "scans": values})
