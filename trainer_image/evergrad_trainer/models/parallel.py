"""Sharding by FSDP2, and the choice of how gradients are summed."""

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
"""Modules whose weights autocast rounds before it computes with them, and that do nothing else with them.

Just these classes, none derived from them: a forward pass of its own may read the weights as they are.
"""
LARGE_BYTES: Final = 64 * 2**20
"""Weights from which on a frozen module is cut: less is no burden for a process, and gathering it in every
pass would cost more than it saves."""


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
    """Timeout of the collectives inside of one copy and between copies."""


@dataclass(frozen=True)
class ShardPlan:
    """A module that is cut as a tree of its own: its weights are whole while it is called, and only then."""

    module: nn.Module
    blocks: Sequence[nn.Module] = ()
    """Parts that are gathered one by one; empty: the longest ModuleList."""
    is_frozen: bool = False

    def units(self) -> list[nn.Module]:
        """The parts that are gathered one by one, each without those before it; the module is the last."""
        blocks = self.blocks or transformer_blocks(self.module)
        units = [block for block in dict.fromkeys(blocks) if block is not self.module]
        embedding, head = (
            find() if (find := getattr(self.module, name, None)) else None
            for name in ("get_input_embeddings", "get_output_embeddings")
        )
        if embedding is not None and getattr(head, "weight", None) is not embedding.weight:
            # Not needed between its forward and its backward pass; the head is, and stays with the root.
            units.append(embedding)
        return [*units, self.module]

    def parameters(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Each unit with its parameters and their names, once for each module that uses one."""
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
    """Both names of each parameter that two units use: each unit would cut a copy, and train it alone."""
    seen: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for name, cut in cuts.items():
        for unit, own, parameter in cut.parameters():
            first, where = seen.setdefault(parameter, (unit, f"{name}.{own}"))
            if first is not unit:
                yield where, f"{name}.{own}"


def find_products(model: nn.Module) -> set[tuple[nn.Module, str]]:
    """The parameters, by module and name, that are used in products alone, which autocast computes in a
    narrower type."""
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
    # GPT-2's layer is known by its name, since transformers may not have been imported.
    name = f"{kind.__module__}.{kind.__name__}"
    return kind in _PRODUCT_MODULES or name == "transformers.pytorch_utils.Conv1D"


def _adapters_in(module: nn.Module) -> Iterator[nn.Module]:
    """Parts of adapters: peft gives what they are called with the type of their weights, and dropout would
    round otherwise in a narrower one."""
    for part in module.modules():
        if type(part).__module__.startswith("peft."):
            for name, child in part.named_children():
                if name != "base_layer":
                    yield from child.modules()


def shard(cuts: Sequence[ShardPlan], world: World, sharding: Sharding) -> None:
    """Cut modules in place, unit by unit (FSDP2). Gradients are summed over all ranks, not averaged.

    Weights on the CPU move to the device unit by unit. In a world of one there is nothing to share, and
    the modules stay as they are. Raises HostError where the ranks cannot be cut into copies.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    if world.group is None:
        return
    # One for all: the norm of the gradients is taken over the parts of all modules together.
    mesh = _build_mesh(world, sharding)
    # Nothing but the weights has another type: what a module is given, and what it gives, is as autocast has
    # it for modules that are whole. Sums over ranks keep the type of the weights.
    weights, rounded = DTYPES[sharding.precision], PRODUCTS[sharding.precision]
    policy = MixedPrecisionPolicy(reduce_dtype=weights, cast_forward_inputs=False)
    for cut in cuts:
        # From the inside out: a module takes what its own modules have not taken.
        *inner, root = cut.units()
        blocks = cut.blocks or transformer_blocks(cut.module)
        products = find_products(cut.module) if rounded != weights else set()
        for unit in inner:
            # The last block is the first that the backward pass needs: it would be gathered again at once.
            # Most frozen modules have no backward pass.
            is_needed_next = bool(blocks) and unit is blocks[-1] and not cut.is_frozen
            fully_shard(
                unit, mesh=mesh, mp_policy=policy, reshard_after_forward=not is_needed_next
            )
        fully_shard(root, mesh=mesh, mp_policy=policy)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                # Half the traffic and memory, and the bits that autocast would make of the whole weights.
                torch_private.gather_as(module, products, rounded)
                # The step divides by what its samples weigh, not by the number of ranks; gloo has no sums
                # that divide.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        # Before FSDP2's own, and on the root alone: blocks may be compiled with their hooks.
        root.register_forward_pre_hook(_require_own_weights, prepend=True)


def _require_own_weights(module: nn.Module, _inputs: Any) -> None:
    """Refuse a call with other weights (torch.func.functional_call): the gathered ones would take their
    place, and the result would be that of another model."""
    from torch.distributed.fsdp import FSDPModule

    parts = (part for part in module.modules() if isinstance(part, FSDPModule))
    if any(torch_private.has_foreign_weights(part) for part in parts):
        raise ValueError(
            f"{type(module).__name__} is called with weights that are not its own, and fsdp2 would compute "
            "with its own ones: call a frozen copy of the module with them, and name the copy in "
            "Modules.replicated"
        )


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
        [own["copies"], own["shards"]],
        device,
        mesh=grid,
        mesh_dim_names=("copies", "shards"),
    )


def problem_of_shards(shards: int, world_size: int) -> Problem | None:
    """The reason that keeps ``world_size`` ranks from being copies of ``shards`` ranks each; None if nothing
    does."""
    if world_size % shards == 0:
        return None
    return Problem(
        "spec.training.runtime.shards",
        f"{world_size} workers cannot be cut into copies of {shards}",
        "each copy of the model is held by as many workers",
        "Use a divisor of the workers of a node, so that every number of nodes can train",
    )


def reshard(*modules: nn.Module) -> None:
    """Free what passes have left gathered, and forget them: those that no backward pass has followed.

    A root and its last block stay gathered for the backward pass; where none comes, the next pass would
    compute with weights of before the update, and a save would find no shards.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in modules:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
                torch_private.forget_passes(part)


def default_bucket_bytes(*, on_accelerator: bool) -> int:
    """Return the bytes of a bucket where the file says none: few for TCP, whose sums take cores that compute.

    NCCL starts each sum with a kernel of its own, so that many small ones cost more than they hide.
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

    ``frozen``: modules that are cut, too, and used by the passes.
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
