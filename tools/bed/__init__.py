"""A real two-node Kubernetes on this machine, for tests: two kubelets with containerd in namespaces, brought
up in seconds.

The product knows nothing of it. How it is used: docs/project/testing-on-kubernetes.md.
"""

from bed.cluster import Bed
from bed.requirements import unavailable
from bed.shell import BedError

__all__ = ["Bed", "BedError", "unavailable"]
