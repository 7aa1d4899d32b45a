"""Trackers: what they are shown after kills, and what happens to one that fails, hangs or is not there."""

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from evergrad_manifest.training import Tracker, Training
from evergrad_trainer.observers.base import BaseObserver, Observers
from evergrad_trainer.observers.jsonl import RunLog
from evergrad_trainer.observers.trackers import feeder as feeders
from evergrad_trainer.observers.trackers import observer as observers
from evergrad_trainer.observers.trackers.interface import (
    End,
    Library,
    Shown,
    TrackedRun,
    Values,
    flatten,
)
from evergrad_trainer.observers.trackers.libraries import check_trackers, find_opener
from evergrad_trainer.observers.trackers.observer import Patience, TrackerObserver
from evergrad_trainer.records import EvaluationRecord, Event, EventType, RunInfo
from evergrad_trainer.run_directory import RunDirectory

TRAINING: dict[str, Any] = {
    "model": {"config": {"model_type": "llama"}},
    "data": {"sources": [{"name": "docs", "path": "docs.jsonl"}], "sequenceLength": 16},
    "batching": {"globalBatchSize": 8, "microBatchSize": 2},
    "optimizer": {"learningRate": 1e-3},
    "horizon": {"steps": 10},
}
SETTINGS = Tracker.model_validate({"type": "tensorboard", "tags": ["a tag"]})


def evaluation(step: int, name: str = "held") -> EvaluationRecord:
    return EvaluationRecord(step, 1, name, 2.0 + step, 7.4, 10, 0.1, 0.0)


class Kept:
    """A library that keeps what it is shown in memory, beyond its own life."""

    def __init__(self, run: TrackedRun, store: dict[str, Any]) -> None:
        self.own_id = run.own_id or f"own-{len(store['ids'])}"
        self.store = store
        store["ids"].append(self.own_id)
        store["runs"].append(run)
        self.shown = Shown(store["step"], dict(store["evaluations"]))

    def write(self, step: int, time: float, values: Values) -> None:
        self.store["rows"].append((step, dict(values)))
        for name in values:
            kind, _, rest = name.partition("/")
            if kind == "evaluation":
                self.store["evaluations"][rest.partition("/")[0]] = step
            else:
                self.store["step"] = step

    def note(self, name: str, text: str) -> None:
        self.store["notes"].append((name, text))

    def flush(self) -> None:
        self.store["flushed"] = len(self.store["rows"])

    def finish(self, end: End) -> None:
        self.store["ends"].append(end)


@pytest.fixture
def store() -> dict[str, Any]:
    lists = {name: [] for name in ("ids", "runs", "rows", "notes", "ends")}
    return {**lists, "step": 0, "evaluations": {}}


class Scene:
    """A run directory with its record, and one tracker beside it."""

    def __init__(self, path: Path, open_library: Callable[[TrackedRun], Library]) -> None:
        self.directory = RunDirectory(path)
        self.directory.create()
        self.warnings: list[str] = []
        scene = self

        class Listening(BaseObserver):
            def event(self, event: Event) -> None:
                if event.type == EventType.WARNING:
                    scene.warnings.append(event.fields["message"])

        self.patience = Patience(20.0)
        tracker = TrackerObserver(
            SETTINGS, open_library, self.directory, patience=self.patience
        )
        self.all = Observers([RunLog(self.directory), Listening(), tracker])

    def start(self, step: int = 0, **changes: Any) -> None:
        known = RunInfo(
            "docs", 1, 2, 10, step, 8192, 32, 100, "bf16", "dataParallel", "llama", "", "id-1"
        )
        self.all.run_start(RunInfo(**{**vars(known), **changes}))

    def event(self, type_: str, **fields: Any) -> None:
        self.all.event(Event(type_, 0.0, 1, 1, fields))

    def stop(self, reason: str = "complete") -> None:
        self.event(EventType.STOP, reason=reason, saved=True)


