"""Builds the PodDisruptionBudgets of a run's nodes and of its coordinator."""

from evergrad_operator.core.objects import names
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.plan.common import JsonObject, build_labels, build_metadata


def build_disruption_budget(run: ParsedRun) -> JsonObject | None:
    """Build the budget that keeps ``nodes.min`` nodes during evictions; one node fewer for a run of fixed
    size.

    Returns None if the budget would keep no node. ``maxUnavailable`` cannot be used, because it requires a
    scale subresource of the pods' owner.
    """
    nodes = run.spec.nodes
    # Allow a run of fixed size to lose one node at a time. Otherwise no host could ever be drained.
    fewest = nodes.min if nodes.largest > nodes.min else nodes.min - 1
    if fewest < 1:
        return None
    return _build(run, run.name, names.ROLE_NODE, fewest)


def build_coordinator_budget(run: ParsedRun, *, is_needed: bool) -> JsonObject:
    """Build the coordinator's budget, which prevents evictions while a group starts or ends.

    ``is_needed``: whether to prevent evictions now. At other times the next coordinator can take over the
    group. A budget that never allowed the eviction would block a drain or a cluster upgrade until the run's
    end.
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
            # A drain need not wait for a pod that does not run yet, because the pod has no work to lose.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
