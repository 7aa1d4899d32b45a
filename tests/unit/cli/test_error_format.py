"""Errors as JSON: one object a line on stderr, with a dotted code."""

import importlib
import json
import pkgutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import evergrad_cli
import evergrad_trainer
from evergrad_cli.main import main, print_error
from evergrad_manifest.errors import ConfigurationError, EvergradError, InputError, Problem


@pytest.mark.capability("G-101")
def test_each_problem_is_one_object_with_its_code_and_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = tmp_path / "none.yaml"
    assert main(["preflight", str(missing), "--errors", "json"]) == 64
    rows = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert rows
    for row in rows:
        assert row["code"].startswith("input.")
        assert (row["level"], row["exitCode"]) == ("error", 64)
        moment = datetime.fromisoformat(row["time"])
        assert moment.tzinfo is not None and moment.utcoffset() == timedelta(0)
        assert abs(datetime.now(UTC) - moment) < timedelta(hours=1)
    assert str(missing) in rows[0]["message"]


def test_text_and_json_have_the_same_content(capsys: pytest.CaptureFixture[str]) -> None:
    error = ConfigurationError(
        Problem("spec.a", "is wrong", "it is 1", "Use 2"), Problem("spec.b", "is missing")
    )
    print_error(error, as_json=False)
    sentences = capsys.readouterr().err.splitlines()
    print_error(error, as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert sentences == [f"error: {row['message']}" for row in rows]
    assert rows[0] | {"time": ""} == {
        "time": "",
        "level": "error",
        "code": "input.configuration",
        "exitCode": 64,
        "message": "spec.a: is wrong; it is 1. Use 2.",
        "path": "spec.a",
        "what": "is wrong",
        "why": "it is 1",
        "remedy": "Use 2",
    }


def test_an_error_without_problems_keeps_its_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_error(EvergradError("gone; tried twice"), as_json=True)
    row = json.loads(capsys.readouterr().err)
    assert (row["message"], row["code"], row["exitCode"]) == (
        "gone; tried twice",
        "internal",
        70,
    )


def test_every_error_has_a_code_of_its_kind() -> None:
    for package in (evergrad_cli, evergrad_trainer):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.endswith((".errors", ".manifest", ".local")):
                importlib.import_module(module.name)

    def below(kind: type[EvergradError]) -> list[type[EvergradError]]:
        return [kind, *(each for sub in kind.__subclasses__() for each in below(sub))]

    codes: dict[str, str] = {}
    for kind in below(EvergradError):
        family = "input" if issubclass(kind, InputError) else str(kind.kind)
        assert kind.code.split(".")[0] == family, kind
        if "code" in vars(kind):
            assert codes.setdefault(kind.code, kind.__name__) == kind.__name__
    assert len(codes) > 15
