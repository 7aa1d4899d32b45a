"""The state that a fresh run loads from another run, and refused requests."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import ANY

import pytest
import torch

from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_manifest.training import Checkpoint, InitFrom, Model, Reproducibility
from evergrad_trainer.base.errors import CheckpointError
from evergrad_trainer.checkpoint.manifest import Identity
from evergrad_trainer.checkpoint.restore import Restored
from evergrad_trainer.data.start_positions import DataStart, SourcePosition
from evergrad_trainer.distributed.world import World
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.state.registry import (
    COUNTERS,
    CURSOR,
    OBSERVERS,
    OPTIMIZER,
    Agreement,
    Registry,
    to_extra,
)
from evergrad_trainer.training.progress import TrainingProgress
from evergrad_trainer.worker import init_from
from evergrad_trainer.worker.session import Session

RECIPE = {"data": {"sequenceLength": 16}, "optimizer": {"learningRate": 0.1}}
COUNTED = {
    "step": 5,
    "evaluated_step": 4,
    "updates": 4,
    "skipped": 1,
    "non_finite": 0,
    "best": {"step": 3},
    "run_id": "theirs",
    "save_asked": 5,
    "stop_asked": 5,
}


class Scalars:
    """A provider that has values alone."""

    def __init__(self) -> None:
        self.loaded: Any = None

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def values(self) -> dict[str, Any]:
        return {}

    def load_values(self, values: Any) -> None:
        self.loaded = dict(values)

    def reset(self) -> None:
        """Keep it."""


class Fresh:
    """A fresh run, as far as ``begin`` looks at it; ``entered`` counts the task's preparations."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
        self.progress, self.optimizer = TrainingProgress(run_id="ours"), Scalars()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.asked: list[dict[str, Any]] = []
        self.entered = 0
        self.recorded: dict[str, Any] = {}
        self.cursors: list[Any] = []
        self.watching = Scalars()
        values: dict[str, Any] = {
            COUNTERS: COUNTED,
            OPTIMIZER: {"step": 4.0},
            CURSOR: {"a": 18},
            OBSERVERS: {"monitors": {"mean": 2.0}},
            "recipe": RECIPE,
        }
        self.extra = to_extra(values)
        self.fingerprint, self.checksum, self.newest = "data", "abc", 5
        registry = Registry()
        registry.register(COUNTERS, self.progress)
        registry.register(OPTIMIZER, self.optimizer)
        registry.register(CURSOR, Agreement(value=dict, check=self.cursors.append))
        registry.register(OBSERVERS, self.watching)
        wanted = {"path": "theirs", **fields}
        training = SimpleNamespace(
            init_from=InitFrom.model_validate(wanted),
            model=Model(),
            checkpoint=Checkpoint(),
            reproducibility=Reproducibility(),
        )
        self.session = SimpleNamespace(
            plan=SimpleNamespace(
                run=SimpleNamespace(training=training),
                base_directory=path,
                numbers=SimpleNamespace(total_steps=8),
                doubts=(),
            ),
            directory=SimpleNamespace(read_resolved=lambda: self.recorded),
            world=World(generation=1, rank=0, size=1, device=torch.device("cpu")),
            data=SimpleNamespace(fingerprint="data", train=SimpleNamespace(start=None)),
            identity=Identity("fork", "hash", "data", recipe=RECIPE),
            emit=lambda type_, fields: self.events.append((type_, fields)),
            begun_from=None,
            state_from="",
        )
        self.machinery = SimpleNamespace(
            state=dict,
            registry=registry,
            modules=SimpleNamespace(
                trained={"model": None, "head": None}, begins_behind=None
            ),
            frozen={},
            opened=None,
            cut=lambda: (),
        )
        monkeypatch.setattr(init_from, "load_weights", self._load)
        monkeypatch.setattr(init_from, "enter_first", self._enter)

    def begin(self) -> None:
        init_from.begin(cast(Session, self.session), cast(Any, self.machinery))

    def _load(self, path: Path, state: Any, **options: Any) -> Restored:
        self.asked.append(options)
        step, checksum = options["step"] or self.newest, self.checksum
        if step not in (5, self.newest):
            what, why = (
                f"contains no checkpoint of step {step}",
                "the available steps are 5",
            )
            raise CheckpointError(Problem(str(path), what, why, "Name one of them"))
        where = path / "checkpoints" / f"step-{step}"
        return Restored(step, 1, where, self.extra, 0.1, checksum, self.fingerprint)

    def _enter(self, *args: Any, **options: Any) -> None:
        self.entered += 1


