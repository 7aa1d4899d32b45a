"""Counts failures without progress against the budget, and computes the delay of replacements. Pure.

| end of a pod | budget |
|---|---|
| crash, out of memory, volume full, not started | one failure if the pod is newer than the last failure |
| any other except a host fault, shortly after the pod's start | free; from the fourth in a row, replacements
wait | | any other | free |

Progress resets the budget. The coordinator defines progress (its ``rules/progress.py``) and counts it. Only
progress after a failure resets the failure: the comparison starts with a status of the coordinator that was
polled after the end of the pod was observed.
"""

from collections.abc import Sequence
from dataclasses import replace

from evergrad_common.causes import COUNTED, PodCause
from evergrad_operator.core.objects.backoff import find_delay
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.observe.coordinator_status import CoordinatorStatus
from evergrad_operator.core.observe.memory import Budget, FirstStatus, Memory
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
"""Ends that do not count as short lives: the run is complete, or ``host_faults`` computes the delay."""


def count_failures(
    memory: Memory,
    ended: Sequence[PodState],
    *,
    newest: float,
    config: Config,
    now: float,
) -> Memory:
    """Count the ends that use up the budget. ``newest``: creation time of the youngest existing pod.

    Pods that existed when the last failure was counted belong to that failure and are not counted again.
    """
    budget = memory.budget
    for pod in ended:
        cause = describe_cause(pod)
        if cause in COUNTED and pod.created_at > budget.at:
            # If the coordinator reports no steps, it cannot report progress either. In that case a long life
            # of the pod counts as progress, and the pod's end is the first failure again.
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
    """Count a short life. It costs no failure, but repeated short lives delay the replacements."""
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


def _mark(budget: Budget, memory: Memory) -> Budget:
    """Record the current step and checkpoint. No step counts as progress before ``begin_count`` sets
    ``since``."""
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
    """Record the coordinator's first status after the last failure. Only steps after it count as progress.

    ``observation``: must contain a status of the run's newest coordinator.
    """
    budget, progress = memory.budget, observation.progress
    has_failed = budget.failures or budget.short_lives
    if not has_failed or budget.since is not None:
        return memory
    if progress is None or not observation.is_answer_new:
        return memory
    marked = _mark(budget, memory)
    since = FirstStatus(progress.attempt, progress.new_steps or 0)
    return replace(memory, budget=replace(marked, since=since))


def forgive(
    memory: Memory, observation: Observation, progress: CoordinatorStatus
) -> Memory:
    """Reset the budget if there was progress since the last failure."""
    is_fresh = observation.run.parsed.recovery == "fresh"
    if _has_progress(memory, progress, is_fresh=is_fresh):
        return replace(memory, budget=Budget(at=memory.budget.at))
    return memory


def _has_progress(memory: Memory, progress: CoordinatorStatus, *, is_fresh: bool) -> bool:
    budget, training = memory.budget, memory.training
    if budget.since is None:
        return False
    if progress.attempt == budget.since.attempt and progress.new_steps is not None:
        return progress.new_steps > budget.since.new_steps

    # A new coordinator counts from 0 and does not have the steps before its start. Coordinators of older
    # releases do not count. In both cases compare the newest step, or the newest checkpoint, with the
    # recorded value.
    if progress.new_steps == 0:
        return False
    newest, mark = training.step, budget.step
    if is_fresh:
        newest, mark = training.checkpoint_step, budget.checkpoint_step
    return newest is not None and newest > mark
