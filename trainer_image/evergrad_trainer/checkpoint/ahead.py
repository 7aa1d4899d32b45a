"""Reads a run's newest checkpoint into the page cache while packages are still being imported."""

import contextlib
import json
import threading
from pathlib import Path

from evergrad_trainer.checkpoint.layout import LATEST, parse_checkpoint_name

SHARE_OF_MEMORY = 0.25
"""Largest share, of the memory a process may use, that a checkpoint may take: a larger one would push out its
own first part before anybody reads it."""
_BLOCK_BYTES = 16 * 2**20
"""Bytes of one read. Each takes the interpreter lock again, which the thread that imports holds for
milliseconds."""


def read_ahead(checkpoints: Path, *, memory_bytes: int | None) -> threading.Thread | None:
    """Begin to read what a start will most probably restore; the thread that does so.

    A checkpoint is written past the page cache, so that restoring it would wait for the disk. The
    bytes read here are thrown away: which checkpoint is restored is decided later, and validated. None where
    there is nothing to read, or not enough memory to keep it.
    """
    paths = _newest_files(checkpoints)
    try:
        size = sum(path.stat().st_size for path in paths)
    except OSError:
        return None
    if size == 0 or memory_bytes is None or size > SHARE_OF_MEMORY * memory_bytes:
        return None
    # A daemon: a volume that hangs must not keep the process from ending.
    thread = threading.Thread(target=_read, args=(paths,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _newest_files(checkpoints: Path) -> list[Path]:
    """Files of the checkpoint that ``latest`` names; none where the hint cannot be read."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        name = json.loads((checkpoints / LATEST).read_bytes())["checkpoint"]
        if parse_checkpoint_name(name):
            return [path for path in (checkpoints / name).iterdir() if path.is_file()]
    return []


def _read(paths: list[Path]) -> None:
    buffer = bytearray(_BLOCK_BYTES)
    # Trouble of the volume is met again, and reported, by the restore itself.
    with contextlib.suppress(OSError):
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
