"""The Helm chart on a cluster: installed, tested, upgraded and uninstalled.

For its rendering, see tests/unit/repository/test_chart.py.
"""

import json
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from admission_samples import SAMPLES, VALUES
from cluster_runs import make_manifest, wait_for
from patience import PATIENCE

pytestmark = pytest.mark.timeout(3600)
ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/evergrad"
# Another API group, so that the CRD under test is not the CRD of the other tests.
GROUP = "charttest.dev"


def helm(cluster: Any, namespace: str, *arguments: str, check: bool = True) -> str:
    """Run helm in a namespace, and return its output."""
    command = [
        str(cluster.helm),
        "--kubeconfig",
        str(cluster.kubeconfig),
        "--namespace",
        namespace,
        *arguments,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0 or not check, (
        f"helm {' '.join(arguments)}: {done.stdout}{done.stderr}"
    )
    return done.stdout + done.stderr


def kubectl(
    cluster: Any, *arguments: str, text: str | None = None, check: bool = True
) -> str:
    """Run kubectl, and return its output."""
    command = [str(cluster.kubectl), "--kubeconfig", str(cluster.kubeconfig), *arguments]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0 or not check, (
        f"kubectl {' '.join(arguments)}: {done.stdout}{done.stderr}"
    )
    return done.stdout + done.stderr


@pytest.fixture
def namespace(cluster: Any) -> Iterator[str]:
    """A namespace that enforces Pod Security restricted, deleted afterwards."""
    name = f"chart-{uuid.uuid4().hex[:6]}"
    kubectl(cluster, "create", "namespace", name)
    kubectl(
        cluster, "label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted"
    )
    yield name
    kubectl(cluster, "delete", "namespace", name, "--wait=false")


@pytest.fixture
def other_chart(cluster: Any, tmp_path: Path) -> Iterator[Path]:
    """The chart with its CRD in another API group; the CRD is deleted afterwards."""
    chart = tmp_path / "evergrad"
    shutil.copytree(CHART, chart)
    for file in (
        chart / "files/trainingrun.yaml",
        chart / "templates/crds/trainingrun.yaml",
    ):
        file.write_text(file.read_text().replace("evergrad.dev", GROUP))
    yield chart
    kubectl(cluster, "delete", "crd", f"trainingruns.{GROUP}", "--ignore-not-found")


def images_of(operator: Any) -> list[str]:
    """Return helm's arguments for the images under test."""
    words = []
    for key, image in {
        "image": operator.operator_image,
        "trainer.image": operator.trainer_image,
    }.items():
        repository, _, tag = image.rpartition(":")
        words += [
            "--set",
            f"{key}.repository={repository}",
            "--set-string",
            f"{key}.tag={tag}",
        ]
    return words


def _wait_for_refusal(apply: Callable[[], str]) -> None:
    """A new policy takes some time to be active."""
    deadline = time.monotonic() + PATIENCE
    while "denied" not in (said := apply()):
        assert time.monotonic() < deadline, said
        time.sleep(0.5)


def test_helm_test_checks_the_crd_the_permissions_and_the_health_of_the_operator(
    cluster: Any, operator: Any
) -> None:
    said = helm(cluster, operator.namespace, "test", "evergrad", "--timeout", "300s")
    assert "Phase:          Succeeded" in said


def test_an_operator_of_one_namespace_starts_with_permissions_there_only(
    cluster: Any, operator: Any, namespace: str
) -> None:
    settings = [
        "--set",
        "crds.install=false,rbac.scope=namespaced,rbac.aggregatedRoles=false",
        *images_of(operator),
    ]
    helm(
        cluster,
        namespace,
        "install",
        "narrow",
        str(CHART),
        "--wait",
        "--timeout",
        "300s",
        *settings,
    )
    try:
        assert "Succeeded" in helm(
            cluster, namespace, "test", "narrow", "--timeout", "300s"
        )
        account = f"--as=system:serviceaccount:{namespace}:narrow-evergrad"
        answers = {
            where: kubectl(
                cluster, "auth", "can-i", "create", "pods", account, *where, check=False
            ).split()[-1]
            for where in (
                ("--namespace", namespace),
                ("--namespace", "default"),
                ("--all-namespaces",),
            )
        }
        assert list(answers.values()) == ["yes", "no", "no"]
        assert (
            kubectl(
                cluster,
                "auth",
                "can-i",
                "get",
                "secrets",
                account,
                "--namespace",
                namespace,
                check=False,
            ).split()[-1]
            == "no"
        )
    finally:
        helm(cluster, namespace, "uninstall", "narrow", "--wait", "--cascade", "foreground")
    left = kubectl(
        cluster,
        "get",
        "all,roles,rolebindings,serviceaccounts",
        "--namespace",
        namespace,
        "--output",
        "name",
    )
    assert [name for name in left.split() if "narrow" in name] == []


def test_an_upgrade_installs_the_new_crd_and_an_uninstall_keeps_it_and_the_runs(
    cluster: Any, namespace: str, other_chart: Path
) -> None:
    settings = ["--set", "replicas=0,rbac.scope=namespaced,rbac.aggregatedRoles=false"]
    helm(cluster, namespace, "install", "first", str(other_chart), "--wait", *settings)
    kubectl(
        cluster,
        "wait",
        "--for=condition=Established",
        f"crd/trainingruns.{GROUP}",
        "--timeout=600s",
    )
    manifest = (
        (ROOT / "examples/quickstart/trainingrun.yaml")
        .read_text()
        .replace("evergrad.dev", GROUP)
    )
    kubectl(cluster, "apply", "--namespace", namespace, "--filename", "-", text=manifest)

    file = other_chart / "files/trainingrun.yaml"
    file.write_text(
        file.read_text().replace(
            "shortNames:\n      - trun\n", "shortNames:\n      - trun\n      - newer\n"
        )
    )
    helm(cluster, namespace, "upgrade", "first", str(other_chart), *settings)
    crd = json.loads(
        kubectl(cluster, "get", "crd", f"trainingruns.{GROUP}", "--output", "json")
    )
    assert crd["spec"]["names"]["shortNames"] == ["trun", "newer"]

    assert "kept" in helm(cluster, namespace, "uninstall", "first", "--wait")
    runs = kubectl(
        cluster,
        "get",
        f"trainingruns.{GROUP}",
        "--namespace",
        namespace,
        "--output",
        "name",
    )
    assert runs.split() == [f"trainingrun.{GROUP}/quickstart"]

    # A second installation works with the leftovers.
    helm(cluster, namespace, "install", "first", str(other_chart), "--wait", *settings)
    assert (
        len(
            kubectl(
                cluster,
                "get",
                f"trainingruns.{GROUP}",
                "--namespace",
                namespace,
                "--output",
                "name",
            ).split()
        )
        == 1
    )
    helm(cluster, namespace, "uninstall", "first", "--wait")


def _install_rules(cluster: Any, namespace: str) -> None:
    """An admission policy for runs, of a release that serves no namespace."""
    values = {
        "replicas": 0,
        "crds": {"install": False},
        "rbac": {"scope": "namespaced", "aggregatedRoles": False},
        "admissionPolicy": {
            "enabled": True,
            "allowedImages": ["registry.example.com/"],
            "allowedPriorityClasses": ["low"],
            "maxNodes": 2,
        },
    }
    given = ",".join(f"{key}={json.dumps(value)}" for key, value in values.items())
    helm(cluster, namespace, "install", "rules", str(CHART), "--set-json", given)


def _read_example(cluster: Any) -> dict[str, Any]:
    file = str(ROOT / "examples/quickstart/trainingrun.yaml")
    words = ("create", "--dry-run=client", "--output", "json", "--filename", file)
    run: dict[str, Any] = json.loads(kubectl(cluster, *words))
    return run


def test_a_tightened_admission_policy_blocks_no_existing_run(
    cluster: Any, operator: Any, namespace: str
) -> None:
    del operator
    good = _read_example(cluster)
    spec = {
        **good["spec"],
        "image": "elsewhere.example.com/x:1",
        "nodes": {"min": 1, "max": 4},
        "suspend": True,
        "template": {
            "priorityClassName": "high",
            "initContainers": [{"name": "a", "image": "elsewhere.example.com/x:1"}],
        },
    }
    within = ("--namespace", namespace)

    def create(name: str, *words: str) -> str:
        body = json.dumps({**good, "metadata": {"name": name}, "spec": spec})
        return kubectl(
            cluster, "create", *within, *words, "--filename", "-", text=body, check=False
        )

    assert "created" in create("earlier")
    _install_rules(cluster, namespace)
    try:
        _wait_for_refusal(lambda: create("later", "--dry-run=server"))

        def patch(change: dict[str, Any], *words: str) -> str:
            given = ("--type=merge", "--patch", json.dumps(change), *words)
            return kubectl(
                cluster, "patch", "trun", "earlier", *within, *given, check=False
            )

        for change in (
            {"metadata": {"labels": {"a": "b"}}},
            {"spec": {"nodes": {"max": 3}}},
        ):
            assert "patched" in patch(change), change
        assert "patched" in patch({"spec": {"suspend": False}}, "--dry-run=server")
        more = patch({"spec": {"nodes": {"max": 4}}})
        assert "spec.nodes.max: " in more
        # The garbage collector removes its finalizer by an update.
        gone = ("delete", "trun", "earlier", "--cascade=foreground", "--timeout=600s")
        assert "deleted" in kubectl(cluster, *gone, *within)
    finally:
        helm(cluster, namespace, "uninstall", "rules")


def test_the_admission_policy_refuses_exactly_what_it_names(
    cluster: Any, operator: Any, namespace: str
) -> None:
    _install_rules(cluster, namespace)
    try:
        good = _read_example(cluster)
        too_many = "spec.nodes.max"
        bad: list[tuple[str, dict[str, Any]]] = [
            (too_many, {"nodes": {"min": 1, "max": 3}}),
            ("spec.image", {"image": "elsewhere.example.com/x:1"}),
            (
                "spec.template.initContainers",
                {"template": {"initContainers": [{"name": "a", "image": "elsewhere/x:1"}]}},
            ),
            (
                "spec.template.priorityClassName",
                {"template": {"priorityClassName": "high"}},
            ),
            (too_many, {"nodes": {"min": 3}}),
        ]

        def apply(spec: dict[str, Any]) -> str:
            manifest = json.dumps(
                {**good, "metadata": {"name": "ruled"}, "spec": {**good["spec"], **spec}}
            )
            return kubectl(
                cluster,
                "create",
                "--dry-run=server",
                "--namespace",
                namespace,
                "--filename",
                "-",
                text=manifest,
                check=False,
            )

        _wait_for_refusal(lambda: apply(bad[0][1]))
        for path, spec in bad:
            assert f"{path}: " in apply(spec), spec
        fine = {
            "image": "registry.example.com/x:1",
            "template": {
                "priorityClassName": "low",
                "initContainers": [{"name": "a", "image": "registry.example.com/x:1"}],
            },
        }
        for nodes in ({"min": 1, "max": 2}, {"min": 2}, {"max": 2}, {}):
            assert "created" in apply({**fine, "nodes": nodes}), nodes
    finally:
        helm(cluster, namespace, "uninstall", "rules")


@pytest.mark.long
@pytest.mark.operator_ends
def test_cel_and_the_webhook_accept_and_refuse_the_same_runs(
    cluster: Any, operator: Any, namespace: str
) -> None:
    recipe = _read_example(cluster)

    def create(spec: Mapping[str, Any]) -> str:
        base = {"training": recipe["spec"]["training"], "nodes": {"min": 1, "max": 2}}
        body = {**recipe, "metadata": {"name": "sample"}, "spec": {**base, **spec}}
        words = ("create", "--dry-run=server", "--namespace", namespace, "--filename", "-")
        return kubectl(cluster, *words, text=json.dumps(body), check=False)

    def install(verb: str, *words: str, **more: Any) -> None:
        values = {
            **VALUES,
            "crds": {"install": False},
            "rbac": {"scope": "namespaced", "aggregatedRoles": False},
            **more,
        }
        pairs = ",".join(f"{key}={json.dumps(value)}" for key, value in values.items())
        given = ("--set-json", pairs, *words, "--wait", "--timeout", "300s")
        helm(cluster, namespace, verb, "table", str(CHART), *given)

    # Without any webhook only the API server's own rules remain: those of the CRD and the chart.
    with operator.gone():
        install("install", replicas=0)
        try:
            _wait_for_refusal(lambda: create({"image": "evil.example.com/x:1"}))
            for sample in SAMPLES:
                said = create(sample.spec)
                assert ("created" not in said) is sample.cel, (sample.name, said)

            # With a webhook of this installation, the operator decides.
            install("upgrade", *images_of(operator), webhook={"enabled": True})
            nowhere = {"profile": "nowhere"}
            wait_for(lambda: "no profile" in create(nowhere), "the webhook's first answer")
            for sample in SAMPLES:
                _put_profile(cluster, namespace, sample.own)
                said = create(sample.spec)
                is_refused = bool(sample.refused) or sample.cel
                assert ("created" not in said) is is_refused, (sample.name, said)
                if sample.held:
                    assert "unknown key" in said, said
        finally:
            helm(cluster, namespace, "uninstall", "table")


def _put_profile(cluster: Any, namespace: str, text: str | None) -> None:
    within = ("--namespace", namespace)
    if text is None:
        gone = ("delete", "configmap", "evergrad-profile", "--ignore-not-found")
        kubectl(cluster, *gone, *within)
        return
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "evergrad-profile"},
        "data": {"profile.yaml": text},
    }
    kubectl(cluster, "apply", *within, "--filename", "-", text=json.dumps(body))