@pytest.fixture
def make_scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []

    def make(open_library: Callable[[TrackedRun], Library]) -> Scene:
        scenes.append(Scene(tmp_path / "run", open_library))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.patience.begin()
        scene.all.close()


def test_steps_and_evaluations_are_shown_in_their_order_and_the_run_is_ended(
    make_scene: Callable[..., Scene], store: dict[str, Any], synthetic: ModuleType
) -> None:
    scene = make_scene(lambda run: Kept(run, store))
    scene.start()
    scene.all.step_end(synthetic.step_record(1, loss=2.5, metrics={"accuracy": 0.5}))
    scene.all.evaluation_end(evaluation(1))
    scene.all.step_end(synthetic.step_record(2, loss=float("nan"), tokens=0))
    scene.event(EventType.SAVE, checkpoint="step-2.g1")
    scene.stop()
    assert [step for step, _ in store["rows"]] == [1, 1, 2]
    first, second, third = (values for _, values in store["rows"])
    assert first["train/loss"] == 2.5 and first["train/accuracy"] == 0.5
    assert first["train/tokens_per_second"] == 8192 / 0.5
    assert second == {"evaluation/held/loss": 3.0, "evaluation/held/perplexity": 7.4}
    # A step that was skipped has no loss; it is there all the same.
    assert "train/loss" not in third and third["train/learning_rate"] > 0
    assert store["notes"] == [("checkpoint/step-2.g1", "gone")]
    assert (store["ends"], store["flushed"]) == (["complete"], 3)
    assert scene.warnings == []


@pytest.mark.capability("C-25", "O-77")
def test_what_a_kill_has_kept_from_a_tracker_is_read_from_the_runs_own_files(
    make_scene: Callable[..., Scene], store: dict[str, Any], synthetic: ModuleType
) -> None:
    first = make_scene(lambda run: Kept(run, store))
    first.start()
    for step in (1, 2, 3):
        first.all.step_end(synthetic.step_record(step))
    first.all.evaluation_end(evaluation(2))
    first.stop("signal")

    # A process that was killed before it had shown steps 4 and 5, and an evaluation; step 5 was its last.
    lost = RunLog(first.directory)
    for step in (4, 5):
        lost.step_end(synthetic.step_record(step))
    lost.evaluation_end(evaluation(4))
    lost.close()

    # The run goes on after step 4, its newest checkpoint.
    second = make_scene(lambda run: Kept(run, store))
    second.start(4)
    for step in (5, 6):
        second.all.step_end(synthetic.step_record(step))
    second.stop()
    steps = [step for step, values in store["rows"] if "train/loss" in values]
    assert steps == [1, 2, 3, 4, 5, 6]
    evaluated = [step for step, values in store["rows"] if "evaluation/held/loss" in values]
    assert evaluated == [2, 4]
    # The note beside the files knows the library's own id.
    assert store["ids"] == ["own-0", "own-0"]
    assert store["ends"] == ["stopped", "complete"]


def test_a_note_of_another_run_is_not_this_ones(
    make_scene: Callable[..., Scene], store: dict[str, Any], synthetic: ModuleType
) -> None:
    scene = make_scene(lambda run: Kept(run, store))
    scene.start()
    scene.all.step_end(synthetic.step_record(1))
    scene.stop()
    other = make_scene(lambda run: Kept(run, store))
    other.start(run_id="id-2")
    other.stop()
    assert store["ids"] == ["own-0", "own-1"]
    assert store["runs"][1].noted == Shown()


@pytest.mark.capability("C-41")
def test_a_tracker_gets_the_configuration_and_the_hashes(
    make_scene: Callable[..., Scene], store: dict[str, Any]
) -> None:
    scene = make_scene(lambda run: Kept(run, store))
    recipe = {"optimizer": {"learningRate": 1e-3}}
    scene.directory.write_resolved(
        {"configHash": "c", "dataFingerprint": "d", "manifest": {"spec": {"training": recipe}}}
    )
    checkpoint = scene.directory.checkpoints / "step-2.g1"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{}")
    scene.start()
    scene.event(EventType.SAVE, checkpoint="step-2.g1")
    scene.stop()
    (run,) = store["runs"]
    flat = flatten(run.facts)
    assert (flat["configHash"], flat["dataFingerprint"], flat["runId"]) == ("c", "d", "id-1")
    assert flat["training.optimizer.learningRate"] == 1e-3
    # The sha256 of "{}".
    ((_, text),) = store["notes"]
    assert text.startswith("sha256:44136fa355b3678a")


