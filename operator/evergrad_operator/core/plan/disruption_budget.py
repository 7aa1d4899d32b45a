"""The PodDisruptionBudgets of a run: of its nodes, and of its coordinator."""

from evergrad_operator.core.objects import names
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.plan.common import JsonObject, build_labels, build_metadata


def build_disruption_budget(run: ParsedRun) -> JsonObject | None:
    """Build the budget by which evictions leave ``nodes.min`` nodes, or one less where there are no others: a
    drain is slowed down.

    None where that is no limit. ``maxUnavailable`` cannot be used: it asks for a scale subresource of the
    pods' owner.
    """
    nodes = run.spec.nodes
    # A run of fixed size may lose one node at a time, or no host could ever be drained.
    fewest = nodes.min if nodes.largest > nodes.min else nodes.min - 1
    if fewest < 1:
        return None
    return _build(run, run.name, names.ROLE_NODE, fewest)


def build_coordinator_budget(run: ParsedRun, *, is_needed: bool) -> JsonObject:
    """Build the coordinator's budget: it is not evicted while a group ends or begins; at any other time a
    drain goes on.

    A group that trains, or waits, is taken over by the next coordinator as it is. A budget that never allowed
    the eviction would hold up a drain, or the upgrade of a cluster, until the run's end.
    """
    return _build(
        run,
        names.coordinator_budget_name(run.name),
        names.ROLE_COORDINATOR,
        1 if is_needed else 0,
    )


def _build(
    run: ParsedRun,
    name: str,
    role: str,
    fewest: int,
) -> JsonObject:
    metadata = build_metadata(run, name)
    metadata["labels"] = build_labels(run)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
        "spec": {
            "minAvailable": fewest,
            "selector": {
                "matchLabels": {names.LABEL_RUN: run.name, names.LABEL_ROLE: role}
            },
            # A pod that does not run yet protects no work: a drain need not wait for it.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