@pytest.mark.long
def test_the_operator_account_can_create_only_objects_of_runs(
    cluster: Any, operator: Any, namespace: str
) -> None:
    del operator
    values = {
        "replicas": 0,
        "crds": {"install": False},
        "rbac": {"scope": "namespaced", "aggregatedRoles": False},
        "operatorPolicy": {"enabled": True},
        "runs": {"allowed": {"serviceAccountNames": ["fetcher"]}},
    }
    helm(
        cluster,
        namespace,
        "install",
        "walls",
        str(CHART),
        "--set-json",
        ",".join(f"{key}={json.dumps(value)}" for key, value in values.items()),
    )
    account = f"--as=system:serviceaccount:{namespace}:walls-evergrad"

    def create(body: dict[str, Any], *who: str) -> str:
        arguments = (
            "create",
            "--dry-run=server",
            "--namespace",
            namespace,
            "--filename",
            "-",
        )
        return kubectl(cluster, *who, *arguments, text=json.dumps(body), check=False)

    try:
        _wait_for_refusal(lambda: create(_pod(owner=None), account))
        # All other users may, and the operator may for a run.
        assert "created" in create(_pod(owner=None))
        assert "created" in create(_pod(), account)
        said = "writes and deletes objects of a TrainingRun only"
        for body in (
            _pod(owner=None),
            _pod(owner={"kind": "Deployment", "apiVersion": "apps/v1"}),
            _pod(label="another"),
            _object("ConfigMap", owner=None),
            _object("Secret", owner=None),
            _object("Service", owner=None, spec={"ports": [{"port": 80}]}),
        ):
            assert said in create(body, account), body
        for kind in ("ConfigMap", "Secret"):
            assert "created" in create(_object(kind), account), kind

        # Its own key and certificate, and no other Secret.
        for name in ("walls-evergrad-key", "walls-evergrad-webhook"):
            own = _object("Secret", owner=None)
            own["metadata"]["name"] = name
            assert "created" in create(own, account), name

        # Pod Security allows this, but the policy does not.
        assert "service account's token" in create(_pod(has_token=True), account)
        # The API server refuses missing service accounts before it evaluates the policy.
        for name in ("fetcher", "another"):
            kubectl(cluster, "create", "serviceaccount", name, "--namespace", namespace)
        assert "created" in create(_pod(runs_as="fetcher"), account)
        with_token = _pod(runs_as="fetcher", has_token=True)
        assert "service account's token" in create(with_token, account)
        said = "runs.allowed.serviceAccountNames"
        assert said in create(_pod(runs_as="another"), account)
        claim = {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
        }
        bare = _object("PersistentVolumeClaim", owner=None, label="", spec=claim)
        assert "with the label evergrad.dev/run only" in create(bare, account)
        assert "created" in create(
            _object("PersistentVolumeClaim", owner=None, spec=claim), account
        )
        _check_walls_of_claims(cluster, namespace, account, claim)
    finally:
        helm(cluster, namespace, "uninstall", "walls")


