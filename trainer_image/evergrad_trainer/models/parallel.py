"""Sharding by FSDP2, and the choice of how gradients are summed."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import Training
from evergrad_trainer.errors import HostError
from evergrad_trainer.models.gradients import BucketedSum, ExactSum, GradientSum, ShardedSum
from evergrad_trainer.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a transformers model: the longest ModuleList in it."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max((list(modules) for modules in lists), key=len, default=[])


@dataclass(frozen=True)
class Sharding:
    """How FSDP2 cuts a model: ``shards`` ranks hold one copy of it together (None: all ranks)."""

    precision: str
    shards: int | None = None
    timeout_seconds: float = 600.0
    """Of the collectives inside of one copy and between copies."""


def shard(
    model: nn.Module, world: World, sharding: Sharding, *, blocks: Sequence[nn.Module] = ()
) -> None:
    """Shard ``model`` in place, block by block (FSDP2). Gradients are summed over all ranks, not averaged.

    In a world of one there is nothing to share, and the model stays as it is. Raises HostError where the
    ranks cannot be cut into copies.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if world.group is None:
        return
    mesh = _build_mesh(world, sharding)
    # What is gathered has the type of the products, which halves traffic and memory; sums over ranks keep the
    # type of the weights, which are fp32 but in pure bf16.
    policy = {
        "bf16-autocast": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        ),
        "bf16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    }.get(sharding.precision, MixedPrecisionPolicy())
    # From the inside out: a module takes what its own modules have not taken.
    blocks = blocks or transformer_blocks(model)
    for block in blocks:
        # The last one is the first that the backward pass needs: it would be gathered again at once.
        fully_shard(
            block, mesh=mesh, mp_policy=policy, reshard_after_forward=block is not blocks[-1]
        )
    embedding, head = (
        find() if (find := getattr(model, name, None)) else None
        for name in ("get_input_embeddings", "get_output_embeddings")
    )
    if embedding is not None and getattr(head, "weight", None) is not embedding.weight:
        # Not needed between its forward and its backward pass; the head is, and stays with the root.
        fully_shard(embedding, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    # The step divides by what its samples weigh, not by the number of ranks; gloo has no sums that divide.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _build_mesh(world: World, sharding: Sharding) -> "DeviceMesh":
    """The ranks as one row or, with several copies of the model, as a row for each copy (HSDP).

    Neighbours share a copy: they are workers of one node, or of as few nodes as can be.
    """
    from torch.distributed.device_mesh import DeviceMesh

    device, group, shards = world.device.type, world.group, sharding.shards or world.size
    assert group is not None  # noqa: S101 - the caller has looked
    if problem := problem_of_shards(shards, world.size):
        # Preflight has refused what can never train. This is a group that has lost a node, or not all of it:
        # wrong input would end the run.
        raise HostError(str(problem))
    if shards == world.size:
        return DeviceMesh.from_group(group, device)
    grid = torch.arange(world.size).view(-1, shards)
    timeout = timedelta(seconds=sharding.timeout_seconds)
    own: dict[str, dist.ProcessGroup] = {}
    for name, lines in (("copies", grid.T.tolist()), ("shards", grid.tolist())):
        for ranks in lines:
            # Collective: every rank takes part in making every group, in this order, also in those that it
            # is not in.
            made = dist.new_group(ranks, timeout=timeout)
            if world.rank in ranks:
                own[name] = made
    return DeviceMesh.from_group(
        [own["copies"], own["shards"]], device, mesh=grid, mesh_dim_names=("copies", "shards")
    )


def problem_of_shards(shards: int, world_size: int) -> Problem | None:
    """What keeps ``world_size`` ranks from being copies of ``shards`` ranks each; None if nothing does."""
    if world_size % shards == 0:
        return None
    return Problem(
        "spec.training.runtime.shards",
        f"{world_size} workers cannot be cut into copies of {shards}",
        "each copy of the model is held by as many workers",
        "Use a divisor of the workers of a node, so that every number of nodes can train",
    )


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without a backward pass has left gathered: the root and the last block.

    A save would find no shards otherwise.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def default_bucket_bytes(*, on_accelerator: bool) -> int:
    """Return the bytes of a bucket where the file says none: few for TCP, whose sums take cores that compute.

    NCCL starts each sum with a kernel of its own, so that many small ones cost more than they hide.
    """
    return (64 if on_accelerator else 4) * 2**20


def build_gradient_sum(
    model: nn.Module, training: Training, *, slots_per_step: int, is_sharded: bool
) -> GradientSum:
    """Choose how this run sums its gradients."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    on_accelerator = parameters[0].device.type == "cuda"
    bucket_bytes = training.runtime.bucket_size or default_bucket_bytes(
        on_accelerator=on_accelerator
    )
    if is_sharded:
        return ShardedSum(model)
    if training.reproducibility.elastic == "exact":
        return ExactSum(parameters, bucket_bytes=bucket_bytes, slots_per_step=slots_per_step)
    return BucketedSum(parameters, bucket_bytes=bucket_bytes)
