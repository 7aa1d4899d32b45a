"""``evergrad validate``: one line or all problems, for people and for scripts."""

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from evergrad_cli.local import validate
from evergrad_manifest.reading.loader import (
    add_manifest_arguments,
    load_from,
    load_manifest,
)

BASE = Path(__file__).parent / "base_manifest.yaml"
SCRIPT = Path(__file__).parent / "script_manifest.yaml"


def execute(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    validate.add_arguments(parser)
    return validate.execute(parser.parse_args([str(argument) for argument in arguments]))


def test_a_valid_manifest_prints_one_line_and_exits_with_0(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert execute(BASE) == 0
    out, err = capsys.readouterr()
    assert out == (
        f"valid: docs-lm ({BASE}); 20000000 tokens, 32 samples a step in 8 slots, trained on docs; "
        "34,999,040 parameters, about 637 MiB to train them on each worker\n"
    )
    assert err == ""


def test_an_invalid_manifest_prints_every_problem_and_exits_with_64(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert execute(BASE, "--set", "spec.nodes.max=1", "--set", "spec.training.zzz=1") == 64
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 2 and all(line.startswith("error: spec.") for line in lines)


@pytest.mark.capability("G-X27", "G-X13")
def test_overlays_and_overrides_are_applied_in_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.yaml").write_text("metadata: {name: one}")
    (tmp_path / "two.yaml").write_text("metadata: {name: two}")
    arguments = (
        BASE,
        "--overlay",
        tmp_path / "one.yaml",
        "--overlay",
        tmp_path / "two.yaml",
    )
    assert execute(*arguments) == 0
    assert "valid: two" in capsys.readouterr().out
    assert (
        execute(
            *arguments,
            "--set",
            "metadata.name=three",
            "--set",
            "spec.training.horizon={steps: 5}",
        )
        == 0
    )
    assert "valid: three" in capsys.readouterr().out


def test_json_output_is_one_document_for_valid_and_invalid_manifests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert execute(BASE, "--json") == 0
    good = json.loads(capsys.readouterr().out)
    assert good["valid"] is True and good["problems"] == []
    assert good["resolved"]["spec"]["training"]["checkpoint"]["keep"] == 3
    assert len(good["configHash"]) == 64
    assert execute(BASE, "--json", "--set", "spec.training.horizon.steps=1") == 64
    out, err = capsys.readouterr()
    bad = json.loads(out)
    assert err == "" and bad["valid"] is False
    (problem,) = bad["problems"]
    assert problem["path"] == "spec.training.horizon"
    assert problem["message"].startswith(
        "spec.training.horizon: steps and tokens are both set"
    )
    assert problem["remedy"] == "Keep one, remove the rest"


def test_a_task_that_prepares_its_own_data_prints_one_line_without_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = yaml.safe_load(BASE.read_text())
    training = manifest["spec"]["training"]
    for key in ("model", "data", "evaluation"):
        del training[key]
    training |= {"recipe": "mine:Task", "horizon": {"steps": 9000}}
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(manifest))
    (tmp_path / "mine.py").touch()
    assert execute(path) == 0
    assert capsys.readouterr() == (
        (
            f"valid: docs-lm ({path}); 9000 steps, 32 samples a step in 8 slots; "
            "a model that the task makes itself\n"
        ),
        "",
    )


def a_script(folder: Path, **script: Any) -> Path:
    manifest = yaml.safe_load(SCRIPT.read_text())
    manifest["spec"]["script"] |= script
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(manifest))
    return path


def test_a_script_prints_one_line_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_script(tmp_path)
    (tmp_path / "train.py").touch()
    assert execute(path) == 0
    said = f"valid: mine ({path}); runs the file train.py --epochs 3 on 1 to 3 nodes with 2 workers each\n"
    assert capsys.readouterr() == (said, "")
    assert (
        execute(
            a_script(tmp_path, command=["-m", "a", "b c"]),
            "--set",
            "spec.nodes=null",
            "--set",
            "spec.workersPerNode=1",
        )
        == 0
    )
    assert "runs the module a 'b c' on 1 node with 1 worker\n" in capsys.readouterr().out


@pytest.mark.acceptance("input-A-2")
def test_a_missing_python_file_of_the_command_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_script(tmp_path)
    assert execute(path) == 64
    remedy = "Check the path; it is relative to the manifest's directory."
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        f"error: {tmp_path}/train.py: does not exist; spec.script.command names it. {remedy}\n",
    )
    assert execute(path, "--json") == 64
    document = json.loads(capsys.readouterr().out)
    assert (
        document["valid"] is False
        and document["problems"][0]["path"] == f"{tmp_path}/train.py"
    )


@pytest.mark.parametrize(
    "command",
    [["/in/the/pod/train.py"], ["-m", "nothing"], ["no-such-program"]],
    ids=" ".join,
)
def test_programs_that_only_the_pod_may_have_are_not_searched_for(
    command: list[str], tmp_path: Path
) -> None:
    assert execute(a_script(tmp_path, command=command)) == 0


def test_the_resolved_manifest_is_a_valid_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(BASE, "--print-resolved") == 0
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(capsys.readouterr().out)
    assert load_manifest(resolved).run == load_manifest(BASE).run
    assert (
        yaml.safe_load(resolved.read_text())["spec"]["training"]["runtime"][
            "collectiveTimeoutSeconds"
        ]
        == 600
    )


def test_a_terminal_without_unicode_gets_escapes_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "läuft.yaml"
    path.write_text(BASE.read_text())
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", plain)
    assert execute(path) == 0
    plain.flush()
    assert b"l\\xe4uft.yaml" in plain.buffer.getvalue()  # type: ignore[attr-defined]


def test_other_commands_can_use_the_same_arguments() -> None:
    parser = argparse.ArgumentParser()
    add_manifest_arguments(parser)
    loaded = load_from(parser.parse_args([str(BASE), "--set", "metadata.name=x"]))
    assert loaded.run.metadata.name == "x"
    assert loaded.base_directory == BASE.parent
