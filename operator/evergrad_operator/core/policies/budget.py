"""Failures without progress: the ends that use up the budget, and the time that replacements wait. Pure.

| end of a pod | budget |
|---|---|
| crash, out of memory, volume full, not started | one failure, if the pod came after the last counted |
| any other, no host fault, of a pod hardly begun | free; from the fourth in a row on, replacements wait |
| any other | free |

Progress takes all of it back. The coordinator decides what progress is (its ``rules/progress.py``) and counts
it. Only progress after the failure takes the failure back: the comparison begins with an answer that was
asked for after the end of the pod was seen.
"""

from collections.abc import Sequence
from dataclasses import replace

from evergrad_common.causes import COUNTED, PodCause
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.observe.coordinator_status import CoordinatorStatus
from evergrad_operator.core.observe.memory import Budget, Memory
from evergrad_operator.core.observe.observe import Observation
from evergrad_operator.core.observe.pods import PodState, describe_cause

_FREE_SHORT_LIVES = 3
_NO_SHORT_LIVES = frozenset(
    {
        PodCause.DONE,
        PodCause.HOST_FAULT,
        PodCause.REFUSED_BY_NODE,
        PodCause.USER_ERROR,
    }
)
"""Ends that do not count as short lives: the run is complete, or the host waits by a rule of its own."""


def count_failures(
    memory: Memory,
    ended: Sequence[PodState],
    *,
    newest: float,
    config: Config,
    now: float,
) -> Memory:
    """Count the ends that use up the budget. ``newest``: when the youngest pod there was made.

    Pods that were there when the last failure was counted fell with it, and count no more.
    """
    budget = memory.budget
    for pod in ended:
        cause = describe_cause(pod)
        if cause in COUNTED and pod.created_at > budget.at:
            # A run whose coordinator reports no step shows no progress either: there a long life of the pod
            # stands in for it, and its end is a first failure again.
            is_silent = (
                memory.training.step is None and memory.training.checkpoint_step is None
            )
            ended_at = (pod.end.at if pod.end is not None else None) or 0.0
            has_lasted = (
                is_silent and ended_at - pod.created_at >= config.undisturbed_seconds
            )
            failures = 1 if has_lasted else budget.failures + 1
            retry_at = now + _delay(failures - 1, config)
            budget = replace(
                _mark(budget, memory),
                failures=failures,
                at=newest,
                retry_at=max(budget.retry_at, retry_at),
            )
        elif (
            cause not in _NO_SHORT_LIVES
            and now - pod.created_at < config.short_life_seconds
        ):
            budget = add_short_life(budget, memory, config, now)
    return replace(memory, budget=budget)


def add_short_life(
    budget: Budget,
    memory: Memory,
    config: Config,
    now: float,
) -> Budget:
    """Count a short life: it costs no failure, but such pods are not replaced at full speed for ever."""
    short_lives = budget.short_lives + 1
    retry_at = max(budget.retry_at, now + _delay(short_lives - _FREE_SHORT_LIVES, config))
    return replace(
        _mark(budget, memory),
        short_lives=short_lives,
        retry_at=retry_at,
    )


def _delay(count: int, config: Config) -> float:
    return find_delay(
        count,
        first=config.first_backoff_seconds,
        longest=config.longest_backoff_seconds,
    )


def find_delay(count: int, *, first: float, longest: float) -> float:
    """Return the seconds to wait, twice as many each time; none for the very first, which is most often a
    lone accident."""
    if count < 1:
        return 0.0
    # The exponent is bounded, because a float is not: 2.0 ** 1024 raises.
    return min(longest, first * 2.0 ** min(count - 1, 30))


def _mark(budget: Budget, memory: Memory) -> Budget:
    """Note how far training has come. Nothing is progress before ``begin_count`` has seen a newer answer."""
    training = memory.training
    step = -1 if training.step is None else training.step
    checkpoint = -1 if training.checkpoint_step is None else training.checkpoint_step
    return replace(
        budget,
        step=max(budget.step, step),
        checkpoint_step=max(budget.checkpoint_step, checkpoint),
        since=None,
    )


def begin_count(memory: Memory, observation: Observation) -> Memory:
    """Note the first answer from after the last failure: only what follows it is progress since then.

    ``observation``: with an answer of the run's newest coordinator.
    """
    budget, progress = memory.budget, observation.progress
    has_failed = budget.failures or budget.short_lives
    if not has_failed or budget.since is not None:
        return memory
    if progress is None or not observation.is_answer_new:
        return memory
    marked = _mark(budget, memory)
    since = (progress.attempt, progress.new_steps or 0)
    return replace(memory, budget=replace(marked, since=since))


def forgive(
    memory: Memory, observation: Observation, progress: CoordinatorStatus
) -> Memory:
    """Take back all failures if there was progress since the last one."""
    is_fresh = observation.run.parsed.recovery == "fresh"
    if _has_progress(memory, progress, is_fresh=is_fresh):
        return replace(memory, budget=Budget(at=memory.budget.at))
    return memory


def _has_progress(memory: Memory, progress: CoordinatorStatus, *, is_fresh: bool) -> bool:
    budget, training = memory.budget, memory.training
    if budget.since is None:
        return False
    attempt, known = budget.since
    if progress.attempt == attempt and progress.new_steps is not None:
        return progress.new_steps > known

    # Another coordinator counts from its own start, and does not know the steps that were reached before it.
    # An older one does not count at all.
    if progress.new_steps == 0:
        return False
    newest, mark = training.step, budget.step
    if is_fresh:
        newest, mark = training.checkpoint_step, budget.checkpoint_step
    return newest is not None and newest > mark
