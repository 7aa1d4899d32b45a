"""Sharding by FSDP2, and the choice of how gradients are summed."""

from collections.abc import Sequence

import torch
from torch import nn

from evergrad_manifest.training import Training
from evergrad_trainer.models.gradients import BucketedSum, ExactSum, GradientSum, ShardedSum
from evergrad_trainer.world import World


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformers model: the longest ModuleList in it."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max((list(modules) for modules in lists), key=len, default=[])


def shard(
    model: nn.Module, world: World, *, precision: str, blocks: Sequence[nn.Module] = ()
) -> None:
    """Shard ``model`` in place over all ranks, block by block (FSDP2). Gradients are summed, not averaged.

    In a world of one there is nothing to share, and the model stays as it is.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if world.group is None:
        return
    mesh = DeviceMesh.from_group(world.group, world.device.type)
    # What is gathered has the type of the products, which halves traffic and memory; sums over ranks keep the
    # type of the weights, which are fp32 but in pure bf16.
    policy = {
        "bf16-autocast": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        ),
        "bf16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    }.get(precision, MixedPrecisionPolicy())
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
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without a backward pass has left gathered: the root and the last block.

    A save would find no shards otherwise.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def default_bucket_bytes(*, on_accelerator: bool) -> int:
    """Bytes of a bucket where the file says none: small for TCP, whose sums take the cores that compute.

    NCCL starts each sum with a kernel of its own, so that many small ones cost more than they hide.
    """
    return (64 if on_accelerator else 4) * 2**20


def build_gradient_sum(
    model: nn.Module, training: Training, *, slots_per_step: int, is_sharded: bool
) -> GradientSum:
    """How this run sums its gradients."""
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
