"""The Helm chart as it renders: rights, security, scopes, names, values.

On a cluster: tests/e2e/test_chart.py.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bed import chart, toolbox
from bed.shell import BedError
from evergrad_operator.core.objects import names
from evergrad_operator.edge.settings import parse_settings
from evergrad_operator.edge.webhook.server import PATH, WEBHOOK_NAME

Object = dict[str, Any]
CLUSTER_SCOPED = {
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "PriorityClass",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
    "ValidatingWebhookConfiguration",
    "MutatingWebhookConfiguration",
}
# Exactly the operator's permissions: (group, resource) → verbs. Permissions for the lease are separate, in
# the release's namespace.
RIGHTS = {
    ("evergrad.dev", "trainingruns"): {"list", "watch"},
    ("evergrad.dev", "trainingruns/status"): {"patch"},
    ("evergrad.dev", "trainingruns/finalizers"): {"update"},
    ("", "pods"): {"list", "watch", "create", "delete"},
    ("", "configmaps"): {"list", "create", "patch", "delete"},
    ("", "services"): {"list", "create", "patch", "delete"},
    ("", "persistentvolumeclaims"): {"get", "list", "watch", "create", "patch"},
    ("", "secrets"): {"create"},
    ("", "events"): {"create", "patch"},
    ("policy", "poddisruptionbudgets"): {"list", "create", "patch", "delete"},
    ("networking.k8s.io", "networkpolicies"): {"list", "create", "patch", "delete"},
}
OWN_WEBHOOK = {
    ("admissionregistration.k8s.io", f"{kind}webhookconfigurations"): {"get", "patch"}
    for kind in ("validating", "mutating")
}
POLICY = "ValidatingAdmissionPolicy"
BOUNDS: Object = {
    "enabled": True,
    "allowedImages": ["registry.example.com/", "localhost/x"],
    "allowedPriorityClasses": ["low", "middle"],
    "maxNodes": 3,
}
REVIEWS = {("authorization.k8s.io", "selfsubjectaccessreviews"): {"create"}}


@pytest.fixture(scope="module", autouse=True)
def helm() -> None:
    if toolbox.missing(("helm",)):
        pytest.skip("helm is not built. make chart-lint builds it, with Go.")


@pytest.fixture(scope="module", params=list(chart.MATRIX))
def rendering(request: pytest.FixtureRequest, helm: None) -> list[Object]:
    return chart.render(chart.MATRIX[request.param])


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [one for one in objects if one["kind"] in kinds]


def rights_of(role: Object) -> dict[tuple[str, str], set[str]]:
    found: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.setdefault((group, resource), set()).update(rule["verbs"])
    return found


def pod_specs(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    for one in objects:
        if one["kind"] == "Pod":
            yield one["metadata"]["name"], one["spec"]
        if one["kind"] == "Deployment":
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]


def environment(objects: list[Object]) -> dict[str, str]:
    (deployment,) = of_kind(objects, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {one["name"]: one.get("value", "from the pod") for one in container["env"]}


def as_text(value: object) -> str:
    """A setting as an environment variable has it."""
    if isinstance(value, tuple):
        return ",".join(value)
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def test_the_crd_of_the_chart_matches_the_crds_folder(root: Path) -> None:
    assert (root / "charts/evergrad/files/trainingrun.yaml").read_bytes() == (
        root / "crds/trainingrun.yaml"
    ).read_bytes()


def test_the_versions_of_chart_and_packages_agree(root: Path) -> None:
    described = yaml.safe_load((root / "charts/evergrad/Chart.yaml").read_text())
    for package in ("common", "coordinator", "operator", "trainer_image", "latent_edit"):
        assert (
            f'\nversion = "{described["appVersion"]}"\n'
            in (root / package / "pyproject.toml").read_text()
        )


def test_the_rendered_crd_differs_from_the_file_in_labels_and_annotations_only(
    root: Path,
) -> None:
    (rendered,) = of_kind(chart.render({}), "CustomResourceDefinition")
    source = yaml.safe_load((root / "crds/trainingrun.yaml").read_text())
    assert rendered["spec"] == source["spec"]
    assert rendered["metadata"]["name"] == source["metadata"]["name"]
    assert rendered["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_a_crd_without_keep_has_no_policy_and_a_disabled_crd_is_not_rendered() -> None:
    (crd,) = of_kind(chart.render({"crds": {"keep": False}}), "CustomResourceDefinition")
    assert "helm.sh/resource-policy" not in crd["metadata"]["annotations"]
    assert (
        of_kind(chart.render({"crds": {"install": False}}), "CustomResourceDefinition")
        == []
    )


def test_the_cluster_operator_has_exactly_the_permissions_of_the_table() -> None:
    objects = chart.render({"rbac": {"aggregatedRoles": False}})
    role, of_webhook = of_kind(objects, "ClusterRole")
    assert rights_of(role) == RIGHTS | REVIEWS
    assert rights_of(of_webhook) == OWN_WEBHOOK
    (webhook,) = of_kind(objects, "ValidatingWebhookConfiguration")
    assert [rule["resourceNames"] for rule in of_webhook["rules"]] == [
        [webhook["metadata"]["name"]]
    ]
    bindings = of_kind(objects, "ClusterRoleBinding")
    assert [one["roleRef"]["name"] for one in bindings] == [
        one["metadata"]["name"] for one in (role, of_webhook)
    ]
    (account,) = of_kind(objects, "ServiceAccount")
    for binding in bindings:
        assert binding["subjects"] == [
            {
                "kind": "ServiceAccount",
                "name": account["metadata"]["name"],
                "namespace": chart.NAMESPACE,
            }
        ]


def test_a_namespaced_operator_has_the_same_permissions_in_its_namespaces_only() -> None:
    objects = chart.render(
        chart.MATRIX["namespaces"]
        | {"rbac": {**chart.MATRIX["namespaces"]["rbac"], "aggregatedRoles": False}}
    )
    assert of_kind(objects, "ClusterRole", "ClusterRoleBinding") == []
    roles = {
        one["metadata"]["namespace"]: rights_of(one)
        for one in of_kind(objects, "Role")
        if one["metadata"]["name"].endswith("-runs")
    }
    assert roles == {"team-a": RIGHTS, "team-b": RIGHTS}


def test_a_namespaced_operator_without_a_list_serves_its_own_namespace() -> None:
    objects = chart.render(chart.MATRIX["namespaced"], namespace="here")
    assert environment(objects)["EVERGRAD_NAMESPACE"] == "here"
    assert {one["metadata"]["namespace"] for one in of_kind(objects, "Role")} == {"here"}


def test_the_operator_may_change_only_its_own_lease() -> None:
    objects = chart.render({})
    (role,) = [
        one
        for one in of_kind(objects, "Role")
        if one["metadata"]["name"].endswith("-lease")
    ]
    create, change, *_ = role["rules"]
    assert (create["verbs"], create.get("resourceNames")) == (["create"], None)
    assert (change["verbs"], change["resourceNames"]) == (
        ["get", "update"],
        [environment(objects)["EVERGRAD_LEASE_NAME"]],
    )


def test_the_operator_may_read_only_the_installation_key_and_the_webhook_certificate() -> (
    None
):
    objects = chart.render({})
    roles = of_kind(objects, "Role", "ClusterRole")
    rules = [
        rule for role in roles for rule in role["rules"] if "secrets" in rule["resources"]
    ]
    readable = [rule for rule in rules if rule["verbs"] != ["create"]]
    assert [(rule["verbs"], rule["resourceNames"]) for rule in readable] == [
        (["get"], [environment(objects)["EVERGRAD_KEY_NAME"]]),
        (["get", "update"], [environment(objects)["EVERGRAD_WEBHOOK_SECRET"]]),
    ]
    (home,) = [role for role in roles if readable[0] in role["rules"]]
    assert readable[1] in home["rules"]
    assert (home["kind"], home["metadata"]["namespace"]) == ("Role", chart.NAMESPACE)


def test_no_permission_for_secrets_nodes_exec_roles_or_wildcards_is_granted(
    rendering: list[Object],
) -> None:
    for role in of_kind(rendering, "Role", "ClusterRole"):
        for (group, resource), verbs in rights_of(role).items():
            assert "*" not in {group, resource, *verbs}
            assert group != "rbac.authorization.k8s.io"
            assert resource != "secrets" or verbs <= {"create", "get", "update"}
            assert resource not in {
                "nodes",
                "serviceaccounts",
                "namespaces",
                "pods/exec",
                "pods/log",
                "pods/attach",
            }


@pytest.mark.parametrize(
    ("switch", "kind"),
    [
        ("disruptionBudgets", ("policy", "poddisruptionbudgets")),
        ("networkPolicies", ("networking.k8s.io", "networkpolicies")),
    ],
)
def test_disabled_objects_can_be_found_and_deleted_but_not_created(
    switch: str, kind: tuple[str, str]
) -> None:
    objects = chart.render({"rbac": {"aggregatedRoles": False}, "runs": {switch: False}})
    role, _ = of_kind(objects, "ClusterRole")
    assert rights_of(role) == RIGHTS | REVIEWS | {kind: {"list", "delete"}}


@pytest.mark.parametrize(
    ("gang", "group"),
    [
        ("coscheduling", "scheduling.x-k8s.io"),
        ("podGroup", "scheduling.k8s.io"),
        ("none", ""),
    ],
)
def test_the_permission_to_create_pod_groups_is_granted_with_gangs_only(
    gang: str, group: str
) -> None:
    values = {
        "rbac": {"aggregatedRoles": False},
        "runs": {"gang": gang, "schedulerName": "gangs"},
    }
    objects = chart.render(values)
    role, _ = of_kind(objects, "ClusterRole")
    verbs = {"list", "create", "patch", "delete"}
    more = {(group, "podgroups"): verbs} if group else {}
    assert rights_of(role) == RIGHTS | REVIEWS | more
    config = parse_settings([], environment(objects)).config
    assert (config.gang, config.scheduler_name) == (gang, "gangs")


def test_the_permission_to_delete_runs_is_granted_with_its_value_only() -> None:
    assert not parse_settings([], environment(chart.render({}))).config.allow_run_deletion
    values = {"rbac": {"aggregatedRoles": False}, "runs": {"allowed": {"deletion": True}}}
    objects = chart.render(values)
    role, _ = of_kind(objects, "ClusterRole")
    more = {("evergrad.dev", "trainingruns"): {"list", "watch", "delete"}}
    assert rights_of(role) == RIGHTS | REVIEWS | more
    assert parse_settings([], environment(objects)).config.allow_run_deletion
    chart.render({"runs": {"allowed": None}})


def test_viewers_read_runs_editors_change_them_and_neither_gets_pod_permissions() -> None:
    roles = {
        one["metadata"]["name"].rpartition("-")[2]: one
        for one in of_kind(chart.render({}), "ClusterRole")
    }
    aggregated: dict[str, set[str]] = {"view": set(), "edit": set(), "admin": set()}
    for role, verbs in aggregated.items():
        for one in roles.values():
            if (
                one["metadata"]["labels"].get(
                    f"rbac.authorization.k8s.io/aggregate-to-{role}"
                )
                == "true"
            ):
                assert {resource for _, resource in rights_of(one)} <= {
                    "trainingruns",
                    "trainingruns/status",
                }
                verbs |= rights_of(one)[("evergrad.dev", "trainingruns")]
    read, change = {"get", "list", "watch"}, {"create", "update", "patch", "delete"}
    assert aggregated == {
        "view": read,
        "edit": read | change,
        "admin": read | change | {"deletecollection"},
    }


def test_every_pod_of_the_chart_passes_pod_security_restricted(
    rendering: list[Object],
) -> None:
    for _, spec in pod_specs(rendering):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec)
        assert {
            next(key for key in volume if key != "name")
            for volume in spec.get("volumes", ())
        } <= {"emptyDir"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]
            assert (
                not container["image"].endswith(":latest")
                and ":" in container["image"].rpartition("/")[2]
            )


def test_a_single_operator_uses_recreate_and_several_have_a_disruption_budget() -> None:
    objects = chart.render({})
    assert of_kind(objects, "Deployment")[0]["spec"]["strategy"] == {"type": "Recreate"}
    assert of_kind(objects, "PodDisruptionBudget") == []
    objects = chart.render({"replicas": 2})
    assert of_kind(objects, "Deployment")[0]["spec"]["strategy"] == {
        "type": "RollingUpdate"
    }
    assert len(of_kind(objects, "PodDisruptionBudget")) == 1


def test_the_operator_accepts_its_rendered_settings(rendering: list[Object]) -> None:
    given = environment(rendering)
    (deployment,) = of_kind(rendering, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    settings = parse_settings(container.get("args", []), given)
    understood = (
        vars(settings)
        | vars(settings.config)
        | {"all_namespaces": not settings.namespaces, "namespace": settings.namespaces}
    )
    for name, value in given.items():
        if name.startswith("EVERGRAD_"):
            key = name.removeprefix("EVERGRAD_").lower()
            assert key in understood, f"{name}: no setting of the operator"
            if key not in {"log_level", "namespace"}:
                assert value == as_text(understood[key])
    assert settings.port == container["ports"][0]["containerPort"] == 8080


def test_user_ids_and_shared_memory_of_runs_reach_the_operator_unchanged() -> None:
    assert "EVERGRAD_SHARED_MEMORY_SIZE" not in environment(chart.render({}))
    given = environment(
        chart.render(
            {"runs": {"sharedMemorySize": "8Gi", "userId": 1000660000, "groupId": 0}}
        )
    )
    config = parse_settings([], given).config
    assert (config.shared_memory_size, config.user_id, config.group_id) == (
        "8Gi",
        1000660000,
        0,
    )


def test_large_whole_numbers_reach_the_operator_without_an_exponent() -> None:
    # As a file of values has them: helm reads each number of it as a floating-point one.
    values = {
        "runs": {"nodeLossTolerationSeconds": 2592000, "price": {"gpuHour": 0.25}},
        "operator": {
            "workers": 1000000,
            "inFlight": 2000000,
            "resyncSeconds": 31536000,
        },
        "terminationGracePeriodSeconds": 1000000,
    }
    objects = chart.render(values)
    settings = parse_settings([], environment(objects))
    config = settings.config
    assert (config.node_loss_toleration_seconds, config.price_gpu_hour) == (2592000, 0.25)
    assert (settings.workers, settings.in_flight) == (1000000, 2000000)
    assert settings.resync_seconds == 31536000
    ((_, operator),) = (one for one in pod_specs(objects) if "test" not in one[0])
    assert operator["terminationGracePeriodSeconds"] == 1000000
    assert isinstance(operator["terminationGracePeriodSeconds"], int)


def test_removed_values_get_their_defaults() -> None:
    # Helm takes out a value of the chart by null.
    values = {
        "replicas": None,
        "terminationGracePeriodSeconds": None,
        "runs": {"userId": None, "price": {"gpuHour": None}},
        "operator": {"workers": None},
    }
    objects = chart.render(values)
    (deployment,) = (one for one in objects if one["kind"] == "Deployment")
    assert "replicas" not in deployment["spec"]
    assert "terminationGracePeriodSeconds" not in deployment["spec"]["template"]["spec"]
    assert "<nil>" not in json.dumps(deployment)
    assert environment(objects).keys().isdisjoint({"EVERGRAD_USER_ID", "EVERGRAD_WORKERS"})
    assert parse_settings([], environment(objects)).config.user_id == 10001


def test_allowed_service_accounts_and_disk_bounds_reach_the_operator_by_kind_of_pod() -> (
    None
):
    given = environment(chart.render({}))
    assert not any("ACCOUNTS" in name or "EPHEMERAL" in name for name in given)
    assert parse_settings([], given).config.scratch_size == "50Gi"
    disk = {"node": {"request": "1Gi", "limit": "9Gi"}, "coordinator": {"limit": "64Mi"}}
    runs = {
        "allowed": {"serviceAccountNames": ["fetcher", "reader"]},
        "ephemeralStorage": disk,
        "scratchSize": "",
    }
    config = parse_settings([], environment(chart.render({"runs": runs}))).config
    assert config.allowed_service_accounts == ("fetcher", "reader")
    assert (config.node_ephemeral_storage, config.node_ephemeral_storage_limit) == (
        "1Gi",
        "9Gi",
    )
    assert config.coordinator_ephemeral_storage_limit == "64Mi"
    assert (config.preparation_ephemeral_storage, config.scratch_size) == ("", "")


def test_the_operator_pods_have_the_label_that_runs_admit_for_any_release_name() -> None:
    (deployment,) = of_kind(
        chart.render({"nameOverride": "trainings", "podLabels": {"a": "b"}}), "Deployment"
    )
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] == "trainings"
    assert labels["evergrad.dev/role"] == "operator"
    assert labels["a"] == "b"


def test_by_default_only_the_monitoring_namespace_scrapes_runs_and_the_operator() -> None:
    objects = chart.render({"networkPolicy": {"enabled": True}})
    assert parse_settings([], environment(objects)).config.metrics_from == ("monitoring",)
    (policy,) = of_kind(objects, "NetworkPolicy")
    (*_, monitoring) = policy["spec"]["ingress"][0]["from"]
    assert monitoring == {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    }


def test_an_empty_list_of_scrapers_sets_no_variable_of_the_operator() -> None:
    objects = chart.render(
        {"runs": {"metricsFrom": []}, "networkPolicy": {"enabled": True, "metricsFrom": []}}
    )
    assert "EVERGRAD_METRICS_FROM" not in environment(objects)
    (policy,) = of_kind(objects, "NetworkPolicy")
    assert [list(one) for one in policy["spec"]["ingress"][0]["from"]] == [["podSelector"]]


def test_a_digest_takes_precedence_over_a_tag() -> None:
    assert environment(chart.render(chart.MATRIX["everything"]))[
        "EVERGRAD_TRAINER_IMAGE"
    ] == ("registry.example.com/evergrad/trainer@sha256:" + "ab" * 32)


def test_selectors_are_independent_of_the_version_and_match_the_pods(
    rendering: list[Object],
) -> None:
    (deployment,) = of_kind(rendering, "Deployment")
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert set(selector) == {
        "app.kubernetes.io/name",
        "app.kubernetes.io/instance",
        "app.kubernetes.io/component",
    }
    assert selector.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    for service in of_kind(rendering, "Service"):
        assert service["spec"]["selector"] == selector
    for test in of_kind(rendering, "Pod"):
        assert not selector.items() <= test["metadata"]["labels"].items()


def test_every_object_has_the_recommended_labels_and_a_namespace(
    rendering: list[Object],
) -> None:
    for one in rendering:
        if "extra" in one["metadata"]["name"]:
            continue
        assert {
            "app.kubernetes.io/managed-by",
            "app.kubernetes.io/instance",
            "helm.sh/chart",
        } <= set(one["metadata"]["labels"])
        assert ("namespace" in one["metadata"]) == (one["kind"] not in CLUSTER_SCOPED)


def test_two_releases_in_two_namespaces_share_only_the_crd() -> None:
    def names(namespace: str) -> set[tuple[str, str]]:
        objects = chart.render({"crds": {"install": namespace == "a"}}, namespace=namespace)
        return {
            (one["kind"], one["metadata"]["name"])
            for one in of_kind(objects, *CLUSTER_SCOPED)
        }

    assert names("a") & names("b") == set()


@pytest.mark.parametrize(
    ("release", "values", "name"),
    [
        ("my.rel", {}, "my.rel-evergrad"),
        ("1rel", {}, "1rel-evergrad"),
        ("evergrad", {"fullnameOverride": "a.b"}, "a.b"),
        ("first", {"nameOverride": "a.b"}, "first-a.b"),
    ],
)
def test_a_name_that_is_invalid_for_a_service_is_refused_with_a_remedy(
    release: str, values: Object, name: str
) -> None:
    with pytest.raises(BedError, match="Set fullnameOverride to") as caught:
        chart.render(values, release=release)
    assert f'"{name}"' in str(caught.value)
    objects = chart.render({**values, "fullnameOverride": "ours"}, release=release)
    assert {one["metadata"]["name"] for one in of_kind(objects, "Service")} == {"ours"}


def test_the_longest_names_stay_within_their_bounds() -> None:
    for one in chart.render(
        {"fullnameOverride": "a" * 200, "metrics": {"enabled": True}},
        release="r" * 53,
        namespace="n" * 63,
    ):
        assert len(one["metadata"]["name"]) <= (
            253 if one["kind"] in CLUSTER_SCOPED else 63
        )
        assert all(len(value) <= 63 for value in one["metadata"]["labels"].values())


def test_the_admission_policy_of_a_namespaced_operator_applies_to_its_namespaces_only() -> (
    None
):
    objects = chart.render(
        {
            "rbac": {"scope": "namespaced", "watchNamespaces": ["team-a"]},
            "admissionPolicy": {"enabled": True, "maxNodes": 3},
        }
    )
    (binding,) = of_kind(objects, "ValidatingAdmissionPolicyBinding")
    (expression,) = binding["spec"]["matchResources"]["namespaceSelector"][
        "matchExpressions"
    ]
    assert expression["values"] == ["team-a"]
    (policy,) = of_kind(objects, "ValidatingAdmissionPolicy")
    assert [rule["expression"] for rule in policy["spec"]["validations"]] == [
        "variables.maxNodes <= 3 || variables.maxNodes <= variables.oldMaxNodes"
    ]


def test_the_admission_policy_reads_node_numbers_as_the_whole_numbers_of_the_crd() -> None:
    values = {"admissionPolicy": {"enabled": True, "maxNodes": 3}}
    (policy,) = of_kind(chart.render(values), "ValidatingAdmissionPolicy")
    (crd,) = of_kind(chart.render({}), "CustomResourceDefinition")
    number, old = policy["spec"]["variables"]
    (version,) = crd["spec"]["versions"]
    bounds = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][
        "nodes"
    ]["properties"]
    for bound in ("max", "min"):
        assert (
            f"has(object.spec.nodes.{bound}) ? object.spec.nodes.{bound}"
            in number["expression"]
        )
        assert f"? oldObject.spec.nodes.{bound}" in old["expression"]
        assert bounds[bound]["type"] == "integer"


def test_an_admission_policy_without_node_numbers_computes_nothing() -> None:
    objects = chart.render(
        {"admissionPolicy": {"enabled": True, "allowedImages": ["registry.example.com/"]}}
    )
    (policy,) = of_kind(objects, "ValidatingAdmissionPolicy")
    assert "variables" not in policy["spec"]


def test_the_admission_policy_permits_deletion_of_a_run_and_its_existing_values() -> None:
    (policy,) = of_kind(chart.render({"admissionPolicy": BOUNDS}), POLICY)
    (condition,) = policy["spec"]["matchConditions"]
    assert condition["expression"] == "!has(object.metadata.deletionTimestamp)"
    (constraint,) = policy["spec"]["matchConstraints"]["resourceRules"]
    # An object that is deleted is null to the condition, which would then be an error.
    assert constraint["operations"] == ["CREATE", "UPDATE"]
    rules = policy["spec"]["validations"]
    assert [rule["message"].split(":")[0] for rule in rules] == [
        "spec.image",
        "spec.template.initContainers",
        "spec.template.priorityClassName",
        "spec.nodes.max",
    ]
    for rule, field in zip(
        rules,
        ("?image", "?template.?initContainers", "?template.?priorityClassName"),
        strict=False,
    ):
        unchanged = f"oldObject != null && object.spec.{field} == oldObject.spec.{field}"
        assert f"({unchanged})" in rule["expression"]


def test_the_operator_checks_profiles_against_the_lists_of_the_admission_policy() -> None:
    objects = chart.render({"admissionPolicy": BOUNDS})
    config = parse_settings([], environment(objects)).config
    assert config.allowed_images == tuple(BOUNDS["allowedImages"])
    assert config.allowed_priority_classes == tuple(BOUNDS["allowedPriorityClasses"])
    (policy,) = of_kind(objects, POLICY)
    said = " ".join(rule["expression"] for rule in policy["spec"]["validations"])
    start = f"{json.dumps(BOUNDS['allowedImages'], separators=(',', ':'))}.exists(start, "
    assert said.count(start) == 2 and said.count("startsWith(start)") == 2

    # Lists of a policy that is off have no effect.
    config = parse_settings(
        [], environment(chart.render({"admissionPolicy": {**BOUNDS, "enabled": False}}))
    ).config
    assert (config.allowed_images, config.allowed_priority_classes) == ((), ())


def test_the_policy_for_the_operator_allows_the_service_accounts_that_it_gives_to_pods() -> (
    None
):
    runs = {"allowed": {"serviceAccountNames": ["fetcher", "reader"]}}
    objects = chart.render({"runs": runs, "operatorPolicy": {"enabled": True}})
    allowed = parse_settings([], environment(objects)).config.allowed_service_accounts
    (policy,) = of_kind(objects, "ValidatingAdmissionPolicy")
    (rule,) = [
        one["expression"]
        for one in policy["spec"]["validations"]
        if "serviceAccountName" in one["expression"]
    ]
    (names_in_rule,) = re.findall(r"object\.spec\.serviceAccountName in (\[.*?])", rule)
    assert json.loads(names_in_rule) == ["", "default", *allowed]


def test_the_webhook_calls_the_operator_service_and_blocks_nothing_while_it_is_unavailable() -> (
    None
):
    objects = chart.render({})
    (configuration,) = of_kind(objects, "ValidatingWebhookConfiguration")
    (early,) = of_kind(objects, "MutatingWebhookConfiguration")
    (hook,) = configuration["webhooks"]
    assert {"reinvocationPolicy": "Never", **hook} == early["webhooks"][0]
    assert hook["name"] == WEBHOOK_NAME
    assert (hook["failurePolicy"], hook["sideEffects"], hook["timeoutSeconds"]) == (
        "Ignore",
        "None",
        5,
    )
    (rule,) = hook["rules"]
    # No subresource: status is the operator's own, and a run has no scale.
    assert (rule["resources"], rule["operations"]) == (
        ["trainingruns"],
        ["CREATE", "UPDATE"],
    )
    (service,) = of_kind(objects, "Service")
    called = hook["clientConfig"]["service"]
    assert (called["name"], called["namespace"]) == (
        service["metadata"]["name"],
        service["metadata"]["namespace"],
    )
    (port,) = [one for one in service["spec"]["ports"] if one["port"] == called["port"]]
    (container,) = next(spec for name, spec in pod_specs(objects) if name == "evergrad")[
        "containers"
    ]
    (target,) = [one for one in container["ports"] if one["name"] == port["targetPort"]]
    told = environment(objects)
    assert str(target["containerPort"]) == told["EVERGRAD_WEBHOOK_PORT"]
    assert (told["EVERGRAD_WEBHOOK"], called["path"]) == ("true", PATH)
    assert told["EVERGRAD_WEBHOOK_SERVICE"] == called["name"]
    assert told["EVERGRAD_WEBHOOK_CONFIGURATION"] == configuration["metadata"]["name"]


def test_without_the_early_webhook_no_permission_for_mutating_webhooks_is_granted() -> None:
    objects = chart.render({"webhook": {"early": False}})
    assert of_kind(objects, "MutatingWebhookConfiguration") == []
    (role,) = [
        one
        for one in of_kind(objects, "ClusterRole")
        if one["metadata"]["name"].endswith("-webhook")
    ]
    assert {resource for _, resource in rights_of(role)} == {
        "validatingwebhookconfigurations"
    }
    assert environment(objects)["EVERGRAD_WEBHOOK_EARLY"] == "false"


def test_a_namespaced_operator_has_a_webhook_only_on_request() -> None:
    values = chart.MATRIX["namespaces"]
    objects = chart.render(values)
    assert of_kind(objects, "ValidatingWebhookConfiguration") == []
    assert "EVERGRAD_WEBHOOK" not in environment(objects)
    objects = chart.render(values | {"webhook": {"enabled": True}})
    (configuration,) = of_kind(objects, "ValidatingWebhookConfiguration")
    (expression,) = configuration["webhooks"][0]["namespaceSelector"]["matchExpressions"]
    assert expression["values"] == ["team-a", "team-b"]
    assert (
        of_kind(
            chart.render({"webhook": {"enabled": False}}), "ValidatingWebhookConfiguration"
        )
        == []
    )


@pytest.mark.parametrize("issuer", [{}, {"name": "company", "kind": "ClusterIssuer"}])
def test_with_cert_manager_the_operator_has_no_permission_for_the_certificate(
    issuer: Object,
) -> None:
    objects = chart.render(
        {"webhook": {"certManager": {"enabled": True, "issuerRef": issuer}}}
    )
    (certificate,) = of_kind(objects, "Certificate")
    issuers = of_kind(objects, "Issuer")
    assert certificate["spec"]["issuerRef"] == (
        issuer or {"name": issuers[0]["metadata"]["name"], "kind": "Issuer"}
    )
    assert bool(issuers) == (not issuer)
    (configuration,) = of_kind(objects, "ValidatingWebhookConfiguration")
    assert configuration["metadata"]["annotations"] == {
        "cert-manager.io/inject-ca-from": f"{chart.NAMESPACE}/{certificate['metadata']['name']}"
    }
    called = configuration["webhooks"][0]["clientConfig"]["service"]
    assert (
        certificate["spec"]["dnsNames"][0] == f"{called['name']}.{called['namespace']}.svc"
    )
    assert not any(
        "webhook" in one["metadata"]["name"] for one in of_kind(objects, "ClusterRole")
    )
    (spec,) = [spec for name, spec in pod_specs(objects) if name == "evergrad"]
    (volume,) = [one for one in spec["volumes"] if one["name"] == "webhook"]
    assert volume["secret"]["secretName"] == certificate["spec"]["secretName"]
    (mount,) = [
        one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "webhook"
    ]
    assert environment(objects)["EVERGRAD_WEBHOOK_FILES"] == mount["mountPath"]


def test_rendering_is_deterministic_and_uses_no_lookup(root: Path) -> None:
    assert chart.template(chart.MATRIX["everything"]) == chart.template(
        chart.MATRIX["everything"]
    )
    templates = "".join(
        file.read_text()
        for file in (root / "charts/evergrad/templates").rglob("*")
        if file.is_file()
    )
    assert re.findall(r"\b(?:lookup|rand\w+|now|genCA|uuidv4|latest)\b", templates) == []


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"replica": 2}, "replica"),
        ({"image": {"tagg": "x"}}, "tagg"),
        ({"rbac": {"scope": "everywhere"}}, "rbac.scope"),
        ({"operator": {"workers": "many"}}, "operator.workers"),
        ({"resources": {"requests": {"cpu": "a lot"}}}, "resources.requests.cpu"),
        ({"runs": {"storage": {"accessMode": "RWX"}}}, "runs.storage.accessMode"),
        ({"admissionPolicy": {"enabled": True}}, "admissionPolicy: enabled"),
        ({"admissionPolicy": {"allowedImages": ["a' || true || 'b"]}}, "allowedImages"),
        ({"webhook": {"enabled": "perhaps"}}, "webhook.enabled"),
        ({"webhook": {"failurePolicy": "Maybe"}}, "webhook.failurePolicy"),
        ({"webhook": {"port": 443}}, "webhook.port"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name: missing"),
        ({"metrics": {"enable": True}}, "enable"),
        ({"metrics": {"interval": "15x"}}, "metrics.interval"),
        ({"metrics": {"rules": {"thresholds": {"dataShare": 0}}}}, "thresholds.dataShare"),
        ({"runs": {"userId": 0}}, "runs.userId"),
        ({"runs": {"sharedMemorySize": "much"}}, "runs.sharedMemorySize"),
        ({"podLabels": {"evergrad.dev/role": "other"}}, "podLabels.evergrad"),
        ({"commonLabels": {"evergrad.dev/role": "other"}}, "commonLabels.evergrad"),
    ],
)
def test_an_invalid_value_is_refused_with_its_path(values: Object, path: str) -> None:
    with pytest.raises(BedError) as caught:
        chart.render(values)
    assert re.search(path.replace(".", r"[./]"), str(caught.value)), str(caught.value)


def test_the_schema_lists_exactly_the_values(root: Path) -> None:
    schema = json.loads((root / "charts/evergrad/values.schema.json").read_text())
    values = yaml.safe_load((root / "charts/evergrad/values.yaml").read_text())

    def compare(found: Object, part: Object, path: str) -> None:
        if part.get("additionalProperties") is False:
            # Nothing of these two is a default; the rest is listed in full.
            assert set(found) == set(part["properties"]) or path in {
                ".strategy",
                ".resources",
            }, path
            for key, value in found.items():
                if isinstance(value, dict):
                    compare(value, part["properties"][key], f"{path}.{key}")
        else:
            assert part.get("type") in ("object", ["object", "null"]), path

    compare(values, schema, "")


def test_the_program_of_the_test_pod_gets_the_rules_of_the_operator() -> None:
    objects = chart.render({})
    (pod,) = of_kind(objects, "Pod")
    *_, address, scopes, rules = pod["spec"]["containers"][0]["command"]
    assert address == "http://evergrad.evergrad-system.svc:8080"
    assert json.loads(scopes) == [""]
    assert rights_of({"rules": json.loads(rules)}) == RIGHTS
    compile(pod["spec"]["containers"][0]["command"][2], "check", "exec")


def test_the_operator_may_connect_to_every_pod_that_serves_a_run_status(helm: None) -> None:
    rendered = chart.render({"networkPolicy": {"enabled": True}})
    (policy,) = of_kind(rendered, "NetworkPolicy")
    (rule,) = [one for one in policy["spec"]["egress"] if "to" in one]
    (role,) = rule["to"][0]["podSelector"]["matchExpressions"]
    assert sorted(role["values"]) == [names.ROLE_COORDINATOR, names.ROLE_PREPARATION]
    assert rule["ports"] == [{"protocol": "TCP", "port": names.STATUS_PORT}]
