"""Whole plans compared with YAML in tests/golden, and invariants of every planned pod."""

import argparse
import copy
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pod_security import violations
from simulated_run import CONFIG, START, Simulation, make_run

from evergrad_coordinator.__main__ import find_problems, parse_arguments
from evergrad_operator.core.decision import Action
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.names import Reason
from evergrad_operator.core.objects.times import format_time
from evergrad_operator.core.observe.observe import VolumeRecord
from evergrad_operator.core.plan.claim import KEPT_RECORDS, StaleRecords, find_stale_records
from evergrad_operator.core.plan.common import escape
from evergrad_trainer.commands import node as node_command

GOLDEN = Path(__file__).parents[2] / "golden"

FULL_TEMPLATE: dict[str, Any] = {
    "labels": {"team": "research"},
    "annotations": {"note": "x"},
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}
    },
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "volumes": [
        {"name": "cache", "emptyDir": {"sizeLimit": "1Gi"}},
        {
            "name": "data",
            "persistentVolumeClaim": {"claimName": "corpus", "readOnly": True},
        },
        {"name": "token", "secret": {"secretName": "hub"}},
    ],
    "volumeMounts": [
        {"name": "data", "mountPath": "/data", "readOnly": True},
        {"name": "cache", "mountPath": "/tmp/cache"},
    ],
    "env": [
        {
            "name": "HF_TOKEN",
            "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}},
        },
        {"name": "HOME", "value": "/data"},
    ],
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "schedulerName": "scheduler-plugins-scheduler",
    "imagePullSecrets": [{"name": "registry"}],
    "terminationGracePeriodSeconds": 120,
}


def minimal() -> Simulation:
    return Simulation(make_run(nodes={"min": 1, "max": 1}))


def full() -> Simulation:
    run = make_run(
        nodes={"min": 2, "max": 3},
        workersPerNode=2,
        storage={"claimName": "shared", "path": "runs/first"},
        image="registry.example/team/trainer@sha256:" + "0" * 64,
        imagePullPolicy="Always",
        resources={
            "requests": {"cpu": "2"},
            "limits": {"memory": "4Gi", "nvidia.com/gpu": "2"},
        },
        template=FULL_TEMPLATE,
        failurePolicy={"maxFailuresWithoutProgress": 5},
    )
    run["metadata"]["labels"] = {
        "kueue.x-k8s.io/queue-name": "gpus",
        "kueue.x-k8s.io/priority-class": "high",
        "app.kubernetes.io/instance": "not-passed-on",
    }
    config = Config(
        trainer_image=CONFIG.trainer_image,
        operator_image=CONFIG.operator_image,
        image_pull_secrets=("everywhere",),
        operator_namespace="evergrad-system",
        shared_memory_size="2Gi",
    )
    world = Simulation(run, config=config)
    annotations = {
        "note": "the user's",
        "run.evergrad.dev/other": '{"path":"runs/other","recipe":"r","epoch":3}',
    }
    world.children["PersistentVolumeClaim", "shared"] = {
        "metadata": {"name": "shared", "annotations": annotations},
        "status": {"phase": "Bound"},
    }
    return world


def script() -> Simulation:
    run = make_run(
        nodes={"min": 2, "max": 2},
        script={
            "command": ["train.py", "--note", "$(rm -rf /); `id` 'x'"],
            "gracePeriodSeconds": 120,
            "metrics": {"port": 9100},
        },
        training=None,
    )
    return Simulation(
        run,
        config=Config(CONFIG.trainer_image, CONFIG.operator_image, network_policies=False),
    )


def annotated() -> Simulation:
    world = minimal()
    world.config = dataclasses.replace(
        CONFIG, scrape_annotations=True, metrics_from=("monitoring",)
    )
    return world


WORLDS = {"minimal": minimal, "full": full, "script": script, "annotated": annotated}


@pytest.mark.parametrize("name", list(WORLDS))
def test_a_whole_plan_matches_its_golden_file(name: str) -> None:
    # To accept a change: GOLDEN=write make test PYTEST=tests/unit/operator/test_operator_plan.py
    world = WORLDS[name]()
    world.reconcile()
    plan = world.plan
    world.start()
    world.train()
    world.reconcile()
    built = {
        "claim": plan.claim,
        "claimManager": plan.claim_manager,
        "token": plan.token,
        "apply": [*plan.apply, *world.plan.apply],
        "delete": [],
        # A node above the minimum of a queued run is created in the second pass.
        "create": [*plan.create, *world.plan.create],
    }
    built = json.loads(json.dumps(built))
    path = GOLDEN / f"plan_{name}.yaml"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(
            "# What the operator makes of a run; written by test_operator_plan.py.\n"
            + yaml.safe_dump(built, sort_keys=False)
        )
    assert built == yaml.safe_load(path.read_text())


