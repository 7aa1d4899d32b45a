"""The NetworkPolicy of a run: its pods reach each other, and are scraped; no others reach them."""

from typing import Any

from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.plan.common import JsonObject, build_metadata
from evergrad_operator.core.plan.node_pod import metrics_port


def build_network_policy(run: ParsedRun, config: Config) -> JsonObject:
    """Build the policy, for ingress alone: egress stays open.

    All ports are open between the run's pods, because those of collectives are not known before.
    """
    labels = {names.LABEL_RUN: run.name}
    own: dict[str, Any] = {"podSelector": {"matchLabels": labels}}
    operator: dict[str, Any] = {
        "podSelector": {"matchLabels": {names.LABEL_ROLE: names.ROLE_OPERATOR}},
        "namespaceSelector": {
            "matchLabels": {"kubernetes.io/metadata.name": config.operator_namespace}
        }
        if config.operator_namespace
        else {},
    }
    # A node on a free port of its own choice cannot be named here, and is not scraped.
    port = metrics_port(run)
    scraped = [{"port": port, "protocol": "TCP"}] if port else []
    ingress: list[dict[str, Any]] = [
        {"from": [own]},
        # The operator polls the coordinator's status.
        {
            "from": [operator],
            "ports": [{"port": names.STATUS_PORT, "protocol": "TCP"}],
        },
    ]
    if config.metrics_from:
        # A coordinator serves its metrics beside its status, which asks for the run's token.
        scraped.append({"port": names.STATUS_PORT, "protocol": "TCP"})
        among = {
            "key": "kubernetes.io/metadata.name",
            "operator": "In",
            "values": list(config.metrics_from),
        }
        ingress.append(
            {
                "from": [{"namespaceSelector": {"matchExpressions": [among]}}],
                "ports": scraped,
            }
        )
    elif scraped:
        ingress.append({"ports": scraped})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": build_metadata(run, run.name),
        "spec": {
            "podSelector": {"matchLabels": {names.LABEL_RUN: run.name}},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }
