"""The distributions build without a network, hold only their own package and ask only for what they
need."""

import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from raise_version import read_version

PACKAGES = {
    "common": "evergrad_common",
    "coordinator": "evergrad_coordinator",
    "manifest": "evergrad_manifest",
    "chaos": "evergrad_chaos",
    "cli": "evergrad_cli",
    "latent_edit": "evergrad_latent_edit",
    "operator": "evergrad_operator",
    "trainer_image": "evergrad_trainer",
}


@pytest.fixture(scope="module")
def wheel(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], zipfile.ZipFile]:
    """folder → the wheel built from a copy of it, so that no build product appears in the tree."""
    built: dict[str, Path] = {}

    def build(folder: str) -> zipfile.ZipFile:
        if folder not in built:
            place = tmp_path_factory.mktemp(folder)
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
            shutil.copytree(
                root / folder,
                place / "source",
                ignore=lambda path, names: ignored(
                    path, [n for n in names if Path(path, n).is_dir()]
                ),
            )
            command = [
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "--quiet",
                "--no-deps",
                "--no-build-isolation",
                "--no-index",
                "--wheel-dir",
                str(place),
            ]
            environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
            subprocess.run(
                [*command, str(place / "source")],
                check=True,
                capture_output=True,
                cwd=place,
                env=environment,
            )
            (built[folder],) = place.glob("*.whl")
        return zipfile.ZipFile(built[folder])

    return build


def requirements(archive: zipfile.ZipFile) -> list[str]:
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])


@pytest.mark.parametrize(("folder", "package"), PACKAGES.items())
def test_a_wheel_contains_only_its_package(
    folder: str, package: str, root: Path, wheel: Callable[[str], zipfile.ZipFile]
) -> None:
    with wheel(folder) as archive:
        names = set(archive.namelist())
    # The trainer's wheel also brings what scripts of users import.
    packages = {package, "evergrad"} if folder == "trainer_image" else {package}
    assert {
        name.partition("/")[0] for name in names if ".dist-info/" not in name
    } == packages
    for one in packages:
        sources = {
            path.relative_to(root / folder).as_posix()
            for path in (root / folder / one).rglob("*.py")
        }
        assert sources
        assert sources - names == set()
        assert f"{one}/py.typed" in names


def test_the_operator_wheel_requires_coordinator_and_manifest_and_never_torch(
    wheel: Callable[[str], zipfile.ZipFile],
) -> None:
    with wheel("operator") as archive:
        asked = requirements(archive)
    names = sorted(re.split(r"[^A-Za-z0-9-]", one)[0] for one in asked)
    assert names == [
        "aiohttp",
        "cryptography",
        "evergrad-common",
        "evergrad-coordinator",
        "evergrad-manifest",
        "kopf",
        "kubernetes",
        "prometheus-client",
    ]
    assert f"evergrad-coordinator=={read_version()}" in asked


def test_the_coordinator_wheel_requires_common_and_common_requires_nothing(
    wheel: Callable[[str], zipfile.ZipFile],
) -> None:
    with wheel("coordinator") as archive:
        assert requirements(archive) == [f"evergrad-common=={read_version()}"]
    with wheel("common") as archive:
        assert requirements(archive) == []


def test_the_trainer_wheel_has_its_data_files_and_its_commands(
    root: Path, wheel: Callable[[str], zipfile.ZipFile]
) -> None:
    package = root / "trainer_image"
    data = {
        path.relative_to(package).as_posix()
        for path in (package / "evergrad_trainer").rglob("*")
        if path.is_file()
    }
    data = {name for name in data if not name.endswith((".py", ".pyc", ".md"))}
    with wheel("trainer_image") as archive:
        assert data - set(archive.namelist()) == set()
        (entry_points,) = (
            name for name in archive.namelist() if name.endswith("entry_points.txt")
        )
        assert "run = evergrad_trainer.commands.run" in archive.read(entry_points).decode()


def test_the_cli_wheel_provides_the_command_and_never_requires_torch(
    wheel: Callable[[str], zipfile.ZipFile],
) -> None:
    with wheel("cli") as archive:
        (entry_points,) = (
            name for name in archive.namelist() if name.endswith("entry_points.txt")
        )
        assert "evergrad = evergrad_cli.main:main" in archive.read(entry_points).decode()
        asked = requirements(archive)
    assert [
        one for one in asked if one.startswith(("torch", "numpy", "transformers"))
    ] == []


def test_all_packages_have_the_same_version_and_licence(root: Path) -> None:
    projects = [
        tomllib.loads((root / folder / "pyproject.toml").read_text())["project"]
        for folder in PACKAGES
    ]
    assert len({project["version"] for project in projects}) == 1
    assert {project["license"] for project in projects} == {"Apache-2.0"}
    assert {project["requires-python"] for project in projects} == {">=3.11"}
