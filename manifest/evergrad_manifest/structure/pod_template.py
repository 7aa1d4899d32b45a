"""The allowed part of a pod template as structural schemas, with short descriptions of Kubernetes' fields."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from evergrad_manifest.envelope.init_containers import MOST_INIT_CONTAINERS
from evergrad_manifest.structure.nodes import (
    PRESERVE,
    QUANTITY,
    Schema,
    choice,
    int_or_text,
    integer,
    items,
    mapping,
    switch,
    text,
    texts_by_name,
)
from evergrad_manifest.structure.variables import FIELD_REF, RESOURCE_FIELD_REF, VARIABLE

# Every list in these structures has a bound. Otherwise the API server assumes its own, which makes the whole
# CRD too expensive to accept.
_MOST_ITEMS: Final = 32


def _requirements(description: str, operators: Sequence[str]) -> Schema:
    properties = {
        "key": text("Label key.", longest=317),
        "operator": choice("The comparison.", operators),
        "values": items("Compared values.", text("A value."), most=64),
    }
    return items(
        description,
        mapping("One comparison.", properties, required=("key", "operator")),
        most=_MOST_ITEMS,
    )


def _label_selector(description: str) -> Schema:
    properties = {
        "matchLabels": texts_by_name("Labels and values.", most=_MOST_ITEMS, longest=63),
        "matchExpressions": _requirements(
            "Comparisons, all true.", ("In", "NotIn", "Exists", "DoesNotExist")
        ),
    }
    return mapping(description, properties, **{"x-kubernetes-map-type": "atomic"})


# 317 characters are a prefix of 253, a slash and a name of 63: the longest key that Kubernetes accepts.
def _label_keys(description: str) -> Schema:
    return items(description, text("Label key.", longest=317), most=_MOST_ITEMS)


def _node_term(description: str) -> Schema:
    # Gt and Lt compare numbers, which labels of nodes may contain. Kubernetes has them only for nodes.
    operators = ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
    properties = {
        "matchExpressions": _requirements("Comparisons with the node's labels.", operators),
        "matchFields": _requirements("Comparisons with the node's fields.", operators),
    }
    return mapping(description, properties, **{"x-kubernetes-map-type": "atomic"})


def _weighted(description: str, key: str, preference: Schema) -> Schema:
    properties = {
        "weight": integer("How much it counts, 1 to 100.", least=1, most=100),
        key: preference,
    }
    return items(
        description,
        mapping("One preference.", properties, required=("weight", key)),
        most=_MOST_ITEMS,
    )


_NODE_AFFINITY: Final[Schema] = mapping(
    "Affinity to nodes.",
    {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            **mapping(
                "Nodes that are possible at all.",
                {
                    "nodeSelectorTerms": items(
                        "Terms of which one must hold.",
                        _node_term("Comparisons, all true."),
                        most=_MOST_ITEMS,
                    )
                },
                required=("nodeSelectorTerms",),
            ),
            "x-kubernetes-map-type": "atomic",
        },
        "preferredDuringSchedulingIgnoredDuringExecution": _weighted(
            "Nodes that are taken rather than others.",
            "preference",
            _node_term("Comparisons with the node."),
        ),
    },
)


# Only topologyKey is required: without it, a term would not define which place it compares.
def _pod_term(description: str) -> Schema:
    properties = {
        "topologyKey": text(
            "Label of nodes whose value makes them one place.", longest=317
        ),
        "labelSelector": _label_selector("Which pods; none if it is left out."),
        "namespaceSelector": _label_selector("Namespaces by their labels; {} is all."),
        "namespaces": items(
            "Namespaces by name; default: the run's.",
            text("Name of a namespace.", longest=63),
            most=_MOST_ITEMS,
        ),
        "matchLabelKeys": _label_keys("Labels that must equal the new pod's."),
        "mismatchLabelKeys": _label_keys("Labels that must differ from the new pod's."),
    }
    return mapping(description, properties, required=("topologyKey",))


def _pod_affinity(description: str) -> Schema:
    required = items(
        "What must hold.",
        _pod_term("Pods near which, or away from which, it runs."),
        most=_MOST_ITEMS,
    )
    preferred = _weighted(
        "What is preferred.",
        "podAffinityTerm",
        _pod_term("Pods near which, or away from which, it runs."),
    )
    return mapping(
        description,
        {
            "requiredDuringSchedulingIgnoredDuringExecution": required,
            "preferredDuringSchedulingIgnoredDuringExecution": preferred,
        },
    )


_AFFINITY: Final[Mapping[str, Schema]] = {
    "nodeAffinity": _NODE_AFFINITY,
    "podAffinity": _pod_affinity("Affinity to other pods."),
    "podAntiAffinity": _pod_affinity("Distance from other pods."),
}


_TOLERATION: Final[Schema] = mapping(
    "A taint that is tolerated.",
    {
        "key": text("Key of the taint; every one if it is left out.", longest=317),
        "operator": choice(
            "Exists, or Equal (the default), Lt, Gt with value.",
            ("Exists", "Equal", "Lt", "Gt"),
        ),
        "value": text("Value of the taint."),
        "effect": choice(
            "Effect of the taint; every one if it is left out.",
            ("NoSchedule", "PreferNoSchedule", "NoExecute"),
        ),
        "tolerationSeconds": integer(
            "Seconds that a NoExecute taint is tolerated; default: for ever.", large=True
        ),
    },
)


_POLICIES: Final = ("Honor", "Ignore")
# labelSelector is optional here, unlike in a pod: the operator fills in the pods of the run's nodes.
_SPREAD: Final[Schema] = mapping(
    "One rule of spreading.",
    {
        "maxSkew": integer(
            "Largest difference of the numbers of pods in two places.", least=1
        ),
        "topologyKey": text(
            "Label of nodes whose value makes them one place.", longest=317
        ),
        "whenUnsatisfiable": choice(
            "What happens if it cannot be kept.", ("DoNotSchedule", "ScheduleAnyway")
        ),
        "labelSelector": _label_selector("Which pods are counted."),
        "matchLabelKeys": _label_keys(
            "Labels in which the pods counted equal the new one."
        ),
        "minDomains": integer("Fewest places to spread over.", least=1),
        "nodeAffinityPolicy": choice(
            "Whether nodes that affinity excludes are left out; default: Honor.", _POLICIES
        ),
        "nodeTaintsPolicy": choice(
            "Whether tainted nodes are left out; default: Ignore.", _POLICIES
        ),
    },
    required=("maxSkew", "topologyKey", "whenUnsatisfiable"),
)


# name and mountPath are required here. Otherwise the API server would refuse only the pod, long after it has
# accepted the run.
_MOUNT: Final[Schema] = mapping(
    "One mount.",
    {
        "name": text("Name of a volume under template.volumes.", longest=63),
        "mountPath": text("Absolute path in the container.", longest=1024, shortest=1),
        "subPath": text(
            "Path in the volume that is mounted; default: all of it.", longest=1024
        ),
        "subPathExpr": text("As subPath, with variables as $(NAME).", longest=1024),
        "readOnly": switch("Mount it read-only. Default: false."),
        "recursiveReadOnly": choice(
            "Whether mounts inside are read-only too.",
            ("Disabled", "IfPossible", "Enabled"),
        ),
        "mountPropagation": choice(
            "How later mounts are seen.", ("None", "HostToContainer", "Bidirectional")
        ),
    },
    required=("name", "mountPath"),
)


# Decimal: JSON has no octal numbers, and the value of an octal number in YAML arrives here.
_MODE: Final[Schema] = integer("Permissions, in decimal: 420 is 0644.", least=0, most=511)
_DEFAULT_MODE: Final[Schema] = {
    **_MODE,
    "description": "Permissions, in decimal; default: 420, which is 0644.",
}


_KEY_ITEMS: Final[Schema] = items(
    "Keys that become files; default: all.",
    mapping(
        "A key as a file.",
        {
            "key": text("The key."),
            "path": text("File it becomes, relative.", longest=1024),
            "mode": _MODE,
        },
        required=("key", "path"),
    ),
    most=128,
)


_DOWNWARD_ITEMS: Final[Schema] = items(
    "Fields that become files.",
    mapping(
        "A field as a file.",
        {
            "path": text("File it becomes, relative.", longest=1024),
            "mode": _MODE,
            "fieldRef": FIELD_REF,
            "resourceFieldRef": RESOURCE_FIELD_REF,
        },
        required=("path",),
    ),
    most=64,
)


# The key with a Secret's name is secretName in a volume, and name in a projected source.
def _object_volume(kind: str, name: str, *, has_mode: bool) -> Schema:
    properties = {
        name: text(f"Name of the {kind}."),
        "items": _KEY_ITEMS,
        "optional": switch("Whether it may be missing."),
    }
    if has_mode:
        properties["defaultMode"] = _DEFAULT_MODE
    return mapping(f"The keys of a {kind} as files.", properties)


# It has no properties: the whole validation checks them, in fewer bytes than a schema needs. Unknown keys are
# preserved for it.
def _open(description: str, *, most: int) -> Schema:
    return {
        "type": "object",
        "description": description,
        PRESERVE: True,
        "maxProperties": most,
    }


_PROJECTED: Final[Schema] = mapping(
    "Several sources in one folder.",
    {
        "sources": items(
            "What is projected.",
            mapping(
                "One source: exactly one of these.",
                {
                    "configMap": _object_volume("ConfigMap", "name", has_mode=False),
                    "secret": _object_volume("Secret", "name", has_mode=False),
                    "downwardAPI": mapping(
                        "Fields of the pod as files.", {"items": _DOWNWARD_ITEMS}
                    ),
                    "clusterTrustBundle": mapping(
                        "Certificates of a ClusterTrustBundle as a file.",
                        {
                            "name": text("Name of the bundle."),
                            "signerName": text(
                                "Signer of the bundles, instead of name.", longest=571
                            ),
                            "labelSelector": _label_selector(
                                "Which of the signer's bundles."
                            ),
                            "path": text("File it becomes, relative.", longest=1024),
                            "optional": switch(
                                "Whether it may be missing. Default: false."
                            ),
                        },
                        required=("path",),
                    ),
                    "serviceAccountToken": _open(
                        "A token of serviceAccountName: path, audience, expirationSeconds.",
                        most=3,
                    ),
                },
            ),
            most=16,
        ),
        "defaultMode": _DEFAULT_MODE,
    },
)


# For scratch space larger than the node's own disk. The claim is deleted with its pod, so it cannot keep
# files of the run.
_EPHEMERAL: Final[Schema] = mapping(
    "A volume that lives as long as its pod.",
    {
        "volumeClaimTemplate": mapping(
            "The claim that is made for each pod.",
            {
                "metadata": mapping(
                    "Labels and annotations of the claim.",
                    {
                        "labels": texts_by_name("Labels.", most=_MOST_ITEMS, longest=63),
                        "annotations": texts_by_name("Annotations.", most=_MOST_ITEMS),
                    },
                ),
                "spec": mapping(
                    "What the claim asks for.",
                    {
                        "accessModes": items(
                            "How it is mounted: ReadWriteOnce, …",
                            text("A mode.", longest=32),
                            most=4,
                        ),
                        "resources": mapping(
                            "Its size.",
                            {
                                "requests": {
                                    "type": "object",
                                    "description": "What is reserved: storage.",
                                    "maxProperties": 4,
                                    "additionalProperties": int_or_text(
                                        "A quantity.", pattern=QUANTITY
                                    ),
                                }
                            },
                        ),
                        "storageClassName": text(
                            "Its storage class; default: the cluster's."
                        ),
                        "volumeMode": choice(
                            "As a folder or as a device. Default: Filesystem.",
                            ("Filesystem", "Block"),
                        ),
                    },
                    required=("accessModes", "resources"),
                ),
            },
            required=("spec",),
        )
    },
    required=("volumeClaimTemplate",),
)


# hostPath, nfs and csi are not possible: they reach beyond what a pod of a run may access, and a claim can
# replace each of them.
_VOLUME: Final[Schema] = mapping(
    "One volume: a name and exactly one source.",
    {
        "name": text(
            "Name of the volume; the prefix evergrad- is taken.", longest=63, shortest=1
        ),
        "configMap": _object_volume("ConfigMap", "name", has_mode=True),
        "secret": _object_volume("Secret", "secretName", has_mode=True),
        "emptyDir": mapping(
            "Scratch space that lives as long as the pod.",
            {
                "medium": text(
                    "Empty for the node's disk, Memory for a tmpfs. Default: empty.",
                    longest=32,
                ),
                "sizeLimit": int_or_text(
                    "Most it may hold, a quantity. Default: no limit.", pattern=QUANTITY
                ),
            },
        ),
        "persistentVolumeClaim": mapping(
            "An existing PVC.",
            {
                "claimName": text("Name of the PVC.", shortest=1),
                "readOnly": switch("Mount it read-only. Default: false."),
            },
            required=("claimName",),
        ),
        "projected": _PROJECTED,
        "downwardAPI": mapping(
            "Fields of the pod as files.",
            {
                "items": _DOWNWARD_ITEMS,
                "defaultMode": _DEFAULT_MODE,
            },
        ),
        "ephemeral": _EPHEMERAL,
    },
    required=("name",),
)


def _listed(
    item: Schema, *, most: int = _MOST_ITEMS, keys: Sequence[str] = ()
) -> dict[str, Any]:
    # Use the manifest's own description: the docstring of the field is its only source.
    found = items("", item, most=most, keys=keys)
    del found["description"]
    return found


@cache
def build_fragments() -> Mapping[str, Schema]:
    """Return the schema keywords, except the description, of fields of the manifest, by their path.

    Do not change the result.
    """
    # These are copies of the structures in the Kubernetes API, reduced to the fields that a run may contain.
    # Lists have the same keys as in a pod, so that server-side apply merges them in the same way. Tolerations
    # have no keys there.
    where = "spec.template."
    return {
        f"{where}tolerations": _listed(_TOLERATION),
        f"{where}affinity": {"type": "object", "properties": dict(_AFFINITY)},
        f"{where}topologySpreadConstraints": _listed(
            _SPREAD, keys=("topologyKey", "whenUnsatisfiable")
        ),
        f"{where}volumes": _listed(_VOLUME, keys=("name",)),
        f"{where}volumeMounts": _listed(_MOUNT, keys=("mountPath",)),
        f"{where}env": _listed(VARIABLE, most=256, keys=("name",)),
        f"{where}envFrom": _listed(_open("One object.", most=3)),
        f"{where}initContainers": _listed(
            _open("One container.", most=16), most=MOST_INIT_CONTAINERS
        ),
        f"{where}imagePullSecrets": _listed(
            mapping(
                "A Secret of the run's namespace.",
                {"name": text("Its name.", shortest=1)},
                required=("name",),
            ),
            keys=("name",),
        ),
    }
