"""Ends of nodes' pods: each is counted once, whatever happens between two writes. Pure.

A pod's end is counted when it is first seen to be over. The memory holds each node's newest attempt and
whether its end is counted.
"""

from collections.abc import Iterable
from dataclasses import replace

from evergrad_common.causes import PodCause
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.observe.memory import MAX_ENDS, EndRecord, Memory, count_restart
from evergrad_operator.core.observe.observe import Observation
from evergrad_operator.core.observe.pods import PodState, describe_cause
from evergrad_operator.core.policies.budget import count_failures
from evergrad_operator.core.policies.host_faults import forgive_hosts, note_host_faults
from evergrad_operator.core.policies.root_cause import note_pods


def note_nodes(
    memory: Memory, observation: Observation, config: Config, now: float
) -> Memory:
    """Return the memory with every end of a node's pod that was not counted before."""
    pods: dict[int, list[PodState]] = {}
    for pod in observation.nodes:
        pods.setdefault(pod.index, []).append(pod)

    # An end is counted where the memory knows the pod's attempt and has not recorded it: the same pod, seen
    # again by a later pass or another operator, counts no more.
    attempts, recorded = list(memory.attempts), set(memory.recorded)
    ended: list[PodState] = []
    vanished = []
    attempts += [-1] * (1 + max(pods, default=-1) - len(attempts))
    for index in range(len(attempts)):
        # A pod that was known and is gone has ended unseen.
        mine = pods.get(index, [])
        is_gone = all(pod.attempt != attempts[index] for pod in mine)
        if is_gone and attempts[index] >= 0 and index not in recorded:
            vanished.append((index, attempts[index]))
            recorded.add(index)
        # A pod of an attempt that was counted before is past, however long it stays for its logs.
        for pod in mine:
            is_counted = pod.attempt == attempts[index] and index in recorded
            if is_counted or pod.attempt < attempts[index]:
                continue
            attempts[index] = pod.attempt
            recorded.discard(index)
            if pod.is_over:
                ended.append(pod)
                recorded.add(index)

    # Ends of pods that the operator itself sends away are nobody's fault and no restart.
    is_sent_away = is_letting_go(observation, memory)
    first_released = 0 if is_sent_away else observation.run.spec.nodes.largest
    released = frozenset(range(first_released, len(attempts)))
    counted = [
        pod for pod in ended if pod.index not in released and pod.restart == memory.restart
    ]
    lost = [(index, attempt) for index, attempt in vanished if index not in released]
    memory = replace(
        memory, attempts=tuple(attempts), recorded=frozenset(recorded | released)
    )

    # The order matters: causes and counters first, then the budget and the hosts, which read them.
    memory = _add_ends(memory, observation, counted, lost, now)
    memory = note_pods(memory, counted, now)

    # The time at which the youngest pod was made that was there as these ended. Successors, made by an
    # operator that died before it could write this down, do not count as having been there.
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


def is_letting_go(observation: Observation, memory: Memory) -> bool:
    """Whether the operator itself sends the run's pods away."""
    return observation.run.spec.suspend or memory.is_stopped or memory.finish is not None


def _add_ends(
    memory: Memory,
    observation: Observation,
    ended: Iterable[PodState],
    vanished: Iterable[tuple[int, int]],
    now: float,
) -> Memory:
    """Write down each end, and count as a restart what is started again."""
    records = []
    for pod in ended:
        code = pod.end.exit_code if pod.end else None
        at = (pod.end and pod.end.at) or now
        records.append(EndRecord(pod.name, describe_cause(pod), code, at))
    for index, attempt in vanished:
        name = names.node_pod_name(observation.run.name, index, attempt)
        records.append(EndRecord(name, PodCause.DELETED, None, now))

    # An exit code 64 that most likely ends the run restarts nothing: before a group has formed, and after the
    # coordinator's outcome.
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