class Broken:
    """A library that fails at its second row."""

    def __init__(self, run: TrackedRun) -> None:
        self.own_id, self.shown, self.rows = "own", Shown(), 0

    def write(self, step: int, time: float, values: Values) -> None:
        self.rows += 1
        if self.rows == 2:
            raise ConnectionError("no route\nto it")

    def note(self, name: str, text: str) -> None: ...

    def flush(self) -> None: ...

    def finish(self, end: End) -> None: ...


def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread; a hang ends the test by its timeout."""
    while not condition():
        time.sleep(0.001)


def test_a_tracker_that_fails_is_switched_off_and_that_is_said(
    make_scene: Callable[..., Scene], synthetic: ModuleType
) -> None:
    scene = make_scene(Broken)
    scene.start()
    step = 0

    def has_ended() -> bool:
        nonlocal step
        step += 1
        scene.all.step_end(synthetic.step_record(step))
        return bool(scene.warnings)

    until(has_ended)
    scene.stop()
    (message,) = scene.warnings
    assert message == (
        "observer TrackerObserver is switched off: tensorboard failed, ConnectionError: no route to it; "
        "the next start of the run shows what is missing"
    )


def test_a_failure_that_no_later_step_could_find_is_said_at_the_end(
    make_scene: Callable[..., Scene], synthetic: ModuleType
) -> None:
    scene = make_scene(Broken)
    scene.start()
    for step in (1, 2):
        scene.all.step_end(synthetic.step_record(step))
    scene.stop()
    assert len(scene.warnings) == 1 and "ConnectionError" in scene.warnings[0]


class Stuck:
    """A library that never answers."""

    gate = threading.Event()

    def __init__(self, run: TrackedRun) -> None:
        self.own_id, self.shown = "own", Shown()

    def write(self, step: int, time: float, values: Values) -> None:
        self.gate.wait()

    def note(self, name: str, text: str) -> None: ...

    def flush(self) -> None: ...

    def finish(self, end: End) -> None: ...


@pytest.fixture
def stuck() -> Iterator[type[Stuck]]:
    Stuck.gate = threading.Event()
    yield Stuck
    Stuck.gate.set()


def test_a_tracker_that_hangs_costs_no_step_and_is_switched_off(
    make_scene: Callable[..., Scene],
    synthetic: ModuleType,
    stuck: type[Stuck],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observers, "HANG_SECONDS", 0.0)
    scene = make_scene(stuck)
    scene.start()
    step = 0

    def has_ended() -> bool:
        nonlocal step
        step += 1
        scene.all.step_end(synthetic.step_record(step))
        return bool(scene.warnings)

    until(has_ended)
    (message,) = scene.warnings
    assert "tensorboard has not answered for 0 s; the next start" in message


def test_records_that_wait_are_bounded(
    make_scene: Callable[..., Scene],
    synthetic: ModuleType,
    stuck: type[Stuck],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeders, "MOST_WAITING", 3)
    scene = make_scene(stuck)
    scene.start()
    for step in range(1, 8):
        scene.all.step_end(synthetic.step_record(step))
    (message,) = scene.warnings
    assert "takes records more slowly than they come" in message


def test_an_end_waits_for_all_trackers_together_only_so_long(
    make_scene: Callable[..., Scene], synthetic: ModuleType, stuck: type[Stuck]
) -> None:
    scene = make_scene(stuck)
    scene.patience._seconds = 0.01
    scene.start()
    scene.all.step_end(synthetic.step_record(1))
    scene.stop("signal")
    (message,) = scene.warnings
    assert "has not taken the last records within" in message
    now = 5.0
    patience = Patience(2.0, clock=lambda: now)
    assert patience.left() == 2.0
    now = 6.5
    assert patience.left() == 0.5
    now = 9.0
    assert patience.left() == 0.0
    patience.begin()
    assert patience.left() == 2.0


def test_a_run_that_goes_back_in_the_same_process_is_opened_anew(
    make_scene: Callable[..., Scene], store: dict[str, Any], synthetic: ModuleType
) -> None:
    """All ranks have lost the state: rank 0's process reads a checkpoint and starts again."""
    scene = make_scene(lambda run: Kept(run, store))
    scene.start()
    for step in (1, 2, 3):
        scene.all.step_end(synthetic.step_record(step))
    scene.start(2)
    for step in (3, 4):
        scene.all.step_end(synthetic.step_record(step))
    scene.stop()
    assert [step for step, _ in store["rows"]] == [1, 2, 3, 4]
    assert store["ends"] == ["handed on", "complete"]


