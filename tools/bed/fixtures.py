"""Fixtures for tests on a cluster. Import them in the conftest of a folder that needs them: `from
bed.fixtures import cluster, faults`."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from bed import loading, product_images, toolbox
from bed.api import Api
from bed.cluster import Bed
from bed.faults import Faults
from bed.places import KUBECONFIG, STORAGE_CLASS
from bed.requirements import unavailable

OTHER_CLUSTER = "EVERGRAD_E2E_KUBECONFIG"
REQUIRED = "EVERGRAD_E2E_REQUIRED"
OTHER_CLASS = "EVERGRAD_E2E_STORAGE_CLASS"
OTHER_IMAGES = (
    "EVERGRAD_E2E_IMAGES"  # the operator's and the trainer's, with a comma between them
)

BED_PROFILE = "EVERGRAD_BED_PROFILE"  # of the bed that is brought up


@dataclass(frozen=True)
class Cluster:
    """The cluster that tests use: the bed, or the cluster that the environment names."""

    kubeconfig: Path
    api: Api
    is_bed: bool
    storage_class: str | None  # ReadWriteMany; None: the cluster's default

    @property
    def helm(self) -> Path:
        """Return the path of Helm; build it if the cache does not have it."""
        return toolbox.binary("helm")

    @property
    def kubectl(self) -> Path:
        """Return the path of kubectl; build it if the cache does not have it."""
        return toolbox.binary("kubectl")

    def product_images(self) -> tuple[str, str]:
        """Return the images of operator and trainer. For the bed, they are built and loaded; for other
        clusters, the environment names them."""
        if self.is_bed:
            operator, trainer = product_images.ensure()
        else:
            operator, trainer = os.environ[OTHER_IMAGES].split(",")
        return operator, trainer

    def earlier_images(self, commit: str, *, tag: str) -> tuple[str, str]:
        """Return both images of an earlier commit, loaded into the bed's nodes."""
        operator, trainer = product_images.ensure_earlier(commit, tag=tag)
        return operator, trainer

    def load(self, images: Sequence[str | Path]) -> None:
        """Load images into the bed's nodes. Another cluster must have them already."""
        if self.is_bed:
            loading.load(images)


def other_cluster() -> Path | None:
    """Return the kubeconfig that EVERGRAD_E2E_KUBECONFIG names, or None if that is the bed's own."""
    named = os.environ.get(OTHER_CLUSTER)
    return Path(named) if named and Path(named).resolve() != KUBECONFIG.resolve() else None


def require_bed() -> None:
    """Skip the test if this machine cannot run the bed, or fail it if no test may be skipped."""
    reason = unavailable()
    if reason and os.environ.get(REQUIRED):
        pytest.fail(
            f"{reason} ({REQUIRED} is set: here nothing may be left out.)", pytrace=False
        )
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Yield the cluster that EVERGRAD_E2E_KUBECONFIG names, or else the bed. The bed is started, and stopped
    afterwards, unless it was already up."""
    file = other_cluster()
    if file is not None:
        yield Cluster(
            file, Api(file), is_bed=False, storage_class=os.environ.get(OTHER_CLASS)
        )
        return
    require_bed()
    was_up = Bed.is_up()
    Bed.up(os.environ.get(BED_PROFILE, "full"))
    try:
        yield Cluster(KUBECONFIG, Api(KUBECONFIG), is_bed=True, storage_class=STORAGE_CLASS)
    finally:
        if not was_up:
            Bed.down()


@pytest.fixture
def faults(cluster: Cluster) -> Iterator[Faults]:
    """Yield the fault injector of the bed, and undo all faults after the test. Skips on any other cluster."""
    if not cluster.is_bed:
        pytest.skip(
            f"Faults are done to the bed only; {OTHER_CLUSTER} names another cluster."
        )
    found = Faults(cluster.api)
    try:
        yield found
    finally:
        found.restore()
