"""What a test bed could leave on the machine, as comparable sets, printed as JSON for the bed that
EVERGRAD_BED names.

Other beds may be up and start pods, and other tests run; their objects are excluded.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from patience import PATIENCE

from bed import cgroups, images, state
from bed.places import BRIDGE_END, CLUSTER, NAME, STATE, work
from bed.process_state import is_alive

# Marks the parallel test process, in the environment of all processes that it starts.
WORKER = "PYTEST_XDIST_WORKER"
NAMESPACES = ("net", "mnt", "pid", "uts", "ipc")


def _output(*command: str) -> set[str]:
    result = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    # Rule counters change with every packet.
    return {
        line
        for line in result.stdout.splitlines()
        if line.strip() and not line.startswith((":", "#"))
    }


def _is_of_another_bed(folder: Path) -> bool:
    try:
        lines = (folder / "cgroup").read_text().splitlines()
    except OSError:
        return True  # the process has just ended
    group = next((line.rpartition(":")[2] for line in lines if ":freezer:" in line), "/")
    return group.startswith("/bed") and group.split("/")[1] != NAME


def _is_of_another_worker(folder: Path) -> bool:
    try:
        variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return True  # the process has just ended
    worker = next(
        (one.partition("=")[2] for one in variables if one.startswith(f"{WORKER}=")), None
    )
    return worker is not None and worker != os.environ.get(WORKER)


def _machines_processes() -> list[Path]:
    return [
        folder
        for folder in Path("/proc").glob("[0-9]*")
        if not _is_of_another_bed(folder) and not _is_of_another_worker(folder)
    ]


def _without_other_beds(lines: Iterable[str]) -> set[str]:
    return {line for line in lines if set(re.findall(r"\bbed\d+\b", line)) <= {BRIDGE_END}}


def _processes() -> set[str]:
    found = set()
    for folder in _machines_processes():
        try:
            command = (
                (folder / "cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
            )
        except OSError:
            continue
        is_of_the_bed = any(
            str(path) in command for path in (f"{work()}/", "containerd", "bed.storage")
        )
        if is_of_the_bed and int(folder.name) != os.getpid() and is_alive(int(folder.name)):
            found.add(f"{folder.name} {command}")
    return found


def _waits_for_reaping(folder: Path) -> bool:
    """Return whether it was the first process of a PID namespace, is killed, and only outlives its unreaped
    processes."""
    try:
        return (folder / "wchan").read_text() == "zap_pid_ns_processes"
    except OSError:
        return True


def _namespaces() -> set[str]:
    found = set()
    for folder in _machines_processes():
        if not is_alive(int(folder.name)) or _waits_for_reaping(folder):
            continue  # The namespaces of dead processes end when the first process of the machine reaps them.
        for name in NAMESPACES:
            try:
                found.add((folder / "ns" / name).readlink().as_posix())
            except OSError:
                continue
    return found


def _mounts() -> set[str]:
    mounts = {
        Path(line.split()[4])
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
    }
    return {str(mount) for mount in mounts if not _is_of_others(mount)}


def _is_of_others(mount: Path) -> bool:
    # Tests that run at the same time mount small volumes in pytest's folders, where no bed has files.
    of_a_test = any(part.startswith("pytest-of-") for part in mount.parts)
    return of_a_test or mount.is_relative_to(images.folder())


def _cgroups() -> set[str]:
    return {
        str(folder)
        for hierarchy in cgroups.hierarchies()
        for folder in (hierarchy / NAME).glob("**")
    }


def _sysctls() -> set[str]:
    names = (*state.SYSCTLS, "net/ipv4/ip_forward")
    return {f"{name}={Path('/proc/sys', name).read_text().strip()}" for name in names}


def _folders() -> set[str]:
    return {
        str(path)
        for path in (
            work(),
            CLUSTER,
            STATE / "state.json",
            STATE / "golden",
            Path("/run/netns"),
        )
        if path.exists()
    }


KINDS: dict[str, Callable[[], set[str]]] = {
    "processes": _processes,
    "namespaces": _namespaces,
    "mounts": _mounts,
    "cgroups": _cgroups,
    "links": lambda: _without_other_beds(
        path.name for path in Path("/sys/class/net").iterdir()
    ),
    "routes": lambda: _without_other_beds(_output("ip", "route", "show", "table", "all")),
    "loop devices": lambda: {
        line
        for line in _output("losetup", "--list", "--noheadings", "-O", "BACK-FILE")
        if f"{work()}/" in line
    },
    "iptables": lambda: _output("iptables-save"),
    "nftables": lambda: _output("nft", "list", "ruleset"),
    "sysctls": _sysctls,
    "folders": _folders,
}


if __name__ == "__main__":
    print(json.dumps({name: sorted(look()) for name, look in KINDS.items()}))
