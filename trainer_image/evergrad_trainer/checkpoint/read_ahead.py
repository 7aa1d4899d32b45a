"""Reads a run's newest checkpoint into memory while the process still imports packages."""

import contextlib
import json
from pathlib import Path

from evergrad_trainer.checkpoint.cached_files import SHARE_OF_MEMORY, HeldFiles
from evergrad_trainer.checkpoint.layout import LATEST, MANIFEST, parse_checkpoint_name


def read_ahead(checkpoints: Path, *, memory_bytes: int | None) -> HeldFiles | None:
    """Start to read the checkpoint that the start will most likely restore, and return its files.

    A checkpoint is not in the page cache, because it is written past it, so a restore would wait for the
    disk. The restore decides later which checkpoint is used, and compares the hash of each file with the
    manifest. ``memory_bytes`` is the memory that this process may use. Returns None if there is no checkpoint
    or not enough memory.
    """
    sizes = {}
    # Errors of the volume are ignored here, because the restore meets and reports them.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        name = json.loads((checkpoints / LATEST).read_bytes())["checkpoint"]
        if parse_checkpoint_name(name):
            sizes = {
                path: path.stat().st_size
                for path in (checkpoints / name).iterdir()
                if path.is_file() and path.name != MANIFEST
            }
    limit = 0 if memory_bytes is None else int(SHARE_OF_MEMORY * memory_bytes)
    if not sizes or sum(sizes.values()) > limit:
        return None
    held = HeldFiles(limit_bytes=limit)
    held.begin(sorted(sizes, key=lambda path: sizes[path], reverse=True))
    return held
