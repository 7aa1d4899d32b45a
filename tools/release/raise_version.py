"""The version of Evergrad: written in many files, decided in one, raised by one command.

``make version`` prints the version and the places that name another. ``make version VERSION=0.3.0`` writes
that version into every place. The version is the one of ``common/pyproject.toml``, on which every package
depends: a package, an image and a chart cannot read a file outside their own folder when they are built.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCE: Final = "common/pyproject.toml"
NUMBER: Final = r"[0-9]+\.[0-9]+\.[0-9]+"
"""The format that Python packages (PEP 440), charts (SemVer) and image tags all accept."""
IMAGE: Final = rf"evergrad-(?:operator|trainer):({NUMBER})\b"
RECORDED: Final = "docs/start/walkthrough.md"
"""Output of a recorded session, which names the version that ran."""


@dataclass(frozen=True)
class Place:
    """Files that contain the version, and the pattern whose only group is the version."""

    files: str  # a glob, relative to the root; it may match files without the version
    pattern: str


PLACES: Final = (
    Place("*/pyproject.toml", rf'^version = "({NUMBER})"$'),
    # A package requires exactly its own version of the others.
    Place("*/pyproject.toml", rf'"evergrad-[a-z-]+(?:\[[a-z,-]+\])?==({NUMBER})"'),
    Place("*/evergrad*/__init__.py", rf'^__version__ = "({NUMBER})"$'),
    Place("Dockerfile", rf"^ARG VERSION=({NUMBER})$"),
    Place("charts/evergrad/Chart.yaml", rf"^(?:version|appVersion): ({NUMBER})$"),
    Place("charts/evergrad/Chart.yaml", IMAGE),
    Place("examples/gitops/*/operator.yaml", rf"(?:targetRevision|tag): v({NUMBER})\b"),
    Place("tests/unit/repository/commands.csv", IMAGE),
    Place("docs/**/*.md", IMAGE),
    Place("docs/start/installing.md", rf"^\| `VERSION` \| `({NUMBER})` \|"),
)


@dataclass(frozen=True)
class Mention:
    """One place that contains a version."""

    file: str
    line: int
    version: str


def read_version(root: Path = ROOT) -> str:
    """Return the authoritative version. Raises ValueError if its file contains none."""
    found = re.search(PLACES[0].pattern, (root / SOURCE).read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f'{SOURCE}: has no line such as version = "0.3.0". Add one.')
    return found[1]


def list_files(place: Place, root: Path = ROOT) -> list[str]:
    """Return the files of a place, relative to the root, without the recorded page."""
    found = (file.relative_to(root).as_posix() for file in root.glob(place.files))
    return sorted(name for name in found if name != RECORDED)


def find_mentions(root: Path = ROOT) -> Iterator[Mention]:
    """Yield every version that a place contains."""
    for place in PLACES:
        for name in list_files(place, root):
            text = (root / name).read_text("utf-8")
            for found in re.finditer(place.pattern, text, re.MULTILINE):
                line = text.count("\n", 0, found.start(1)) + 1
                yield Mention(name, line, found[1])


def replace_version(text: str, pattern: str, version: str) -> str:
    """Return the text with another version in the group of each match."""

    def replace(found: re.Match[str]) -> str:
        start, end = (one - found.start() for one in found.span(1))
        return found[0][:start] + version + found[0][end:]

    return re.sub(pattern, replace, text, flags=re.MULTILINE)


def write_version(version: str, root: Path = ROOT) -> list[str]:
    """Write the version into every place, and return the files that have changed."""
    changed = set()
    for place in PLACES:
        for name in list_files(place, root):
            before = (root / name).read_text("utf-8")
            after = replace_version(before, place.pattern, version)
            if after != before:
                (root / name).write_text(after, "utf-8")
                changed.add(name)
    return sorted(changed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print or write the version. Return 1 if the places differ or the new version has another format."""
    parser = argparse.ArgumentParser("make version", description=__doc__.partition("\n")[0])
    parser.add_argument("version", nargs="?", help="the new version, for example 0.3.0")
    new = parser.parse_args(arguments).version
    if new is None:
        version = read_version()
        others = [one for one in find_mentions() if one.version != version]
        print(version)
        for one in others:
            print(f"{one.file}:{one.line}: names {one.version}", file=sys.stderr)
        return 1 if others else 0

    if re.fullmatch(NUMBER, new) is None:
        print(
            f"VERSION={new}: is not of the form 0.3.0; packages, chart and images must be able to "
            "have the same version. Write three numbers with dots.",
            file=sys.stderr,
        )
        return 1
    for name in write_version(new):
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
