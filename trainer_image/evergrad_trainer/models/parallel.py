"""Sharding with FSDP2, and the choice of how gradients are summed."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import Training
from evergrad_trainer.base import torch_private
from evergrad_trainer.base.errors import HostError
from evergrad_trainer.distributed.world import World
from evergrad_trainer.models.build import DTYPES, PRODUCTS
from evergrad_trainer.models.gradients import BucketedSum, ExactSum, GradientSum, ShardedSum

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_PRODUCT_MODULES: Final = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
"""Modules that use their weights only in a matrix product, for which autocast rounds the weights.

Subclasses do not count, because their own forward pass may read the weights in full precision.
"""
LARGE_BYTES: Final = 64 * 2**20
"""Size of the weights from which a frozen module is sharded. A smaller module fits in every process, and
gathering it in every pass would cost more than it saves."""


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a transformers model: the modules of its longest ModuleList."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max((list(modules) for modules in lists), key=len, default=[])


@dataclass(frozen=True)
class Sharding:
    """How FSDP2 shards a model: each group of ``shards`` ranks holds one copy (None: all ranks)."""

    precision: str
    shards: int | None = None
    timeout_seconds: float = 600.0
    """Timeout of the collectives within one copy and between copies."""


@dataclass(frozen=True)
class ShardPlan:
    """A module that is sharded as a separate tree. Its weights are gathered only while it is called."""

    module: nn.Module
    blocks: Sequence[nn.Module] = ()
    """Parts that are gathered one by one. If empty, the modules of the longest ModuleList."""
    is_frozen: bool = False

    def units(self) -> list[nn.Module]:
        """Return the parts that are gathered one by one, each without earlier parts; the module is last."""
        blocks = self.blocks or transformer_blocks(self.module)
        units = [block for block in dict.fromkeys(blocks) if block is not self.module]
        embedding, head = (
            find() if (find := getattr(self.module, name, None)) else None
            for name in ("get_input_embeddings", "get_output_embeddings")
        )
        if embedding is not None and getattr(head, "weight", None) is not embedding.weight:
            # The embedding is not needed between its forward and its backward pass. The head is needed, so
            # it stays with the root.
            units.append(embedding)
        return [*units, self.module]

    def parameters(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Yield each unit with its parameters and their names, once for each module that uses a parameter."""
        names = {module: path for path, module in self.module.named_modules()}
        *inner, root = self.units()
        rest = set(names).difference(*(unit.modules() for unit in inner))
        for unit in (*inner, root):
            for module in unit.modules():
                if unit is root and module not in rest:
                    continue
                for own, parameter in module.named_parameters(recurse=False):
                    yield unit, ".".join(filter(None, (names[module], own))), parameter


def find_shared(cuts: Mapping[str, ShardPlan]) -> Iterator[tuple[str, str]]:
    """Yield both names of each parameter that two units share.

    FSDP2 cannot shard such a parameter: each unit would shard its own copy and train it separately.
    """
    seen: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for name, cut in cuts.items():
        for unit, own, parameter in cut.parameters():
            first, where = seen.setdefault(parameter, (unit, f"{name}.{own}"))
            if first is not unit:
                yield where, f"{name}.{own}"


def find_products(model: nn.Module) -> set[tuple[nn.Module, str]]:
    """Return the parameters, by module and name, that are used only in matrix products.

    Autocast computes these products in a narrower type.
    """
    users: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            users.setdefault(parameter, []).append((module, name))
    adapters = set(_adapters_in(model))
    return {
        one
        for uses in users.values()
        if all(_is_product(module) and module not in adapters for module, _ in uses)
        for one in uses
    }


def _is_product(module: nn.Module) -> bool:
    kind = type(module)
    # Compare the name of GPT-2's layer, not its class, because transformers may not have been imported.
    name = f"{kind.__module__}.{kind.__name__}"
    return kind in _PRODUCT_MODULES or name == "transformers.pytorch_utils.Conv1D"


def _adapters_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of adapters in ``module``.

    peft converts their inputs to the type of their weights, and dropout would round differently in a narrower
    type, so adapter weights keep their type.
    """
    for part in module.modules():
        if type(part).__module__.startswith("peft."):
            for name, child in part.named_children():
                if name != "base_layer":
                    yield from child.modules()


def shard(cuts: Sequence[ShardPlan], world: World, sharding: Sharding) -> None:
    """Shard modules in place, unit by unit (FSDP2). Gradients are summed over all ranks, not averaged.

    Weights on the CPU move to the device unit by unit. If there is only one rank, the modules do not change.
    Raises HostError if the ranks cannot be divided into copies of the model.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if world.group is None:
        return
    # Use one mesh for all modules, because the gradient norm is computed over the shards of all modules.
    mesh = _build_mesh(world, sharding)
    # Only the gathered weights have another type. Inputs and outputs have the types that autocast uses for
    # modules without sharding, and sums over ranks keep the type of the weights.
    weights, rounded = DTYPES[sharding.precision], PRODUCTS[sharding.precision]
    policy = MixedPrecisionPolicy(reduce_dtype=weights, cast_forward_inputs=False)
    for cut in cuts:
        # Shard from the inside out: a unit contains the parameters that its inner units do not contain.
        *inner, root = cut.units()
        blocks = cut.blocks or transformer_blocks(cut.module)
        products = find_products(cut.module) if rounded != weights else set()
        for unit in inner:
            # The backward pass needs the last block first, so freeing it would only gather it again. Most
            # frozen modules have no backward pass.
            is_needed_next = bool(blocks) and unit is blocks[-1] and not cut.is_frozen
            fully_shard(
                unit, mesh=mesh, mp_policy=policy, reshard_after_forward=not is_needed_next
            )
        fully_shard(root, mesh=mesh, mp_policy=policy)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                # Gather the rounded weights: this halves traffic and memory, and gives the same bits as
                # autocast with unsharded weights.
                torch_private.gather_as(module, products, rounded)
                # The step divides by the weight of its samples, not by the number of ranks. Also, gloo does
                # not support averaging.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        # Run this hook before the hook of FSDP2, and only on the root, because blocks may be compiled with
        # their hooks.
        root.register_forward_pre_hook(_require_own_weights, prepend=True)


