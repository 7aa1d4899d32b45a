"""``make check``: a minute before each commit. Style, types and the unit tests of what you have changed.

What has changed is the working tree compared with the last commit, or the last commit if the tree is clean.
``python tests/check.py --since main`` compares with another commit. Tests that import a changed module are
run, for at most ``--seconds``; ``make test`` runs all tests.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
BIN: Final = Path(sys.executable).parent
WORDS: Final = {
    r"\banew\b": "again",
    r"\b(?:nobody|somebody|whoever)\b": "the component or the person",
    r"\bbeside\b": "next to, or compared with",
    r"\b(?:go|goes|going|went) on\b": "continue, or resume",
    r"\b(?:is|are) no (?!longer|more|such)\w+": "is not a …",
    r"\b(?:tells|hears|wishes|stands)\b": "reports, receives, requests, is",
}
"""Words of the old dialect, as patterns, and what to write instead."""
_PROSE_FILES: Final = {".md", ".py", ".yaml", ".tpl", ".toml"}


def list_changed(since: str | None) -> tuple[str, list[str]]:
    """Return the commit to compare with, and the existing files that differ from it or are untracked."""
    untracked = _git("ls-files", "--others", "--exclude-standard")
    if since is None:
        since = "HEAD" if _git("diff", "--name-only", "HEAD") or untracked else "HEAD~1"
    found = {*_git("diff", "--name-only", "--diff-filter=d", since), *untracked}
    return since, sorted(found)


def choose_tests(changed: Sequence[str]) -> list[str]:
    """Return the unit tests that have changed or that import a changed module."""
    modules = {module for file in changed if (module := _name_module(file))}
    chosen = {
        file
        for file in changed
        if re.fullmatch(r"tests/unit/.*/?test_\w+\.py", file) is not None
    }
    if modules:
        patterns = [
            rf"\b{re.escape(module)}\b"
            rf"|\bfrom {re.escape(module.rpartition('.')[0])} import (?:\(\s*)?[\w\s,]*\b{module.rpartition('.')[2]}\b"
            for module in modules
        ]
        imports = re.compile("|".join(patterns))
        chosen |= {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / "tests/unit").rglob("test_*.py")
            if imports.search(path.read_text("utf-8"))
        }
    return sorted(chosen)


def find_prose(lines: Sequence[tuple[str, int, str]]) -> list[str]:
    """Return a warning for each added line with a word of the old dialect, with the suggested replacement."""
    return [
        f"{file}:{number}: {found[0]!r}: write {instead}"
        for file, number, text in lines
        for pattern, instead in WORDS.items()
        if (found := re.search(pattern, text, re.IGNORECASE))
    ]


def added_lines(since: str) -> list[tuple[str, int, str]]:
    """Return the added lines of text files since the commit ``since``, as (file, line number, text)."""
    found, file, number = [], "", 0
    for line in _git("diff", "--unified=0", "--no-color", since):
        if line.startswith("+++ "):
            file = line.removeprefix("+++ ").removeprefix("b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)", line):
            number = int(hunk[1])
        elif line.startswith("+"):
            if Path(file).suffix in _PROSE_FILES and file != "tests/check.py":
                found.append((file, number, line[1:]))
            number += 1
    return found


def main() -> int:
    """Run the checks, and return 1 if one fails. Prose warnings never fail."""
    parser = argparse.ArgumentParser(
        prog="make check", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--since", help="commit to compare with")
    parser.add_argument("--seconds", type=float, default=45.0, help="time for the tests")
    options = parser.parse_args()
    started = time.monotonic()
    since, changed = list_changed(options.since)
    sources = [file for file in changed if file.endswith(".py")]
    results = {}
    if sources:
        results["style"] = _run("ruff", "check", *sources)
        results["format"] = _run("ruff", "format", "--check", *sources)
        # The mypy daemon keeps its state between calls: the first call takes minutes, later calls seconds.
        results["types"] = _run("dmypy", "run", "--timeout", "7200")
    if tests := choose_tests(changed):
        print(f"tests of {len(tests)} files, for at most {options.seconds:g} s", flush=True)
        results["tests"] = _run(
            "pytest",
            "-q",
            "-x",
            "-n",
            "2",
            "--dist",
            "loadfile",
            f"--session-timeout={options.seconds:g}",
            *tests,
        )
    for warning in find_prose(added_lines(since)):
        print(f"prose: {warning}")
    failed = [name for name, is_good in results.items() if not is_good]
    print(
        f"{len(changed)} files changed since {since}; "
        f"{', '.join(failed) + ' failed' if failed else 'all good'}; {time.monotonic() - started:.0f} s"
    )
    return 1 if failed else 0


def _name_module(file: str) -> str:
    # Each package is in the folder of its distribution, for example operator/evergrad_operator.
    _, _, inner = file.partition("/")
    if re.fullmatch(r"evergrad\w*/.*\.py", inner) is None:
        return ""
    return inner.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _git(*arguments: str) -> list[str]:
    result = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return result.stdout.splitlines()


def _run(program: str, *arguments: str) -> bool:
    return (
        subprocess.run([BIN / program, *arguments], cwd=ROOT, check=False).returncode == 0
    )


if __name__ == "__main__":
    sys.exit(main())