@pytest.mark.parametrize("type_", ["tensorboard", "wandb", "mlflow", "aim"])
def test_a_missing_library_is_refused_with_the_extra_that_installs_it(
    type_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == type_ else find("json")
    )
    trackers = [{"type": type_}]
    training = Training.model_validate({**TRAINING, "logging": {"trackers": trackers}})
    (problem,) = check_trackers(training)
    assert str(problem) == (
        f"spec.training.logging.trackers[0].type: {type_} needs the package {type_}; not installed here. "
        f"Install the extra, pip install 'evergrad-trainer[{type_}]', or remove the tracker."
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find("json"))
    assert list(check_trackers(training)) == []


def tracked(path: Path, type_: str, **changes: Any) -> TrackedRun:
    """A run as its tracker gets to know it."""
    known = {
        "run_id": "id1",
        "name": "docs",
        "settings": Tracker.model_validate({"type": type_, "tags": ["a tag"]}),
        "directory": path,
        "facts": {
            "model": "llama",
            "training": {"optimizer": {"learningRate": 1e-3}, "none": None},
        },
        "start_step": 0,
        "own_id": "",
        "noted": Shown(),
    }
    return TrackedRun(**{**known, **changes})


def read_event_files(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], list[str]]:
    """What TensorBoard shows of a folder: scalars by name, and the names of texts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    shown.Reload()
    tags = shown.Tags()
    scalars = {
        name: [(one.step, one.value) for one in shown.Scalars(name)] for name in tags["scalars"]
    }
    return scalars, tags["tensors"]


@pytest.mark.capability("O-77")
def test_tensorboard_shows_each_step_once_as_it_was_trained_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the second process's host is behind; the first was killed in the middle of a record."""
    pytest.importorskip("tensorboard")
    folder = tmp_path / "files"
    open_library = find_opener("tensorboard")
    first = open_library(tracked(folder, "tensorboard"))
    assert first.shown == Shown(0, {}, -1)
    first.write(0, 0.0, {"evaluation/held/loss": 9.0})
    for step in range(1, 8):
        first.write(step, 0.0, {"train/loss": float(step)})
    first.flush()
    (path,) = folder.iterdir()
    with path.open("ab") as file:
        file.write(b"\x18\0\0\0torn")

    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    second = open_library(
        tracked(folder, "tensorboard", start_step=5, noted=Shown(6, {"held": 0}))
    )
    # Step 5 is written once more: of it an evaluation may be missing.
    assert second.shown == Shown(4, {}, 4)
    for step in range(5, 10):
        second.write(step, 0.0, {"train/loss": 10.0 * step})
    second.note("checkpoint/step-5", "sha256:ab")
    second.finish("complete")
    scalars, texts = read_event_files(folder)
    expected = [(step, float(step)) for step in range(1, 5)]
    expected += [(step, 10.0 * step) for step in range(5, 10)]
    assert scalars["train/loss"] == expected
    assert scalars["evaluation/held/loss"] == [(0, 9.0)]
    assert {"run", "tag/a tag", "checkpoint/step-5"} <= set(texts)
    first.finish("handed on")


