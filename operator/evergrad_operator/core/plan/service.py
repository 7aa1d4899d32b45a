"""The Service through which nodes connect to their coordinator."""

from evergrad_operator.core.objects import names
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.plan.common import JsonObject, build_labels, build_metadata


def build_service(run: ParsedRun, *, attempt: int) -> JsonObject:
    """Build the Service, which routes only to the coordinator of ``attempt``: an older coordinator that still
    runs, but is cut off, gets no new nodes."""
    selector = {
        names.LABEL_RUN: run.name,
        names.LABEL_ROLE: names.ROLE_COORDINATOR,
        names.LABEL_ATTEMPT: str(attempt),
    }
    metadata = build_metadata(run, names.coordinator_service_name(run.name))
    metadata["labels"] = build_labels(run, role=names.ROLE_COORDINATOR)
    ports = (("join", names.JOIN_PORT), ("status", names.STATUS_PORT))
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": "ClusterIP",
            # Use both address families if the cluster has both: the coordinator listens on both.
            "ipFamilyPolicy": "PreferDualStack",
            "selector": selector,
            # Nodes wait for a coordinator that is starting, so its name must resolve before it is ready.
            "publishNotReadyAddresses": True,
            "ports": [
                {
                    "name": name,
                    "port": port,
                    "targetPort": name,
                    "protocol": "TCP",
                }
                for name, port in ports
            ],
        },
    }
