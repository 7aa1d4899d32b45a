"""Checks a task's modules before training, and chooses the parts of them that are sharded over ranks,
compiled and recomputed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from torch import nn

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import Training
from evergrad_trainer.base import torch_private
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.models import parallel
from evergrad_trainer.models.deferred import DeferredModel
from evergrad_trainer.models.parallel import ShardPlan, find_shared, transformer_blocks
from evergrad_trainer.recipes.user_task import Code
from evergrad_trainer.state.providers import base_tensors, module_tensors
from evergrad_trainer.state.registry import EMA, LOSS_SCALE, RESERVED
from evergrad_trainer.task import Modules

_RECIPE: Final = "spec.training.recipe"
_PARALLELISM: Final = "spec.training.runtime.parallelism"
_UNCUT: Final = "use parallelism: dataParallel; a run goes on from its checkpoints with it"
_REPLICATED: Final = (
    "name the frozen module in Modules.replicated, and each process holds it whole"
)
"""Alternatives to sharding a module. Parallelism is not part of the recipe, so it may change during a run,
also if an earlier version started the run."""


def check_modules(modules: Modules, training: Training, code: Code) -> None:
    """Refuse modules that could not be saved or trained.

    All ranks build the same modules, so all ranks refuse them. Raises TaskInputError or TaskError with the
    first problem.
    """
    for problem in module_problems(modules, training):
        raise code.explain(problem)


def module_problems(modules: Modules, training: Training) -> list[Problem]:
    """Return each reason why the state of these modules cannot be registered or sharded over ranks."""
    problems = []
    reserved = set(RESERVED)
    if training.ema is not None:
        reserved.add(EMA)
    if training.runtime.precision == "fp16-autocast":
        reserved.add(LOSS_SCALE)
    for name in modules.trained:
        why = ""
        if not name or "." in name:
            why = "it is the first part of the names of its tensors, which a dot ends"
        elif name in reserved:
            why = f"{name} is another part of the run's state"
        elif hasattr(nn.ModuleDict(), name):
            # All trained modules become children of one module, and must not hide its own attributes.
            why = "a module has an attribute of that name"
        if why:
            what = f"build names a trained module {name!r}"
            problems.append(Problem(_RECIPE, what, why, "Rename it"))

    parameters = [one for module in modules.trained.values() for one in module.parameters()]
    if not any(one.requires_grad for one in parameters):
        why = "no parameter of its trained modules requires a gradient"
        problems.append(
            Problem(
                _RECIPE, "build gives nothing to train", why, "Put a module into trained"
            )
        )
    # A parameter that is both trained and frozen would be saved as trained and hashed as frozen.
    frozen = {id(one) for module in modules.frozen.values() for one in module.parameters()}
    if any(id(one) in frozen for one in parameters):
        what = "build gives a parameter as trained and as frozen"
        why = "it can be only one of them"
        problems.append(Problem(_RECIPE, what, why, "Copy the module that stays as it is"))
    if unknown := sorted(set(modules.replicated) - modules.frozen.keys()):
        what = f"Modules.replicated names {', '.join(unknown)}"
        why = "only frozen modules can be whole in every process where others are cut"
        problems.append(Problem(_RECIPE, what, why, "Use the names of frozen modules"))
    if unknown := sorted(set(modules.counterparts) - modules.frozen.keys()):
        what = f"Modules.counterparts names {', '.join(unknown)}"
        why = "only frozen modules are computed otherwise than trained ones"
        problems.append(Problem(_RECIPE, what, why, "Use the names of frozen modules"))
    problems += _snapshot_problems(modules)
    # Check this for a world of one, too: otherwise the run would fail later, when it grows.
    if training.runtime.parallelism == "fsdp2":
        problems += _sharding_problems(plan_cuts(modules))
    return problems


def _snapshot_problems(modules: Modules) -> Iterator[Problem]:
    """Find snapshots to which, or from which, weights cannot be copied."""
    for name, snapshot in modules.snapshots.items():
        what, remedy = f"the snapshot {name!r}", "Make both by the same calls"
        why = ""
        if name not in modules.frozen:
            why, remedy = "it is no frozen module", "Put a module of that name into frozen"
        elif snapshot.of not in modules.trained:
            why, remedy = (
                f"{snapshot.of!r} is no trained module",
                "Name the one that it is of",
            )
        elif snapshot.after < 1:
            why = f"it is taken after step {snapshot.after}, and steps count from 1"
            remedy = (
                "Take it after the last step of a stage, or build it as any frozen module"
            )
        elif base_tensors(modules.trained[snapshot.of]):
            why = f"{snapshot.of!r} has adapters, and a checkpoint holds those alone"
            remedy = "Leave model.lora out"
        else:
            own, other = (
                {key: (one.shape, one.dtype) for key, one in module_tensors(module).items()}
                for module in (modules.frozen[name], modules.trained[snapshot.of])
            )
            if own != other:
                why = f"its tensors are not named, shaped and typed as those of {snapshot.of!r}"
        if why:
            yield Problem(_RECIPE, f"{what} cannot be taken", why, remedy)


def plan_cuts(modules: Modules) -> dict[str, ShardPlan]:
    """Return the modules that ``fsdp2`` shards over ranks, by name.

    These are all trained modules with parameters and, as ``frozen.NAME``, large frozen modules, snapshots and
    counterparts, except modules that the task names in ``Modules.replicated``.
    """
    cuts = {
        name: ShardPlan(module, _blocks_in(module, modules))
        for name, module in modules.trained.items()
        if any(True for _ in module.parameters())
    }
    for name, module in modules.frozen.items():
        size = sum(one.numel() * one.element_size() for one in module.parameters())
        # Shard snapshots and counterparts of any size: a snapshot's shards are copied from the shards of its
        # trained module, and a counterpart is called as often as the module that it is compared with.
        is_counterpart = name in modules.snapshots or name in modules.counterparts
        is_cut = size >= parallel.LARGE_BYTES or (is_counterpart and size > 0)
        if is_cut and name not in modules.replicated:
            cuts[f"frozen.{name}"] = ShardPlan(
                module, _blocks_in(module, modules), is_frozen=True
            )
    return cuts


def _sharding_problems(cuts: Mapping[str, ShardPlan]) -> Iterator[Problem]:
    """Find modules that would fail, or compute different values, if they were sharded."""

    def refuse(name: str, what: str, why: str, remedy: str) -> Problem:
        way_out = _REPLICATED if cuts[name].is_frozen else _UNCUT
        return Problem(
            _PARALLELISM, f"fsdp2 cannot cut {what}", why, f"{remedy}, or {way_out}"
        )

    for name, cut in cuts.items():
        # Containers have no forward pass: their parts are called directly, so FSDP2 would not gather them.
        if getattr(cut.module.forward, "__func__", None) is nn.Module.forward:
            why = "its weights are whole while it is called, and it has no forward pass"
            yield refuse(name, f"the module {name}", why, "Name its parts as modules")
        types: dict[nn.Module, set[str]] = {}
        for unit, own, parameter in cut.parameters():
            if parameter.ndim == 0:
                why = "it has no dimension to be cut along"
                yield refuse(
                    name, f"the parameter {name}.{own}", why, "Give it the shape [1]"
                )
            # Frozen modules may differ here. Their parameters still require gradients right after the build.
            if parameter.requires_grad and not cut.is_frozen:
                if torch_private.has_gradient_hooks(parameter):
                    why = "FSDP2 computes with parameters of its own, and would not call the hook"
                    yield refuse(
                        name,
                        f"{name}.{own}, whose gradient has a hook",
                        why,
                        "Change the gradient in the module's forward pass (torch.autograd.Function)",
                    )
                types.setdefault(unit, set()).add(
                    str(parameter.dtype).removeprefix("torch.")
                )
        if mixed := next((found for found in types.values() if len(found) > 1), None):
            why = f"weights that are gathered together have the types {', '.join(sorted(mixed))}"
            yield refuse(name, f"the module {name}", why, "Give them one type")
    for one, other in find_shared(cuts):
        why = f"it is also {other}, and the two would be cut and trained apart"
        name = next(name for name in cuts if one.startswith(f"{name}."))
        yield refuse(
            name, f"the shared parameter {one}", why, "Put both uses into one module"
        )


def choose_deferred(
    deferred: Sequence[DeferredModel], modules: Modules, *, with_weights: bool
) -> list[DeferredModel] | None:
    """Return the models of ``deferred`` that are parts of ``modules``, or None if weights are needed now.

    With ``with_weights=False``, trained modules get no weights, because a checkpoint is loaded afterwards.
    Snapshots never get weights.
    """
    own = {parameter: one for one in deferred for parameter in one.model.parameters()}
    trained, frozen = (
        [parameter for module in part.values() for parameter in module.parameters()]
        for part in (modules.trained, modules.frozen)
    )
    # A tensor that is computed from weights without memory has no memory either.
    rest = [one for one in (*trained, *frozen) if one not in own]
    if any(tensor.is_meta for tensor in (*rest, *modules.kept.values())):
        return None
    # Frozen modules are in no checkpoint, so they need weights now. A snapshot has none until it is taken or
    # loaded.
    built = [one for name, one in modules.frozen.items() if name not in modules.snapshots]
    if with_weights:
        built += modules.trained.values()
    needed = [own[one] for module in built for one in module.parameters() if one in own]
    for one in deferred:
        if one not in needed:
            one.weights = None
        elif one.weights is None:
            return None
    return [one for one in deferred if any(own.get(p) is one for p in (*trained, *frozen))]


def find_blocks(modules: Modules) -> list[nn.Module]:
    """Return the blocks whose activations are recomputed.

    These are the blocks that the task names, or else the repeated blocks of the trained modules. Raises
    ModelError if there are none, because the requested memory would not be saved.
    """
    blocks = trained_blocks(modules)
    if blocks:
        return blocks
    raise ModelError(
        Problem(
            "spec.training.runtime.activationCheckpointing",
            "what is trained has no repeated blocks",
            "activations are computed again block by block",
            "Name the blocks in the task's Modules, or leave activationCheckpointing out",
        )
    )


def trained_blocks(modules: Modules) -> list[nn.Module]:
    """Return the blocks of all trained modules: the blocks that the task names, or else the repeated ones."""
    return [
        block
        for module in modules.trained.values()
        for block in _blocks_in(module, modules) or transformer_blocks(module)
    ]


def _blocks_in(module: nn.Module, modules: Modules) -> list[nn.Module]:
    """Return the blocks that the task names and that are parts of ``module``."""
    parts = set(module.modules())
    return [block for block in modules.blocks if block in parts]
