"""Commands for a cluster with a stand-in for its API server: their requests, output and exit codes."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evergrad_cli.cluster.client import api_client
from evergrad_cli.cluster.client.errors import RefusedError, UnreachableError
from evergrad_cli.cluster.commands import waiting
from evergrad_cli.cluster.render.runs import parse_run
from evergrad_cli.main import main, main_of_plugin

RUNS = "/apis/evergrad.dev/v1alpha1/namespaces/lab/trainingruns"
RUN = f"{RUNS}/docs-lm"
PODS = "/api/v1/namespaces/lab/pods"
EVENTS = "/api/v1/namespaces/lab/events"
CLAIM = "/api/v1/namespaces/lab/persistentvolumeclaims/docs-lm"
Make = Callable[..., dict[str, Any]]
Api = Any
ROOT = Path(__file__).resolve().parents[3]
FAILED = {
    "type": "Failed",
    "status": "True",
    "reason": "WorkerCrash",
    "message": "rank 1 failed at step 7: boom",
}
COMPLETE = {
    "type": "Complete",
    "status": "True",
    "reason": "Complete",
    "message": "all steps are done",
}


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_POLL_SECONDS", 0.01)


def call(api: Api, *arguments: str) -> int:
    name, *rest = arguments
    return main([name, "--kubeconfig", api.kubeconfig, *rest])


def listed(*items: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "List", "metadata": {}, "items": list(items)}


def pod(
    name: str,
    index: int | None = 0,
    attempt: int = 0,
    *,
    phase: str = "Running",
    **status: Any,
) -> dict[str, Any]:
    labels = {"evergrad.dev/run": "docs-lm", "evergrad.dev/attempt": str(attempt)}
    labels["evergrad.dev/role"] = "coordinator" if index is None else "node"
    if index is not None:
        labels["evergrad.dev/index"] = str(index)
    state = (
        {"running": {}}
        if phase == "Running"
        else {"terminated": {"exitCode": 1, "reason": "Error"}}
    )
    return {
        "metadata": {
            "name": name,
            "labels": labels,
            "creationTimestamp": "2026-03-01T12:00:00Z",
        },
        "spec": {"nodeName": "n1", "containers": [{"name": "trainer"}]},
        "status": {
            "phase": phase,
            "containerStatuses": [{"name": "trainer", "state": state, "restartCount": 0}],
            **status,
        },
    }


# ---- connection --------------------------------------------------------------------------------------------


def test_the_context_sets_the_namespace_and_the_option_overrides_it(
    api: Api, make_run: Make
) -> None:
    api.on("GET", RUNS, listed(make_run()))
    api.on("GET", RUNS.replace("lab", "default"), listed())
    api.on("GET", RUNS.replace("lab", "mine"), listed())
    assert (
        call(api, "list")
        == call(api, "list", "--context", "other")
        == call(api, "list", "-n", "mine")
        == 0
    )
    assert [request.path.split("/")[5] for request in api.requests] == [
        "lab",
        "default",
        "mine",
    ]


def test_requests_carry_the_token_of_the_user_and_the_evergrad_user_agent(api: Api) -> None:
    api.on("GET", RUNS, listed())
    call(api, "list")
    headers = api.requests[0].headers
    assert headers["authorization"] == "Bearer very-secret"
    assert headers["User-Agent"].startswith("evergrad-cli/")


@pytest.mark.parametrize(
    "arguments", [("--kubeconfig", "/nowhere/config"), ("--context", "nowhere")]
)
def test_an_unusable_kubeconfig_ends_with_64(
    api: Api, arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = [] if arguments[0] == "--kubeconfig" else ["--kubeconfig", api.kubeconfig]
    assert main(["list", *before, *arguments]) == 64
    error = capsys.readouterr().err
    assert (
        arguments[1] in error
        and "Name a file with --kubeconfig" in error
        and "Traceback" not in error
    )


@pytest.mark.parametrize("current", [None, "", "gone"])
def test_a_named_context_needs_no_current_context(
    api: Api, tmp_path: Path, current: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(Path(api.kubeconfig).read_text())
    del config["current-context"]
    if current is not None:
        config["current-context"] = current
    file = tmp_path / "without"
    file.write_text(json.dumps(config))
    api.on("GET", RUNS, listed())
    assert main(["list", "--kubeconfig", str(file), "--context", "lab"]) == 0
    assert api.requests[0].path == RUNS
    assert main(["list", "--kubeconfig", str(file)]) == 64
    assert "cannot be used" in capsys.readouterr().err


def test_a_context_is_found_in_any_of_several_files(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = json.loads(Path(api.kubeconfig).read_text())
    first = {"kind": "Config", "clusters": whole["clusters"], "users": whole["users"]}
    second = {"kind": "Config", "contexts": whole["contexts"]}
    for name, content in (("first", first), ("second", second)):
        (tmp_path / name).write_text(json.dumps(content))
    places = f"{tmp_path / 'first'}:{tmp_path / 'second'}"
    monkeypatch.setattr("kubernetes.config.KUBE_CONFIG_DEFAULT_LOCATION", places)
    api.on("GET", RUNS, listed())
    assert main(["list", "--context", "lab"]) == 0
    assert api.requests[0].path == RUNS


def test_a_kubeconfig_that_is_not_yaml_ends_with_64_and_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text("a: [b\n\tc")
    assert main(["list", "--kubeconfig", str(file)]) == 64
    (error,) = capsys.readouterr().err.splitlines()
    assert f"kubeconfig {file}: cannot be used" in error and "line 2" in error


def test_an_unreachable_cluster_ends_with_70_and_prints_no_secret(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(api.kubeconfig).read_text().replace(api.url, "http://127.0.0.1:1")
    (tmp_path / "down").write_text(text)
    assert main(["status", "docs-lm", "--kubeconfig", str(tmp_path / "down")]) == 70
    error = capsys.readouterr().err
    assert (
        "http://127.0.0.1:1 cannot be reached" in error
        and "refused" in error
        and "very-secret" not in error
    )
    assert len(error.splitlines()) == 1


def test_without_the_client_the_message_names_the_install_command(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['kubernetes'] = None\nfrom evergrad_cli.main import "
        "main\nsys.exit(main(['list']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 64
    assert "pip install ./common ./coordinator ./manifest './cli[cluster]'" in result.stderr


def test_a_long_list_is_read_page_by_page(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: Any) -> tuple[int, Any]:
        if request.query.get("continue") == "next":
            return 200, listed(make_run("second"))
        return 200, {**listed(make_run("first")), "metadata": {"continue": "next"}}

    api.on("GET", RUNS, answer)
    assert call(api, "list", "--json") == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == [
        "first",
        "second",
    ]


@pytest.mark.parametrize("name", ["Docs", "pod/docs-lm", "-x", "a_b", "docs/../lm"])
def test_an_invalid_run_name_is_refused_before_any_request(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("status", "open"):
        assert main([command, f"--kubeconfig=/nowhere/{name}", "--", name]) == 64
    with pytest.raises(SystemExit) as ended:
        main(["wait", f"--kubeconfig=/nowhere/{name}", "--", name])
    assert ended.value.code == 64


def test_a_cluster_without_the_crd_is_reported(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(api, "list") == 64
    assert "this cluster does not know TrainingRuns" in capsys.readouterr().err


def test_a_user_without_permission_gets_an_error(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    api.refuse("GET", RUNS, 403, 'trainingruns is forbidden: User "me" cannot list')
    assert call(api, "list") == 64
    assert "trainingruns: is not allowed" in capsys.readouterr().err


def connect_to_pod(api: Api) -> None:
    args = argparse.Namespace(kubeconfig=api.kubeconfig, context=None, namespace=None)
    with api_client.connect(args) as cluster:
        cluster.connect_to_pod("docs-lm-coordinator-0", 29401)


def test_a_missing_permission_to_forward_a_port_is_reported_as_such(api: Api) -> None:
    told = 'User "me" cannot get resource "pods/portforward" in API group ""'
    api.refuse("GET", f"{PODS}/docs-lm-coordinator-0/portforward", 403, told)
    with pytest.raises(RefusedError) as refused:
        connect_to_pod(api)
    assert refused.value.status == 403
    start = "pod docs-lm-coordinator-0: is not allowed"
    assert str(refused.value).startswith(f"{start}; {told}")


def test_a_pod_whose_port_cannot_be_forwarded_is_reported_with_the_server_message(
    api: Api,
) -> None:
    path = f"{PODS}/docs-lm-coordinator-0/portforward"
    api.refuse("GET", path, 500, "error dialing backend: no route to host")
    with pytest.raises(UnreachableError, match="answers with 500; error dialing backend"):
        connect_to_pod(api)
    # A proxy without websockets: it returns neither the API server's refusal nor a connection.
    api.on("GET", path, "welcome")
    with pytest.raises(
        UnreachableError, match=r"cannot be reached; .*Handshake status 200"
    ):
        connect_to_pod(api)


# ---- list, status, checkpoints, top ------------------------------------------------------------------------


def test_an_empty_list_of_runs_prints_a_remark_on_stderr(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    api.on("GET", RUNS, listed())
    assert call(api, "list") == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "No runs found in namespace lab.\n")


def test_the_list_can_be_filtered_by_labels_and_phase(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    api.on("GET", RUNS, listed(make_run("one"), make_run("two", phase="Waiting")))
    assert call(api, "list", "-l", "team=docs", "--phase", "waiting", "--json") == 0
    assert api.requests[0].query["labelSelector"] == "team=docs"
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["two"]


def test_status_shows_run_pods_and_events(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    api.on("GET", RUN, make_run())
    api.on(
        "GET",
        PODS,
        listed(
            pod("docs-lm-0-0", 0),
            pod("docs-lm-0-1", 0, 1),
            pod("docs-lm-coordinator-0", None),
        ),
    )

    def events(request: Any) -> tuple[int, Any]:
        kind = "Pod" if "kind=Pod" in request.query["fieldSelector"] else "TrainingRun"
        names = ["docs-lm-0-1", "of-somebody-else"] if kind == "Pod" else ["docs-lm"]
        items = [
            {
                "type": "Warning",
                "reason": f"Of{kind}",
                "message": "told",
                "involvedObject": {"kind": kind, "name": name},
                "lastTimestamp": "2026-03-01T12:00:00Z",
            }
            for name in names
        ]
        return 200, listed(*items)

    api.on("GET", EVENTS, events)
    assert call(api, "status", "docs-lm", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["run"]["step"], shown["run"]["percent"], shown["run"]["loss"]) == (
        1200,
        6.0,
        2.413,
    )
    assert [one["name"] for one in shown["pods"]] == [
        "docs-lm-0-1",
        "docs-lm-0-0",
        "docs-lm-coordinator-0",
    ]
    assert [one["object"] for one in shown["events"]] == [
        "trainingrun/docs-lm",
        "pod/docs-lm-0-1",
    ]
    place = f"--kubeconfig {api.kubeconfig}"
    assert shown["next"] == [f"Follow it: evergrad logs docs-lm -f {place}"]


def test_suggested_commands_have_the_given_cluster_and_namespace(
    api: Api, make_run: Make, manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*arguments: str) -> str:
        call(api, *arguments, "-n", "lab", "--context", "other")
        captured = capsys.readouterr()
        return captured.out + captured.err

    place = f"-n lab --context other --kubeconfig {api.kubeconfig}"
    api.on("GET", RUN, make_run(phase="Failed", conditions=[FAILED]))
    api.on("GET", PODS, listed())
    api.on("GET", EVENTS, listed())
    api.on("PATCH", RUN, make_run(phase="Failed", conditions=[FAILED]))
    shown = told("status", "docs-lm")
    assert f"evergrad logs docs-lm {place}\n" in shown
    assert f"evergrad restart docs-lm {place}\n" in shown
    assert f"evergrad restart docs-lm {place}" in told("resume", "docs-lm")
    assert f"evergrad restart docs-lm {place}" in told("suspend", "docs-lm")
    assert f"evergrad restart docs-lm {place}\n" in told("submit", str(manifest))

    api.on("GET", RUN, make_run(spec={"suspend": True}))
    assert f"evergrad resume docs-lm {place}" in told("restart", "docs-lm")
    api.on("GET", PODS, listed(pod("docs-lm-0-0")))
    assert f"evergrad status docs-lm {place}" in told("logs", "docs-lm", "--node", "7")
    command = json.loads(told("checkpoints", "docs-lm", "--json"))["listCommand"]
    assert command.startswith(f"kubectl exec docs-lm-0-0 {place} -- ls -l")


def test_suggested_commands_after_submit_have_the_namespace_of_the_file(
    api: Api, make_run: Make, manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = RUN.replace("lab", "mine")
    api.refuse("GET", path, 404, "not found", name="docs-lm", kind="trainingruns")
    api.on("PATCH", path, make_run(), status=201)
    assert call(api, "submit", str(manifest), "--set", "metadata.namespace=mine") == 0
    told = f"Follow it: evergrad logs docs-lm -f -n mine --kubeconfig {api.kubeconfig}\n"
    assert capsys.readouterr().err == told


def test_status_works_for_a_user_who_may_only_get_the_run(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    api.on("GET", RUN, make_run())
    api.refuse("GET", PODS, 403, "no")
    api.refuse("GET", EVENTS, 403, "no")
    assert call(api, "status", "trun/docs-lm") == 0
    text = capsys.readouterr().out
    assert (
        "unknown: this user may not list pods" in text
        and "unknown: this user may not list events" in text
    )


def test_a_missing_run_is_reported_with_64(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    api.refuse("GET", RUN, 404, "not found", name="docs-lm", kind="trainingruns")
    for command in ("status", "wait", "suspend", "logs", "checkpoints"):
        assert call(api, command, "docs-lm") == 64
        assert "trainingrun docs-lm: does not exist" in capsys.readouterr().err


def test_checkpoints_shows_the_known_facts(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"path": "runs/docs-lm", "epoch": 3}
    claim = {
        "metadata": {"annotations": {"run.evergrad.dev/docs-lm": json.dumps(record)}},
        "status": {"phase": "Bound", "capacity": {"storage": "20Gi"}},
    }
    api.on("GET", RUN, make_run())
    api.on("GET", CLAIM, claim)
    api.on("GET", PODS, listed(pod("docs-lm-0-0", 0)))
    assert call(api, "checkpoints", "docs-lm", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["newestStep"], shown["stepsSince"], shown["complete"]) == (
        1100,
        100,
        False,
    )
    assert shown["directory"] == "/volume/runs/docs-lm/checkpoints"
    assert "docs-lm-0-0" in shown["listCommand"]
    api.refuse("GET", CLAIM, 403, "no")
    api.on("GET", PODS, listed())
    assert call(api, "checkpoints", "docs-lm") == 0
    text = capsys.readouterr().out
    assert (
        "Newest:     step 1100; 100 steps since" in text and "may not read claims" in text
    )


def test_top_sums_usage_if_the_cluster_measures_it(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    api.on(
        "GET",
        RUNS,
        listed(make_run("one"), make_run("two"), make_run("over", conditions=[COMPLETE])),
    )
    assert call(api, "top") == 0
    captured = capsys.readouterr()
    assert (
        "metrics-server is not installed" in captured.err
        and "82.4k" in captured.out
        and "over" not in captured.out
    )
    usage = {
        "metadata": {"namespace": "lab", "labels": {"evergrad.dev/run": "two"}},
        "containers": [{"usage": {"cpu": "1500m", "memory": "1Gi"}}],
    }
    api.on("GET", "/apis/metrics.k8s.io/v1beta1/namespaces/lab/pods", listed(usage, usage))
    assert call(api, "top", "--sort", "cpu", "--json") == 0
    first, second = json.loads(capsys.readouterr().out)["runs"]
    assert (first["name"], first["cpuCores"], first["memoryBytes"], first["pods"]) == (
        "two",
        3.0,
        2**31,
        2,
    )
    assert second["cpuCores"] is None


# ---- submit ------------------------------------------------------------------------------------------------


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    text = (ROOT / "examples/pydoc/trainingrun.yaml").read_text()
    path = tmp_path / "trainingrun.yaml"
    path.write_text(
        text.replace("documents.jsonl", "/volume/documents.jsonl").replace(
            "pydoc-lm", "docs-lm"
        )
    )
    return path


def missing(api: Api) -> None:
    api.refuse("GET", RUN, 404, "not found", name="docs-lm", kind="trainingruns")


def test_submit_applies_the_file_unchanged(
    api: Api, manifest: Path, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    missing(api)
    api.on("PATCH", RUN, make_run(), status=201)
    assert call(api, "submit", str(manifest), "--set", "spec.nodes.min=2") == 0
    captured = capsys.readouterr()
    assert (
        captured.out == "trainingrun/docs-lm created\n"
        and "evergrad logs docs-lm -f" in captured.err
    )
    (patch,) = api.sent("PATCH")
    assert patch.headers["Content-Type"] == "application/apply-patch+yaml"
    assert patch.query == {
        "fieldManager": "evergrad-cli",
        "fieldValidation": "Strict",
        "force": "false",
    }
    assert patch.body["spec"]["nodes"] == {"min": 2, "max": 2}
    assert "reproducibility" not in patch.body["spec"]["training"]


def test_whole_numbers_are_sent_as_integers_in_any_spelling(
    api: Api, manifest: Path, make_run: Make
) -> None:
    missing(api)
    api.on("PATCH", RUN, make_run(), status=201)
    manifest.write_text(
        manifest.read_text().replace("horizon: {steps: 300}", "horizon: {steps: 1.5e+3}")
    )
    assert call(api, "submit", str(manifest)) == 0
    training = api.sent("PATCH")[0].body["spec"]["training"]
    assert json.dumps(training["horizon"]) == '{"steps": 1500}'
    assert training["optimizer"]["learningRate"] == 0.003


def test_a_dry_run_creates_nothing(
    api: Api, manifest: Path, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    missing(api)
    api.on("PATCH", RUN, make_run(), status=201)
    assert call(api, "submit", str(manifest), "--dry-run", "--json") == 0
    assert api.sent("PATCH")[0].query["dryRun"] == "All"
    shown = json.loads(capsys.readouterr().out)
    assert (shown["result"], shown["dryRun"], shown["exitCode"]) == ("created", True, 0)


def test_the_same_file_again_is_unchanged_and_a_new_one_is_configured(
    api: Api, manifest: Path, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    api.on("GET", RUN, make_run())
    api.on("PATCH", RUN, make_run())
    assert call(api, "submit", str(manifest)) == 0
    api.on("PATCH", RUN, make_run(spec={"suspend": True}))
    assert call(api, "submit", str(manifest)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "trainingrun/docs-lm unchanged",
        "trainingrun/docs-lm configured",
    ]


def test_an_invalid_file_is_refused_locally_with_every_problem(
    api: Api, manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        call(
            api,
            "submit",
            str(manifest),
            "--set",
            "spec.nodes.max=0",
            "--set",
            "spec.training.horizon.steps=none",
        )
        == 64
    )
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert api.requests == []


def test_paths_that_cannot_exist_in_a_pod_are_refused(
    api: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(ROOT / "examples/pydoc/trainingrun.yaml")
    assert call(api, "submit", path, "--set", "spec.training.initFrom.path=before") == 64
    told = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in told] == [
        "spec.training.data.sources[0].path",
        "spec.training.initFrom.path",
    ]
    assert (
        "documents.jsonl is a relative path; there is no folder of the file in a pod"
        in told[0]
    )
    assert api.requests == []


def test_a_refusal_of_the_server_names_the_fields(
    api: Api, manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing(api)
    causes = [
        {
            "reason": "FieldValueInvalid",
            "message": "Invalid value: 2: the recipe does not change",
            "field": "spec.training",
        },
        {"reason": "FieldValueInvalid", "message": "Too long", "field": "metadata.name"},
    ]
    api.refuse("PATCH", RUN, 422, "is invalid", name="docs-lm", causes=causes)
    assert call(api, "submit", str(manifest)) == 64
    assert capsys.readouterr().err.splitlines() == [
        "error: spec.training: Invalid value: 2: the recipe does not change.",
        "error: metadata.name: Too long.",
    ]


def conflict(manager: str) -> dict[str, Any]:
    message = f'conflict with "{manager}" using evergrad.dev/v1alpha1'
    return {
        "reason": "FieldManagerConflict",
        "message": message,
        "field": ".spec.nodes.max",
    }


def test_fields_of_another_field_manager_are_not_taken_over_by_default(
    api: Api, manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing(api)
    api.refuse("PATCH", RUN, 409, "conflict", name="docs-lm", causes=[conflict("argocd")])
    assert call(api, "submit", str(manifest)) == 64
    error = capsys.readouterr().err
    assert (
        "spec.nodes.max: belongs to another writer" in error
        and "argocd" in error
        and "--force-conflicts" in error
    )


def test_fields_set_by_other_evergrad_commands_are_taken_over(
    api: Api, manifest: Path, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    api.on("GET", RUN, make_run())
    refusal = {
        "kind": "Status",
        "message": "conflict",
        "details": {"causes": [conflict("evergrad-cli")]},
    }
    api.on(
        "PATCH",
        RUN,
        lambda request: (
            (200, make_run()) if request.query["force"] == "true" else (409, refusal)
        ),
    )
    assert call(api, "submit", str(manifest)) == 0
    assert [request.query["force"] for request in api.sent("PATCH")] == ["false", "true"]


def test_the_namespace_of_the_file_is_used_and_an_option_may_not_contradict_it(
    api: Api, manifest: Path, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    override = ["--set", "metadata.namespace=mine"]
    path = RUN.replace("lab", "mine")
    api.refuse("GET", path, 404, "not found", name="docs-lm", kind="trainingruns")
    api.on("PATCH", path, make_run(), status=201)
    assert call(api, "submit", str(manifest), *override) == 0
    assert call(api, "submit", str(manifest), *override, "-n", "lab") == 64
    assert (
        "lab is not the namespace of the file; the file has mine" in capsys.readouterr().err
    )


def test_submit_can_wait_and_exits_with_the_result_of_the_run(
    api: Api, manifest: Path, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    missing(api)
    states = [
        make_run(),
        make_run(phase="Running"),
        make_run(phase="Failed", conditions=[FAILED]),
    ]

    def patch(request: Any) -> tuple[int, Any]:
        api.on("GET", RUN, lambda request: (200, states.pop(0)))
        return 201, make_run()

    api.on("PATCH", RUN, patch)
    assert call(api, "submit", str(manifest), "--watch") == 70
    captured = capsys.readouterr()
    assert "Running  nodes 3/4  step 1200/20000  loss 2.413" in captured.out
    assert "trainingrun/docs-lm has failed" in captured.err and "boom" in captured.err


def test_submit_that_restarts_a_failed_run_waits_for_its_new_end(
    api: Api, manifest: Path, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"restartNonce": "second"}
    before = make_run(phase="Failed", conditions=[FAILED])
    after = {**before, "spec": spec}
    states = [
        before,
        after,
        make_run(spec=spec, restartNonce="second", conditions=[COMPLETE]),
    ]
    api.on("GET", RUN, lambda request: (200, states.pop(0)))
    api.on("PATCH", RUN, after)
    change = ("--set", "spec.restartNonce=second")
    assert call(api, "submit", str(manifest), *change, "--wait") == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1] == "trainingrun/docs-lm is complete"
    assert captured.err == ""


# ---- wait, suspend, resume, restart ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("goal", "status", "code"),
    [
        ("complete", {"phase": "Complete", "conditions": [COMPLETE]}, 0),
        ("complete", {"phase": "Failed", "conditions": [FAILED]}, 70),
        (
            "complete",
            {"phase": "Failed", "conditions": [FAILED], "lastFailure": {"exitCode": 64}},
            64,
        ),
        (
            "complete",
            {"phase": "Failed", "reason": "UserError", "conditions": [FAILED]},
            64,
        ),
        ("complete", {}, 124),
        ("failed", {"phase": "Failed", "conditions": [FAILED]}, 0),
        ("failed", {"phase": "Complete", "conditions": [COMPLETE]}, 70),
        ("running", {}, 0),
        ("running", {"phase": "Complete", "conditions": [COMPLETE]}, 0),
        ("running", {"observedGeneration": 0}, 124),
        ("suspended", {}, 124),
        ("suspended", {"conditions": [{"type": "Suspended", "status": "True"}]}, 0),
        (
            "suspended",
            {
                "observedGeneration": 0,
                "conditions": [{"type": "Suspended", "status": "True"}],
            },
            124,
        ),
    ],
)
def test_wait_has_an_exit_code_for_each_result(
    api: Api,
    make_run: Make,
    goal: str,
    status: dict[str, Any],
    code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    api.on("GET", RUN, make_run(**status))
    assert (
        call(api, "wait", "docs-lm", "--for", goal, "--timeout", "0.05", "--json") == code
    )
    shown = json.loads(capsys.readouterr().out)
    assert (shown["reached"], shown["exitCode"]) == (code == 0, code)


@pytest.mark.parametrize("goal", ["complete", "running", "failed"])
@pytest.mark.parametrize("old", [None, "first"])
@pytest.mark.parametrize("new", [None, "second"])
def test_a_failure_before_a_new_nonce_ends_no_wait(
    api: Api, make_run: Make, goal: str, old: str | None, new: str | None
) -> None:
    # None: the field is absent. Its removal restarts a failed run, too.
    spec = {} if new is None else {"restartNonce": new}
    status = {} if old is None else {"restartNonce": old}
    api.on("GET", RUN, make_run(spec=spec, phase="Failed", conditions=[FAILED], **status))
    code = call(api, "wait", "docs-lm", "--for", goal, "--timeout", "0.05")
    assert code == (124 if old != new else 0 if goal == "failed" else 70)


def test_a_complete_run_is_complete_for_any_nonce(api: Api, make_run: Make) -> None:
    spec = {"restartNonce": "second"}
    api.on("GET", RUN, make_run(spec=spec, restartNonce="first", conditions=[COMPLETE]))
    assert call(api, "wait", "docs-lm") == 0
    assert call(api, "suspend", "docs-lm") == 64


def test_a_wait_continues_after_an_outage_and_ends_at_a_deletion(
    api: Api,
    make_run: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        waiting.WaitLimits, "after", lambda self, error: setattr(self, "_pause", 0.01)
    )
    gone = {
        "kind": "Status",
        "message": "not found",
        "details": {"name": "docs-lm", "kind": "trainingruns"},
    }
    answers = [
        (200, make_run()),
        (503, "starting"),
        (500, "etcd"),
        (200, make_run()),
        (404, gone),
    ]
    api.on("GET", RUN, lambda request: answers.pop(0))
    assert call(api, "wait", "docs-lm") == 70
    error = capsys.readouterr().err
    assert (
        "The cluster answers again." in error and "trainingrun/docs-lm was deleted" in error
    )


ODD = [
    pytest.param(403, {"kind": "Status", "message": "RBAC: not synced"}, id="forbidden"),
    pytest.param(401, {"kind": "Status", "message": "Unauthorized"}, id="unauthorized"),
    pytest.param(404, "404 page not found", id="kind not served yet"),
]


@pytest.mark.parametrize(("status", "body"), ODD)
def test_a_wait_continues_after_errors_of_a_starting_api_server(
    api: Api,
    make_run: Make,
    status: int,
    body: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(waiting, "_POLL_SECONDS", 0.01)
    answers = [
        (200, make_run()),
        *[(status, body)] * 3,
        (200, make_run(phase="Complete", conditions=[COMPLETE])),
    ]
    api.on("GET", RUN, lambda request: answers.pop(0))
    assert call(api, "wait", "docs-lm") == 0
    assert "The cluster answers again." in capsys.readouterr().err


@pytest.mark.parametrize(("status", "body"), ODD)
def test_a_persistent_final_error_ends_a_wait_with_a_refusal(
    api: Api,
    make_run: Make,
    status: int,
    body: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(waiting, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "_ODD_ANSWERS_SECONDS", 0.05)
    first = [(200, make_run())]
    api.on("GET", RUN, lambda request: first.pop() if first else (status, body))
    assert call(api, "wait", "docs-lm") == 64
    assert "was deleted" not in capsys.readouterr().err


STALLED = {
    "phase": "Waiting",
    "reason": "InvalidSpec",
    "message": "spec.profile: there is no profile 'a10'. Use one of: a100.",
    "conditions": [{"type": "Stalled", "status": "True", "reason": "InvalidSpec"}],
}


@pytest.mark.parametrize("goal", ["complete", "running", "failed", "suspended"])
def test_a_wait_ends_if_the_run_needs_a_person(
    api: Api,
    make_run: Make,
    goal: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(waiting, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(waiting, "STALLED_SECONDS", 0.1)
    api.on("GET", RUN, make_run(**STALLED))
    assert call(api, "wait", "docs-lm", "--for", goal) == 64
    assert capsys.readouterr().err.strip() == (
        f"trainingrun/docs-lm waits for you; InvalidSpec: {STALLED['message']}"
    )


def test_submit_with_wait_ends_if_the_run_needs_a_person(
    api: Api,
    make_run: Make,
    manifest: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(waiting, "STALLED_SECONDS", 0.0)
    api.on("GET", RUN, make_run(**STALLED))
    api.on("PATCH", RUN, make_run(**STALLED))
    assert call(api, "submit", str(manifest), "--wait") == 64
    assert "waits for you; InvalidSpec: spec.profile" in capsys.readouterr().err


def test_a_stall_counts_only_after_its_duration_and_for_the_current_spec(
    make_run: Make,
) -> None:
    now = [0.0]
    watch = waiting.StallWatch(clock=lambda: now[0])
    stalled = parse_run(make_run(**STALLED))
    assert watch.judge(stalled) is None
    now[0] = 29.0
    assert watch.judge(stalled) is None
    # Corrected, and invalid again: the time starts again.
    assert watch.judge(parse_run(make_run())) is None
    assert watch.judge(stalled) is None
    now[0] = 58.0
    assert watch.judge(stalled) is None
    # The operator has not observed the newest spec yet.
    assert watch.judge(parse_run(make_run(**{**STALLED, "observedGeneration": 0}))) is None
    assert watch.judge(stalled) is None
    now[0] = 88.0
    found = watch.judge(stalled)
    assert found is not None and found.exit_code == 64


def test_a_wait_ignores_another_run_of_the_same_name(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    second = make_run(conditions=[COMPLETE])
    second["metadata"]["uid"] = "another"
    answers = [make_run(), second]
    api.on("GET", RUN, lambda request: (200, answers.pop(0)))
    assert call(api, "wait", "docs-lm") == 70
    assert "another run of its name created" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "spec", "patched"),
    [("suspend", {}, {"suspend": True}), ("resume", {"suspend": True}, {"suspend": False})],
)
def test_suspend_and_resume_patch_one_field_once(
    api: Api,
    make_run: Make,
    command: str,
    spec: dict[str, Any],
    patched: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    api.on("GET", RUN, make_run(spec=spec))
    api.on("PATCH", RUN, make_run(spec=patched))
    assert call(api, command, "docs-lm") == 0
    (patch,) = api.sent("PATCH")
    assert patch.body == {"spec": patched}
    assert patch.headers["Content-Type"] == "application/merge-patch+json"
    api.on("GET", RUN, make_run(spec=patched))
    assert call(api, command, "docs-lm") == 0
    assert len(api.sent("PATCH")) == 1
    assert "already" in capsys.readouterr().out.splitlines()[1]


def test_suspend_and_resume_can_wait_for_their_effect(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    states = [
        make_run(),
        make_run(phase="Suspending"),
        make_run(conditions=[{"type": "Suspended", "status": "True"}]),
    ]
    api.on("GET", RUN, lambda request: (200, states.pop(0)))
    api.on("PATCH", RUN, make_run())
    assert call(api, "suspend", "docs-lm", "--wait") == 0
    assert capsys.readouterr().out.splitlines() == [
        "trainingrun/docs-lm suspended",
        "trainingrun/docs-lm is suspended",
    ]


def test_a_restart_sets_a_new_nonce_and_waits_for_it(api: Api, make_run: Make) -> None:
    nonces: list[str] = []

    def patch(request: Any) -> tuple[int, Any]:
        nonces.append(request.body["spec"]["restartNonce"])
        states = [
            make_run(),
            make_run(conditions=[FAILED]),
            make_run(restartNonce=nonces[-1]),
        ]
        api.on("GET", RUN, lambda request: (200, states.pop(0)))
        return 200, make_run()

    for _ in range(2):
        api.on("GET", RUN, make_run(conditions=[FAILED]))
        api.on("PATCH", RUN, patch)
        assert call(api, "restart", "docs-lm", "--wait") == 0
    assert len(set(nonces)) == 2
    assert all(len(nonce) <= 64 for nonce in nonces)


def test_restart_of_a_failed_suspended_run_also_ends_its_suspension(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    suspended = {"suspend": True}
    api.on("GET", RUN, make_run(spec=suspended, phase="Failed", conditions=[FAILED]))
    api.on("PATCH", RUN, make_run())
    assert call(api, "restart", "docs-lm") == 0
    (patch,) = api.sent("PATCH")
    assert set(patch.body["spec"]) == {"suspend", "restartNonce"}
    assert patch.body["spec"]["suspend"] is False
    told = "trainingrun/docs-lm restarted; spec.suspend is reset to false\n"
    assert capsys.readouterr().out == told


def test_a_restart_not_yet_observed_does_not_make_a_suspended_run_a_failed_one(
    api: Api, make_run: Make
) -> None:
    spec = {"suspend": True, "restartNonce": "second"}
    before = make_run(spec=spec, restartNonce="first", conditions=[FAILED])
    api.on("GET", RUN, before)
    api.on("PATCH", RUN, before)
    assert call(api, "restart", "docs-lm") == 64
    assert call(api, "resume", "docs-lm") == 0
    assert api.sent("PATCH")[0].body == {"spec": {"suspend": False}}


STOPPED = {"phase": "Suspended", "reason": "StoppedOnRequest"}
NON_FINITE = {"phase": "Suspended", "reason": "NonFinite"}


@pytest.mark.parametrize(
    ("spec", "status", "suspend"),
    [
        ({}, STOPPED, None),
        ({}, NON_FINITE, None),
        ({"suspend": False}, {"phase": "Suspending", "reason": "Suspending"}, None),
        # Suspended after its stop, which the operator has not observed and therefore never will.
        ({"suspend": True}, STOPPED, False),
        ({"suspend": True}, NON_FINITE, False),
    ],
)
def test_a_run_that_stopped_by_itself_is_resumed_by_a_nonce_and_waited_for_by_it(
    api: Api,
    make_run: Make,
    spec: dict[str, Any],
    status: dict[str, Any],
    suspend: bool | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    nonces: list[str] = []

    def patch(request: Any) -> tuple[int, Any]:
        patched = dict(request.body["spec"])
        nonces.append(patched.pop("restartNonce"))
        assert patched == ({} if suspend is None else {"suspend": suspend})
        states = [
            make_run(spec=spec, **status),
            make_run(restartNonce="of before"),
            make_run(restartNonce=nonces[-1]),
        ]
        api.on("GET", RUN, lambda request: (200, states.pop(0)))
        return 200, make_run()

    api.on("GET", RUN, make_run(spec=spec, **status))
    api.on("PATCH", RUN, patch)
    assert call(api, "resume", "docs-lm", "--wait") == 0
    assert len(nonces) == 1
    first, second = capsys.readouterr().out.splitlines()
    why = "before a step that is not finite" if status == NON_FINITE else "on request"
    assert (
        first
        == f"trainingrun/docs-lm resumed by a new spec.restartNonce: it had stopped {why}"
    )
    assert second == "trainingrun/docs-lm is running on 3/4 nodes"


def test_a_stop_that_is_already_cleared_gets_no_second_nonce(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    api.on(
        "GET", RUN, make_run(spec={"restartNonce": "new"}, observedGeneration=0, **STOPPED)
    )
    assert call(api, "resume", "docs-lm") == 0
    assert api.sent("PATCH") == []
    assert capsys.readouterr().out == "trainingrun/docs-lm was resumed already\n"


@pytest.mark.parametrize(("after", "code"), [(1100, 64), ("1.1k", 64), (1200, 0)])
def test_a_run_whose_recipe_would_stop_it_again_at_once_is_not_resumed(
    api: Api, make_run: Make, after: Any, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    api.on(
        "GET", RUN, make_run(spec={"training": {"stop": {"afterStep": after}}}, **STOPPED)
    )
    api.on("PATCH", RUN, make_run())
    assert call(api, "resume", "docs-lm") == code
    assert len(api.sent("PATCH")) == (code == 0)
    told = capsys.readouterr().err
    assert ("has finished step 1100, and spec.training.stop.afterStep is 1100" in told) == (
        code == 64
    )
    # With storage.whenDeleted: Delete, the checkpoints would be deleted with the run.
    assert "delete" not in told


@pytest.mark.parametrize(
    ("command", "spec", "condition", "told"),
    [
        ("restart", {}, COMPLETE, "is complete; a complete run never trains again"),
        ("restart", {"suspend": True}, None, "is suspended; it has no pods to restart"),
        ("suspend", {}, COMPLETE, "is complete; there is nothing to suspend"),
        ("resume", {}, FAILED, "has failed; there is nothing to resume"),
    ],
)
def test_a_command_without_effect_on_a_run_is_refused(
    api: Api,
    make_run: Make,
    command: str,
    spec: dict[str, Any],
    condition: dict[str, Any] | None,
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    api.on("GET", RUN, make_run(spec=spec, conditions=[condition] if condition else []))
    assert call(api, command, "docs-lm") == 64
    assert told in capsys.readouterr().err
    assert api.sent("PATCH") == []


# ---- kubectl -----------------------------------------------------------------------------------------------


def test_the_kubectl_plugin_has_only_the_cluster_commands(
    api: Api, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    api.on("GET", RUNS, listed(make_run()))
    assert main_of_plugin(["list", "--kubeconfig", api.kubeconfig]) == 0
    assert "docs-lm" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main_of_plugin(["run", "x.yaml"])
    assert ended.value.code == 64
    with pytest.raises(SystemExit):
        main_of_plugin(["wait", "--help"])
    assert "examples:\n  kubectl evergrad wait docs-lm" in capsys.readouterr().out


def test_an_interrupted_command_ends_without_a_traceback(
    api: Api, make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any, **keywords: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(api_client.KubernetesCluster, "get", interrupt)
    assert call(api, "wait", "docs-lm") == 130
