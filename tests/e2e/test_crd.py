"""The CRD on an API server without an operator: structure, types and bounds are enforced, valid objects are
accepted, and immutable fields stay.

The same schema is installed in another API group, so that no operator of the cluster handles the objects of
these tests.
"""

import copy
import importlib.util
import random
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from patience import PATIENCE

from bed import toolbox
from bed.api import Api, ApiError
from bed.fixtures import Cluster
from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.reading.loader import load_manifest, read_document
from evergrad_manifest.reading.overrides import (
    Override,
    apply_override,
    parse_override,
)
from evergrad_manifest.validation import INVALID_SPEC

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "tests/unit/manifest"
TABLE: list[dict[str, Any]] = yaml.safe_load((UNIT / "bad_manifests.yaml").read_text())
GOOD: dict[str, dict[str, Any]] = yaml.safe_load((UNIT / "good_manifests.yaml").read_text())
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
    """The API server with our schema, and a namespace."""

    api: Api
    kubeconfig: Path
    namespace: str

    def kubectl(self, *words: str) -> str:
        """Return kubectl's output."""
        program = shutil.which("kubectl") or str(toolbox.binary("kubectl"))
        command = [
            program,
            "--kubeconfig",
            str(self.kubeconfig),
            "--namespace",
            self.namespace,
            *words,
        ]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=PATIENCE
        ).stdout

    def explain(self, field: str, *words: str) -> str:
        """Return the output of ``kubectl explain``, on one line for a single field."""
        text = self.kubectl("explain", f"{NAME}.{field}".rstrip("."), *words)
        return text if words else " ".join(text.split())

    @property
    def path(self) -> str:
        return f"/apis/{GROUP}/v1alpha1/namespaces/{self.namespace}/trainingruns"

    def create(self, run: Object, *, dry: bool = False) -> Object:
        """Create like ``kubectl create``: unknown and repeated fields are errors."""
        query = "fieldValidation=Strict" + ("&dryRun=All" if dry else "")
        return self.api.create(f"{self.path}?{query}", under_our_group(run))

    def replace(self, run: Object) -> Object:
        """Replace like ``kubectl replace``."""
        name = run["metadata"]["name"]
        found: Object = self.api.request(
            "PUT", f"{self.path}/{name}?fieldValidation=Strict", under_our_group(run)
        )
        return found

    def apply(self, run: Object) -> Object:
        """Apply like ``kubectl apply --server-side``."""
        path = f"{self.path}/{run['metadata']['name']}?fieldManager=test&fieldValidation=Strict"
        return self.api.patch(
            path, under_our_group(run), kind="application/apply-patch+yaml"
        )

    def refusal(self, run: Object) -> str | None:
        """Return why the run is refused, or None if it is accepted."""
        try:
            self.create(run, dry=True)
        except ApiError as error:
            assert error.status in (400, 422), error
            return str(error)
        return None


def under_our_group(run: Object) -> Object:
    return (
        run | {"apiVersion": run["apiVersion"].replace("evergrad.dev/", f"{GROUP}/")}
        if "apiVersion" in run
        else run
    )


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[Server]:
    api, namespace = cluster.api, f"crd-{uuid.uuid4().hex[:8]}"
    api.apply(f"{DEFINITIONS}/{NAME}", definition(), manager="test")
    api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    found = Server(api, cluster.kubeconfig, namespace)
    for _ in range(600):
        if api.is_there(found.path):
            break
        time.sleep(0.2)
    yield found
    api.delete(f"{DEFINITIONS}/{NAME}")
    api.delete(f"/api/v1/namespaces/{namespace}")


def changed(changes: Mapping[str, Any], *, base: str = "base_manifest.yaml") -> Object:
    """Return the base manifest with changes, as the loader merges them and as kubectl would send it."""
    layered = read_document(UNIT / base)
    for path, value in changes.items():
        text = (
            value
            if isinstance(value, str)
            else yaml.safe_dump(value, default_flow_style=True, width=10**6)
        )
        override = parse_override(f"{path}={text.split(chr(10) + '...')[0].strip()}")
        assert isinstance(override, Override)
        layered = apply_override(layered, override)
    found: Object = as_kubectl_sends(layered.value)
    return found


