"""Whether a manifest may continue with the content of a run directory."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.identity import config_hash, from_wire
from evergrad_trainer.base.errors import RunDirectoryError
from evergrad_trainer.checkpoint.manifest import Identity
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.run.resume import (
    RunState,
    check_data_unchanged,
    check_extension,
    check_model_unchanged,
    check_tokenizer_unchanged,
    inspect_directory,
    resolved_record,
    resolved_script_record,
)

PREPARED = Prepared(
    sources=(),
    evaluation=(),
    tokenizer_identity="byte",
    vocab_size=257,
    end_of_document=256,
)


MODEL = {"transformers": "5.0.0", "config": {"hidden_size": 4, "rope": {"theta": 10000.0}}}


def make_run(name: str = "one", **training: Any) -> TrainingRun:
    values: dict[str, Any] = {
        "model": {"config": {"model_type": "llama"}},
        "data": {"sources": [{"name": "docs", "path": "docs.jsonl"}], "sequenceLength": 64},
        "batching": {"globalBatchSize": 8, "microBatchSize": 2},
        "optimizer": {"learningRate": 1e-3},
        "horizon": {"steps": 100},
    }
    spec = {"training": values | training}
    return from_wire(
        {
            "apiVersion": "evergrad.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": name},
            "spec": spec,
        }
    )


def make_script(*command: str, name: str = "one", **script: Any) -> TrainingRun:
    spec = {"script": {"command": list(command), **script}}
    return from_wire(
        {
            "apiVersion": "evergrad.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": name},
            "spec": spec,
        }
    )


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """Directory of a run that has begun."""
    one = RunDirectory(tmp_path / "run")
    one.create()
    record = resolved_record(
        make_run(),
        PREPARED,
        identity=Identity("one", "recorded", "f"),
        base_directory=".",
        derived={"totalSteps": 100},
        model=MODEL,
    )
    one.write_resolved(record)
    return one


def refusal(directory: RunDirectory, run: TrainingRun, *, extend: bool = False) -> str:
    with pytest.raises(RunDirectoryError) as raised:
        inspect_directory(directory, run, extend=extend)
    return str(raised.value)


@pytest.mark.capability("O-28")
def test_an_empty_or_missing_directory_is_a_fresh_start(tmp_path: Path) -> None:
    assert inspect_directory(
        RunDirectory(tmp_path / "none"), make_run(), extend=False
    ) == RunState("fresh")
    made = RunDirectory(tmp_path / "made")
    made.create()
    assert inspect_directory(made, make_run(), extend=False) == RunState("fresh")


def test_a_run_that_has_started_continues_with_its_recorded_data(
    directory: RunDirectory,
) -> None:
    run_state = inspect_directory(directory, make_run(), extend=False)
    assert (run_state.state, run_state.total_steps, run_state.recorded) == (
        "begun",
        100,
        PREPARED,
    )


@pytest.mark.acceptance("8d-4f", "input-1e-1")
def test_a_finished_run_is_complete_until_its_horizon_is_extended(
    directory: RunDirectory,
) -> None:
    directory.mark_complete({"step": 100})
    longer = make_run(horizon={"steps": 200})
    assert inspect_directory(directory, make_run(), extend=False).state == "complete"
    assert inspect_directory(directory, make_run(), extend=True).state == "complete"
    assert inspect_directory(directory, longer, extend=True).state == "begun"
    text = refusal(directory, longer)
    assert (
        "spec.training.horizon.steps: 200 here" in text
        and "began with 100" in text
        and "--extend" in text
    )


def test_a_missing_source_is_reported_with_the_difference(
    directory: RunDirectory, tmp_path: Path
) -> None:
    moved = {
        "sources": [{"name": "docs", "path": "nowhere.jsonl"}],
        "sequenceLength": 64,
    }
    run = make_run(horizon={"steps": 200}, data=moved)
    with pytest.raises(RunDirectoryError) as raised:
        inspect_directory(directory, run, extend=False, base_directory=tmp_path)
    horizon, source = raised.value.problems
    assert horizon.path == "spec.training.horizon.steps"
    assert source.path == str(tmp_path / "nowhere.jsonl")
    assert "spec.training.data.sources[0].path names it" in str(source)
    # A recipe that is accepted does not require the data to exist: preflight checks that.
    run = make_run(data=moved)
    found = inspect_directory(directory, run, extend=False, base_directory=tmp_path)
    assert found.state == "begun"


def test_another_unit_of_the_horizon_is_a_change_of_both_fields(
    directory: RunDirectory,
) -> None:
    text = refusal(directory, make_run(horizon={"tokens": 10**6}))
    assert "spec.training.horizon.steps: nothing here" in text.replace(
        "(absent)", "nothing"
    )
    assert (
        "spec.training.horizon.tokens: 1000000 here" in text
        or "spec.training.horizon.tokens: 1M here" in text
    )


@pytest.mark.acceptance("8d-4c", "8d-4d", "8d-4e", "input-G-64")
@pytest.mark.capability("G-64")
@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"optimizer": {"learningRate": 2e-3}}, "spec.training.optimizer.learningRate"),
        ({"reproducibility": {"seed": 1}}, "spec.training.reproducibility.seed"),
        (
            {"batching": {"globalBatchSize": 8, "microBatchSize": 4}},
            "spec.training.batching.microBatchSize",
        ),
        (
            {"tokenizer": {"type": "transformers", "path": "tok"}},
            "spec.training.tokenizer.type",
        ),
        ({"runtime": {"precision": "bf16"}}, "spec.training.runtime.precision"),
        (
            {"model": {"config": {"model_type": "llama", "hidden_size": 8}}},
            "spec.training.model.config.hidden_size",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("extend", [False, True])
def test_a_changed_recipe_field_is_reported(
    directory: RunDirectory, changes: dict[str, Any], path: str, extend: bool
) -> None:
    text = refusal(directory, make_run(**changes), extend=extend)
    assert f"{path}: " in text and "the recipe of a run does not change" in text


def test_data_and_model_may_be_moved_and_the_run_keeps_its_identity(
    directory: RunDirectory,
) -> None:
    moved = {
        "sources": [{"name": "docs", "path": "/elsewhere/docs.jsonl"}],
        "sequenceLength": 64,
    }
    run_state = inspect_directory(directory, make_run(data=moved), extend=False)
    assert run_state.state == "begun" and run_state.config_hash == "recorded"
    assert config_hash(make_run(data=moved)) != config_hash(make_run())
    other = {
        "sources": [{"name": "other", "path": "/elsewhere/docs.jsonl"}],
        "sequenceLength": 64,
    }
    text = refusal(directory, make_run(data=other))
    assert "spec.training.data.sources[0].name: 'other' here" in text and "path" not in text


def test_a_model_that_becomes_a_directory_is_another_model(directory: RunDirectory) -> None:
    assert "spec.training.model.path: 'm' here" in refusal(
        directory, make_run(model={"path": "m"})
    )


def test_other_data_is_refused_before_the_run_is_claimed(directory: RunDirectory) -> None:
    run_state = inspect_directory(directory, make_run(), extend=False)
    assert run_state.data_fingerprint == "f"
    check_data_unchanged(directory, run_state, fingerprint="f")
    check_data_unchanged(directory, RunState("fresh"), fingerprint="other")
    with pytest.raises(RunDirectoryError) as raised:
        check_data_unchanged(directory, run_state, fingerprint="other")
    assert str(raised.value) == (
        f"{directory.path}: the data's fingerprint is 'f'; that of the data here is 'other'. Restore the data "
        "this run began with, or start a new run with initFrom."
    )
    # The stages that the task declares, and its preparation with another value.
    began = dataclasses.replace(PREPARED, facts={"encoder": "e1", "corpus": "c", "made": 1})
    run_state = dataclasses.replace(run_state, recorded=began)
    facts = {"encoder": "e2", "corpus": "c", "further": 3}
    with pytest.raises(
        RunDirectoryError, match="here is 'x', with the encoder 'e2', which was 'e1'\\."
    ):
        check_data_unchanged(directory, run_state, fingerprint="x", facts=facts)


def test_a_missing_data_start_is_reported_if_the_run_continued_in_the_same_data(
    directory: RunDirectory,
) -> None:
    record = {
        **(directory.read_resolved() or {}),
        "begunFrom": {**BEGUN_FROM, "load": "everything"},
    }
    directory.write_resolved(record)
    run_state = inspect_directory(directory, make_run(), extend=False)
    # An older version wrote none.
    check_data_unchanged(directory, run_state, fingerprint="f")
    with pytest.raises(RunDirectoryError, match=r"since run.json has no dataStart"):
        check_data_unchanged(directory, run_state, fingerprint="other")


def test_a_tokenizer_with_other_content_is_refused_at_any_path() -> None:
    run_state = RunState("begun", 100, PREPARED)
    check_tokenizer_unchanged(run_state, PREPARED)
    check_tokenizer_unchanged(RunState("fresh"), PREPARED)
    other = dataclasses.replace(PREPARED, tokenizer_identity="another")
    with pytest.raises(
        RunDirectoryError, match="its content is another, but the run began with byte"
    ):
        check_tokenizer_unchanged(run_state, other)


@pytest.mark.parametrize(
    "changes",
    [
        {"runtime": {"parallelism": "fsdp2", "threads": 1}},
        {"checkpoint": {"keep": 9}},
        {"evaluation": {"sources": [{"name": "other", "path": "other.jsonl"}]}},
        {"stop": {"afterStep": 3}},
        {"logging": {"every": {"steps": 1}}},
        {"initFrom": {"path": "elsewhere"}},
    ],
    ids=lambda value: next(iter(value)),
)
def test_operational_fields_may_change_between_starts(
    directory: RunDirectory, changes: dict[str, Any]
) -> None:
    assert inspect_directory(directory, make_run(**changes), extend=False).state == "begun"


@pytest.mark.acceptance("8d-4a")
def test_the_directory_of_another_run_is_refused_with_both_names(
    directory: RunDirectory,
) -> None:
    text = refusal(directory, make_run(name="two"))
    assert f"{directory.path}: holds the run 'one'; this manifest is the run 'two'" in text


@pytest.mark.acceptance("input-3e-1")
@pytest.mark.capability("G-68")
@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/latest"])
def test_leftover_files_of_an_unknown_run_are_not_overwritten(
    directory: RunDirectory, name: str
) -> None:
    directory.resolved.unlink()
    (directory.path / name).write_text("x")
    assert (
        "holds " in (text := refusal(directory, make_run())) and "but no run.json" in text
    )


START: dict[str, Any] = {
    "afterStep": 6,
    "sources": [{"name": "docs", "fingerprint": "D", "number": 0, "taken": 18}],
    "leftOut": [],
    "dataBefore": "f",
}
BEGUN_FROM = {
    "path": "a",
    "checkpoint": "step-6",
    "step": 6,
    "hash": "h",
    "load": "position",
}
MISSING = object()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("manifest", MISSING, "manifest is missing"),
        ("manifest", ["x"], 'manifest is ["x"]; it should be'),
        ("derived", MISSING, "derived is missing"),
        ("derived", 5, "derived is 5; it should be an object"),
        ("derived", {}, "derived.totalSteps is missing"),
        (
            "derived",
            {"totalSteps": "100"},
            "derived.totalSteps is '100'; it should be a valid int",
        ),
        ("prepared", MISSING, "prepared is missing"),
        (
            "prepared",
            {**PREPARED.to_json(), "sources": [{}]},
            "prepared.sources[0].name is missing",
        ),
        (
            "prepared",
            {**PREPARED.to_json(), "vocab_size": None},
            "prepared.vocab_size is null",
        ),
        ("model", {"transformers": "5.0.0"}, "model.config is missing"),
        ("model", {**MODEL, "config": []}, "model.config is []"),
        ("configHash", 5, "configHash is 5"),
        ("dataFingerprint", {}, "dataFingerprint is {}"),
        ("begunFrom", {"load": "position"}, "begunFrom.hash is missing"),
        ("dataStart", MISSING, "dataStart is missing"),
        ("dataStart", [], "dataStart is []"),
        ("dataStart", {"afterStep": 0}, "dataStart.sources is missing"),
        (
            "dataStart",
            {**START, "afterStep": -1},
            "dataStart.afterStep is -1; it should be greater",
        ),
        ("dataStart", {**START, "sources": [{"number": "x"}]}, "sources[0].number is 'x'"),
        ("dataStart", {**START, "sources": [{"number": 0}]}, "sources[0].taken is missing"),
        ("dataStart", {**START, "leftOut": None}, "dataStart.leftOut is missing"),
        ("dataStart", {**START, "dataBefore": ""}, "dataStart.dataBefore is missing"),
    ],
)
def test_a_damaged_key_of_run_json_is_reported(
    directory: RunDirectory, key: str, value: Any, said: str
) -> None:
    record = {
        **(directory.read_resolved() or {}),
        "begunFrom": BEGUN_FROM,
        "dataStart": START,
    }
    directory.write_resolved(record)
    start = inspect_directory(directory, make_run(), extend=False).start
    assert start is not None and start.to_json() == {**START, "content": {}}
    record[key] = value
    directory.write_resolved(
        {key: one for key, one in record.items() if one is not MISSING}
    )
    text = refusal(directory, make_run())
    assert f"{directory.resolved}: " in text and said in text, text
    assert "Restore it from a backup. Without one, begin another run" in text


def test_keys_known_only_to_another_version_are_not_damage(
    directory: RunDirectory,
) -> None:
    record = directory.read_resolved() or {}
    prepared = {**record["prepared"], "later": 1}
    start = {**START, "later": 1, "sources": [{**START["sources"][0], "later": 1}]}
    directory.write_resolved(
        {**record, "prepared": prepared, "dataStart": start, "later": 1}
    )
    run_state = inspect_directory(directory, make_run(), extend=False)
    assert run_state.recorded == PREPARED
    assert run_state.start is not None and run_state.start.sources[0].taken == 18


def test_a_start_refused_before_its_first_step_may_be_retried(
    directory: RunDirectory,
) -> None:
    directory.resolved.unlink()
    directory.metrics.write_text("")
    assert inspect_directory(directory, make_run(), extend=False) == RunState("fresh")


@pytest.mark.acceptance("8d-4g")
def test_a_damaged_run_json_is_reported(directory: RunDirectory) -> None:
    directory.resolved.write_text("{")
    assert f"{directory.resolved}: is not valid JSON" in refusal(directory, make_run())


def test_a_horizon_may_be_extended_and_never_shortened(directory: RunDirectory) -> None:
    begun = RunState("begun", total_steps=100)
    check_extension(directory, begun, total_steps=100)
    check_extension(directory, begun, total_steps=101)
    with pytest.raises(RunDirectoryError, match="99 steps are fewer than the 100"):
        check_extension(directory, begun, total_steps=99)
    check_extension(directory, RunState("fresh"), total_steps=1)


def test_the_recorded_manifest_loads_to_the_same_run(directory: RunDirectory) -> None:
    record = json.loads(directory.resolved.read_text())
    assert from_wire(record["manifest"]) == make_run()
    assert (record["configHash"], record["dataFingerprint"]) == ("recorded", "f")


# Scripts.


@pytest.fixture
def of_script(tmp_path: Path) -> RunDirectory:
    """Directory of a script that has begun."""
    one = RunDirectory(tmp_path / "script")
    one.create()
    one.write_resolved(
        resolved_script_record(
            make_script("train.py", "--epochs", "3"), base_directory=".."
        )
    )
    return one


def test_a_script_continues_until_it_is_complete(of_script: RunDirectory) -> None:
    run = make_script(
        "train.py", "--epochs", "3", gracePeriodSeconds=5, metrics={"port": 0}
    )
    assert inspect_directory(of_script, run, extend=False) == RunState("begun")
    of_script.mark_complete({"run": "one"})
    assert inspect_directory(of_script, run, extend=True) == RunState("complete")


def test_a_changed_script_is_refused_with_the_field(of_script: RunDirectory) -> None:
    text = refusal(
        of_script, make_script("train.py", "--epochs", "4", env={"A": "1"}), extend=True
    )
    assert (
        f"spec.script.command[2]: '4' here, but the run in {of_script.path} began with '3'; the "
        "recipe of a run" in text
    )
    assert "spec.script.env.A: '1' here" in text
    assert "holds the run 'one'" in refusal(of_script, make_script("train.py", name="two"))


def test_neither_kind_of_run_continues_in_the_directory_of_the_other(
    directory: RunDirectory, of_script: RunDirectory
) -> None:
    why = "neither can continue from what the other saved."
    assert refusal(directory, make_script("train.py")) == (
        f"spec.script: this manifest has script, but the run in {directory.path} began with training; {why} "
        "Set training again, or give this run a name of its own."
    )
    assert refusal(of_script, make_run()) == (
        f"spec.training: this manifest has training, but the run in {of_script.path} began with "
        f"script; {why} "
        "Set script again, or give this run a name of its own."
    )


def test_the_recorded_manifest_of_a_script_loads_to_the_same_run(
    of_script: RunDirectory,
) -> None:
    record = json.loads(of_script.resolved.read_text())
    assert from_wire(record["manifest"]) == make_script("train.py", "--epochs", "3")
    assert (record["format"], record["baseDirectory"], len(record["configHash"])) == (
        1,
        "..",
        64,
    )


def models(**changes: Any) -> dict[str, Any]:
    return {
        "transformers": changes.pop("transformers", "5.0.0"),
        "config": {**MODEL["config"], **changes},
    }  # type: ignore[dict-item]


def test_a_model_that_is_resolved_differently_is_refused_by_field(
    directory: RunDirectory,
) -> None:
    run_state = inspect_directory(directory, make_run(), extend=False)
    assert run_state.model == MODEL
    check_model_unchanged(directory, run_state, models())
    with pytest.raises(RunDirectoryError) as raised:
        check_model_unchanged(
            directory,
            run_state,
            models(transformers="5.1.0", rope={"theta": 5e5}, new_key=1),
        )
    (problem,) = raised.value.problems
    assert problem.path == "the resolved model's configuration.rope.theta"
    assert "is 500000.0 here, but the run in" in str(
        problem
    ) and "began with 10000.0" in str(problem)
    assert "transformers was 5.0.0 then and is 5.1.0 now" in str(problem)
    # The same version has the same keys: a key that appears only now was added by hand.
    with pytest.raises(RunDirectoryError, match="new_key"):
        check_model_unchanged(directory, run_state, models(new_key=1))


def test_a_run_started_by_an_older_version_has_no_recorded_model(
    directory: RunDirectory,
) -> None:
    record = directory.read_resolved() or {}
    directory.write_resolved(
        {key: value for key, value in record.items() if key != "model"}
    )
    run_state = inspect_directory(directory, make_run(), extend=False)
    assert run_state.model is None
    check_model_unchanged(directory, run_state, models(hidden_size=9))


@pytest.mark.parametrize("began", [10000.0, 10000])
@pytest.mark.parametrize("now", [10000.0, 10000])
def test_a_run_continues_on_a_laptop_and_on_a_cluster_in_any_spelling_of_its_numbers(
    tmp_path: Path, began: float, now: float
) -> None:
    # As a version wrote it that kept numbers as they were in the file: on a cluster 10000.0 is 10000.
    one = RunDirectory(tmp_path / "run")
    one.create()
    record = resolved_record(
        make_run(model={"config": {"model_type": "llama", "rope_theta": began}}),
        PREPARED,
        identity=Identity("one", "hash of that day", "f"),
        base_directory=".",
        derived={"totalSteps": 100},
        model={"transformers": "5.0.0", "config": {"rope": {"theta": began}}},
    )
    record["manifest"]["spec"]["training"]["model"]["config"]["rope_theta"] = began
    one.write_resolved(record)
    run = make_run(model={"config": {"model_type": "llama", "rope_theta": now}})
    run_state = inspect_directory(one, run, extend=False)
    # Its checkpoints have that hash, and so the run keeps it.
    assert (run_state.state, run_state.config_hash) == ("begun", "hash of that day")
    check_model_unchanged(
        one, run_state, {"transformers": "5.0.0", "config": {"rope": {"theta": now}}}
    )
    other = make_run(model={"config": {"model_type": "llama", "rope_theta": 10001}})
    assert "rope_theta: 10001 here" in refusal(one, other)
