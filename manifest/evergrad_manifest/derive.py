"""Computes steps, slots and warm-up from the recipe and the size of the data. Pure arithmetic."""

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

    Counts cover the whole run. If it continues another run, they include the steps of that run. ``tokens``
    and ``samples`` include padding.
    """

    total_steps: int
    samples: int
    tokens: int
    epochs: float
    """Epochs over all sources together, counted from the position in other sources at which the run
    begins."""
    samples_per_step: int
    tokens_per_step: int
    slots_per_step: int
    warmup_steps: int
    decay_steps: int
    """Steps of the final decay; 0 unless the schedule is wsd."""
    stage_ends: tuple[int, ...] = ()
    """The last step of each stage except the last; empty if the file has no stages."""


def slots_per_step(batching: Batching) -> int:
    """Return the micro-batches of a step, which is also the largest useful number of processes.

    For example, a global batch of 32 samples in micro-batches of 4 has 8 slots.
    """
    return batching.global_batch_size // batching.micro_batch_size


def derive_steps(
    training: Training,
    *,
    num_samples: int,
    exhausted_after: int | None = None,
    steps_before: int = 0,
) -> HorizonNumbers:
    """Return the run's length over ``num_samples`` training samples (windows of all sources together).

    ``exhausted_after``: samples after which sources have given the epochs of a horizon with ``exhausted``.
    ``steps_before``: steps of the whole run that another run has trained, in other sources.
    Raises ConfigurationError if there is no sample, or if warm-up, decay or the stop step do not fit into the
    horizon.
    """
    if num_samples < 1:
        where, what = "spec.training.recipe", "the task's sources contain no items"
        if training.data.sources:
            where, what = "spec.training.data.sources", "contain no training samples"
        why = "there is nothing to train on"
        raise ConfigurationError(Problem(where, what, why, "Add data"))
    per_step, length = training.batching.global_batch_size, training.sample_tokens
    if exhausted_after is None:
        total = total_steps(training, num_samples=num_samples)
    else:
        total = _steps_until_exhausted(training, exhausted_after)

    # A horizon in epochs gets its length only here. For other horizons, the manifest's rules have checked
    # this.
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

    # Rounding up both shares could make them one step longer than the run, so shorten the decay.
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
    """Return the last step of each stage except the last; empty if the file has no stages.

    A stage begins with the first step that starts at or after its boundary in tokens.
    """
    if training.two_stage_kl is None:
        return ()
    per_step, length = training.batching.global_batch_size, training.data.sequence_length
    tokens = (stage.tokens or 0 for stage in training.two_stage_kl.stages[:-1])
    return tuple(steps_for_tokens(one, samples=per_step, length=length) for one in tokens)


def num_references(training: Training) -> int:
    """Return the number of frozen copies of the model that each process also computes with: 0 or 1."""
    has_none = training.two_stage_kl is None and training.pair_settings is None
    return 0 if has_none else 1


def num_logits(training: Training) -> int:
    """Return the number of models whose logits are in memory together. A reference that is compared by token
    adds one."""
    return 1 if training.two_stage_kl is None else 1 + num_references(training)


def is_model_trained(training: Training) -> bool:
    """Return whether the run trains the file's model; otherwise the model is frozen."""
    return training.latent_edit is None


def why_not_exported(training: Training) -> str:
    """Return why a run has no model to export; empty if it has one."""
    return "" if is_model_trained(training) else WHY_NO_EXPORT


def loss_chunk(training: Training) -> int | None:
    """Return the tokens whose logits exist together; None means all tokens of the micro-batch."""
    if training.two_stage_kl is not None:
        # With a reference, logits are always computed in chunks, because there are two sets of them.
        return training.runtime.loss_chunk or CHUNK_TOKENS
    return training.runtime.loss_chunk


def _steps_until_exhausted(training: Training, exhausted_after: int) -> int:
    """Return the steps of a horizon that ends with its sources. Raises ConfigurationError if there are no
    steps."""
    per_step = training.batching.global_batch_size
    if training.horizon.exhausted == "all":
        return -(-exhausted_after // per_step)
    # Round down: the rest of the step would repeat samples of the exhausted source.
    total = exhausted_after // per_step
    if total < 1:
        what = f"a source is exhausted after {exhausted_after} samples"
        why = f"a step has {per_step}, and no step would be complete"
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
    """Return the steps of the whole run; tokens and epochs are rounded up to whole steps."""
    if (known := steps_without_data(training)) is not None:
        return known
    # Convert through the shortest decimal: 0.1 epochs of 30 samples are 3 samples, not 3.0000000000000004.
    epochs = Fraction(Decimal(repr(training.horizon.epochs or 0.0)))
    return ceil(epochs * num_samples / training.batching.global_batch_size)


def steps_without_data(training: Training) -> int | None:
    """Return the steps of the whole run if they do not depend on the data; None for a horizon in epochs."""
    horizon, per_step = training.horizon, training.batching.global_batch_size
    if horizon.tokens is not None:
        return steps_for_tokens(
            horizon.tokens, samples=per_step, length=training.sample_tokens
        )
    return horizon.steps
