"""Counts ends that are caused by a host or a transient problem, not by the run. Pure.

Such ends cost no failure of the budget. The pod is recreated with a growing delay, on another host if
possible. Other nodes and the coordinator do not wait.

| end of a node's pod | counted as |
|---|---|
| exit code 70 with kind ``environment``, such as an unwritable mount or a missing device | a host fault |
| refused by the kubelet, such as by a device plugin | a host fault |
| exit code 64 after a group has formed, which shows that configuration and data are right | a host fault |
| exit code 64 before a group has formed | an input error: retried like a host fault until it is confirmed |

New pods avoid a host with faults if other hosts are available. A host is forgotten 24 hours after its last
fault. Ends that the run itself causes (a crash, a lost peer, a value that is not finite) do not count against
the host. Neither do lost or drained hosts, because the scheduler handles them.

An input error is confirmed if two nodes on two hosts report it, if two attempts of one node report it, or if
the run has only one node or one host.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from evergrad_common.causes import PodCause
from evergrad_operator.core.objects.backoff import find_delay
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.status_kinds import MAX_HOSTS
from evergrad_operator.core.observe.memory import (
    REMEMBERED_SECONDS,
    HostFaults,
    Memory,
    RecordedInputError,
)
from evergrad_operator.core.observe.observe import Observation
from evergrad_operator.core.observe.pods import PodState, describe_cause

MANY_FAULTS: Final = 6
"""Number of consecutive host faults after which a run that does not train needs a person."""
_SECOND_OPINION_SECONDS: Final = 15.0
"""Time in which other nodes may report the same input error. No replacement is created during this time."""
WELL_SECONDS: Final = 180.0
"""Time after which a running pod has imported its libraries and joined, so that its host counts as
healthy."""


def note_host_faults(
    memory: Memory,
    ended: Sequence[PodState],
    *,
    newest: float,
    config: Config,
    now: float,
) -> Memory:
    """Count the ends among ``ended`` that are host faults. ``newest``: creation time of the youngest existing
    pod.

    Pods that existed when the last fault was counted belong to that fault and are not counted again.
    """
    faulty = [pod for pod in ended if is_host_fault(pod)]
    if not faulty:
        return memory
    known = memory.faults
    # Exit code 64 can be an input error only before a group has formed. Later it is caused by the host.
    accused = [
        RecordedInputError(pod.index, pod.node_name)
        for pod in faulty
        if not memory.has_formed and describe_cause(pod) == PodCause.USER_ERROR
    ]
    errors = (*memory.input_errors, *accused)

    # Create the first replacement without delay, unless other nodes may be about to report the same input
    # error.
    in_a_row = known.in_a_row + any(pod.created_at > known.at for pod in faulty)
    delay = find_delay(
        in_a_row - 1,
        first=config.first_backoff_seconds,
        longest=config.longest_host_backoff_seconds,
    )
    if accused:
        delay = max(delay, _SECOND_OPINION_SECONDS)

    # Move the host of the last fault to the end, so that the host with the oldest fault is dropped first.
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
    """Return whether a pod's end is retried without costing a failure. Exit code 64 is, until it is
    confirmed."""
    return describe_cause(pod) in (
        PodCause.HOST_FAULT,
        PodCause.REFUSED_BY_NODE,
        PodCause.USER_ERROR,
    )


def forget_hosts(faults: HostFaults, now: float) -> HostFaults:
    """Return the faults without hosts whose last fault is older than ``REMEMBERED_SECONDS``."""
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
    """Return the memory without nodes that have recovered. If all have recovered, the count of faults
    restarts.

    Their hosts are still avoided until ``REMEMBERED_SECONDS`` after the last fault.
    """
    faults = forget_hosts(memory.faults, now)
    memory = replace(memory, faults=faults)
    # A node has recovered after its pod has run for WELL_SECONDS. Also drop nodes above the run's maximum.
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
    """Return whether an input error is confirmed as the cause of the exit codes 64 so far."""
    errors = memory.input_errors
    # If a group has formed, configuration and data are valid.
    if not errors or memory.has_formed:
        return False
    has_tried_twice = len({error.node for error in errors}) < len(errors)
    if has_tried_twice or observation.run.spec.nodes.largest == 1:
        return True

    # Two nodes on two hosts report the error, so the input is the cause and not a host.
    if any(
        one.node != other.node and one.host != other.host
        for one in errors
        for other in errors
    ):
        return True

    # If all pods are on one host, no second host can confirm the error. A pod without a host may still get
    # another.
    pods = [pod for pod in observation.nodes if pod.restart == memory.restart]
    hosts = {pod.node_name for pod in pods if pod.node_name}
    return len(hosts) == 1 and all(pod.node_name for pod in pods if pod.is_live)
