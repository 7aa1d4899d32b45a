"""Additions of a run's template to its pods: a service account, variables from whole objects, init
containers, and limits for the host's disk; and the explanation of the ends of such pods."""

import dataclasses
import json
from typing import Any

import pytest
from pod_security import violations
from simulated_run import CONFIG, Simulation, make_run

from evergrad_common.causes import PodCause
from evergrad_operator.core.decision import Action
from evergrad_operator.core.objects.installation import Installation, find_refusals
from evergrad_operator.core.objects.names import Reason
from evergrad_operator.core.objects.slim import slim_pod
from evergrad_operator.core.objects.times import format_time
from evergrad_operator.core.observe.pods import parse_pod

FETCH: dict[str, Any] = {
    "name": "fetch",
    "image": "registry.example/tools:1",
    "command": ["fetch", "/data"],
    "env": [{"name": "HOME", "value": "/data"}],
    "envFrom": [{"secretRef": {"name": "hub"}}],
    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
}
TEMPLATE: dict[str, Any] = {
    "serviceAccountName": "fetcher",
    "envFrom": [{"configMapRef": {"name": "settings"}}],
    "initContainers": [FETCH, {"name": "check", "args": ["validate"]}],
    "volumes": [
        {"name": "data", "emptyDir": {}},
        {
            "name": "identity",
            "projected": {
                "sources": [{"serviceAccountToken": {"path": "token", "audience": "sts"}}]
            },
        },
    ],
    "volumeMounts": [{"name": "identity", "mountPath": "/identity", "readOnly": True}],
}
ALLOWED = dataclasses.replace(CONFIG, allowed_service_accounts=("fetcher",))


def build(config: Any = ALLOWED, **spec: Any) -> Simulation:
    return Simulation(make_run(**{"template": TEMPLATE, **spec}), config=config)


def node_pod(world: Simulation) -> dict[str, Any]:
    return next(
        json.loads(json.dumps(pod))
        for pod in world.plan.create
        if pod["metadata"]["labels"]["evergrad.dev/role"] == "node"
    )


# ---- the service account
# ------------------------------------------------------------------------------------


def test_an_allowed_service_account_is_used_by_nodes_and_never_by_the_coordinator() -> None:
    world = build()
    world.reconcile()
    coordinator = world.plan.create[0]["spec"]
    assert "serviceAccountName" not in coordinator
    assert "initContainers" not in coordinator
    pod = node_pod(world)
    assert pod["spec"]["serviceAccountName"] == "fetcher"
    assert pod["spec"]["automountServiceAccountToken"] is False
    (identity,) = [one for one in pod["spec"]["volumes"] if one["name"] == "identity"]
    assert identity["projected"]["sources"][0]["serviceAccountToken"]["path"] == "token"
    assert violations(pod) == []


@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        (
            (),
            (
                "spec.template.serviceAccountName: 'fetcher' is not a service account that this installation "
                "allows; it allows none. Remove it, or have fetcher added to "
                "runs.allowed.serviceAccountNames of the chart."
            ),
        ),
        (
            ("reader", "fetcher-2"),
            (
                "spec.template.serviceAccountName: 'fetcher' is not a service account that this installation "
                "allows; it allows reader, fetcher-2. Use one of these, or have fetcher added to "
                "runs.allowed.serviceAccountNames of the chart."
            ),
        ),
    ],
)
def test_any_other_service_account_is_refused_before_the_first_pod(
    allowed: tuple[str, ...], message: str
) -> None:
    world = build(dataclasses.replace(CONFIG, allowed_service_accounts=allowed))
    decision = world.settle()
    assert (decision.action, decision.reason) == (Action.HOLD, Reason.INVALID_SPEC)
    assert decision.message == message
    assert world.created == []


def test_a_service_account_that_is_no_longer_allowed_gets_no_further_pods() -> None:
    world = build().run()
    made = len(world.created)
    world.config = CONFIG
    world.specs = type(world.specs)()
    world.age(100)
    world.end("docs-lm-0-0", 1)
    decision = world.settle()
    assert decision.reason == Reason.INVALID_SPEC
    assert len(world.created) == made