def _check_walls_of_claims(
    cluster: Any, namespace: str, account: str, spec: Mapping[str, Any]
) -> None:
    """Whose claims the operator's account can have deleted: the garbage collector deletes by metadata alone."""
    ours = {"evergrad.dev/run": "made", "app.kubernetes.io/managed-by": "evergrad"}
    # A run that exists, but for which no operator creates anything: the garbage collector would delete the
    # claim of a missing run.
    run = make_manifest("made", steps=1, changes={"managedBy": "example.com/another"})
    create = ["create", "--namespace", namespace, "--filename", "-"]
    created = kubectl(cluster, *create, "--output=json", text=json.dumps(run))
    made_for = json.loads(created)["metadata"]["uid"]
    for name, labels, annotations in (
        ("made", ours, {"evergrad.dev/made-for": made_for}),
        ("older", {**ours, "evergrad.dev/run": "older"}, {}),
        ("users", {}, {}),
    ):
        body = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "labels": labels, "annotations": annotations},
            "spec": spec,
        }
        # Created by the operator if it would do so, and otherwise by the user.
        who = [account] if labels else []
        create = [*who, "create", "--namespace", namespace, "--filename", "-"]
        assert "created" in kubectl(cluster, *create, text=json.dumps(body))

    def patch(name: str, metadata: Mapping[str, Any], *, is_dry: bool = True) -> str:
        arguments = ["patch", "pvc", name, "--namespace", namespace, "--type=merge"]
        arguments += ["--dry-run=server"] if is_dry else []
        change = json.dumps({"metadata": metadata})
        return kubectl(cluster, account, *arguments, "--patch", change, check=False)

    def owner(name: str, uid: str) -> dict[str, Any]:
        run = {"apiVersion": "evergrad.dev/v1alpha1", "kind": "TrainingRun"}
        return {"ownerReferences": [{**run, "name": name, "uid": uid}]}

    said = "keeps the finalizers of a claim"
    other = str(uuid.uuid4())
    for name in ("made", "older", "users"):
        # A missing run as the owner would have the claim deleted.
        assert said in patch(name, owner(name, other)), name
        assert said in patch(name, {"finalizers": []}), name
        assert said in patch(name, {"finalizers": ["x.example/stays"]}), name
        assert said in patch(name, {"annotations": {"evergrad.dev/made-for": other}}), name
        assert "patched" in patch(name, {"annotations": {"run.evergrad.dev/x": "{}"}}), name
    assert said in patch("older", owner("older", made_for)), "it does not say whose it is"
    assert said in patch("users", {"labels": ours})
    assert said in patch("made", {"labels": {"evergrad.dev/run": "users"}})
    assert said in patch("made", owner("another", made_for))
    config = {"apiVersion": "v1", "kind": "ConfigMap", "name": "made", "uid": made_for}
    assert said in patch("made", {"ownerReferences": [config]})

    # The operator's change for storage.whenDeleted, and back; the user's rights do not change.
    assert "patched" in patch("made", owner("made", made_for), is_dry=False)
    assert "patched" in patch("made", {"labels": {"cost-center": "4711"}})
    assert "patched" in patch("made", {"ownerReferences": None}, is_dry=False)
    as_user = ["patch", "pvc", "users", "--namespace", namespace, "--type=merge"]
    as_user += ["--dry-run=server", "--patch", json.dumps({"metadata": owner("x", other)})]
    assert "patched" in kubectl(cluster, *as_user)


def _object(
    kind: str,
    *,
    owner: Mapping[str, str] | None = MappingProxyType({}),
    label: str = "docs-lm",
    **rest: Any,
) -> dict[str, Any]:
    """Return an object as the operator creates it for the run docs-lm, or with another owner, or without one."""
    metadata: dict[str, Any] = {"name": "made"}
    if label:
        metadata["labels"] = {"evergrad.dev/run": label}
    if owner is not None:
        run = {"apiVersion": "evergrad.dev/v1alpha1", "kind": "TrainingRun"}
        metadata["ownerReferences"] = [
            {**run, "name": "docs-lm", "uid": str(uuid.uuid4()), **owner}
        ]
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **rest}


def _pod(*, has_token: bool = False, runs_as: str = "", **metadata: Any) -> dict[str, Any]:
    """Return a pod that Pod Security restricted allows."""
    container = {
        "name": "trainer",
        "image": "registry.example.com/x:1",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    security = {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    spec = {
        "automountServiceAccountToken": has_token,
        "serviceAccountName": runs_as,
        "securityContext": security,
        "containers": [container],
    }
    return _object("Pod", spec=spec, **metadata)
