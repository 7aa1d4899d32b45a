"""``evergrad doctor``: its judgement of its findings, and its exit code."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from evergrad_cli.cluster.diagnosis import checks, webhook_checks
from evergrad_cli.cluster.diagnosis.checks import Check, CheckState
from evergrad_cli.cluster.diagnosis.claim_checks import check_claims
from evergrad_cli.main import main
from evergrad_manifest.envelope import Spec
from evergrad_manifest.model.fields import fields_of
from evergrad_manifest.reading.validation import check_run
from evergrad_operator.edge.webhook.certificates import renew, write_bundle
from evergrad_trainer import __version__

Api = Any
NOW = 1_772_370_000.0
RUNS = "/apis/evergrad.dev/v1alpha1/namespaces/lab/trainingruns"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingruns.evergrad.dev"


def states(*found: Check) -> list[str]:
    return [str(check.state) for check in found]


def crd(fields: list[str], *, subresources: dict[str, Any] | None = None) -> dict[str, Any]:
    schema = {"properties": {"spec": {"properties": {name: {} for name in fields}}}}
    version = {"name": "v1alpha1", "schema": {"openAPIV3Schema": schema}}
    return {
        "spec": {
            "versions": [
                {
                    **version,
                    "subresources": {"status": {}}
                    if subresources is None
                    else subresources,
                }
            ]
        }
    }


def test_an_old_or_silent_server_is_reported() -> None:
    found = [
        checks.check_version(
            {"major": "1", "minor": "34+", "gitVersion": "v1.34.4"}, "host"
        ),
        checks.check_version(
            {"major": "1", "minor": "29", "gitVersion": "v1.29.0"}, "host"
        ),
        checks.check_version({}, "host"),
    ]
    assert states(*found) == ["ok", "fail", "warn"]


def test_a_missing_old_or_unserved_crd_is_reported() -> None:
    all_fields = list(fields_of(Spec))
    found = [
        checks.check_crd(None, is_served=False, may_read=True),
        checks.check_crd(crd(all_fields), is_served=False, may_read=True),
        checks.check_crd(crd(all_fields), is_served=True, may_read=True),
        checks.check_crd(
            crd([name for name in all_fields if name != "image"]),
            is_served=True,
            may_read=True,
        ),
        checks.check_crd(crd(all_fields, subresources={}), is_served=True, may_read=True),
        checks.check_crd(None, is_served=True, may_read=False),
    ]
    assert states(*found) == ["fail", "fail", "ok", "warn", "fail", "ok"]
    assert "it lacks spec.image" in found[3].message


def deployment(available: int = 1, version: str = __version__) -> dict[str, Any]:
    metadata = {
        "name": "evergrad",
        "namespace": "evergrad-system",
        "labels": {"app.kubernetes.io/version": version},
    }
    return {"metadata": metadata, "status": {"availableReplicas": available}}


def test_the_operator_must_run_and_have_the_version_of_the_command() -> None:
    found = [
        checks.check_operator(None, __version__),
        checks.check_operator([], __version__),
        checks.check_operator([deployment(0)], __version__),
        checks.check_operator([deployment(version="9.9.9")], __version__),
        checks.check_operator([deployment()], __version__),
    ]
    assert states(*found) == ["skip", "fail", "fail", "warn", "ok"]


def lease(renewed: str | None, holder: str = "evergrad-abc") -> dict[str, Any]:
    spec = {"renewTime": renewed, "holderIdentity": holder, "leaseDurationSeconds": 15}
    return {"metadata": {"name": "evergrad", "namespace": "evergrad-system"}, "spec": spec}


def test_a_lease_that_is_not_renewed_fails() -> None:
    found = [
        checks.check_lease(None, now=NOW),
        checks.check_lease([], now=NOW),
        checks.check_lease([lease("2026-03-01T12:59:55.000000Z")], now=NOW),
        checks.check_lease([lease("2026-03-01T12:00:00.000000Z")], now=NOW),
        checks.check_lease(
            [lease("2026-03-01T12:00:00.000000Z"), lease("2026-03-01T12:59:55Z")], now=NOW
        ),
        checks.check_lease([lease(None)], now=NOW),
    ]
    assert states(*found) == ["skip", "warn", "ok", "fail", "ok", "warn"]
    assert "renewed it 60m ago" in found[3].message


def test_missing_permissions_are_reported_with_their_purpose() -> None:
    all_rights = dict.fromkeys(checks.RIGHTS, True)
    create = next(right for right in checks.RIGHTS if right.verb == "create")
    log = next(right for right in checks.RIGHTS if right.subresource == "log")
    found = [
        checks.check_rights(all_rights, "lab"),
        checks.check_rights({**all_rights, log: False}, "lab"),
        checks.check_rights({**all_rights, log: False, create: False}, "lab"),
    ]
    assert states(*found) == ["ok", "warn", "fail"]
    assert "create trainingruns (for submit), get pods/log (for logs)" in found[2].message


def test_permissions_are_checked_for_all_commands() -> None:
    asked = {str(right): right for right in checks.RIGHTS}
    assert {
        "get secrets",
        "get pods/portforward",
        "create pods/portforward",
        "list persistentvolumeclaims",
        "delete persistentvolumeclaims",
    } <= set(asked)
    assert asked["delete trainingruns"].purpose == "prune, kubectl delete"


def test_a_permission_that_could_not_be_checked_is_not_reported_as_missing() -> None:
    answers: dict[checks.Right, bool | None] = dict.fromkeys(checks.RIGHTS, True)
    create = next(right for right in checks.RIGHTS if str(right) == "create trainingruns")
    log = next(right for right in checks.RIGHTS if right.subresource == "log")
    found = [
        checks.check_rights({**answers, create: None}, "lab"),
        checks.check_rights({**answers, create: None, log: False}, "lab"),
        checks.check_rights(dict.fromkeys(checks.RIGHTS), "lab"),
    ]
    assert states(*found) == ["skip", "warn", "skip"]
    unasked = "could not be asked: create trainingruns (for submit)"
    assert found[0].message == unasked and "RoleBinding" not in found[0].remedy
    assert found[1].message == (
        f"not allowed in namespace lab: get pods/log (for logs); {unasked}"
    )


def storage_class(name: str, provisioner: str, *, is_default: bool) -> dict[str, Any]:
    annotations = (
        {"storageclass.kubernetes.io/is-default-class": "true"} if is_default else {}
    )
    return {
        "metadata": {"name": name, "annotations": annotations},
        "provisioner": provisioner,
    }


def test_storage_needs_a_default_class_that_several_nodes_can_write() -> None:
    shared = storage_class("nfs", "nfs.csi.k8s.io", is_default=True)
    found = [
        checks.check_storage(None),
        checks.check_storage([]),
        checks.check_storage([storage_class("nfs", "nfs.csi.k8s.io", is_default=False)]),
        checks.check_storage([storage_class("gp3", "ebs.csi.aws.com", is_default=True)]),
        checks.check_storage([shared]),
    ]
    assert states(*found) == ["skip", "fail", "warn", "warn", "ok"]


def test_a_namespace_is_reported_with_its_pod_security() -> None:
    strict = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    found = [
        checks.check_namespace(None, "lab", may_read=False),
        checks.check_namespace(None, "lab", may_read=True),
        checks.check_namespace({"status": {"phase": "Terminating"}}, "lab", may_read=True),
        checks.check_namespace(strict, "lab", may_read=True),
    ]
    assert states(*found) == ["skip", "fail", "fail", "ok"]
    assert "enforces Pod Security restricted" in found[3].message


def quota(hard: dict[str, str], used: dict[str, str]) -> dict[str, Any]:
    return {"metadata": {"name": "q"}, "status": {"hard": hard, "used": used}}


def test_claims_that_runs_name_but_cannot_mount_warn() -> None:
    def run(name: str, **spec: Any) -> dict[str, Any]:
        return {"metadata": {"name": name}, "spec": spec}

    mounts = {"volumes": [{"name": "d", "persistentVolumeClaim": {"claimName": "data"}}]}
    runs = [run("a"), run("b", template=mounts), run("c", storage={"claimName": "disk"})]
    assert check_claims(runs[:1], []).state is CheckState.OK, "its own is yet to be made"
    missing = check_claims(runs, [])
    assert (missing.state, missing.message) == (
        CheckState.WARN,
        "claim data of run b does not exist; claim disk of run c does not exist",
    )
    claims: list[dict[str, Any]] = [
        {"metadata": {"name": "data", "deletionTimestamp": "2021-01-01T00:00:00Z"}},
        {"metadata": {"name": "disk"}, "status": {"phase": "Lost"}},
    ]
    assert check_claims(runs, claims).message == (
        "claim data of run b is being deleted; claim disk of run c has lost its volume"
    )
    over = {"conditions": [{"type": "Complete", "status": "True"}]}
    assert check_claims([{**runs[1], "status": over}], []).state is CheckState.OK
    assert check_claims(runs, None).state is CheckState.SKIP


def test_an_exhausted_quota_warns() -> None:
    found = [
        checks.check_quotas(None),
        checks.check_quotas([]),
        checks.check_quotas([quota({"pods": "10"}, {"pods": "3"})]),
        checks.check_quotas(
            [quota({"requests.memory": "1Gi"}, {"requests.memory": "1024Mi"})]
        ),
    ]
    assert states(*found) == ["skip", "ok", "ok", "warn"]
    assert "requests.memory (1024Mi of 1Gi in q)" in found[3].message


def limit_range(**item: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "lr"},
        "spec": {"limits": [{"type": "Container", **item}]},
    }


def test_a_limit_range_that_no_coordinator_fits_fails() -> None:
    coordinator = {"memory": "256Mi", "cpu": "1"}
    found = [
        checks.check_limits(None, coordinator),
        checks.check_limits([], coordinator),
        checks.check_limits([limit_range(max={"memory": "1Gi"})], coordinator),
        checks.check_limits([limit_range(max={"memory": "200Mi"})], coordinator),
    ]
    assert states(*found) == ["skip", "ok", "ok", "fail"]
    assert "lr allows at most 200Mi of memory" in found[3].message
    assert "runs.coordinator.memoryLimit of the chart" in found[3].remedy


def test_runs_need_not_set_defaults_of_a_limit_range() -> None:
    ranges = [limit_range(default={"memory": "128Mi"})]
    full = [quota({"limits.memory": "1Gi", "requests.cpu": "4"}, {})]
    defaults = checks.read_limits(ranges).defaults
    found = checks.check_quotas(full, defaults=defaults)
    assert (
        found.message == "there is room; each run must set requests.cpu in spec.resources"
    )


def test_a_quota_that_a_run_waits_for_is_exhausted() -> None:
    some = [quota({"limits.memory": "1Gi"}, {"limits.memory": "900Mi"})]
    found = checks.check_quotas(some, waiting=[("docs-lm", "exceeded quota: q")])
    assert found.state == "warn"
    assert found.message == "run docs-lm waits for room: exceeded quota: q"


@pytest.mark.parametrize(
    ("hard", "told"),
    [
        ("requests.storage", ""),
        ("requests.nvidia.com/gpu", ""),
        ("limits.ephemeral-storage", ""),
        ("requests.ephemeral-storage", ""),
        ("cpu", "cpu"),
        ("memory", "memory"),
        ("requests.cpu", "requests.cpu"),
        ("requests.memory", "requests.memory"),
        ("limits.cpu", "limits.cpu"),
        ("limits.memory", "limits.memory"),
    ],
)
def test_only_cpu_and_memory_quotas_require_settings_of_runs(hard: str, told: str) -> None:
    found = checks.check_quotas([quota({hard: "10"}, {})])
    wanted = f"; each run must set {told} in spec.resources" if told else ""
    assert found.message == f"there is room{wanted}"


def policy(
    types: list[str],
    selector: dict[str, Any] | None = None,
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "metadata": {"name": "closed", "labels": labels or {}},
        "spec": {"podSelector": selector or {}, "policyTypes": types},
    }


def test_a_network_policy_that_isolates_pods_warns() -> None:
    found = [
        checks.check_network(None),
        checks.check_network([]),
        checks.check_network([policy(["Ingress"])]),
        checks.check_network([policy(["Egress"])]),
        checks.check_network([policy(["Egress"], labels={"evergrad.dev/run": "docs-lm"})]),
        checks.check_network([policy(["Egress"], {"matchLabels": {"app": "web"}})]),
    ]
    assert states(*found) == ["skip", "ok", "ok", "warn", "ok", "ok"]


def node(*, is_ready: bool = True, gpus: str = "0") -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True" if is_ready else "Unknown"}
    return {
        "status": {
            "conditions": [ready],
            "allocatable": {"cpu": "8", "nvidia.com/gpu": gpus},
        }
    }


def test_nodes_are_counted_with_their_accelerators() -> None:
    found = [
        checks.check_nodes(None),
        checks.check_nodes([node(is_ready=False)]),
        checks.check_nodes([node(), node(is_ready=False)]),
        checks.check_nodes([node(gpus="8"), node(gpus="4")]),
    ]
    assert states(*found) == ["skip", "fail", "warn", "ok"]
    assert found[3].message == "2 of 2 ready; 12 nvidia.com/gpu"


@pytest.fixture
def cluster(api: Api) -> Api:
    """A cluster without problems, except that no storage object may be read."""
    items = {"metadata": {}, "items": []}
    api.on("GET", "/version", {"major": "1", "minor": "34", "gitVersion": "v1.34.4"})
    api.on(
        "GET", "/apis", {"groups": [{"name": "metrics.k8s.io"}, {"name": "kueue.x-k8s.io"}]}
    )
    api.on("GET", "/apis/evergrad.dev/v1alpha1", {"resources": [{"name": "trainingruns"}]})
    api.on("GET", CRD, crd(list(fields_of(Spec))))
    api.on("GET", "/apis/apps/v1/deployments", {**items, "items": [deployment()]})
    api.on(
        "GET",
        "/apis/coordination.k8s.io/v1/namespaces/evergrad-system/leases",
        {**items, "items": [lease(None)]},
    )
    api.on("GET", "/api/v1/namespaces/lab", {"metadata": {"name": "lab"}})
    api.on("GET", "/api/v1/namespaces/lab/resourcequotas", items)
    api.on("GET", "/api/v1/namespaces/lab/limitranges", items)
    api.on("GET", "/apis/networking.k8s.io/v1/namespaces/lab/networkpolicies", items)
    api.on("GET", "/api/v1/nodes", {**items, "items": [node()]})
    for path in (RUNS, "/api/v1/namespaces/lab/persistentvolumeclaims"):
        api.on("GET", path, items)
    api.refuse("GET", "/apis/storage.k8s.io/v1/storageclasses", 403, "no")
    api.on(
        "POST",
        "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
        {"status": {"allowed": True}},
    )
    cause = {
        "field": "spec.training.schedule.warmup",
        "message": "is longer than the horizon",
    }
    api.refuse("POST", RUNS, 422, "denied", causes=[cause])
    return api


def test_doctor_exits_with_0_if_nothing_fails(
    cluster: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--kubeconfig", cluster.kubeconfig]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].startswith("ok    api server       Kubernetes v1.34.4")
    assert "skip  images" in text and text.rstrip().endswith("14 ok, 1 warn, 2 skip")
    assert (
        "warn  operator lease   no operator holds it\n                       → Is the operator"
        in text
    )
    question, review = cluster.sent("POST")[:2]
    assert (question.path, question.query) == (RUNS, {"dryRun": "All"})
    asked = review.body["spec"]["resourceAttributes"]
    assert asked == {
        "namespace": "lab",
        "verb": "get",
        "group": "evergrad.dev",
        "resource": "trainingruns",
    }


def test_doctor_exits_with_1_if_a_check_fails(
    cluster: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.on("GET", "/apis/evergrad.dev/v1alpha1", "404 page not found", status=404)
    cluster.refuse("GET", CRD, 404, "not found", name="trainingruns.evergrad.dev")
    assert main(["doctor", "--kubeconfig", cluster.kubeconfig, "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    (failed,) = [check for check in shown["checks"] if check["state"] == CheckState.FAIL]
    assert (shown["healthy"], failed["name"]) == (False, "crd")
    assert "helm upgrade --install" in failed["remedy"]


def test_an_access_review_without_a_response_is_reported_as_skipped(
    cluster: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    cluster.refuse("POST", path, 429, "too many requests")
    assert main(["doctor", "--kubeconfig", cluster.kubeconfig]) == 0
    text = capsys.readouterr().out
    assert "skip  your rights      could not be asked: get trainingruns" in text
    assert "RoleBinding" not in text


# ---- the webhook -------------------------------------------------------------------------------------------

DAY = 86_400.0


def data_at(now: float) -> dict[str, str]:
    """The Secret's data as the operator creates it at ``now``: valid for 365 days, its authority for 3,650."""
    bundle = renew(None, ("evergrad.system.svc",), now=datetime.fromtimestamp(now, UTC))
    assert bundle is not None
    return write_bundle(bundle)