def test_the_pod_of_an_evaluation_matches_its_golden_file() -> None:
    # To accept a change: as above.
    world = full()
    training = world.raw["spec"]["training"]
    training["evaluation"] = {"sources": training["evaluation"]["sources"]}
    resources = {
        "requests": {"cpu": "1"},
        "limits": {"memory": "2Gi", "nvidia.com/gpu": "1"},
    }
    world.set_spec(evaluation={"resources": resources})
    world.reconcile()
    world.start()
    world.train(checkpointStep=10)
    world.reconcile()
    planned = [
        dict(one) for one in world.plan.create if "-evaluate-" in one["metadata"]["name"]
    ]
    built = json.loads(json.dumps(planned))
    path = GOLDEN / "plan_evaluation.yaml"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(
            "# The pod that evaluates a checkpoint; written by test_operator_plan.py.\n"
            + yaml.safe_dump(built, sort_keys=False)
        )
    assert built == yaml.safe_load(path.read_text())
    (pod,) = built
    assert violations(pod) == []


@pytest.mark.parametrize("name", list(WORLDS))
def test_every_planned_pod_is_allowed_by_the_restricted_pod_security_standard(
    name: str,
) -> None:
    world = WORLDS[name]()
    world.reconcile()
    assert len(world.plan.create) >= 2
    for pod in world.plan.create:
        assert violations(pod) == []
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["enableServiceLinks"] is False
        assert "serviceAccountName" not in pod["spec"]
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] == 10001


