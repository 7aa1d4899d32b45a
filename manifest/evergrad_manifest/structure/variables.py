"""Variables of a container as structural schemas: a text, or a reference to the source of the value."""

from typing import Final

from evergrad_manifest.structure.nodes import (
    QUANTITY,
    Schema,
    int_or_text,
    mapping,
    switch,
    text,
)


# In Kubernetes' own schema, the name is optional for compatibility with old objects. A reference without a
# name refers to nothing, so the name is required here.
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


# Server-side apply replaces a reference as a whole, as in a pod: a merge of two references would name an
# unintended object.
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


# The value must be a text: without quotes, YAML would read a number, which the API server refuses in a pod.
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
