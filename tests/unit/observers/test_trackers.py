"""Trackers: the records that they show after kills, and a tracker that fails, hangs or is not installed."""

import importlib.util
import io
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from evergrad_manifest.training import Tracker, Training
from evergrad_trainer.base import lock
from evergrad_trainer.base.records import EvaluationRecord, Event, EventType, RunInfo
from evergrad_trainer.observers import build
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
from evergrad_trainer.observers.trackers.libraries import check_trackers
from evergrad_trainer.observers.trackers.observer import TrackerObserver, TrackerTimeouts
from evergrad_trainer.observers.trackers.rows import read_missed
from evergrad_trainer.run.directory import RunDirectory

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
    """A library that stores the shown values outside of the object."""

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
    """A run directory with its record, and one tracker."""

    def __init__(self, path: Path, open_library: Callable[[TrackedRun], Library]) -> None:
        self.directory = RunDirectory(path)
        self.directory.create()
        self.warnings: list[str] = []
        scene = self

        class Listening(BaseObserver):
            def event(self, event: Event) -> None:
                if event.type == EventType.WARNING:
                    scene.warnings.append(event.fields["message"])

        self.patience = TrackerTimeouts(20.0)
        tracker = TrackerObserver(
            SETTINGS, open_library, self.directory, patience=self.patience
        )
        self.all = Observers([RunLog(self.directory), Listening(), tracker])

    def start(self, step: int = 0, **changes: Any) -> None:
        known = RunInfo(
            "docs",
            1,
            2,
            10,
            step,
            8192,
            32,
            100,
            "bf16",
            "dataParallel",
            "llama",
            "",
            run_id="id-1",
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


@pytest.mark.capability("G-X10", "O-X2", "C-X1")
def test_steps_and_evaluations_are_shown_in_order_and_the_run_is_ended(
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
    # A skipped step has no loss, but it is shown.
    assert "train/loss" not in third and third["train/learning_rate"] > 0
    assert store["notes"] == [("checkpoint/step-2.g1", "gone")]
    assert (store["ends"], store["flushed"]) == (["complete"], 3)
    assert scene.warnings == []


@pytest.mark.capability("C-25", "O-77")
def test_rows_that_a_kill_kept_from_a_tracker_are_read_from_the_files_of_the_run(
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

    # The run continues after step 4, its newest checkpoint.
    second = make_scene(lambda run: Kept(run, store))
    second.start(4)
    for step in (5, 6):
        second.all.step_end(synthetic.step_record(step))
    second.stop()
    steps = [step for step, values in store["rows"] if "train/loss" in values]
    assert steps == [1, 2, 3, 4, 5, 6]
    evaluated = [step for step, values in store["rows"] if "evaluation/held/loss" in values]
    assert evaluated == [2, 4]
    # The note next to the files contains the library's own id.
    assert store["ids"] == ["own-0", "own-0"]
    assert store["ends"] == ["interrupted", "complete"]


def test_an_evaluation_that_a_frozen_process_writes_late_is_not_read_back(
    make_scene: Callable[..., Scene], synthetic: ModuleType
) -> None:
    """Later generations begin again after this step, so the last evaluation is a result of the run."""
    directory = make_scene(lambda run: Kept(run, {})).directory
    log = RunLog(directory)
    rows = [(2, 1, 5.0), (4, 2, 3.0), (4, 1, 0.5), (2, 1, 1.0)]
    for at, (step, generation, loss) in enumerate(rows):
        log.evaluation_end(
            replace(evaluation(step), generation=generation, loss=loss, time=at)
        )
    for at, generation in ((0, 1), (1, 2), (3, 1)):
        log.event(Event(EventType.START, at, 0, generation, {}))
    log.close()
    missed = [(one.step, one.loss) for one in read_missed(directory, Shown(), newest=9)]
    assert missed == [(2, 1.0), (4, 3.0)]


@pytest.mark.capability("C-26")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "run/trackers/aim"),
        ({"directory": "shown"}, "beside/shown/docs"),
        ({"directory": "{tmp}/there"}, "there/docs"),
    ],
)
def test_files_of_a_tracker_are_in_the_run_directory_or_at_the_configured_path(
    tmp_path: Path,
    store: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    expected: str,
) -> None:
    """A relative path starts at the folder of the file, like all other paths."""
    monkeypatch.setattr(build, "find_opener", lambda type_: lambda run: Kept(run, store))
    monkeypatch.setattr(observers, "CLOSING_SECONDS", 60.0)
    tracker = {
        "type": "aim",
        **{key: text.format(tmp=tmp_path) for key, text in given.items()},
    }
    training = Training.model_validate({**TRAINING, "logging": {"trackers": [tracker]}})
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    around = build.Surroundings(
        directory,
        run="docs",
        training=training,
        base_directory=tmp_path / "beside",
        stream=io.StringIO(),
        should_stop=lambda: False,
        relay=BaseObserver(),
    )
    made = build.build_observers(around).observers
    made.run_start(
        RunInfo(
            "docs", 1, 2, 10, 0, 8192, 32, 100, "bf16", "dataParallel", "llama", "", "id-1"
        )
    )
    made.event(Event(EventType.STOP, 0.0, 1, 1, {"reason": "complete", "saved": True}))
    made.close()
    (run,) = store["runs"]
    assert run.directory == tmp_path / expected


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        ("complete", "complete"),
        ("signal", "interrupted"),
        ("observer", "stopped"),
        ("after_step", "stopped"),
    ],
)
def test_only_a_signal_may_have_interrupted_an_evaluation(
    make_scene: Callable[..., Scene], store: dict[str, Any], reason: str, end: End
) -> None:
    scene = make_scene(lambda run: Kept(run, store))
    scene.start()
    scene.stop(reason)
    assert store["ends"] == [end]


