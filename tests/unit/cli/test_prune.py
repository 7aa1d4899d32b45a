"""`evergrad prune`: what it lists and deletes, and especially what it does not delete."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from pages import make_environment, play, read_commands

from evergrad_cli.cluster.commands.unused_objects import find_old_runs, find_unused_claims
from evergrad_cli.local.leftovers import find_leftovers
from evergrad_cli.main import main

NOW = 1_614_600_000.0  # 2021-03-01T12:00:00Z
DAY = 86400.0
RUNS = "/apis/evergrad.dev/v1alpha1/namespaces/lab/trainingruns"
CLAIMS = "/api/v1/namespaces/lab/persistentvolumeclaims"
PODS = "/api/v1/namespaces/lab/pods"
DONE = {
    "path": "old",
    "recipe": "r",
    "epoch": 1,
    "complete": {"at": "2021-02-01T12:00:00Z"},
}


# ---- a cluster ---------------------------------------------------------------------------------------------


def make_claim(name: str = "old", **records: Any) -> dict[str, Any]:
    found = {
        f"run.evergrad.dev/{run}": record if isinstance(record, str) else json.dumps(record)
        for run, record in (records or {name: DONE}).items()
    }
    return {
        "metadata": {
            "name": name,
            "namespace": "lab",
            "uid": f"uid-{name}",
            "resourceVersion": "9",
            "labels": {
                "evergrad.dev/run": name,
                "app.kubernetes.io/managed-by": "evergrad",
            },
            "annotations": found,
        },
        "status": {"phase": "Bound", "capacity": {"storage": "20Gi"}},
    }


def make_ended(name: str, kind: str = "Complete", **spec: Any) -> dict[str, Any]:
    at = "2021-01-30T12:00:00Z"
    condition = {"type": kind, "status": "True", "lastTransitionTime": at}
    return {
        "metadata": {
            "name": name,
            "namespace": "lab",
            "uid": f"uid-{name}",
            "resourceVersion": "4",
        },
        "spec": {"training": {}, **spec},
        "status": {"phase": kind, "conditions": [condition]},
    }


def judge(
    claim: dict[str, Any],
    *,
    runs: list[dict[str, Any]] | None = None,
    pods: list[dict[str, Any]] | None = None,
    older_than: float = 0.0,
) -> list[tuple[bool, str]]:
    found = find_unused_claims(
        [claim], runs or [], pods or [], older_than=older_than, now=NOW
    )
    return [(one.is_kept, one.why) for one in found]


def test_a_claim_is_pruned_if_all_its_runs_are_deleted_and_were_complete() -> None:
    assert judge(make_claim()) == [(False, "run old is gone, and was complete 28d ago")]
    assert judge(make_claim(old=DONE, reader=DONE)) == [
        (False, "run old, reader is gone, and was complete 28d ago")
    ]


def test_a_claim_of_an_incomplete_run_is_kept() -> None:
    half = {key: value for key, value in DONE.items() if key != "complete"}
    kept = [(True, "run new is gone and was not complete: it may have left checkpoints")]
    assert judge(make_claim(old=DONE, new=half)) == kept


def test_a_claim_with_unreadable_records_is_kept() -> None:
    assert judge(make_claim(old="{")) == [(True, "the record of run old cannot be read")]
    bare = make_claim()
    bare["metadata"]["annotations"] = {}
    assert judge(bare) == [(True, "no run has left a record on it")]


def test_a_claim_that_is_used_or_owned_is_kept() -> None:
    pod = {
        "metadata": {"name": "reader"},
        "spec": {"volumes": [{"persistentVolumeClaim": {"claimName": "old"}}]},
        "status": {"phase": "Pending"},
    }
    assert judge(make_claim(), pods=[pod]) == [(True, "pod reader mounts it")]
    ended = {**pod, "status": {"phase": "Succeeded"}}
    assert judge(make_claim(), pods=[ended])[0][0] is False
    owned = make_claim()
    owned["metadata"]["ownerReferences"] = [{"uid": "u"}]
    assert judge(owned) == [(True, "it has an owner, and is deleted with it")]


def test_a_claim_whose_run_exists_is_not_a_leftover() -> None:
    assert judge(make_claim(), runs=[make_ended("old")]) == []
    other = make_ended("other", storage={"claimName": "old"})
    assert judge(make_claim(), runs=[other]) == []


MOUNT = {
    "volumes": [{"name": "base", "persistentVolumeClaim": {"claimName": "old"}}],
    "volumeMounts": [{"name": "base", "mountPath": "/base"}],
}


def test_a_claim_that_a_run_without_pods_mounts_is_kept() -> None:
    suspended = make_ended("tune", "Progressing", suspend=True, template=MOUNT)
    assert judge(make_claim(), runs=[suspended]) == [(True, "run tune mounts it")]


def test_a_claim_that_a_profile_mounts_for_a_run_without_pods_is_kept() -> None:
    queued = make_ended("tune", "Progressing")
    queued["status"]["volume"] = {"profileClaims": ["old"]}
    assert judge(make_claim(), runs=[queued]) == [(True, "run tune mounts it")]


def test_a_run_is_kept_if_its_claim_would_be_deleted_with_it_and_another_run_mounts_it() -> (
    None
):
    best = make_ended("old", storage={"whenDeleted": "Delete"})
    tune = make_ended("tune", "Progressing", template=MOUNT)
    (kept,) = find_old_runs([best, tune], older_than=DAY, now=NOW)
    assert (kept.name, kept.is_kept) == ("old", True)
    assert kept.why.endswith(
        "is deleted with it (storage.whenDeleted), and run tune uses it"
    )
    # The operator has observed it, and the claim no longer belongs to the run.
    best["status"]["volume"] = {"goesWithRun": False}
    (goes,) = find_old_runs([best, tune], older_than=DAY, now=NOW)
    assert (goes.is_kept, goes.why) == (False, "complete 30d ago; claim old stays")


@pytest.mark.parametrize("count", ["3", "several"])
def test_a_claim_without_space_for_records_of_unfinished_runs_is_kept(count: str) -> None:
    claim = make_claim()
    claim["metadata"]["annotations"]["evergrad.dev/dropped-unfinished-runs"] = count
    ((is_kept, why),) = judge(claim)
    assert is_kept
    assert why == (
        f"{count} runs without a record are gone and were not complete: their checkpoints "
        "may be here"
    )


@pytest.mark.parametrize(
    ("given", "hint"),
    [("30", "Write 30d for days"), ("7.5", "Write 7.5d"), ("d", "not an age"), ("", "")],
)
def test_an_age_without_a_unit_is_refused_without_a_request_to_the_cluster(
    api: Any, given: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(api)
    arguments = ["prune", "--kubeconfig", api.kubeconfig, "--yes", "--older-than", given]
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 64
    assert hint in capsys.readouterr().err
    assert api.sent("GET") == api.sent("DELETE") == []


@pytest.mark.parametrize(
    ("given", "goes"),
    [("0", True), ("29d", True), ("31d", False), ("30d1h", False), ("12h", True)],
)
def test_an_age_is_given_in_days_hours_or_minutes_or_as_any(
    api: Any, given: str, goes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(api)
    monkeypatch.setattr(time, "time", lambda: NOW)
    arguments = ["prune", "--kubeconfig", api.kubeconfig, "--yes", "--older-than", given]
    assert main(arguments) == 0
    assert (f"{RUNS}/done" in [one.path for one in api.sent("DELETE")]) is goes


def test_a_claim_of_a_recently_complete_run_is_kept_with_an_age() -> None:
    assert judge(make_claim(), older_than=30 * DAY) == [
        (True, "run old was complete only 28d ago")
    ]


def test_only_runs_that_ended_before_the_age_are_old() -> None:
    runs = [make_ended("b"), make_ended("a", "Failed"), make_ended("c", "Progressing")]
    found = find_old_runs(runs, older_than=30 * DAY, now=NOW)
    assert [(one.name, one.why) for one in found] == [
        ("a", "failed 30d ago; claim a stays"),
        ("b", "complete 30d ago; claim b stays"),
    ]
    assert find_old_runs(runs, older_than=31 * DAY, now=NOW) == ()


def test_a_failed_run_whose_volume_would_be_deleted_with_it_is_kept() -> None:
    storage = {"whenDeleted": "Delete"}
    runs = [make_ended("a", "Failed", storage=storage), make_ended("b", storage=storage)]
    found = find_old_runs(runs, older_than=DAY, now=NOW)
    assert [(one.name, one.is_kept) for one in found] == [("a", True), ("b", False)]
    assert "its claim b is deleted with it" in found[1].why


def serve(api: Any) -> None:
    half = {"path": "half", "recipe": "r", "epoch": 1}
    claims = [make_claim("gone"), make_claim("half", half=half)]
    api.on("GET", CLAIMS, {"metadata": {}, "items": claims})
    api.on("GET", PODS, {"metadata": {}, "items": []})
    api.on("GET", RUNS, {"metadata": {}, "items": [make_ended("done")]})
    for path in (f"{CLAIMS}/gone", f"{RUNS}/done"):
        api.on("DELETE", path, {"kind": "Status", "status": "Success"})


def test_nothing_is_deleted_without_yes(
    api: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(api)
    assert main(["prune", "--kubeconfig", api.kubeconfig, "--older-than", "1d"]) == 0
    shown = capsys.readouterr().out
    assert "Nothing was deleted. 2 would be: add --yes." in shown
    assert "lab/half" in shown and "keep" in shown
    assert api.sent("DELETE") == []
    (claims,) = [one for one in api.sent("GET") if one.path == CLAIMS]
    selected = "app.kubernetes.io/managed-by=evergrad,evergrad.dev/run"
    assert claims.query["labelSelector"] == selected


def test_with_yes_exactly_the_listed_objects_are_deleted(
    api: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(api)
    code = main(
        ["prune", "--kubeconfig", api.kubeconfig, "--older-than", "1d", "--yes", "--json"]
    )
    assert code == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in document["leftovers"]] == ["done", "gone"]
    assert [one["name"] for one in document["kept"]] == ["half"]
    sent = {one.path: one.body["preconditions"] for one in api.sent("DELETE")}
    assert sent == {
        f"{RUNS}/done": {"uid": "uid-done", "resourceVersion": "4"},
        f"{CLAIMS}/gone": {"uid": "uid-gone", "resourceVersion": "9"},
    }


def test_without_an_age_no_run_is_deleted(
    api: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(api)
    assert main(["prune", "--kubeconfig", api.kubeconfig, "--yes"]) == 0
    assert [one.path for one in api.sent("DELETE")] == [f"{CLAIMS}/gone"]


def test_a_refused_deletion_is_reported_and_the_others_continue(
    api: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(api)
    api.refuse("DELETE", f"{RUNS}/done", 403, "not allowed")
    code = main(["prune", "--kubeconfig", api.kubeconfig, "--older-than", "1d", "--yes"])
    assert code == 70
    assert "TrainingRun done: not deleted" in capsys.readouterr().err
    assert len(api.sent("DELETE")) == 2


@pytest.mark.parametrize(("status", "told"), [(403, "not allowed"), (429, "too many")])
def test_failed_deletions_are_shown_next_to_successful_ones(
    api: Any, status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(api)
    api.refuse("DELETE", f"{RUNS}/done", status, told)
    arguments = ["--kubeconfig", api.kubeconfig, "--older-than", "1d", "--yes"]
    assert main(["prune", *arguments]) == 70
    captured = capsys.readouterr()
    actions = [line.split()[:3] for line in captured.out.splitlines()[1:]]
    assert actions == [
        ["failed", "TrainingRun", "lab/done"],
        ["deleted", "PersistentVolumeClaim", "lab/gone"],
        ["keep", "PersistentVolumeClaim", "lab/half"],
    ]
    assert told in captured.err

    assert main(["prune", *arguments, "--json"]) == 70
    document = json.loads(capsys.readouterr().out)
    done, gone = document["leftovers"]
    assert told in done["error"] and gone["error"] is None
    assert document["failures"] == [f"TrainingRun done: not deleted; {done['error']}"]


# ---- run directories ---------------------------------------------------------------------------------------


def make_directory(path: Path, *, steps: int = 4, is_complete: bool = True) -> Path:
    """A run directory with a checkpoint of each step, 100 bytes of state, last written an hour ago."""
    (path / "checkpoints" / ".tmp" / "step-9.g1.9").mkdir(parents=True)
    for step in range(1, steps + 1):
        add_checkpoint(path, step)
    (path / "run.json").write_text(json.dumps({"recipe": "pretrain", "name": path.name}))
    (path / "events.jsonl").write_text("{}\n")
    if is_complete:
        (path / "complete.json").write_text("{}")
    os.utime(path / "events.jsonl", (NOW - 3600, NOW - 3600))
    return path


def add_checkpoint(path: Path, step: int, **fields: Any) -> Path:
    checkpoint = path / "checkpoints" / f"step-{step}"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "rank-0.bin").write_bytes(b"x" * 100)
    manifest = {
        "format": 1,
        "step": step,
        "generation": 1,
        "serial": step,
        "best": False,
        "extra": {},
        "files": [{"name": "rank-0.bin", "bytes": 100, "hash": "0" * 32}],
        **fields,
    }
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return checkpoint


def removable(path: Path, *, keep: int = 1, now: float = NOW, **rest: Any) -> list[str]:
    found = find_leftovers(path, keep=keep, now=now, **rest)
    return sorted(Path(one.name).name for one in found if not one.is_kept)


def test_superseded_checkpoints_and_attempts_of_a_complete_run_are_leftovers(
    tmp_path: Path,
) -> None:
    run = make_directory(tmp_path / "first")
    assert removable(run) == ["step-1", "step-2", "step-3", "step-9.g1.9"]
    assert removable(run, keep=3) == ["step-1", "step-9.g1.9"]


def test_permanent_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
    run = make_directory(tmp_path / "first")
    add_checkpoint(run, 1, extra={"permanent": True})
    add_checkpoint(run, 2, best=True)
    (run / "checkpoints" / "best.json").write_text('{"checkpoint": "step-3"}')
    assert removable(run) == ["step-9.g1.9"]


def test_a_damaged_checkpoint_does_not_count_and_is_kept(tmp_path: Path) -> None:
    run = make_directory(tmp_path / "first")
    (run / "checkpoints" / "step-4" / "rank-0.bin").write_bytes(b"x")
    (run / "checkpoints" / "step-1" / "manifest.json").write_text('{"format": 2}')
    assert removable(run) == ["step-2", "step-9.g1.9"], "step 3 is the newest whole one"


def test_files_that_a_run_may_still_need_are_kept(tmp_path: Path) -> None:
    assert removable(make_directory(tmp_path / "half", is_complete=False)) == []
    run = make_directory(tmp_path / "first")
    assert removable(run, now=NOW - 3600 + 60) == [], "it was written to a minute ago"
    (run / "run.json").write_text('{"recipe": "two_stage_kl"}')
    assert removable(run) == []


def test_a_run_that_an_unfinished_run_starts_from_is_kept_completely(
    tmp_path: Path,
) -> None:
    run = make_directory(tmp_path / "first")
    other = make_directory(tmp_path / "second", is_complete=False)
    assert removable(run, neighbours=[run, other]) != []
    (other / "run.json").write_text('{"initFrom": {"path": "../first", "step": 2}}')
    assert removable(run, neighbours=[run, other]) == []


def test_an_unreadable_run_is_kept_and_the_others_are_pruned(tmp_path: Path) -> None:
    run = make_directory(tmp_path / "first")
    other = make_directory(tmp_path / "second")
    # It cannot be read by any user, including root, but its existence is visible.
    (other / "run.json").unlink()
    (other / "run.json").mkdir()
    (kept,) = find_leftovers(other, keep=1, now=NOW)
    assert kept.is_kept and kept.why.startswith("not all of it can be read: ")
    assert str(other / "run.json") in kept.why
    assert removable(run, neighbours=[run, other]) != [], (
        "a complete run needs nothing of others"
    )

    # It is unknown from which run an unfinished run starts.
    (other / "complete.json").unlink()
    (kept,) = find_leftovers(run, keep=1, now=NOW, neighbours=[run, other])
    assert kept.is_kept and kept.why.startswith(
        "second cannot be read, and may start from it"
    )


def test_a_run_directory_that_cannot_be_entered_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_directory(tmp_path / "first")

    def refuse(path: Path) -> bool:
        if path.parent == run:
            raise PermissionError(13, "Permission denied", str(path))
        return os.path.isfile(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert main(["prune", str(run), "--yes"]) == 0
    assert (
        "not all of it can be read: [Errno 13] Permission denied" in capsys.readouterr().out
    )


def test_a_folder_of_runs_is_pruned_only_with_yes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_directory(tmp_path / "first")
    half = make_directory(tmp_path / "half", is_complete=False)
    old = time.time() - 3600
    for path in tmp_path.glob("*/events.jsonl"):
        os.utime(path, (old, old))
    before = sorted(tmp_path.rglob("*"))
    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0
    assert "Nothing was deleted. 4 would be" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before

    assert main(["prune", str(tmp_path), "--keep", "1", "--yes"]) == 0
    left = sorted(path.name for path in (tmp_path / "first" / "checkpoints").glob("step-*"))
    assert left == ["step-4"]
    assert not any((tmp_path / "first" / "checkpoints" / ".trash").iterdir())
    assert len(list((half / "checkpoints").glob("step-*"))) == 4


def test_the_commands_of_the_page_list_and_delete_in_the_documented_order(
    api: Any, tmp_path: Path
) -> None:
    serve(api)
    make_directory(tmp_path / "runs/first")
    environment = make_environment(KUBECONFIG=api.kubeconfig)
    shown, deleted = [], []
    for command in read_commands("docs/operate/pruning.md"):
        shown.append(play(command, tmp_path, environment=environment))
        deleted.append([one.path.rpartition("/")[2] for one in api.sent("DELETE")])
    assert "Nothing was deleted. 1 would be" in shown[0]
    assert "Nothing was deleted. 2 would be" in shown[1]
    assert deleted[0] == deleted[1] == [] and sorted(deleted[2]) == ["done", "gone"]
    assert "Nothing was deleted. 4 would be" in shown[3] and deleted[3] == deleted[2]


def test_no_option_deletes_the_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_directory(tmp_path / "first")
    assert main(["prune", str(tmp_path), "--keep", "0", "--yes"]) == 64
    assert "--keep: 0 is below 1" in capsys.readouterr().err
    assert main(["prune", str(tmp_path / "nowhere")]) == 64
    assert "holds no run" in capsys.readouterr().err
