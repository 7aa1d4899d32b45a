"""What must be equal in all nodes of a group, as texts by name: versions, configuration, device, and a script's own files."""

import ast
import contextlib
import hashlib
import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.identity import config_hash, settings_hash
from evergrad_manifest.script import Script, program_path, working_directory_of
from evergrad_trainer import __version__
from evergrad_trainer.distributed import count_accelerators

IMAGE_DIGEST_VARIABLE = "EVERGRAD_IMAGE_DIGEST"
"""Environment of a node: the digest of its image, where whoever starts it knows it."""
_MAX_FILES = 1000
_MAX_BYTES = 16 * 2**20
"""A longer file is told from another by its length alone."""
_CODE = (".py", ".sh", ".yaml", ".yml", ".toml")
"""Endings of arguments that are read as part of a script; what a script writes has other ones."""


def fingerprint(run: TrainingRun, base_directory: Path) -> dict[str, str]:
    """What this node has. ``base_directory``: what relative paths of the manifest are relative to."""
    wants_cpu = run.spec.training is not None and run.spec.training.runtime.device == "cpu"
    found = {
        "torch": str(torch.__version__),
        "evergrad": __version__,
        "configuration": config_hash(run),
        # A node whose accelerator has fallen off must not hold up a group of accelerators from its processor.
        "device": "cpu" if wants_cpu or not count_accelerators() else "cuda",
    }
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["transformers"] = importlib.metadata.version("transformers")
    if digest := os.environ.get(IMAGE_DIGEST_VARIABLE):
        found["image"] = digest
    if run.spec.training is not None:
        found["settings"] = settings_hash(run)
    if run.spec.script is not None:
        found["script"] = hash_script(run.spec.script, base_directory)
    return found


def hash_script(script: Script, base_directory: Path) -> str:
    """A hash of the files that the command names and of the modules beside them that they import, directly or not.

    Imports are read from the text, so that what a script writes below its own folder makes no difference; one that is made
    while it runs is not seen. At most ``_MAX_FILES`` files count.
    """
    folder, waiting = _find_roots(script, base_directory)
    files: dict[str, Path] = {}
    while waiting and len(files) < _MAX_FILES:
        path = waiting.pop()
        name = os.path.relpath(path, folder)
        if name not in files:
            files[name] = path
            waiting += _find_imported(path, folder)
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{_hash_file(files[name])}\0".encode("utf-8", errors="replace"))
    return digest.hexdigest()[:16]


def _find_roots(script: Script, base_directory: Path) -> tuple[Path, list[Path]]:
    """The folder whose modules count, and the files that the command names."""
    program, working = script.program, working_directory_of(script, base_directory)
    path = program_path(script.program, base_directory)
    roots = [working / word for word in program.arguments if word.endswith(_CODE)]
    if path is not None:
        return path.parent, [path, *_existing(roots)]
    if program.kind == "module":
        roots += _files_of_module(working, [*program.name.split("."), "__main__"])
    return working, list(_existing(roots))


def _find_imported(path: Path, folder: Path) -> list[Path]:
    """The files in ``folder`` that a Python file imports; none for one that cannot be read or parsed."""
    found: list[Path] = []
    if path.suffix != ".py":
        return found
    with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found += _files_of_module(folder, alias.name.split("."))
            elif isinstance(node, ast.ImportFrom):
                start = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else folder
                parts = node.module.split(".") if node.module else []
                for alias in node.names:
                    found += _files_of_module(start, [*parts, alias.name])
    return found


def _files_of_module(folder: Path, parts: list[str]) -> list[Path]:
    """The files that importing ``parts`` from ``folder`` would run: each package on the way, and the module."""
    found = []
    for end in range(1, len(parts) + 1):
        path = folder.joinpath(*parts[:end])
        found += [path.with_name(f"{path.name}.py"), path / "__init__.py"]
    return list(_existing(found))


def _existing(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            if path.is_file():
                yield path


def _hash_file(path: Path) -> str:
    """A hash of its content; a word for one that cannot be read, which its worker will say more of."""
    try:
        size = path.stat().st_size
        return f"{size} bytes" if size > _MAX_BYTES else hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "unreadable"