def as_kubectl_sends(value: Any) -> Any:
    """Whole floats are written without a point, and nulls of optional fields are sent unchanged."""
    if isinstance(value, dict):
        return {key: as_kubectl_sends(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_kubectl_sends(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_named(path: str, refusal: str) -> bool:
    """Return whether the message names the field or the field that contains it."""
    parts = re.findall(r"\['[^']+'\]|\[[0-9]+\]|[^.\[\]]+", path)
    spelled = [_joined(parts), _joined(parts[:-1])]
    return any(
        re.search(rf"{re.escape(one)}(?![A-Za-z0-9])", refusal)
        for one in (path, *spelled)
        if one
    )


def _joined(parts: list[str]) -> str:
    """Return the path as the API server writes it: keys of a map after dots."""
    text = ""
    for part in parts:
        quoted = re.fullmatch(r"\['(.+)'\]", part)
        text += (
            part
            if re.fullmatch(r"\[[0-9]+\]", part)
            else f".{quoted[1] if quoted else part}"
        )
    return text.removeprefix(".")


DECODING = {
    "a missing kind": "Kind",
    "a version that does not exist": 'version "v1"',
    "a number for a text": "ObjectMeta.name",
}
"""Mistakes that the server finds when it decodes the object, before any schema; it has its own messages for
them."""


@pytest.mark.parametrize("case", TABLE, ids=[case["name"] for case in TABLE])
def test_what_the_api_server_refuses_the_loader_refuses_at_the_same_path(
    case: dict[str, Any], server: Server
) -> None:
    refusal = server.refusal(changed(case["set"]))
    if refusal is not None:
        names = (
            [DECODING[case["name"]]] if case["name"] in DECODING else list(case["problems"])
        )
        assert any(is_named(name, refusal) for name in names), refusal
        assert "rule evaluation error" not in refusal


ALONE = {
    "a missing section": (
        {"spec.training.optimizer": None},
        "spec.training.optimizer: Required value",
    ),
    "a wrong type": (
        {"spec.training.optimizer": []},
        "spec.training.optimizer in body must be of type object",
    ),
    "a number beyond its bounds": (
        {"spec.nodes.max": 2000},
        "spec.nodes.max in body should be less than",
    ),
    "a number with a unit": (
        {"spec.nodes.max": "'2k'"},
        "spec.nodes.max in body must be of type integer",
    ),
    "a share beyond its bounds": (
        {"spec.training.optimizer.weightDecay": 2},
        "spec.training.optimizer.weightDecay in body should be less than",
    ),
    "a word that is no choice": (
        {"spec.training.schedule.type": "sine"},
        "spec.training.schedule.type: Unsupported",
    ),
    "fewer nodes than the least": (
        {"spec.nodes": {"min": 3, "max": 2}},
        "spec.nodes.max: Invalid value",
    ),
    "a recipe and a script": (
        {"spec.script": {"command": ["train.py"]}},
        "exactly one of training and script",
    ),
    "neither a recipe nor a script": (
        {"spec.training": None},
        "exactly one of training and script",
    ),
    "two lengths": (
        {"spec.training.horizon": {"steps": 1, "epochs": 1}},
        "must validate one and only one schema (oneOf)",
    ),
    "no length": (
        {"spec.training.horizon": {}},
        "must validate one and only one schema (oneOf)",
    ),
    "two models": (
        {"spec.training.model.path": "elsewhere"},
        "exactly one of config, path and preset",
    ),
    "two volumes": (
        {"spec.storage": {"size": "1Gi", "claimName": "mine"}},
        "size and claimName are both set",
    ),
    "two sizes held out": (
        {"spec.training.data.heldOut": {"fraction": "1%", "count": 3}},
        "must validate one and only one schema (oneOf)",
    ),
}


@pytest.mark.parametrize(("changes", "words"), ALONE.values(), ids=ALONE)
def test_the_api_server_alone_enforces_structure_types_bounds_and_a_few_rules(
    changes: dict[str, Any], words: str, server: Server
) -> None:
    assert words in str(
        server.refusal(
            changed(
                {
                    path: "null" if value is None else value
                    for path, value in changes.items()
                }
            )
        )
    )


def test_an_unknown_key_is_stored_so_that_the_validation_can_name_it(
    server: Server,
) -> None:
    run = changed(
        {"metadata.name": "misspelled", "spec.training.optimizer.learningrate": 1}
    )
    assert server.create(run)["spec"]["training"]["optimizer"]["learningrate"] == 1


@pytest.mark.parametrize("changes", GOOD.values(), ids=GOOD)
def test_valid_values_at_the_bounds_are_accepted(
    changes: dict[str, Any], server: Server
) -> None:
    assert (
        server.refusal(
            changed(
                {
                    path: "null" if value is None else value
                    for path, value in changes.items()
                }
            )
        )
        is None
    )


@pytest.mark.parametrize(
    "path", [*EXAMPLES, UNIT / "script_manifest.yaml"], ids=lambda path: path.parent.name
)
def test_the_examples_are_accepted_unchanged(path: Path, server: Server) -> None:
    assert server.refusal(as_kubectl_sends(load_manifest(path).raw)) is None


def test_applying_the_same_file_again_changes_nothing(server: Server) -> None:
    run = changed({"metadata.name": "again"})
    # The first apply stores no status. The second adds the default and stores it once, unless an operator has
    # written a status meanwhile.
    server.apply(run)
    first, second = server.apply(run), server.apply(run)
    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]
    assert second["metadata"]["generation"] == 1
    assert second["spec"]["training"] == run["spec"]["training"]


MUTANTS = 300


def test_the_server_accepts_everything_that_the_loader_accepts(
    server: Server, tmp_path: Path
) -> None:
    mutations = load_by_path(UNIT / "test_config_mutations.py")
    path, apart, refused = tmp_path / "mutant.yaml", {}, 0
    for seed in range(MUTANTS):
        path.write_bytes(mutations.mutated_tree(random.Random(seed)))
        try:
            raw = load_manifest(path).raw
        except ConfigurationError:
            refused += 1
            continue
        if (refusal := server.refusal(as_kubectl_sends(raw))) is not None:
            apart[seed] = refusal
    assert MUTANTS / 2 < refused < MUTANTS
    # A null in a map of texts: some of thousands, see docs/reference/trainingrun.md for known cases.
    assert len(apart) <= MUTANTS / 100, apart


def load_by_path(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIXED = {
    "a value of the recipe": {"spec.training.optimizer.learningRate": 2e-3},
    "a recipe's field that is added": {"spec.training.optimizer.clipNorm": 2},
    "a recipe's section that is removed": {"spec.training.schedule": None},
    "the model's own configuration": {"spec.training.model.config.hidden_size": 512},
    "a recipe that becomes a script": {
        "spec.training": None,
        "spec.script": {"command": ["train.py"]},
    },
    "an image that is added": {"spec.image": "example.org/other"},
    "a storage that is removed": {"spec.storage": None},
    "a storage that is changed": {"spec.storage.path": "elsewhere"},
    "workers that are removed": {"spec.workersPerNode": None},
}


def test_the_storage_setting_when_deleted_may_change(server: Server) -> None:
    name = f"mind-{uuid.uuid4().hex[:8]}"
    live = server.create(changed({"metadata.name": name, "spec.storage": {"size": "1Gi"}}))
    storage = {"size": "1Gi", "whenDeleted": "Delete"}
    other = changed({"metadata.name": name, "spec.storage": storage})
    other["metadata"]["resourceVersion"] = live["metadata"]["resourceVersion"]
    assert server.replace(other)["spec"]["storage"] == storage


@pytest.mark.parametrize("changes", FIXED.values(), ids=FIXED)
def test_fixed_fields_cannot_change(changes: dict[str, Any], server: Server) -> None:
    name = f"fixed-{uuid.uuid4().hex[:8]}"
    live = server.create(changed({"metadata.name": name}))
    other = changed(
        {"metadata.name": name}
        | {path: "null" if value is None else value for path, value in changes.items()}
    )
    other["metadata"]["resourceVersion"] = live["metadata"]["resourceVersion"]
    with pytest.raises(ApiError) as refused:
        server.replace(other)
    section = next(iter(changes)).split(".")[1]
    said = f"spec.{section}: Forbidden: cannot be changed; "
    if "spec.script" in changes:
        said = "spec: Forbidden: training and script cannot replace one another; "
    assert said in str(refused.value) and "Make a new TrainingRun" in str(refused.value)


def test_a_run_that_was_refused_before_its_start_may_change_as_a_whole(
    server: Server,
) -> None:
    def refuse(**further: str) -> None:
        body = {
            "apiVersion": f"{GROUP}/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "refused"},
        }
        body["status"] = {"reason": INVALID_SPEC, **further}
        server.api.apply(f"{server.path}/refused/status", body, manager="test")

    server.apply(
        changed({"metadata.name": "refused", "spec.training.schedule.warmup": "150%"})
    )
    refuse()
    corrected = {"metadata.name": "refused", "spec.image": "example.org/other"}
    assert server.apply(changed(corrected | {"spec.training.optimizer.learningRate": 1}))[
        "spec"
    ]["image"]
    refuse(recipeHash="ab")
    with pytest.raises(ApiError, match=r"spec\.training: Forbidden: cannot be changed"):
        server.apply(changed(corrected | {"spec.training.optimizer.learningRate": 2}))


MUTABLE = {
    "spec.training.skipSteps": [7],
    "spec.training.onNonFinite": {"skip": 3},
    "spec.training.stop": {"afterStep": 90},
    "spec.training.overrides": [{"fromStep": 50, "learningRate": 1e-4, "clipNorm": 0.5}],
    "spec.training.checkpoint": {"every": {"steps": 7}, "keep": 1},
    "spec.training.evaluation": None,
    "spec.training.initFrom": {"path": "/other"},
    "spec.training.runtime": {"compile": "off", "precision": "bf16-autocast"},
    "spec.training.logging": {"every": {"steps": 1}},
    "spec.training.metrics": {"port": 9000},
    "spec.training.data.preparedDirectory": "/elsewhere",
    "spec.training.horizon": {"tokens": "40M"},
    "spec.suspend": True,
    "spec.nodes": {"min": 1, "max": 8},
    "spec.resources": {"limits": {"memory": "8Gi"}},
    "spec.template": {"nodeSelector": {"zone": "a"}},
    "spec.failurePolicy.maxFailuresWithoutProgress": 9,
    "spec.activeDeadlineSeconds": 100,
    "spec.ttlSecondsAfterFinished": 100,
    "spec.ttlDeletes": "Run",
    "spec.restartNonce": "again",
    "spec.imagePullPolicy": "Always",
}


def test_operational_fields_may_change(server: Server) -> None:
    run = changed({"metadata.name": "operational"})
    server.apply(run)
    changes = {path: "null" if value is None else value for path, value in MUTABLE.items()}
    assert (
        server.apply(changed({"metadata.name": "operational"} | changes))["metadata"][
            "generation"
        ]
        == 2
    )


def test_a_null_counts_as_omitted_and_a_null_of_a_required_field_is_refused(
    server: Server,
) -> None:
    run = changed({})
    run["spec"]["workersPerNode"] = None
    run["spec"]["training"]["schedule"]["decay"] = None
    assert server.refusal(run) is None
    run["spec"]["training"]["optimizer"]["learningRate"] = None
    assert "spec.training.optimizer.learningRate" in str(server.refusal(run))


def test_an_old_object_that_a_newer_rule_would_refuse_can_still_be_suspended(
    server: Server,
) -> None:
    loose, strict = definition(), definition()
    properties = loose["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"][
        "spec"
    ]["properties"]
    del properties["nodes"]["x-kubernetes-validations"]
    run = changed({"metadata.name": "older", "spec.nodes": {"min": 3, "max": 2}})
    try:
        server.api.apply(f"{DEFINITIONS}/{NAME}", loose, manager="test")
        _until(lambda: server.refusal(run) is None)
        server.apply(run)
    finally:
        server.api.apply(f"{DEFINITIONS}/{NAME}", strict, manager="test")
    _until(
        lambda: server.refusal(changed({"spec.nodes": {"min": 3, "max": 2}})) is not None
    )
    run["spec"]["suspend"] = True
    assert server.apply(run)["spec"]["suspend"] is True


def _until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.2)
    raise AssertionError("the API server has not taken the schema in")


def test_a_server_that_budgets_for_the_longest_texts_accepts_the_definition(
    server: Server,
) -> None:
    # Before 1.34, the length of an int-or-string counts as three megabytes in the budget of rules, whatever
    # its maxLength.
    older = copy.deepcopy(definition())
    older["metadata"]["name"] = f"older{NAME}"
    older["spec"]["names"] = {
        "plural": "oldertrainingruns",
        "singular": "oldertrainingrun",
        "kind": "OlderRun",
    }
    without_lengths(older)
    created = server.api.create(f"{DEFINITIONS}?dryRun=All", older)
    assert created["metadata"]["name"] == f"older{NAME}"


def without_lengths(node: Any) -> None:
    if isinstance(node, dict):
        if node.get("x-kubernetes-int-or-string"):
            node.pop("maxLength", None)
        for item in node.values():
            without_lengths(item)
    elif isinstance(node, list):
        for item in node:
            without_lengths(item)


UNSEEN: Object = {"observedGeneration": -1}
"""The status of a run before the first status of its operator."""
STATUS: Object = {
    "observedGeneration": 1,
    "phase": "Running",
    "reason": "Training",
    "message": "Four nodes train.",
    "nodes": {"summary": "3/4", "min": 2, "max": 4, "ready": 3, "running": 3},
    "progress": {
        "step": 1200,
        "totalSteps": 20000,
        "summary": "1200/20000",
        "loss": "2.413",
        "tokensPerSecond": "41.2k",
        "eta": "5h12m",
        "updatedAt": "2026-01-01T00:00:00Z",
    },
    "checkpoint": {"step": 1200},
    "restarts": {"total": 2, "byCause": {"NodeLost": 2}},
    "usage": {"podHours": "20.5", "gpuHours": "14.2", "waste": "3.1%"},
    "conditions": [
        {
            "type": "Ready",
            "status": "True",
            "reason": "Training",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
    ],
}


def test_kubectl_get_shows_the_status(server: Server) -> None:
    server.apply(changed({"metadata.name": "columns"}))
    body = {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": "columns"},
        "status": STATUS,
    }
    server.api.apply(f"{server.path}/columns/status", body, manager="test")
    heads, cells = server.kubectl("get", "truntest", "columns").splitlines()
    assert heads.split() == [
        "NAME",
        "PHASE",
        "NODES",
        "STEP",
        "LOSS",
        "TOK/S",
        "ETA",
        "CHECKPOINT",
        "RESTARTS",
        "AGE",
    ]
    assert cells.split()[:9] == [
        "columns",
        "Running",
        "3/4",
        "1200/20000",
        "2.413",
        "41.2k",
        "5h12m",
        "1200",
        "2",
    ]
    wide = server.kubectl("get", "truntest", "columns", "-o", "wide")
    heads, cells = wide.splitlines()
    assert heads.split()[10:] == [
        "GENERATION",
        "POD-HOURS",
        "GPU-HOURS",
        "WASTE",
        "REASON",
        "MESSAGE",
    ]
    assert cells.split()[-7:] == [
        "20.5",
        "14.2",
        "3.1%",
        "Training",
        "Four",
        "nodes",
        "train.",
    ]


def test_kubectl_explains_every_field(server: Server) -> None:
    assert "Peak learning rate. (number, above 0, at most 10; required)" in server.explain(
        "spec.training.optimizer.learningRate"
    )
    assert "Maximum number of nodes that train. Default: `min`." in server.explain(
        "spec.nodes.max"
    )
    assert "Training loss of the newest step" in server.explain("status.progress.loss")
    fields = re.findall(
        r"^ +(\S+)\t", server.explain("", "--recursive"), flags=re.MULTILINE
    )
    assert {
        "globalBatchSize",
        "claimName",
        "whenUnsatisfiable",
        "lastTransitionTime",
    } <= set(fields)


def test_users_cannot_write_the_status_with_the_object(server: Server) -> None:
    created = server.create(changed({"metadata.name": "mine"}) | {"status": STATUS})
    assert created.get("status", UNSEEN) == UNSEEN


def test_a_run_without_an_operator_has_a_default_status_that_tools_wait_for(
    server: Server,
) -> None:
    server.apply(changed({"metadata.name": "unseen"}))
    found = server.api.get(f"{server.path}/unseen")
    assert found["status"] == UNSEEN

    # A status is written as a whole: nothing of the default remains.
    body = {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": "unseen"},
        "status": STATUS,
    }
    server.api.apply(f"{server.path}/unseen/status", body, manager="test")
    assert server.api.get(f"{server.path}/unseen")["status"] == STATUS
