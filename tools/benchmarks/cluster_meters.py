"""Counts of the API server, by sender of the requests.

Reads the API server's own metrics, so that no audit log slows anything down.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping

from bed.api import Api

_LINE = re.compile(r"apiserver_request_total\{([^}]*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
WRITES = ("POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION")
Request = tuple[str, str, str]
"""Verb; resource, or resource/subresource; HTTP code."""
Requests = Counter[Request]


def read_writes(api: Api) -> Requests:
    """Return writes since the start of the API server: (verb, resource or resource/subresource, HTTP
    code)."""
    return parse_writes(api.request("GET", "/metrics", timeout=60))


def parse_writes(text: str) -> Requests:
    """Parse writes from Prometheus text.

    Omits writes that also happen without runs: leases, nodes, tokens and reviews of rights.
    """
    found: Requests = Counter()
    for labels_text, value in _LINE.findall(text):
        labels = dict(_LABEL.findall(labels_text))
        resource = labels["resource"]
        if (
            labels["verb"] not in WRITES
            or resource in ("leases", "nodes", "serviceaccounts", "")
            or resource.endswith("reviews")
        ):
            continue
        name = (
            f"{resource}/{labels['subresource']}" if labels.get("subresource") else resource
        )
        found[labels["verb"], name, labels["code"]] += int(float(value))
    return found


def describe(writes: Mapping[Request, int], runs: int) -> dict[str, float]:
    """Return writes per run by verb and resource; refused writes (codes of 400 and more) are separate."""
    found: Counter[str] = Counter()
    for (verb, resource, code), count in writes.items():
        found[f"{verb} {resource}{f' ({code})' if code >= '400' else ''}"] += count
    return {name: round(count / runs, 3) for name, count in sorted(found.items()) if count}


def by_writer(
    writes: Mapping[Request, int], owns: Callable[[str, str], bool], *, events: float
) -> dict[str, float]:
    """Return writes by sender. ``owns``: writes that only operators make. ``events``: events that they
    posted."""
    found: Counter[str] = Counter()
    for (verb, resource, _), count in writes.items():
        found[_find_writer(verb, resource, owns)] += count
    named = {name: float(count) for name, count in found.items()}
    return {
        **named,
        "scheduler": named.get("scheduler", 0.0) - events,
        "operator": named.get("operator", 0.0) + events,
    }


def _find_writer(
    verb: str,
    resource: str,
    owns: Callable[[str, str], bool],
) -> str:
    if verb == "POST" and resource in ("trainingruns", "trainjobs"):
        return "client"
    if owns(verb, resource):
        return "operator"
    return {"pods/binding": "scheduler", "events": "scheduler", "pods/status": "kwok"}.get(
        resource, "kcm"
    )
