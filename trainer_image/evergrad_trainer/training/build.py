"""From configuration to components: all the wiring of one training process."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from evergrad_manifest.derive import slots_per_step
from evergrad_manifest.training import Training
from evergrad_trainer.data.prefetch import Prefetcher
from evergrad_trainer.data.stream import TrainingStream
from evergrad_trainer.models.build import ModelPlan, build_model
from evergrad_trainer.models.compilation import compile_blocks, should_compile
from evergrad_trainer.models.deferred import defer_model
from evergrad_trainer.models.determinism import is_cublas_deterministic, use_deterministic_kernels
from evergrad_trainer.models.parallel import build_gradient_sum, shard
from evergrad_trainer.objectives.causal_lm import LossSum
from evergrad_trainer.optim.adamw import build_adamw
from evergrad_trainer.optim.schedule import build_schedule
from evergrad_trainer.recipes import RECIPES
from evergrad_trainer.state.providers import ModuleState, OptimizerState, module_tensors
from evergrad_trainer.state.registry import MODEL, OPTIMIZER, Registry
from evergrad_trainer.state.replicas import compare_states
from evergrad_trainer.training.evaluation import Evaluator
from evergrad_trainer.training.loop import Best, Limits
from evergrad_trainer.training.step import StepParts, Stepper, StepSettings
from evergrad_trainer.world import Membership, World

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Machinery:
    """The parts that hold tensors, before a checkpoint is loaded into them, and the registry of all that is the run's state."""

    model: "PreTrainedModel"
    optimizer: torch.optim.AdamW
    loss_sum: LossSum
    is_sharded: bool
    autocast: Callable[[], AbstractContextManager[object]]
    registry: Registry

    def state(self) -> dict[str, torch.Tensor]:
        """The live tensors a checkpoint holds."""
        return self.registry.tensors()


def build_machinery(training: Training, plan: ModelPlan, world: World, *, with_weights: bool) -> Machinery:
    """Model, optimizer and objective on ``world.device``; ``with_weights=False`` when a checkpoint follows."""
    runtime = training.runtime
    if (
        training.reproducibility.elastic == "exact"
        and world.device.type == "cuda"
        and is_cublas_deterministic()
    ):
        use_deterministic_kernels()
    is_sharded = runtime.parallelism == "fsdp2" and world.size > 1
    seed = training.reproducibility.seed
    # No process holds a sharded model whole, not even at the start.
    make: dict[str, Any] = {"seed": seed, "precision": runtime.precision, "with_weights": with_weights}
    deferred = defer_model(plan, **make) if is_sharded else None
    model = build_model(plan, **make) if deferred is None else deferred.model
    if runtime.activation_checkpointing:
        # The name of newer versions of transformers, and that of all before them.
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable()
    if deferred is None:
        model.to(world.device)  # type: ignore[arg-type]
    is_compiled = should_compile(runtime, world.device)
    # The same graphs in worlds of every size, so that exact mode gives the same bits in each; before sharding.
    has_blocks = is_compiled and compile_blocks(model)
    if is_sharded:
        shard(model, world, precision=runtime.precision)
    if deferred is not None:
        deferred.materialise(world.device)
    loss_sum = RECIPES[training.recipe].build_loss(model)
    if is_compiled and not has_blocks and not is_sharded:
        loss_sum = torch.compile(loss_sum, dynamic=False)
    optimizer = build_adamw(model, training.optimizer)

    def initial() -> dict[str, torch.Tensor]:
        # A function of the seed, so that every process gets the same weights.
        fresh = build_model(plan, seed=training.reproducibility.seed, precision=runtime.precision)
        return module_tensors(fresh)

    registry = Registry()
    registry.register(MODEL, ModuleState(model, initial=initial))
    registry.register(OPTIMIZER, OptimizerState(optimizer, dict(model.named_parameters())))
    return Machinery(
        model=model,
        optimizer=optimizer,
        loss_sum=loss_sum,
        is_sharded=is_sharded,
        autocast=_autocast(runtime.precision, world.device),
        registry=registry,
    )


def build_comparison(machinery: Machinery, membership: Membership) -> Callable[[int], None]:
    """What compares the replicas' states after a step; nothing to compare where each rank holds a part of its own."""
    if machinery.is_sharded:
        return lambda step: None
    return lambda step: compare_states(machinery.state(), membership.world, step=step)


def build_stepper(
    training: Training, machinery: Machinery, stream: TrainingStream, *, total_steps: int
) -> Stepper:
    """What runs one step."""
    batching = training.batching
    slots = slots_per_step(batching)
    gradients = build_gradient_sum(
        machinery.model, training, slots_per_step=slots, is_sharded=machinery.is_sharded
    )
    parts = StepParts(
        model=machinery.model,
        loss_sum=machinery.loss_sum,
        optimizer=machinery.optimizer,
        gradients=gradients,
        stream=stream,
        prefetcher=Prefetcher(stream),
        schedule=build_schedule(
            training.schedule, peak=training.optimizer.learning_rate, total_steps=total_steps
        ),
        autocast=machinery.autocast,
    )
    settings = StepSettings(
        seed=training.reproducibility.seed,
        slots_per_step=slots,
        nominal_tokens=batching.global_batch_size * training.data.sequence_length,
        clip_norm=training.optimizer.clip_norm,
        is_sharded=machinery.is_sharded,
    )
    return Stepper(parts, settings)


def build_evaluator(training: Training, machinery: Machinery) -> Evaluator:
    """What evaluates between two steps."""
    return Evaluator(
        model=machinery.model,
        loss_sum=machinery.loss_sum,
        micro_batch_size=training.batching.micro_batch_size,
        is_sharded=machinery.is_sharded,
        autocast=machinery.autocast,
    )


def build_limits(training: Training, *, total_steps: int, stop_after_steps: int | None) -> Limits:
    """When the loop evaluates, saves and stops."""
    evaluation = training.evaluation
    return Limits(
        total_steps=total_steps,
        save_every=training.checkpoint.every.steps,
        compare_every=training.runtime.compare_replicas_every or None,
        evaluate_every=evaluation.every.steps if evaluation.every else None,
        evaluate_at_start=evaluation.at_start,
        after_step=training.stop.after_step,
        stop_after_steps=stop_after_steps,
        non_finite_in_a_row=training.on_non_finite.skip,
        skip_steps=frozenset(training.skip_steps),
    )


def build_best(training: Training) -> Best | None:
    """Which checkpoint is the best one, if that was asked for."""
    best = training.checkpoint.best
    return Best(metric=best.metric, mode=best.mode) if best else None


def threads_per_worker(training: Training, *, cores: int, num_workers: int) -> int:
    """CPU threads of each worker. Exact mode needs the same number in every world: it changes the order of sums in kernels."""
    if training.runtime.threads is not None:
        return training.runtime.threads
    return 1 if training.reproducibility.elastic == "exact" else max(1, cores // num_workers)


def _autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    if precision != "bf16-autocast":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