def _require_own_weights(module: nn.Module, _inputs: Any) -> None:
    """Raise ValueError if the module is called with other weights (torch.func.functional_call).

    FSDP2 would replace them with the gathered weights, and compute the result of another model.
    """
    from torch.distributed.fsdp import FSDPModule

    parts = (part for part in module.modules() if isinstance(part, FSDPModule))
    if any(torch_private.has_foreign_weights(part) for part in parts):
        raise ValueError(
            f"{type(module).__name__} is called with weights that are not its own, and fsdp2 would compute "
            "with its own ones: call a frozen copy of the module with them, and name the copy in "
            "Modules.replicated"
        )


def _build_mesh(world: World, sharding: Sharding) -> "DeviceMesh":
    """Build a mesh with one row of ranks or, with several copies of the model, one row per copy (HSDP).

    Consecutive ranks share a copy, so that a copy spans as few nodes as possible. For example, 8 ranks with
    ``shards=4`` form the rows [0, 1, 2, 3] and [4, 5, 6, 7].
    """
    from torch.distributed.device_mesh import DeviceMesh

    device, group, shards = world.device.type, world.group, sharding.shards or world.size
    assert group is not None  # noqa: S101 - the caller has looked
    if problem := problem_of_shards(shards, world.size):
        # Raise HostError, not an error of wrong input, which would end the run: preflight has refused numbers
        # that can never train, so this group has lost a node or is not complete yet.
        raise HostError(str(problem))
    if shards == world.size:
        return DeviceMesh.from_group(group, device)
    grid = torch.arange(world.size).view(-1, shards)
    timeout = timedelta(seconds=sharding.timeout_seconds)
    own: dict[str, dist.ProcessGroup] = {}
    for name, lines in (("copies", grid.T.tolist()), ("shards", grid.tolist())):
        for ranks in lines:
            # Collective: every rank must create every group in this order, also the groups that do not
            # include the rank.
            made = dist.new_group(ranks, timeout=timeout)
            if world.rank in ranks:
                own[name] = made
    return DeviceMesh.from_group(
        [own["copies"], own["shards"]],
        device,
        mesh=grid,
        mesh_dim_names=("copies", "shards"),
    )


def problem_of_shards(shards: int, world_size: int) -> Problem | None:
    """Return the problem if ``world_size`` ranks cannot form copies of ``shards`` ranks each, else None."""
    if world_size % shards == 0:
        return None
    return Problem(
        "spec.training.runtime.shards",
        f"{world_size} workers cannot be cut into copies of {shards}",
        "each copy of the model is held by as many workers",
        "Use a divisor of the workers of a node, so that every number of nodes can train",
    )


def reshard(*modules: nn.Module) -> None:
    """Free the gathered weights, and reset the state of forward passes without a backward pass.

    A root and its last block stay gathered for the backward pass. If there is no backward pass, the next pass
    would compute with the weights from before the update, and a save would find no shards.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in modules:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
                torch_private.forget_passes(part)


def default_bucket_bytes(*, on_accelerator: bool) -> int:
    """Return the bucket size in bytes to use if the manifest sets none: 64 MiB with NCCL, 4 MiB with gloo.

    Buckets are small for TCP, because its sums use CPU cores that also compute. NCCL launches a kernel for
    each sum, so many small sums cost more than they hide.
    """
    return (64 if on_accelerator else 4) * 2**20


def build_gradient_sum(
    model: nn.Module,
    training: Training,
    *,
    slots_per_step: int,
    is_sharded: bool,
    frozen: Sequence[nn.Module] = (),
) -> GradientSum:
    """Choose how this run sums its gradients.

    ``frozen``: frozen modules that are sharded too and used in the passes.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    on_accelerator = parameters[0].device.type == "cuda"
    bucket_bytes = training.runtime.bucket_size or default_bucket_bytes(
        on_accelerator=on_accelerator
    )
    if is_sharded:
        return ShardedSum(model, free=functools.partial(reshard, model, *frozen))
    if training.reproducibility.elastic == "exact":
        return ExactSum(
            parameters, bucket_bytes=bucket_bytes, slots_per_step=slots_per_step
        )
    return BucketedSum(parameters, bucket_bytes=bucket_bytes)