def test_the_check_of_restricted_pods_detects_violations() -> None:
    world = minimal()
    world.reconcile()
    pod = json.loads(json.dumps(world.plan.create[1]))
    for change, said in [
        (lambda spec: spec.update(hostNetwork=True), "hostNetwork"),
        (
            lambda spec: spec["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
            "volume x",
        ),
        (lambda spec: spec["securityContext"].pop("runAsNonRoot"), "runAsNonRoot"),
        (lambda spec: spec["securityContext"].pop("seccompProfile"), "seccompProfile"),
        (
            lambda spec: spec["containers"][0]["securityContext"].pop(
                "allowPrivilegeEscalation"
            ),
            "allowPrivilegeEscalation",
        ),
        (
            lambda spec: spec["containers"][0]["securityContext"].update(capabilities={}),
            "capabilities",
        ),
        (lambda spec: spec["containers"][0]["ports"][0].update(hostPort=1), "hostPort"),
    ]:
        broken = copy.deepcopy(pod)
        change(broken["spec"])
        assert any(said in text for text in violations(broken)), said


def test_coordinator_arguments_are_accepted_by_the_coordinator() -> None:
    for build in WORLDS.values():
        world = build()
        world.reconcile()
        arguments = world.plan.create[0]["spec"]["containers"][0]["args"]
        options = parse_arguments(arguments)
        assert find_problems(options) == []
        nodes = world.raw["spec"]["nodes"]
        # A queue admits the minimum first, and the start waits for exactly these nodes.
        is_queued = "kueue.x-k8s.io/queue-name" in world.raw["metadata"].get("labels", {})
        assert (options.min, options.max, options.epoch) == (nodes["min"], nodes["max"], 0)
        assert options.expect == nodes["min" if is_queued else "max"]
        assert (options.port, options.status_port, options.run) == (29400, 29401, "docs-lm")
        assert options.recovery == ("fresh" if build is script else "in-process")


def test_node_arguments_are_accepted_by_the_trainer() -> None:
    for build in WORLDS.values():
        world = build()
        world.reconcile()
        container = world.plan.create[1]["spec"]["containers"][0]
        assert container["command"] == ["evergrad"]
        parser = argparse.ArgumentParser()
        node_command.add_arguments(parser)
        assert container["args"][0] == node_command.NAME
        options = parser.parse_args(container["args"][1:])
        assert (options.join, options.node) == ("docs-lm-coordinator.team.svc:29400", 0)
        assert str(options.run_directory).startswith("/volume/")
        assert str(options.manifest) == "/etc/evergrad/run/trainingrun.json"
        grace = world.plan.create[1]["spec"]["terminationGracePeriodSeconds"]
        assert grace == options.grace + 5


def test_nodes_read_the_manifest_without_the_fields_that_only_concern_the_operator() -> (
    None
):
    world = full()
    world.reconcile()
    config = next(child for child in world.plan.apply if child["kind"] == "ConfigMap")
    manifest = json.loads(config["data"]["trainingrun.json"])
    assert manifest["metadata"] == {"name": "docs-lm"}
    assert sorted(manifest["spec"]) == [
        "failurePolicy",
        "nodes",
        "training",
        "workersPerNode",
    ]
    assert manifest["spec"]["training"]["metrics"]["port"] == 29402
    world = script()
    world.reconcile()
    config = next(child for child in world.plan.apply if child["kind"] == "ConfigMap")
    told = json.loads(config["data"]["trainingrun.json"])["spec"]["script"]
    assert told["command"] == ["train.py", "--note", "$(rm -rf /); `id` 'x'"]


def test_no_user_text_is_in_a_pod_command_or_becomes_a_reference() -> None:
    world = script()
    world.reconcile()
    assert "rm -rf" not in json.dumps(world.plan.create)
    assert escape("runs/$(EVERGRAD_POD_IP)") == "runs/$$(EVERGRAD_POD_IP)"
    world = Simulation(make_run(storage={"path": "runs/$(HF_TOKEN)"}))
    assert world.reconcile().reason == "InvalidSpec"
    assert world.plan.create == ()


def test_secrets_appear_only_as_references() -> None:
    world = full()
    world.reconcile()
    variables = {
        item["name"]: item
        for pod in world.plan.create
        for item in pod["spec"]["containers"][0].get("env", ())
    }
    assert variables["HF_TOKEN"] == {
        "name": "HF_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}},
    }
    assert variables["HOME"] == {"name": "HOME", "value": "/data"}, (
        "the user's own value counts"
    )


def test_labels_of_the_run_are_passed_on_by_an_allow_list_only() -> None:
    world = full()
    world.reconcile()
    for pod in world.plan.create:
        assert "app.kubernetes.io/instance" not in pod["metadata"]["labels"]
    node = world.plan.create[1]["metadata"]["labels"]
    assert node["kueue.x-k8s.io/queue-name"] == "gpus"
    assert node["team"] == "research"
    assert node["scheduling.x-k8s.io/pod-group"] == "docs-lm"
    assert "kueue.x-k8s.io/queue-name" not in world.plan.create[0]["metadata"]["labels"], (
        "the coordinator is not queued"
    )


def test_a_queue_admits_the_smallest_group_together_and_each_further_node_alone() -> None:
    world = full()
    world.reconcile()
    first = world.plan.create[1:]
    world.start()
    world.train()
    world.reconcile()
    pods = [*first, *world.plan.create]
    labels = [pod["metadata"]["labels"] for pod in pods]
    annotations = [pod["metadata"]["annotations"] for pod in pods]
    group = {
        "kueue.x-k8s.io/pod-group-total-count": "2",
        # Without it Kueue keeps the quota of a group that has failed, is suspended or is deleted.
        "kueue.x-k8s.io/retriable-in-group": "false",
        "kueue.x-k8s.io/role-hash": "node",
        "kueue.x-k8s.io/pod-group-pod-index-label": "evergrad.dev/index",
        "kueue.x-k8s.io/safe-to-forcefully-delete": "true",
    }
    found = [{key: one[key] for key in group if key in one} for one in annotations]
    assert found == [group, group, {}]
    key = "kueue.x-k8s.io/pod-group-name"
    assert [one.get(key) for one in labels] == ["docs-lm-uid-d-0", "docs-lm-uid-d-0", None]
    # The size of a group is fixed while one of its pods lives, so changed bounds do not affect it.
    world.settle()
    world.set_spec(nodes={"min": 1, "max": 3})
    world.age(100)
    world.vanish("docs-lm-1-0")
    world.reconcile()
    (pod,) = world.plan.create
    assert pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "2"
    assert pod["metadata"]["labels"][key] == "docs-lm-uid-d-0"
    # A resumption creates a new one.
    world.set_spec(suspend=True)
    for _ in range(4):
        world.reconcile()
        world.leave()
    world.set_spec(suspend=False, nodes={"min": 3, "max": 3})
    world.reconcile()
    nodes = [pod["metadata"] for pod in world.plan.create[1:]]
    assert {one["labels"][key] for one in nodes} == {"docs-lm-uid-d-1"}
    assert [
        one["annotations"]["kueue.x-k8s.io/pod-group-total-count"] for one in nodes
    ] == ["3"] * 3


def test_nodes_lost_with_a_separately_admitted_node_form_a_group_of_their_own() -> None:
    world = full()
    world.set_spec(nodes={"min": 3, "max": 3})
    world.run()
    key = "kueue.x-k8s.io/pod-group-name"
    del world.pods["docs-lm-0-0"]["metadata"]["labels"][key]
    world.age(100)
    for name in ("docs-lm-1-0", "docs-lm-2-0"):
        world.end(name, 137)
    world.reconcile()
    made = [pod["metadata"] for pod in world.plan.create]
    assert [one["labels"][key] for one in made] == ["docs-lm-uid-d-1"] * 2
    annotations = [one["annotations"] for one in made]
    assert [one["kueue.x-k8s.io/pod-group-total-count"] for one in annotations] == ["2"] * 2
    # Kueue refuses an index that is not below the size.
    assert all("kueue.x-k8s.io/pod-group-pod-index-label" not in one for one in annotations)


def test_user_tolerations_for_unreachable_nodes_replace_the_defaults() -> None:
    patient = [
        {
            "key": "node.kubernetes.io/unreachable",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": 600,
        }
    ]
    world = Simulation(make_run(template={"tolerations": patient}))
    world.reconcile()
    found = world.plan.create[1]["spec"]["tolerations"]
    assert [(one["key"], one["tolerationSeconds"]) for one in found] == [
        ("node.kubernetes.io/unreachable", 600),
        ("node.kubernetes.io/not-ready", 5),
    ]
    world = Simulation(make_run(template={"tolerations": [{"operator": "Exists"}]}))
    world.reconcile()
    assert world.plan.create[1]["spec"]["tolerations"] == [{"operator": "Exists"}]


def test_children_have_an_owner_and_the_volume_has_none() -> None:
    world = minimal()
    world.reconcile()
    assert world.plan.token is not None
    for child in (world.plan.token, *world.plan.apply, *world.plan.create):
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (
            "uid-docs-lm",
            True,
            True,
        )
        assert child["metadata"]["namespace"] == "team"
        assert child["metadata"]["labels"]["evergrad.dev/run"] == "docs-lm"
    assert world.plan.claim is not None
    assert "ownerReferences" not in world.plan.claim["metadata"]


def with_volume(
    *,
    age: float = 5,
    users: frozenset[str] | None = frozenset({"docs-lm"}),
    annotations: Mapping[str, str] | None = None,
    **storage: Any,
) -> Simulation:
    """Return a run whose claim was created ``age`` seconds after it, as a pass observes it."""
    world = Simulation(make_run(storage={"size": "1Gi", **storage}))
    world.users = users
    world.reconcile()
    metadata = world.children["PersistentVolumeClaim", "docs-lm"]["metadata"]
    metadata["creationTimestamp"] = format_time(START - 10 + age)
    metadata["annotations"] |= annotations or {}
    world.reconcile()
    return world


def test_a_claim_to_be_deleted_with_its_run_is_owned_once_observed_as_part_of_the_run() -> (
    None
):
    world = with_volume(whenDeleted="Delete")
    claim = world.plan.claim
    assert claim is not None
    (owner,) = claim["metadata"]["ownerReferences"]
    assert owner["uid"] == "uid-docs-lm"
    assert claim["metadata"]["annotations"]["evergrad.dev/deleted-with"] == "uid-docs-lm"
    assert "run.evergrad.dev/docs-lm" in claim["metadata"]["annotations"], (
        "its record stays"
    )

    # One write, and no further one.
    assert world.reconcile() and world.plan.claim is None
    # The setting is changed: the next apply omits the owner.
    world.set_spec(storage={"size": "1Gi", "whenDeleted": "Retain"})
    world.reconcile()
    assert world.plan.claim is not None
    assert "ownerReferences" not in world.plan.claim["metadata"]


def test_a_claim_that_must_stay_loses_its_owner_while_the_run_is_held_too() -> None:
    world = with_volume(whenDeleted="Delete")
    world.set_spec(template={"nodeSelector": {"bad key!": "x"}})
    held = world.reconcile()
    assert (held.action, held.reason) == (Action.HOLD, Reason.INVALID_SPEC)
    assert world.plan.claim is None, "nothing else is changed on the volume"

    # Data of another run must not be deleted with this one, and the setting may change.
    readers, changed = copy.deepcopy(world), copy.deepcopy(world)
    readers.users = frozenset({"docs-lm", "reader"})
    changed.set_spec(storage={"size": "1Gi", "whenDeleted": "Retain"})
    for given_up in (readers, changed):
        assert given_up.reconcile().action == Action.HOLD
        assert given_up.plan.claim is not None
        metadata = given_up.plan.claim["metadata"]
        assert "ownerReferences" not in metadata
        assert sorted(metadata["annotations"]) == [
            "evergrad.dev/made-for",
            "run.evergrad.dev/docs-lm",
        ]

    # The garbage collector handles objects that are already being deleted.
    changed.raw["metadata"]["deletionTimestamp"] = format_time(START)
    assert changed.reconcile() and changed.plan.claim is None


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"whenDeleted": "Retain"},
        {"whenDeleted": "Delete", "annotations": {"evergrad.dev/made-for": "uid-old"}},
        {"whenDeleted": "Delete", "annotations": {"evergrad.dev/made-for": ""}},
        {"whenDeleted": "Delete", "users": None},
        {"whenDeleted": "Delete", "users": frozenset({"docs-lm", "reader"})},
        {
            "whenDeleted": "Delete",
            "annotations": {
                "run.evergrad.dev/old": '{"path":"old","recipe":"r","epoch":0}'
            },
        },
    ],
    ids=[
        "by default",
        "retained",
        "made for an earlier run of the name",
        "nobody says for whom it was made",
        "other runs are not known",
        "another run uses it",
        "another run's data are on it",
    ],
)
def test_a_claim_is_owned_by_its_run_only_on_request_and_if_it_holds_no_other_data(
    given: dict[str, Any],
) -> None:
    assert with_volume(**given).plan.claim is None


