"""The only module that initialises process groups, devices, threads and seeds.

A ``World`` is who trains together right now. The loop asks a ``Membership`` for it between two steps and nowhere
else, so that group, rank and size may change there.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Launch:
    """What the launcher (torchrun's environment) says about this process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Read torchrun's variables; without them this is a world of one."""
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


@dataclass(frozen=True)
class World:
    """One generation's group as seen by one process. Groups are None in a world of one.

    ``group`` carries the model's tensors on ``device``; ``control`` (always on CPU) small integers between steps;
    ``checkpoint`` (always on CPU) belongs to the checkpoint thread alone.
    """

    generation: int
    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    control: dist.ProcessGroup | None = None
    checkpoint: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes what exists once a run."""
        return self.rank == 0

    def sum_integers(self, values: torch.Tensor) -> torch.Tensor:
        """Sum an int64 CPU tensor over all ranks, in place (wrapping modulo 2**64); returns it."""
        if self.control is not None:
            dist.all_reduce(values, group=self.control)
        return values

    def all_agree(self, fine: bool) -> bool:
        """Whether ``fine`` holds on every rank."""
        return int(self.sum_integers(torch.tensor([0 if fine else 1]))) == 0

    def broadcast_json(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank; the others' argument is ignored."""
        if self.control is None:
            return value
        data = json.dumps(value).encode() if self.is_main else b""
        size = self.sum_integers(torch.tensor([len(data)]))
        buffer = torch.zeros(int(size), dtype=torch.uint8)
        if self.is_main:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, group=self.control, group_src=0)
        return json.loads(bytes(buffer.tolist()))

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value on every rank, in rank order."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.size
        for rank, data in enumerate(self._all_gather_bytes(json.dumps(value).encode())):
            values[rank] = json.loads(data)
        return values

    def barrier(self) -> None:
        """Wait for every rank."""
        self.all_agree(True)

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(data)
        self.sum_integers(sizes)
        longest = max(1, int(sizes.max()))
        padded = torch.zeros(longest, dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(rows, padded, group=self.control)
        return [bytes(row[: int(size)].tolist()) for row, size in zip(rows, sizes, strict=True)]


class Membership:
    """The one place that knows the current world. Changes only between two steps."""

    def __init__(self, world: World) -> None:
        self._world = world

    @property
    def world(self) -> World:
        return self._world

    def move_to(self, world: World) -> None:
        """Go on in another world. Only between two steps."""
        self._world = world


def choose_device(wanted: Literal["auto", "cpu", "cuda"], *, local_rank: int) -> torch.device:
    """``auto`` is this process's own accelerator where there is one, else the CPU. Raises RuntimeError for a missing cuda."""
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
    """Initialise the process groups named by the launcher. Generation 0 until the run directory is claimed."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.world_size == 1:
        return World(generation=0, rank=0, size=1, device=device)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://{launch.address}:{launch.port}",
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return World(
        generation=0,
        rank=launch.rank,
        size=launch.world_size,
        device=device,
        group=dist.group.WORLD,
        control=dist.new_group(backend="gloo", timeout=timeout),
        checkpoint=dist.new_group(backend="gloo", timeout=timeout),
    )


def with_generation(world: World, generation: int) -> World:
    """The same world under the generation it has claimed."""
    return replace(world, generation=generation)


def leave_world(world: World) -> None:
    """Tear the process groups down after a success. Never in an exception's path: peers may be gone."""
    if world.group is not None:
        dist.destroy_process_group()


def count_accelerators() -> int:
    """Accelerators this process could use, without initialising any (a process that has must not fork)."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.device_count()


def accelerator_memory_bytes() -> int | None:
    """Memory of the first accelerator; None without one. Initialises it."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