def configured(bundle: str | None) -> list[dict[str, Any]]:
    client = {"service": {"namespace": "system", "name": "evergrad"}}
    client |= {} if bundle is None else {"caBundle": bundle}
    entry = {"name": webhook_checks.WEBHOOK, "clientConfig": client}
    return [{"webhooks": [{"name": "other"}]}, {"webhooks": [entry]}]


READY = [{"endpoints": [{"conditions": {"ready": False}}, {"conditions": {"ready": True}}]}]
ACCEPTED, FAILED = (
    webhook_checks.Asked(webhook_checks.WebhookAnswer.ACCEPTED),
    webhook_checks.Asked(webhook_checks.WebhookAnswer.FAILED),
)


def test_the_webhook_probe_is_a_run_with_exactly_one_mistake() -> None:
    _, problems = check_run(webhook_checks.QUESTION)
    assert [problem.path for problem in problems] == ["spec.training.schedule.warmup"]


def test_a_webhook_that_refuses_the_probe_passes() -> None:
    asked = webhook_checks.judge_refusal(
        ["spec.training.schedule.warmup", "metadata.name"], ""
    )
    found = webhook_checks.check_webhook(asked, None, None, None, now=NOW)
    assert (found.state, found.remedy) == (CheckState.OK, "")
    # A quota, a policy, or no permission to create runs.
    other = webhook_checks.judge_refusal(["a trainingrun"], "is not allowed")
    found = webhook_checks.check_webhook(other, None, None, None, now=NOW)
    assert (found.state, found.message) == (
        CheckState.SKIP,
        "it could not be asked; is not allowed",
    )
    assert (
        webhook_checks.judge_failure("500; etcd is down").answer
        is webhook_checks.WebhookAnswer.UNKNOWN
    )


