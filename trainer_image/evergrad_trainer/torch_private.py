"""Every private name of torch that Evergrad uses, each with the reason; a test per supported torch holds
them."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import _python_dispatch

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""The base of a class that sees each operation before it runs. torch documents it and has no public name
for it."""


def reset_group_counter() -> None:
    """Make this process meet fresh ones again after an ``init_process_group`` that failed.

    torch counts groups and puts the number into the store keys under which members meet. A failed set-up
    leaves it raised, and there is nothing to destroy that would set it back.
    """
    distributed_c10d._world.group_count = 0


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Give later operations of ``group`` another timeout than the one it was set up with."""
    distributed_c10d._set_pg_timeout(timeout, group)


def abort_groups() -> None:
    """Free the threads of this process that wait in NCCL; gloo has no such call.

    Not verified: needs an accelerator.
    """
    distributed_c10d._abort_process_group()


def scale(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply all ``tensors`` by ``factor``, in place: a few kernels in all, where a loop would launch one
    for each.

    torch's own clipping calls the same name; it has no public one.
    """
    torch._foreach_mul_(tensors, factor)


def import_slow_parts() -> None:
    """Import what the first optimizer step of a process, and torch's log formatter at the first error,
    import: seconds."""
    import torch._dynamo  # noqa: F401


def group_state() -> tuple[int, Any]:
    """(number of groups counted, the default group): what a test of a failed set-up looks at."""
    return distributed_c10d._world.group_count, distributed_c10d._world.default_pg