Make = Callable[..., Fresh]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda **fields: Fresh(tmp_path, monkeypatch, **fields)


@pytest.mark.capability("O-22", "O-61")
def test_loading_weights_loads_nothing_else(make: Make) -> None:
    fresh = make()
    fresh.begin()
    assert fresh.asked[0]["prefix"] == ("model.",)
    assert (fresh.progress.finished_steps, fresh.optimizer.loaded, fresh.entered) == (
        0,
        None,
        1,
    )


def test_a_task_without_a_model_starts_with_all_weights_that_it_trains(make: Make) -> None:
    fresh = make()
    fresh.machinery.modules.trained = {"actions": None, "predictor": None}
    fresh.begin()
    assert fresh.asked[0]["prefix"] == ("actions.", "predictor.")


@pytest.mark.capability("O-22", "O-61")
def test_the_optimizer_state_is_loaded_with_all_weights_and_without_the_position(
    make: Make,
) -> None:
    fresh = make(load="optimizer")
    fresh.begin()
    assert fresh.asked[0]["prefix"] == ("model.", "head.", "optimizer.")
    assert fresh.optimizer.loaded == {"step": 4.0}
    assert (fresh.progress.finished_steps, fresh.entered) == (0, 1)


@pytest.mark.acceptance("8d-3d")
@pytest.mark.capability("O-22", "O-61")
def test_load_everything_continues_at_the_position_without_directory_specific_state(
    make: Make,
) -> None:
    fresh = make(load="everything", step=5)
    fresh.begin()
    assert (fresh.asked[0]["prefix"], fresh.asked[0]["step"]) == (("",), 5)
    progress = fresh.progress
    assert (progress.finished_steps, progress.updates, progress.skipped) == (5, 4, 1)
    assert (progress.run_id, progress.best, progress.save_asked, progress.stop_asked) == (
        "ours",
        None,
        -1,
        -1,
    )
    # The stage that the step belongs to was entered before it was saved.
    assert fresh.entered == 0
    facts = fresh.session.begun_from
    assert (facts["checkpoint"], facts["step"], facts["hash"]) == ("step-5", 5, "abc")
    assert fresh.events[0][0] == "begun_from"
    assert (fresh.cursors, fresh.watching.loaded) == (
        [{"a": 18}],
        {"monitors": {"mean": 2.0}},
    )


@pytest.mark.capability("O-22", "O-61")
def test_a_position_is_loaded_without_measurements_of_the_other_mixture(
    make: Make,
) -> None:
    fresh = make(load="position")
    fresh.session.data.train.start = DataStart(
        (SourcePosition("a", "A", 0, 18),), 5, (), "data"
    )
    # The data are others, and the cursor is one in their mixture.
    fresh.session.data.fingerprint = "here"
    fresh.begin()
    assert fresh.asked[0]["prefix"] == ("",)
    progress = fresh.progress
    assert (progress.finished_steps, progress.updates, progress.run_id) == (5, 4, "ours")
    assert (fresh.optimizer.loaded, fresh.entered) == ({"step": 4.0}, 0)
    assert (fresh.cursors, fresh.watching.loaded) == ([], {})
    assert fresh.events[0][1]["sources"] == {"a": 18}


@pytest.mark.parametrize(
    "start",
    [
        None,
        DataStart((SourcePosition("a", "A", 0, 18),), 4, (), "data"),
        DataStart((SourcePosition("a", "A", 0, 18),), 5, (), "other"),
    ],
)
def test_a_position_must_match_the_state_that_is_loaded(
    make: Make, start: DataStart | None
) -> None:
    fresh = make(load="position", step=5)
    fresh.session.data.train.start = start
    assert "the data were opened to go on behind another one" in refused(fresh)


def test_a_start_before_the_first_checkpoint_loads_as_much_as_the_first_start(
    make: Make,
) -> None:
    fresh = make(load="weights")
    fresh.recorded = {
        "begunFrom": {
            "checkpoint": "step-5",
            "path": "first",
            "hash": "abc",
            "load": "position",
        }
    }
    assert "load: weights here, and this run began with position" in refused(fresh)


