"""The ConfigMap that contains the run's manifest for its nodes."""

import json
from typing import Final

from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.raw import get_map
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.plan.common import JsonObject, build_metadata
from evergrad_operator.core.plan.node_pod import metrics_port

_KEPT: Final = ("nodes", "workersPerNode", "failurePolicy", "training", "script")


def build_config_map(run: ParsedRun) -> JsonObject:
    """Build the ConfigMap that a run's pods mount."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": build_metadata(run, names.config_name(run.name)),
        "data": {names.CONFIG_FILE: build_manifest(run)},
    }


def build_manifest(run: ParsedRun) -> str:
    """Return the run's manifest for its nodes, as JSON, which is also valid YAML."""
    # Leave out fields that only the operator reads, so that editing them does not change the ConfigMap.
    spec = {
        key: value
        for key, value in get_map(run.raw, "spec").items()
        if key in _KEPT and value is not None
    }
    # Only the pods need the resources of the evaluation. The nodes need to know that there are evaluation
    # pods, and how many checkpoints to keep for them.
    if run.spec.evaluation is not None and "training" in spec:
        spec["evaluation"] = {"keepWaiting": run.spec.evaluation.keep_waiting}
    # Set the default port for metrics if the run sets none, so that they can be scraped.
    for kind in ("training", "script"):
        if kind in spec:
            metrics = {
                **get_map(spec[kind], "metrics"),
                "port": metrics_port(run),
            }
            spec[kind] = {**spec[kind], "metrics": metrics}
    manifest = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": run.name},
        "spec": spec,
    }
    return json.dumps(manifest, sort_keys=True, ensure_ascii=False) + "\n"
