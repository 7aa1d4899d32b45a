"""Builds Evergrad's two images from the repository's Dockerfile if they have changed, tags them, and loads
them into the bed.

    python -m bed.product_images [operator] [trainer]     `make images`

The tag of an image is a digest of its sources: localhost/evergrad-TARGET:CONTENT. The image also has the tags
`dev` and the version. The dependencies are a separate layer below the code, so a change of code rebuilds only
the code layer. The commit is only in the image's configuration, so a new commit rebuilds no layer.
"""

import argparse
import fcntl
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bed import images, loading
from bed.places import REPOSITORY
from bed.shell import BedError, git, run

BASES = {
    "operator": ("tools/requirements/operator.txt",),
    "trainer": ("tools/requirements/trainer.txt", "tools/requirements/torch*.txt"),
}
PACKAGES = {
    "operator": ("common", "coordinator", "manifest", "operator"),
    "trainer": ("common", "coordinator", "manifest", "cli", "trainer_image", "latent_edit"),
}
TARGETS = tuple(PACKAGES)
REVISION_LABEL = "org.opencontainers.image.revision"
NO_REVISION = "unknown"


@dataclass(frozen=True)
class Settings:
    """The settings that determine the images, in addition to the tree."""

    base: str
    torch: str  # cpu or cuda
    wheels: Path | None


def name_of(target: str, tag: str = "dev") -> str:
    """Return the image's name, for example localhost/evergrad-trainer:dev."""
    return f"localhost/evergrad-{target}:{tag}"


def version() -> str:
    """Return the version of the packages in the tree."""
    found = re.search(
        r'^version = "(.+)"$',
        (REPOSITORY / "trainer_image/pyproject.toml").read_text(),
        re.MULTILINE,
    )
    if found is None:
        raise BedError("trainer_image/pyproject.toml: names no version.")
    return found[1]


def settings() -> Settings:
    """Return the settings from the environment: BASE_IMAGE, TORCH_WHEELS.

    Without a folder of wheels, torch is the CUDA build of the package index.
    """
    given = os.environ.get("TORCH_WHEELS")
    wheels = Path(given).resolve() if given else None
    has_cpu_build = wheels is not None and any(wheels.glob("torch-*+cpu-*.whl"))
    if not has_cpu_build:
        print(
            "TORCH_WHEELS names no folder with a CPU build of torch: the trainer gets the "
            "index's build, CUDA and gigabytes."
        )
    base = os.environ.get("BASE_IMAGE") or images.ensure_base()
    return Settings(
        base=base,
        torch="cpu" if has_cpu_build else "cuda",
        wheels=wheels if has_cpu_build else None,
    )


def find_revision(folder: Path = REPOSITORY) -> str:
    """Return the commit of a tree, with the suffix `-dirty` if the tree differs from the commit.

    Returns `unknown` if there is no git, no repository or no commit.
    """
    try:
        commit = git("rev-parse", "HEAD", directory=folder).strip()
        # Untracked files count too, because the images may contain them.
        is_dirty = git("status", "--porcelain", directory=folder) != ""
    except BedError:
        return NO_REVISION
    return f"{commit}-dirty" if is_dirty else commit


