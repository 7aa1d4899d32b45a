"""Builds the common parts of all children: metadata, owner, security and the hash of the applied object."""

from collections.abc import Mapping
from typing import Any

from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.recipe_hash import hash_json
from evergrad_operator.core.observe.spec import ParsedRun

JsonObject = dict[str, Any]


def build_labels(run: ParsedRun, *, role: str = "") -> dict[str, str]:
    """Build the labels of a child. ``role``: for pods, and for children that select pods by it."""
    labels = {
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_RUN: run.name,
    }
    return {**labels, names.LABEL_ROLE: role} if role else labels


def build_metadata(run: ParsedRun, name: str, *, is_owned: bool = True) -> JsonObject:
    """Build the metadata of a child."""
    metadata: JsonObject = {
        "name": name,
        "namespace": run.namespace,
        "labels": build_labels(run),
    }
    if is_owned:
        owner = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": run.name,
            "uid": run.uid,
        }
        # The garbage collector deletes an owned child with its run, even if no operator is installed.
        metadata["ownerReferences"] = [
            {**owner, "controller": True, "blockOwnerDeletion": True}
        ]
    return metadata


def pass_labels(child: JsonObject, run: ParsedRun, config: Config) -> JsonObject:
    """Return the object with the run's labels that the installation propagates. Its own labels take
    precedence."""
    passed = {key: run.labels[key] for key in config.propagated_labels if key in run.labels}
    if not passed:
        return child
    metadata = dict(child["metadata"])
    metadata["labels"] = {**passed, **metadata["labels"]}
    return {**child, "metadata": metadata}


def with_hash(child: JsonObject) -> JsonObject:
    """Return the object with the hash of its content, so that a later pass can detect that nothing has
    changed."""
    metadata = child["metadata"]
    annotations = {
        **metadata.get("annotations", {}),
        names.ANNOTATION_HASH: hash_json(child)[:16],
    }
    return {
        **child,
        "metadata": {**metadata, "annotations": annotations},
    }


def build_scrape_annotations(port: int, config: Config) -> dict[str, str]:
    """Build the annotations with which a Prometheus without Prometheus Operator finds a pod's metrics.

    Returns no annotations if the installation does not enable them or ``port`` is 0.
    """
    if not (config.scrape_annotations and port):
        return {}
    return {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port),
        "prometheus.io/path": "/metrics",
    }


def build_pod_security(config: Config) -> JsonObject:
    """Build a pod's security context for the Pod Security level *restricted*."""
    return {
        "runAsNonRoot": True,
        "runAsUser": config.user_id,
        "runAsGroup": config.group_id,
        "fsGroup": config.group_id,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def build_container_security(*, locks_memory: bool = False) -> JsonObject:
    """Build a container's security context for the level *restricted*, with a read-only root file system.

    ``locks_memory``: add the capability that RDMA devices need, which only the level *privileged* allows.
    """
    added = {"add": ["IPC_LOCK"]} if locks_memory else {}
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], **added},
        "readOnlyRootFilesystem": True,
    }


def build_tolerations(
    given: tuple[Mapping[str, Any], ...], seconds: int
) -> list[Mapping[str, Any]]:
    """Return the given tolerations, with our tolerations for unreachable hosts added if they are missing.

    ``seconds``: time for which a pod stays on an unreachable host.
    """
    # Kubernetes itself would add tolerations of 300 s, so a pod on an unreachable host would stay for five
    # minutes.
    tolerations = list(given)
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        # A toleration without a key covers all keys, one without an effect all effects.
        covering = [
            one
            for one in given
            if one.get("key") == key
            or (not one.get("key") and one.get("operator") == "Exists")
        ]
        if all(one.get("effect") not in (None, "", "NoExecute") for one in covering):
            ours = {
                "key": key,
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": seconds,
            }
            tolerations.append(ours)
    return tolerations


def build_pull_secrets(run: ParsedRun, config: Config) -> list[dict[str, str]]:
    """Return the pull secrets of the installation and of the run, each once."""
    own = [secret.get("name") for secret in run.spec.template.image_pull_secrets]
    found = dict.fromkeys(
        name
        for name in (*config.image_pull_secrets, *own)
        if isinstance(name, str) and name
    )
    return [{"name": name} for name in found]


def escape(text: str) -> str:
    """Escape a text for the kubelet, which replaces ``$(NAME)`` in arguments."""
    return text.replace("$", "$$")


def without_none(value: JsonObject) -> JsonObject:
    """Return the object without top-level keys whose values are None or empty."""
    return {
        key: item
        for key, item in value.items()
        if item is not None and item != {} and item != [] and item != ""
    }