def test_a_webhook_that_does_not_respond_is_reported_with_reason_and_remedy() -> None:
    now, old = data_at(NOW), data_at(NOW - 400 * DAY)
    ancient, ours = data_at(NOW - 4000 * DAY), configured(data_at(NOW)["ca.crt"])
    future = data_at(NOW + 9 * DAY)
    cases = [
        ([], None, None, "none is configured", "webhook.enabled=true"),
        (None, None, None, "may not read its configuration", "operator's log"),
        (configured(None), READY, None, "has no caBundle", "operator's log"),
        (configured("%"), READY, None, "has no caBundle", "operator's log"),
        (configured("eHg="), READY, None, "caBundle cannot be read", "renews it"),
        (configured(ancient["ca.crt"]), READY, None, "caBundle has expired", "renews it"),
        (configured(future["ca.crt"]), READY, None, "is not valid yet", "renews it"),
        (
            ours,
            [],
            None,
            "system/evergrad has no endpoint that is ready",
            "kubectl -n system",
        ),
        (ours, READY, {"data": old}, "its certificate has expired", "operator's log"),
        (
            ours,
            READY,
            {"data": now},
            "another authority",
            "Delete the Secret system/evergrad-webhook",
        ),
        (ours, READY, None, "look right", "port 9443"),
    ]
    for configurations, slices, secret, why, remedy in cases:
        found = webhook_checks.check_webhook(
            ACCEPTED, configurations, slices, secret, now=NOW
        )
        assert found.state is CheckState.WARN and why in found.message, (why, found.message)
        assert remedy in found.remedy, (why, found.remedy)
    same = {"data": {**now, "tls.crt": now["tls.crt"]}}
    right = configured(now["ca.crt"])
    assert (
        "look right"
        in webhook_checks.check_webhook(ACCEPTED, right, READY, same, now=NOW).message
    )
    # A webhook that must not be skipped prevents the creation of all runs.
    failed = webhook_checks.check_webhook(FAILED, ours, [], None, now=NOW)
    assert failed.state is CheckState.FAIL and "no run can be created" in failed.message


