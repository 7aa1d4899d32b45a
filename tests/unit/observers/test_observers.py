"""The fan-out: order, isolation of failing observers, essential ones."""

import errno
import io
import logging
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import VolumeError
from evergrad_trainer.base.records import EvaluationRecord, Event, RunInfo, StepRecord, Wish
from evergrad_trainer.observers.base import BaseObserver, Observers
from evergrad_trainer.observers.build import BUILT_IN, Surroundings, build_observers
from evergrad_trainer.observers.history import read_history
from evergrad_trainer.observers.jsonl import JsonLinesWriter, RunLog
from evergrad_trainer.run.directory import RunDirectory

TRAINING = {
    "model": {"config": {"model_type": "llama"}},
    "data": {"sources": [{"name": "docs", "path": "docs.jsonl"}], "sequenceLength": 16},
    "batching": {"globalBatchSize": 8, "microBatchSize": 2},
    "optimizer": {"learningRate": 1e-3},
    "horizon": {"steps": 10},
    "metrics": {"port": 0},
}
INFO = RunInfo(
    "docs-lm",
    3,
    2,
    100,
    40,
    8192,
    32,
    10_000_000,
    "bf16",
    "dataParallel",
    "llama",
    "/runs/docs-lm",
)


class Recorder(BaseObserver):
    """Records its calls."""

    def __init__(self, heard: list[str], name: str = "") -> None:
        self._heard, self._name = heard, name

    def run_start(self, info: RunInfo) -> None:
        self._heard.append(f"{self._name}start {info.name}")

    def step_end(self, record: StepRecord) -> None:
        self._heard.append(f"{self._name}step {record.step}")

    def evaluation_end(self, record: EvaluationRecord) -> None:
        self._heard.append(f"{self._name}evaluation {record.name}")

    def evaluation_progress(self, name: str, done: int, total: int) -> None:
        self._heard.append(f"{self._name}evaluating {name} {done}/{total}")

    def event(self, event: Event) -> None:
        self._heard.append(
            f"{self._name}event {event.type} {event.fields.get('message', '')}".rstrip()
        )

    def close(self) -> None:
        self._heard.append(f"{self._name}close")


class Failing(BaseObserver):
    """Fails at the given steps."""

    def __init__(self, at: set[int], error: Exception) -> None:
        self._at, self._error, self.closed = at, error, 0

    def step_end(self, record: StepRecord) -> None:
        if record.step in self._at:
            raise self._error

    def close(self) -> None:
        self.closed += 1


class Essential(Failing):
    """Like Failing, but the run must not continue without it."""

    essential = True


class _Wishing(BaseObserver):
    def __init__(self, *wishes: Any) -> None:
        self.asked = frozenset(wishes)

    def wishes(self) -> frozenset[Wish]:
        return self.asked


def test_requests_of_all_observers_are_combined() -> None:
    observers = Observers(
        [_Wishing("stop"), BaseObserver(), _Wishing("save", "stop"), _Wishing()]
    )
    assert observers.wishes() == {"stop", "save"}
    assert Observers([]).wishes() == frozenset()


def test_an_unknown_request_is_a_failure_of_its_observer() -> None:
    observers = Observers([_Wishing("explode"), _Wishing("evaluate")])
    assert observers.wishes() == {"evaluate"}
    assert observers.failures == {"_Wishing": 1}


@pytest.mark.acceptance("8d-15b", "8d-16a")
def test_every_observer_receives_everything_in_order(synthetic: ModuleType) -> None:
    heard: list[str] = []
    observers = Observers([Recorder(heard, "a "), Recorder(heard, "b "), BaseObserver()])
    observers.run_start(INFO)
    observers.step_end(synthetic.step_record(1))
    observers.evaluation_progress("heldOut", 1, 4)
    observers.evaluation_end(EvaluationRecord(1, 1, "heldOut", 1.0, 2.7, 1, 0.1, 1.0))
    observers.event(Event("stop", 1.0, 1, 1))
    observers.close()
    facts = [
        "start docs-lm",
        "step 1",
        "evaluating heldOut 1/4",
        "evaluation heldOut",
        "event stop",
        "close",
    ]
    assert heard == [f"{name} {fact}" for fact in facts for name in ("a", "b")]


