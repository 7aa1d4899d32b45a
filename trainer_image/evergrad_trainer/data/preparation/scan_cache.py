"""A memory of what a pass over a source found, so that an unchanged file is not read again at every start."""

import json
import os
from contextlib import suppress
from pathlib import Path

import xxhash

from evergrad_trainer.data.preparation.sources import (
    OnBytes,
    Scan,
    SourceFile,
    is_settled,
    observe_stat,
    scan_source,
)
from evergrad_trainer.durable import write_json

_FORMAT = 1


def scan_cached(source: SourceFile, directory: Path, *, on_bytes: OnBytes) -> Scan:
    """The scan of ``source``, remembered below ``directory`` while the file's size and times stay the same.

    Raises DataError.
    """
    key = json.dumps([os.path.abspath(source.path), source.type, source.dtype])
    name = xxhash.xxh3_64_hexdigest(key.encode("utf-8", errors="surrogateescape"))
    path = directory / f"{name}.json"
    remembered: Scan | None = None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["format"] == _FORMAT:
            remembered = Scan.from_json(value["scan"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no memory, a damaged one or another version's: the file is read again
    if remembered is not None and remembered.stat == observe_stat(source.path):
        return remembered
    scan = scan_source(source, on_bytes=on_bytes)
    # A file that changed a moment ago could change again without its times showing it.
    if is_settled(scan.stat):
        # Only a memory: where it cannot be kept (a read-only volume, a full disk) the next start reads the
        # file again.
        with suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            write_json(path, {"format": _FORMAT, "scan": scan.to_json()})
    return scan
