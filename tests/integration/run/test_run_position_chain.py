"""Chains of runs that continue at positions: the content of their records, and refusals if a record lacks
information."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_helpers import (
    USER_ERROR,
    Experiment,
    assert_same_state,
    curve,
    events,
    merge,
    recipe,
    steps_of,
    write_documents,
)

EXACT = {"reproducibility": {"elastic": "exact", "seed": 5}}
X: dict[str, Any] = {"name": "x", "path": "x.jsonl", "weight": 3}
Y: dict[str, Any] = {"name": "y", "path": "y.jsonl", "weight": 1}


def training_of(*sources: dict[str, Any], steps: int, **changes: Any) -> dict[str, Any]:
    """A run over some sources, with ``steps`` as its last step."""
    base = {**EXACT, "data": {"sources": list(sources)}, "horizon": {"steps": steps}}
    return recipe(**merge(base, changes))


def behind(path: str, load: str = "position", **fields: Any) -> dict[str, Any]:
    return {"initFrom": {"path": path, "load": load, **fields}}


@pytest.fixture(scope="module")
def chain(make_experiment: Callable[[], Experiment]) -> Experiment:
    """A run of 6 steps on X and Y, in ``runs/first``, and a run that continues it to step 9 on X alone, in
    ``runs/second``."""
    experiment = make_experiment()
    for seed, name in enumerate("xy"):
        write_documents(experiment.path / f"{name}.jsonl", count=6, seed=seed)
    experiment.write(training_of(X, Y, steps=6), name="first")
    experiment.run(name="first")
    experiment.write(training_of(X, steps=9, **behind("runs/first")), name="second")
    experiment.run(name="second")
    return experiment


def record_of(directory: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((directory / "run.json").read_text())
    return record


def copy_run(chain: Experiment, name: str, directory: str) -> Path:
    """A copy of a run's directory, whose record the test may change."""
    return Path(shutil.copytree(chain.at(name), chain.at(directory)))


