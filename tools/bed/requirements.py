"""Checks whether the bed can run on this machine."""

import os
import shutil
import sys

from bed import toolbox
from bed.places import CGROUPS

# Command → the Debian package that contains it.
COMMANDS = {
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "nft": "nftables",
    "buildah": "buildah",
    "podman": "podman",
    "skopeo": "skopeo",
    "debootstrap": "debootstrap",
    "openssl": "openssl",
    "ip": "iproute2",
    "unshare": "util-linux",
    "mkfs.ext4": "e2fsprogs",
}
PLUGINS = "/usr/lib/cni/bridge"
HIERARCHIES = ("freezer", "memory", "cpu", "cpuset", "pids")


def missing_packages() -> list[str]:
    """Return the Debian packages that the bed needs and whose commands are not on PATH."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [
        package
        for command, package in COMMANDS.items()
        if shutil.which(command, path=path) is None
    ]
    if not os.path.exists(PLUGINS):
        missing.append("containernetworking-plugins")
    return missing


def unavailable() -> str | None:
    """Return why the bed cannot run on this machine, in one line, or None if it can."""
    if sys.platform != "linux":
        return f"The bed needs Linux; this is {sys.platform}. Name another cluster with EVERGRAD_E2E_KUBECONFIG."
    if os.geteuid() != 0:
        return (
            "The bed needs root (namespaces, cgroups, mounts). Name another cluster with "
            "EVERGRAD_E2E_KUBECONFIG."
        )
    absent = [
        name for name in HIERARCHIES if not (CGROUPS / name / "cgroup.procs").exists()
    ]
    if absent:
        kind = (
            "only cgroup v2"
            if (CGROUPS / "cgroup.controllers").exists()
            else f"no hierarchy {', '.join(absent)}"
        )
        return (
            f"The bed needs the cgroup v1 hierarchies below {CGROUPS}; this machine has {kind}. "
            "Name another cluster with EVERGRAD_E2E_KUBECONFIG."
        )
    missing = missing_packages()
    if missing:
        return f"The bed needs packages that are not installed: apt-get install {' '.join(missing)}"
    if shutil.which("go") is None and toolbox.missing(toolbox.NEEDED["full"]):
        return "The bed's programs are not built, and there is no `go` to build them. Install Go 1.24 or newer."
    return None
