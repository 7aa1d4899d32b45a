"""The Python files of a program, with the modules beside them that they import, and one hash of their
content.

Imports are read from the text, so that what a program writes below its own folder makes no difference; one
that is made while it runs is not seen.
"""

import ast
import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_MAX_FILES = 1000
"""A folder may hold a whole library: what lies beyond this many files is not looked at."""
_MAX_BYTES = 16 * 2**20
"""Only the length of a longer file counts: no program that people write has so much text in a file."""


def find_sources(roots: Sequence[Path], folder: Path) -> dict[str, Path]:
    """The files ``roots`` and all in ``folder`` that they import, directly or not, by their path from
    ``folder``.

    At most ``_MAX_FILES`` of them.
    """
    # Modules may import each other, so that each is looked into once.
    waiting = list(roots)
    files: dict[str, Path] = {}
    while waiting and len(files) < _MAX_FILES:
        path = waiting.pop()
        name = os.path.relpath(path, folder)
        if name in files:
            continue
        files[name] = path
        # A shell script or a binary has no imports that could be followed.
        if path.suffix != ".py":
            continue
        # A file that cannot be read or parsed counts as one without imports: its own run reports that.
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Import):
                    for alias in node.names:
                        waiting += files_of_module(folder, alias.name.split("."))
                elif isinstance(node, ast.ImportFrom):
                    # Relative imports count from the file's own folder, one level up for each dot after the
                    # first.
                    start = (
                        path.parents[node.level - 1]
                        if 0 < node.level <= len(path.parents)
                        else folder
                    )
                    parts = node.module.split(".") if node.module else []
                    # A name may be a module of the package or something in it: only a file of it counts.
                    for alias in node.names:
                        waiting += files_of_module(start, [*parts, alias.name])
    return files


def hash_sources(roots: Sequence[Path], folder: Path) -> str:
    """A hash of the content of :func:`find_sources`."""
    digest = hashlib.sha256()
    for name, own in hash_each(roots, folder).items():
        # With the names: a file that is only renamed is another program.
        digest.update(f"{name}\0{own}\0".encode("utf-8", errors="replace"))
    return digest.hexdigest()[:16]


def hash_each(roots: Sequence[Path], folder: Path) -> dict[str, str]:
    """The hash of each of :func:`find_sources`, by its path from ``folder``, in the order of the paths."""
    # A word in the hash's place for a file that cannot be read: its worker fails on it with a better message.
    hashes: dict[str, str] = {}
    for name, path in sorted(find_sources(roots, folder).items()):
        hashes[name] = "unreadable"
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            hashes[name] = (
                f"{size} bytes"
                if size > _MAX_BYTES
                else hashlib.sha256(path.read_bytes()).hexdigest()
            )
    return hashes


def files_of_module(folder: Path, parts: Sequence[str]) -> list[Path]:
    """The files that importing ``parts`` from ``folder`` would run: each package on the way, and
    the module."""
    found = []
    for end in range(1, len(parts) + 1):
        # Each of them may be a module or a package; the one that is not there is dropped below.
        path = folder.joinpath(*parts[:end])
        found += [path.with_name(f"{path.name}.py"), path / "__init__.py"]
    return list(existing(found))


def existing(paths: Iterable[Path]) -> Iterator[Path]:
    """Those of ``paths`` that are files."""
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            if path.is_file():
                yield path