def test_a_note_of_another_run_is_ignored(
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
        {
            "configHash": "c",
            "dataFingerprint": "d",
            "manifest": {"spec": {"training": recipe}},
        }
    )
    checkpoint = scene.directory.checkpoints / "step-2.g1"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{}")
    scene.start()
    scene.event(EventType.SAVE, checkpoint="step-2.g1")
    scene.stop()
    (run,) = store["runs"]
    flat = flatten(run.facts)
    assert (flat["configHash"], flat["dataFingerprint"], flat["runId"]) == (
        "c",
        "d",
        "id-1",
    )
    assert flat["training.optimizer.learningRate"] == 1e-3
    # The SHA-256 of "{}", for a checkpoint that exists at the start and for one that was saved.
    for name, text in store["notes"]:
        assert name == "checkpoint/step-2.g1"
        assert text.startswith("sha256:44136fa355b3678a")
    assert len(store["notes"]) == 2


def test_checkpoint_hashes_that_a_kill_kept_from_a_tracker_are_noted_at_the_next_start(
    make_scene: Callable[..., Scene], store: dict[str, Any]
) -> None:
    """A tracker that was added to a run has none of them before."""
    scene = make_scene(lambda run: Kept(run, store))
    for name in ("step-2", "step-10.g1", ".tmp/step-12.g1.1"):
        checkpoint = scene.directory.checkpoints / name
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(name)
    (scene.directory.checkpoints / "step-3").mkdir()
    scene.start(10)
    scene.stop()
    names = [name for name, text in store["notes"] if text.startswith("sha256:")]
    assert sorted(names) == ["checkpoint/step-10.g1", "checkpoint/step-2"]
    assert len(store["notes"]) == 2


class Removing(Kept):
    """While it takes the first note, retention removes that checkpoint."""

    removes: ClassVar[list[Path]] = []

    def note(self, name: str, text: str) -> None:
        super().note(name, text)
        self.store.setdefault("flushed at a note", []).append(self.store.get("flushed", 0))
        while self.removes:
            shutil.rmtree(self.removes.pop())


def test_missed_rows_are_sent_before_notes_and_no_hash_is_followed_by_gone(
    make_scene: Callable[..., Scene], store: dict[str, Any], synthetic: ModuleType
) -> None:
    before = make_scene(Broken)
    before.start()
    for step in (1, 2, 3):
        before.all.step_end(synthetic.step_record(step))
    before.stop("killed")
    scene = make_scene(lambda run: Removing(run, store))
    checkpoint = scene.directory.checkpoints / "step-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    Removing.removes.append(checkpoint)
    scene.start(3)
    scene.event(EventType.SAVE, checkpoint="step-3")
    scene.stop()
    ((name, text),) = store["notes"]
    assert name == "checkpoint/step-3" and text.startswith("sha256:")
    assert store["flushed at a note"] == [3]


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


