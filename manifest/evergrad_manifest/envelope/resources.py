"""``spec.resources``: the resources of each node's pod, with Kubernetes' rules for a container."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final

from pydantic import Field

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import Section
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.spelling import nearest
from evergrad_manifest.model.view import View
from evergrad_manifest.values.numbers import NumberError, show
from evergrad_manifest.values.quantities import (
    SMALLEST_SIZE,
    Quantity,
    fault_of_key,
    parse_quantity,
    quantity_value,
)

_ACCELERATORS = (
    "gpu",
    "tpu",
    "npu",
    "xpu",
    "gaudi",
    "neuron",
    "neuroncore",
    "neurondevice",
)
"""Names of resources, after a vendor's prefix, that count as accelerators. Other resources are network cards
and similar devices."""
_STANDARD_RESOURCES = ("cpu", "memory", "ephemeral-storage")


class Resources(Section):
    """Resources of each node's pod, as in a container of Kubernetes."""

    requests: dict[str, Quantity] = Field(default_factory=dict)
    """Requests: resource name and quantity, for example ``cpu: "2"``."""
    limits: dict[str, Quantity] = Field(default_factory=dict)
    """Limits: resource name and quantity, for example ``memory: 4Gi``."""


def count_accelerators(resources: Resources) -> int:
    """Count the accelerators that a pod with these resources holds."""
    asked = {**resources.requests, **resources.limits}
    return sum(
        int(quantity_value(quantity))
        for name, quantity in asked.items()
        if is_extended(name) and name.partition("/")[2].casefold() in _ACCELERATORS
    )


def check_resources(view: View) -> Iterator[Problem]:
    """Check names, sizes, and that requests are within limits, as the API server requires for a container."""
    yield from check_resources_at(view, "spec", "resources")


def check_resources_at(view: View, *where: str | int) -> Iterator[Problem]:
    """Check the resources at the path ``where`` by the same rules."""
    requests, limits = (
        _quantities(view, *where, "requests"),
        _quantities(view, *where, "limits"),
    )
    for kind, values in (("requests", requests), ("limits", limits)):
        for name, quantity in values.items():
            yield from _check_resource(format_path((*where, kind, name)), name, quantity)

    # Compare each request with its limit. The API server compares them only in a pod, long after it has
    # accepted the run.
    for name, request in requests.items():
        path = format_path((*where, "requests", name))
        limit = limits.get(name)

        # Read the file: a limit that is present but wrong has its own problem, and must not count as missing.
        if is_extended(name) and view.raw(*where, "limits", name) is None:
            why = "devices are requested by their limit"
            yield Problem(
                path,
                "has no limit",
                why,
                f"Move it to limits, or add `{name}: {request}` there",
            )
        if limit is None:
            continue
        if quantity_value(request) > quantity_value(limit):
            remedy = f"Raise limits.{name} to at least {request}, or lower the request"
            yield Problem(path, f"{request} is more than the limit {limit}", "", remedy)
        elif is_extended(name) and quantity_value(request) != quantity_value(limit):
            why = "devices are not shared, so both must be equal"
            yield Problem(
                path,
                f"{request} differs from the limit {limit}",
                why,
                f"Write {limit}, or leave the request out",
            )


def _quantities(view: View, *path: str | int) -> dict[str, str]:
    """Return the quantities that could be parsed, by the name of the resource."""
    # Read them one by one from the file, so that a wrong quantity does not hide problems of others.
    values = view.raw(*path)
    found: dict[str, str] = {}
    for name, value in values.items() if isinstance(values, Mapping) else ():
        with suppress(NumberError):
            found[name] = parse_quantity(value)
    return found


def _check_resource(path: str, name: str, quantity: str) -> Iterator[Problem]:
    # The most common mistakes: 4 for 4Gi, 400m for 400Mi, half a device, gpu for the vendor's name.
    amount = quantity_value(quantity)
    if name == "memory" and amount < SMALLEST_SIZE:
        why = f"it means {float(amount):g} bytes"
        guess = "400Mi" if quantity.endswith("m") else "4Gi"
        yield Problem(
            path,
            f"{show(quantity)} is too little memory",
            why,
            f"Write a unit, such as {guess}",
        )
    elif is_extended(name) and amount.denominator != 1:
        yield Problem(
            path,
            f"{show(quantity)} is not a whole number",
            "devices are not shared",
            "Write a whole number",
        )
    # With a vendor's prefix, any resource name is possible, so only its spelling can be checked.
    elif "/" in name and (fault := fault_of_key(name)) is not None:
        yield Problem(path, *fault, "Rename it")
    elif (
        "/" not in name
        and name not in _STANDARD_RESOURCES
        and not name.startswith("hugepages-")
    ):
        # Kubernetes has no `gpu`: each vendor's plug-in defines a name, and this is the most likely one.
        near = nearest(name, _STANDARD_RESOURCES)
        if near is None and name.casefold() in ("gpu", "gpus"):
            near = "nvidia.com/gpu"
        why = f"did you mean `{near}`? " if near else ""
        why += (
            f"It is one of {', '.join(_STANDARD_RESOURCES)}, or has a vendor's prefix such as "
            "nvidia.com/gpu"
        )
        yield Problem(path, "not a resource's name", why, "")


def is_extended(name: str) -> bool:
    """Return whether Kubernetes counts the resource in whole units and does not share a unit, as for
    devices."""
    prefix, slash, _ = name.partition("/")
    return bool(slash) and not (
        prefix == "kubernetes.io" or prefix.endswith(".kubernetes.io")
    )


RULES: Final = (check_resources,)
