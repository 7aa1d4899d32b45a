"""Where everything of the bed lies, and the addresses it uses: all fixed, but for the number of the bed
(EVERGRAD_BED)."""

import os
from dataclasses import dataclass
from pathlib import Path

# Beds of other numbers stand beside the first, with other names and addresses: its own tests need one of
# theirs.
NUMBER = int(os.environ.get("EVERGRAD_BED", "0"))
NAME = f"bed{NUMBER or ''}"

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER = REPOSITORY / f".cluster{NUMBER or ''}"
KUBECONFIG = CLUSTER / "kubeconfig"

# Of the machine and not of a clone: bridges, cgroups and sysctls are too. The nodes have a /run of their own
# and do not see it.
STATES = Path("/run/evergrad-beds")
STATE = STATES / NAME

CGROUPS = Path("/sys/fs/cgroup")
NETWORK = f"10.{100 + NUMBER}.0"
HOST_ADDRESS = f"{NETWORK}.254"
CONTROL_ADDRESS = f"{NETWORK}.1"
API_SERVER = f"https://{CONTROL_ADDRESS}:6443"
SERVICES = f"10.{96 - NUMBER}.0.0/16"
API_SERVICE = f"10.{96 - NUMBER}.0.1"
PODS = f"10.{244 + NUMBER}.0.0/16"
BRIDGE_END = f"bed{NUMBER}"  # the link of the machine's own network namespace
STORAGE_CLASS = "shared"
SINGLE_CLASS = "single"
"""A class whose volumes are ReadWriteOnce only, like those of a laptop's cluster."""


@dataclass(frozen=True)
class Node:
    """One node: its name and its numbers."""

    name: str
    number: int

    @property
    def address(self) -> str:
        """The node's InternalIP; its NodePorts are there too."""
        return f"{NETWORK}.{10 + self.number}"

    @property
    def pods(self) -> str:
        """The range of its pods' addresses."""
        return f"10.{244 + NUMBER}.{self.number}.0/24"


NODES = (Node("n1", 1), Node("n2", 2))


def node_named(name: str) -> Node:
    """The node of this name; ValueError for any other."""
    for node in NODES:
        if node.name == name:
            return node
    raise ValueError(
        f"{name}: no node of the bed. It has {', '.join(node.name for node in NODES)}."
    )


def cache() -> Path:
    """The folder outside the tree for what is made once: binaries, images.

    Also the bed's scratch, which must share its disk.
    """
    named = os.environ.get("EVERGRAD_CACHE")
    if named:
        return Path(named).resolve()
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "evergrad"
    )


def work() -> Path:
    """The bed's scratch: deleted by `down`."""
    return cache() / NAME


def volumes() -> Path:
    """The directories behind persistent volumes; the same path in both nodes."""
    return work() / "volumes"


def logs() -> Path:
    """One log per process."""
    return work() / "logs"


def pki() -> Path:
    """Certificates, keys and kubeconfigs."""
    return work() / "pki"
