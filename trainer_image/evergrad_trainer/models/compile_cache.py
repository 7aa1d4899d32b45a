"""Stores the compiled kernels of a run in one file per device type, next to the checkpoints.

A replacement process loads the kernels instead of compiling them again.
"""

import hashlib
import logging
from pathlib import Path
from typing import Final

import torch

from evergrad_trainer.base.durable import is_temporary, replace_durably

MAX_BYTES: Final = 512 * 2**20
"""Maximum bytes of a file. The kernels of a model that is compiled block by block have a few megabytes."""
MAX_FILES: Final = 4
"""Maximum number of files of a run. There is one file per device type and version of torch."""
_log = logging.getLogger(__name__)


def load_compiled(folder: Path, device: torch.device) -> int:
    """Load the kernels that this run has compiled for ``device``. Returns the number of bytes read.

    Returns 0 if there is no file or it cannot be read. In that case all kernels are compiled, which takes
    longer. A file that cannot be read is logged.
    """
    path = _locate(folder, device)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    except OSError as error:
        _log.warning("%s: compiled kernels cannot be read: %s", path, error.strerror)
        return 0
    # torch ignores entries that do not fit (another version or a truncated file), and compiles instead.
    return len(data) if torch.compiler.load_cache_artifacts(data) is not None else 0


def save_compiled(folder: Path, device: torch.device, *, loaded_bytes: int) -> int:
    """Save the kernels of this process for later processes. Returns the number of bytes in the file.

    Only one process of a run may call this. Readers see either the old or the new file. ``loaded_bytes``: the
    last result of this function or of :func:`load_compiled`; a file of the same size is not written again.
    Errors of the volume are logged; their only effect is that later processes compile again.
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
        # Only one process writes, so temporary files are left over from a killed process.
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
