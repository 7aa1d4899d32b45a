"""Fragments in changes/ have names that towncrier collects, and the changelog has a place for them."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any


def read_settings(root: Path) -> dict[str, Any]:
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["towncrier"]
    assert isinstance(settings, dict)
    return settings


def test_every_fragment_has_a_name_that_towncrier_collects(root: Path) -> None:
    types = [one["directory"] for one in read_settings(root)["type"]]
    name = re.compile(rf"(\+[a-z0-9-]+|\d+)\.({'|'.join(types)})\.md")
    files = {file.name for file in (root / "changes").iterdir()} - {"README.md"}
    assert [file for file in sorted(files) if not name.fullmatch(file)] == []


def test_the_draft_has_every_fragment_under_its_type(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "changes"
    folder.mkdir()
    (folder / "+one.added.md").write_text("A field.\n")
    (folder / "+two.fixed.md").write_text("A save that was refused is made.\n")
    (folder / "README.md").write_text((root / "changes" / "README.md").read_text())
    (tmp_path / "pyproject.toml").write_text((root / "pyproject.toml").read_text())
    (tmp_path / "CHANGELOG.md").write_text((root / "CHANGELOG.md").read_text())
    draft = subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "9.9.9"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert re.match(
        r"## \[9\.9\.9\] - [0-9-]+\n\n### Added\n\n- A field\.\n\n"
        r"### Fixed\n\n- A save that was refused is made\.\n",
        draft,
    )


def test_the_changelog_has_one_place_for_new_sections_above_all_others(root: Path) -> None:
    text = (root / "CHANGELOG.md").read_text()
    mark = "<!-- towncrier release notes start -->\n"
    assert text.count(mark) == 1
    assert text.index(mark) < text.index("\n## ")
