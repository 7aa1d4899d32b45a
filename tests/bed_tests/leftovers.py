"""What a bed could leave behind on the machine, as sets that can be compared."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from bed import boxes, cgroups, images, state
from bed.places import CLUSTER, cache, work

NAMESPACES = ("net", "mnt", "pid", "uts", "ipc")


def _output(*command: str) -> set[str]:
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    # Counters of rules change with every packet.
    return {line for line in result.stdout.splitlines() if line.strip() and not line.startswith((":", "#"))}


def _processes() -> set[str]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        is_of_the_bed = any(str(path) in command for path in (work(), cache() / "tools", "containerd-shim"))
        if is_of_the_bed and int(folder.name) != os.getpid() and boxes.is_alive(int(folder.name)):
            found.add(f"{folder.name} {command}")
    return found


def _namespaces() -> set[str]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        for name in NAMESPACES:
            try:
                found.add((folder / "ns" / name).readlink().as_posix())
            except OSError:
                continue
    return found


def _mounts() -> set[str]:
    lines = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return {words[4] for words in lines if not Path(words[4]).is_relative_to(images.folder())}


def _cgroups() -> set[str]:
    return {str(folder) for hierarchy in cgroups.hierarchies() for folder in (hierarchy / cgroups.NAME).glob("**")}


def _sysctls() -> set[str]:
    names = (*state.SYSCTLS, "net/ipv4/ip_forward")
    return {f"{name}={Path('/proc/sys', name).read_text().strip()}" for name in names}


def _folders() -> set[str]:
    return {str(path) for path in (work(), CLUSTER, Path("/run/netns"), Path("/run/evergrad-golden")) if path.exists()}


KINDS: dict[str, Callable[[], set[str]]] = {
    "processes": _processes,
    "namespaces": _namespaces,
    "mounts": _mounts,
    "cgroups": _cgroups,
    "links": lambda: {path.name for path in Path("/sys/class/net").iterdir()},
    "routes": lambda: _output("ip", "route", "show", "table", "all"),
    "loop devices": lambda: _output("losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE"),
    "iptables": lambda: _output("iptables-save"),
    "nftables": lambda: _output("nft", "list", "ruleset"),
    "sysctls": _sysctls,
    "folders": _folders,
}


def snapshot() -> dict[str, set[str]]:
    """Everything of every kind, now."""
    return {name: look() for name, look in KINDS.items()}


def added(before: dict[str, set[str]]) -> dict[str, set[str]]:
    """What there is now and was not before, by kind; kinds with nothing left out. An old sysctl is missing when it changed."""
    now = snapshot()
    return {name: now[name] - before[name] for name in now if now[name] - before[name]}
