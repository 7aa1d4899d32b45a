"""Provenance of a run: provenance.json has one entry for each process, with command, versions, commit,
hardware and seed.

The entries contain no secrets and are safe to publish.
"""

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import Problem
from evergrad_trainer import __version__
from evergrad_trainer.base.errors import RunDirectoryError
from evergrad_trainer.base.machine import usable_cores
from evergrad_trainer.run.directory import (
    RunDirectory,
    dumps_strict,
    read_json_object,
    write_atomically,
)
from evergrad_trainer.run.redaction import hide_home, redact_command

FORMAT = 1
_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
_GIT_TIMEOUT_SECONDS = 5
COMMIT_VARIABLE = "GIT_COMMIT"
"""Environment variable with the commit if there is no checkout. An image's build or ``spec.template.env``
sets it."""


def record_process(
    directory: RunDirectory,
    *,
    run: TrainingRun,
    command: Sequence[str],
    world_size: int,
    generation: int,
    more: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Any]:
    """Append the entry of this process to ``provenance.json`` and return it. Called only on rank 0.

    ``command``: the words of the command line. ``more``: further parts of the entry by their names, such as
    hashes of a task's files; empty ones are left out. Raises RunDirectoryError when the file cannot be read
    or written.
    """
    seed = None if run.spec.training is None else run.spec.training.reproducibility.seed
    entry = describe_process(
        command=command, seed=seed, world_size=world_size, generation=generation
    )
    entry |= {name: dict(part) for name, part in (more or {}).items() if part}
    # Only rank 0 writes, so no entry is lost between reading and replacing the file.
    before = read_processes(directory)
    document = {"format": FORMAT, "processes": [*before, entry]}
    write_atomically(directory.provenance, dumps_strict(document, indent=2) + "\n")
    return entry


def read_processes(directory: RunDirectory) -> list[dict[str, Any]]:
    """Read the entries of all processes so far, oldest first; empty if the file does not exist.

    Raises RunDirectoryError if the file is damaged or cannot be read.
    """
    document = read_json_object(directory.provenance)
    if document is None:
        return []
    processes = document.get("processes")
    if not isinstance(processes, list) or not all(
        isinstance(entry, dict) for entry in processes
    ):
        problem = Problem(
            str(directory.provenance),
            "has no list of processes",
            "",
            "Restore the file, or move it away",
        )
        raise RunDirectoryError(problem)
    return processes


def describe_process(
    *, command: Sequence[str], seed: int | None, world_size: int, generation: int
) -> dict[str, Any]:
    """Describe this process in JSON values, without secrets, host name, user name or home directory.

    ``seed``: None for a script.
    """
    # Use the commit of the checkout that contains the working directory; without a checkout, as in a pod, the
    # environment variable. Ignore untracked files, because listing them takes seconds with large data.
    directory = Path.cwd()
    told = os.environ.get(COMMIT_VARIABLE, "").strip()
    git: dict[str, Any] | None = {"commit": told, "has_changes": None} if told else None
    commit = _ask_git(directory, "rev-parse", "--verify", "HEAD")
    if commit is not None:
        changes = _ask_git(directory, "status", "--porcelain", "--untracked-files=no")
        git = {"commit": commit, "has_changes": None if changes is None else bool(changes)}

    # Read versions from the package metadata, because importing the packages would take seconds.
    versions: dict[str, str | None] = {
        "evergrad": __version__,
        "python": platform.python_version(),
    }
    for library in _LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            versions[library] = None
    versions["platform"] = platform.platform()
    return {
        "time": time.time(),
        "generation": generation,
        "world_size": world_size,
        "command": shlex.join(redact_command(command)),
        "working_directory": hide_home(str(directory)),
        "seed": seed,
        "versions": versions,
        "git": git,
        "hardware": _hardware(),
    }


def _ask_git(directory: Path, *words: str) -> str | None:
    command = ["git", "-C", str(directory), *words]
    # Take no git locks, which would disturb other git commands in that checkout.
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        # git is missing or the disk is slow. Provenance must not delay the run.
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _hardware() -> dict[str, Any]:
    """Describe processor, memory and accelerators, as far as this system reports them."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)

    memory: int | None = None
    with suppress(ValueError, OSError, AttributeError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    # Use torch only if it is already imported, because importing it would take seconds.
    torch: Any = sys.modules.get("torch")
    count = (
        torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0
    )

    return {
        "cpu": model[1].strip() if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": memory,
        "gpus": [str(torch.cuda.get_device_name(index)) for index in range(count)],
    }