def change_record(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    record = record_of(directory)
    change(record)
    (directory / "run.json").write_text(json.dumps(record))


def test_a_copied_checkpoint_without_the_record_of_its_run_is_refused(
    chain: Experiment,
) -> None:
    elsewhere = chain.path / "elsewhere" / "deep" / "step-9"
    shutil.copytree(chain.at("second") / "checkpoints" / "step-9", elsewhere)
    path = str(elsewhere.relative_to(chain.path))
    chain.write(training_of(X, steps=12, **behind(path, "everything")), name="copied")
    said = chain.run(name="copied", expect=USER_ERROR).err
    looked = f"{elsewhere}, {elsewhere.parent} or {elsewhere.parents[1]}"
    assert f"no run.json of its run is in {looked};" in said, said
    assert f"copy its run.json into {elsewhere.parents[1]}." in said
    assert steps_of(chain.at("copied")) == []

    # The remedy that it names.
    shutil.copy(chain.at("second") / "run.json", elsewhere.parents[1])
    chain.run(name="copied")
    assert steps_of(chain.at("copied")) == [10, 11, 12]


@pytest.mark.parametrize("load", ["position", "everything"])
def test_the_shown_samples_of_the_first_step_are_trained_on_first(
    chain: Experiment, load: str
) -> None:
    from evergrad_trainer.data.order import SampleId, sample_hash

    name = f"shown-{load}"
    chain.write(training_of(X, Y, steps=6, **behind("runs/first", load, step=3)), name=name)
    shown = chain.command(
        "prepare", f"{name}.yaml", "--show-samples", "4", "--json"
    ).expect(0)
    total = 0
    for at, one in enumerate(json.loads(shown.out)["firstStep"], start=3 * 4):
        source, epoch, window = one["sample"].partition(" (")[0].split("/")
        numbers = [int(part.split()[1]) for part in (epoch, window)]
        total += sample_hash(at, SampleId("xy".index(source), *numbers))
    chain.run(name=name)
    rows = curve(chain.at(name))
    assert int(rows[min(rows)]["sample_hash"], 16) == total % 2**64
    assert min(rows) == 4


def test_epochs_of_a_continued_run_count_its_own_steps(chain: Experiment) -> None:
    record = record_of(chain.at("second"))
    (source,) = record["prepared"]["sources"]
    windows = -(-(sum(shard["tokens"] for shard in source["train"]["shards"]) - 1) // 16)
    # Three steps of four samples.
    assert record["derived"]["epochs"] == pytest.approx(12 / windows)
    assert (record["derived"]["totalSteps"], record["derived"]["samples"]) == (9, 36)


def test_a_source_omitted_two_runs_ago_is_refused_if_it_is_split_differently(
    chain: Experiment,
) -> None:
    cut = {**Y, "name": "why", "samples": 5}
    chain.write(training_of(X, cut, steps=12, **behind("runs/second")), name="cut")
    said = chain.run(name="cut", expect=USER_ERROR).err
    assert "spec.training.data.sources[1]: why is y of a run before" in said, said
    assert steps_of(chain.at("cut")) == []


def test_a_source_that_restarts_because_its_position_is_unknown_gives_a_warning(
    chain: Experiment,
) -> None:
    # A record of a version that did not write down which files a source that is left out has.
    def forget(record: dict[str, Any]) -> None:
        del record["dataStart"]["content"]

    change_record(copy_run(chain, "second", "forgetful"), forget)
    cut = {**Y, "samples": 5}
    chain.write(training_of(X, cut, steps=10, **behind("runs/forgetful")), name="anew")
    said = chain.run(name="anew").err
    (warned,) = events(chain.at("anew"), "warning")
    assert "y begins at its first sample" in warned["message"]
    assert (
        warned["message"]
        in said + (chain.at("anew") / "logs").joinpath("node-0-rank-0.log").read_text()
    )
    assert record_of(chain.at("anew"))["begunFrom"]["sources"]["y"] == 0


DAMAGE: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    (
        "dataStart.sources[0].number is missing",
        lambda record: record["dataStart"]["sources"][0].pop("number"),
    ),
    ("dataStart is []", lambda record: record.update(dataStart=[])),
    ("dataStart.leftOut is missing", lambda record: record["dataStart"].pop("leftOut")),
    ("prepared.sources is missing", lambda record: record["prepared"].pop("sources")),
]


@pytest.mark.long
@pytest.mark.parametrize(("key", "damage"), DAMAGE, ids=[key for key, _ in DAMAGE])
def test_a_damaged_key_of_the_record_is_named_to_a_resume_and_to_a_continuing_run(
    chain: Experiment, key: str, damage: Callable[[dict[str, Any]], Any]
) -> None:
    name = f"damaged-{DAMAGE.index((key, damage))}"
    change_record(copy_run(chain, "second", name), damage)
    record = chain.at(name) / "run.json"
    resumed = chain.run(name="second", directory=name, expect=USER_ERROR).err
    assert f"{record}: {key}" in resumed, resumed
    assert "Restore it from a backup" in resumed
    chain.write(training_of(X, steps=12, **behind(f"runs/{name}")), name=f"behind-{name}")
    begun = chain.run(name=f"behind-{name}", expect=USER_ERROR).err
    assert f"{record}: {key}" in begun, begun


def test_a_run_of_an_older_version_has_a_position_once_it_is_extended(
    chain: Experiment,
) -> None:
    older = copy_run(chain, "first", "older")
    # Keys that came with positions.
    change_record(older, lambda record: record.pop("dataStart"))
    continued = training_of(X, Y, steps=9, **behind("runs/older", step=6))
    chain.write(continued, name="behind-older")
    said = chain.run(name="behind-older", expect=USER_ERROR).err
    assert "has not recorded where its sources begin" in said, said
    assert "--extend" in said

    extended = ("--extend", "--set", "spec.training.horizon.steps=7")
    chain.run(*extended, name="first", directory="older")
    chain.run(name="behind-older")
    chain.write(
        training_of(X, Y, steps=9, **behind("runs/first", step=6)), name="behind-first"
    )
    chain.run(name="behind-first")
    assert steps_of(chain.at("behind-older")) == [7, 8, 9]
    assert_same_state(chain.at("behind-older"), chain.at("behind-first"))
