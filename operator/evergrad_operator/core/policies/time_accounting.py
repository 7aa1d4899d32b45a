"""Adds the time of a run's observed pods to its memory. Pure.

Pods of nodes, preparations and evaluations count. The coordinator's pod does not count, because it requests
few resources and no accelerator.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from evergrad_common.causes import Use
from evergrad_manifest.envelope.resources import count_accelerators
from evergrad_operator.core.objects import names
from evergrad_operator.core.observe.memory import Memory
from evergrad_operator.core.observe.observe import Observation
from evergrad_operator.core.observe.pods import PodState
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.observe.time_accounting import PodLife, Reading, count
from evergrad_operator.core.policies.pod_ends import is_letting_go

_BY_PHASE: Final[Mapping[str, Use]] = {
    "Running": "training",
    "Draining": "training",
    "Starting": "recovery",
    "Waiting": "waiting",
}
"""Uses by the coordinator's phase, for coordinators of older releases that do not count uses."""


def note_usage(
    memory: Memory, observation: Observation, now: float, *, is_current: bool
) -> Memory:
    """Return the memory with the time of the pods up to ``now``, in seconds since 1970.

    ``is_current``: whether ``observation.progress`` comes from the run's newest coordinator.
    """
    progress = observation.progress if is_current else None
    reading: Reading | None = None
    fallback: Use | None = None
    # Choose the use of joined pods if their coordinator reports nothing new. Without a coordinator, nodes
    # train no longer than a lease.
    if observation.unreachable is not None:
        fallback = "recovery"
    if is_letting_go(observation, memory):
        fallback = "end"
    joined: Mapping[str, float] = {}
    if progress is not None and progress.used is not None:
        reading, joined = Reading(progress.attempt, progress.used), progress.joined
    elif progress is not None:
        fallback = fallback or _BY_PHASE.get(progress.phase, "end")
        joined = {pod.ip: 0.0 for pod in observation.nodes if pod.is_running}

    run = observation.run
    here = (*observation.nodes, *observation.preparations, *observation.evaluations)
    lives = [_read_life(run, pod, joined, now) for pod in here]
    # Skip deleted pods that the cache still contains, so that no pod counts twice.
    shown = {pod.uid for pod in here}
    for pod, ago in observation.gone:
        if pod.uid not in shown and pod.role != names.ROLE_COORDINATOR:
            life = _read_life(run, pod, {}, now)
            ended = _milliseconds(now - ago) if life.ended is None else life.ended
            lives.append(replace(life, ended=ended, is_gone=True))
    # Use whole milliseconds, so that sums over many passes do not drift.
    usage = count(
        memory.usage, lives, now=_milliseconds(now), reading=reading, fallback=fallback
    )
    return replace(memory, usage=usage)


def _read_life(
    run: ParsedRun, pod: PodState, joined: Mapping[str, float], now: float
) -> PodLife:
    bound = pod.place.scheduled_at
    if bound is None and pod.node_name:
        bound = pod.created_at
    # If the end has no time, a terminated pod ends now. A pod that only runs a wrong image is still running.
    ended = None if pod.end is None else pod.end.at
    if ended is None and pod.place.has_terminated:
        ended = now
    has_joined = pod.role == names.ROLE_NODE and pod.ip in joined
    asked = run.spec.resources
    if pod.role == names.ROLE_PREPARATION and run.spec.preparation is not None:
        asked = run.spec.preparation.resources
    if pod.role == names.ROLE_EVALUATION and run.spec.evaluation is not None:
        asked = run.spec.evaluation.resources
    return PodLife(
        name=pod.name.removeprefix(f"{run.name}-"),
        created=_milliseconds(pod.created_at),
        bound=None if bound is None else _milliseconds(bound),
        joined=_milliseconds(now - joined[pod.ip]) if has_joined else None,
        ended=None if ended is None else _milliseconds(ended),
        use="evaluation" if pod.role == names.ROLE_EVALUATION else "startup",
        num_accelerators=count_accelerators(asked),
    )


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)
