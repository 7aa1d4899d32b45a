"""Resources of the containers in a run's pods, including the installation's limits for the disk of a host."""

from typing import Final

from evergrad_manifest.envelope.resources import Resources, is_extended
from evergrad_operator.core.plan.common import JsonObject, without_none

EPHEMERAL_STORAGE: Final = "ephemeral-storage"


def bound_disk(given: Resources, request: str, limit: str) -> Resources:
    """Return the resources with the installation's request and limit of ephemeral storage.

    If the run sets a request or limit itself, both installation values are ignored, because a mixture could
    be contradictory.
    """
    if EPHEMERAL_STORAGE in {*given.requests, *given.limits}:
        return given
    # Without a request, Kubernetes would use the limit as the request, and reserve it.
    asked = request or ("0" if limit else "")
    requests = {**given.requests, **({EPHEMERAL_STORAGE: asked} if asked else {})}
    limits = {**given.limits, **({EPHEMERAL_STORAGE: limit} if limit else {})}
    return given.model_copy(update={"requests": requests, "limits": limits})


def drop_devices(given: Resources) -> Resources:
    """Return the resources without devices, because two containers cannot share a device."""
    kept = (
        {name: amount for name, amount in values.items() if not is_extended(name)}
        for values in (given.requests, given.limits)
    )
    requests, limits = kept
    return given.model_copy(update={"requests": requests, "limits": limits})


def build_resources(given: Resources) -> JsonObject:
    """Build the resources of a container."""
    return without_none({"requests": dict(given.requests), "limits": dict(given.limits)})
