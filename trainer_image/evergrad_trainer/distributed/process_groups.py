"""Initialises process groups, devices and threads, and destroys process groups. No other module does."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from evergrad_common.addresses import join_address
from evergrad_trainer.base import torch_private
from evergrad_trainer.base.errors import PeerLostError
from evergrad_trainer.distributed.transports import Pending, Transport, choose_transport
from evergrad_trainer.distributed.world import Interrupt, World


@dataclass(frozen=True)
class Launch:
    """The position of this process among the processes of the launcher, from torchrun's environment."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Read torchrun's environment variables. If ``WORLD_SIZE`` is not set, the world has one process."""
    env = os.environ if environment is None else environment
    if "WORLD_SIZE" not in env:
        return Launch()
    return Launch(
        rank=int(env["RANK"]),
        local_rank=int(env.get("LOCAL_RANK", env["RANK"])),
        world_size=int(env["WORLD_SIZE"]),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
        address=env.get("MASTER_ADDR", "127.0.0.1"),
        port=int(env.get("MASTER_PORT", "0")),
    )


def choose_device(
    wanted: Literal["auto", "cpu", "cuda"], *, local_rank: int
) -> torch.device:
    """Return the device of this process.

    ``auto`` selects the accelerator for ``local_rank`` if there is one, else the CPU. Raises RuntimeError if
    ``wanted`` is ``cuda`` and no CUDA device is visible.
    """
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise RuntimeError("no cuda device is visible to this process")
    if wanted == "cpu" or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def set_threads(threads: int) -> None:
    """Set the number of threads that CPU kernels of this process use."""
    torch.set_num_threads(threads)


def join_world(launch: Launch, *, device: torch.device, timeout_seconds: int) -> World:
    """Initialise the process groups that the launcher describes.

    The generation of the returned world is 0 until the run directory is claimed.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.world_size == 1:
        return World(generation=0, rank=0, size=1, device=device)
    timeout = timedelta(seconds=timeout_seconds)
    # Collective: waits for all processes that the launcher has started.
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://{join_address(launch.address, launch.port)}",
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    # Collective: every rank makes the same groups in the same order.
    return World(
        generation=0,
        rank=launch.rank,
        size=launch.world_size,
        device=device,
        group=dist.group.WORLD,
        control=dist.new_group(backend="gloo", timeout=timeout),
        checkpoint=dist.new_group(backend="gloo", timeout=timeout),
        transport=choose_transport(device),
    )


def with_generation(world: World, generation: int) -> World:
    """Return ``world`` with the generation that it has claimed."""
    return replace(world, generation=generation)


def leave_world(world: World) -> None:
    """Destroy the process groups after a success.

    Do not call this while an exception is handled, because it would wait for peers that may be gone.
    """
    if world.group is not None:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Place:
    """One process's rank in a generation, and the address of a new store at which the members meet."""

    generation: int
    rank: int
    size: int
    address: str
    port: int


def setup_limit(base_seconds: float, *, device: torch.device, size: int) -> float:
    """Return the seconds that ``size`` members may take to form a group once all of them are ready.

    ``base_seconds`` is enough for two CPU processes. The limit is higher for accelerators, because NCCL's
    first communicator on a cold machine takes tens of seconds. It grows with ``size``, because rank 0 does
    some work for each member. For example, 30 s for CPUs become 35 s with 100 members.
    """
    if device.type == "cuda":
        return base_seconds + 55.0 + 0.25 * size
    return base_seconds + 0.05 * size