def record_of(run: str, created: float, *, is_complete: bool) -> VolumeRecord:
    return VolumeRecord(
        run, run, "r", 0, created_at=created, complete={} if is_complete else None
    )


def test_records_of_unfinished_runs_are_dropped_last_and_counted() -> None:
    world = with_volume()
    gone = [record_of("precious", 1, is_complete=False)]
    gone += [record_of(f"trial-{i}", 2 + i, is_complete=True) for i in range(KEPT_RECORDS)]
    seen = world.look()
    run, users, claim = seen.run, frozenset({"docs-lm"}), seen.claim
    assert claim is not None
    claim = dataclasses.replace(
        claim,
        records={one.run: one for one in gone},
        resource_version="7",
    )
    stale = find_stale_records(run, claim, users)
    # The oldest complete one is dropped, although the unfinished one is older.
    assert stale.annotations == ("run.evergrad.dev/trial-0",)
    assert stale.dropped_unfinished is None

    # If all are unfinished, the oldest are removed, and are added to those that were removed before.
    gone = [record_of(f"try-{i}", i, is_complete=False) for i in range(KEPT_RECORDS + 2)]
    claim = dataclasses.replace(
        claim, records={one.run: one for one in gone}, dropped_unfinished=3
    )
    assert find_stale_records(run, claim, users) == StaleRecords(
        ("run.evergrad.dev/try-1", "run.evergrad.dev/try-0"), 5, "7"
    )
    assert find_stale_records(run, claim, None).annotations == ()