def test_a_step_other_than_that_of_the_first_start_is_refused(
    make: Make,
) -> None:
    fresh = make(load="position", step=5)
    fresh.recorded = {
        "begunFrom": {
            "checkpoint": "step-4",
            "path": "first",
            "step": 4,
            "hash": "other",
            "load": "position",
        }
    }
    # As run.json records the previous start: the file's new step has no effect.
    fresh.session.data.train.start = DataStart(
        (SourcePosition("a", "A", 0, 15),), 4, (), "data"
    )
    said = refused(fresh)
    assert "this run began with step-4 of first, and step-5 of" in said
    assert "Set spec.training.initFrom.step to 4, or" in said
    assert "the data were opened" not in said


def refused(fresh: Fresh) -> str:
    with pytest.raises(CheckpointError) as error:
        fresh.begin()
    assert fresh.progress.finished_steps == 0
    return str(error.value)


def test_a_position_in_other_data_is_refused_with_the_differing_fields(make: Make) -> None:
    fresh = make(load="everything")
    fresh.fingerprint = "other"
    other = {"data": {"sequenceLength": 32}, "optimizer": {"learningRate": 0.2}}
    fresh.extra["state"]["recipe"] = other
    said = refused(fresh)
    assert "spec.training.data.sequenceLength: 16 here, and 32 in" in said
    assert "learningRate" not in said


def test_changed_content_of_the_same_files_is_refused(make: Make, tmp_path: Path) -> None:
    fresh = make(load="everything")
    fresh.fingerprint = "other"
    directory = RunDirectory(tmp_path / "theirs")
    directory.create()
    directory.write_resolved({"dataFingerprint": "other"})
    assert "step-5: was trained on other data" in refused(fresh)


def test_a_checkpoint_outside_its_run_is_refused_with_the_missing_record(
    make: Make, tmp_path: Path
) -> None:
    fresh = make(load="everything")
    fresh.fingerprint = "other"
    theirs = tmp_path / "theirs"
    checkpoint = theirs / "checkpoints" / "step-5"
    said = refused(fresh)
    looked = f"{checkpoint}, {checkpoint.parent} or {theirs}"
    assert (
        f"does not lie in the directory of its run: no run.json of its run is in {looked};"
        in said
    )
    assert said.endswith(f"Name it in that directory, or copy its run.json into {theirs}.")

    # Different fields are a separate cause. Paths do not count, because the content decides.
    fresh.extra["state"]["recipe"] = {"data": {"sources": [{"path": "old"}]}}
    fresh.session.identity = Identity(
        "fork", "", "data", {"data": {"sources": [{"path": "new"}]}}
    )
    assert "no run.json" in refused(fresh)
    fresh.extra["state"]["recipe"] = {"data": {"sequenceLength": 32}}
    assert "no run.json" not in refused(fresh)

    directory = RunDirectory(theirs)
    directory.create()
    directory.write_resolved({"dataFingerprint": "third"})
    fresh.extra["state"]["recipe"] = fresh.session.identity.recipe
    assert f"{directory.resolved} is not that of the run of {checkpoint}" in refused(fresh)


def test_a_source_that_may_have_given_samples_before_gives_a_warning(make: Make) -> None:
    fresh = make(load="weights")
    fresh.session.plan.doubts = ("y begins at its first sample: why",)
    fresh.begin()
    warnings = [fields["message"] for kind, fields in fresh.events if kind == "warning"]
    # The checkpoint of this test has no description of its model.
    assert warnings == ["y begins at its first sample: why", ANY]
    assert "only the shapes of its tensors were compared" in warnings[1]


@pytest.mark.acceptance("8d-4f")
def test_a_horizon_that_the_other_run_has_reached_is_refused(make: Make) -> None:
    fresh = make(load="everything")
    fresh.session.plan.numbers.total_steps = 5
    said = refused(fresh)
    assert (
        "spec.training.horizon: ends at step 5, and step-5 is the state after step 5"
        in said
    )


def test_a_state_that_needs_another_checkpoint_is_refused(make: Make) -> None:
    fresh = make(load="everything")
    fresh.extra["state"]["snapshots"] = {"reference": {"after": 2, "hash": "x"}}
    assert "needs the checkpoint of step 2 beside it" in refused(fresh)


BEGUN = {"checkpoint": "step-5", "path": "first", "step": 5, "hash": "abc"}


@pytest.mark.parametrize("load", ["weights", "optimizer", "position", "everything"])
def test_a_start_before_the_first_checkpoint_loads_the_step_of_the_first_start(
    make: Make, load: str
) -> None:
    fresh = make(load=load)
    fresh.newest = 6
    fresh.recorded = {"begunFrom": {**BEGUN, "load": load}}
    if load == "position":
        fresh.session.data.train.start = DataStart(
            (SourcePosition("a", "A", 0, 18),), 5, (), "data"
        )
    fresh.begin()
    assert fresh.session.begun_from["checkpoint"] == "step-5"


