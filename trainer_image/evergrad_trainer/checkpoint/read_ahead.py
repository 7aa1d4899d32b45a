"""Reads a run's newest checkpoint into memory while packages are still being imported."""

import contextlib
import json
from pathlib import Path

from evergrad_trainer.checkpoint.cached_files import SHARE_OF_MEMORY, HeldFiles
from evergrad_trainer.checkpoint.layout import LATEST, MANIFEST, parse_checkpoint_name


def read_ahead(checkpoints: Path, *, memory_bytes: int | None) -> HeldFiles | None:
    """Begin to read what a start will most probably restore; where its files will be.

    A checkpoint is written past the page cache, so that restoring it would wait for the disk. Which
    checkpoint is restored is decided later, and nothing that is read here is used before its hash was
    compared with the manifest. None where there is nothing to read, or not enough memory to keep it.
    """
    sizes = {}
    # Trouble of the volume is met again, and reported, by the restore itself.
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
