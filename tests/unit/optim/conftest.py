"""A mesh in which this process is one of three ranks, without the others."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def third_of_three() -> Iterator[DeviceMesh]:
    """The mesh of rank 2 of 3, whose collectives do nothing."""
    dist.init_process_group("fake", rank=2, world_size=3, store=FakeStore())
    yield init_device_mesh("cpu", (3,))
    dist.destroy_process_group()