def sources(target: str) -> list[Path]:
    """Return the source files of the image, sorted by path: tracked files and files that git would add."""
    files = ("Dockerfile", ".dockerignore", *BASES[target], *PACKAGES[target])
    words = ("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *files)
    listed = git(*words, directory=REPOSITORY)
    return sorted(
        file
        for name in set(listed.split("\0"))
        if name and (file := REPOSITORY / name).is_file()
    )


def content_of(target: str, chosen: Settings) -> str:
    """Return 12 hex digits that change if any source or setting of the image changes."""
    digest = hashlib.sha256(
        f"{images.identity(chosen.base)} {chosen.torch if target == 'trainer' else ''}".encode()
    )
    for file in sources(target):
        digest.update(f"\0{file.relative_to(REPOSITORY)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def build(target: str, chosen: Settings, *, revision: str | None = None) -> str:
    """Build the image if the storage has no image of this content, and return its name with the content tag.

    ``revision``: the commit in the image's configuration. If None, an existing image may contain any commit,
    and a new image contains the commit of the tree. Raises BedError if the build fails.
    """
    name = name_of(target, content_of(target, chosen))
    is_there = images.identity(name) is not None
    if not is_there or revision not in (None, images.label(name, REVISION_LABEL)):
        begun = time.monotonic()
        print(f"{time.strftime('%T')}  {name}: building …", flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            _build(
                target, name, chosen, Path(scratch), revision=revision or find_revision()
            )
        print(
            f"{time.strftime('%T')}  {name}: built in {time.monotonic() - begun:.0f} s",
            flush=True,
        )
        if content_of(target, chosen) != name.rpartition(":")[2]:
            # A file changed during the build, so the copied files may be newer than the digest.
            run(
                ["podman", "tag", name, name_of(target, "unsure")],
                environment=images.environment(),
            )
            run(["podman", "untag", name, name], environment=images.environment())
            name = name_of(target, "unsure")
    else:
        print(f"{time.strftime('%T')}  {name}: there already", flush=True)
    run(
        ["podman", "tag", name, name_of(target), name_of(target, version())],
        environment=images.environment(),
    )
    _forget_others(target, name)
    return name


def _forget_others(target: str, name: str) -> None:
    """Remove the images of earlier contents. Layers that the newest image shares with them stay."""
    listed = run(
        ["podman", "images", "--format", "{{.Repository}}:{{.Tag}}"],
        environment=images.environment(),
    ).split()
    pattern = re.compile(re.escape(name_of(target, "")) + "[0-9a-f]{12}")
    old = [other for other in listed if pattern.fullmatch(other) and other != name]
    if old:
        run(
            ["podman", "rmi", "--force", *old],
            environment=images.environment(),
            check=False,
        )
    # Remove the steps of older builds that no image uses.
    run(
        ["podman", "image", "prune", "--force", "--filter", "until=48h"],
        environment=images.environment(),
        check=False,
    )


def _build(
    target: str,
    name: str,
    chosen: Settings,
    scratch: Path,
    *,
    revision: str,
    tree: Path = REPOSITORY,
) -> None:
    log = images.folder() / f"build-{target}.log"
    command = [
        "buildah",
        "bud",
        "--layers",
        "--network",
        "host",
        "--target",
        target,
        "--tag",
        name,
    ]
    command += [
        "--build-arg",
        f"BASE_IMAGE={chosen.base}",
        "--build-arg",
        f"VERSION={version()}",
        "--build-arg",
        f"REVISION={revision}",
    ]
    command += ["--pull-never"] if chosen.base.startswith("localhost/") else []
    if target == "trainer":
        (scratch / "wheels").mkdir()
        command += [
            "--build-arg",
            f"TORCH={chosen.torch}",
            "--build-context",
            f"wheels={chosen.wheels or scratch / 'wheels'}",
        ]
    command += _pip_secrets(scratch)
    # buildah compares cached steps before it expands arguments, so it would reuse steps of another commit.
    stamp = scratch / "stamp"
    stamp.mkdir()
    lines = [f"FROM {name}", f'LABEL {REVISION_LABEL}="{revision}"']
    if target == "operator":
        lines.append(f'ENV EVERGRAD_REVISION="{revision}"')
    (stamp / "Dockerfile").write_text("\n".join(lines) + "\n")
    stamping = ["buildah", "bud", "--layers", "--pull-never", "--tag", name]
    code = 0
    with open(log, "w") as out:
        for words in ([*command, str(tree)], [*stamping, str(stamp)]):
            code = code or subprocess.call(
                words,
                env={**os.environ, **images.environment()},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
    if code != 0:
        end = "\n".join(
            line[:300] for line in log.read_text(errors="replace").splitlines()[-15:]
        )
        raise BedError(
            f"{name}: the build failed with exit code {code}; all of it is in {log}.\n{end}"
        )


def _pip_secrets(scratch: Path) -> list[str]:
    """Return this machine's pip configuration as build secrets, so that no layer or history contains it."""
    found = dict(
        re.findall(
            r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$",
            run([sys.executable, "-m", "pip", "config", "list"]),
            re.M,
        )
    )
    lines = [
        "[global]",
        *(
            f"{key} = {found[key]}"
            for key in ("index-url", "extra-index-url", "trusted-host", "timeout")
            if key in found
        ),
    ]
    secrets = []
    if certificates := found.get("cert") or os.environ.get("SSL_CERT_FILE"):
        lines.append("cert = /run/secrets/ca")
        secrets = ["--secret", f"id=ca,src={certificates}"]
    (scratch / "pip.conf").write_text("\n".join(lines) + "\n")
    return ["--secret", f"id=pip.conf,src={scratch / 'pip.conf'}", *secrets]


def ensure(
    targets: Sequence[str] = TARGETS, *, is_loaded: bool = True, revision: str | None = None
) -> tuple[str, ...]:
    """Build the changed images, load them into the bed's nodes if requested, and return their names.

    The names have the tag `dev`. ``revision``: the commit in the images' configuration. If None, any commit
    is accepted, so that tests do not rebuild after a commit that changes no image. Raises BedError.
    """
    images.folder().mkdir(parents=True, exist_ok=True)
    with open(images.folder() / "product.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two processes would build the same image twice
        chosen = settings()
        for target in targets:
            build(target, chosen, revision=revision)
        if is_loaded:
            loading.load(
                [name_of(target, tag) for target in targets for tag in ("dev", version())]
            )
    return tuple(name_of(target) for target in targets)


def ensure_earlier(commit: str, *, tag: str) -> tuple[str, ...]:
    """Build both images of an earlier commit once, load them into the running nodes, and return their names.

    The names have the tag `tag`. Nodes of later beds do not get these images. Raises BedError if the build
    fails or if the history does not contain the commit.
    """
    names = tuple(name_of(target, tag) for target in TARGETS)
    images.folder().mkdir(parents=True, exist_ok=True)
    with open(images.folder() / "product.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        chosen = settings()
        for target, name in zip(TARGETS, names, strict=True):
            with tempfile.TemporaryDirectory(dir=images.folder()) as scratch:
                archive, tree = Path(scratch, "archive.tar"), Path(scratch, "tree")
                if images.identity(name) is None:
                    git("archive", "--output", archive, commit, directory=REPOSITORY)
                    tree.mkdir()
                    run(["tar", "-C", tree, "-xf", archive])
                    _build(target, name, chosen, Path(scratch), revision=commit, tree=tree)
                images.pack(images.archive(name), set(), archive)
                loading.load([archive])
    return names


def main() -> int:
    """Build and load both images, or the named images. Return 1 after a one-line message if this fails."""
    parser = argparse.ArgumentParser(
        "python -m bed.product_images",
        description="Build Evergrad's images and load them into the bed.",
    )
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help=f"{' or '.join(TARGETS)} (default: both)",
    )
    parser.add_argument("--no-load", action="store_true", help="only build")
    parser.add_argument(
        "--any-revision",
        action="store_true",
        help="keep an image of the same content that names another commit",
    )
    arguments = parser.parse_args()
    targets = arguments.targets or TARGETS
    if unknown := [target for target in targets if target not in TARGETS]:
        parser.error(f"{unknown[0]}: no image of ours. There are {' and '.join(TARGETS)}.")
    try:
        ensure(
            targets,
            is_loaded=not arguments.no_load,
            revision=None if arguments.any_revision else find_revision(),
        )
    except BedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
