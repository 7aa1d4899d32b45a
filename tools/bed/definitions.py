"""Creates and deletes CustomResourceDefinitions of other projects on the bed's API server."""

from typing import Final

from bed.api import Api, Object
from bed.shell import wait_until

_DEFINITIONS: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def bring(api: Api, definition: Object) -> None:
    """Create or change the type. The API server serves it when this returns."""
    name = definition["metadata"]["name"]
    path = f"{_DEFINITIONS}/{name}"
    api.apply(path, definition)

    def is_served() -> bool:
        conditions = api.get(path).get("status", {}).get("conditions") or []
        return any(
            each["type"] == "Established" and each["status"] == "True"
            for each in conditions
        )

    wait_until(f"the type {name}", is_served, seconds=600)


def take_away(api: Api, name: str) -> None:
    """Delete the type and all of its objects."""
    api.delete(f"{_DEFINITIONS}/{name}")