# What follows runs against the libraries where they are installed, and against what their documents say of
# them elsewhere: SimpleNamespaces that behave so.


class FakeWandb:
    """wandb.init and the run that it returns, as documented."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.rows: list[tuple[int, dict[str, float], bool]] = []
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.ends: list[int] = []
        self.starting_step = 0

    def init(self, **options: Any) -> Any:
        self.inits.append(options)
        config = SimpleNamespace(
            update=lambda facts, allow_val_change: self.config.update(facts)
        )
        return SimpleNamespace(
            config=config,
            summary=self.summary,
            starting_step=self.starting_step,
            log=lambda row, step, commit: self.rows.append((step, dict(row), commit)),
            finish=self._finish,
        )

    def _finish(self, exit_code: int) -> None:
        self.ends.append(exit_code)

    @staticmethod
    def Settings(**options: Any) -> dict[str, Any]:
        return options


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    import sys

    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    monkeypatch.setitem(
        sys.modules,
        "wandb.proto.wandb_internal_pb2",
        SimpleNamespace(),  # type: ignore[arg-type]
    )
    return fake


@pytest.mark.capability("A-8", "A-48", "T-36")
def test_wandb_is_given_one_id_and_whole_rows(tmp_path: Path, fake_wandb: FakeWandb) -> None:
    library = find_opener("wandb")(tracked(tmp_path / "wandb", "wandb"))
    for step in (1, 2):
        library.write(step, 0.0, {"train/loss": float(step)})
    library.write(2, 0.0, {"evaluation/held/loss": 3.0})
    library.finish("handed on")
    # Of the newest step an evaluation may come: it is left to who goes on with the run.
    assert fake_wandb.rows == [(1, {"train/loss": 1.0}, True)]
    other = find_opener("wandb")(tracked(tmp_path / "wandb", "wandb"))
    other.write(2, 0.0, {"train/loss": 2.0})
    other.write(2, 0.0, {"evaluation/held/loss": 3.0})
    other.finish("failed")
    assert fake_wandb.rows[1:] == [(2, {"train/loss": 2.0, "evaluation/held/loss": 3.0}, True)]
    assert fake_wandb.ends == [0, 1]
    keys = ("id", "resume", "mode", "project", "name", "tags")
    first, second = ([one[key] for key in keys] for one in fake_wandb.inits)
    assert first == second == ["id1", "allow", "offline", "evergrad", "docs", ["a tag"]]
    assert fake_wandb.config["training"]["optimizer"] == {"learningRate": 1e-3}


def test_wandb_online_goes_on_where_the_server_is(
    tmp_path: Path, fake_wandb: FakeWandb
) -> None:
    fake_wandb.starting_step = 8
    online = {"type": "wandb", "mode": "online", "url": "https://here", "entity": "us"}
    settings = Tracker.model_validate(online)
    library = find_opener("wandb")(tracked(tmp_path, "wandb", settings=settings))
    assert library.shown == Shown(7, {}, 7)
    (options,) = fake_wandb.inits
    assert (options["mode"], options["entity"]) == ("online", "us")
    assert options["settings"]["base_url"] == "https://here"


class FakeStore:
    """mlflow's tracking client over a store in memory, as documented."""

    def __init__(self) -> None:
        self.uris: list[str | None] = []
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, Any] = {}

    def client(self, tracking_uri: str | None) -> "FakeStore":
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        found = self.experiments.get(name)
        return None if found is None else SimpleNamespace(experiment_id=found)

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        self.experiments[name] = "7"
        return "7"

    def search_runs(self, numbers: list[str], query: str) -> list[Any]:
        wanted = query.partition("= '")[2].rstrip("'")
        return [
            SimpleNamespace(info=SimpleNamespace(run_id=key))
            for key, run in self.runs.items()
            if run["tags"]["evergrad.run_id"] == wanted
        ]

    def create_run(self, number: str, tags: dict[str, str], run_name: str) -> Any:
        key = f"run-{len(self.runs)}"
        self.runs[key] = {"tags": tags, "metrics": [], "params": {}, "status": "RUNNING"}
        return SimpleNamespace(info=SimpleNamespace(run_id=key))

    def update_run(self, key: str, status: str) -> None:
        self.runs[key]["status"] = status

    def set_terminated(self, key: str, status: str) -> None:
        self.runs[key]["status"] = status

    def set_tag(self, key: str, name: str, text: str) -> None:
        self.runs[key]["tags"][name] = text

    def log_batch(self, key: str, metrics: Any = (), params: Any = ()) -> None:
        self.runs[key]["metrics"] += metrics
        self.runs[key]["params"] |= dict(params)

    def get_run(self, key: str) -> Any:
        names = {metric[0] for metric in self.runs[key]["metrics"]}
        return SimpleNamespace(data=SimpleNamespace(metrics=dict.fromkeys(names, 0.0)))

    def get_metric_history(self, key: str, name: str) -> list[Any]:
        return [
            SimpleNamespace(step=metric[3])
            for metric in self.runs[key]["metrics"]
            if metric[0] == name
        ]


