"""Builds the components of a training process from its configuration: all the wiring is here."""

import contextlib
import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evergrad_manifest.derive import slots_per_step
from evergrad_manifest.training import Runtime, Training
from evergrad_trainer.data.batch import pin
from evergrad_trainer.data.prefetch import Prefetcher
from evergrad_trainer.data.stream import TrainingStream
from evergrad_trainer.distributed.world import Membership, World
from evergrad_trainer.models.build import ModelPlan, build_model
from evergrad_trainer.models.compilation import compile_blocks, should_compile
from evergrad_trainer.models.deferred import DeferredModel, Reads, defer_model
from evergrad_trainer.models.determinism import choose_determinism
from evergrad_trainer.models.kernels import attention_shape, choose_autocast, choose_kernels
from evergrad_trainer.models.parallel import (
    Sharding,
    build_gradient_sum,
    shard,
)
from evergrad_trainer.models.randomness import Purpose, seed_generators
from evergrad_trainer.models.recomputation import offload_inputs, recompute
from evergrad_trainer.optim.average import Average
from evergrad_trainer.optim.build import build_optimizer
from evergrad_trainer.optim.loss_scale import LossScale, build_loss_scale
from evergrad_trainer.optim.schedule import build_schedule
from evergrad_trainer.recipes.setup import Opened
from evergrad_trainer.state.providers import (
    KeptTensors,
    ModuleState,
    OptimizerState,
    module_tensors,
)
from evergrad_trainer.state.registry import EMA, KEPT, LOSS_SCALE, OPTIMIZER, Registry
from evergrad_trainer.state.replicas import compare_states
from evergrad_trainer.task import Modules
from evergrad_trainer.training.buffers import BufferWatch
from evergrad_trainer.training.evaluation import EvaluationRunner
from evergrad_trainer.training.frozen import (
    WholeHashes,
    compare_frozen,
    find_bases,
    hash_frozen,
)
from evergrad_trainer.training.modules import (
    check_modules,
    choose_deferred,
    find_blocks,
    plan_cuts,
    trained_blocks,
)
from evergrad_trainer.training.phase_clock import build_clock
from evergrad_trainer.training.snapshots import Snapshots
from evergrad_trainer.training.step import Stepper
from evergrad_trainer.training.step_parts import LossOf, StepParts, StepSettings
from evergrad_trainer.training.task_adapter import GuardedStream, build_loss, build_measures


@dataclass(frozen=True)
class Machinery:
    """The parts that hold tensors, before a checkpoint is loaded into them, and the registry of the state.

    ``model``: one module that contains all trained modules.
    """

    opened: Opened
    modules: Modules
    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    """None if the state is only evaluated, not trained."""
    loss_of: LossOf
    is_sharded: bool
    shards: int
    """How many ranks together hold one copy of the state."""
    autocast: Callable[[], AbstractContextManager[object]]
    registry: Registry
    frozen: Mapping[str, str]
    """Hash of each frozen module, and of the base weights of adapters, as built. The same on every rank."""
    held_frozen: Mapping[str, str]
    """The same hashes, but of the parts that this rank holds."""
    cut_frozen: Sequence[nn.Module]
    """The frozen modules of which this rank holds only a part."""
    snapshots: Snapshots
    """The frozen modules that the run copies from trained modules."""
    average: Average | None
    """Average of the trained weights; None unless the file requests it."""
    loss_scale: LossScale | None
    """Loss scale; None unless the training computes products in fp16."""
    kernels: Mapping[str, str]
    """How this process computes, for the run's provenance: device, matrix products, attention."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return the live tensors that a checkpoint contains."""
        return self.registry.tensors()

    def own_state(self) -> dict[str, torch.Tensor]:
        """Return this rank's parts of these tensors."""
        return {
            name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for name, tensor in self.state().items()
        }

    def cut(self) -> tuple[nn.Module, ...]:
        """Return the modules of which this rank holds only a part."""
        return (self.model, *self.cut_frozen) if self.is_sharded else ()

    def replicated(self) -> list[str]:
        """Return the names of the state's tensors that every rank holds whole, although other tensors are
        sharded."""
        if not self.is_sharded:
            return []
        return [
            name for name, tensor in self.state().items() if not isinstance(tensor, DTensor)
        ]


