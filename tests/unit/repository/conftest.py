"""Shared parts of the tests of the repository itself: its root, and the tracked or new files."""

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    return Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def tracked(root: Path) -> list[Path]:
    """Return every file that git tracks or would add, so that a problem is found before the commit."""
    command = [
        "git",
        "-c",
        "safe.directory=*",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    listed = subprocess.run(
        command, cwd=root, check=True, capture_output=True, text=True
    ).stdout
    files = [root / name for name in listed.split("\0") if name]
    return [file for file in files if file.is_file()]


@pytest.fixture(scope="session")
def texts(tracked: list[Path]) -> dict[Path, str]:
    """The tracked files that are text."""
    found = {}
    for file in tracked:
        data = file.read_bytes()
        if b"\0" not in data:
            found[file] = data.decode()
    return found
