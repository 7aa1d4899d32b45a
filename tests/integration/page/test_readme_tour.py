"""Executes the README's tour in order, like a new user, and checks the result of each command."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, SECONDS

from evergrad_cli.main import build_whole_parser


def read_tour() -> list[tuple[str, int]]:
    """The commands of the tour, each with the exit code in its comment (0 without a comment)."""
    section = (ROOT / "README.md").read_text("utf-8").split("## A tour", 1)[1]
    block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert block is not None
    found = []
    for line in block[1].splitlines():
        command, _, comment = line.partition("  #")
        code = re.search(r"exit (\d+)", comment)
        found.append((command.strip(), int(code[1]) if code else 0))
    return found


def test_each_evergrad_command_of_the_tour_is_valid() -> None:
    commands = [shlex.split(command) for command, _ in read_tour()]
    ours = [words[1:] for words in commands if words[0] == "evergrad"]
    assert len(ours) >= 8
    for words in ours:
        build_whole_parser().parse_args(words)


@pytest.mark.long
@pytest.mark.timeout(2 * SECONDS)
def test_the_readme_tour_works_in_order_and_each_command_ends_as_its_comment_states(
    tmp_path: Path,
) -> None:
    commands = read_tour()
    assert commands[0] == ("source .venv/bin/activate", 0)
    shutil.copytree(
        ROOT / "examples",
        tmp_path / "examples",
        ignore=shutil.ignore_patterns("documents.jsonl"),
    )
    # Return the effect of `activate` for the environment of the tests.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    output: dict[str, str] = {}
    for command, code in commands[1:]:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == code, (
            f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
        output[command] = done.stdout
    assert "Nothing to do" not in "".join(output.values())
    check_files_of_the_tour(tmp_path / "runs")


def check_files_of_the_tour(runs: Path) -> None:
    """The stopped run continued at its next step and is complete; exported weights and reports exist."""
    rows = [
        line
        for line in (runs / "tour/metrics.jsonl").read_text("utf-8").splitlines()
        if line
    ]
    assert [re.search(r'"step": ?(\d+)', row)[1] for row in rows] == [
        str(step) for step in range(1, 21)
    ]  # type: ignore[index]
    for name in ("tour", "slower", "elastic-lm"):
        assert (runs / name / "complete.json").is_file(), name
    assert (runs / "tour/report.html").stat().st_size > 10_000
    assert list((runs / "exported").glob("*.safetensors"))
