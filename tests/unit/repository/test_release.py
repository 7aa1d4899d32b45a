"""`make release` without images: its files, their checks, and that a second release is identical."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import play, read_commands

from bed import toolbox
from bed.product_images import version

VERSION = version()
EPOCH = 1_700_000_000
WHEELS = {
    f"evergrad_{name}-{VERSION}-py3-none-any.whl"
    for name in (
        "chaos",
        "cli",
        "common",
        "coordinator",
        "latent_edit",
        "manifest",
        "operator",
        "trainer",
    )
}
BILLS = {f"evergrad-{name}-{VERSION}.cdx.json" for name in ("operator", "trainer")}
CHART = f"evergrad-{VERSION}.tgz"
REGISTRY = "registry.example.com/team"
SOURCE = "https://git.example.com/team/evergrad"
Release = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def release(root: Path) -> Release:
    def run(
        *arguments: object, umask: int = 0o022, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        paths = [
            str(root / name)
            for name in ("tests", "tools", "tools/requirements", "tools/release")
        ]
        return subprocess.run(
            [sys.executable, root / "tools/release/make_release.py", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
            umask=umask,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def made(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if toolbox.missing(("helm",)):
        pytest.skip("helm is not built. make chart-lint builds it, with Go.")
    folder = tmp_path_factory.mktemp("release") / "dist"
    done = release(
        *("--without-images", "--into", folder, "--registry", REGISTRY, "--source", SOURCE),
        SOURCE_DATE_EPOCH=str(EPOCH),
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_a_release_contains_wheels_chart_sboms_and_valid_checksums(made: Path) -> None:
    assert {file.name for file in made.iterdir()} == {*WHEELS, *BILLS, CHART, "SHA256SUMS"}
    lines = (made / "SHA256SUMS").read_text().splitlines()
    told = {name: digest for digest, name in (line.split("  ") for line in lines)}
    assert told == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in made.iterdir()
        if file.name != "SHA256SUMS"
    }
    for name in WHEELS:
        with zipfile.ZipFile(made / name) as archive:
            assert archive.testzip() is None


@pytest.mark.slow
def test_the_commands_of_the_page_make_a_release_with_valid_checksums(made: Path) -> None:
    _, make, check = read_commands("docs/project/releasing.md")
    # The fixture has run this command, with options for another folder and the places of publication.
    assert make == "make release RELEASE=--without-images"
    said = play(check, made.parent)
    assert said.count(": OK\n") == len(list(made.iterdir())) - 1


@pytest.mark.slow
def test_the_same_commit_gives_the_same_bytes_with_another_umask_and_time_zone(
    made: Path, release: Release, tmp_path: Path
) -> None:
    done = release(
        *("--without-images", "--into", tmp_path / "dist"),
        *("--registry", REGISTRY, "--source", SOURCE),
        umask=0o077,
        SOURCE_DATE_EPOCH=str(EPOCH),
        TZ="Pacific/Kiritimati",
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "dist/SHA256SUMS").read_text() == (made / "SHA256SUMS").read_text()


@pytest.mark.slow
def test_the_packed_chart_names_registry_and_sources_and_excludes_its_tests(
    made: Path,
) -> None:
    with tarfile.open(made / CHART) as archive:
        names = archive.getnames()
        files = {
            name: archive.extractfile(f"evergrad/{name}").read().decode()  # type: ignore[union-attr]
            for name in ("Chart.yaml", "values.yaml", "README.md")
        }
        assert {member.mtime for member in archive.getmembers()} == {EPOCH}
    assert "evergrad/values.schema.json" in names
    assert "evergrad/templates/tests/installation.yaml" in names
    assert [name for name in names if name.startswith("evergrad/tests/")] == []
    assert "localhost/" not in "".join(files.values())
    values = yaml.safe_load(files["values.yaml"])
    assert values["image"]["repository"] == f"{REGISTRY}/evergrad-operator"
    # An alert links to the runbook of this version: a user of Alertmanager has no other starting point.
    runbooks = f"{SOURCE}/blob/v{VERSION}/docs/runbooks"
    assert values["metrics"]["rules"]["runbooks"] == runbooks
    assert f"| `metrics.rules.runbooks` | `{runbooks}` |" in files["README.md"]
    described = yaml.safe_load(files["Chart.yaml"])
    assert described["sources"] == [SOURCE]
    assert (
        f"{REGISTRY}/evergrad-trainer:{VERSION}"
        in (described["annotations"]["artifacthub.io/images"])
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("image", "lock", "asks"),
    [("operator", "operator.txt", "kopf"), ("trainer", "trainer.txt", "transformers")],
)
def test_an_sbom_lists_every_locked_release_with_its_hashes_and_dependents(
    made: Path, root: Path, image: str, lock: str, asks: str
) -> None:
    bill = json.loads((made / f"evergrad-{image}-{VERSION}.cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    components: dict[str, Any] = {one["bom-ref"]: one for one in bill["components"]}
    text = (root / "tools/requirements" / lock).read_text()
    pinned = {
        line.split(" ")[0] for line in text.splitlines() if "==" in line.split(" ")[0]
    }
    assert pinned and pinned <= set(components)
    for name in pinned:
        hashes = {one["content"] for one in components[name]["hashes"]}
        assert hashes and all(f"sha256:{one}" in text for one in hashes)
    needs = {one["ref"]: one.get("dependsOn", []) for one in bill["dependencies"]}
    own = f"evergrad-{image}=={VERSION}"
    assert own in needs[f"evergrad-{image}"]
    assert [one for one in needs[own] if one.startswith(f"{asks}==")]
    # Whose licence is unknown is not installed here: packages of other platforms, CUDA, another Python's.
    known = [one for one in components.values() if one.get("licenses")]
    assert len(known) > len(components) / 2
    assert components[own]["licenses"] == [{"license": {"id": "Apache-2.0"}}]


def test_a_folder_with_other_files_is_never_overwritten(
    release: Release, tmp_path: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = release("--without-images", "--into", tmp_path)
    assert done.returncode == 1
    assert "holds something that is no release. Name another folder" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_tag_of_another_version_is_refused(release: Release, tmp_path: Path) -> None:
    done = release("--without-images", "--into", tmp_path / "dist", "--tag", "v9.9.9")
    assert done.returncode == 1
    assert f"--tag v9.9.9: the tree is of version {VERSION}. " in done.stderr
    assert not (tmp_path / "dist").exists()
