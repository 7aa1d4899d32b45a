"""Checks of preflight for the model: its size compared with this machine's memory, and the frozen weights
that adapters or a predictor need."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from torch import nn

from evergrad_common.text import size
from evergrad_manifest.derive import is_model_trained
from evergrad_manifest.errors import Problem
from evergrad_manifest.training import Training
from evergrad_manifest.training.steps import divisors_of
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.base.machine import Machine
from evergrad_trainer.models.adapters import check_initial
from evergrad_trainer.models.architecture import has_attention
from evergrad_trainer.models.build import ModelPlan, build_empty_model
from evergrad_trainer.models.kernels import problem_of_eager
from evergrad_trainer.models.memory import ModelFacts, largest_fit, memory_of
from evergrad_trainer.models.parallel import find_products

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MODEL: Final = "spec.training.model"

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``problem``: the problem, or the observed facts if the level is ``ok``."""

    level: Level
    problem: Problem


def model_facts(plan: ModelPlan) -> ModelFacts:
    """Return the sizes of the planned model. Raises ModelError if it cannot be built."""
    config = plan.require_config().get_text_config()
    model = build_empty_model(plan, precision="fp32")
    parameters = tuple(model.parameters())
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    return ModelFacts(
        parameters=sum(one.numel() for one in parameters),
        hidden_size=hidden_size_of(config),
        num_layers=int(config.num_hidden_layers),
        vocab_size=int(config.vocab_size),
        max_positions=getattr(config, "max_position_embeddings", None),
        trained=None if plan.settings.lora is None else trained,
        eager_heads=_eager_heads(plan),
        unrounded=_count_unrounded(model),
    )


def _count_unrounded(model: "PreTrainedModel") -> int:
    """Count the parameters that autocast does not round, without the embedding tables."""
    rounded = find_products(model)
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    ids = {id(one) for table in tables if table is not None for one in table.parameters()}
    return sum(
        parameter.numel()
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if (module, name) not in rounded and id(parameter) not in ids
    )


def _eager_heads(plan: ModelPlan) -> int:
    config: Any = plan.require_config().get_text_config()
    if plan.attention != "eager":
        return 0
    return int(getattr(config, "num_attention_heads", None) or 0)


def check_architecture(training: Training, plan: ModelPlan | None) -> Iterator[Finding]:
    """Report eager attention, and an output head that does not share weights although the configuration ties
    them."""
    if plan is None or plan.config is None:
        return
    if plan.attention == "eager" and has_attention(plan.config):
        what = f"{plan.name} trains with eager attention"
        why = (
            "transformers has no other for it; memory for scores grows with the square of "
            "data.sequenceLength"
        )
        key = "config" if training.model.path is None else "path"
        yield Finding("warning", Problem(f"{_MODEL}.{key}", what, why))
    if plan.attention == "eager" and (problem := problem_of_eager(training.runtime)):
        yield Finding("error", problem)
    if plan.untied is not None:
        first, second = plan.untied
        what = (
            f"{first} and {second} are trained as two tensors, as {plan.weights} holds them"
        )
        why = "config.json there has tie_word_embeddings: true; this run and its exports have false"
        remedy = "Correct config.json if this is not meant"
        yield Finding("warning", Problem(f"{_MODEL}.path", what, why, remedy))


def hidden_size_of(config: Any) -> int:
    """Return the width of a model; if its layers differ, the largest width.

    Raises ModelError if the configuration has neither ``hidden_size`` nor ``hidden_sizes``.
    """
    one, several = (getattr(config, name, None) for name in ("hidden_size", "hidden_sizes"))
    if one is not None:
        return int(one)
    if several:
        return max(int(size) for size in several)
    raise ModelError(
        Problem(
            "spec.training.model",
            f"{type(config).__name__} has neither hidden_size nor hidden_sizes",
            "the memory that it needs is reckoned by them",
            "Add one of them to the model's configuration",
        )
    )