def build_machinery(
    training: Training,
    opened: Opened,
    plan: ModelPlan,
    world: World,
    *,
    with_weights: bool,
    is_trained: bool = True,
) -> Machinery:
    """Build modules, optimizer and loss on ``world.device``.

    ``with_weights=False``: a checkpoint is loaded afterwards, so initial weights are not needed.
    ``is_trained=False``: build no optimizer, whose state needs twice the memory of the weights.
    """
    runtime, device = training.runtime, world.device
    choose_determinism(training.reproducibility, device)
    # Do this before anything is computed or compiled, because a graph uses the kernels that are selected now.
    shape = attention_shape(plan, precision=runtime.precision)
    is_eager = plan.config is not None and plan.attention == "eager"
    kernels = choose_kernels(device, runtime, shape=shape, is_eager=is_eager)

    is_sharded = runtime.parallelism == "fsdp2" and world.size > 1
    modules, deferred = _build_modules(
        training, opened, plan, with_weights=with_weights, is_deferred=is_sharded
    )
    if (mode := runtime.activation_checkpointing) != "none":
        # Do this before compilation, so that the graphs include the recomputation.
        recompute(find_blocks(modules), is_selective=mode == "selective")
    is_compiled = should_compile(runtime, device)
    # Worlds of all sizes use the same graphs, so that exact mode gives the same bits in each. Compile before
    # sharding, so that FSDP2's gathers are outside the graphs.
    has_blocks = is_compiled and _compile_blocks(modules)
    if mode == "offload":
        offload_inputs(find_blocks(modules))

    # Collective if a sharded state has several copies.
    cut_frozen, whole_hashes = _cut(modules, runtime, world if is_sharded else None)
    _move_to(device, modules, deferred, whole_hashes)

    model = modules.root()
    is_whole = is_compiled and not has_blocks and not is_sharded
    optimizer = build_optimizer(model, training.optimizer) if is_trained else None
    average = None if training.ema is None else Average(modules.trained, training.ema)
    loss_scale = build_loss_scale(runtime.precision, device) if is_trained else None
    held_frozen = hash_frozen(modules)
    build_again = functools.partial(_build_modules, training, opened, plan)
    return Machinery(
        opened=opened,
        modules=modules,
        model=model,
        optimizer=optimizer,
        loss_of=build_loss(opened, modules, should_compile=is_whole),
        is_sharded=is_sharded,
        shards=(runtime.shards or world.size) if is_sharded else 1,
        autocast=choose_autocast(runtime.precision, device),
        registry=_register(modules, model, optimizer, average, loss_scale, build_again),
        frozen={**held_frozen, **whole_hashes.hashes()},
        held_frozen=held_frozen,
        cut_frozen=tuple(cut_frozen.values()),
        snapshots=Snapshots(modules, is_sharded=is_sharded),
        average=average,
        loss_scale=loss_scale,
        kernels=kernels,
    )


def _compile_blocks(modules: Modules) -> bool:
    """Compile the repeated blocks in place; return whether the trained modules have any."""
    has_blocks = compile_blocks(modules.root(), trained_blocks(modules))
    if has_blocks:
        # These modules are called as often as the trained modules that they are compared with.
        for name in dict.fromkeys((*modules.snapshots, *modules.counterparts)):
            compile_blocks(modules.frozen[name])
    return has_blocks


def _cut(
    modules: Modules, runtime: Runtime, world: World | None
) -> tuple[dict[str, nn.Module], WholeHashes]:
    """Shard the modules over ``world``; without a world, nothing is sharded.

    Returns the sharded frozen modules, and the object that hashes them while they are whole.
    """
    cuts = plan_cuts(modules) if world is not None else {}
    cut_frozen = {
        name: one for name, one in modules.frozen.items() if f"frozen.{name}" in cuts
    }
    # Only modules that the task built: a snapshot is hashed when it is taken.
    bases = find_bases(modules) if world is not None else {}
    whole_hashes = WholeHashes(cut_frozen, bases, without=modules.snapshots)
    if world is not None:
        seconds = float(runtime.collective_timeout_seconds)
        sharding = Sharding(runtime.precision, runtime.shards, seconds)
        # Collective with several copies: every rank creates the process groups of all copies.
        shard(list(cuts.values()), world, sharding)
    return cut_frozen, whole_hashes


