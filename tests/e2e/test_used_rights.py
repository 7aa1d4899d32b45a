"""Compares the operator's requests to the API server during the other tests with the permissions that the
chart grants.

The name makes this file run last.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from bed import chart
from bed.places import CLUSTER

pytestmark = pytest.mark.timeout(1800)
ACCOUNT = "system:serviceaccount:evergrad-system:evergrad"
VALUES = {"rbac": {"aggregatedRoles": False}, "runs": {"allowed": {"deletion": True}}}
ENOUGH = 6
"""With this many rooms of end-to-end tests run before, every right must have been used."""
# Rights that other requests need: server-side apply of a PVC that does not exist yet needs create, and is
# recorded as patch; owner references are checked against finalizers, if the cluster does that.
UNSEEN = {("persistentvolumeclaims", "create"), ("trainingruns/finalizers", "update")}
# Written again when the webhook's certificate is renewed, after eight months.
UNSEEN |= {("secrets", "update")}
# Rights of an installation whose runs may request their own deletion, which one long test uses.
UNSEEN |= {("trainingruns", "delete")}
# Changed when a run's smallest number of nodes changes, or when another release builds them differently.
UNSEEN |= {(resource, "patch") for resource in ("poddisruptionbudgets", "networkpolicies")}


def requests() -> Iterator[dict[str, Any]]:
    """Return every recorded request of the operator for a resource."""
    with (CLUSTER / "logs/audit.jsonl").open() as file:
        for line in file:
            if f'"{ACCOUNT}"' in line and line.endswith("\n"):
                event = json.loads(line)
                if event["user"]["username"] == ACCOUNT and event.get("objectRef", {}).get(
                    "resource"
                ):
                    yield event


def resource_of(event: dict[str, Any]) -> str:
    reference = event["objectRef"]
    return "/".join(
        part for part in (reference["resource"], reference.get("subresource")) if part
    )


@pytest.fixture(scope="module")
def used(cluster: Any, operator: Any) -> set[tuple[str, str]]:
    if not cluster.is_bed:
        pytest.skip("Requests are recorded on the bed only.")
    del operator
    return {
        (resource_of(event), event["verb"])
        for event in requests()
        if (event.get("responseStatus") or {}).get("code", 0) < 300
    }


@pytest.fixture(scope="module")
def granted() -> set[tuple[str, str]]:
    roles = [one for one in chart.render(VALUES) if one["kind"] in ("Role", "ClusterRole")]
    return {
        (resource, verb)
        for role in roles
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_operator_was_refused_nothing_except_temporarily(
    used: set[tuple[str, str]],
) -> None:
    assert used
    refused = {
        (resource_of(event), event["verb"])
        for event in requests()
        if (event.get("annotations") or {}).get("authorization.k8s.io/decision") == "forbid"
    }
    # An API server that has just started may refuse requests that it allows a second later, because it has
    # not read the roles yet.
    assert refused - used == set()


def test_the_operator_requested_nothing_beyond_the_chart_permissions(
    used: set[tuple[str, str]], granted: set[tuple[str, str]]
) -> None:
    assert used - granted == set()


def test_every_permission_was_used(
    used: set[tuple[str, str]],
    granted: set[tuple[str, str]],
    request: pytest.FixtureRequest,
) -> None:
    rooms = {item.path for item in request.session.items if "e2e" in item.path.parts}
    if len(rooms) < ENOUGH:
        pytest.skip(
            "Only a part of the end-to-end tests was run; they use every right together."
        )
    assert granted - used - UNSEEN == set()
