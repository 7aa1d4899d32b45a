"""The ConfigMap with the run as its nodes read it."""

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
    """Return the run's manifest as its nodes read it: JSON, which is YAML too."""
    # Fields that only the operator reads are left out, so that editing them touches no ConfigMap.
    spec = {
        key: value
        for key, value in get_map(run.raw, "spec").items()
        if key in _KEPT and value is not None
    }
    # Its resources are the pods' alone; the nodes need to know that they are there, and what has to stay for
    # them.
    if run.spec.evaluation is not None and "training" in spec:
        spec["evaluation"] = {"keepWaiting": run.spec.evaluation.keep_waiting}
    # Metrics get our port where the run names none, so that there is something to scrape.
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
