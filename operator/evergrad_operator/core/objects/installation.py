"""Checks the rules that one installation sets for its runs, in addition to the general rules. Pure.

``evergrad validate`` does not check these rules. The webhook and the check before a run's first pod do.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from evergrad_manifest.envelope.storage import FOR_ONE_POD, check_shared
from evergrad_manifest.envelope.volumes import ACCOUNT
from evergrad_manifest.errors import Problem
from evergrad_manifest.model.containers import containers_of
from evergrad_manifest.values.numbers import show
from evergrad_operator.core.objects.raw import get_int, get_map, get_text

_SETTING: Final = "runs.allowed.serviceAccountNames of the chart"
IMAGE_SETTING: Final = "admissionPolicy.allowedImages of the chart"
_CLASS_SETTING: Final = "admissionPolicy.allowedPriorityClasses of the chart"
DELETES_RUN: Final = "Run"
"""Value of ``spec.ttlDeletes`` with which a run requests its own deletion."""


@dataclass(frozen=True)
class Granted:
    """Images and priority classes in a profile of the installation. A run with this profile may use them."""

    images: frozenset[str] = frozenset()
    priority_classes: frozenset[str] = frozenset()

    def within(self, other: "Granted") -> "Granted":
        """Return the names that are also in ``other``."""
        classes = self.priority_classes & other.priority_classes
        return Granted(self.images & other.images, classes)

    def without(self, other: "Granted") -> "Granted":
        """Return the names that are not in ``other``."""
        classes = self.priority_classes - other.priority_classes
        return Granted(self.images - other.images, classes)


@dataclass(frozen=True)
class Installation:
    """Limits and defaults that an installation sets for runs.

    The default allows no service account and no deletion, and any image and priority class.
    """

    service_accounts: tuple[str, ...] = ()
    """Names of the service accounts that runs may use."""
    access_mode: str = ""
    """Access mode of new volumes if the run does not set one."""
    deletes_runs: bool = False
    """Whether the operator deletes runs that request it with ``spec.ttlDeletes: Run``."""
    images: tuple[str, ...] = ()
    """Prefixes of the images that runs may use; empty for any image."""
    priority_classes: tuple[str, ...] = ()
    """Names of the priority classes that runs may use; empty for any class."""
    profiles: str = ""
    """The profiles of the installation by name, as JSON."""
    granted: Granted = Granted()
    """Additional names that a run's profile allows."""


NOTHING_ALLOWED: Final = Installation()
NO_DELETION: Final = Problem(
    "spec.ttlDeletes",
    "Run is not allowed in this installation",
    "its operator has no right to delete TrainingRuns",
    "Write Children, or have runs.allowed.deletion of the chart set",
)
"""Problem of a run that requests its own deletion although the installation does not allow it."""


def find_refusals(
    document: Mapping[str, Any], installation: Installation
) -> tuple[Problem, ...]:
    """Return the problems of ``document`` by the rules of this installation.

    ``document``: a raw TrainingRun from the API server. Values that the manifest's rules refuse are skipped.
    """
    found = []
    spec = get_map(document, "spec")
    account = get_map(spec, "template").get("serviceAccountName")
    allowed = installation.service_accounts
    if isinstance(account, str) and account and account not in allowed:
        why = f"it allows {', '.join(allowed)}" if allowed else "it allows none"
        remedy = (
            f"Use one of these, or have {account} added to {_SETTING}"
            if allowed
            else f"Remove it, or have {account} added to {_SETTING}"
        )
        what = f"{show(account)} is not a service account that this installation allows"
        found.append(Problem(ACCOUNT, what, why, remedy))

    found += find_beyond(spec, installation)
    if spec.get("ttlDeletes") == DELETES_RUN and not installation.deletes_runs:
        found.append(NO_DELETION)

    # Check the default access mode, which is not in the run's file. With ReadWriteOncePod only one node could
    # start.
    storage, nodes = get_map(spec, "storage"), get_map(spec, "nodes")
    is_default = not storage.get("accessModes") and not storage.get("claimName")
    if is_default and installation.access_mode == FOR_ONE_POD:
        why = f"new volumes of this installation are {FOR_ONE_POD} unless the run says otherwise"
        found += check_shared(get_int(nodes, "min") or 1, get_int(nodes, "max"), why)
    return tuple(found)


def find_beyond(spec: Mapping[str, Any], installation: Installation) -> Iterator[Problem]:
    """Yield a problem for each image and priority class in ``spec`` that this installation does not allow.

    The chart's ValidatingAdmissionPolicy has the same rules for ``kubectl apply``, but does not check
    profiles or runs that were created before the policy.
    """
    granted, allowed = installation.granted, installation.images
    for path, image in _list_images(spec) if allowed else ():
        if not image.startswith(allowed) and image not in granted.images:
            yield Problem(
                path,
                f"{show(image)} is not an image that this installation allows",
                f"they begin with {', '.join(allowed)}",
                f"Use one of these, or have it added to {IMAGE_SETTING}",
            )
    name, allowed = _find_priority_class(spec), installation.priority_classes
    if name and allowed and name not in (*allowed, *granted.priority_classes):
        yield Problem(
            "spec.template.priorityClassName",
            f"{show(name)} is not a priority class that this installation allows",
            f"it allows {', '.join(allowed)}",
            f"Use one of these, or have it added to {_CLASS_SETTING}",
        )


def find_granted(defaults: Mapping[str, Any]) -> Granted:
    """Return the images and the priority class in the ``defaults`` of a profile."""
    name = _find_priority_class(defaults)
    images = frozenset(image for _, image in _list_images(defaults))
    return Granted(images, frozenset((name,) if name else ()))


def _list_images(spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return all images of containers in ``spec``, each with its path."""
    return [
        (container.path_of("image"), container.image)
        for container in containers_of({"spec": spec})
        if container.image
    ]


def _find_priority_class(spec: Mapping[str, Any]) -> str:
    return get_text(get_map(spec, "template"), "priorityClassName")
