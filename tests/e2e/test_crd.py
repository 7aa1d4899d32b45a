"""The CRD on a real API server: what the loader refuses is refused there, what is right is taken, what is fixed stays fixed.

The same schema stands under another group, so that no operator of the cluster acts on what these tests create.
"""

import copy
import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from bed.api import Api, ApiError
from bed.fixtures import Cluster

from evergrad_trainer.config.loader import load_manifest, read_document
from evergrad_trainer.config.overrides import Layered, Override, apply_override, parse_override

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "tests/unit/config"
TABLE: list[dict[str, Any]] = yaml.safe_load((UNIT / "bad_manifests.yaml").read_text())
GROUP = "crd-test.evergrad.dev"
NAME = f"trainingruns.{GROUP}"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
EXAMPLES = sorted(ROOT.glob("examples/*/trainingrun.yaml"))

Object = dict[str, Any]


def definition() -> Object:
    found: Object = yaml.safe_load((ROOT / "crds/trainingrun.yaml").read_text())
    found["metadata"]["name"] = NAME
    found["spec"]["group"] = GROUP
    found["spec"]["names"] |= {"shortNames": ["truntest"], "categories": []}
    return found


@dataclass(frozen=True)
class Server:
    """The API server with our schema in it, and a namespace to work in."""

    api: Api
    namespace: str

    @property
    def path(self) -> str:
        return f"/apis/{GROUP}/v1alpha1/namespaces/{self.namespace}/trainingruns"

    def create(self, run: Object, *, dry: bool = False) -> Object:
        """As ``kubectl create`` does it: unknown and repeated fields are errors."""
        query = "fieldValidation=Strict" + ("&dryRun=All" if dry else "")
        return self.api.create(f"{self.path}?{query}", under_our_group(run))

    def replace(self, run: Object) -> Object:
        """As ``kubectl replace`` does it."""
        name = run["metadata"]["name"]
        found: Object = self.api.request("PUT", f"{self.path}/{name}?fieldValidation=Strict", under_our_group(run))
        return found

    def apply(self, run: Object) -> Object:
        """As ``kubectl apply --server-side`` does it."""
        path = f"{self.path}/{run['metadata']['name']}?fieldManager=test&fieldValidation=Strict"
        return self.api.patch(path, under_our_group(run), kind="application/apply-patch+yaml")

    def refusal(self, run: Object) -> str | None:
        """Why the run is not taken, or None if it is."""
        try:
            self.create(run, dry=True)
        except ApiError as error:
            assert error.status in (400, 422), error
            return str(error)
        return None


def under_our_group(run: Object) -> Object:
    return run | {"apiVersion": run["apiVersion"].replace("evergrad.dev/", f"{GROUP}/")} if "apiVersion" in run else run


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[Server]:
    api, namespace = cluster.api, f"crd-{uuid.uuid4().hex[:8]}"
    api.apply(f"{DEFINITIONS}/{NAME}", definition(), manager="test")
    api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    found = Server(api, namespace)
    for _ in range(100):
        if api.is_there(found.path):
            break
        time.sleep(0.2)
    yield found
    api.delete(f"{DEFINITIONS}/{NAME}")
    api.delete(f"/api/v1/namespaces/{namespace}")


def changed(changes: Mapping[str, Any], *, base: str = "base_manifest.yaml") -> Object:
    """The base manifest with changes, as the loader merges them and as kubectl would send it."""
    document = read_document(UNIT / base)
    layered = Layered(document.value, document.places, document.problems, document.lost)
    for path, value in changes.items():
        text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True, width=10**6)
        override = parse_override(f"{path}={text.split(chr(10) + '...')[0].strip()}")
        assert isinstance(override, Override)
        layered = apply_override(layered, override)
    found: Object = as_kubectl_sends(layered.value)
    return found


def as_kubectl_sends(value: Any) -> Any:
    """Whole floats are written without a point, and nulls of what may be left out are sent as they are."""
    if isinstance(value, dict):
        return {key: as_kubectl_sends(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_kubectl_sends(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_named(path: str, refusal: str) -> bool:
    """Whether the message names the field, or the one it stands in."""
    spelled = re.sub(r"\['([^']+)'\]", r".\1", path)
    parent = re.sub(r"(\.[^.\[]+|\[[0-9]+\])$", "", spelled) if "/" not in spelled else re.sub(r"\.[^.]+\.[^.]+/.*$|\.[^./]+/.*$", "", spelled)
    return any(re.search(rf"{re.escape(one)}(?![A-Za-z0-9])", refusal) for one in (path, spelled, parent) if one)


@pytest.mark.parametrize("case", TABLE, ids=[case["name"] for case in TABLE])
def test_what_the_loader_refuses_the_api_server_refuses_with_the_path(case: dict[str, Any], server: Server) -> None:
    refusal = server.refusal(changed(case["set"]))
    expected = case.get("apiServer", list(case["problems"]))
    if isinstance(expected, str):
        assert expected.startswith("accepts: ")
        assert refusal is None, refusal
        return
    assert refusal is not None
    named = [path for path in expected if is_named(path, refusal)]
    # Unknown keys and wrong types are found before all else, and the rest is not looked at then.
    is_early = "strict decoding error" in refusal or "Required value" in refusal or "must be of type" in refusal
    assert named if is_early else named == expected, refusal
