"""The version: every place that names it agrees with the others, and one command raises all of them."""

import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import raise_version as version


def test_every_place_has_the_same_version(root: Path) -> None:
    found = list(version.find_mentions())
    assert {one.version for one in found} == {version.read_version()}, found


def test_each_package_requires_the_other_packages_in_its_own_version(
    root: Path,
) -> None:
    packages = sorted(root.glob("*/pyproject.toml"))
    mentions = list(version.find_mentions())
    for file in packages:
        project = tomllib.loads(file.read_text("utf-8"))["project"]
        optional = project.get("optional-dependencies", {}).values()
        own = [
            one
            for one in [*project["dependencies"], *chain.from_iterable(optional)]
            if one.startswith("evergrad-")
        ]
        assert all("==" in one for one in own), file
        name = file.relative_to(root).as_posix()
        assert sum(one.file == name for one in mentions) == 1 + len(own)


@pytest.mark.parametrize("place", version.PLACES, ids=lambda place: place.files)
def test_each_place_has_a_file_with_the_version(place: version.Place, root: Path) -> None:
    texts = [(root / name).read_text("utf-8") for name in version.list_files(place)]
    assert any(re.search(place.pattern, text, re.MULTILINE) for text in texts)


def test_no_other_file_contains_the_version_of_a_package_or_an_image(
    texts: dict[Path, str], root: Path
) -> None:
    now = re.escape(version.read_version())
    named = re.compile(rf'evergrad[a-z_-]*(?:\[[a-z,-]+\])?(?:==|:|-){now}\b|"{now}"$')
    known = {one.file for one in version.find_mentions()} | {version.RECORDED}
    others = {
        file.relative_to(root).as_posix()
        for file, text in texts.items()
        if any(named.search(line) for line in text.splitlines() if "evergrad" in line)
    }
    # Records of measurements name the version that was measured; `make generate` writes the pages' documents.
    allowed = re.compile("/results/|^examples/quickstart/documents.yaml$")
    assert {name for name in others - known if not allowed.search(name)} == set()


def test_one_command_raises_the_version_in_every_place(root: Path, tmp_path: Path) -> None:
    for name in {one.file for one in version.find_mentions()}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    before = list(version.find_mentions(tmp_path))
    changed = version.write_version("9.10.11", tmp_path)
    after = list(version.find_mentions(tmp_path))
    assert set(changed) == {one.file for one in before}
    assert [(one.file, one.line) for one in after] == [
        (one.file, one.line) for one in before
    ]
    assert {one.version for one in after} == {"9.10.11"}
    assert version.write_version("9.10.11", tmp_path) == []


def test_a_malformed_version_is_refused_and_nothing_is_written(root: Path) -> None:
    program = root / "tools/release/raise_version.py"
    done = subprocess.run(
        [sys.executable, program, "0.3"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "VERSION=0.3: is not of the form 0.3.0" in done.stderr