def check_memory(
    training: Training,
    facts: ModelFacts,
    machine: Machine,
    *,
    num_workers: int,
    world_size: int,
    most_workers: int = 1,
) -> Iterator[Finding]:
    """Estimate whether the model fits in memory, and report the largest ``microBatchSize`` that fits.

    ``world_size``: the smallest world size of the plan, which has the largest shards. ``most_workers``: the
    largest world size, in which each worker needs a micro-batch. Processes on CPUs share the memory.
    """
    available, sharers, plan = _room(training, machine, num_workers, world_size)
    need = memory_of(facts, training, **plan)
    trained = "" if facts.trained is None else f" ({facts.trained:,} of them trained)"
    text = (
        f"{facts.parameters:,} parameters{trained} need about {size(need.total * sharers)}"
    )
    if training.runtime.activation_checkpointing == "offload":
        yield _check_host(need.host * num_workers, machine.memory_bytes)
    if available is None:
        yield Finding(
            "warning",
            Problem("memory", text, "how much this machine has could not be read"),
        )
        return

    def fits(one: Training) -> bool:
        return memory_of(facts, one, **plan).total * sharers <= available

    micro = largest_micro_batch(training, fits, most_workers=most_workers)
    if need.total * sharers <= available:
        is_larger = micro is not None and micro > training.batching.micro_batch_size
        more = f"with a microBatchSize of up to {micro}, too" if is_larger else ""
        yield Finding("ok", Problem("memory", f"{text} of {size(available)}", more))
    else:
        what = f"{text} ({need.list_parts(sharers)}) and {size(available)} are there"
        fit = largest_fit(facts, training, available=available // sharers, **plan)
        largest = "no model fits"
        if fit is not None:
            largest = f"about {fit.parameters / 1e6:,.0f}M parameters would fit"
        why = f"the process would be killed; in this plan {largest}"
        # If the state alone is too large, no micro-batch fits.
        lower = (
            "Use" if micro is None else f"Lower batching.microBatchSize to {micro}, or use"
        )
        remedy = (
            f"{lower} runtime.activationCheckpointing, runtime.lossChunk, parallelism: fsdp2, or a "
            "smaller model; docs/train/model-sizes.md has a table"
        )
        yield Finding("error", Problem("memory", what, why, remedy, is_of_host=True))


def _check_host(left: int, available: int | None) -> Finding:
    """Check that the host's memory has space for ``left`` bytes of activations that its workers offload."""
    field = "spec.training.runtime.activationCheckpointing"
    if not left:
        why = "workers on CPUs have no other memory than the host's"
        return Finding("warning", Problem(field, "offload needs what full needs", why))
    what = f"offload leaves about {size(left)} in the memory of this machine"
    if available is None or left <= available:
        return Finding("ok", Problem(field, what))
    why = f"{size(available)} are there, and the process would be killed"
    remedy = "Write full, or lower batching.microBatchSize"
    return Finding("error", Problem(field, what, why, remedy, is_of_host=True))


def _room(
    training: Training, machine: Machine, num_workers: int, world_size: int
) -> tuple[int | None, int, dict[str, Any]]:
    """Return the available memory in bytes, the number of processes that share it, and the other arguments of
    an estimate."""
    on_accelerator = machine.num_accelerators > 0 and training.runtime.device != "cpu"
    compiles = training.runtime.compile == "on" or (
        training.runtime.compile == "auto" and on_accelerator
    )
    plan = {
        "world_size": world_size,
        "on_accelerator": on_accelerator,
        "compiles": compiles,
    }
    # Workers on CPUs share the memory of the machine; each accelerator has its own.
    if on_accelerator:
        return machine.accelerator_memory_bytes, 1, plan
    return machine.memory_bytes, num_workers, plan


def largest_micro_batch(
    training: Training, fits: Callable[[Training], bool], *, most_workers: int
) -> int | None:
    """Return the largest micro-batch, in samples, with which the plan fits; None if no size fits.

    The size divides the global batch, so that each of ``most_workers`` workers has at least one micro-batch.
    """
    batching = training.batching
    whole = batching.global_batch_size
    sizes = (one for one in divisors_of(whole) if one * most_workers <= whole)
    for one in sorted(sizes, reverse=True):
        changed = batching.model_copy(update={"micro_batch_size": one})
        if fits(training.model_copy(update={"batching": changed})):
            return one
    return None


def check_base(
    training: Training, base_directory: Path, plan: ModelPlan | None
) -> Iterator[Finding]:
    """Check that adapters have trained base weights, and that the loss can be computed with them."""
    lora = training.model.lora
    if lora is None or plan is None:
        return
    head = build_empty_model(plan, precision="fp32").get_output_embeddings()
    if training.runtime.loss_chunk is not None and not isinstance(head, nn.Linear):
        yield Finding(
            "error",
            Problem(
                "spec.training.runtime.lossChunk",
                "cannot be combined with an adapter beside the output head",
                "logits are made in chunks of one layer's weights",
                "Leave lossChunk out, or the head out of model.lora.targetModules",
            ),
        )
    if training.init_from is not None:
        beginning = base_directory / training.init_from.path
        yield from (Finding("error", problem) for problem in check_initial(beginning, lora))
    if plan.weights is None:
        where = "path" if training.model.path is not None else "config"
        why = "adapters change little in what a model computes"
        yield _warn_of_seed(where, "model.lora", why)


def check_frozen(training: Training, plan: ModelPlan | None) -> Iterator[Finding]:
    """Check that the directory of a model that the recipe does not train contains weights.

    A model that the file describes by a configuration is initialized from the seed on purpose.
    """
    if plan is None or plan.weights is not None or training.model.path is None:
        return
    if not is_model_trained(training):
        why = "such a model computes nothing that was learned"
        yield _warn_of_seed("path", f"recipe {training.recipe}", why)


def _warn_of_seed(where: str, freezing: str, why: str) -> Finding:
    what = f"has no weights, and {freezing} freezes what the seed makes"
    remedy = "Name a directory with weights as model.path"
    return Finding("warning", Problem(f"spec.training.model.{where}", what, why, remedy))
