"""The cluster commands on a real cluster: a run from its submission to its end, with every command that a
user needs."""

import itertools
import json
import re
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from cluster_cli import EVERGRAD, Cli, forward_port, open_page
from cluster_runs import RESOURCE, Runs, make_manifest, wait_for
from cluster_shell import Shell
from pages import read_blocks
from patience import PATIENCE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]


@pytest.fixture
def cli(runs: Runs, tmp_path: Path) -> Cli:
    return Cli(runs, tmp_path)


def name_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["name"])


def test_a_run_is_submitted_followed_and_inspected_to_its_end(runs: Runs, cli: Cli) -> None:
    file = cli.write(make_manifest("whole", steps=60))
    assert cli.ask("submit", file, "--dry-run")["result"] == "created"
    assert runs.get("trainingruns", "whole") is None
    assert cli.ask("submit", file)["result"] == "created"
    runs.adopt("whole")
    followed = cli.call("logs", "whole", "-f")
    assert "trainingrun/whole is complete" in followed.stderr
    assert re.search(r"^\[node \d[^]]*\] .*60/60", followed.stdout, re.MULTILINE), (
        followed.stdout
    )
    assert cli.call("wait", "whole").stdout.startswith("trainingrun/whole is complete")
    status = cli.ask("status", "whole")
    assert (status["run"]["phase"], status["run"]["step"], status["run"]["percent"]) == (
        "Complete",
        60,
        100.0,
    )
    assert {event["object"] for event in status["events"]} >= {"trainingrun/whole"}
    assert [run["name"] for run in cli.ask("list", "--phase", "complete")["runs"]] == [
        "whole"
    ]
    checkpoints = cli.ask("checkpoints", "whole")
    assert (
        checkpoints["newestStep"],
        checkpoints["complete"],
        checkpoints["claimPhase"],
    ) == (
        60,
        True,
        "Bound",
    )
    assert cli.ask("submit", file)["result"] == "unchanged"
    assert "never trains again" in cli.call("restart", "whole", code=64).stderr
    assert "has failed" not in cli.call("wait", "whole", "--for", "failed", code=70).stderr


@pytest.mark.long
def test_the_first_command_of_the_page_submits_a_run_and_follows_it_to_its_end(
    runs: Runs, tmp_path: Path
) -> None:
    (tmp_path / "trainingrun.yaml").write_text(
        json.dumps(make_manifest("watched", steps=60))
    )
    _, submit, *_ = read_blocks("docs/operate/cluster-cli.md")
    shell = Shell(runs.cluster, tmp_path, namespace=runs.namespace)
    run = runs.adopt("watched")
    printed = shell.run(submit, folder=tmp_path)
    assert "trainingrun/watched is complete" in printed
    assert run.status()["phase"] == "Complete"


def test_suspend_resume_and_restart_wait_for_their_effect(runs: Runs, cli: Cli) -> None:
    cli.call("submit", cli.write(make_manifest("long", steps=100000)))
    run = runs.adopt("long")
    cli.call("wait", "long", "--for", "running", "--timeout", "9m")
    run.wait_for_step(5)
    stacks = cli.ask("stacks", "long")
    assert {one["node"] for one in stacks} == set(run.live_pods())
    workers = [one for one in stacks if one["process"].startswith("evergrad-w")]
    assert {one["node"] for one in workers} == set(run.live_pods()), stacks
    assert all("File " in one["stacks"] for one in workers), stacks
    with subprocess.Popen(
        cli.command("logs", "long", "--all", "-f"), stdout=subprocess.PIPE, text=True
    ) as following:
        try:
            assert "long" in [one["name"] for one in cli.ask("top")["runs"]]
            cli.call("suspend", "long", "--wait", "--timeout", "9m")
            assert run.live_pods() == {}
            step = run.newest_step()
            assert "was suspended already" in cli.call("suspend", "long").stdout
            cli.call("resume", "long", "--wait", "--timeout", "9m")
            run.wait_for_step(step + 1)
            before = {name_of(pod) for pod in run.live_pods().values()}
            cli.call("restart", "long", "--wait", "--timeout", "9m")
            wait_for(
                lambda: (
                    (live := run.live_pods())
                    and not before & {pod["metadata"]["name"] for pod in live.values()}
                ),
                "new pods",
            )
            assert run.repeated_steps() == 0
            runs.kubectl("delete", RESOURCE, "long", "--wait=false")
            output, _ = following.communicate(timeout=PATIENCE)
        finally:
            following.kill()
    assert following.returncode == 0
    attempts = set(re.findall(r"^\[node 0(?: #(\d+))?", output, re.MULTILINE))
    assert len(attempts) >= 3, output