def test_the_status_reports_whether_the_claim_is_deleted_with_the_run() -> None:
    world = with_volume(whenDeleted="Delete")
    assert world.status["volume"] == {"goesWithRun": True}
    world.users = frozenset({"docs-lm", "reader"})
    world.reconcile()
    # Until the claim has lost its owner, it is deleted with the run.
    assert world.status["volume"] == {"goesWithRun": True}
    claim = world.children["PersistentVolumeClaim", "docs-lm"]
    claim["metadata"]["annotations"].pop("evergrad.dev/deleted-with")
    world.reconcile()
    assert world.status["volume"] == {"goesWithRun": False}
    assert "volume" not in with_volume().status


def test_a_claim_that_an_earlier_release_created_and_owned_stays_owned() -> None:
    world = with_volume(whenDeleted="Delete")
    metadata = world.children["PersistentVolumeClaim", "docs-lm"]["metadata"]
    del metadata["annotations"]["evergrad.dev/made-for"]
    assert world.reconcile() and world.plan.claim is None
    assert world.status["volume"] == {"goesWithRun": True}


def test_a_claim_that_a_user_created_under_the_name_of_the_run_gets_only_the_record() -> (
    None
):
    world = with_volume(whenDeleted="Delete")
    metadata = world.children["PersistentVolumeClaim", "docs-lm"]["metadata"]
    metadata["labels"] = {"team": "x"}
    metadata["annotations"] = {}
    world.reconcile()
    assert world.plan.claim is not None
    assert "spec" not in world.plan.claim
    assert sorted(world.plan.claim["metadata"]) == ["annotations", "name", "namespace"]
    assert list(world.plan.claim["metadata"]["annotations"]) == ["run.evergrad.dev/docs-lm"]
    assert world.status["volume"] == {"goesWithRun": False}


def test_an_owner_that_a_user_has_set_on_a_claim_stays() -> None:
    world = with_volume()
    claim = world.children["PersistentVolumeClaim", "docs-lm"]
    claim["metadata"]["ownerReferences"] = [{"uid": "uid-docs-lm"}]
    world.reconcile()
    assert world.plan.claim is None


def test_an_existing_claim_gets_only_the_record_of_the_run() -> None:
    world = full()
    world.reconcile()
    claim = world.plan.claim
    assert claim is not None
    assert sorted(claim) == ["apiVersion", "kind", "metadata"]
    assert sorted(claim["metadata"]) == ["annotations", "name", "namespace"]
    assert list(claim["metadata"]["annotations"]) == ["run.evergrad.dev/docs-lm"]
    assert world.plan.claim_manager == "evergrad-operator-docs-lm"


def test_a_claim_that_an_earlier_run_left_is_used_unchanged() -> None:
    world = Simulation(make_run(storage={"size": "9Gi"}))
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}},
        "storageClassName": "old",
        "volumeName": "v",
    }
    world.children["PersistentVolumeClaim", "docs-lm"] = {
        "metadata": {
            "name": "docs-lm",
            "labels": {
                "evergrad.dev/run": "docs-lm",
                "app.kubernetes.io/managed-by": "evergrad",
            },
        },
        "spec": spec,
    }
    world.reconcile()
    assert world.plan.claim is not None
    assert world.plan.claim["spec"] == {
        key: value for key, value in spec.items() if key != "volumeName"
    }


@pytest.mark.parametrize(
    ("nodes", "storage", "config", "modes", "is_on_one_host"),
    [
        ((1, 1), {}, {}, ["ReadWriteOnce"], False),
        ((1, 2), {}, {}, ["ReadWriteMany"], False),
        ((1, 2), {"accessModes": ["ReadWriteOnce"]}, {}, ["ReadWriteOnce"], True),
        ((1, 1), {"accessModes": ["ReadWriteMany"]}, {}, ["ReadWriteMany"], False),
        ((2, 2), {}, {"storage_access_mode": "ReadWriteOnce"}, ["ReadWriteOnce"], True),
    ],
)
def test_a_volume_is_requested_for_as_many_hosts_as_the_run_has_nodes(
    nodes: tuple[int, int],
    storage: dict[str, Any],
    config: dict[str, str],
    modes: list[str],
    is_on_one_host: bool,
) -> None:
    run = make_run(
        nodes={"min": nodes[0], "max": nodes[1]}, storage={"size": "1Gi", **storage}
    )
    world = Simulation(run, config=dataclasses.replace(CONFIG, **config))
    world.reconcile()
    assert world.plan.claim is not None
    assert world.plan.claim["spec"]["accessModes"] == modes
    pods = [
        pod
        for pod in world.plan.create
        if pod["metadata"]["labels"]["evergrad.dev/role"] == "node"
    ]
    assert len(pods) == nodes[1]
    for pod in pods:
        between = pod["spec"].get("affinity", {}).get("podAffinity", {})
        topologies = [
            term["topologyKey"]
            for term in between.get("requiredDuringSchedulingIgnoredDuringExecution", [])
        ]
        assert topologies == (["kubernetes.io/hostname"] if is_on_one_host else [])


