"""The golden root: a containerd folder with every wanted image unpacked. A node clones it in less than a
second."""

import fcntl
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bed import images, node
from bed.places import STATE, logs
from bed.shell import BedError, last_lines, run, wait_until

_SOCKET = STATE / "golden" / "containerd.sock"


def root() -> Path:
    """Return the golden root, after adding missing images of `images.wanted()`."""
    home = images.folder() / "golden"
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = _recorded(home)
        todo = {
            image: digest
            for image, digest in images.wanted().items()
            if held.get(image) != digest
        }
        if todo:
            _import(home, todo)
            (home / "images.json").write_text(json.dumps({**held, **todo}))
    return home / "root"


def _recorded(home: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads((home / "images.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def _import(home: Path, todo: dict[str, str]) -> None:
    with _containerd(home):
        ctr: list[object] = ["ctr", "--address", _SOCKET, "--namespace", "k8s.io"]
        for image in todo:
            begun = time.monotonic()
            held = set(run([*ctr, "content", "ls", "--quiet"]).split())
            archive = home / "import.tar"
            images.pack(images.layout_of(image), held, archive)
            size = archive.stat().st_size
            run([*ctr, "images", "import", "--snapshotter", "overlayfs", archive])
            archive.unlink()
            print(
                f"{time.strftime('%T')}  {image}: kept for every bed, {size / 1e6:.1f} MB in "
                f"{time.monotonic() - begun:.1f} s"
            )


@contextmanager
def _containerd(home: Path) -> Iterator[None]:
    """Run a containerd on the golden root, in its own mount namespace, so that its mounts end with it in
    every case."""
    cni = home / "cni"
    cni.mkdir(exist_ok=True)
    (home / "root").mkdir(exist_ok=True)
    _SOCKET.parent.mkdir(parents=True, exist_ok=True)
    configuration = node.containerd_configuration(
        home / "root", str(_SOCKET.parent / "state"), str(_SOCKET), cni
    )
    (home / "containerd.toml").write_text(configuration)
    logs().mkdir(parents=True, exist_ok=True)
    log = logs() / "golden.log"
    command = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "containerd",
        "--config",
        str(home / "containerd.toml"),
    ]
    with open(log, "ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    try:

        def answers() -> bool:
            if process.poll() is not None:
                raise BedError(
                    f"containerd ended at once, exit code {process.returncode}:\n{last_lines(log)}"
                )
            return bool(
                run(["ctr", "--address", _SOCKET, "version"], check=False).count("Version:")
                == 2
            )

        wait_until("containerd of the golden root", answers, seconds=600)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
