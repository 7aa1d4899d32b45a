"""Compiled kernels of a run, kept as one file beside its checkpoints: a process that replaces another takes
them from there instead of compiling again."""

import hashlib
import logging
from pathlib import Path
from typing import Final

import torch

from evergrad_trainer.base.durable import is_temporary, replace_durably

MAX_BYTES: Final = 512 * 2**20
"""Most bytes of one file. The kernels of a model compiled block by block are a few megabytes."""
MAX_FILES: Final = 4
"""Most files of a run: one for each kind of device and each version of torch that it has seen."""
_log = logging.getLogger(__name__)


def load_compiled(folder: Path, device: torch.device) -> int:
    """Give torch what was compiled for ``device`` in this run before; the bytes that were read.

    0 without a file, or with one that cannot be read: then everything is compiled, which takes longer and is
    logged.
    """
    path = _locate(folder, device)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    except OSError as error:
        _log.warning("%s: compiled kernels cannot be read: %s", path, error.strerror)
        return 0
    # Entries that do not fit (another version, a torn file) are passed over by torch, which then compiles.
    return len(data) if torch.compiler.load_cache_artifacts(data) is not None else 0


def save_compiled(folder: Path, device: torch.device, *, loaded_bytes: int) -> int:
    """Keep what this process has compiled, for those that come after it; the bytes that the file now has.

    One process of a run calls this, and readers see the old file or the new one. ``loaded_bytes``: what
    this or :func:`load_compiled` returned; a file of that size holds the same. Trouble of the volume is
    logged and costs nothing but the time to compile again.
    """
    found = torch.compiler.save_cache_artifacts()
    if found is None or len(found[0]) == loaded_bytes:
        return loaded_bytes
    data, path = found[0], _locate(folder, device)
    if len(data) > MAX_BYTES:
        _log.warning(
            "%s: %d bytes of compiled kernels are too many to keep", path, len(data)
        )
        return loaded_bytes
    try:
        folder.mkdir(exist_ok=True)
        replace_durably(path, data)
        files = sorted(
            folder.glob("*.bin"), key=lambda one: one.stat().st_mtime, reverse=True
        )
        # One process writes at a time: temporary files are what a kill has left.
        left = [one for one in folder.iterdir() if is_temporary(one.name, path.name)]
        for old in (*files[MAX_FILES:], *left):
            old.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s: compiled kernels cannot be kept: %s", path, error.strerror)
        return loaded_bytes
    return len(data)


def _locate(folder: Path, device: torch.device) -> Path:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    key = hashlib.sha256(f"{torch.__version__} {name}".encode()).hexdigest()[:16]
    return folder / f"{key}.bin"
