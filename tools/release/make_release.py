"""Writes all parts of a release to one folder: wheels, chart, images, bills of materials and checksums.

`make release` runs it. It publishes nothing. The same commit produces the same bytes: the files have the time
of the commit or of SOURCE_DATE_EPOCH. Images are the exception, because their builds install with pip.
"""

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import sbom
import yaml

from bed import chart, images, product_images
from bed.places import REPOSITORY
from bed.shell import BedError, git, run

FOLDERS = tuple(sorted(path.parent.name for path in REPOSITORY.glob("*/pyproject.toml")))
SUMS = "SHA256SUMS"
LOCAL = "localhost/evergrad-"
"""Prefix of image names in the tree. A release replaces it with its registry."""


@dataclass(frozen=True)
class Release:
    """The parameters of a release."""

    version: str
    seconds: int  # of the commit, since 1970
    folder: Path
    registry: str | None
    source: str | None
    has_images: bool


def build_wheels(release: Release) -> None:
    """Build the wheels of all packages from copies without build products and with normalized file modes."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
    with tempfile.TemporaryDirectory() as scratch:
        for name in FOLDERS:
            shutil.copytree(REPOSITORY / name, Path(scratch, name), ignore=ignored)
        for file in Path(scratch).rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)
        run(
            [
                *(
                    sys.executable,
                    "-m",
                    "pip",
                    "wheel",
                    "--quiet",
                    "--no-deps",
                    "--no-index",
                ),
                *("--no-build-isolation", "--disable-pip-version-check"),
                *(
                    "--wheel-dir",
                    release.folder,
                    *(Path(scratch, name) for name in FOLDERS),
                ),
            ],
            directory=Path(scratch),
            environment={"SOURCE_DATE_EPOCH": str(release.seconds)},
        )


def build_chart(release: Release) -> None:
    """Build the packed chart. It contains the registry and the source URL if they are given."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "evergrad")
        shutil.copytree(chart.CHART, copy)
        if release.registry:
            for name in ("Chart.yaml", "values.yaml", "README.md"):
                file = copy / name
                file.write_text(
                    file.read_text("utf-8").replace(LOCAL, f"{release.registry}/evergrad-"),
                    "utf-8",
                )
        if release.source:
            name_source(copy / "Chart.yaml", release)
            name_runbooks(copy, release)
        chart.helm("package", copy, "--destination", scratch)
        (packed,) = Path(scratch).glob("*.tgz")
        repack(packed, release.folder / packed.name, seconds=release.seconds)


def name_source(file: Path, release: Release) -> None:
    """Write home, sources and links to Chart.yaml. They depend on the place of publication."""
    described = yaml.safe_load(file.read_text("utf-8"))
    described |= {"home": release.source, "sources": [release.source]}
    described["annotations"]["artifacthub.io/links"] = yaml.safe_dump(
        [
            {
                "name": "documentation",
                "url": f"{release.source}/blob/v{release.version}/docs/README.md",
            },
            {"name": "support", "url": f"{release.source}/issues"},
        ]
    )
    file.write_text(yaml.safe_dump(described, sort_keys=False, allow_unicode=True), "utf-8")


def name_runbooks(chart_copy: Path, release: Release) -> None:
    """Set the default of the alerts' runbook links to the pages of this version.

    Raises BedError if a file does not contain the default, because its links would be broken silently.
    """
    url = f"{release.source}/blob/v{release.version}/docs/runbooks"
    for name, before, after in (
        ("values.yaml", "runbooks: docs/runbooks ", f"runbooks: {url} "),
        ("README.md", "`docs/runbooks`", f"`{url}`"),
    ):
        file = chart_copy / name
        text = file.read_text("utf-8")
        if text.count(before) != 1:
            raise BedError(f"{file}: does not have {before!r} once; mend name_runbooks.")
        file.write_text(text.replace(before, after), "utf-8")


def repack(packed: Path, target: Path, *, seconds: int) -> None:
    """Repack an archive with a fixed time, owner and order, because `helm package` uses current ones."""
    with (
        tarfile.open(packed) as old,
        target.open("wb") as file,
        gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=seconds) as packer,
        tarfile.open(fileobj=packer, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda one: one.name):
            plain = tarfile.TarInfo(member.name)
            plain.size, plain.mtime, plain.mode = member.size, seconds, 0o644
            new.addfile(plain, old.extractfile(member))