def test_invalid_commands_are_reported_with_path_and_remedy(runs: Runs, cli: Cli) -> None:
    manifest = make_manifest(
        "wrong",
        steps=20,
        changes={"training": {"data": {"sources": [{"name": "docs", "type": "jsonl"}]}}},
    )
    manifest["spec"]["training"]["data"]["sources"][0]["path"] = "documents.jsonl"
    assert (
        "spec.training.data.sources[0].path: documents.jsonl is a relative path"
        in cli.call("submit", cli.write(manifest), code=64).stderr
    )
    manifest["spec"]["training"]["data"]["sources"][0]["path"] = "/documents/nothing.jsonl"
    cli.call("submit", cli.write(manifest), "--wait", "--timeout", "9m", code=64)
    run = runs.adopt("wrong")
    # The horizon may be extended; the model may not change.
    manifest["spec"]["training"]["model"]["config"]["hidden_size"] *= 2
    assert "spec.training" in cli.call("submit", cli.write(manifest), code=64).stderr
    status = cli.ask("status", "wrong")
    assert (status["run"]["phase"], status["lastFailure"]["exitCode"]) == ("Failed", 64)
    assert "/documents/nothing.jsonl" in status["lastFailure"]["message"]
    assert any("evergrad restart wrong" in line for line in status["next"])
    assert "/documents/nothing.jsonl" in cli.call("logs", "wrong").stdout
    assert run.is_true("Failed")


def test_a_wait_ends_for_a_run_that_is_held_until_a_person_acts(
    runs: Runs, cli: Cli
) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "evergrad-profile"},
        "data": {"profile.yaml": "defalts: {}"},
    }
    runs.kubectl("apply", "-f", "-", text=json.dumps(body))
    try:
        file = cli.write(make_manifest("held", steps=20))
        ended = cli.call("submit", file, "--wait", "--timeout", "9m", code=64)
        assert "waits for you; InvalidSpec: ConfigMap " in ended.stderr
        assert "evergrad-profile: defalts: unknown key" in ended.stderr
        assert "waits for you" in cli.call("logs", "held", "-f", code=64).stderr
        said = cli.call("submit", file, "--set", "spec.profile=nowhere", code=64).stderr
        assert "spec.profile: there is no profile 'nowhere'" in said
    finally:
        runs.kubectl("delete", "configmap", "evergrad-profile")


