"""The PodDisruptionBudget of a run's nodes."""

from evergrad_operator import names
from evergrad_operator.plan.common import JsonObject, build_labels, build_metadata
from evergrad_operator.spec import TrainingRun


def build_disruption_budget(run: TrainingRun) -> JsonObject | None:
    """Evictions leave ``nodes.min`` nodes, or one less where there are no others: a drain is slowed down.

    None where that is no limit. ``maxUnavailable`` cannot be used: it asks for a scale subresource of the pods' owner.
    """
    nodes = run.spec.nodes
    fewest = nodes.min if nodes.max > nodes.min else nodes.min - 1
    if fewest < 1:
        return None
    selector = {names.LABEL_RUN: run.name, names.LABEL_ROLE: names.ROLE_NODE}
    metadata = build_metadata(run, run.name)
    metadata["labels"] = build_labels(run)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
        "spec": {
            "minAvailable": fewest,
            "selector": {"matchLabels": selector},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