def test_a_tracker_that_fails_is_disabled_with_a_message(
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


def test_credentials_of_a_server_are_in_neither_the_records_nor_the_log(
    make_scene: Callable[..., Scene], caplog: pytest.LogCaptureFixture
) -> None:
    """Libraries name the address that they could not reach; MLFLOW_TRACKING_URI may have a password."""
    address = "https://bob:p@55w0rd@ml.example/api"

    def refuse(run: TrackedRun) -> Library:
        raise ConnectionError(f"API request to {address} failed: {'x' * 470} {address}")

    scene = make_scene(refuse)
    scene.start()
    scene.stop()
    (message,) = scene.warnings
    written = scene.directory.events.read_text() + caplog.text
    for text in (message, written):
        assert "API request to https://<redacted>@ml.example/api failed" in text
        assert "bob" not in text and "p@55" not in text and "55w0rd" not in text


def test_a_failure_after_the_last_step_is_reported_at_the_end(
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


def test_a_tracker_that_hangs_costs_no_step_and_is_disabled(
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


@pytest.mark.parametrize("hangs_in", ["open", "write", "flush", "finish"])
def test_a_disabled_tracker_writes_nothing_more_when_its_library_responds(
    tmp_path: Path, store: dict[str, Any], synthetic: ModuleType, hangs_in: str
) -> None:
    """Another process, or another feeder of this one, may show the run by then."""
    gate, hangs = threading.Event(), threading.Event()

    def hang(where: str) -> None:
        if where == hangs_in:
            hangs.set()
            gate.wait()

    class Hanging(Kept):
        def write(self, step: int, time: float, values: Values) -> None:
            hang("write")
            super().write(step, time, values)

        def flush(self) -> None:
            hang("flush")
            super().flush()

        def finish(self, end: End) -> None:
            hang("finish")
            super().finish(end)

    def open_library(run: TrackedRun) -> Library:
        hang("open")
        return Hanging(run, store)

    directory = RunDirectory(tmp_path / "run")
    directory.create()
    now = 0.0
    feeder = feeders.Feeder(SETTINGS, open_library, directory, clock=lambda: now)
    known = RunInfo(
        "docs", 1, 2, 10, 0, 8192, 32, 100, "bf16", "dataParallel", "llama", "", "i"
    )
    items: list[feeders.Item] = [
        known,
        synthetic.step_record(1),
        feeders.TrackerFinish("stopped"),
    ]
    # Go back in the same process: the library is closed, and opened again.
    if hangs_in == "finish":
        items.insert(2, known)
    for item in items:
        assert feeder.give(item)
    hangs.wait()
    note = directory.trackers / "tensorboard.json"
    before = note.read_text() if note.exists() else None

    # Late enough for a flush to be due.
    now = 1000.0
    feeder.abandon()
    gate.set()
    assert feeder.wait(60.0) and feeder.failure is None
    assert (note.read_text() if note.exists() else None) == before
    assert len(store["runs"]) == 1
    if hangs_in in ("open", "write"):
        assert "flushed" not in store
    assert store["ends"] == (["handed on"] if hangs_in == "finish" else [])


def test_the_number_of_buffered_records_is_bounded(
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


def test_the_end_waits_for_all_trackers_together_for_a_bounded_time(
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
    patience = TrackerTimeouts(2.0, clock=lambda: now)
    assert patience.left() == 2.0
    now = 6.5
    assert patience.left() == 0.5
    now = 9.0
    assert patience.left() == 0.0
    patience.begin()
    assert patience.left() == 2.0


def test_a_run_that_goes_back_in_the_same_process_is_opened_again(
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


def test_two_processes_never_open_a_tracker_at_the_same_time(
    make_scene: Callable[..., Scene], store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank 0 before this one is still at it: the second finds the run that the first has made."""
    is_opening, is_waiting, may_open = (threading.Event() for _ in range(3))

    def open_slowly(run: TrackedRun) -> Library:
        is_opening.set()
        assert may_open.wait(60)
        return Kept(run, store)

    monkeypatch.setattr(lock, "time", SimpleNamespace(sleep=lambda _: is_waiting.set()))
    first = make_scene(open_slowly)
    first.start()
    assert is_opening.wait(60)
    second = make_scene(lambda run: Kept(run, store))
    second.start()
    assert is_waiting.wait(60)
    assert store["ids"] == []
    may_open.set()
    for scene in (first, second):
        scene.stop()
    assert store["ids"] == ["own-0", "own-0"]
    assert list((first.directory.path / "trackers").glob(".*")) == []


def test_a_tracker_is_opened_without_a_lock_that_another_process_holds_for_long(
    make_scene: Callable[..., Scene],
    store: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(feeders, "OPENING_SECONDS", 0.0)
    scene = make_scene(lambda run: Kept(run, store))
    scene.directory.trackers.mkdir()
    path = scene.directory.trackers / ".tensorboard.lock"
    with lock.exclusive(path, is_done=lambda: False, on_wait=lambda: None):
        scene.start()
        scene.stop()
    assert store["ends"] == ["complete"] and scene.warnings == []
    assert "tracker tensorboard is opened without a lock" in caplog.text


@pytest.mark.parametrize("type_", ["tensorboard", "wandb", "mlflow", "aim"])
def test_a_missing_library_is_refused_with_the_install_command(
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
        f"Run `pip install {type_}`, or remove the tracker."
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find("json"))
    assert list(check_trackers(training)) == []
