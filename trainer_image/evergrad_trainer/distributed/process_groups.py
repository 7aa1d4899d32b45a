"""The only module that initialises process groups, devices and threads, and that takes groups down again."""

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
    """Facts about this process from the launcher (torchrun's environment)."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Read torchrun's variables; without them the world is of one process."""
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
    """Choose this process's device. ``auto``: its own accelerator where there is one, else the CPU.

    Raises RuntimeError for a missing cuda.
    """
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise RuntimeError("no cuda device is visible to this process")
    if wanted == "cpu" or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def set_threads(threads: int) -> None:
    """Give this process's CPU kernels ``threads`` threads."""
    torch.set_num_threads(threads)


def join_world(launch: Launch, *, device: torch.device, timeout_seconds: int) -> World:
    """Initialise the process groups named by the launcher.

    Generation 0 until the run directory is claimed.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.world_size == 1:
        return World(generation=0, rank=0, size=1, device=device)
    timeout = timedelta(seconds=timeout_seconds)
    # Collective: waits for all that the launcher has started.
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
    """Return the same world under the generation it has claimed."""
    return replace(world, generation=generation)


def leave_world(world: World) -> None:
    """Take the process groups down after a success. Never in an exception's path: peers may be gone."""
    if world.group is not None:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Place:
    """One process's place in a generation, and where its members meet: a fresh store at
    ``address``:``port``."""

    generation: int
    rank: int
    size: int
    address: str
    port: int


def setup_limit(base_seconds: float, *, device: torch.device, size: int) -> float:
    """Seconds that ``size`` members, who are all ready, may take to meet; ``base_seconds`` for two CPUs.

    The first communicator of NCCL on a cold machine takes tens of seconds, and what rank 0 does for each
    member takes its time in a large world.
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
    """Meet the other members of ``place`` in a group that can be given up: see :func:`abandon_world`.

    Raises PeerLostError when they are not all there within the limit, :func:`setup_limit` of
    ``setup_seconds``. ``timeout_seconds`` holds for the collectives.
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
        # Collective: waits for the slowest member, at most for the limit.
        group, control, checkpoint = _meet(
            place, device, transport, timedelta(seconds=limit)
        )
    except RuntimeError as error:
        raise PeerLostError(
            f"the group of generation {place.generation} did not form: {error}"
        ) from error
    # From here on it can be aborted. An abort that was asked for while it formed is done now, and leaves no
    # group.
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
    """The groups for the model's tensors, for small integers and for checkpoints. Raises RuntimeError."""
    # A set-up that failed leaves the counter raised; it is part of the keys under which members meet.
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
"""Groups, collectives and tensors of operations that never ended: their threads may still write, so nothing
is freed."""


def abandon_world(
    world: World | None, transport: Transport, *, patience_seconds: float = 0.05
) -> bool:
    """Take down the groups of this process, whatever has become of them; whether buffers of collectives must
    not be used again.

    ``transport``: that of the groups, also if they did not form. The caller has cut the sockets where peers
    are gone: without that, destroying a group of gloo waits for operations that cannot end.
    """
    if world is not None and world.group is not None:
        # Before looking at what is unfinished: where this aborts, it ends by that.
        transport.give_up()
    # Those that have ended since, at the latest by the groups' timeout, give back their threads and sockets.
    _leaked[:] = [
        leak for leak in _leaked if not all(work.is_completed() for work, _ in leak[1])
    ]

    # Operations whose sockets were cut end within milliseconds; the patience is for all of them together.
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
    """Count the accelerators this process could use, without initialising any: one that has must not fork."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.device_count()


def accelerator_memory_bytes() -> int | None:
    """Return the memory of the first accelerator, which this initialises; None without one."""
    return (
        torch.cuda.get_device_properties(0).total_memory
        if torch.cuda.is_available()
        else None
    )
