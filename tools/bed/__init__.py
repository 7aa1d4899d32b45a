"""A real two-node Kubernetes on this machine, for tests: two kubelets with containerd in namespaces, which
start in seconds.

The product does not depend on it. For its use, see docs/project/testing-on-kubernetes.md.
"""

from bed.cluster import Bed
from bed.requirements import unavailable
from bed.shell import BedError

__all__ = ["Bed", "BedError", "unavailable"]