def test_mlflow_finds_its_run_by_the_tag_and_says_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    fake = FakeStore()
    entities = SimpleNamespace(Metric=lambda *args: args, Param=lambda *args: args)
    monkeypatch.setitem(
        sys.modules,
        "mlflow.tracking",
        SimpleNamespace(MlflowClient=fake.client),  # type: ignore[arg-type]
    )
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)  # type: ignore[arg-type]
    open_library = find_opener("mlflow")
    first = open_library(tracked(tmp_path / "mlflow", "mlflow"))
    assert first.shown == Shown()
    for step in (1, 2):
        first.write(step, 1.5, {"train/learning_rate": 0.1, "train/loss": 2.0})
    first.write(2, 1.5, {"evaluation/held/loss": 3.0})
    first.flush()
    # Given, and not yet sent: lost in the kill.
    first.write(3, 1.5, {"train/learning_rate": 0.1})

    second = open_library(tracked(tmp_path / "mlflow", "mlflow", start_step=1))
    assert second.own_id == first.own_id
    assert second.shown == Shown(2, {"held": 2})
    second.finish("stopped")
    (run,) = fake.runs.values()
    assert run["status"] == "KILLED" and run["params"]["training.none"] == "null"
    assert run["metrics"][0] == ("train/learning_rate", 0.1, 1500, 1)
    assert fake.uris == [f"sqlite:///{tmp_path}/mlflow/mlflow.db"] * 2


def test_aim_opens_the_run_again_by_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    opened: list[dict[str, Any]] = []
    values: dict[tuple[str, int], float] = {}

    class Run:
        def __init__(self, **options: Any) -> None:
            opened.append(options)
            self.hash = options.get("run_hash", "hash1")
            self.name = ""

        def track(self, value: float, name: str, step: int) -> None:
            values[name, step] = value

        def set(self, key: str, value: Any, strict: bool) -> None: ...

        def add_tag(self, tag: str) -> None: ...

        def close(self) -> None: ...

    repo = SimpleNamespace(exists=lambda place: False, from_path=lambda place, init: None)
    monkeypatch.setitem(sys.modules, "aim", SimpleNamespace(Run=Run, Repo=repo))  # type: ignore[arg-type]
    open_library = find_opener("aim")
    first = open_library(tracked(tmp_path / "aim", "aim"))
    first.write(1, 0.0, {"train/loss": 2.0})
    noted = Shown(1)
    second = open_library(
        tracked(tmp_path / "aim", "aim", own_id=first.own_id, noted=noted, start_step=1)
    )
    assert second.shown == Shown(0, {}, 0)
    second.write(1, 0.0, {"train/loss": 3.0})
    second.finish("complete")
    assert values == {("train/loss", 1): 3.0}
    assert "run_hash" not in opened[0] and opened[0]["experiment"] == "evergrad"
    assert (opened[1]["run_hash"], opened[1]["force_resume"]) == ("hash1", True)
