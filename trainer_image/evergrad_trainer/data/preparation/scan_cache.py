"""Caches the scans of files, so that an unchanged file is not read again at every start."""

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
"""Bytes that are read before the cache is written. After a kill, at most about these bytes are read again."""


def scan_cached(
    source: SourceEntry, files: Sequence[Path], directory: Path, *, on_bytes: OnBytes
) -> Content:
    """Return the content of ``files``. Scans are cached in ``directory`` until a file's size or times change.

    Raises DataError if a file does not have the format in the manifest, or changes while it is read.
    """
    key = [os.path.abspath(source.path), source.type, source.dtype]
    if source.type in ("text", "parquet"):
        columns = "\0".join(source.row_fields) or source.text_field
        key.append(source.document if source.type == "text" else columns)
    text = json.dumps(key)
    name = xxhash.xxh3_64_hexdigest(text.encode("utf-8", errors="surrogateescape"))
    memory = directory / f"{name}.json"
    # If the cache is missing, damaged or of another version, the files are read again.
    remembered: dict[str, Scan] = {}
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        value = json.loads(memory.read_text(encoding="utf-8"))
        if value["format"] == _FORMAT:
            remembered = {
                file: Scan.from_json(scan) for file, scan in value["scans"].items()
            }
    # Keep the scans of all files, also of files that are not reached if this call is interrupted.
    kept = {name: remembered[name] for name in map(str, files) if name in remembered}
    scans: list[tuple[Path, Scan]] = []
    unwritten = 0
    try:
        for path in files:
            scan, found = remembered.get(str(path)), observe_stat(path)
            if scan is None or scan.stat != found:
                # Check the age before the file is read: a file that changed less than 2 s ago could change
                # again during the scan without a change of its times.
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
        # Write the cache after an error too: when the user has corrected that file, the other files are not
        # read again.
        if unwritten:
            _write(memory, kept)
    return Content(tuple(scans))


def _write(memory: Path, scans: Mapping[str, Scan]) -> None:
    if not scans:
        return
    # Ignore errors of the disk (a read-only volume, a full disk): the next start then reads the files again.
    values = {name: scan.to_json() for name, scan in scans.items()}
    with suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_json(memory, {"format": _FORMAT, "scans": values})
