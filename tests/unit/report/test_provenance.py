"""provenance.json: appended a process, true, and without secrets or the home directory."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest

from evergrad_manifest.envelope import TrainingRun
from evergrad_trainer.base.errors import RunDirectoryError
from evergrad_trainer.report.figures import environment_rows
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.run.provenance import (
    describe_process,
    read_processes,
    record_process,
)
from evergrad_trainer.run.redaction import hide_home, is_secret, redact_command
from evergrad_trainer.run.start_request import record_request

_RUN: dict[str, Any] = {
    "apiVersion": "evergrad.dev/v1alpha1",
    "kind": "TrainingRun",
    "metadata": {"name": "docs-lm"},
    "spec": {
        "training": {
            "model": {"config": {"model_type": "llama"}},
            "data": {
                "sources": [{"name": "docs", "path": "docs.jsonl"}],
                "sequenceLength": 64,
            },
            "batching": {"globalBatchSize": 8, "microBatchSize": 2},
            "optimizer": {"learningRate": 1e-3},
            "horizon": {"steps": 10},
            "reproducibility": {"seed": 20251},
        }
    },
}


@pytest.fixture
def run() -> TrainingRun:
    return TrainingRun.model_validate(_RUN)


@pytest.mark.acceptance("8d-15c")
def test_each_process_appends_its_entry(tmp_path: Path, run: TrainingRun) -> None:
    directory = RunDirectory(tmp_path)
    for generation in (1, 2):
        entry = record_process(
            directory,
            run=run,
            command=["evergrad", "run", "a b.yaml"],
            world_size=2,
            generation=generation,
        )
        assert entry["command"] == "evergrad run 'a b.yaml'"
    first, second = read_processes(directory)
    assert (
        first["generation"],
        second["generation"],
        second["world_size"],
        second["seed"],
    ) == (
        1,
        2,
        2,
        20251,
    )
    assert json.loads(directory.provenance.read_text())["format"] == 1


def test_a_script_has_an_entry_without_a_seed(tmp_path: Path) -> None:
    run = TrainingRun.model_validate(
        {**_RUN, "spec": {"script": {"command": ["train.py"]}}}
    )
    assert (
        record_process(
            RunDirectory(tmp_path), run=run, command=[], world_size=1, generation=1
        )["seed"]
        is None
    )


@pytest.mark.acceptance("8d-15d")
@pytest.mark.capability("G-9", "G-X25")
def test_the_entry_has_versions_and_hardware_and_nothing_private() -> None:
    entry = describe_process(command=["evergrad"], seed=0, world_size=1, generation=1)
    assert entry["versions"]["python"] == platform.python_version()
    assert entry["versions"]["torch"] and entry["versions"]["evergrad"]
    assert (
        entry["hardware"]["cores"] >= 1
        and entry["hardware"]["memory_bytes"] > 2**20
        and entry["hardware"]["cpu"]
    )
    text = json.dumps(entry)
    assert platform.node() not in text or len(platform.node()) < 4
    assert not text.count(str(Path.home()) + "/")


def test_the_commit_of_the_working_directory_is_recorded_with_its_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = {
        f"GIT_{who}_{what}": "someone"
        for who in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    environment = os.environ | identity | {"GIT_CONFIG_GLOBAL": os.devnull}

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words],
            cwd=tmp_path,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "one")
    monkeypatch.chdir(tmp_path)
    commit = git("rev-parse", "HEAD").strip()
    assert describe_process(command=[], seed=0, world_size=1, generation=1)["git"] == {
        "commit": commit,
        "has_changes": False,
    }
    (tmp_path / "a").write_text("2")
    assert describe_process(command=[], seed=0, world_size=1, generation=1)["git"] == {
        "commit": commit,
        "has_changes": True,
    }


def test_outside_a_checkout_or_without_git_there_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert describe_process(command=[], seed=0, world_size=1, generation=1)["git"] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_process(command=[], seed=0, world_size=1, generation=1)["git"] is None


@pytest.mark.capability("G-8")
def test_a_commit_in_the_environment_is_used_if_there_is_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("GIT_COMMIT", "8f3c2a1")
    entry = describe_process(command=[], seed=0, world_size=1, generation=1)
    assert entry["git"] == {"commit": "8f3c2a1", "has_changes": None}


@pytest.mark.parametrize("text", ["{", "[]", '{"processes": 3}', '{"processes": [1]}'])
def test_a_broken_file_is_refused_and_not_overwritten(
    tmp_path: Path, run: TrainingRun, text: str
) -> None:
    directory = RunDirectory(tmp_path)
    directory.provenance.write_text(text)
    with pytest.raises(RunDirectoryError, match=r"provenance\.json"):
        record_process(directory, run=run, command=[], world_size=1, generation=1)
    assert directory.provenance.read_text() == text


@pytest.mark.parametrize(
    "key",
    [
        "token",
        "hf_token",
        "HF_TOKEN",
        "spec.registryPassword",
        "--api-key",
        "clientSecret",
        "awsSecretAccessKey",
    ],
)
def test_keys_of_secrets_are_detected(key: str) -> None:
    assert is_secret(key)


@pytest.mark.parametrize(
    "key",
    [
        "spec.training.tokenizer.type",
        "horizon.tokens",
        "tokensPerStep",
        "keep",
        "monkey",
        "data.sources[0].key",
    ],
)
def test_keys_that_only_resemble_secrets_are_not(key: str) -> None:
    assert not is_secret(key)


@pytest.mark.capability("G-7", "C-1", "G-X33")
def test_a_command_keeps_its_words_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    command = [
        "/home/ada/bin/evergrad", "run", "--set", "spec.training.horizon.tokens=20M", "--set", "spec.x.password=hunter2",
        "--set=spec.x.token=abc=def", "--hf-token", "xyz", "--verbose", "HF_TOKEN=1", "--set", ("env=[{name: "
            "API_KEY, value: s3}]"),
        "https://ada:p@w@example.org/x@y", "/home/adam/file",
    ]  # fmt: skip
    assert redact_command(command) == [
        "~/bin/evergrad", "run", "--set", "spec.training.horizon.tokens=20M", "--set", "spec.x.password=<redacted>",
        "--set=spec.x.token=<redacted>", "--hf-token", "<redacted>", "--verbose", "HF_TOKEN=<redacted>",
        "--set", "env=<redacted>",
        "https://<redacted>@example.org/x@y", "/home/adam/file",
    ]  # fmt: skip


def test_the_root_as_home_directory_hides_no_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/")
    assert hide_home("/data/run") == "/data/run"


def test_the_report_names_earlier_versions_and_the_files_of_a_task() -> None:
    versions = {"evergrad": "0.2", "torch": "2.13", "transformers": None}
    rows = dict(
        environment_rows(
            [
                {"versions": {**versions, "torch": "2.12"}},
                {"versions": versions, "task": {"mine.py": "c0ffee"}},
            ]
        )
    )
    assert rows["Earlier versions"] == "torch 2.12"
    assert rows["Files of the task"] == "mine.py c0ffee"
    assert "Earlier versions" not in dict(environment_rows([{"versions": versions}]))


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_damaged_request_record_is_written_again_with_a_message(
    tmp_path: Path, run: TrainingRun, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    directory = RunDirectory(tmp_path)
    directory.requested.write_text(text)
    record_request(directory, run, command=[])
    written = json.loads(directory.requested.read_text())
    assert written["manifest"]["metadata"]["name"] == "docs-lm"
    assert "requested.json" in caplog.text and "written anew" in caplog.text