def build_images(release: Release) -> str:
    """Write both images as OCI archives, and return the torch build of the trainer image."""
    chosen = product_images.settings()
    product_images.ensure(is_loaded=False, revision=product_images.find_revision())
    for target in product_images.TARGETS:
        name = product_images.name_of(target, release.version)
        file = release.folder / f"evergrad-{target}-{release.version}.oci.tar"
        reference = f"{release.registry or 'localhost'}/evergrad-{target}:{release.version}"
        run(
            [
                *(
                    "skopeo",
                    "--insecure-policy",
                    "copy",
                    "--quiet",
                    f"containers-storage:{name}",
                ),
                f"oci-archive:{file}:{reference}",
            ],
            environment=images.environment(),
            timeout=1800,
        )
    return chosen.torch


def write_bills(release: Release, *, torch: str) -> None:
    """Write a bill of materials for each image."""
    locks = {
        "operator": ("operator.txt",),
        "trainer": ("trainer.txt", "torch-cpu.txt" if torch == "cpu" else "torch.txt"),
    }
    for target, packages in product_images.PACKAGES.items():
        text = sbom.describe_image(
            REPOSITORY,
            image=f"evergrad-{target}",
            packages=packages,
            locks=locks[target],
            seconds=release.seconds,
        )
        file = release.folder / f"evergrad-{target}-{release.version}.cdx.json"
        file.write_text(text, "utf-8")


def write_sums(folder: Path) -> list[str]:
    """Write SHA256SUMS for `sha256sum --check`, and return its lines."""
    lines = []
    for file in sorted(folder.iterdir()):
        with file.open("rb") as opened:
            lines.append(
                f"{hashlib.file_digest(opened, 'sha256').hexdigest()}  {file.name}"
            )
    (folder / SUMS).write_text("".join(f"{line}\n" for line in lines))
    return lines


def make(release: Release) -> list[str]:
    """Make the release, and return its checksum lines. Raises BedError if a part cannot be made."""
    build_wheels(release)
    build_chart(release)
    torch = build_images(release) if release.has_images else "cuda"
    write_bills(release, torch=torch)
    return write_sums(release.folder)


def find_problems(version: str, *, tag: str | None, folder: Path) -> Iterator[str]:
    """Yield the reasons why the release cannot be made, one sentence each."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SUMS).exists():
        yield f"{folder}: holds something that is no release. Name another folder with --into."
    described = yaml.safe_load((chart.CHART / "Chart.yaml").read_text("utf-8"))
    if {described["version"], described["appVersion"]} != {version}:
        yield f"charts/evergrad/Chart.yaml: is not of the packages' version {version}. Make them agree."
    if tag is None:
        return
    if tag != f"v{version}":
        yield f"--tag {tag}: the tree is of version {version}. Tag it v{version}, or raise the version."
    if git("status", "--porcelain", directory=REPOSITORY):
        yield f"--tag {tag}: the tree differs from its commit. Commit or remove the changes."


def find_seconds() -> int:
    """Return the time of all files: SOURCE_DATE_EPOCH, or else the time of the commit."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return int(given or git("log", "-1", "--format=%ct", directory=REPOSITORY))


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 after printing the written files, or 1 after printing why a part cannot be made."""
    parser = argparse.ArgumentParser(
        "tools/release/make_release.py", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--into",
        type=Path,
        default=REPOSITORY / "dist",
        help="the folder, written anew (default: dist)",
    )
    parser.add_argument(
        "--without-images",
        action="store_true",
        help="leave the image archives out, which take root and minutes",
    )
    parser.add_argument(
        "--registry",
        metavar="HOST/PATH",
        help="where images will be: put into the chart in localhost's place",
    )
    parser.add_argument(
        "--source", metavar="URL", help="where the sources are: put into Chart.yaml"
    )
    parser.add_argument("--tag", help="refuse where the tree is not what this tag says")
    options = parser.parse_args(arguments)
    version = product_images.version()
    problems = list(find_problems(version, tag=options.tag, folder=options.into))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        return 1

    options.into.parent.mkdir(parents=True, exist_ok=True)
    os.umask(0o022)  # The wheels contain the modes of generated files.
    try:
        # Write next to the target, so that a failed release leaves the previous release unchanged.
        with tempfile.TemporaryDirectory(
            dir=options.into.parent, prefix=".release-"
        ) as scratch:
            folder = Path(scratch, "release")
            folder.mkdir()
            lines = make(
                Release(
                    version=version,
                    seconds=find_seconds(),
                    folder=folder,
                    registry=options.registry,
                    source=options.source,
                    has_images=not options.without_images,
                )
            )
            shutil.rmtree(options.into, ignore_errors=True)
            folder.rename(options.into)
    except (BedError, subprocess.SubprocessError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join([f"{options.into}:", *lines]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
