"""Ends that are the fault of a host or a moment, not of the run. Pure.

They cost no failure of the budget. The pod comes back, later each time, on another host if there is one;
other nodes and the coordinator do not wait.

| end of a node's pod | taken for |
|---|---|
| exit code 70 with kind ``environment``, such as an unwritable mount or a missing device | a host fault |
| refused by the kubelet, such as by a device plugin | a host fault |
| exit code 64 after a group has formed, which shows that configuration and data are right | a host fault |
| exit code 64 before | an input error: final once it is confirmed, tried again like a host fault until then |

A host that failed the run is avoided by new pods as long as there are others, and forgotten 24 hours after
its last fault. An end that a process of the run causes by itself (a crash, a lost peer, a value that is not
finite) accuses no host, and neither does a lost or drained one, which the scheduler knows.

An input error is confirmed by two nodes on two hosts, by two tries of one node, or where the run has one node
or one host.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from evergrad_common.causes import PodCause
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.observe.memory import (
    MAX_HOSTS,
    REMEMBERED_SECONDS,
    HostFaults,
    Memory,
    RecordedInputError,
)
from evergrad_operator.core.observe.observe import Observation
from evergrad_operator.core.observe.pods import PodState, describe_cause
from evergrad_operator.core.policies.budget import find_delay

MANY_FAULTS: Final = 6
"""Host faults in a row after which a run that does not train needs a person: they took a minute of pauses,
and as many starts."""
_SECOND_OPINION_SECONDS: Final = 15.0
"""Time in which other nodes may find the same input error; meanwhile no pod is made for it."""
WELL_SECONDS: Final = 180.0
"""Time after which a running pod has imported its libraries and joined: its host is good."""


def note_host_faults(
    memory: Memory,
    ended: Sequence[PodState],
    *,
    newest: float,
    config: Config,
    now: float,
) -> Memory:
    """Count the ends among ``ended`` that are faults of hosts. ``newest``: when the youngest pod there was
    made.

    Pods that were there when the last one was counted fell with it, and count no more.
    """
    faulty = [pod for pod in ended if is_host_fault(pod)]
    if not faulty:
        return memory
    known = memory.faults
    # Exit code 64 may be the input's fault only while no group has formed; later it is the host that differs.
    accused = [
        RecordedInputError(pod.index, pod.node_name)
        for pod in faulty
        if not memory.has_formed and describe_cause(pod) == PodCause.USER_ERROR
    ]
    errors = (*memory.input_errors, *accused)

    # The first replacement comes at once, except where other nodes may be about to find the same input error.
    in_a_row = known.in_a_row + any(pod.created_at > known.at for pod in faulty)
    delay = find_delay(
        in_a_row - 1,
        first=config.first_backoff_seconds,
        longest=config.longest_host_backoff_seconds,
    )
    if accused:
        delay = max(delay, _SECOND_OPINION_SECONDS)

    # The host of the last fault comes last: the oldest is forgotten first.
    hosts, seen = dict(known.hosts), dict(known.seen)
    for pod in faulty:
        if pod.node_name:
            hosts[pod.node_name] = hosts.pop(pod.node_name, 0) + 1
            seen[pod.node_name] = now
    kept = tuple(hosts.items())[-MAX_HOSTS:]
    faults = HostFaults(
        hosts=kept,
        seen=tuple((host, seen[host]) for host, _ in kept if host in seen),
        nodes=known.nodes | {pod.index for pod in faulty},
        in_a_row=in_a_row,
        at=max(known.at, newest),
        retry_at=max(known.retry_at, now + delay),
    )
    return replace(
        memory,
        faults=faults,
        input_errors=errors[-MAX_HOSTS:],
    )


def is_host_fault(pod: PodState) -> bool:
    """Whether a pod's end is tried again at no cost, as an exit code 64 is until it is confirmed."""
    return describe_cause(pod) in (
        PodCause.HOST_FAULT,
        PodCause.REFUSED_BY_NODE,
        PodCause.USER_ERROR,
    )


def forget_hosts(faults: HostFaults, now: float) -> HostFaults:
    """Forget hosts whose last fault is old."""
    times = dict(faults.seen)
    kept = tuple(
        (host, count)
        for host, count in faults.hosts
        if now - times.get(host, faults.at) < REMEMBERED_SECONDS
    )
    if kept == faults.hosts:
        return faults
    left = {host for host, _ in kept}
    seen = tuple(one for one in faults.seen if one[0] in left)
    return replace(faults, hosts=kept, seen=seen)


def forgive_hosts(memory: Memory, observation: Observation, now: float) -> Memory:
    """Forget nodes that are well again; once all are, the next fault is a first one.

    The hosts are still avoided, each until its last fault is old.
    """
    faults = forget_hosts(memory.faults, now)
    memory = replace(memory, faults=faults)
    # A node is well once its pod has run for long enough, and forgotten once the run has fewer nodes.
    live = [pod for pod in observation.nodes if pod.is_live and pod.started_at is not None]
    well = {pod.index for pod in live if now - (pod.started_at or now) >= WELL_SECONDS}
    surplus = {
        index for index in faults.nodes if index >= observation.run.spec.nodes.largest
    }
    nodes = faults.nodes - well - surplus
    if nodes == faults.nodes:
        return memory
    left = replace(faults, nodes=nodes)
    return replace(
        memory,
        faults=left
        if nodes
        else HostFaults(hosts=faults.hosts, at=faults.at, seen=faults.seen),
    )


def is_input_error_confirmed(memory: Memory, observation: Observation) -> bool:
    """Whether a person's mistake is the only explanation of the exit codes 64 so far."""
    errors = memory.input_errors
    # A group that has formed shows that configuration and data are right.
    if not errors or memory.has_formed:
        return False
    has_tried_twice = len({error.node for error in errors}) < len(errors)
    if has_tried_twice or observation.run.spec.nodes.largest == 1:
        return True

    # Two nodes on two hosts agree: it is the input, and not a host.
    if any(
        one.node != other.node and one.host != other.host
        for one in errors
        for other in errors
    ):
        return True

    # Where all pods are on one host, no second host can confirm it. A pod without a host may still get one.
    pods = [pod for pod in observation.nodes if pod.restart == memory.restart]
    hosts = {pod.node_name for pod in pods if pod.node_name}
    return len(hosts) == 1 and all(pod.node_name for pod in pods if pod.is_live)
