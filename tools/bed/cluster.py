"""Starts and stops the bed."""

import functools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from bed import boxes, cgroups, control_plane, golden, images, node, pki, state, toolbox
from bed.api import Api
from bed.faults import Faults
from bed.places import (
    BRIDGE_END,
    CLUSTER,
    FAMILIES,
    KUBECONFIG,
    NODES,
    REPOSITORY,
    SERVICES,
    Node,
    cache,
    logs,
    volumes,
    work,
)
from bed.places import pki as keys
from bed.requirements import unavailable
from bed.shell import BedError, last_lines, run, wait_until

PROFILES = ("full", "next", "kwok")


class Bed:
    """The interface of the bed for tests.

    `up` and `down` run as separate processes, so that the caller is not a process of the bed.
    """

    kubeconfig = KUBECONFIG

    @staticmethod
    def up(profile: str = "full") -> "Bed":
        """Start the bed unless it is up. Returns when both nodes are Ready. Raises BedError if this fails."""
        _command("up", "--profile", profile)
        return Bed()

    @staticmethod
    def down() -> None:
        """Stop the bed, also if only parts of it are left."""
        _command("down")

    @staticmethod
    def is_up() -> bool:
        """Return whether a bed exists and was started completely."""
        return state.exists() and state.read().is_complete and boxes.is_up(boxes.CONTROL)

    @property
    def api(self) -> Api:
        """Return a client of the API server, as admin."""
        return Api(KUBECONFIG)

    @property
    def faults(self) -> Faults:
        """Return the object that injects faults into the bed."""
        return Faults(self.api)


def _command(*words: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY / "tools"),
        "PYTHONSAFEPATH": "1",
    }
    code = subprocess.call(
        [sys.executable, "-m", "bed", *words], env=environment, stdin=subprocess.DEVNULL
    )
    if code != 0:
        raise BedError(
            f"python -m bed {' '.join(words)}: exit code {code}; what it said is above."
        )


def prepare(profile: str) -> str:
    """Build everything that a bed of ``profile`` needs, so that no test waits for a compiler.

    Returns a message that contains the path of the cache.
    """
    for name in toolbox.NEEDED[profile]:
        toolbox.build(name)
    _make_images()
    return f"all built, in {cache()}"


def _make_images() -> None:
    for image in (images.ensure_pause(), images.ensure_base()):
        images.want(image)


def bring_up(profile: str) -> None:
    """Do the work of `up`. If the start fails, print the logs, and stop the bed again."""
    reason = unavailable()
    if reason:
        raise BedError(reason)
    with state.lock():
        if Bed.is_up():
            _say_that_it_is_up(profile)
            return
        _clear()
        begun = time.monotonic()
        state.write(state.State(profile))
        cgroups.enter(cgroups.HOST)
        try:
            _start(profile)
            state.write(replace(state.read(), is_complete=True))
            cgroups.leave()
        except BaseException as error:
            if isinstance(error, Exception):
                _show_logs()
            cgroups.leave()
            _clear()
            raise
        _say(f"up after {time.monotonic() - begun:.1f} s; KUBECONFIG={KUBECONFIG}")


def take_down() -> None:
    """Do the work of `down`. Afterwards nothing of the bed is left, whatever state it was in."""
    with state.lock():
        begun = time.monotonic()
        killed = _clear()
        _say(f"down after {time.monotonic() - begun:.1f} s, {killed} processes ended")


def _start(profile: str) -> None:
    for name in toolbox.NEEDED[profile]:
        toolbox.build(name)
    root = None
    if profile != "kwok":
        _make_images()
        root = golden.root()
    begun = time.monotonic()
    Path("/proc/sys/fs/inotify/max_user_instances").write_text("1024")
    for folder in (logs(), volumes()):
        folder.mkdir(parents=True, exist_ok=True)
    pki.write(keys())
    _write_cluster_folder()
    control_plane.start_box()
    control_plane.start_etcd()
    control_plane.start_apiserver(profile)
    api = Api(KUBECONFIG)
    nodes = () if profile == "kwok" else NODES
    with ThreadPoolExecutor(3) as pool:
        boxed = [pool.submit(_start_node_box, entry, root) for entry in nodes]
        ready = control_plane.wait_for_apiserver(api)
        for done in boxed:
            done.result()
        _say(f"API server ready after {ready:.1f} s")
        control_plane.start_controllers(profile)
        if profile == "kwok":
            control_plane.start_kwok()
        else:
            _start_workers(api)
    for entry in nodes:
        wait_until(
            f"{entry.name} Ready",
            functools.partial(node.is_ready, api, entry),
            seconds=600,
        )
    wait_until(
        "ServiceAccount default",
        lambda: control_plane.has_default_account(api),
        seconds=600,
    )
    _say(
        f"{'both nodes ready' if nodes else 'control plane ready'} "
        f"{time.monotonic() - begun:.1f} s after the first process"
    )


