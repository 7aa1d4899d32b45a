"""Rules of the envelope: metadata, nodes against slots, resources, storage."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Final

from evergrad_manifest.errors import Problem
from evergrad_manifest.fields import format_path
from evergrad_manifest.spelling import nearest
from evergrad_manifest.training.steps import divisors_of, slots_of
from evergrad_manifest.values.numbers import NumberError, show
from evergrad_manifest.values.quantities import (
    fault_of_key,
    fault_of_label_value,
    is_dns_subdomain,
    parse_quantity,
    quantity_value,
)
from evergrad_manifest.view import UNKNOWN, View

_MIN, _MAX = "spec.nodes.min", "spec.nodes.max"
_STORAGE = "spec.storage"
_STANDARD_RESOURCES = ("cpu", "memory", "ephemeral-storage")
_SMALLEST_MEMORY = 2**20
MAX_SPEC_BYTES: Final = 700_000
"""Size of a run's ``spec`` as JSON that leaves room in the ConfigMap for what else stands there."""
FOLDER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*")
_NAME_OF_IMAGE: Final = r"[a-z0-9]+((\.|_{1,2}|-+)[a-z0-9]+)*"
IMAGE: Final = re.compile(
    rf"([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]+)?/)?{_NAME_OF_IMAGE}(/{_NAME_OF_IMAGE})*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[a-z0-9]+([+._-][a-z0-9]+)*:[0-9a-f]{32,})?"
)


def check_nodes(view: View) -> Iterator[Problem]:
    """max is at least min, and every process has a slot of the step."""
    if (found := view.known(_MIN, _MAX)) is None:
        return
    smallest, largest = found
    if largest is not None and largest < smallest:
        remedy = f"Raise max to at least {smallest}, or lower min"
        yield Problem(_MAX, f"{largest} is below nodes.min {smallest}", "", remedy)
        return
    yield from _check_processes(
        view, _MIN if largest is None else _MAX, smallest if largest is None else largest
    )


