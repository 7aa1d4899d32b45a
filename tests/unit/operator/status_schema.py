"""The schema of a run's status, and the API server's verdict on a value."""

import functools
from pathlib import Path
from typing import Any

import yaml

from evergrad_operator.core.objects.times import parse_time


@functools.cache
def status_schema() -> dict[str, Any]:
    crd = yaml.safe_load(
        (Path(__file__).parents[3] / "crds" / "trainingrun.yaml").read_text()
    )
    return dict(
        crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    )


def problems_with(value: Any, schema: dict[str, Any], path: str = "status") -> list[str]:
    """Return the faults for which the API server would refuse the status, or drop a part of it."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    if not isinstance(value, kinds[schema["type"]]):
        return [f"{path}: {value!r} is no {schema['type']}"]
    found = []
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        for key, item in value.items():
            if key in known:
                found += problems_with(item, known[key], f"{path}.{key}")
            elif others:
                found += problems_with(item, others, f"{path}.{key}")
            else:
                found.append(f"{path}.{key}: unknown")
        found += [
            f"{path}.{key}: missing"
            for key in schema.get("required", ())
            if key not in value
        ]
        if len(value) > schema.get("maxProperties", 10**9):
            found.append(f"{path}: too many")
    if isinstance(value, int) and not isinstance(value, bool):
        bits = 63 if schema.get("format") == "int64" else 31
        if (
            not max(schema.get("minimum", -(2**bits)), -(2**bits))
            <= value
            <= min(schema.get("maximum", 2**bits - 1), 2**bits - 1)
        ):
            found.append(f"{path}: {value} is out of bounds")
    if isinstance(value, list):
        for item in value:
            found += problems_with(item, schema["items"], f"{path}[]")
        if len(value) > schema.get("maxItems", 10**9):
            found.append(f"{path}: too many")
    if isinstance(value, str):
        if len(value) > schema.get("maxLength", 10**9) or len(value) < schema.get(
            "minLength", 0
        ):
            found.append(f"{path}: length {len(value)}")
        if schema.get("format") == "date-time" and parse_time(value) is None:
            found.append(f"{path}: no time")
        if "enum" in schema and value not in schema["enum"]:
            found.append(f"{path}: not in enum")
    return found
