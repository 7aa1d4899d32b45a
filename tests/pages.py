"""Reads the command blocks of the repository's pages, and runs them in a shell as a reader would."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 1800
"""Time limit for the commands of a page, in seconds."""
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read_blocks(page: str) -> list[str]:
    """Return all command blocks of a page, unchanged."""
    return BLOCK.findall((ROOT / page).read_text("utf-8"))


def read_commands(page: str, heading: str = "") -> list[str]:
    """Return the commands of the first block after ``heading``, each on one line and without its comment."""
    text = (ROOT / page).read_text("utf-8")
    found = BLOCK.search(text, text.index(heading))
    assert found is not None, f"{page}: no commands behind {heading!r}"
    lines = found[1].replace("\\\n", " ").splitlines()
    return [re.split(r"\s+# ", line)[0].strip() for line in lines if line.strip()]


def make_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a shell with the tests' virtual environment activated, plus ``variables``."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}


def play(
    script: str,
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    codes: tuple[int, ...] = (0,),
    seconds: float = SECONDS,
) -> str:
    """Run ``script`` in ``folder`` up to its first failure. Its exit code must be one of ``codes``.

    Returns its whole output. ``environment``: by default that of :func:`make_environment`.
    """
    done = subprocess.run(
        ["bash", "-c", f"set -e\n{script}"],
        cwd=folder,
        env=environment if environment is not None else make_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode in codes, f"{script}: {done.returncode}\n{done.stdout[-8000:]}"
    return done.stdout