def form_world(
    place: Place,
    *,
    device: torch.device,
    transport: Transport,
    interrupt: Interrupt,
    setup_seconds: float,
    timeout_seconds: float,
) -> World:
    """Form a process group with the other members of the generation. See also :func:`abandon_world`.

    ``setup_seconds`` is the base of the time limit, see :func:`setup_limit`. ``timeout_seconds`` is the
    timeout of the collectives. Raises PeerLostError if not all members arrive within the limit, or if the
    group is abandoned while it forms.
    """
    alone = World(
        place.generation,
        rank=0,
        size=1,
        device=device,
        interrupt=interrupt,
        transport=transport,
    )
    if place.size == 1:
        return alone
    limit = setup_limit(setup_seconds, device=device, size=place.size)
    try:
        # Collective: waits for the slowest member, but not longer than the limit.
        group, control, checkpoint = _meet(
            place, device, transport, timedelta(seconds=limit)
        )
    except RuntimeError as error:
        raise PeerLostError(
            f"the group of generation {place.generation} did not form: {error}"
        ) from error
    # From now on the group can be aborted. If an abort was requested while the group formed, it happens here
    # and leaves no group.
    transport.opened()
    if interrupt.is_set:
        raise PeerLostError(
            f"the group of generation {place.generation} was given up while it formed"
        )
    for one in (group, control, checkpoint):
        torch_private.set_timeout(one, timedelta(seconds=timeout_seconds))
    return replace(
        alone,
        rank=place.rank,
        size=place.size,
        group=group,
        control=control,
        checkpoint=checkpoint,
        timeout_seconds=timeout_seconds,
    )


def _meet(
    place: Place, device: torch.device, transport: Transport, patience: timedelta
) -> tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup]:
    """Create the groups for the model's tensors, for small integers and for checkpoints.

    Raises RuntimeError if a member is missing or a connection fails.
    """
    # A failed set-up leaves the counter incremented. The counter is part of the keys in the store, so members
    # with different counters would not find each other.
    torch_private.reset_group_counter()
    store = TCPStore(
        place.address, place.port, is_master=False, timeout=patience, wait_for_workers=False
    )
    dist.init_process_group(
        backend=transport.backend,
        store=PrefixStore(str(place.generation), store),
        rank=place.rank,
        world_size=place.size,
        timeout=patience,
        device_id=device if device.type == "cuda" else None,
    )
    control, checkpoint = (
        dist.new_group(backend="gloo", timeout=patience) for _ in range(2)
    )
    group = dist.group.WORLD
    assert group is not None  # noqa: S101 - init_process_group has just set it
    return group, control, checkpoint


_leaked: list[tuple[World, list[tuple[Pending, tuple[torch.Tensor, ...]]]]] = []
"""Worlds, collectives and tensors of operations that have not ended. Their threads may still write to the
tensors, so the memory must not be freed."""


def abandon_world(
    world: World | None, transport: Transport, *, patience_seconds: float = 0.05
) -> bool:
    """Destroy the groups of this process in any state.

    Returns whether operations are still running, in which case the buffers of collectives must not be used
    again. ``transport`` is the transport of the groups, and is required even if the groups did not form. If
    peers are gone, the caller must cut the sockets first. Otherwise, destroying a gloo group would wait for
    operations that cannot end.
    """
    if world is not None and world.group is not None:
        # This must come before the check for unfinished operations, because an abort ends them.
        transport.give_up()
    # Drop the entries whose operations have ended since, at the latest by the groups' timeout. This releases
    # their threads and sockets.
    _leaked[:] = [
        leak for leak in _leaked if not all(work.is_completed() for work, _ in leak[1])
    ]

    # Operations whose sockets were cut end within milliseconds. The deadline is for all of them together.
    deadline = time.monotonic() + patience_seconds
    stuck = [] if world is None else list(world.unfinished)
    while stuck := [entry for entry in stuck if not entry[0].is_completed()]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    if stuck and world is not None:
        _leaked.append((world, stuck))
    transport.close()
    return bool(stuck)


def count_accelerators() -> int:
    """Return the number of accelerators that this process could use, without initialising any of them.

    A process that has initialised an accelerator must not fork.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.device_count()


def accelerator_memory_bytes() -> int | None:
    """Initialise the first accelerator and return its memory in bytes, or None."""
    return (
        torch.cuda.get_device_properties(0).total_memory
        if torch.cuda.is_available()
        else None
    )