def among(*namespaces: str) -> dict[str, Any]:
    """The webhook of an operator that serves only ``namespaces``, as the chart writes it."""
    label = "kubernetes.io/metadata.name"
    expression = {"key": label, "operator": "In", "values": [*namespaces]}
    entry = configured(None)[1]["webhooks"][0]
    place = {"service": {"namespace": namespaces[0], "name": "evergrad"}}
    selector = {"matchExpressions": [expression]}
    return {"webhooks": [{**entry, "clientConfig": place, "namespaceSelector": selector}]}


def test_the_checked_webhook_is_the_one_of_this_namespace() -> None:
    both = [among("red", "rose"), among("blue")]
    found = [
        webhook_checks.service_of(webhook_checks.find_webhook(both, namespace))[0]
        for namespace in ("rose", "blue", "green")
    ]
    assert found == ["red", "blue", ""]
    asked = webhook_checks.Asked(webhook_checks.WebhookAnswer.ACCEPTED, namespace="green")
    shown = webhook_checks.check_webhook(asked, both, None, None, now=NOW)
    assert shown.state is CheckState.WARN
    assert shown.message.startswith(
        "no webhook covers this namespace, green; a wrong file is"
    )
    assert "rbac.watchNamespaces" in shown.remedy
    # A webhook without a namespace selector is called for all namespaces.
    everywhere = [*both, *configured(None)]
    assert (
        "caBundle"
        in webhook_checks.check_webhook(asked, everywhere, None, None, now=NOW).message
    )


def test_doctor_searches_for_the_cause_of_a_failing_webhook(
    cluster: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f'failed calling webhook "{webhook_checks.WEBHOOK}": no endpoints available'
    cluster.refuse("POST", RUNS, 500, text)
    items = {"metadata": {}, "items": configured(data_at(NOW)["ca.crt"])}
    hooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    cluster.on("GET", hooks, items)
    slices = "/apis/discovery.k8s.io/v1/namespaces/system/endpointslices"
    cluster.on("GET", slices, {"metadata": {}, "items": []})
    cluster.refuse("GET", "/api/v1/namespaces/system/secrets/evergrad-webhook", 403, "no")
    assert main(["doctor", "--kubeconfig", cluster.kubeconfig, "--json"]) == 1
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert (
        found["webhook"]["state"] == CheckState.FAIL
        and "no endpoint that is" in found["webhook"]["message"]
    )
    [asked] = [request for request in cluster.requests if request.path == slices]
    assert asked.query["labelSelector"] == "kubernetes.io/service-name=evergrad"