def _move_to(
    device: torch.device,
    modules: Modules,
    deferred: Sequence[DeferredModel],
    whole_hashes: WholeHashes,
) -> None:
    for one in deferred:
        # No process ever holds a whole sharded model, not even at the start.
        one.materialise(device, on_whole=whole_hashes.add)
    for name, module in (*modules.trained.items(), *modules.frozen.items()):
        try:
            module.to(device)
        except Exception as error:
            # Most torch errors name neither the module nor the device.
            error.add_note(f"while the module {name} was moved to {device}")
            raise
    # Detach: a tensor that the task keeps must not remain a parameter of a module.
    modules.kept = {name: one.detach().to(device) for name, one in modules.kept.items()}


def _register(
    modules: Modules,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    average: Average | None,
    loss_scale: LossScale | None,
    build_again: Callable[[], tuple[Modules, list[DeferredModel]]],
) -> Registry:
    """Register all tensors of the run's state: trained modules by name, the optimizer, and the kept tensors.

    ``build_again`` depends only on the seed, so that every process gets the same values.
    """

    def initial_of(name: str) -> Mapping[str, torch.Tensor]:
        return module_tensors(build_again()[0].trained[name])

    registry = Registry()
    for name, module in modules.trained.items():
        initial = functools.partial(initial_of, name)
        registry.register(name, ModuleState(module, initial=initial))
    if optimizer is not None:
        parameters = dict(model.named_parameters())
        registry.register(OPTIMIZER, OptimizerState(optimizer, parameters))
    if average is not None:
        registry.register(EMA, average)
    if loss_scale is not None:
        registry.register(LOSS_SCALE, loss_scale)
    if modules.kept:
        registry.register(
            KEPT, KeptTensors(modules.kept, initial=lambda: build_again()[0].kept)
        )
    return registry


def _build_modules(
    training: Training,
    opened: Opened,
    plan: ModelPlan,
    *,
    with_weights: bool = True,
    is_deferred: bool = False,
) -> tuple[Modules, list[DeferredModel]]:
    """Build the task's modules on the CPU, prepared for the first stage. The result depends only on the seed.

    ``is_deferred``: the models that the file describes get no memory for their weights yet, unless the task
    reads the weights.
    """
    seed, precision = training.reproducibility.seed, training.runtime.precision

    def build_all(build_one: Callable[[], nn.Module]) -> Modules:
        def build() -> nn.Module:
            model = build_one()
            # Modules that are built after this model get the same values whether or not its weights were
            # initialised.
            seed_generators(seed, 0, 1, Purpose.INITIAL_WEIGHTS)
            return model

        seed_generators(seed, 0, 0, Purpose.INITIAL_WEIGHTS)
        modules = opened.task.build(build)
        check_modules(modules, training, opened.code)
        for frozen in modules.frozen.values():
            frozen.requires_grad_(False).eval()
        with torch.no_grad():
            opened.task.enter(modules, opened.data.train.stages[0])
        return modules

    if is_deferred and plan.config is not None:
        made: list[DeferredModel] = []
        reads = Reads()

        def defer() -> nn.Module:
            with reads.allowed():
                one = defer_model(
                    plan, seed=seed, precision=precision, with_weights=with_weights
                )
            if one is None:
                raise NotImplementedError
            made.append(one)
            return one.model

        # A task that reads or changes weights fails here, because the weights do not exist yet.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            with reads:
                modules = build_all(defer)
            used = choose_deferred(made, modules, with_weights=with_weights)
            if used is not None:
                return modules, used
    # Build the whole model once on every rank.
    with opened.code.guarding("build and enter"):
        build_one = functools.partial(build_model, plan, seed=seed, precision=precision)
        return _build_whole(build_all, build_one, with_weights=with_weights), []