def _check_processes(view: View, path: str, nodes: int) -> Iterator[Problem]:
    workers, slots = view.get("spec.workersPerNode"), slots_of(view)
    if workers is UNKNOWN or slots is None:
        return
    # Without workersPerNode a node has as many workers as accelerators; it has one at the very least.
    per_node = workers or 1
    most, whole, micro = slots
    processes = nodes * per_node
    if processes <= most:
        return
    given = f"{nodes} nodes with {per_node} workersPerNode" if workers else f"{nodes} nodes"
    what = f"{given} make W = {processes} processes, more than the M = {most} slots of a step"
    why = f"globalBatchSize {whole} / microBatchSize {micro} = {most}, and a process needs a slot of its own"
    fitting = [divisor for divisor in divisors_of(whole) if whole // divisor >= processes]
    remedies = []
    if most >= per_node:
        remedies.append(f"lower {path.removeprefix('spec.')} to {most // per_node}")
    if workers is not None and workers > 1 and most >= nodes:
        remedies.append(f"lower workersPerNode to {most // nodes}")
    if fitting:
        remedies.append(f"lower microBatchSize to {max(fitting)}")
    remedies.append("raise globalBatchSize")
    remedy = ", or ".join(remedies)
    yield Problem(path, what, why, f"W is at most {most}: {remedy}")


def check_resources(view: View) -> Iterator[Problem]:
    """Names, sizes, and requests within limits, as the API server wants them of a container."""
    requests, limits = _quantities(view, "requests"), _quantities(view, "limits")
    for kind, values in (("requests", requests), ("limits", limits)):
        for name, quantity in values.items():
            yield from _check_resource(
                format_path(("spec", "resources", kind, name)), name, quantity
            )
    for name, request in requests.items():
        yield from _check_request(
            name,
            request,
            limits.get(name),
            view.raw("spec", "resources", "limits", name) is not None,
        )


def _quantities(view: View, kind: str) -> dict[str, str]:
    """The right ones, one by one: a wrong quantity hides nothing of its neighbours."""
    values = view.raw("spec", "resources", kind)
    found: dict[str, str] = {}
    for name, value in values.items() if isinstance(values, Mapping) else ():
        with suppress(NumberError):
            found[name] = parse_quantity(value)
    return found


def _check_resource(path: str, name: str, quantity: str) -> Iterator[Problem]:
    # The commonest slips: 4 for 4Gi, 400m for 400Mi, half a device, gpu for the vendor's name.
    amount = quantity_value(quantity)
    if name == "memory" and amount < _SMALLEST_MEMORY:
        why = f"it means {float(amount):g} bytes"
        guess = "400Mi" if quantity.endswith("m") else "4Gi"
        yield Problem(
            path,
            f"{show(quantity)} is too little memory",
            why,
            f"Write a unit, such as {guess}",
        )
    elif _is_extended(name) and amount.denominator != 1:
        yield Problem(
            path,
            f"{show(quantity)} is not a whole number",
            "devices are not shared",
            "Write a whole number",
        )
    elif "/" in name and (fault := fault_of_key(name)) is not None:
        yield Problem(path, *fault, "Rename it")
    elif (
        "/" not in name
        and name not in _STANDARD_RESOURCES
        and not name.startswith("hugepages-")
    ):
        near = nearest(name, _STANDARD_RESOURCES)
        if near is None and name.casefold() in ("gpu", "gpus"):
            near = "nvidia.com/gpu"
        why = f"did you mean `{near}`? " if near else ""
        why += (
            f"It is one of {', '.join(_STANDARD_RESOURCES)}, or has a vendor's prefix such as "
            "nvidia.com/gpu"
        )
        yield Problem(path, "not a resource's name", why, "")


def _is_extended(name: str) -> bool:
    prefix, slash, _ = name.partition("/")
    return bool(slash) and not (prefix == "kubernetes.io" or prefix.endswith(".kubernetes.io"))


def _check_request(
    name: str, request: str, limit: str | None, has_limit: bool
) -> Iterator[Problem]:
    path = format_path(("spec", "resources", "requests", name))
    if not has_limit and _is_extended(name):
        why = "a device is requested by its limit"
        yield Problem(
            path, "has no limit", why, f"Move it to limits, or add `{name}: {request}` there"
        )
    if limit is None:
        return
    if quantity_value(request) > quantity_value(limit):
        remedy = f"Raise limits.{name} to at least {request}, or lower the request"
        yield Problem(path, f"{request} is more than the limit {limit}", "", remedy)
    elif _is_extended(name) and quantity_value(request) != quantity_value(limit):
        why = "a device is not shared, so both are equal"
        yield Problem(
            path,
            f"{request} differs from the limit {limit}",
            why,
            f"Write {limit}, or leave the request out",
        )


def check_storage(view: View) -> Iterator[Problem]:
    """Either a new volume or an existing one."""
    if view.get(_STORAGE) is UNKNOWN:
        return

    # What belongs to a new volume says nothing of an existing one: the first contradiction only, since one
    # mistake often shows as several.
    size, claim = view.is_given(f"{_STORAGE}.size"), view.is_given(f"{_STORAGE}.claimName")
    storage_class = view.is_given(f"{_STORAGE}.storageClassName")
    if size and claim:
        why = "a run has either a new volume or an existing one"
        yield Problem(_STORAGE, "size and claimName are both set", why, "Remove one of them")
    elif storage_class and claim:
        why = "an existing claim has its class already"
        yield Problem(
            f"{_STORAGE}.storageClassName", "has no meaning with claimName", why, "Remove it"
        )
    elif view.is_given(f"{_STORAGE}.accessModes") and claim:
        why = "an existing claim has its access modes already"
        yield Problem(
            f"{_STORAGE}.accessModes", "has no meaning with claimName", why, "Remove it"
        )
    elif storage_class and not size:
        why = "storageClassName asks for a new volume"
        yield Problem(
            f"{_STORAGE}.size",
            "missing",
            why,
            "Add `size: 20Gi`, or name an existing claim by claimName",
        )

    # Single values, whatever was said above of them together.
    quantity = view.get(f"{_STORAGE}.size")
    if isinstance(quantity, str) and quantity_value(quantity) < _SMALLEST_MEMORY:
        why = f"it means {float(quantity_value(quantity)):g} bytes"
        yield Problem(
            f"{_STORAGE}.size",
            f"{show(quantity)} is too small",
            why,
            "Write a unit, such as 20Gi",
        )
    for key, noun in (("storageClassName", "storage class"), ("claimName", "PVC")):
        name = view.get(f"{_STORAGE}.{key}")
        if isinstance(name, str) and not is_dns_subdomain(name):
            why = f"the name of a {noun} has lower-case letters, digits, '-' and '.'"
            yield Problem(
                f"{_STORAGE}.{key}", f"{show(name)} is not a valid name", why, "Correct it"
            )
    path = view.get(f"{_STORAGE}.path")
    if isinstance(path, str) and FOLDER.fullmatch(path) is None:
        why = "it is relative to the volume, without . or .., of letters, digits, '-', '_', '.' and '/'"
        yield Problem(
            f"{_STORAGE}.path",
            f"{show(path)} is not a folder in the volume",
            why,
            "Write a path such as runs/first",
        )


def check_image(view: View) -> Iterator[Problem]:
    """A reference that a container runtime can pull."""
    image = view.get("spec.image")
    if isinstance(image, str) and IMAGE.fullmatch(image) is None:
        why = "it is [registry/]name[:tag][@digest], the name in lower case"
        remedy = "Write a reference such as registry.example.org/team/trainer:1.2"
        yield Problem("spec.image", f"{show(image)} is not an image", why, remedy)


def check_labels(view: View) -> Iterator[Problem]:
    """Keys and values of labels and annotations, of the object and of the pods' template."""
    # Read from the file itself: a label whose value is wrong hides nothing of its neighbours.
    for where in ("metadata", "spec.template"):
        for kind in (
            "labels",
            "annotations",
            *(("nodeSelector",) if where == "spec.template" else ()),
        ):
            values = view.raw(*where.split("."), kind)
            for key, value in values.items() if isinstance(values, Mapping) else ():
                path = format_path((*where.split("."), kind, key))
                if (fault := fault_of_key(key)) is not None:
                    yield Problem(path, *fault, "Rename it")
                if (
                    kind != "annotations"
                    and isinstance(value, str)
                    and (fault := fault_of_label_value(value)) is not None
                ):
                    yield Problem(path, *fault, "Correct it")


def check_size(view: View) -> Iterator[Problem]:
    """A run fits into one object of a cluster, and into the ConfigMap that its nodes read it from."""
    spec = view.raw("spec")
    size = len(json.dumps(spec, ensure_ascii=False, default=str).encode(errors="replace"))
    if size > MAX_SPEC_BYTES:
        why = f"a ConfigMap has room for {MAX_SPEC_BYTES} bytes of it"
        yield Problem(
            "spec", f"{size} bytes are too many", why, "Move lists and texts into files"
        )


RULES: Final = (
    check_size,
    check_nodes,
    check_resources,
    check_storage,
    check_image,
    check_labels,
)
