"""The common parts of all children: metadata, owner, security and the hash of what was applied."""

from collections.abc import Mapping
from typing import Any

from evergrad_operator import names
from evergrad_operator.config import Config
from evergrad_operator.recipe import hash_json
from evergrad_operator.spec import TrainingRun

JsonObject = dict[str, Any]


def build_labels(run: TrainingRun, *, role: str = "") -> dict[str, str]:
    """Labels of every child; ``role`` of pods and of what selects them."""
    labels = {names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_RUN: run.name}
    return {**labels, names.LABEL_ROLE: role} if role else labels


def build_metadata(run: TrainingRun, name: str, *, is_owned: bool = True) -> JsonObject:
    """Metadata of a child. One that is owned is deleted with the run, even while no operator is there."""
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
        # The garbage collector deletes what is owned, also where no operator is left.
        metadata["ownerReferences"] = [
            {**owner, "controller": True, "blockOwnerDeletion": True}
        ]
    return metadata


def with_hash(child: JsonObject) -> JsonObject:
    """The same object, saying what it was applied as."""
    metadata = child["metadata"]
    annotations = {
        **metadata.get("annotations", {}),
        names.ANNOTATION_HASH: hash_json(child)[:16],
    }
    return {**child, "metadata": {**metadata, "annotations": annotations}}


def build_pod_security(config: Config) -> JsonObject:
    """Build a pod's security context, as Pod Security's level *restricted* asks for."""
    return {
        "runAsNonRoot": True,
        "runAsUser": config.user_id,
        "runAsGroup": config.group_id,
        "fsGroup": config.group_id,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def build_container_security() -> JsonObject:
    """Build a container's security context, as level *restricted* asks for, with nothing to write on but its
    volumes."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def build_tolerations(
    given: tuple[Mapping[str, Any], ...], seconds: int
) -> list[Mapping[str, Any]]:
    """Those that were given, and ours for nodes that went silent, unless these are among them."""
    # Kubernetes itself would add 300 s for both: a node that fell silent would hold its place for five
    # minutes.
    tolerations = list(given)
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        # One without a key covers all keys, one without an effect all effects.
        is_covered = any(
            (one.get("key") == key or (not one.get("key") and one.get("operator") == "Exists"))
            and one.get("effect") in (None, "", "NoExecute")
            for one in given
        )
        if not is_covered:
            ours = {
                "key": key,
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": seconds,
            }
            tolerations.append(ours)
    return tolerations


def build_pull_secrets(run: TrainingRun, config: Config) -> list[dict[str, str]]:
    """Those of the installation and of the run, each once."""
    own = [secret.get("name") for secret in run.spec.template.image_pull_secrets]
    found = dict.fromkeys(
        name for name in (*config.image_pull_secrets, *own) if isinstance(name, str) and name
    )
    return [{"name": name} for name in found]


def escape(text: str) -> str:
    """A text that the kubelet, which replaces ``$(NAME)`` in arguments, leaves as it is."""
    return text.replace("$", "$$")


def without_none(value: JsonObject) -> JsonObject:
    """Without keys that are None or empty, on the first level."""
    return {
        key: item
        for key, item in value.items()
        if item is not None and item != {} and item != [] and item != ""
    }