@pytest.mark.parametrize(
    ("nodes", "fewest"),
    [((1, 1), None), ((1, 4), 1), ((2, 2), 1), ((2, 4), 2), ((4, 4), 3)],
)
def test_a_drain_leaves_the_smallest_group_or_one_node_less_without_spare_nodes(
    nodes: tuple[int, int], fewest: int | None
) -> None:
    world = Simulation(make_run(nodes={"min": nodes[0], "max": nodes[1]}))
    world.reconcile()
    world.start()
    world.reconcile()
    assert all(
        child["kind"] != "PodDisruptionBudget" for child in world.plan.apply
    )  # no group has formed yet
    world.train()
    world.reconcile()
    budgets = [
        child for child in world.plan.apply if child["kind"] == "PodDisruptionBudget"
    ]
    of_nodes = [
        one
        for one in budgets
        if one["spec"]["selector"]["matchLabels"]["evergrad.dev/role"] == "node"
    ]
    assert [budget["spec"]["minAvailable"] for budget in of_nodes] == (
        [] if fewest is None else [fewest]
    )


@pytest.mark.parametrize(
    ("changes", "pod", "node"),
    [
        ({}, 30, 25),
        ({"template": {"terminationGracePeriodSeconds": 300}}, 300, 295),
        (
            {"training": None, "script": {"command": ["a.py"], "gracePeriodSeconds": 60}},
            65,
            60,
        ),
        (
            {
                "training": None,
                "script": {"command": ["a.py"], "gracePeriodSeconds": 60},
                "template": {"terminationGracePeriodSeconds": 20},
            },
            65,
            60,
        ),
    ],
)
def test_the_grace_period_of_a_pod_exceeds_the_time_that_its_node_has_to_drain(
    changes: dict[str, Any], pod: int, node: int
) -> None:
    world = Simulation(make_run(**changes))
    world.reconcile()
    spec = next(
        one for one in world.plan.create if one["metadata"]["name"] == "docs-lm-0-0"
    )["spec"]
    arguments = spec["containers"][0]["args"]
    assert spec["terminationGracePeriodSeconds"] == pod
    assert arguments[arguments.index("--grace") + 1] == str(node)


def test_children_that_are_disabled_or_no_longer_needed_are_deleted() -> None:
    world = Simulation().run()
    world.config = Config(
        CONFIG.trainer_image,
        CONFIG.operator_image,
        network_policies=False,
        disruption_budgets=False,
    )
    world.reconcile()
    assert {(deletion.kind, deletion.name) for deletion in world.plan.delete} == {
        ("PodDisruptionBudget", "docs-lm"),
        ("PodDisruptionBudget", "docs-lm.coordinator"),
        ("NetworkPolicy", "docs-lm"),
    }


def test_a_child_that_was_changed_is_applied_again() -> None:
    world = Simulation().run()
    world.children["Service", "docs-lm-coordinator"]["metadata"]["annotations"][
        "evergrad.dev/applied-hash"
    ] = "another"
    world.reconcile()
    assert [child["kind"] for child in world.plan.apply] == ["Service"]
    del world.children["ConfigMap", "docs-lm-config"]
    world.reconcile()
    assert [child["kind"] for child in world.plan.apply] == ["ConfigMap"]


def test_names_of_children_fit_for_long_run_names_and_large_numbers() -> None:
    world = Simulation(make_run("x" * 45, nodes={"min": 1, "max": 1024}))
    world.reconcile()
    for child in (*world.plan.apply, *world.plan.create):
        assert len(child["metadata"]["name"]) <= 59, "room for an attempt of five digits"
    assert len(world.plan.create) == 1025


def test_a_metrics_port_set_by_the_user_is_kept_and_a_random_port_is_not_declared() -> None:
    world = script()
    world.reconcile()
    assert world.plan.create[1]["spec"]["containers"][0]["ports"] == [
        {"name": "metrics", "containerPort": 9100, "protocol": "TCP"}
    ]
    training = {**make_run()["spec"]["training"], "metrics": {"port": 0}}
    world = Simulation(make_run(training=training))
    world.reconcile()
    assert "ports" not in world.plan.create[1]["spec"]["containers"][0]


def test_the_network_policy_admits_only_the_run_its_operator_and_its_metrics() -> None:
    world = full()
    world.reconcile()
    policy = next(child for child in world.plan.apply if child["kind"] == "NetworkPolicy")[
        "spec"
    ]
    assert policy["policyTypes"] == ["Ingress"]
    own, operator, metrics = policy["ingress"]
    assert own == {
        "from": [{"podSelector": {"matchLabels": {"evergrad.dev/run": "docs-lm"}}}]
    }
    assert operator["from"][0]["namespaceSelector"] == {
        "matchLabels": {"kubernetes.io/metadata.name": "evergrad-system"}
    }
    assert operator["ports"] == [{"port": 29401, "protocol": "TCP"}]
    assert metrics == {"ports": [{"port": 29402, "protocol": "TCP"}]}


def test_only_the_named_scraping_namespaces_reach_nodes_and_coordinator() -> None:
    world = Simulation(
        make_run(),
        config=dataclasses.replace(CONFIG, metrics_from=("monitoring", "prometheus")),
    )
    world.reconcile()
    policy = next(child for child in world.plan.apply if child["kind"] == "NetworkPolicy")[
        "spec"
    ]
    *_, metrics = policy["ingress"]
    [peer] = metrics["from"]
    assert peer["namespaceSelector"]["matchExpressions"] == [
        {
            "key": "kubernetes.io/metadata.name",
            "operator": "In",
            "values": ["monitoring", "prometheus"],
        }
    ]
    assert [one["port"] for one in metrics["ports"]] == [29402, 29401]
    assert all("from" in rule for rule in policy["ingress"])