def test_doctor_reports_no_failure_and_tells_a_user_what_is_missing(
    runs: Runs, cli: Cli, tmp_path: Path
) -> None:
    found = {check["name"]: check["state"] for check in cli.ask("doctor")["checks"]}
    assert {name for name, state in found.items() if state == "fail"} == set(), found
    assert (found["crd"], found["operator"], found["operator lease"]) == ("ok", "ok", "ok")
    assert found["webhook"] == "ok"
    runs.kubectl("create", "serviceaccount", "nobody")
    token = runs.kubectl("create", "token", "nobody").strip()
    config = json.loads(runs.kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    config["users"][0]["user"] = {"token": token}
    (tmp_path / "nobody").write_text(json.dumps(config))
    command = [
        str(EVERGRAD),
        "doctor",
        "--kubeconfig",
        str(tmp_path / "nobody"),
        "-n",
        runs.namespace,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "fail  your rights" in done.stdout and "skip  storage" in done.stdout


def test_the_page_of_a_run_is_opened_through_a_forwarded_port(runs: Runs, cli: Cli) -> None:
    cli.call("submit", cli.write(make_manifest("shown", steps=100000)))
    run = runs.adopt("shown")
    cli.call("wait", "shown", "--for", "running", "--timeout", "9m")
    run.wait_for_step(5)
    with open_page(cli, "shown") as page:
        with urllib.request.urlopen(page.address, timeout=PATIENCE) as answer:
            assert answer.read().startswith(b"<!doctype html>")
        # Without the token nothing is shown; with it, the newest state arrives without a request.
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(f"{page.address}live", timeout=PATIENCE)
        refused.value.close()
        updates = page.read_updates(3)
        assert updates[0]["status"]["run"] == "shown"
        assert updates[0]["steps"]["columns"]["learning_rate"]
        assert len(updates) == 3
    assert page.token not in page.printed
    assert not page.file.exists()


def test_the_fleet_page_is_reached_by_port_forward_only(
    operator: Any, runs: Runs, cli: Cli
) -> None:
    cli.call("submit", cli.write(make_manifest("listed", steps=20)))
    runs.adopt("listed")
    pod = operator.pod()["metadata"]["name"]
    with forward_port(runs.cluster, operator.namespace, pod, 8081) as address:
        with urllib.request.urlopen(address, timeout=PATIENCE) as page:
            assert page.read().startswith(b"<!doctype html>")
        with urllib.request.urlopen(f"{address}live", timeout=PATIENCE) as events:
            wait_for(
                lambda: any(b'"listed"' in line for line in itertools.islice(events, 3)),
                "the run on the page",
            )


@pytest.mark.long
def test_prune_deletes_leftovers_of_complete_runs_and_keeps_the_only_checkpoints(
    runs: Runs, cli: Cli
) -> None:
    whole = runs.start("whole", steps=20, nodes={"min": 1, "max": 1})
    whole.wait_for_phase("Complete")
    cut = runs.start("cut", steps=100000, nodes={"min": 1, "max": 1})
    cut.wait_for_step(5)
    other = runs.start("other", steps=20, nodes={"min": 1, "max": 1})
    other.wait_for_phase("Complete")
    for name in ("whole", "cut"):
        runs.kubectl("delete", RESOURCE, name, "--wait=true")
        selector = f"evergrad.dev/run={name}"
        wait_for(lambda of=selector: not runs.list("pods", of), f"the end of {name}'s pods")

    def prune(*arguments: str) -> dict[str, dict[str, str]]:
        """Return the reasons of deleted and kept objects by kind/name."""
        said = cli.ask("prune", *arguments)
        assert said["failures"] == []
        return {
            key: {f"{one['kind']}/{one['name']}": one["why"] for one in said[key]}
            for key in ("leftovers", "kept")
        }

    # Without --yes nothing is deleted, and the volume of an existing run is not a leftover.
    listed = prune()
    (gone,) = listed["leftovers"]
    assert gone.endswith("/whole") and "was complete" in listed["leftovers"][gone]
    (kept,) = listed["kept"]
    assert kept.endswith("/cut") and "its checkpoints are here" in listed["kept"][kept]
    assert runs.get("persistentvolumeclaims", "whole") is not None

    assert [*prune("--yes")["leftovers"]] == [gone]
    wait_for(lambda: runs.get("persistentvolumeclaims", "whole") is None, "the claim's end")
    assert runs.get("persistentvolumeclaims", "cut") is not None
    assert runs.get("trainingruns", "other") is not None

    # A run that has ended is deleted with --older-than, and leaves its claim for the next call.
    assert not prune("--older-than", "1h")["leftovers"]
    assert [
        one.rpartition("/")[2] for one in prune("--older-than", "0s", "--yes")["leftovers"]
    ] == ["other"]
    wait_for(lambda: runs.get("trainingruns", "other") is None, "the run's end")
    assert runs.get("persistentvolumeclaims", "other") is not None