def _build_whole(
    build_all: Callable[[Callable[[], nn.Module]], Modules],
    build_one: Callable[..., nn.Module],
    *,
    with_weights: bool,
) -> Modules:
    """Build the task's modules; ``build_one`` builds the models that the file describes."""
    num_made = 0

    def make() -> nn.Module:
        nonlocal num_made
        num_made += 1
        return build_one(with_weights=with_weights)

    modules = build_all(make)
    needs_initial = modules.frozen.keys() - modules.snapshots.keys()
    if needs_initial and not with_weights and num_made > 0:
        # A frozen copy of the model is in no checkpoint, so it needs the initial weights. Free the first set
        # of modules before the second is built; modules refer to each other, so that only the collector frees
        # them.
        del modules
        gc.collect()
        modules = build_all(build_one)
    return modules


def build_comparison(machinery: Machinery, membership: Membership) -> Callable[[int], None]:
    """Build the function that compares the replicas' states after a step."""

    def compare(step: int) -> None:
        # Collective if there is more than one replica: each rank contributes one number.
        compare_states(
            machinery.own_state(),
            membership.world,
            step=step,
            shards=machinery.shards,
            replicated=machinery.replicated(),
        )
        # Collective if there are frozen modules: each rank contributes one number.
        compare_frozen(
            machinery.modules,
            {**machinery.held_frozen, **machinery.snapshots.own_parts},
            membership.world,
            code=machinery.opened.code,
        )

    return compare


def build_stepper(
    training: Training,
    machinery: Machinery,
    stream: TrainingStream,
    *,
    total_steps: int,
    may_share: bool = False,
) -> Stepper:
    """Build the object that runs one step. Raises ValueError if ``machinery`` was built without an optimizer.

    ``may_share``: several workers may train together later, even if only one trains at the start.
    """
    if machinery.optimizer is None:
        raise ValueError("there is no optimizer: this was built to be evaluated")
    batching = training.batching
    slots = slots_per_step(batching)
    gradients = build_gradient_sum(
        machinery.model,
        training,
        slots_per_step=slots,
        is_sharded=machinery.is_sharded,
        frozen=machinery.cut_frozen,
    )
    device = next(machinery.model.parameters()).device
    parts = StepParts(
        model=machinery.model,
        loss_of=machinery.loss_of,
        optimizer=machinery.optimizer,
        gradients=gradients,
        stream=stream,
        # A copy to an accelerator overlaps with the computation only if it reads from pinned memory.
        prefetcher=Prefetcher(
            GuardedStream(stream, machinery.opened.code),
            prepare=pin if device.type == "cuda" else None,
        ),
        schedule=build_schedule(
            training.schedule,
            peak=training.optimizer.learning_rate,
            total_steps=total_steps,
            overrides=training.overrides,
        ),
        autocast=machinery.autocast,
        loss_scale=machinery.loss_scale,
        clock=build_clock(device),
        buffers=BufferWatch(
            machinery.modules.trained, machinery.opened.code, may_share=may_share
        ),
    )
    settings = StepSettings(
        seed=training.reproducibility.seed,
        slots_per_step=slots,
        nominal_weight=batching.global_batch_size * training.sample_weight,
        clip_norm=training.optimizer.clip_norm,
        is_sharded=machinery.is_sharded,
        metrics=tuple(machinery.opened.task.metrics),
        clip_norms=tuple(
            (one.from_step, one.clip_norm)
            for one in training.overrides
            if one.clip_norm is not None
        ),
    )
    return Stepper(parts, settings)


def build_evaluations(
    machinery: Machinery, *, code: str, is_averaged: bool
) -> EvaluationRunner:
    """Build the object that evaluates between two steps.

    ``code``: hash of the task's own files. ``is_averaged``: evaluate the average instead of the weights.
    """
    average = machinery.average if is_averaged else None
    return EvaluationRunner(
        model=machinery.model,
        measures=build_measures(machinery.opened, machinery.modules, machinery.loss_of),
        is_sharded=machinery.is_sharded,
        autocast=machinery.autocast,
        reading=functools.partial(machinery.opened.code.guarding, "read of its source"),
        frozen=machinery.cut_frozen,
        code=code,
        averaging=None if average is None else average.in_place,
    )


def threads_per_worker(training: Training, *, cores: int, num_workers: int) -> int:
    """Return the number of CPU threads of each worker.

    Exact mode needs the same number in every world, because the number changes the order of sums in kernels.
    """
    if training.runtime.threads is not None:
        return training.runtime.threads
    return (
        1 if training.reproducibility.elastic == "exact" else max(1, cores // num_workers)
    )
