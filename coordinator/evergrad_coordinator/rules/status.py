"""Builds the JSON object of ``GET /status`` and the metrics of ``GET /metrics``, which ``http`` serves.

Pure functions.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from evergrad_common.codec import MAX_TEXT
from evergrad_common.contract import SOME_FINISHED, ExitCode
from evergrad_common.metrics import COORDINATOR
from evergrad_common.text import plural
from evergrad_coordinator.rules.group import Group
from evergrad_coordinator.rules.planning import find_lost
from evergrad_coordinator.rules.state import GroupWorld, node_order

MAX_LISTED = 64
"""Maximum number of nodes listed in /status. Further nodes are only counted."""
MAX_RANGES = 8
"""Maximum number of ranges of ranks in a message, so that it stays readable."""


@dataclass(frozen=True)
class GroupCondition:
    """The phase of a run, its reason and a message."""

    phase: str
    reason: str
    message: str


_PHASES: dict[int, str] = {
    ExitCode.DONE: "Complete",
    ExitCode.STOPPED_SAVED: "Stopped",
    ExitCode.STOPPED_UNSAVED: "Stopped",
}
"""Phase of an ended run by exit code. For any other exit code, the phase is Failed."""
ENDED_PHASES = ("Complete", "Stopped", "Failed")
"""Phases of a run that has ended or whose nodes have all left on request."""
_ALL_PHASES = ("Waiting", "Starting", "Running", "Draining", *ENDED_PHASES)


def describe_condition(group: Group, *, now: float) -> GroupCondition:
    """Return phase, reason and message of the run.

    The phase is Waiting, Starting, Running, Draining, Complete, Stopped or Failed.
    """
    if group.finished:
        end = group.finished
        # Nodes send reasons such as ``complete``; in a status, a reason is one word in CamelCase.
        words = end.reason.replace("-", " ").replace("_", " ").split()
        reason = "".join(word[:1].upper() + word[1:] for word in words)
        return GroupCondition(_PHASES.get(end.exit_code, "Failed"), reason, end.message)
    # Report a wait for a lease first, because no plan can start before the lease ends.
    if group.nodes and group.fence_until > now:
        text = "no node of the last group is left: its workers stop by themselves when their lease ends"
        return GroupCondition("Waiting", "WaitingForLease", text)
    if group.proposal:
        proposal, waits_for = group.proposal, len(group.proposal.waits_for)
        if len(proposal.members) < group.settings.min_nodes:
            return _describe_shortage(group)
        # If all nodes are ready and the group has not started, it waits for a save.
        if not waits_for and group.departures.saver:
            text = f"node {group.departures.saver[0]} saves before it leaves"
            return GroupCondition("Draining", "WaitingForSave", text)
        is_draining = (
            group.world is not None and not group.world.is_over and not proposal.hard
        )
        text = f"{proposal.reason}; waiting for {waits_for} nodes to be ready"
        return GroupCondition(
            "Draining" if is_draining else "Starting", "MembersGettingReady", text
        )
    if group.world and not group.world.is_over and group.nodes and not group.rendezvous:
        return _describe_world(group, group.world)

    # There is no group and no plan. Report what the run waits for, the most specific reason first.
    if not group.nodes and group.departures.was_left:
        return GroupCondition(
            "Stopped",
            "AllNodesLeft",
            "all nodes have left; the run continues when enough nodes are connected again",
        )
    if group.nodes and group.departures.saver:
        text = f"node {group.departures.saver[0]} saves before it leaves"
        return GroupCondition("Waiting", "WaitingForSave", text)
    if (
        group.rendezvous
        and group.rendezvous.adopts_until is not None
        and group.rendezvous.adopts_until > now
        and group.nodes
    ):
        return GroupCondition(
            "Waiting",
            "WaitingForReconnects",
            "a group may be running; its nodes have a lease's time to report it",
        )
    return _describe_shortage(group)


def _describe_world(group: Group, world: GroupWorld) -> GroupCondition:
    # Report first what a user can fix: missing nodes, then a broken group.
    is_short = (
        sum(node.is_candidate for node in group.nodes.values()) < group.settings.min_nodes
    )
    is_broken = world.is_broken or bool(find_lost(world, group.nodes.values()))
    if is_short and is_broken:
        return _describe_shortage(group)
    if is_broken:
        return GroupCondition(
            "Starting",
            "GroupBroken",
            f"generation {world.generation} broke; a new one is about to be planned",
        )
    if not world.is_up:
        return GroupCondition(
            "Starting",
            "MembersStarting",
            f"{len(world.up)} of {len(world.places)} nodes are up",
        )
    if 0 < len(world.finished) < world.size:
        return GroupCondition("Running", SOME_FINISHED, _describe_finished(world))
    return GroupCondition(
        "Running",
        "AllMembersUp",
        f"{plural(len(world.places), 'node')}, {plural(world.size, 'worker')}",
    )


def _describe_finished(world: GroupWorld) -> str:
    """Return a text such as ``rank 0 has finished, ranks 1-3 have not``."""
    others = sorted(set(range(world.size)) - world.finished)
    done, rest = describe_ranks(sorted(world.finished)), describe_ranks(others)
    has = "has" if len(world.finished) == 1 else "have"
    return f"{done} {has} finished, {rest} {'has' if len(others) == 1 else 'have'} not"


def describe_ranks(ranks: list[int]) -> str:
    """Return a text such as ``rank 3`` or ``ranks 0-2, 5``, with at most MAX_RANGES ranges.

    ``ranks`` must be sorted in ascending order.
    """
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:MAX_RANGES]]
    more = ", …" if len(ranges) > MAX_RANGES else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(texts)}{more}"


def _describe_shortage(group: Group) -> GroupCondition:
    ready, settings = (
        sum(node.is_candidate for node in group.nodes.values()),
        group.settings,
    )
    if group.rendezvous and settings.min_nodes <= ready < settings.expect:
        return GroupCondition(
            "Waiting",
            "WaitingForNodes",
            f"{ready} of {settings.expect} expected nodes connected",
        )
    return GroupCondition(
        "Waiting",
        "WaitingForNodes",
        f"{plural(ready, 'node')} connected; at least {settings.min_nodes} needed",
    )


def build_status(group: Group, *, now: float) -> dict[str, Any]:
    """Build the JSON object of ``GET /status``."""
    condition, training = describe_condition(group, now=now), group.training
    ready = sum(node.is_candidate for node in group.nodes.values())
    members = list(_list_members(group))
    failure: dict[str, Any] | None = None
    if last := group.budget.last:
        failure = {
            "generation": last.report.generation,
            "cause": last.cause,
            "node": last.node,
            "rank": last.report.rank if last.report.rank >= 0 else None,
            "step": last.report.step if last.report.step >= 0 else None,
            "exitCode": last.report.exit_code,
            "message": last.report.message[:MAX_TEXT],
            "secondsAgo": round(max(0.0, now - last.at), 3),
            "withoutProgress": group.budget.used,
        }
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
        "worldSize": count_current_workers(group),
        "step": training.step if training.step >= 0 else None,
        "totalSteps": training.total_steps,
        "loss": training.loss,
        "tokensPerSecond": training.tokens_per_second,
        "etaSeconds": training.eta_seconds,
        "checkpointStep": training.checkpoint_step
        if training.checkpoint_step >= 0
        else None,
        # None until rank 0's node reports that a save has failed or succeeded.
        "saves": None
        if training.failed_saves is None
        else {
            "failed": training.failed_saves,
            "trouble": training.save_trouble,
            "message": training.save_message[:MAX_TEXT],
        },
        "newSteps": group.budget.progress.num_steps,
        "restarts": dict(group.accounting.restarts),
        "lostSeconds": {
            cause: round(seconds, 3)
            for cause, seconds in group.accounting.observe_lost(now=now).items()
        },
        "usage": group.ledger.describe(now=now),
        "maxFailures": group.budget.limit,
        "lastFailure": failure,
        "updatedSecondsAgo": None
        if training.updated_at is None
        else round(now - training.updated_at, 3),
    }


def count_current_workers(group: Group) -> int:
    """Return the number of processes that train together; 0 if no group trains."""
    world = group.world
    # If a member is gone, the group is still the newest group, but it does not train.
    if world is None or world.is_over or find_lost(world, group.nodes.values()):
        return 0
    return world.size


def _list_members(group: Group) -> Iterable[dict[str, Any]]:
    """Yield the members of the running group, then the other connected nodes."""
    world, proposal = group.world, group.proposal
    places = world.places if world and not world.is_over else {}
    # Members come first, because the list is truncated and spares are the least important nodes.
    nodes = sorted(
        group.nodes.values(),
        key=lambda node: (node.key not in places, node_order(node.name)),
    )
    for node in nodes:
        place = places.get(node.key)
        # The first state that applies is shown. For example, a leaving member is shown as leaving.
        states = [
            ("done", node.is_done),
            ("leaving", node.is_leaving),
            ("joining", node.workers == 0),
            ("preparing", proposal is not None and node.key in proposal.waits_for),
            ("ready", proposal is not None and node.key in proposal.members),
            ("running", place is not None and world is not None and node.key in world.up),
            ("starting", place is not None),
        ]
        yield {
            "node": node.name,
            "firstRank": place.first_rank if place else None,
            "workers": node.workers,
            "state": next((name for name, applies in states if applies), "spare"),
            "address": node.address,
        }


# ---- metrics -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EdgeFacts:
    """Counts of the server. The fields are the catalogue's names without the prefix ``coordinator_``."""

    connections: int
    connections_total: int
    messages_total: int
    internal_errors_total: int
    journal_failures_total: int
    journal_writable: int
    rejected_total: Mapping[str, int]


Values = float | Mapping[str, float] | None
"""The value of a metric, or its values by label; None if no node has reported a value yet."""


def build_metrics(group: Group, edge: EdgeFacts, *, now: float) -> str:
    """Return the metrics of the catalogue's COORDINATOR in Prometheus' text format."""
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

    lines = []
    for series in COORDINATOR:
        # Omit a metric that no node has reported yet, because 0 would be a value.
        found = values.get(series.name)
        if found is None:
            continue
        name = series.exported
        lines += [f"# HELP {name} {series.help}.", f"# TYPE {name} {series.kind}"]
        # In the catalogue, a coordinator's metric has at most one label. Its values are fixed words of this
        # package and need no escaping.
        if isinstance(found, Mapping):
            (label,) = series.labels
            lines += [f'{name}{{{label}="{key}"}} {value}' for key, value in found.items()]
        else:
            lines.append(f"{name} {found}")
    return "".join(f"{line}\n" for line in lines)
