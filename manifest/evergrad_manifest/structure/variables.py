"""Variables of a container as structural schemas: a text, or a reference to what has the value."""

from typing import Final

from evergrad_manifest.structure.nodes import (
    QUANTITY,
    Schema,
    int_or_text,
    mapping,
    switch,
    text,
)


# The name is optional in Kubernetes' own schema for the sake of old objects; a reference without one names
# nothing, so that it is required here.
def _key_of(kind: str) -> Schema:
    return mapping(
        f"A key of a {kind}.",
        {
            "name": text(f"Name of the {kind}."),
            "key": text("The key in it."),
            "optional": switch("Whether the pod starts without it. Default: false."),
        },
        required=("name", "key"),
    )


# References are replaced as a whole by server-side apply, as in a pod: half of one and half of another would
# name what nobody meant.
FIELD_REF: Final[Schema] = mapping(
    "A field of the pod.",
    {
        "fieldPath": text("Field, such as metadata.name or status.podIP.", longest=512),
        "apiVersion": text("Version that the path is written for. Default: v1."),
    },
    required=("fieldPath",),
    **{"x-kubernetes-map-type": "atomic"},
)


RESOURCE_FIELD_REF: Final[Schema] = mapping(
    "A resource of the container.",
    {
        "resource": text("Resource, such as limits.cpu."),
        "containerName": text("Name of the container.", longest=63),
        "divisor": int_or_text(
            "Unit of the value, a quantity. Default: 1.", pattern=QUANTITY
        ),
    },
    required=("resource",),
    **{"x-kubernetes-map-type": "atomic"},
)


# A value is a text: without quotes YAML would make a number of it, which the API server refuses in a pod.
VARIABLE: Final[Schema] = mapping(
    "One variable.",
    {
        "name": text("Name of the variable.", shortest=1),
        "value": text(
            "Its value; a text, so numbers stand in quotes. Default: empty.", longest=32768
        ),
        "valueFrom": mapping(
            "Where its value comes from, instead of value: exactly one.",
            {
                "configMapKeyRef": _key_of("ConfigMap"),
                "secretKeyRef": _key_of("Secret"),
                "fieldRef": FIELD_REF,
                "resourceFieldRef": RESOURCE_FIELD_REF,
            },
        ),
    },
    required=("name",),
)