def _start_node_box(entry: Node, root: Path | None) -> None:
    node.prepare(entry, root)
    node.start_box(entry)


def _start_workers(api: Api) -> None:
    control_plane.start_coredns()
    for entry in NODES:
        node.start_kubelet(entry)
        node.start_proxy(entry)
    environment = {
        "PYTHONPATH": str(REPOSITORY / "tools"),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }
    boxes.spawn_outside(
        "storage",
        [
            sys.executable,
            "-c",
            "import bed.storage; bed.storage.main()",
            keys() / "storage.kubeconfig",
        ],
        environment,
    )
    control_plane.create_storage_classes(api)


def _write_cluster_folder() -> None:
    """Write the folder for users: kubeconfig, kubectl, helm if it is built, and a link to the logs."""
    (CLUSTER / "bin").mkdir(parents=True, exist_ok=True)
    pki.write_kubeconfig(keys(), "admin", KUBECONFIG)
    built = [
        "kubectl",
        *(
            name
            for name in ("helm", "etcdctl")
            if not toolbox.missing((toolbox.tool_of(name),))
        ),
    ]
    for name, target in [
        *((f"bin/{name}", toolbox.binary(name)) for name in built),
        ("logs", logs()),
    ]:
        link = CLUSTER / name
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def _clear() -> int:
    """Stop everything that exists, and return the number of ended processes. Keep the order of the steps."""
    known = state.read() if state.exists() else None
    killed = cgroups.end_everything()  # boxes take their mounts, links and namespaces along
    wait_until(f"the end of the link {BRIDGE_END}", _is_link_gone, seconds=600)
    cgroups.remove()
    state.restore_sysctls()
    for folder in (
        Path(known.work) if known else work(),
        Path(known.cluster) if known else CLUSTER,
    ):
        _delete(folder)
    state.forget()
    return killed


def _is_link_gone() -> bool:
    """Delete the link, and return whether it is gone. The kernel deletes it after its other end, but not if
    the other end never entered its box."""
    link = Path("/sys/class/net", BRIDGE_END)
    if link.exists():
        run(["ip", "link", "delete", BRIDGE_END], check=False)
    return not link.exists()


def _delete(folder: Path) -> None:
    mounted = [
        line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()
    ]
    inside = [mount for mount in mounted if Path(mount).is_relative_to(folder)]
    if inside:
        raise BedError(
            f"{folder}: not deleted, for something is mounted in it: {', '.join(inside)}. Unmount it first."
        )
    if folder.exists():
        run(["rm", "-rf", folder])


def _say_that_it_is_up(profile: str) -> None:
    current = state.read().profile
    if current != profile:
        raise BedError(
            f"A bed of the profile {current} is up, and there is one bed at a time. Take it down "
            "first: make cluster-down"
        )
    api = Api(KUBECONFIG)
    if not api.is_there("/readyz"):
        _say("it is up, but its API server does not answer: putting everything back")
        Faults(api).restore()
    services = api.get("/apis/networking.k8s.io/v1/servicecidrs/kubernetes")["spec"][
        "cidrs"
    ]
    if services != [family.services for family in FAMILIES]:
        raise BedError(
            f"The bed that is up has Services at {', '.join(services)} and not at {SERVICES}. Take it down "
            "first (make cluster-down), or name its families in EVERGRAD_BED_FAMILIES."
        )
    _say(f"up already; KUBECONFIG={KUBECONFIG}")


def _show_logs() -> None:
    for file in sorted(logs().glob("*.log")):
        if file.stat().st_size:
            print(f"--- {file.name}\n{last_lines(file, 8)}", file=sys.stderr)


def _say(text: str) -> None:
    print(f"{time.strftime('%T')}  {text}", flush=True)