@pytest.mark.acceptance("8d-16b")
def test_an_observer_is_disabled_after_three_failures_in_a_row_and_the_others_are_notified(
    synthetic: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []
    failing = Failing({1, 2, 4, 5, 6, 7}, ValueError("no such gauge"))
    observers = Observers([failing, Recorder(heard)])
    with caplog.at_level(logging.ERROR):
        for step in range(1, 9):
            observers.step_end(synthetic.step_record(step))
    assert [line for line in heard if line.startswith("step")] == [
        f"step {step}" for step in range(1, 9)
    ]
    warnings = [line for line in heard if line.startswith("event")]
    assert warnings == [
        "event warning observer Failing is switched off after 3 failures in a row: no such gauge"
    ]
    assert observers.failures == {"Failing": 5}
    assert failing.closed == 1
    assert (
        sum(
            "observer Failing failed: ValueError: no such gauge" in message
            for message in caplog.messages
        )
        == 5
    )


def test_the_warning_about_a_disabled_observer_names_its_step(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    directory = RunDirectory(tmp_path)
    observers = Observers([Failing(set(range(100)), ValueError("x")), RunLog(directory)])
    for step in range(11, 15):
        observers.step_end(synthetic.step_record(step, generation=4))
    observers.close()
    (event,) = read_history(directory).events
    assert (event.step, event.generation) == (13, 4)


def test_an_essential_observer_stops_the_run_with_an_error_that_names_the_file(
    synthetic: ModuleType,
) -> None:
    observers = Observers(
        [
            Essential(
                {2},
                OSError(errno.ENOSPC, "No space left on device", "/runs/x/metrics.jsonl"),
            )
        ]
    )
    observers.step_end(synthetic.step_record(1))
    with pytest.raises(
        VolumeError,
        match=r"/runs/x/metrics\.jsonl: cannot be written by Essential; No space left on device",
    ):
        observers.step_end(synthetic.step_record(2))


def test_a_full_disk_under_the_run_log_does_not_stop_the_run(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    log = RunLog(RunDirectory(tmp_path))
    log._metrics.close()
    log._metrics = JsonLinesWriter(Path("/dev/full"))
    observers = Observers([log])
    observers.step_end(synthetic.step_record(1))
    log._metrics._close_descriptor()


def test_any_other_error_of_an_essential_observer_is_raised_unchanged(
    synthetic: ModuleType,
) -> None:
    observers = Observers([Essential({1}, TypeError("not JSON"))])
    with pytest.raises(TypeError, match="not JSON"):
        observers.step_end(synthetic.step_record(1))


class FailingClose(BaseObserver):
    """Cannot be closed."""

    def close(self) -> None:
        raise OSError(errno.EIO, "Input/output error", "x")


class EssentialFailingClose(FailingClose):
    """Cannot be closed, and that matters."""

    essential = True


def test_all_observers_are_closed_although_one_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[str] = []
    Observers([FailingClose(), Recorder(heard)]).close()
    assert heard == ["close"]
    heard.clear()
    observers = Observers([EssentialFailingClose(), Recorder(heard)])
    with pytest.raises(VolumeError, match="Input/output error"):
        observers.close()
    assert heard == ["close"]
    observers.close()


def test_an_interrupt_is_never_suppressed(synthetic: ModuleType) -> None:
    class Interrupting(BaseObserver):
        def step_end(self, record: StepRecord) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Observers([Interrupting()]).step_end(synthetic.step_record(1))


@pytest.mark.acceptance("8d-16a")
def test_the_registry_of_built_in_observers_declares_which_may_stop_a_run(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(tmp_path)
    directory.create()
    around = Surroundings(
        directory,
        run="docs-lm",
        training=Training.model_validate(TRAINING),
        base_directory=tmp_path,
        stream=io.StringIO(),
        should_stop=lambda: False,
        relay=BaseObserver(),
    )
    made = {name: build(around) for name, build in BUILT_IN.items()}
    assert list(made) == [
        "record",
        "log",
        "progress",
        "relay",
        "trackers",
        "profiler",
        "endpoint",
    ]
    assert made.pop("trackers") == [] and made["profiler"] is None, "neither was asked for"
    single = {name: one for name, one in made.items() if not isinstance(one, list)}
    assert [name for name, one in single.items() if one is not None and one.essential] == [
        "record"
    ]
    assert made["endpoint"] is None, "with a relay the endpoint is another process's"
    assert build_observers(around).metrics_address is None
    served = build_observers(replace(around, relay=None))
    assert (served.metrics_address or "").startswith("http://localhost:")
    for one in (*filter(None, single.values()), served.observers):
        one.close()
