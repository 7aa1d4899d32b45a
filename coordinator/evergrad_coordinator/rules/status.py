"""The run as others see it: one JSON object and the metrics of ``GET /metrics``.

Pure; ``http`` serves it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from evergrad_coordinator.contract import ExitCode
from evergrad_coordinator.metrics import COORDINATOR, Series
from evergrad_coordinator.rules.group import Group
from evergrad_coordinator.rules.planning import find_lost
from evergrad_coordinator.rules.state import node_order
from evergrad_coordinator.wire import MAX_TEXT

MAX_LISTED = 64
"""Members and other nodes in /status; the rest is only counted."""


@dataclass(frozen=True)
class Condition:
    """Where the run stands and why."""

    phase: str
    reason: str
    message: str


_PHASES: dict[int, str] = {
    ExitCode.DONE: "Complete",
    ExitCode.STOPPED_SAVED: "Stopped",
    ExitCode.STOPPED_UNSAVED: "Stopped",
}
"""The phase of a run that has ended with an exit code; Failed for any other."""
ENDED_PHASES = ("Complete", "Stopped", "Failed")
"""Phases of a run that has ended, or whose nodes have all left in order."""
_ALL_PHASES = ("Waiting", "Starting", "Running", "Draining", *ENDED_PHASES)


def describe_condition(group: Group, *, now: float) -> Condition:
    """Phase (Waiting, Starting, Running, Draining, Complete, Stopped, Failed), reason and message."""
    if group.finished:
        end = group.finished
        # Nodes give reasons in words of their own; in a status a reason is one word in CamelCase.
        words = end.reason.replace("-", " ").replace("_", " ").split()
        reason = "".join(word[:1].upper() + word[1:] for word in words)
        return Condition(_PHASES.get(end.exit_code, "Failed"), reason, end.message)
    if group.nodes and group.fence_until > now:
        text = "no node of the last group is left: its workers stop by themselves when their lease ends"
        return Condition("Waiting", "WaitingForLease", text)
    if group.proposal:
        return _describe_proposal(group)
    if group.world and not group.world.is_over and group.nodes and not group.rendezvous:
        return _describe_world(group)
    return _describe_wait(group, now)


def _describe_world(group: Group) -> Condition:
    world = group.world
    if world is None:
        return Condition("Waiting", "WaitingForNodes", "")
    # Anything that people can mend comes first: nodes that are missing, then a broken group.
    is_short = (
        sum(node.is_candidate for node in group.nodes.values()) < group.settings.min_nodes
    )
    is_broken = world.is_broken or bool(find_lost(world, group.nodes.values()))
    if is_short and is_broken:
        return _describe_shortage(group)
    if is_broken:
        return Condition(
            "Starting",
            "GroupBroken",
            f"generation {world.generation} broke; a new one is about to be planned",
        )
    if not world.is_up:
        return Condition(
            "Starting",
            "MembersStarting",
            f"{len(world.up)} of {len(world.places)} nodes are up",
        )
    return Condition(
        "Running", "AllMembersUp", f"{len(world.places)} nodes, {world.size} workers"
    )


def _describe_proposal(group: Group) -> Condition:
    proposal = group.proposal
    if proposal is None or len(proposal.members) < group.settings.min_nodes:
        return _describe_shortage(group)
    waits = f"{proposal.reason}; waiting for {len(proposal.waits_for)} nodes to be ready"
    if not proposal.waits_for and group.departures.saver:
        return Condition(
            "Draining",
            "WaitingForSave",
            f"node {group.departures.saver[0]} saves before it leaves",
        )
    is_draining = group.world is not None and not group.world.is_over and not proposal.hard
    return Condition("Draining" if is_draining else "Starting", "MembersGettingReady", waits)


def _describe_wait(group: Group, now: float) -> Condition:
    if not group.nodes and group.departures.was_left:
        return Condition(
            "Stopped",
            "AllNodesLeft",
            "all nodes have left; the run goes on when enough are here again",
        )
    if group.nodes and group.departures.saver:
        return Condition(
            "Waiting",
            "WaitingForSave",
            f"node {group.departures.saver[0]} saves before it leaves",
        )
    if (
        group.rendezvous
        and group.rendezvous.adopts_until is not None
        and group.rendezvous.adopts_until > now
        and group.nodes
    ):
        return Condition(
            "Waiting",
            "WaitingForReconnects",
            "a group may be running; its nodes have a lease's time to report it",
        )
    return _describe_shortage(group)


def _describe_shortage(group: Group) -> Condition:
    ready, settings = sum(node.is_candidate for node in group.nodes.values()), group.settings
    if group.rendezvous and settings.min_nodes <= ready < settings.expect:
        return Condition(
            "Waiting",
            "WaitingForNodes",
            f"{ready} nodes of the {settings.expect} expected are here",
        )
    return Condition(
        "Waiting",
        "WaitingForNodes",
        f"{ready} nodes are here; at least {settings.min_nodes} are needed",
    )


def build_status(group: Group, *, now: float) -> dict[str, Any]:
    """The object of ``GET /status``."""
    condition, training, world = describe_condition(group, now=now), group.training, group.world
    # A group whose member is gone is still the newest, but nobody trains in it.
    is_current = (
        world is not None and not world.is_over and not find_lost(world, group.nodes.values())
    )
    ready = sum(node.is_candidate for node in group.nodes.values())
    members = list(_list_members(group))
    return {
        "run": group.settings.run,
        "phase": condition.phase,
        "reason": condition.reason,
        "message": condition.message,
        "generation": group.generation,
        "epoch": group.settings.epoch,
        "nodes": {
            "min": group.settings.min_nodes,
            "max": group.settings.max_nodes,
            "ready": ready,
            "connected": len(group.nodes),
            "members": members[:MAX_LISTED],
            "numMembers": len(members),
        },
        "worldSize": world.size if world and is_current else 0,
        "step": training.step if training.step >= 0 else None,
        "totalSteps": training.total_steps,
        "loss": training.loss,
        "tokensPerSecond": training.tokens_per_second,
        "etaSeconds": training.eta_seconds,
        "checkpointStep": training.checkpoint_step if training.checkpoint_step >= 0 else None,
        "restarts": dict(group.accounting.restarts),
        "lostSeconds": {
            cause: round(seconds, 3)
            for cause, seconds in group.accounting.observe_lost(now=now).items()
        },
        "maxFailures": group.budget.limit,
        "lastFailure": _build_failure(group, now),
        "updatedSecondsAgo": None
        if training.updated_at is None
        else round(now - training.updated_at, 3),
    }


def _list_members(group: Group) -> Iterable[dict[str, Any]]:
    """Nodes of the running or planned group, then the others that are connected."""
    places = group.world.places if group.world and not group.world.is_over else {}
    nodes = sorted(
        group.nodes.values(), key=lambda node: (node.key not in places, node_order(node.name))
    )
    for node in nodes:
        place = places.get(node.key)
        yield {
            "node": node.name,
            "firstRank": place.first_rank if place else None,
            "workers": node.workers,
            "state": _describe_node(group, node),
            "address": node.address,
        }


def _describe_node(group: Group, node: Any) -> str:
    # The first that is true is shown: a node that leaves is shown so wherever else it is.
    places = group.world.places if group.world and not group.world.is_over else {}
    states = [
        ("done", node.is_done),
        ("leaving", node.is_leaving),
        ("joining", node.workers == 0),
        ("preparing", group.proposal is not None and node.key in group.proposal.waits_for),
        ("ready", group.proposal is not None and node.key in group.proposal.members),
        (
            "running",
            node.key in places and group.world is not None and node.key in group.world.up,
        ),
        ("starting", node.key in places),
    ]
    return next((name for name, is_so in states if is_so), "spare")


def _build_failure(group: Group, now: float) -> dict[str, Any] | None:
    failure = group.budget.last
    if failure is None:
        return None
    report = failure.report
    return {
        "generation": report.generation,
        "cause": report.cause,
        "node": failure.node,
        "rank": report.rank,
        "step": report.step,
        "exitCode": report.exit_code,
        "message": report.message[:MAX_TEXT],
        "secondsAgo": round(max(0.0, now - failure.at), 3),
        "withoutProgress": group.budget.used,
    }


# ---- metrics -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EdgeFacts:
    """Counts of the server, by the names of the catalogue behind ``coordinator_``."""

    connections: int
    connections_total: int
    messages_total: int
    internal_errors_total: int
    journal_failures_total: int
    journal_writable: int
    rejected_total: Mapping[str, int]


Values = float | Mapping[str, float] | None
"""The value of a metric, or those of its one label; None where nobody has reported one yet."""


def build_metrics(group: Group, edge: EdgeFacts, *, now: float) -> str:
    """Prometheus text of all metrics of the catalogue's COORDINATOR."""
    status = build_status(group, now=now)
    values: dict[str, Values] = {
        "run_phase": {phase: int(phase == status["phase"]) for phase in _ALL_PHASES},
        "run_generation": group.generation,
        "run_nodes_ready": status["nodes"]["ready"],
        "run_nodes_connected": len(group.nodes),
        "run_world_size": status["worldSize"],
        "run_restarts_total": status["restarts"],
        "run_lost_seconds_total": status["lostSeconds"],
        "run_failures_without_progress": group.budget.used,
        "run_step": status["step"],
        "run_steps": status["totalSteps"],
        "run_checkpoint_step": status["checkpointStep"],
        "run_loss": status["loss"],
        "run_tokens_per_second": status["tokensPerSecond"],
        **{f"coordinator_{name}": value for name, value in vars(edge).items()},
    }
    return "".join(_render(series, values.get(series.name)) for series in COORDINATOR)


def _render(series: Series, values: Values) -> str:
    # A number that no node has reported yet is left out: 0 would be a value.
    if values is None:
        return ""
    head = f"# HELP {series.exported} {series.help}.\n# TYPE {series.exported} {series.kind}\n"
    if not isinstance(values, Mapping):
        return f"{head}{series.exported} {values}\n"
    (label,) = series.labels
    return head + "".join(
        f'{series.exported}{{{label}="{key}"}} {value}\n' for key, value in values.items()
    )
