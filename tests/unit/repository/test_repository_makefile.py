"""`make help` lists every target, and verify is all that CI runs."""

import os
import re
import subprocess
from pathlib import Path

import pytest

TARGETS = {"install", "run", "test", "verify", "lint", "generate", "bench", "lock", "clean"}


def make(root: Path, *arguments: str) -> str:
    # Not a child of the make that runs these tests: its flags and job server are not ours.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MAKE") and name != "MFLAGS"
    }
    return subprocess.run(
        ["make", *arguments],
        cwd=root,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_help_lists_every_target_with_its_description(root: Path) -> None:
    shown = dict(re.findall(r"^  ([\w-]+) +(\S.*)$", make(root, "help"), re.MULTILINE))
    declared = re.search(r"^\.PHONY: (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert declared is not None
    assert set(shown) == set(declared[1].split())
    assert set(shown) >= TARGETS


def test_make_without_a_target_shows_the_help(root: Path) -> None:
    assert make(root) == make(root, "help")


@pytest.mark.parametrize(
    ("target", "steps"),
    [
        (
            "verify",
            [
                "evergrad_manifest.generate --check",
                "bed.chart",
                "bed.workflows",
                "FRONT='lint test-e2e'",
            ],
        ),
        ("lint", ["ruff check", "ruff format --check", "mypy", "lint-imports"]),
        ("test", [" test-e2e", "-m pytest"]),
    ],
)
def test_verify_checks_generated_files_lint_types_imports_and_tests_in_this_order(
    root: Path, target: str, steps: list[str]
) -> None:
    plan = make(root, "--dry-run", target)
    places = [plan.index(step) for step in steps]
    assert places == sorted(places)


def test_python_started_by_make_never_has_the_root_on_its_import_path(root: Path) -> None:
    assert re.search(
        r"^export PYTHONSAFEPATH := 1$", (root / "Makefile").read_text(), re.MULTILINE
    )


def test_ci_runs_verify_and_is_a_valid_script(root: Path) -> None:
    script = root / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "\nset -euo pipefail\n" in script.read_text()
    assert "\nmake verify\n" in script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)