def test_a_replaced_coordinator_expects_the_nodes_that_exist() -> None:
    world = Simulation(make_run(nodes={"min": 1, "max": 3})).run()
    world.age(100)
    world.vanish("docs-lm-coordinator-0")
    world.vanish("docs-lm-2-0")
    world.reconcile()
    arguments = world.plan.create[0]["spec"]["containers"][0]["args"]
    assert arguments[arguments.index("--expect") + 1] == "2"


def test_a_resumed_run_creates_all_its_pods_in_the_pass_that_observes_it() -> None:
    world = Simulation().run()
    world.train(40, checkpointStep=40)
    world.settle()
    world.set_spec(suspend=True)
    for _ in range(4):
        world.reconcile()
        world.leave()
    assert world.settle().phase == names.Phase.SUSPENDED
    world.progress = None
    world.set_spec(suspend=False)
    world.reconcile()
    assert [pod["metadata"]["name"] for pod in world.plan.create] == [
        "docs-lm-coordinator-1",
        "docs-lm-0-1",
        "docs-lm-1-1",
        "docs-lm-2-1",
    ]
    arguments = world.plan.create[0]["spec"]["containers"][0]["args"]
    assert "--nothing-runs" in arguments, "no lease of a group of before is waited for"
    assert arguments[arguments.index("--expect") + 1] == "3"


@pytest.mark.parametrize(("is_script", "expected"), [(False, "2"), (True, "3")])
def test_the_start_does_not_wait_for_elastic_nodes_that_a_queue_admits_later(
    is_script: bool, expected: str
) -> None:
    changes: dict[str, Any] = {"script": {"command": ["train.py"]}} if is_script else {}
    run = make_run(**changes)
    if is_script:
        del run["spec"]["training"]
    run["metadata"]["labels"] = {names.LABEL_QUEUE: "team"}
    world = Simulation(run)
    world.reconcile()
    coordinator, *nodes = world.plan.create
    assert [pod["metadata"]["name"] for pod in nodes] == ["docs-lm-0-0", "docs-lm-1-0"]
    arguments = coordinator["spec"]["containers"][0]["args"]
    # Nodes of a script restart when another node joins, so they wait for it.
    assert arguments[arguments.index("--expect") + 1] == expected


# ---- placement of the coordinator
# ---------------------------------------------------------------------------


def coordinator_of(template: dict[str, Any]) -> dict[str, Any]:
    """Return the coordinator's pod of a run with this template."""
    world = Simulation(make_run(template=template))
    world.reconcile()
    return dict(world.plan.create[0])


def test_the_coordinator_may_run_where_nodes_may_run_and_has_their_priority() -> None:
    hosts = {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": []}]
        }
    }
    taint = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
    spec = coordinator_of(
        {
            "nodeSelector": {"kubernetes.io/arch": "arm64"},
            "tolerations": [taint],
            "affinity": {"nodeAffinity": hosts},
            "priorityClassName": "high",
        }
    )["spec"]
    assert spec["nodeSelector"] == {"kubernetes.io/arch": "arm64"}
    assert taint in spec["tolerations"]
    assert spec["affinity"] == {"nodeAffinity": hosts}
    assert spec["priorityClassName"] == "high"


def test_the_coordinator_has_no_anti_affinity_and_no_accelerator_runtime() -> None:
    spec = coordinator_of(
        {
            "affinity": {
                "podAntiAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "topologyKey": "kubernetes.io/hostname",
                            "labelSelector": {"matchLabels": {"app": "lm"}},
                        }
                    ]
                }
            },
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
            ],
            "runtimeClassName": "nvidia",
            "schedulerName": "volcano",
        }
    )["spec"]
    assert not {
        "affinity",
        "topologySpreadConstraints",
        "runtimeClassName",
        "schedulerName",
    } & set(spec)


def test_the_coordinator_keeps_sidecar_opt_outs_and_do_not_disrupt_annotations() -> None:
    metadata = coordinator_of(
        {
            "labels": {"sidecar.istio.io/inject": "false", "team": "research"},
            "annotations": {
                "linkerd.io/inject": "disabled",
                "karpenter.sh/do-not-disrupt": "true",
            },
        }
    )["metadata"]
    assert (
        metadata["labels"].items()
        >= {"sidecar.istio.io/inject": "false", "team": "research"}.items()
    )
    assert (
        metadata["annotations"].items()
        >= {"linkerd.io/inject": "disabled", "karpenter.sh/do-not-disrupt": "true"}.items()
    )
    assert metadata["labels"]["evergrad.dev/role"] == "coordinator"