def test_a_default_volume_for_one_pod_is_refused_for_several_nodes() -> None:
    rules = Installation(access_mode="ReadWriteOncePod")
    (problem,) = find_refusals(make_run(nodes={"min": 2}, storage={"size": "1Gi"}), rules)
    assert problem.path == "spec.nodes.min"
    assert "new volumes of this installation are ReadWriteOncePod" in problem.why
    for storage in (
        {"claimName": "mine"},
        {"size": "1Gi", "accessModes": ["ReadWriteMany"]},
    ):
        assert find_refusals(make_run(nodes={"min": 2}, storage=storage), rules) == ()
    assert find_refusals(make_run(nodes={"min": 1, "max": 1}), rules) == ()


# ---- the containers ----------------------------------------------------------------------------------------


def test_an_init_container_is_as_restricted_as_the_trainer_and_has_no_token_or_manifest() -> (
    None
):
    resources = {
        "requests": {"cpu": "2"},
        "limits": {"memory": "4Gi", "nvidia.com/gpu": "2"},
    }
    world = build(resources=resources)
    world.reconcile()
    pod = node_pod(world)["spec"]
    fetch, check = pod["initContainers"]
    (trainer,) = pod["containers"]
    assert (fetch["image"], check["image"]) == (
        "registry.example/tools:1",
        trainer["image"],
    )
    assert fetch["securityContext"] == trainer["securityContext"]
    assert fetch["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert [mount["mountPath"] for mount in fetch["volumeMounts"]] == [
        "/volume",
        "/tmp",
        "/data",
    ]
    assert fetch["envFrom"] == [{"secretRef": {"name": "hub"}}]
    variables = {one["name"]: one["value"] for one in fetch["env"]}
    assert variables["HOME"] == "/data", "the user's own value counts"
    assert variables["HF_HOME"] == "/tmp/.cache/huggingface"
    # A device cannot be shared; the other resources belong to the pod while nothing else runs in it.
    assert check["resources"] == {"requests": {"cpu": "2"}, "limits": {"memory": "4Gi"}}
    assert check["args"] == ["validate"] and "command" not in check


def test_template_keys_never_override_values_that_evergrad_sets() -> None:
    world = build()
    world.reconcile()
    (container,) = node_pod(world)["spec"]["containers"]
    assert container["envFrom"] == [{"configMapRef": {"name": "settings"}}]
    # In Kubernetes, `env` takes precedence over `envFrom`: these stay for any keys of the ConfigMap.
    named = {one["name"] for one in container["env"]}
    assert {"EVERGRAD_POD_IP", "HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR"} <= named


def test_references_of_a_script_become_variables_of_its_nodes() -> None:
    source = {"secretKeyRef": {"name": "hub", "key": "token"}}
    script = {"command": ["train.py"], "env": {"A": "x"}, "valueFrom": {"HF_TOKEN": source}}
    world = build(script=script, training=None)
    world.reconcile()
    (container,) = node_pod(world)["spec"]["containers"]
    assert {"name": "HF_TOKEN", "valueFrom": source} in container["env"]
    assert all(one["name"] != "A" for one in container["env"]), (
        "the nodes read it themselves"
    )


def test_preparation_pods_have_the_service_account_and_the_init_containers_too() -> None:
    world = build(preparation={})
    world.reconcile()
    (pod,) = [
        one
        for one in world.plan.create
        if one["metadata"]["labels"]["evergrad.dev/role"] == "preparation"
    ]
    assert pod["spec"]["serviceAccountName"] == "fetcher"
    assert [one["name"] for one in pod["spec"]["initContainers"]] == ["fetch", "check"]
    assert violations(pod) == []


# ---- the disk of a host ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "settings", "disk", "scratch"),
    [
        ({}, {}, (None, None), "50Gi"),
        ({}, {"node_ephemeral_storage": "1Gi"}, ("1Gi", None), "50Gi"),
        ({}, {"node_ephemeral_storage_limit": "9Gi"}, ("0", "9Gi"), None),
        (
            {"limits": {"ephemeral-storage": "200Gi"}},
            {"node_ephemeral_storage": "1Gi", "node_ephemeral_storage_limit": "9Gi"},
            (None, "200Gi"),
            None,
        ),
        (
            {"requests": {"ephemeral-storage": "20Gi"}},
            {"node_ephemeral_storage_limit": "9Gi"},
            ("20Gi", None),
            "50Gi",
        ),
        ({}, {"scratch_size": ""}, (None, None), None),
    ],
)
def test_the_bounds_of_the_installation_apply_if_the_run_sets_none(
    given: dict[str, Any],
    settings: dict[str, str],
    disk: tuple[str | None, str | None],
    scratch: str | None,
) -> None:
    world = build(dataclasses.replace(ALLOWED, **settings), resources=given)
    world.reconcile()
    pod = node_pod(world)["spec"]
    for container in (*pod["containers"], *pod["initContainers"]):
        resources = container.get("resources", {})
        found = tuple(
            resources.get(kind, {}).get("ephemeral-storage")
            for kind in ("requests", "limits")
        )
        assert found == disk
    (volume,) = [one for one in pod["volumes"] if one["name"] == "evergrad-tmp"]
    assert volume["emptyDir"].get("sizeLimit") == scratch


