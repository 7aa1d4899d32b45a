"""Blocks of commands of the pages that are walks of no example: played as they are written, but for placeholders
and ports."""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from coordinator_processes import wait_for
from pages import ROOT, SECONDS, make_environment, play, read_blocks

pytestmark = [pytest.mark.long, pytest.mark.timeout(SECONDS + 20)]
PACKAGES = ("common", "coordinator", "manifest", "cli", "trainer_image")
TRAIN = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("ranks:", int(total), flush=True)
dist.destroy_process_group()
"""


# ---- one's own script under torchrun -----------------------------------------------------------------------


def find_free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@contextmanager
def in_a_separate_terminal(script: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a block that ends after the others without help; kill its remaining processes."""
    with (folder / "terminal.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", f"set -e\n{script}"],
            cwd=folder,
            env=make_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
        assert process.wait(100) == 0, (folder / "terminal.log").read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


@pytest.fixture
def environment() -> dict[str, str]:
    return make_environment(PYTHONSAFEPATH="1", GLOO_SOCKET_IFNAME="lo")


def test_two_terminals_train_an_example_script_as_on_its_page(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    shutil.copytree(ROOT / "examples/scripts", tmp_path / "examples/scripts")
    port = find_free_port()
    coordinate, node = (
        block.replace("29400", port) for block in read_blocks("examples/scripts/README.md")
    )
    nodes = [node.replace("EVERGRAD_NODE=0", f"EVERGRAD_NODE={index}") for index in (0, 1)]
    assert nodes[0] != nodes[1]
    with (
        in_a_separate_terminal(coordinate, tmp_path) as coordinator,
        ThreadPoolExecutor(2) as pool,
    ):
        wait_for(
            lambda: (
                (tmp_path / "runs/demo.token").exists() or coordinator.poll() is not None
            ),
            "the token",
        )
        playing = [
            pool.submit(play, one, tmp_path, environment=environment) for one in nodes
        ]
        printed = [one.result() for one in playing]
    assert "world 2" in "".join(printed)
    assert list((tmp_path / "runs/ddp").iterdir()), "its checkpoint"


def test_a_user_script_is_a_node_under_torchrun_as_on_the_page(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    port = find_free_port()
    coordinate, node = (
        block.replace("29400", port)
        for block in read_blocks("docs/train/elastic-scripts.md")
    )
    with in_a_separate_terminal(coordinate, tmp_path) as coordinator:
        wait_for(
            lambda: (tmp_path / "demo.token").exists() or coordinator.poll() is not None,
            "the token",
        )
        node = node.replace("COORDINATOR", "127.0.0.1")
        printed = play(node, tmp_path, environment=environment)
    assert "ranks: 1" in printed


# ---- installing --------------------------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A fresh clone, as far as packages are concerned."""
    ignored = shutil.ignore_patterns("*.egg-info", "build", "__pycache__")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / "clone" / name, ignore=ignored)
    return tmp_path / "clone"


@pytest.fixture
def fresh(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a shell with a virtual environment that contains the packages of an index,
    but not Evergrad.

    pip uses no index, so it fails for missing packages.
    """
    venv, index = tmp_path / "venv", tmp_path / "index"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    # Where Python brings setuptools with it, it may be older than what an isolated build would fetch.
    remove = [
        venv / "bin/pip",
        "--disable-pip-version-check",
        "uninstall",
        "--quiet",
        "--yes",
    ]
    subprocess.run([*remove, "setuptools"], check=True)
    index.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("evergrad", "__editable__")) and path.suffix != ".pth":
            (index / path.name).symlink_to(path)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (venv / "lib" / version / "site-packages/index.pth").write_text(f"{index}\n")
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(venv / "bin"), os.environ["PATH"]]),
        "PYTHONSAFEPATH": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def test_the_cluster_commands_are_installed_from_a_clone_without_torch(
    clone: Path, fresh: dict[str, str]
) -> None:
    install, *_ = read_blocks("docs/operate/cluster-cli.md")
    play(install, clone, environment=fresh)
    printed = play(
        "pip check; evergrad --version; kubectl-evergrad submit --help; pip list",
        clone,
        environment=fresh,
    )
    assert "No broken requirements found" in printed
    # Its kubeconfig is missed, and not its client.
    said = play("evergrad list --kubeconfig nowhere", clone, environment=fresh, codes=(64,))
    assert "nowhere" in said and "pip install" not in said
    assert "evergrad-trainer" not in printed


def test_adapters_are_installed_from_a_clone_as_on_their_page(
    clone: Path, fresh: dict[str, str]
) -> None:
    install, *_ = read_blocks("docs/train/adapters.md")
    play(install, clone, environment=fresh)
    printed = play(
        "pip check; python -c 'import peft'; evergrad run --help", clone, environment=fresh
    )
    assert "No broken requirements found" in printed