@pytest.mark.parametrize(
    "kind", ["podAntiAffinity", "podAffinity", "topologySpreadConstraints"]
)
def test_constraints_between_nodes_ignore_the_coordinator(
    kind: str,
) -> None:
    selector = {
        "matchLabels": {"app": "lm"},
        "matchExpressions": [{"key": "tier", "operator": "Exists"}],
    }
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": selector,
        "matchLabelKeys": ["round"],
    }
    preferred = [{"weight": 1, "podAffinityTerm": term}]
    chosen: dict[str, Any] = {
        "affinity": {kind: {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    }
    if kind == "topologySpreadConstraints":
        chosen = {kind: [{"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule", **term}]}
    labels = {"app": "lm", "tier": "a", "round": "1", "team": "research"}
    found = coordinator_of({"labels": labels, **chosen})["metadata"]["labels"]
    assert {key: found[key] for key in labels if key in found} == {"team": "research"}


def test_template_requests_for_training_pods_do_not_apply_to_the_coordinator() -> None:
    metadata = coordinator_of(
        {
            "labels": {
                "kueue.x-k8s.io/queue-name": "gpus",
                "scheduling.x-k8s.io/pod-group": "gang",
            },
            "annotations": {
                "k8s.v1.cni.cncf.io/networks": "rdma",
                "prometheus.io/port": "29402",
                "container.apparmor.security.beta.kubernetes.io/trainer": "runtime/default",
            },
        }
    )["metadata"]
    assert all(
        key.startswith(("evergrad.dev/", "app.kubernetes.io/"))
        for key in metadata["labels"]
    )
    assert list(metadata["annotations"]) == ["evergrad.dev/restart"]


def test_pods_are_annotated_for_prometheus_if_the_installation_requests_it() -> None:
    def scraped(spec: Mapping[str, Any], **changes: Any) -> dict[str, dict[str, str]]:
        world = Simulation(make_run(nodes={"min": 1, "max": 1}, **spec))
        world.config = dataclasses.replace(CONFIG, **changes)
        world.reconcile()
        return {
            pod["metadata"]["name"]: {
                key.removeprefix("prometheus.io/"): value
                for key, value in pod["metadata"]["annotations"].items()
                if key.startswith("prometheus.io/")
            }
            for pod in world.plan.create
        }

    node, coordinator = "docs-lm-0-0", "docs-lm-coordinator-0"
    of_node = {"scrape": "true", "port": "29402", "path": "/metrics"}
    of_coordinator = {**of_node, "port": "29401"}
    assert scraped({}) == {node: {}, coordinator: {}}
    on: dict[str, Any] = {"scrape_annotations": True}
    opened = scraped({}, **on, metrics_from=("monitoring",))
    assert opened == {node: of_node, coordinator: of_coordinator}
    # If policies block the coordinator, no client reaches it; without policies, all clients do.
    assert scraped({}, **on)[coordinator] == {}
    assert scraped({}, **on, network_policies=False)[coordinator] == of_coordinator
    # Annotations of a team are kept.
    own = {"annotations": {"prometheus.io/scrape": "false"}}
    assert scraped({"template": own}, **on)[node] == {**of_node, "scrape": "false"}
    # A random port is unknown before the node runs.
    training = {**make_run()["spec"]["training"], "metrics": {"port": 0}}
    assert scraped({"training": training}, **on)[node] == {}


def budget_of_coordinator(world: Simulation) -> int:
    return int(
        world.children["PodDisruptionBudget", "docs-lm.coordinator"]["spec"]["minAvailable"]
    )


def test_a_coordinator_may_be_evicted_while_its_group_trains_but_not_while_it_changes() -> (
    None
):
    world = Simulation(make_run(nodes={"min": 2, "max": 2}))
    world.reconcile()
    world.start()
    world.train(phase="Starting")
    world.settle()
    assert ("PodDisruptionBudget", "docs-lm.coordinator") not in world.children, (
        "no work is lost before the first group"
    )
    found = []
    for phase in ("Running", "Draining", "Starting", "Running", "Waiting"):
        world.train(phase=phase)
        world.settle()
        found.append(budget_of_coordinator(world))
    assert found == [0, 1, 1, 0, 0]
    budget = world.children["PodDisruptionBudget", "docs-lm.coordinator"]["spec"]
    assert budget["selector"]["matchLabels"] == {
        "evergrad.dev/run": "docs-lm",
        "evergrad.dev/role": "coordinator",
    }


def test_the_coordinator_of_a_single_node_run_is_protected_too() -> None:
    world = Simulation(make_run(nodes={"min": 1, "max": 1})).run()
    assert [name for kind, name in world.children if kind == "PodDisruptionBudget"] == [
        "docs-lm.coordinator"
    ]
    world.train(phase="Starting")
    world.settle()
    assert budget_of_coordinator(world) == 1


def test_a_coordinator_waits_for_a_previous_group_only_if_one_may_be_active() -> None:
    def is_reported(world: Simulation) -> bool:
        (pod,) = [
            one
            for one in world.plan.create
            if one["metadata"]["labels"]["evergrad.dev/role"] == "coordinator"
        ]
        return parse_arguments(pod["spec"]["containers"][0]["args"]).nothing_runs

    world = Simulation()
    world.reconcile()
    assert not is_reported(world), "the first epoch waits for nobody anyway"
    world = Simulation().run()
    world.age(100)
    world.vanish("docs-lm-coordinator-0")
    world.reconcile()
    assert not is_reported(world)
    world = Simulation().run()
    world.set_spec(suspend=True)
    for _ in range(4):
        world.reconcile()
        world.leave()
    world.set_spec(suspend=False)
    world.reconcile()
    assert is_reported(world)
