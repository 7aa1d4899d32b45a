"""Runs and their expected verdicts: one table for the webhook, the operator and the chart's CEL rules."""

import json
from dataclasses import dataclass, field
from typing import Any, Final

IMAGES: Final = ("registry.example.com/",)
PROFILES: Final = json.dumps(
    {
        "default": {"defaults": {"storage": {"accessModes": ["ReadWriteMany"]}}},
        "big": {"defaults": {"image": "vendor.example.com/train:1"}},
        "fabric": {"allows": {"rdma": ["rdma/hca"]}},
        "mounts": {
            "defaults": {"template": {"volumes": [{"name": "code", "emptyDir": {}}]}}
        },
    }
)
CONFIG: Final[dict[str, Any]] = {
    "allowed_images": IMAGES,
    "allowed_priority_classes": ("low",),
    "storage_access_mode": "ReadWriteOncePod",
    "profiles": PROFILES,
}
"""The operator's settings that result from the chart values below."""
VALUES: Final[dict[str, Any]] = {
    "admissionPolicy": {
        "enabled": True,
        "allowedImages": list(IMAGES),
        "allowedPriorityClasses": ["low"],
    },
    "runs": {
        "storage": {"accessMode": "ReadWriteOncePod"},
        "profiles": json.loads(PROFILES),
    },
}
_DEVICE: Final = {"limits": {"rdma/hca": "1"}}
_MOUNT: Final = {"volumeMounts": [{"name": "code", "mountPath": "/code"}]}


@dataclass(frozen=True)
class Sample:
    """One run and its expected verdicts.

    ``spec``: fields in addition to a recipe and two nodes. ``own``: text of the namespace's profile.
    ``refused``: start of the problem for which the webhook and the operator refuse the run; empty if they
    accept it. ``held``: start of the problem in its profile, for which the operator creates no pods and the
    webhook warns. ``cel``: whether the CEL rules of the CRD and the chart also refuse the run.
    """

    name: str
    spec: dict[str, Any]
    refused: str = ""
    held: str = ""
    own: str | None = None
    cel: bool = False
    config: dict[str, Any] = field(default_factory=lambda: CONFIG)


SAMPLES: Final = (
    Sample("an access mode comes from the profile", {}),
    Sample(
        "without it the installation's is for one pod",
        {"profile": "big"},
        refused="spec.nodes.max: 2 nodes need a volume that several pods can mount",
    ),
    Sample("an image of a profile is allowed", {"profile": "big", "nodes": {"max": 1}}),
    Sample(
        "an image of a profile may be written out where CEL does not see it",
        {"profile": "big", "nodes": {"max": 1}, "image": "vendor.example.com/train:1"},
        cel=True,
    ),
    Sample(
        "another image is refused",
        {"image": "evil.example.com/x:1"},
        refused="spec.image: 'evil.example.com/x:1' is not an image",
        cel=True,
    ),
    Sample(
        "so it is of an init container",
        {"template": {"initContainers": [{"name": "a", "image": "evil.example.com/x"}]}},
        refused="spec.template.initContainers[0].image: ",
        cel=True,
    ),
    Sample(
        "a priority class is refused",
        {"template": {"priorityClassName": "high"}},
        refused="spec.template.priorityClassName: 'high'",
        cel=True,
    ),
    Sample(
        "a profile that does not exist",
        {"profile": "nowhere"},
        refused="spec.profile: there is no profile 'nowhere'",
    ),
    Sample(
        "a device without a profile",
        {"resources": _DEVICE},
        refused="spec.resources.limits['rdma/hca']: is not allowed",
    ),
    Sample(
        "a device of an init container",
        {"template": {"initContainers": [{"name": "a", "resources": _DEVICE}]}},
        refused="spec.template.initContainers[0].resources.limits['rdma/hca']: ",
    ),
    Sample(
        "a device that the profile allows",
        {"profile": "fabric", "nodes": {"max": 1}, "resources": _DEVICE},
    ),
    Sample(
        "a volume of the profile",
        {"profile": "mounts", "nodes": {"max": 1}, "template": _MOUNT},
    ),
    Sample(
        "a volume of nobody",
        {"template": _MOUNT},
        refused="spec.template.volumeMounts[0].name: 'code' is not the name of a volume",
    ),
    Sample(
        "a volume of the namespace's profile",
        {"template": _MOUNT},
        own="defaults: {template: {volumes: [{name: code, emptyDir: {}}]}}",
    ),
    Sample(
        "a wrong profile of the namespace",
        {},
        held="ConfigMap team/evergrad-profile: defalts: unknown key",
        own="defalts: {}",
    ),
    Sample(
        "bounds of nodes",
        {"nodes": {"min": 3, "max": 2}},
        refused="spec.nodes.max: ",
        cel=True,
    ),
    Sample(
        "two kinds of a run",
        {"script": {"command": ["train.py"]}},
        refused="spec: ",
        cel=True,
    ),
)