def test_the_position_for_which_the_data_was_opened_is_loaded_although_a_newer_one_exists(
    make: Make,
) -> None:
    fresh = make(load="position")
    fresh.newest = 6
    fresh.session.data.train.start = DataStart(
        (SourcePosition("a", "A", 0, 18),), 5, (), "data"
    )
    fresh.begin()
    assert fresh.session.begun_from["step"] == 5


def test_the_checkpoint_of_a_reference_is_loaded_although_a_newer_one_exists(
    make: Make,
) -> None:
    fresh = make()
    fresh.newest, fresh.machinery.modules.begins_behind = 6, 5
    fresh.begin()
    assert fresh.session.begun_from["step"] == 5
    # The run's record takes precedence: its reference also comes from the record.
    fresh.machinery.modules.begins_behind = 6
    fresh.recorded = {"begunFrom": {**BEGUN, "load": "weights"}}
    fresh.begin()
    assert fresh.session.begun_from["step"] == 5


def test_a_missing_checkpoint_of_the_first_start_is_reported(
    make: Make, tmp_path: Path
) -> None:
    fresh = make()
    fresh.recorded = {"begunFrom": {**BEGUN, "checkpoint": "step-4", "step": 4}}
    fresh.recorded["begunFrom"]["load"] = "weights"
    assert refused(fresh) == (
        "spec.training.initFrom: this run began with step-4 of first, which cannot be loaded now; "
        f"{tmp_path / 'theirs'}: contains no checkpoint of step 4; the available steps are 5. "
        "Bring it back, or set spec.training.initFrom.path back if it was changed. Without it, begin anew "
        "in a directory of its own: this run has no checkpoint yet."
    )


@pytest.mark.parametrize("names_one", [True, False])
def test_a_start_before_the_first_checkpoint_loads_the_checkpoint_of_the_first_start(
    make: Make, names_one: bool
) -> None:
    fresh = make()
    fresh.recorded = {
        "begunFrom": {
            "checkpoint": "step-5",
            "path": "first",
            "step": 5,
            "hash": "abc",
            "load": "weights",
        }
    }
    fresh.begin()
    fresh.recorded["begunFrom"]["hash"] = "other"
    said = "step-5 of"
    if not names_one:
        fresh.session.plan.run.training.init_from = None
        said = "nothing is named now"
    with pytest.raises(
        CheckpointError, match="this run began with step-5 of first, and"
    ) as e:
        fresh.begin()
    assert said in str(e.value)


def test_a_transformers_directory_has_weights_only(make: Make, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({}))
    with pytest.raises(ConfigurationError) as error:
        make(load="everything", step=3).begin()
    assert [one.path for one in error.value.problems] == [
        "spec.training.initFrom.load",
        "spec.training.initFrom.step",
    ]


@pytest.mark.parametrize("load", ["weights", "everything"])
def test_adapters_trained_with_another_base_are_refused(make: Make, load: str) -> None:
    fresh = make(load=load)
    fresh.machinery.frozen = {"model.base": "1" * 16}
    fresh.extra["state"]["frozen"] = {"model.base": "2" * 16}
    assert "theirs were trained beside other frozen weights" in refused(fresh)
    fresh.extra["state"]["frozen"] = {"model.base": "1" * 16}
    fresh.begin()


def test_full_weights_cannot_initialise_adapters(make: Make, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({}))
    fresh = make()
    fresh.session.plan.run.training.model = Model.model_validate({"lora": {"rank": 2}})
    assert "spec.training.initFrom.path: names a transformers directory" in refused(fresh)


def test_a_transformers_directory_cannot_initialise_a_task_without_a_model(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({}))
    fresh = make()
    fresh.machinery.modules.trained = {"predictor": None}
    with pytest.raises(ConfigurationError, match="and what is trained is predictor"):
        fresh.begin()


def test_nodes_that_request_different_states_are_reported(make: Make) -> None:
    fresh = make(load="optimizer")

    class Two:
        is_main = True

        def gather_json(self, value: Any) -> list[Any]:
            return [value, [["weights", None], None]]

    fresh.session.world = Two()
    with pytest.raises(ConfigurationError, match="differs between the nodes"):
        fresh.begin()
    assert fresh.asked == []