def test_each_kind_of_pod_has_its_own_bound() -> None:
    config = dataclasses.replace(
        ALLOWED,
        preparation_ephemeral_storage_limit="7Gi",
        coordinator_ephemeral_storage="1Mi",
        coordinator_ephemeral_storage_limit="64Mi",
    )
    world = build(config, preparation={})
    world.reconcile()
    (pod,) = world.plan.create
    assert pod["spec"]["containers"][0]["resources"] == {
        "requests": {"ephemeral-storage": "0"},
        "limits": {"ephemeral-storage": "7Gi"},
    }
    world = build(config)
    world.reconcile()
    resources = world.plan.create[0]["spec"]["containers"][0]["resources"]
    assert resources["requests"]["ephemeral-storage"] == "1Mi"
    assert resources["limits"]["ephemeral-storage"] == "64Mi"


OVER_LIMIT = [
    'Usage of EmptyDir volume "evergrad-tmp" exceeds the limit "50Gi". ',
    "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ",
    'Container trainer exceeded its local ephemeral storage limit "1Gi". ',
]


def evict(world: Simulation, name: str, message: str) -> None:
    world.end(name, 137, message="step 7, loss 2.4")
    world.pods[name]["status"] |= {"reason": "Evicted", "message": message}


def retry(world: Simulation) -> None:
    """Let a pass observe the end of a pod, and create its replacement after its pause."""
    world.reconcile()
    world.now = max(world.now + 1, world.decision.memory.budget.retry_at)
    world.reconcile()


@pytest.mark.parametrize("message", OVER_LIMIT)
def test_a_pod_that_exceeds_its_disk_bound_counts_as_a_failure_and_names_it(
    message: str,
) -> None:
    world = Simulation().run()
    for attempt in range(4):
        world.age(1)
        evict(world, f"docs-lm-1-{attempt}", message)
        retry(world)
        world.start()
    assert (world.status["phase"], world.status["reason"]) == (
        "Failed",
        "OutOfEphemeralStorage",
    )
    said = world.condition("Failed")["message"]
    assert f"exit code 137: {message.strip()}" in said
    assert "Set or raise spec.resources.limits.ephemeral-storage" in said
    assert "step 7" not in said


def test_a_host_without_free_disk_counts_no_failure_and_is_explained() -> None:
    world = Simulation().run()
    world.age(100)
    message = (
        "The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi, available: 1Gi. "
        "Container trainer was using 60Gi, request is 0."
    )
    evict(world, "docs-lm-1-0", message)
    world.reconcile()
    assert world.status["restarts"]["byCause"] == {"Evicted": 1}
    assert world.status["failures"]["withoutProgress"] == 0
    last = world.decision.memory.last_failure
    assert last is not None
    assert last.message == (
        f"{message} Set spec.resources.requests.ephemeral-storage: a host with room is chosen then"
    )


# ---- how init containers end -------------------------------------------------------------------------------


