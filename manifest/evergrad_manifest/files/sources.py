"""Finds the Python files of a program, with the modules next to them that they import, and hashes their
content.

Imports are read from the source text, so files that a program writes into its own folder do not change the
result. An import that is made dynamically is not found.
"""

import ast
import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_MAX_FILES = 1000
"""Most files. A folder may contain a whole library, and further files are ignored."""
_MAX_BYTES = 16 * 2**20
"""Most bytes that are read. For a longer file, only the length counts, because no handwritten source file is
that long."""


def find_sources(roots: Sequence[Path], folder: Path) -> dict[str, Path]:
    """Return the files ``roots`` and all files in ``folder`` that they import, directly or not, by path from
    ``folder``.

    At most ``_MAX_FILES`` files.
    """
    # Read each module once, because modules may import each other.
    waiting = list(roots)
    files: dict[str, Path] = {}
    while waiting and len(files) < _MAX_FILES:
        path = waiting.pop()
        name = os.path.relpath(path, folder)
        if name in files:
            continue
        files[name] = path
        # A shell script or a binary has no imports that can be followed.
        if path.suffix != ".py":
            continue
        # A file that cannot be read or parsed counts as a file without imports: running it reports the error.
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Import):
                    for alias in node.names:
                        waiting += files_of_module(folder, alias.name.split("."))
                elif isinstance(node, ast.ImportFrom):
                    # Relative imports begin in the file's own folder, one level up for each dot after the
                    # first.
                    start = (
                        path.parents[node.level - 1]
                        if 0 < node.level <= len(path.parents)
                        else folder
                    )
                    parts = node.module.split(".") if node.module else []
                    # A name may be a module of the package or an attribute in it. It counts only if it is a
                    # file.
                    for alias in node.names:
                        waiting += files_of_module(start, [*parts, alias.name])
    return files


def hash_sources(roots: Sequence[Path], folder: Path) -> str:
    """Return a hash of the content of all files of :func:`find_sources`."""
    digest = hashlib.sha256()
    for name, own in hash_each(roots, folder).items():
        # Include the names, because a program with a renamed file is another program.
        digest.update(f"{name}\0{own}\0".encode("utf-8", errors="replace"))
    return digest.hexdigest()[:16]


def hash_each(roots: Sequence[Path], folder: Path) -> dict[str, str]:
    """Return the hash of each file of :func:`find_sources`, by its path from ``folder``, in the order of the
    paths."""
    # If a file cannot be read, use a word instead of its hash: its worker fails on it with a better message.
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
    """Return the files that an import of ``parts`` from ``folder`` would run: each package on the way, and
    the module."""
    found = []
    for end in range(1, len(parts) + 1):
        # Each part may be a module or a package. The path that does not exist is dropped below.
        path = folder.joinpath(*parts[:end])
        found += [path.with_name(f"{path.name}.py"), path / "__init__.py"]
    return list(existing(found))


def existing(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the ``paths`` that are files."""
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            if path.is_file():
                yield path
