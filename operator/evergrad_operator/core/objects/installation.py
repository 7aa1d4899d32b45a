"""Rules that one installation has for its runs, beside those that hold everywhere. Pure.

``evergrad validate`` does not know them. The webhook and the check before a run's first pod do.
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
"""Value of ``spec.ttlDeletes`` by which a run asks for its own deletion."""


@dataclass(frozen=True)
class Granted:
    """Images and priority classes that a profile of the installation names: a run that has this profile
    may have them, too."""

    images: frozenset[str] = frozenset()
    priority_classes: frozenset[str] = frozenset()

    def within(self, other: "Granted") -> "Granted":
        """Return the names that ``other`` has, too."""
        classes = self.priority_classes & other.priority_classes
        return Granted(self.images & other.images, classes)

    def without(self, other: "Granted") -> "Granted":
        """Return the names that ``other`` does not have."""
        classes = self.priority_classes - other.priority_classes
        return Granted(self.images - other.images, classes)


@dataclass(frozen=True)
class Installation:
    """Limits and defaults that an installation sets for runs. The default allows no account and no deletion,
    and any image and priority class."""

    service_accounts: tuple[str, ...] = ()
    """Names of the accounts that runs may have."""
    access_mode: str = ""
    """Access mode of new volumes whose run names none."""
    deletes_runs: bool = False
    """Whether the operator deletes runs that ask for it a while after their end."""
    images: tuple[str, ...] = ()
    """Beginnings of the images that runs may have; none: any."""
    priority_classes: tuple[str, ...] = ()
    """Names of the priority classes that runs may have; none: any."""
    profiles: str = ""
    """The profiles of the installation, as JSON by name."""
    granted: Granted = Granted()
    """Names that the profile of one run allows it beside these."""


NOTHING_ALLOWED: Final = Installation()
NO_DELETION: Final = Problem(
    "spec.ttlDeletes",
    "Run is not allowed in this installation",
    "its operator has no right to delete TrainingRuns",
    "Write Children, or have runs.allowed.deletion of the chart set",
)
"""A run that asks for its own deletion where that is not allowed."""


def find_refusals(
    document: Mapping[str, Any], installation: Installation
) -> tuple[Problem, ...]:
    """Find what this installation does not allow in ``document``, an object as the API server sends it.

    Values that the manifest's own rules refuse are passed over.
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

    # A default that the run does not see in its file, and that would leave all nodes but one without a place.
    storage, nodes = get_map(spec, "storage"), get_map(spec, "nodes")
    is_default = not storage.get("accessModes") and not storage.get("claimName")
    if is_default and installation.access_mode == FOR_ONE_POD:
        why = f"new volumes of this installation are {FOR_ONE_POD} unless the run says otherwise"
        found += check_shared(get_int(nodes, "min") or 1, get_int(nodes, "max"), why)
    return tuple(found)


def find_beyond(spec: Mapping[str, Any], installation: Installation) -> Iterator[Problem]:
    """Find the images and the priority class in ``spec`` that this installation does not allow.

    The chart's ValidatingAdmissionPolicy has the same rules for ``kubectl apply``. It sees neither profiles
    nor runs from before it.
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
    """Return the images and the priority class that the ``defaults`` of a profile name."""
    name = _find_priority_class(defaults)
    images = frozenset(image for _, image in _list_images(defaults))
    return Granted(images, frozenset((name,) if name else ()))


def _list_images(spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return all images that ``spec`` names for pods, each with its path."""
    return [
        (container.path_of("image"), container.image)
        for container in containers_of({"spec": spec})
        if container.image
    ]


def _find_priority_class(spec: Mapping[str, Any]) -> str:
    return get_text(get_map(spec, "template"), "priorityClassName")
