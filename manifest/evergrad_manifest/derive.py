"""Numbers that follow from the recipe and the data's size: steps, slots, warm-up. Pure arithmetic."""

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import ceil

from evergrad_manifest.errors import ConfigurationError, Problem, raise_if
from evergrad_manifest.training import Batching, Training
from evergrad_manifest.training.latent_edit import WHY_NO_EXPORT
from evergrad_manifest.training.optimization import check_pieces, check_schedule
from evergrad_manifest.training.steps import check_stop, steps_for_tokens, steps_of
from evergrad_manifest.training.two_stage_kl import CHUNK_TOKENS, problem_of_boundary


@dataclass(frozen=True)
class HorizonNumbers:
    """The length of a run in every unit.

    Counts are of the whole run, with the steps of another one that it goes on from; ``tokens`` and
    ``samples`` count padding too.
    """

    total_steps: int
    samples: int
    tokens: int
    epochs: float
    """Passes over all sources together, behind the position in other sources that the run begins at."""
    samples_per_step: int
    tokens_per_step: int
    slots_per_step: int
    warmup_steps: int
    decay_steps: int
    """Steps of the final decay; 0 unless the schedule is wsd."""
    stage_ends: tuple[int, ...] = ()
    """The last step of each stage but the last, where the file has stages."""


def slots_per_step(batching: Batching) -> int:
    """M: micro-batches a step, and the largest useful number of processes."""
    return batching.global_batch_size // batching.micro_batch_size


def derive_steps(
    training: Training,
    *,
    num_samples: int,
    exhausted_after: int | None = None,
    steps_before: int = 0,
) -> HorizonNumbers:
    """The run's length over ``num_samples`` training samples (windows of all sources together).

    ``exhausted_after``: samples after which sources have given the epochs of a horizon with ``exhausted``.
    ``steps_before``: steps of the whole run that another one has trained, in other sources.
    Raises ConfigurationError when there is no sample, or when warm-up, decay or the stop step do not fit into
    the horizon.
    """
    if num_samples < 1:
        where, what = "spec.training.recipe", "the task's sources hold no item"
        if training.data.sources:
            where, what = "spec.training.data.sources", "hold no training sample"
        why = "there is nothing to train on"
        raise ConfigurationError(Problem(where, what, why, "Add data"))
    per_step, length = training.batching.global_batch_size, training.sample_tokens
    if exhausted_after is None:
        total = total_steps(training, num_samples=num_samples)
    else:
        total = _steps_until_exhausted(training, exhausted_after)

    # Refused here where a horizon in epochs gets its length; for the others the file was refused before.
    schedule = training.schedule
    decay = schedule.decay if schedule.type == "wsd" else 0
    raise_if(
        [
            *check_schedule(schedule.warmup, decay, total=total),
            *check_pieces(
                schedule.warmup, [one.until for one in schedule.pieces], total=total
            ),
            *check_stop(training.stop.after_step, total=total),
            *_check_stages(training, total=total),
        ],
        ConfigurationError,
    )

    # Rounding both shares up could make them one step longer than the run: the decay gives way.
    warmup_steps = min(steps_of(schedule.warmup, total), total)
    return HorizonNumbers(
        total_steps=total,
        samples=total * per_step,
        tokens=total * per_step * length,
        epochs=max(0, total - steps_before) * per_step / num_samples,
        samples_per_step=per_step,
        tokens_per_step=per_step * length,
        slots_per_step=slots_per_step(training.batching),
        warmup_steps=warmup_steps,
        decay_steps=min(steps_of(decay, total), total - warmup_steps),
        stage_ends=stage_ends(training),
    )


def stage_ends(training: Training) -> tuple[int, ...]:
    """The last step of each stage but the last; none for a file without stages.

    A stage begins with the first step that starts at or behind its boundary in tokens.
    """
    if training.two_stage_kl is None:
        return ()
    per_step, length = training.batching.global_batch_size, training.data.sequence_length
    tokens = (stage.tokens or 0 for stage in training.two_stage_kl.stages[:-1])
    return tuple(steps_for_tokens(one, samples=per_step, length=length) for one in tokens)


def num_references(training: Training) -> int:
    """Frozen copies of the model that each process computes with besides."""
    has_none = training.two_stage_kl is None and training.pair_settings is None
    return 0 if has_none else 1


def num_logits(training: Training) -> int:
    """Models whose logits are there at once: compared token by token, those of a reference are too."""
    return 1 if training.two_stage_kl is None else 1 + num_references(training)


def is_model_trained(training: Training) -> bool:
    """Whether the file's model is what the run trains; else it is a part that stays as it is."""
    return training.latent_edit is None


def why_not_exported(training: Training) -> str:
    """Why a run has no model to export; empty where it has one."""
    return "" if is_model_trained(training) else WHY_NO_EXPORT


def loss_chunk(training: Training) -> int | None:
    """Tokens whose logits exist at a time; None: those of the whole micro-batch."""
    if training.two_stage_kl is not None:
        # Beside those of the reference they always come in chunks: all of them would be there twice.
        return training.runtime.loss_chunk or CHUNK_TOKENS
    return training.runtime.loss_chunk


def _steps_until_exhausted(training: Training, exhausted_after: int) -> int:
    """Steps of a horizon that ends by its sources. Raises ConfigurationError where that is none."""
    per_step = training.batching.global_batch_size
    if training.horizon.exhausted == "all":
        return -(-exhausted_after // per_step)
    # Rounded down: the rest of the step would repeat samples of the source that has ended.
    total = exhausted_after // per_step
    if total < 1:
        what = f"a source is exhausted after {exhausted_after} samples"
        why = f"a step has {per_step}, and none would be whole"
        remedy = "Add data or epochs, or lower batching.globalBatchSize"
        raise ConfigurationError(
            Problem("spec.training.horizon.exhausted", what, why, remedy)
        )
    return total


def _check_stages(training: Training, *, total: int) -> list[Problem]:
    if training.two_stage_kl is None:
        return []
    samples, length = training.batching.global_batch_size, training.data.sequence_length
    tokens = training.two_stage_kl.stages[0].tokens or 0
    problem = problem_of_boundary(tokens, samples=samples, length=length, total=total)
    return [] if problem is None else [problem]


def total_steps(training: Training, *, num_samples: int) -> int:
    """Steps of the whole run; tokens and epochs are rounded up to whole steps."""
    if (known := steps_without_data(training)) is not None:
        return known
    # Through its shortest decimal: 0.1 epochs of 30 samples are 3 samples and not 3.0000000000000004.
    epochs = Fraction(Decimal(repr(training.horizon.epochs or 0.0)))
    return ceil(epochs * num_samples / training.batching.global_batch_size)


def steps_without_data(training: Training) -> int | None:
    """Steps of the whole run where they do not depend on the data; None for a horizon in epochs."""
    horizon, per_step = training.horizon, training.batching.global_batch_size
    if horizon.tokens is not None:
        return steps_for_tokens(
            horizon.tokens, samples=per_step, length=training.sample_tokens
        )
    return horizon.steps
