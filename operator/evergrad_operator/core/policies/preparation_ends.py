"""Records the reports and ends of the pods that prepare a run's data, each end once. Pure."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from evergrad_common.causes import COUNTED, PodCause
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.raw import get_natural
from evergrad_operator.core.observe.memory import (
    MAX_ENDS,
    Budget,
    EndRecord,
    HostFaults,
    LastFailure,
    Memory,
)
from evergrad_operator.core.observe.observe import Observation
from evergrad_operator.core.observe.pods import PodState, describe_cause
from evergrad_operator.core.observe.preparation import DONE, take_report
from evergrad_operator.core.policies.budget import count_failures
from evergrad_operator.core.policies.host_faults import WELL_SECONDS, note_host_faults
from evergrad_operator.core.policies.pod_ends import find_new_ends, is_letting_go

_OF_HOST: Final = (PodCause.HOST_FAULT, PodCause.REFUSED_BY_NODE)
_NO_RESTART: Final = (PodCause.DONE, PodCause.USER_ERROR)


def note_preparation(
    memory: Memory, observation: Observation, config: Config, now: float
) -> Memory:
    """Return the memory with the newest report, and every end of a preparation pod that was not counted
    before."""
    known, pods = memory.preparation, observation.preparations
    attempt, is_counted = known.attempt, known.is_recorded
    # A recorded pod that no longer exists has ended unobserved.
    is_gone = all(pod.attempt != attempt for pod in pods)
    has_vanished = attempt >= 0 and not is_counted and is_gone
    vanished = (
        names.preparation_pod_name(observation.run.name, attempt) if has_vanished else ""
    )
    ends = find_new_ends(pods, attempt, is_counted=is_counted or has_vanished)
    attempt, is_counted = ends.attempt, ends.is_counted

    # Use a report only if its pod is the newest. Finished documents count as progress.
    report = observation.report
    if report is not None and report.attempt == attempt and not is_counted:
        known = take_report(known, report.values)
        if get_natural(report.values, "documents"):
            memory = replace(memory, budget=Budget(at=memory.budget.at))
    memory = replace(
        memory, preparation=replace(known, attempt=attempt, is_recorded=is_counted)
    )
    ended = [pod for pod in ends.ended if pod.restart == memory.restart]
    if any(describe_cause(pod) == PodCause.DONE for pod in ended):
        memory = _note_done(memory, observation)

    # Ends of pods that the operator itself deletes are neither failures nor restarts.
    if is_letting_go(observation, memory) or observation.run.spec.preparation is None:
        return memory
    memory = _add_ends(memory, ended, vanished, now)
    return _count(memory, observation, ended, config, now)


def _count(
    memory: Memory,
    observation: Observation,
    ended: Sequence[PodState],
    config: Config,
    now: float,
) -> Memory:
    """Count failures and host faults by the rules for nodes."""
    pods = observation.preparations
    newest = max((pod.created_at for pod in pods), default=0.0)
    # A long life does not count as progress, because each pod might fail at the same chunk forever.
    by_progress = replace(config, undisturbed_seconds=math.inf)
    memory = count_failures(memory, ended, newest=newest, config=by_progress, now=now)
    # If a pod has run for WELL_SECONDS, its host was healthy, so its end is the first fault again.
    faults = memory.faults
    has_lasted = any(now - (pod.started_at or now) >= WELL_SECONDS for pod in pods)
    if has_lasted and not faults.nodes:
        memory = replace(
            memory, faults=HostFaults(hosts=faults.hosts, at=faults.at, seen=faults.seen)
        )
    # Record only the host and the pause, and no node, because the pod is not a node.
    nodes = memory.faults.nodes
    faulty = [pod for pod in ended if describe_cause(pod) in _OF_HOST]
    memory = note_host_faults(memory, faulty, newest=newest, config=config, now=now)
    return replace(memory, faults=replace(memory.faults, nodes=nodes))


def _note_done(memory: Memory, observation: Observation) -> Memory:
    """Return the memory with the data prepared. Earlier failures are reset."""
    done = replace(
        memory.preparation,
        prepared=observation.run.parsed.preparation_hash,
        work=DONE,
        bytes_done=memory.preparation.bytes_total,
    )
    return replace(
        memory,
        preparation=done,
        budget=Budget(at=memory.budget.at),
        faults=HostFaults(
            hosts=memory.faults.hosts, at=memory.faults.at, seen=memory.faults.seen
        ),
    )


def _add_ends(
    memory: Memory, ended: Sequence[PodState], vanished: str, now: float
) -> Memory:
    """Record each end, and count it as a restart if the pod is replaced."""
    records = [EndRecord(vanished, PodCause.DELETED, None, now)] if vanished else []
    restarts, failure = dict(memory.restarts), memory.last_failure
    for pod in ended:
        cause = describe_cause(pod)
        code = pod.end.exit_code if pod.end else None
        at = (pod.end and pod.end.at) or now
        records.append(EndRecord(pod.name, cause, code, at))
        if cause in (*COUNTED, *_OF_HOST, PodCause.USER_ERROR):
            message = pod.end.message if pod.end else ""
            failure = LastFailure(cause, None, message, at, exit_code=code)
    for record in records:
        if record.cause not in _NO_RESTART:
            restarts[record.cause] = restarts.get(record.cause, 0) + 1
    return replace(
        memory,
        restarts=restarts,
        last_failure=failure,
        ends=(*memory.ends, *records)[-MAX_ENDS:],
    )
