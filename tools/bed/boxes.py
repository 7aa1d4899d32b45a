"""Boxes: sets of namespaces that stand for machines, the links between them, and the processes inside.

A box's first process holds a pid namespace. Killing it makes the kernel end everything inside at once, mounts
and links included, as when a machine loses power.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from bed import cgroups
from bed.places import (
    BRIDGE_END,
    FAMILIES,
    NODES,
    NUMBER,
    Node,
    logs,
    work,
)
from bed.process_state import children_of, is_alive
from bed.shell import BedError, run, wait_until

CONTROL = "cp"
_STARTED: list[
    "subprocess.Popen[bytes]"
] = []  # they outlive us on purpose: Python would warn of each that it collects
_NAMESPACES = ("-m", "-n", "-p", "-u", "-i")
# bash reaps orphans while it waits; `sleep` alone as the first process would collect zombies.
_IDLE = "trap '' TERM; while :; do sleep 3600 & wait $!; done"


def start(box: str, script: str) -> int:
    """Start a box whose first process runs `script` and then only waits.

    Returns its pid, which is the box.
    """
    # A machine that boots has no cgroups of its last life; a kubelet looks for the container behind each, for
    # seconds.
    cgroups.remove_below(box)
    cgroups.make(box)
    cgroups.make(cgroups.HOST)
    folder = work() / box
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("pid", "ready"):
        (folder / name).unlink(missing_ok=True)
    # The first process writes its name only when its script is through: mounts first, then daemons.
    init = f"set -e\necho 0 > {cgroups.entrance(box)}\n{script}\ntouch {folder / 'ready'}\n{_IDLE}\n"
    (folder / "init.sh").write_text(init)
    command = [
        "unshare",
        *_NAMESPACES,
        "--fork",
        "--kill-child",
        "--mount-proc",
        "--propagation",
        "private",
    ]
    with _log(f"{box}-init") as log:
        process = _start(
            [*command, "bash", str(folder / "init.sh")], cgroups.HOST, log.fileno()
        )

    def is_there() -> bool:
        if process.poll() is not None:
            raise BedError(
                f"box {box}: ended while it started, exit code {process.returncode}; see "
                f"{logs()}/{box}-init.log"
            )
        return (folder / "ready").exists()

    wait_until(f"box {box}", is_there, seconds=600, pause=0.005)
    pid = children_of(process.pid)[0]
    (folder / "pid").write_text(str(pid))
    return pid


def pid_of(box: str) -> int:
    """The box's first process as seen from outside; BedError when the box is not up."""
    try:
        pid = int((work() / box / "pid").read_text())
    except (OSError, ValueError) as error:
        raise BedError(f"box {box}: not up.") from error
    if not is_alive(pid):
        raise BedError(f"box {box}: dead (pid {pid}).")
    return pid


def is_up(box: str) -> bool:
    """Whether the box's first process lives."""
    try:
        pid_of(box)
    except BedError:
        return False
    return True


def kill(box: str) -> None:
    """Power off: the first process dies and with it everything inside."""
    pid = pid_of(box)
    os.kill(pid, signal.SIGKILL)
    cgroups.set_frozen(
        box, False
    )  # a frozen process dies when it is thawed, before it does anything else
    wait_until(f"the end of box {box}", lambda: not is_alive(pid), seconds=600, pause=0.01)
    wait_until(
        f"the end of what ran in box {box}",
        lambda: not _living(box),
        seconds=600,
        pause=0.01,
    )


def _living(box: str) -> set[int]:
    return {pid for pid in cgroups.pids_below(box) if is_alive(pid)}


def inside(
    box: str, command: Sequence[object], *, text: str | None = None, check: bool = True
) -> str:
    """Run a command in every namespace of the box and return its stdout."""
    return run(
        ["nsenter", "-t", str(pid_of(box)), *_NAMESPACES, "--", *command],
        text=text,
        check=check,
    )


def spawn(
    box: str,
    name: str,
    command: Sequence[object],
    *,
    environment: dict[str, str] | None = None,
) -> None:
    """Start a daemon in the box, with its log and its pid (as seen from outside) under the bed's scratch."""
    shown = work() / box / f"{name}.pid"
    shown.unlink(missing_ok=True)
    # $$ would be the pid inside; /proc of the outside is not there either. The cgroup file, read from
    # outside, knows both.
    before = cgroups.pids_below(box, "sys")
    enter = f'echo 0 > {cgroups.entrance(box)}; exec "$@"'
    words = [
        "nsenter",
        "-t",
        str(pid_of(box)),
        *_NAMESPACES,
        "--",
        "bash",
        "-c",
        enter,
        "bash",
        *map(str, command),
    ]
    with _log(f"{box}-{name}") as log:
        process = _start(words, cgroups.HOST, log.fileno(), environment)
    found: set[int] = set()

    def has_entered() -> bool:
        if process.poll() is not None:
            raise BedError(
                f"{name} in box {box}: exit code {process.returncode}; see {logs()}/{box}-{name}.log"
            )
        found.update(
            set(children_of(process.pid)) & (cgroups.pids_below(box, "sys") - before)
        )
        return bool(found)

    wait_until(f"{name} in box {box}", has_entered, seconds=600, pause=0.003)
    shown.write_text(str(found.pop()))


