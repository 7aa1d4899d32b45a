"""The NetworkPolicy of a run: its pods can connect to each other and can be scraped; other pods are
blocked."""

from typing import Any

from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.plan.common import JsonObject, build_metadata
from evergrad_operator.core.plan.node_pod import metrics_port


def build_network_policy(run: ParsedRun, config: Config) -> JsonObject:
    """Build the policy. It restricts only ingress; egress stays open.

    All ports are open between the run's pods, because the ports of collectives are not known in advance.
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
    # The policy cannot name a port that a node chooses itself, so such a node is not scraped.
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
        # The coordinator serves its metrics at the port of its status, which requires the run's token.
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
