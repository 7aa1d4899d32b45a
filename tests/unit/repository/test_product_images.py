"""The commit in an image: found in the tree, passed to the build, and not a reason to rebuild a layer."""

import subprocess
from pathlib import Path

import pytest

from bed import images, product_images
from bed.product_images import NO_REVISION, TARGETS, Settings, find_revision

CHOSEN = Settings(base="localhost/base:1", torch="cpu", wheels=None)
SETTINGS_OF_AN_IMAGE = {"ARG", "LABEL", "ENV", "EXPOSE", "USER", "ENTRYPOINT"}


def commit(tree: Path, message: str) -> str:
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@example.com")
    git = ("git", *identity, "-c", "commit.gpgsign=false")
    subprocess.run([*git, "add", "--all"], cwd=tree, check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", message], cwd=tree, check=True)
    shown = subprocess.check_output([*git, "log", "-1", "--format=%H"], cwd=tree, text=True)
    return shown.strip()


def test_the_revision_of_a_tree_is_its_commit_with_a_mark_if_the_tree_differs(
    tmp_path: Path,
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    assert find_revision(tree) == NO_REVISION, "no repository"
    subprocess.run(["git", "init", "--quiet"], cwd=tree, check=True)
    assert find_revision(tree) == NO_REVISION, "no commit"

    (tree / "file").write_text("1")
    first = commit(tree, "first")
    assert find_revision(tree) == first and len(first) == 40
    (tree / "file").write_text("2")
    assert find_revision(tree) == f"{first}-dirty"
    second = commit(tree, "second")
    assert find_revision(tree) == second != first
    (tree / "new").write_text("a file that git would add")
    assert find_revision(tree) == f"{second}-dirty"


def test_without_git_the_revision_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_revision() == NO_REVISION


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of builds, and lines of what stamps an image; the storage has an image of each content, of
    the commit `old`."""
    commands: list[list[str]] = []

    def call(command: list[str], **options: object) -> int:
        is_of_tree = "--build-arg" in command
        stamp = Path(command[-1], "Dockerfile")
        commands.append(command if is_of_tree else stamp.read_text().splitlines())
        return 0

    monkeypatch.setattr(product_images.subprocess, "call", call)
    monkeypatch.setattr(product_images, "run", lambda *words, **options: "")
    monkeypatch.setattr(product_images, "find_revision", lambda: "now")
    monkeypatch.setattr(images, "folder", lambda: tmp_path)
    monkeypatch.setattr(images, "environment", dict)
    monkeypatch.setattr(images, "identity", lambda image: "sha256:1")
    monkeypatch.setattr(images, "label", lambda image, name: "old")
    return commands


def test_an_image_of_another_commit_is_rebuilt_only_if_the_commit_is_requested(
    builds: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:

    def check(revision: str) -> None:
        built, stamped = builds
        assert f"REVISION={revision}" in built
        assert f'LABEL {product_images.REVISION_LABEL}="{revision}"' in stamped
        builds.clear()

    for target in TARGETS:
        name = product_images.build(target, CHOSEN)
        assert name == product_images.build(target, CHOSEN, revision="old")
        assert builds == []
        assert name == product_images.build(target, CHOSEN, revision="new")
        check("new")
    monkeypatch.setattr(images, "identity", lambda image: image.endswith("base:1") or None)
    product_images.build("operator", CHOSEN)
    check("now")


@pytest.mark.parametrize("target", TARGETS)
def test_image_layers_precede_the_commit_argument(root: Path, target: str) -> None:
    stage = (root / "Dockerfile").read_text().partition(f" AS {target}\n")[2]
    stage = stage.partition("\nFROM ")[0]
    _, found, above = stage.partition("\nARG REVISION=unknown\n")
    assert found and f'{product_images.REVISION_LABEL}="$REVISION"' in above
    words = [line.split()[0] for line in above.splitlines() if line[:1].isalpha()]
    assert set(words) <= SETTINGS_OF_AN_IMAGE
