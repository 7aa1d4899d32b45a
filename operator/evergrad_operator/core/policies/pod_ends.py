"""Counts the ends of nodes' pods, each end exactly once. Pure.

A pod's end is counted when it is first observed. The memory stores each node's newest attempt and whether its
end is counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from evergrad_common.causes import PodCause
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.observe.memory import MAX_ENDS, EndRecord, Memory, count_restart
from evergrad_operator.core.observe.observe import Observation
from evergrad_operator.core.observe.pods import PodState, describe_cause
from evergrad_operator.core.policies.budget import count_failures
from evergrad_operator.core.policies.host_faults import forgive_hosts, note_host_faults
from evergrad_operator.core.policies.root_cause import note_pods


@dataclass(frozen=True)
class NewEnds:
    """The ends that are not counted yet, of pods of which one runs at a time.

    ``attempt``: the newest attempt. ``is_counted``: whether its end is counted, now or before.
    """

    attempt: int
    is_counted: bool
    ended: list[PodState]


def find_new_ends(pods: Iterable[PodState], attempt: int, *, is_counted: bool) -> NewEnds:
    """Return the ends that are not counted yet.

    ``attempt``: the newest attempt in the memory. ``is_counted``: whether its end is counted.
    """
    ended: list[PodState] = []
    for pod in pods:
        if pod.attempt < attempt or (pod.attempt == attempt and is_counted):
            continue
        attempt, is_counted = pod.attempt, pod.is_over
        if pod.is_over:
            ended.append(pod)
    return NewEnds(attempt, is_counted, ended)


@dataclass(frozen=True)
class _NodeEnds:
    """The ends of nodes' pods that are not counted yet, and the newest attempts with which they are counted.

    ``vanished``: index and attempt of pods that were recorded and no longer exist.
    """

    attempts: tuple[int, ...]
    recorded: frozenset[int]
    ended: list[PodState]
    vanished: list[tuple[int, int]]


def note_nodes(
    memory: Memory, observation: Observation, config: Config, now: float
) -> Memory:
    """Return the memory with every end of a node's pod that was not counted before."""
    ends = _find_node_ends(memory, observation)

    # Ends of pods that the operator itself deletes are neither failures nor restarts.
    is_sent_away = is_letting_go(observation, memory)
    first_released = 0 if is_sent_away else observation.run.spec.nodes.largest
    released = frozenset(range(first_released, len(ends.attempts)))
    counted = [
        pod
        for pod in ends.ended
        if pod.index not in released and pod.restart == memory.restart
    ]
    lost = [(index, attempt) for index, attempt in ends.vanished if index not in released]
    memory = replace(memory, attempts=ends.attempts, recorded=ends.recorded | released)

    # Update causes and counters before the budget and the hosts, which read them.
    memory = _add_ends(memory, observation, counted, lost, now)
    memory = note_pods(memory, counted, now)

    # Find the creation time of the youngest pod that existed when these pods ended. Leave out replacements
    # that an operator created before it stopped without recording the ends.
    last = {pod.index: pod.attempt for pod in counted}
    were_there = [
        pod.created_at
        for pod in observation.nodes
        if pod.attempt <= last.get(pod.index, pod.attempt)
    ]
    newest = max(were_there, default=0.0)
    memory = count_failures(memory, counted, newest=newest, config=config, now=now)
    memory = note_host_faults(memory, counted, newest=newest, config=config, now=now)
    return forgive_hosts(memory, observation, now)


def _find_node_ends(memory: Memory, observation: Observation) -> _NodeEnds:
    """Return the ends that the memory has not recorded for the pod's attempt.

    A later pass or another operator that observes the same pod does not count its end again.
    """
    pods: dict[int, list[PodState]] = {}
    for pod in observation.nodes:
        pods.setdefault(pod.index, []).append(pod)

    attempts, recorded = list(memory.attempts), set(memory.recorded)
    ended: list[PodState] = []
    vanished = []
    attempts += [-1] * (1 + max(pods, default=-1) - len(attempts))
    for index in range(len(attempts)):
        # A recorded pod that no longer exists has ended unobserved.
        mine = pods.get(index, [])
        is_gone = all(pod.attempt != attempts[index] for pod in mine)
        if is_gone and attempts[index] >= 0 and index not in recorded:
            vanished.append((index, attempts[index]))
            recorded.add(index)
        # Skip pods of attempts that were counted before. They may stay a long time for their logs.
        ends = find_new_ends(mine, attempts[index], is_counted=index in recorded)
        ended += ends.ended
        attempts[index] = ends.attempt
        recorded.discard(index)
        if ends.is_counted:
            recorded.add(index)
    return _NodeEnds(tuple(attempts), frozenset(recorded), ended, vanished)


def is_letting_go(observation: Observation, memory: Memory) -> bool:
    """Return whether the operator itself deletes the run's pods."""
    return observation.run.spec.suspend or memory.is_stopped or memory.finish is not None


def _add_ends(
    memory: Memory,
    observation: Observation,
    ended: Iterable[PodState],
    vanished: Iterable[tuple[int, int]],
    now: float,
) -> Memory:
    """Record each end, and count it as a restart if the pod is replaced."""
    records = []
    for pod in ended:
        code = pod.end.exit_code if pod.end else None
        at = (pod.end and pod.end.at) or now
        records.append(EndRecord(pod.name, describe_cause(pod), code, at))
    for index, attempt in vanished:
        name = names.node_pod_name(observation.run.name, index, attempt)
        records.append(EndRecord(name, PodCause.DELETED, None, now))

    # An exit code 64 that probably ends the run is not a restart: before a group has formed, and after the
    # coordinator has reported the failure.
    is_over = observation.progress is not None and observation.progress.phase == "Failed"
    no_restart = {PodCause.DONE}
    if is_over or not memory.has_formed:
        no_restart.add(PodCause.USER_ERROR)
    for record in records:
        if record.cause in no_restart:
            memory = replace(memory, ends=(*memory.ends, record)[-MAX_ENDS:])
        else:
            memory = count_restart(memory, record)
    return memory
