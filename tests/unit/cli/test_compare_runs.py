"""``evergrad compare-runs``: which runs count as equal, its output, and unusable input."""

import argparse
import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from evergrad_manifest.errors import InputError
from evergrad_trainer.base.records import EvaluationRecord
from evergrad_trainer.commands import compare_runs
from evergrad_trainer.observers.jsonl import RunLog
from evergrad_trainer.run.directory import RunDirectory

Compare = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Runs the command on the runs a and b of tmp_path; returns exit code and JSON."""

    def run(*options: str) -> tuple[int, dict[str, Any]]:
        code = _execute(tmp_path, "--json", *options)
        return code, json.loads(capsys.readouterr().out)

    return run


def _execute(path: Path, *options: str) -> int:
    parser = argparse.ArgumentParser()
    compare_runs.add_arguments(parser)
    return compare_runs.execute(
        parser.parse_args([str(path / "a"), str(path / "b"), *options])
    )


def _write(
    path: Path, rows: list[Any], evaluations: tuple[EvaluationRecord, ...] = ()
) -> None:
    directory = RunDirectory(path)
    directory.create()
    log = RunLog(directory)
    for row in rows:
        log.step_end(row)
    for evaluation in evaluations:
        log.evaluation_end(evaluation)
    log.close()


def _evaluation(
    step: int, loss: float = 2.5, name: str = "heldOut", tokens: int = 4096
) -> EvaluationRecord:
    return EvaluationRecord(step, 1, name, loss, math.exp(loss), tokens, 1.0, 1e9 + step)


def _one_ulp_up(value: float) -> float:
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return float(struct.unpack("<d", struct.pack("<q", bits + 1))[0])


def _by_field(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {difference["field"]: difference for difference in result["differences"]}


def test_a_stopped_and_resumed_run_equals_an_undisturbed_run(
    tmp_path: Path, synthetic: ModuleType, compare: Compare
) -> None:
    synthetic.RunWriter(tmp_path / "a").write(synthetic.Process(last=200))
    resumed = synthetic.RunWriter(tmp_path / "b").write(
        synthetic.Process(last=57, ended="signal")
    )
    resumed.write(synthetic.Process(last=200, resumed_from=57))
    code, result = compare("--exact")
    assert code == 0
    assert result["equal"] is True
    assert result["steps"] == {"compared": 200, "first": 1, "last": 200}
    assert [
        (difference["field"], difference["counts"]) for difference in result["differences"]
    ] == [("generation", False)]
    assert result["repeated_steps"]["b"] == {
        "num_steps": 0,
        "ranges": [],
        "num_with_other_samples": 0,
    }


def test_a_killed_and_resumed_run_is_equal_and_its_repeated_steps_are_named(
    tmp_path: Path, synthetic: ModuleType, compare: Compare
) -> None:
    synthetic.RunWriter(tmp_path / "a").write(synthetic.Process(last=200))
    killed = synthetic.RunWriter(tmp_path / "b").write(
        synthetic.Process(last=57, ended="killed")
    )
    killed.write(synthetic.Process(last=200, resumed_from=50))
    code, result = compare("--exact")
    assert code == 0
    assert result["repeated_steps"]["a"]["num_steps"] == 0
    assert result["repeated_steps"]["b"] == {
        "num_steps": 7,
        "ranges": [[51, 57]],
        "num_with_other_samples": 0,
    }


def test_the_last_row_of_a_step_counts(
    tmp_path: Path, synthetic: ModuleType, compare: Compare
) -> None:
    rows = [synthetic.step_record(step) for step in range(1, 6)]
    _write(tmp_path / "a", rows)
    _write(
        tmp_path / "b",
        [synthetic.step_record(3, loss=9.0, sample_hash="00000000000000aa"), *rows],
    )
    code, result = compare("--exact")
    assert code == 0
    assert result["repeated_steps"]["b"] == {
        "num_steps": 1,
        "ranges": [[3, 3]],
        "num_with_other_samples": 1,
    }


def test_metrics_of_a_recipe_are_compared_like_losses(
    tmp_path: Path, synthetic: ModuleType, compare: Compare
) -> None:
    def rows(**changed: float) -> list[Any]:
        values = {"ce": 2.0, "kl": 0.5}
        last = synthetic.step_record(2, metrics=values | changed)
        return [synthetic.step_record(1, metrics=values), last]

    _write(tmp_path / "a", rows())
    _write(tmp_path / "b", rows(kl=0.5 * (1 + 1e-7)))
    assert compare()[0] == 0
    code, result = compare("--exact")
    assert (code, list(_by_field(result))) == (1, ["kl"])
    found = _by_field(result)["kl"]
    assert (found["first_step"], found["a"], found["num_steps"]) == (2, 0.5, 1)


def test_a_metric_that_only_one_run_has_makes_them_differ(
    tmp_path: Path, synthetic: ModuleType, compare: Compare
) -> None:
    _write(tmp_path / "a", [synthetic.step_record(1)], (_evaluation(1),))
    evaluation = replace(_evaluation(1), metrics={"accuracy": 0.5})
    _write(tmp_path / "b", [synthetic.step_record(1, metrics={"kl": 0.5})], (evaluation,))
    code, result = compare()
    assert code == 1
    assert {
        name: (one["a"], one["b"], one["where"]) for name, one in _by_field(result).items()
    } == {
        "kl": (None, 0.5, ""),
        "accuracy": (None, 0.5, "heldOut"),
    }


def test_the_first_step_with_other_samples_is_named(
    tmp_path: Path, synthetic: ModuleType, compare: Compare
) -> None:
    _write(tmp_path / "a", [synthetic.step_record(step) for step in range(1, 10)])
    _write(
        tmp_path / "b",
        [
            synthetic.step_record(
                step, sample_hash=f"{step if step > 6 else _hash(synthetic, step):016x}"
            )
            for step in range(1, 10)
        ],
    )
    code, result = compare()
    assert code == 1
    found = _by_field(result)["sample_hash"]
    assert (found["first_step"], found["num_steps"], found["b"], found["counts"]) == (
        7,
        3,
        "0000000000000007",
        True,
    )
    assert found["a"] == synthetic.step_record(7).sample_hash


def _hash(synthetic: ModuleType, step: int) -> int:
    return int(synthetic.step_record(step).sample_hash, 16)


@pytest.mark.parametrize(
    ("change", "options", "code"),
    [
        (0.5e-5, (), 0),
        (2e-5, (), 1),
        (2e-5, ("--tolerance", "1e-4"), 0),
        (-2e-5, (), 1),
        (1e-15, ("--tolerance", "0"), 1),
        (0.0, ("--tolerance", "0"), 0),
        (1e-15, ("--exact",), 1),
        (0.5e-5, ("--steps", "5:"), 0),
        (0.5, ("--steps", "5:"), 0),
        (0.5, ("--steps", ":4"), 1),
    ],
)
def test_losses_may_differ_by_the_relative_tolerance(
    tmp_path: Path,
    synthetic: ModuleType,
    compare: Compare,
    change: float,
    options: tuple[str, ...],
    code: int,
) -> None:
    rows = [synthetic.step_record(step, loss=2.5 * step) for step in range(1, 10)]
    _write(tmp_path / "a", rows)
    rows[3] = synthetic.step_record(4, loss=10.0 * (1 + change))
    _write(tmp_path / "b", rows)
    assert compare(*options)[0] == code


@pytest.mark.parametrize("field", ["loss", "learning_rate", "grad_norm"])
def test_exact_compares_every_bit(
    tmp_path: Path, synthetic: ModuleType, compare: Compare, field: str
) -> None:
    row = synthetic.step_record(40)
    _write(tmp_path / "a", [row])
    _write(
        tmp_path / "b",
        [synthetic.step_record(40, **{field: _one_ulp_up(getattr(row, field))})],
    )
    assert compare()[0] == 0
    code, result = compare("--exact")
    assert code == 1
    found = _by_field(result)[field]
    assert found["a"].hex() == getattr(row, field).hex()
    assert found["b"].hex() == _one_ulp_up(getattr(row, field)).hex()


@pytest.mark.parametrize(
    ("field", "value"), [("tokens", 1), ("valid_tokens", 1), ("learning_rate", 0.5)]
)
def test_other_fields_of_the_recipe_are_compared(
    tmp_path: Path, synthetic: ModuleType, compare: Compare, field: str, value: float
) -> None:
    _write(tmp_path / "a", [synthetic.step_record(step) for step in (1, 2)])
    _write(
        tmp_path / "b",
        [synthetic.step_record(1), synthetic.step_record(2, **{field: value})],
    )
    code, result = compare()
    assert code == 1
    assert _by_field(result)[field]["first_step"] == 2


def test_gradient_norm_world_size_and_times_are_shown_but_not_compared(
    tmp_path: Path, synthetic: ModuleType, compare: Compare
) -> None:
    _write(tmp_path / "a", [synthetic.step_record(1)])
    _write(
        tmp_path / "b",
        [
            synthetic.step_record(
                1, grad_norm=5.0, world_size=3, generation=9, time=1.0, step_seconds=9.0
            )
        ],
    )
    code, result = compare()
    assert code == 0
    assert {name: found["counts"] for name, found in _by_field(result).items()} == {
        "grad_norm": False,
        "world_size": False,
        "generation": False,
    }


def test_steps_of_only_one_run_are_a_difference_unless_they_are_excluded(
    tmp_path: Path, synthetic: ModuleType, compare: Compare
) -> None:
    _write(tmp_path / "a", [synthetic.step_record(step) for step in range(1, 10)])
    _write(
        tmp_path / "b",
        [synthetic.step_record(step) for step in (1, 2, 3, 5, 6, 7, 8, 9, 10, 11)],
    )
    code, result = compare()
    assert code == 1
    assert (result["steps_only_in_a"], result["steps_only_in_b"]) == ([[4, 4]], [[10, 11]])
    assert compare("--steps", "5:9")[0] == 0


def test_losses_that_are_not_finite_are_equal_only_to_each_other(
    tmp_path: Path, synthetic: ModuleType, compare: Compare
) -> None:
    _write(tmp_path / "a", [synthetic.step_record(1, loss=math.nan)])
    _write(tmp_path / "b", [synthetic.step_record(1, loss=math.nan)])
    assert compare()[0] == 0
    assert compare("--exact")[0] == 0
    (tmp_path / "b" / "metrics.jsonl").unlink()
    _write(tmp_path / "b", [synthetic.step_record(1, loss=2.0)])
    code, result = compare()
    assert code == 1
    assert (
        _by_field(result)["loss"]["a"],
        _by_field(result)["loss"]["largest_relative"],
    ) == (
        None,
        None,
    )


def test_evaluations_are_compared_by_step_and_set(
    tmp_path: Path, synthetic: ModuleType, compare: Compare
) -> None:
    rows = [synthetic.step_record(1)]
    _write(
        tmp_path / "a",
        rows,
        (_evaluation(1), _evaluation(1, 3.0, "other"), _evaluation(2, 9.0), _evaluation(2)),
    )
    _write(
        tmp_path / "b", rows, (_evaluation(1), _evaluation(1, 3.1, "other"), _evaluation(2))
    )
    code, result = compare()
    assert code == 1
    (found,) = result["differences"]
    assert (found["field"], found["where"], found["first_step"], found["num_steps"]) == (
        "loss",
        "other",
        1,
        1,
    )
    assert result["evaluations"]["compared"] == 3


def test_an_evaluation_of_only_one_run_is_a_difference(
    tmp_path: Path, synthetic: ModuleType, compare: Compare
) -> None:
    _write(tmp_path / "a", [synthetic.step_record(1)], (_evaluation(1),))
    _write(tmp_path / "b", [synthetic.step_record(1)], (_evaluation(1), _evaluation(2)))
    code, result = compare()
    assert (code, result["evaluations"]["only_in_b"]) == (1, [[2, "heldOut"]])


def test_an_evaluation_on_other_tokens_differs(
    tmp_path: Path, synthetic: ModuleType, compare: Compare
) -> None:
    _write(tmp_path / "a", [synthetic.step_record(1)], (_evaluation(1),))
    _write(tmp_path / "b", [synthetic.step_record(1)], (_evaluation(1, tokens=1),))
    assert compare()[0] == 1


def test_the_text_names_the_difference_and_its_step(
    tmp_path: Path, synthetic: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(
        tmp_path / "a",
        [synthetic.step_record(step, loss=2.0, grad_norm=0.5) for step in range(1, 1201)],
        (_evaluation(7),),
    )
    changed = [
        synthetic.step_record(
            step, loss=2.0 if step < 1000 else 2.5, grad_norm=0.25, world_size=3
        )
        for step in range(1, 1202)
    ]
    _write(tmp_path / "b", [*changed[:5], *changed])
    assert _execute(tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"A  {tmp_path / 'a'}",
        f"B  {tmp_path / 'b'}",
        "   1,200 steps compared, 1 to 1,200, and 0 evaluations",
        "   B trained 5 steps more than once: 1 to 5; each time on the same samples",
        "differs  steps only in B: 1,201",
        "differs  evaluations only in A: heldOut at 7",
        "differs  loss: first at step 1,000 (A 2.0, B 2.5); 201 steps, at most 0.2 relative",
        "  note   grad_norm: first at step 1 (A 0.5, B 0.25); 1,200 steps, at most 0.5 relative",
        "  note   world_size: first at step 1 (A 2, B 3); 1,200 steps",
        "The runs differ.",
    ]


def test_the_text_of_equal_runs_ends_with_what_was_compared(
    tmp_path: Path, synthetic: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        _write(tmp_path / name, [synthetic.step_record(1)])
    assert _execute(tmp_path, "--exact") == 0
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "The runs agree: equal samples in every step, losses equal bit by bit."
    )


def test_a_truncated_last_line_of_a_killed_run_is_ignored(
    tmp_path: Path, synthetic: ModuleType, compare: Compare
) -> None:
    for name in ("a", "b"):
        _write(tmp_path / name, [synthetic.step_record(1)])
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step":2,"gen')
    assert compare()[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--steps", "5"), "--steps: '5' is not a range of steps"),
        (("--steps", ":"), "--steps: ':' is not a range of steps"),
        (("--steps", "9:5"), "--steps: '9:5' is not a range of steps"),
        (("--steps", "a:5"), "--steps: 'a:5' is not a range of steps"),
        (("--steps=-3:5",), "--steps: '-3:5' is not a range of steps"),
        (("--tolerance", "nan"), "--tolerance: nan is not a finite number of at least 0"),
        (("--tolerance=-1",), "--tolerance: -1.0 is not a finite number of at least 0"),
        (("--steps", "100:200"), "--steps 100:200: there is no step to compare"),
    ],
)
def test_unusable_options_are_refused(
    tmp_path: Path, synthetic: ModuleType, options: tuple[str, ...], message: str
) -> None:
    for name in ("a", "b"):
        _write(tmp_path / name, [synthetic.step_record(1)])
    with pytest.raises(InputError) as caught:
        _execute(tmp_path, *options)
    assert str(caught.value).startswith(message)
    assert caught.value.exit_code == 64


def test_unusable_runs_are_refused_with_their_path(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    _write(tmp_path / "a", [synthetic.step_record(1)])
    cases: list[tuple[Callable[[Path], Any], str]] = [
        (lambda path: None, "b: does not exist"),
        (lambda path: path.mkdir(), "b: is not a run directory"),
        (
            lambda path: (path / "run.json").write_text("{}"),
            "metrics.jsonl: does not exist",
        ),
        (
            lambda path: (path / "metrics.jsonl").write_text('{"step":1}\n'),
            "metrics.jsonl line 1: has no generation",
        ),
        (
            lambda path: (path / "metrics.jsonl").write_text("\n"),
            "metrics.jsonl line 1: is not a JSON object",
        ),
    ]
    for prepare, message in cases:
        prepare(tmp_path / "b")
        with pytest.raises(InputError) as caught:
            _execute(tmp_path)
        assert message in str(caught.value)
        assert str(tmp_path / "b") in str(caught.value)
