"""Pages of the repository as a reader plays them: their blocks of commands, and a shell that runs these."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 1800
"""Longest time that the commands of a page may take."""
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read_blocks(page: str) -> list[str]:
    """All blocks of commands of a page, as they are written."""
    return BLOCK.findall((ROOT / page).read_text("utf-8"))


def read_commands(page: str, heading: str = "") -> list[str]:
    """The commands of the first block behind ``heading``, each in one line and without its comment."""
    text = (ROOT / page).read_text("utf-8")
    found = BLOCK.search(text, text.index(heading))
    assert found is not None, f"{page}: no commands behind {heading!r}"
    lines = found[1].replace("\\\n", " ").splitlines()
    return [re.split(r"\s+# ", line)[0].strip() for line in lines if line.strip()]


def make_environment(**variables: str) -> dict[str, str]:
    """The environment of a shell in which the one of the tests is activated, with ``variables``."""
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
    """Run ``script`` in ``folder`` up to its first failure; it has to end with one of ``codes``.

    Returns all that it prints. ``environment``: that of :func:`make_environment`, if none is given.
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
