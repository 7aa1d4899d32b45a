"""Paths and addresses of the bed. They are fixed, except for the number of the bed (EVERGRAD_BED) and its
address families (EVERGRAD_BED_FAMILIES)."""

import os
from dataclasses import dataclass
from pathlib import Path

# Beds with other numbers can run next to the first bed, with other names and addresses. The bed's own tests
# use one.
NUMBER = int(os.environ.get("EVERGRAD_BED", "0"))
NAME = f"bed{NUMBER or ''}"

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER = REPOSITORY / f".cluster{NUMBER or ''}"
KUBECONFIG = CLUSTER / "kubeconfig"

# This folder belongs to the machine, not to a clone of the repository, like bridges, cgroups and sysctls. The
# nodes have their own /run and do not see it.
STATES = Path("/run/evergrad-beds")
STATE = STATES / NAME

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Family:
    """The addresses of one IP family. Braces in `machines` and `pods_of_a_node` are replaced by a number."""

    name: str
    machines: str
    machines_length: int
    address_flags: str
    pods: str
    pods_of_a_node: str
    services: str
    api_service: str
    everywhere: str


_FAMILIES = (
    Family(
        name="ipv4",
        machines=f"10.{100 + NUMBER}.0.{{}}",
        machines_length=24,
        address_flags="",
        pods=f"10.{244 + NUMBER}.0.0/16",
        pods_of_a_node=f"10.{244 + NUMBER}.{{}}.0/24",
        services=f"10.{96 - NUMBER}.0.0/16",
        api_service=f"10.{96 - NUMBER}.0.1",
        everywhere="0.0.0.0/0",
    ),
    Family(
        name="ipv6",
        machines=f"fd00:{100 + NUMBER}::{{}}",
        machines_length=64,
        # Disable duplicate address detection, during which the kernel refuses the address for a second.
        address_flags="nodad",
        pods=f"fd00:{100 + NUMBER}:244::/48",
        pods_of_a_node=f"fd00:{100 + NUMBER}:244:{{}}::/64",
        services=f"fd00:{100 + NUMBER}:96::/112",
        api_service=f"fd00:{100 + NUMBER}:96::1",
        everywhere="::/0",
    ),
)


def families_named(text: str) -> tuple[Family, ...]:
    """Return the families of a list such as `ipv6,ipv4`, in order. Raises ValueError for other texts."""
    known = {family.name: family for family in _FAMILIES}
    names = text.split(",")
    if not set(names) <= set(known) or len(set(names)) < len(names):
        raise ValueError(
            f"EVERGRAD_BED_FAMILIES: {text!r} is no list of families. Write {' or '.join(known)}, or both "
            "with a comma between them; the first is that of `status.podIP`."
        )
    return tuple(known[name] for name in names)


def in_url(address: str) -> str:
    """Return the address in the form that precedes a port in a URL."""
    return f"[{address}]" if ":" in address else address


FAMILIES = families_named(os.environ.get("EVERGRAD_BED_FAMILIES", "ipv4"))
# Components with a single address have an address of the first family.
HOST_ADDRESS = FAMILIES[0].machines.format(254)
CONTROL_ADDRESS = FAMILIES[0].machines.format(1)
API_SERVER = f"https://{in_url(CONTROL_ADDRESS)}:6443"
API_SERVICE = FAMILIES[0].api_service
SERVICES = ",".join(family.services for family in FAMILIES)
PODS = ",".join(family.pods for family in FAMILIES)
BRIDGE_END = f"bed{NUMBER}"  # the link of the machine's own network namespace
STORAGE_CLASS = "shared"
SINGLE_CLASS = "single"
"""Storage class with only ReadWriteOnce volumes, like the volumes of a local cluster."""


@dataclass(frozen=True)
class Node:
    """The name and the numbers of one node."""

    name: str
    number: int

    @property
    def address(self) -> str:
        """The node's first InternalIP, which also serves its NodePorts."""
        return self.addresses[0]

    @property
    def addresses(self) -> list[str]:
        """The node's InternalIPs, one per family."""
        return [self.address_in(family) for family in FAMILIES]

    @property
    def pods(self) -> list[str]:
        """The address ranges of the node's pods, one per family."""
        return [self.pods_in(family) for family in FAMILIES]

    def address_in(self, family: Family) -> str:
        """Return the node's address of this family."""
        return family.machines.format(10 + self.number)

    def pods_in(self, family: Family) -> str:
        """Return the address range of the node's pods in this family."""
        return family.pods_of_a_node.format(self.number)


NODES = (Node("n1", 1), Node("n2", 2))


def node_named(name: str) -> Node:
    """Return the node of this name. Raises ValueError for other names."""
    for node in NODES:
        if node.name == name:
            return node
    raise ValueError(
        f"{name}: no node of the bed. It has {', '.join(node.name for node in NODES)}."
    )


def cache() -> Path:
    """Return the folder, outside the repository, for files that are built once: binaries and images.

    It is also the bed's scratch folder, which must be on the same disk.
    """
    named = os.environ.get("EVERGRAD_CACHE")
    if named:
        return Path(named).resolve()
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve()
        / "evergrad"
    )


def work() -> Path:
    """Return the bed's scratch folder, which `down` deletes."""
    return cache() / NAME


def volumes() -> Path:
    """Return the folder of the persistent volumes. Its path is the same in both nodes."""
    return work() / "volumes"


def logs() -> Path:
    """Return the folder with one log per process."""
    return work() / "logs"


def pki() -> Path:
    """Return the folder for certificates, keys and kubeconfigs."""
    return work() / "pki"