def fail_before(
    world: Simulation, name: str, code: int, message: str = "", **terminated: Any
) -> None:
    """The second init container of a pod fails, and a sidecar of a mesh is killed after it."""
    begun = world.now
    world.age(10)
    states = [
        ("check", code, 5, {"message": message, **terminated}),
        ("mesh-proxy", 137, 9, {}),
        ("fetch", 0, 2, {}),
    ]
    world.pods[name]["status"] = {
        "phase": "Failed",
        "initContainerStatuses": [
            {
                "name": one,
                "state": {
                    "terminated": {
                        "exitCode": ended,
                        "reason": "Error" if ended else "Completed",
                        "finishedAt": format_time(begun + second),
                        **more,
                    }
                },
            }
            for one, ended, second, more in states
        ],
        "containerStatuses": [
            {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
        ],
    }
    world.pods[name]["spec"].setdefault("nodeName", "host-1")


@pytest.mark.parametrize(
    ("code", "terminated", "cause"),
    [
        (1, {}, PodCause.WORKER_CRASH),
        (64, {}, PodCause.USER_ERROR),
        # EX_TEMPFAIL: exit codes of other programs do not have our meaning.
        (75, {}, PodCause.WORKER_CRASH),
        (137, {"reason": "OOMKilled"}, PodCause.OUT_OF_MEMORY),
        (128, {"reason": "StartError"}, PodCause.START_ERROR),
        (137, {"reason": "ContainerStatusUnknown"}, PodCause.NODE_LOST),
        (1, {"message": "No space left on device"}, PodCause.VOLUME_FULL),
    ],
)
def test_the_end_of_an_init_container_has_the_same_causes_as_the_end_of_the_trainer(
    code: int, terminated: dict[str, Any], cause: PodCause
) -> None:
    world = build()
    world.settle()
    fail_before(world, "docs-lm-0-0", code, **terminated)
    pod = parse_pod(slim_pod(world.pods["docs-lm-0-0"]))
    assert pod is not None and pod.end is not None
    assert (pod.end.cause, pod.end.exit_code) == (cause, code)
    assert pod.end.message.startswith("init container check: ")
    assert not pod.is_running


def test_an_init_container_that_fails_repeatedly_ends_the_run_with_its_own_message() -> (
    None
):
    world = build(nodes={"min": 1, "max": 1})
    world.settle()
    for attempt in range(4):
        fail_before(world, f"docs-lm-0-{attempt}", 22, "curl: (22) The requested URL: 404")
        retry(world)
    assert (world.status["phase"], world.status["reason"]) == ("Failed", "WorkerCrash")
    said = world.condition("Failed")["message"]
    assert (
        "WorkerCrash on node 0, exit code 22: init container check: curl: (22) The requested URL: 404"
    ) in said


def test_an_init_container_that_reports_a_user_error_ends_the_run_at_once() -> None:
    world = build(nodes={"min": 1, "max": 1})
    world.settle()
    fail_before(world, "docs-lm-0-0", 64, "no such bucket")
    world.reconcile()
    assert (world.status["phase"], world.status["reason"]) == ("Failed", "UserError")
    assert (
        "ended with exit code 64: init container check: no such bucket"
        in world.condition("Failed")["message"]
    )


def wait_before(world: Simulation, name: str, state: dict[str, Any]) -> None:
    initializing = {"state": {"waiting": {"reason": "PodInitializing"}}}
    world.pods[name]["status"] = {
        "phase": "Pending",
        "initContainerStatuses": [
            {"name": "fetch", "state": state},
            {"name": "check", **initializing},
        ],
        "containerStatuses": [{"name": "trainer", **initializing}],
    }


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("ImagePullBackOff", Reason.IMAGE_PULL_FAILED),
        ("CreateContainerConfigError", Reason.START_ERROR),
    ],
)
def test_an_init_container_that_cannot_start_is_reported_like_a_trainer(
    reason: str, expected: Reason
) -> None:
    world = build(nodes={"min": 1, "max": 1})
    world.settle()
    wait_before(
        world, "docs-lm-0-0", {"waiting": {"reason": reason, "message": "not found"}}
    )
    decision = world.reconcile()
    assert decision.reason == expected
    said = f"node 0 (pod docs-lm-0-0): {reason}: init container fetch: not found"
    assert said in decision.message


def test_a_missing_image_of_an_init_container_does_not_blame_the_image_of_the_trainer() -> (
    None
):
    world = build(nodes={"min": 1, "max": 1})
    world.settle()
    wait_before(world, "docs-lm-0-0", {"waiting": {"reason": "ErrImagePull"}})
    pod = parse_pod(slim_pod(world.pods["docs-lm-0-0"]))
    assert pod is not None
    assert (pod.waiting_image, pod.image) == (
        "registry.example/tools:1",
        CONFIG.trainer_image,
    )


def test_a_slow_init_container_is_named() -> None:
    world = build(nodes={"min": 1, "max": 1})
    world.settle()
    wait_before(world, "docs-lm-0-0", {"running": {"startedAt": "2030-01-01T00:00:00Z"}})
    assert "fetch" not in world.reconcile().message
    world.age(121)
    assert (
        "node 0 (pod docs-lm-0-0): init container fetch runs" in world.reconcile().message
    )