def daemon_pid(box: str, name: str) -> int:
    """The pid of a daemon started by `spawn`; BedError when it does not live."""
    try:
        pid = int((work() / box / f"{name}.pid").read_text())
    except (OSError, ValueError) as error:
        raise BedError(f"{name} in box {box}: never started.") from error
    if not is_alive(pid):
        raise BedError(
            f"{name} in box {box}: dead (pid {pid}); see {logs()}/{box}-{name}.log"
        )
    return pid


def kill_daemon(box: str, name: str) -> None:
    """SIGKILL one daemon; returns when it is dead."""
    pid = daemon_pid(box, name)
    os.kill(pid, signal.SIGKILL)
    wait_until(
        f"the end of {name} in box {box}",
        lambda: not is_alive(pid),
        seconds=600,
        pause=0.01,
    )


def spawn_outside(
    name: str, command: Sequence[object], environment: dict[str, str]
) -> "subprocess.Popen[bytes]":
    """Start a helper of the bed in the machine's own namespaces; it ends with the bed."""
    with _log(name) as log:
        words = [str(word) for word in command]
        return _start(words, cgroups.HOST, log.fileno(), environment)


def end_outside(process: "subprocess.Popen[bytes]") -> None:
    """End such a helper: asked first, and after half a minute killed."""
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=30)


def network(pid: int | None, lines: Iterable[str]) -> None:
    """Apply lines of `ip -batch` in the network namespace of a process; None is our own."""
    elsewhere = [] if pid is None else ["nsenter", "-t", str(pid), "-n"]
    run(
        [*elsewhere, shutil.which("ip") or "/sbin/ip", "-batch", "-"],
        text="\n".join(lines) + "\n",
    )


def connect_control() -> None:
    """The bridge in the control plane's box, and the machine's own link to it."""
    pid = pid_of(CONTROL)
    network(
        pid,
        [
            "link set lo up",
            # An address of its own: a bridge otherwise takes its ports' lowest, and is unknown to all when
            # that node dies.
            f"link add br0 address {_hardware_address(0)} type bridge",
            *_addresses(1, "br0"),
            "link set br0 up",
        ],
    )
    network(
        None,
        [
            f"link add {BRIDGE_END} type veth peer name vhost netns {pid}",
            *_addresses(254, BRIDGE_END),
        ],
    )
    network(pid, ["link set vhost master br0 up"])
    services = [
        f"route replace {family.services} via {NODES[0].address_in(family)} dev {BRIDGE_END} onlink"
        for family in FAMILIES
    ]
    network(
        None, [f"link set {BRIDGE_END} up", *_routes_to_pods(NODES, BRIDGE_END), *services]
    )
    network(pid, _routes_to_pods(NODES, "br0"))


def connect_node(node: Node) -> None:
    """A node's cable to the bridge, and its routes to the other nodes' pods.

    No default route: pods reach nothing else.
    """
    control, pid = pid_of(CONTROL), pid_of(node.name)
    here = f"/proc/{control}/net/dev"  # the cable of the node's former life goes a moment after it
    wait_until(
        f"the end of the link v{node.name}",
        lambda: f"v{node.name}:" not in Path(here).read_text(),
        seconds=600,
    )
    network(
        control,
        [
            f"link add v{node.name} type veth peer name eth0 netns {pid}",
            f"link set v{node.name} master br0 up",
        ],
    )
    others = [other for other in NODES if other is not node]
    cable = [
        f"link set eth0 address {_hardware_address(node.number)}",
        *_addresses(10 + node.number, "eth0"),
        "link set eth0 up",
    ]
    network(pid, ["link set lo up", *cable, *_routes_to_pods(others, "eth0")])


def _addresses(number: int, device: str) -> list[str]:
    return [
        f"addr add {family.machines.format(number)}/{family.machines_length} dev {device} "
        f"{family.address_flags}"
        for family in FAMILIES
    ]


def _routes_to_pods(nodes: Sequence[Node], device: str) -> list[str]:
    return [
        f"route replace {node.pods_in(family)} via {node.address_in(family)} dev {device} onlink"
        for family in FAMILIES
        for node in nodes
    ]


def _hardware_address(number: int) -> str:
    """Fixed ones: what the others remember of a node is still right when it has been started again."""
    return f"02:00:00:00:{NUMBER:02x}:{number:02x}"


def _log(name: str) -> BinaryIO:
    logs().mkdir(parents=True, exist_ok=True)
    return open(logs() / f"{name}.log", "ab")


def _start(
    command: list[str], box: str, log: int, environment: dict[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start detached from our terminal and session, inside the bed's cgroup from its first instruction on."""
    enter = f'echo 0 > {cgroups.entrance(box)}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", enter, "bash", *command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin",
            **(environment or {}),
        },
        start_new_session=True,
    )
    _STARTED.append(process)
    return process
