"""Boxes: sets of namespaces that represent machines, the links between them, and the processes inside.

A box's first process holds a pid namespace. When it is killed, the kernel immediately ends everything inside,
including mounts and links, as when a machine loses power.
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
] = []  # They outlive this process on purpose. Python would warn about each that it collects.
_NAMESPACES = ("-m", "-n", "-p", "-u", "-i")
# bash reaps orphans while it waits; with `sleep` as the first process, zombies would accumulate.
_IDLE = "trap '' TERM; while :; do sleep 3600 & wait $!; done"


def start(box: str, script: str) -> int:
    """Start a box whose first process runs `script` and then only waits.

    Returns the pid of the first process, which identifies the box.
    """
    # A booting machine has no cgroups from its previous life. A kubelet would spend seconds looking for the
    # container of each.
    cgroups.remove_below(box)
    cgroups.make(box)
    cgroups.make(cgroups.HOST)
    folder = work() / box
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("pid", "ready"):
        (folder / name).unlink(missing_ok=True)
    # The first process writes its name only after its script has ended: mounts come first, then daemons.
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
    """Return the box's first process as seen from outside. Raises BedError if the box is not up."""
    try:
        pid = int((work() / box / "pid").read_text())
    except (OSError, ValueError) as error:
        raise BedError(f"box {box}: not up.") from error
    if not is_alive(pid):
        raise BedError(f"box {box}: dead (pid {pid}).")
    return pid


def is_up(box: str) -> bool:
    """Return whether the box's first process runs."""
    try:
        pid_of(box)
    except BedError:
        return False
    return True


def kill(box: str) -> None:
    """Power off the box: its first process dies, and with it everything inside."""
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
    """Run a command in all namespaces of the box, and return its stdout."""
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
    """Start a daemon in the box. Its log and its pid, as seen from outside, are in the bed's scratch
    folder."""
    shown = work() / box / f"{name}.pid"
    shown.unlink(missing_ok=True)
    # $$ would be the pid inside the box, and the outer /proc is not visible there. The cgroup file, read from
    # outside, contains the outer pid.
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
    """Return the pid of a daemon that `spawn` started. Raises BedError if it does not run."""
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
    """Send SIGKILL to a daemon. Returns when it is dead."""
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
    """Start a helper of the bed in the machine's own namespaces. It ends with the bed."""
    with _log(name) as log:
        words = [str(word) for word in command]
        return _start(words, cgroups.HOST, log.fileno(), environment)


def end_outside(process: "subprocess.Popen[bytes]") -> None:
    """End such a helper with SIGTERM, or with SIGKILL if it still runs after 30 s."""
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=30)


def network(pid: int | None, lines: Iterable[str]) -> None:
    """Apply lines of `ip -batch` in the network namespace of a process, or in our own if `pid` is None."""
    elsewhere = [] if pid is None else ["nsenter", "-t", str(pid), "-n"]
    run(
        [*elsewhere, shutil.which("ip") or "/sbin/ip", "-batch", "-"],
        text="\n".join(lines) + "\n",
    )


def connect_control() -> None:
    """Create the bridge in the control plane's box, and the machine's own link to it."""
    pid = pid_of(CONTROL)
    network(
        pid,
        [
            "link set lo up",
            # Set the bridge's own address. Otherwise it takes the lowest address of its ports, and all
            # neighbours lose it when that node dies.
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
    """Connect a node to the bridge, and add its routes to the other nodes' pods.

    There is no default route, so pods reach nothing else.
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
    """Return a fixed address, so that the other nodes' neighbour entries stay valid when a node restarts."""
    return f"02:00:00:00:{NUMBER:02x}:{number:02x}"


def _log(name: str) -> BinaryIO:
    logs().mkdir(parents=True, exist_ok=True)
    return open(logs() / f"{name}.log", "ab")


def _start(
    command: list[str], box: str, log: int, environment: dict[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a process detached from our terminal and session, inside the bed's cgroup from its first
    instruction."""
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
