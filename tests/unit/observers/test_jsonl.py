"""The JSON-lines writers and what reads them back."""

import errno
import json
import math
import os
from copy import copy
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from evergrad_common.metrics import COLUMNS
from evergrad_trainer.base.errors import RunDirectoryError, VolumeError
from evergrad_trainer.base.records import (
    EvaluationRecord,
    Event,
    EventType,
    RunInfo,
    StepRecord,
)
from evergrad_trainer.observers.events import event_row, parse_event_row, saved_step
from evergrad_trainer.observers.history import last_step, read_before, read_history
from evergrad_trainer.observers.jsonl import JsonLinesWriter, RunLog
from evergrad_trainer.run.directory import JsonLines, RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


@pytest.mark.capability("A-61")
def test_a_later_process_creates_missing_folders_and_keeps_existing_rows(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    directory = RunDirectory(tmp_path / "not" / "there" / "run")
    for step in (1, 2):
        directory.create()
        log = RunLog(directory)
        log.step_end(synthetic.step_record(step))
        log.close()
    rows = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]


@pytest.mark.capability("A-15")
def test_a_row_is_in_the_file_when_the_call_returns(
    directory: RunDirectory, synthetic: ModuleType
) -> None:
    log = RunLog(directory)
    log.step_end(synthetic.step_record(1))
    assert json.loads(directory.metrics.read_text())["step"] == 1
    log.close()


def test_a_step_row_has_every_field_of_the_record_in_order(
    directory: RunDirectory, synthetic: ModuleType
) -> None:
    record = synthetic.step_record(7)
    log = RunLog(directory)
    log.step_end(record)
    log.close()
    row = json.loads(directory.metrics.read_text())
    without = ("metrics", "loss_scale")
    assert row == {
        name: one for name, one in record.__dict__.items() if name not in without
    }
    assert list(row)[:8] == [
        "step",
        "generation",
        "world_size",
        "loss",
        "tokens",
        "valid_tokens",
        "sample_hash",
        "learning_rate",
    ]


def test_rows_and_events_are_read_back_equal(
    directory: RunDirectory, synthetic: ModuleType
) -> None:
    records = [synthetic.step_record(step) for step in range(1, 10_001, 7)]
    evaluation = EvaluationRecord(40, 1, "heldOut", 2.5, 12.18, 4096, 1.5, 1.77e9)
    events = [
        Event(EventType.START, 1.0, 0, 1, {"run": "x", "resumed_from": None}),
        Event(EventType.END, 2.5, 9, 1, {"exit_code": 0}),
    ]
    log = RunLog(directory)
    for event in events:
        log.event(event)
    for record in records:
        log.step_end(record)
    log.evaluation_end(evaluation)
    log.close()
    history = read_history(directory)
    assert [history.steps.record(row) for row in range(len(history.steps))] == records
    assert history.evaluations == (evaluation,)
    assert list(history.events) == events
    assert history.notes == ()


def test_a_row_without_recipe_metrics_is_byte_equal_to_earlier_versions(
    directory: RunDirectory, synthetic: ModuleType
) -> None:
    log = RunLog(directory)
    log.step_end(
        synthetic.step_record(7, loss=2.5, learning_rate=1e-3, grad_norm=0.5, time=1.77e9)
    )
    log.evaluation_end(EvaluationRecord(40, 1, "heldOut", 2.5, 12.18, 4096, 1.5, 1.77e9))
    log.close()
    assert directory.metrics.read_text() == (
        '{"step":7,"generation":1,"world_size":2,"loss":2.5,"tokens":8192,"valid_tokens":8192,'
        '"sample_hash":"538454127b096493","learning_rate":0.001,"grad_norm":0.5,"step_seconds":0.5,'
        '"data_seconds":0.002,"forward_backward_seconds":0.4,"communication_seconds":0.06,'
        '"optimizer_seconds":0.03,"other_seconds":0.008,"rank_skew_seconds":0.004,"time":1770000000.0,'
        '"skipped":null}\n'
    )
    assert directory.evaluation.read_text() == (
        '{"step":40,"generation":1,"name":"heldOut","loss":2.5,"perplexity":12.18,"tokens":4096,'
        '"seconds":1.5,"time":1770000000.0}\n'
    )


def test_metrics_of_a_recipe_are_in_their_rows_and_read_back(
    directory: RunDirectory, synthetic: ModuleType
) -> None:
    records = [
        synthetic.step_record(1),
        synthetic.step_record(2, metrics={"ce": 2.5, "kl": 0.125}),
        synthetic.step_record(3, metrics={"kl": 0.25}),
        *(synthetic.step_record(step) for step in range(4, 5000)),
        synthetic.step_record(5000, metrics={"ce": 1.5}),
        synthetic.step_record(5001),
    ]
    evaluation = EvaluationRecord(
        2, 1, "heldOut", 2.5, 12.18, 4096, 1.5, 1.77e9, {"accuracy": 0.75}
    )
    log = RunLog(directory)
    for record in records:
        log.step_end(record)
    log.evaluation_end(evaluation)
    log.close()
    assert json.loads(directory.metrics.read_text().splitlines()[1])["metrics"] == {
        "ce": 2.5,
        "kl": 0.125,
    }
    history = read_history(directory)
    assert set(history.steps.metrics) == {"ce", "kl"}
    assert [history.steps.record(row) for row in range(len(history.steps))] == records
    assert [
        history.steps.take(history.steps.step > 4999).record(row) for row in (0, 1)
    ] == records[-2:]
    assert history.evaluations == (evaluation,)


@pytest.mark.parametrize("metrics", ["[]", '{"kl": "much"}', "null"])
def test_metrics_that_are_not_numbers_by_name_are_refused_with_their_line(
    directory: RunDirectory, synthetic: ModuleType, metrics: str
) -> None:
    row = json.dumps({**synthetic.step_record(1).__dict__, "metrics": "here"})
    directory.metrics.write_text(row.replace('"here"', metrics) + "\n")
    with pytest.raises(RunDirectoryError, match="line 1: has impossible metrics"):
        read_history(directory)


@pytest.mark.acceptance("8d-15a", "input-1e-18")
def test_non_finite_values_are_null_in_the_file_and_nan_when_read(
    directory: RunDirectory, synthetic: ModuleType
) -> None:
    log = RunLog(directory)
    log.step_end(synthetic.step_record(1, loss=math.nan, grad_norm=math.inf))
    log.evaluation_end(EvaluationRecord(1, 1, "heldOut", math.inf, math.inf, 1, 0.1, 1.0))
    log.close()
    assert '"loss":null' in directory.metrics.read_text()
    history = read_history(directory)
    assert math.isnan(history.steps.loss[0]) and math.isnan(history.steps.grad_norm[0])
    assert math.isnan(history.evaluations[0].loss)


@pytest.mark.acceptance("8d-15c")
@pytest.mark.capability("G-68")
def test_a_truncated_last_line_is_removed_and_reported_after_the_start_event(
    directory: RunDirectory, synthetic: ModuleType
) -> None:
    log = RunLog(directory)
    log.step_end(synthetic.step_record(1))
    log.close()
    with directory.metrics.open("ab") as file:
        file.write(b'{"step":2,"gen')
    log = RunLog(directory)
    log.event(Event(EventType.START, 5.0, 1, 2, {"resumed_from": 1}))
    log.step_end(synthetic.step_record(2, generation=2))
    log.close()
    history = read_history(directory)
    assert history.steps.step.tolist() == [1, 2]
    assert [event.type for event in history.events] == ["start", "warning"]
    assert history.events[1].fields == {
        "message": "metrics.jsonl: 14 bytes of an unfinished last line were cut off"
    }


@pytest.mark.capability("G-88")
@pytest.mark.capability("A-78")
def test_the_start_event_has_the_facts_of_the_run(directory: RunDirectory) -> None:
    log = RunLog(directory)
    log.run_start(
        RunInfo(
            "docs-lm",
            3,
            2,
            100,
            40,
            8192,
            32,
            10_000_000,
            "bf16",
            "fsdp2",
            "llama",
            "/runs/docs-lm",
            trainable_parameters=1_000_000,
        )
    )
    log.event(Event(EventType.START, 5.0, 40, 3, {"run": "docs-lm", "world_size": 2}))
    log.event(Event(EventType.STOP, 6.0, 40, 3, {"reason": "signal"}))
    log.close()
    start, stop = read_history(directory).events
    assert start.fields == {
        "model": "llama",
        "parameters": 10_000_000,
        "trainable_parameters": 1_000_000,
        "precision": "bf16",
        "parallelism": "fsdp2",
        "tokens_per_step": 8192,
        "samples_per_step": 32,
        "run": "docs-lm",
        "world_size": 2,
    }
    assert stop.fields == {"reason": "signal"}


class Volume:
    """``os.write`` and ``os.fsync`` of a volume that may be full, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int = errno.EDQUOT) -> None:
        self.now = 0.0
        self.is_away = False
        self.tries = 0
        self._number = number
        write, fsync = os.write, os.fsync
        monkeypatch.setattr(
            os, "write", lambda descriptor, data: self._call(write, descriptor, data)
        )
        monkeypatch.setattr(os, "fsync", lambda descriptor: self._call(fsync, descriptor))

    def _call(self, call: Any, *arguments: Any) -> Any:
        self.tries += 1
        if self.is_away:
            raise OSError(self._number, os.strerror(self._number))
        return call(*arguments)


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT]
)
def test_lines_are_buffered_while_the_volume_is_unavailable_and_written_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    volume = Volume(monkeypatch, number)
    writer = JsonLinesWriter(tmp_path / "rows.jsonl", clock=lambda: volume.now)
    writer.write({"row": 0})
    volume.is_away = True
    for row in (1, 2, 3):
        writer.write({"row": row})
    assert volume.tries == 2, "each line tried the volume again"
    volume.now += 1000
    writer.write({"row": 4})
    assert volume.tries == 3
    assert [row["row"] for _, row in JsonLines(tmp_path / "rows.jsonl")] == [0]
    volume.is_away, volume.now = False, 2000.0
    writer.write({"row": 5})
    assert [row["row"] for _, row in JsonLines(tmp_path / "rows.jsonl")] == list(range(6))
    writer.close()


def test_buffered_lines_are_written_when_the_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = Volume(monkeypatch)
    writer = JsonLinesWriter(tmp_path / "rows.jsonl", clock=lambda: volume.now)
    volume.is_away = True
    writer.write({"row": 1})
    volume.is_away = False
    writer.close()
    assert (tmp_path / "rows.jsonl").read_text() == '{"row":1}\n'


def test_lines_that_can_never_be_written_end_the_process_as_a_host_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("evergrad_trainer.observers.jsonl.LONGEST_WAITING_BYTES", 100)
    monkeypatch.setattr("evergrad_trainer.observers.jsonl.CLOSING_SECONDS", 0.0)
    writer = JsonLinesWriter(Path("/dev/full"))
    writer.write({"a": 1})
    with pytest.raises(
        VolumeError, match="/dev/full: 2 lines wait to be written"
    ) as raised:
        writer.write({"a": "x" * 200})
    assert raised.value.exit_code == 70
    with pytest.raises(VolumeError, match="/dev/full: cannot be brought to the disk"):
        writer.close()
    writer.close()


def test_a_directory_at_the_path_of_a_file_is_refused(directory: RunDirectory) -> None:
    directory.events.mkdir()
    with pytest.raises(
        RunDirectoryError,
        match=r"events\.jsonl: cannot be opened for appending; it is a directory, not a file",
    ):
        RunLog(directory)


def test_closing_twice_has_no_effect(directory: RunDirectory) -> None:
    log = RunLog(directory)
    log.close()
    log.close()
    assert directory.metrics.read_bytes() == b""


@pytest.mark.acceptance("input-O-59")
def test_event_fields_that_collide_with_the_common_fields_are_refused() -> None:
    with pytest.raises(ValueError, match="event 'save' has fields named step, time"):
        event_row(Event("save", 1.0, 2, 3, {"step": 4, "time": 5}))


def test_an_event_is_parsed_as_it_was_written() -> None:
    event = Event("save", 1.5, 2, 3, {"checkpoint": "step-2", "seconds": 0.5})
    assert parse_event_row(json.loads(json.dumps(event_row(event)))) == event


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-1200", 1200),
        ("checkpoints/step-1200", 1200),
        ("step-1200.g7", 1200),
        ("/a/b/step-7/", 7),
        ("best", 9),
        (None, 9),
    ],
)
def test_the_saved_step_is_taken_from_the_name_of_the_checkpoint(
    name: str | None, step: int
) -> None:
    assert saved_step(Event("save", 0.0, 9, 1, {"checkpoint": name})) == step


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"loss": None, "tokens": 1.5},
            r"metrics\.jsonl line 6000: has an impossible tokens, 1\.5",
        ),
        ({"sample_hash": "nothex"}, r"line 6000: has an impossible sample_hash, 'nothex'"),
        ({"sample_hash": 12}, "line 6000: has an impossible sample_hash, 12"),
        ({"learning_rate": "fast"}, "line 6000: has an impossible learning_rate, 'fast'"),
        ({"step": None}, "line 6000: has an impossible step, None"),
        ({"skipped": 3}, "line 6000: has an impossible skipped, 3"),
        ({"loss_scale": "high"}, "line 6000: has an impossible loss_scale, 'high'"),
        ({"step": 2**70}, "line 6000: has an impossible step"),
    ],
)
def test_an_invalid_row_is_refused_with_its_line(
    directory: RunDirectory, synthetic: ModuleType, change: dict[str, object], message: str
) -> None:
    rows = [synthetic.step_record(step).__dict__ for step in range(1, 6501)]
    rows[5999] = rows[5999] | change
    directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RunDirectoryError, match=message):
        read_history(directory)


def test_missing_fields_are_refused_and_unknown_fields_are_not(
    directory: RunDirectory, synthetic: ModuleType
) -> None:
    row = synthetic.step_record(1).__dict__ | {"something_newer": [1]}
    directory.metrics.write_text(json.dumps(row) + "\n")
    assert len(read_history(directory).steps) == 1
    del row["loss"], row["time"]
    directory.metrics.write_text(json.dumps(row) + "\n")
    with pytest.raises(
        RunDirectoryError, match=r"metrics\.jsonl line 1: has no loss and no time"
    ):
        read_history(directory)
    directory.metrics.unlink()
    directory.events.write_text('{"type":"start","time":"noon","step":0,"generation":1}\n')
    with pytest.raises(
        RunDirectoryError, match=r"events\.jsonl line 1: could not convert string to float"
    ):
        read_history(directory)
    directory.events.unlink()
    directory.evaluation.write_text('{"step":1}\n')
    with pytest.raises(
        RunDirectoryError,
        match=r"evaluation\.jsonl line 1: has no generation and no name and no loss",
    ):
        read_history(directory)


def test_the_last_row_of_a_step_counts(synthetic: ModuleType) -> None:
    table = synthetic.step_table(
        [
            synthetic.step_record(step, loss=float(index))
            for index, step in enumerate([1, 2, 3, 2, 3, 4])
        ]
    )
    counting = table.take(table.last_rows())
    assert counting.step.tolist() == [1, 2, 3, 4]
    assert counting.loss.tolist() == [0.0, 3.0, 4.0, 5.0]
    assert synthetic.step_table([]).last_rows().tolist() == []


def test_a_row_that_a_frozen_process_writes_late_does_not_count(
    directory: RunDirectory, synthetic: ModuleType
) -> None:
    """Generation 2 continued from step 2 while a process of generation 1 still wrote steps 3 and 9."""
    written = [(1, 1), (2, 1), (3, 2), (3, 1), (4, 2), (9, 1)]
    records = [
        synthetic.step_record(step, generation=generation, loss=float(index), time=index)
        for index, (step, generation) in enumerate(written)
    ]
    table = synthetic.step_table(records)
    assert table.newest_step == 4
    counting = table.take(table.last_rows())
    assert counting.step.tolist() == [1, 2, 3, 4]
    assert counting.loss.tolist() == [0.0, 1.0, 2.0, 4.0]

    log = RunLog(directory)
    for record in records:
        log.step_end(record)
    log.close()
    assert last_step(directory) == 4
    before = read_before(directory)
    assert (before.highest_step, before.last_time) == (4, 5.0)


@pytest.mark.parametrize("has_died_early", [False, True])
def test_rows_of_generations_that_restart_count(
    directory: RunDirectory, synthetic: ModuleType, has_died_early: bool
) -> None:
    """A user has removed only the checkpoints; a row of the first generation 1 arrives late before that."""
    log = RunLog(directory)
    written = [(1, 1), (2, 1), (3, 3), (4, 3), (3, 1), (5, 3)]
    for at, (step, generation) in enumerate(written, start=1):
        log.step_end(synthetic.step_record(step, generation=generation, time=at))
    starts = [(0, 1), (2.5, 3), (10, 1)]
    # The first process after that has ended before its first step.
    if has_died_early:
        starts += [(11, 2)]
    for moment, generation in starts:
        log.event(Event(EventType.START, moment, 0, generation, {}))
    _, newest = starts[-1]
    for step, generation in ((1, newest), (2, newest + 1), (2, newest), (3, newest + 1)):
        record = synthetic.step_record(step, generation=generation, time=20 + step)
        log.step_end(record)
    log.close()

    table = read_history(directory).steps
    assert table.newest_step == 3
    counting = table.take(table.last_rows())
    assert counting.step.tolist() == [1, 2, 3, 4, 5]
    expected = [newest, newest + 1, newest + 1, 3, 3]
    assert counting.generation.tolist() == expected
    assert last_step(directory) == 3
    assert read_before(directory).highest_step == 5


def test_a_new_process_reads_the_previous_state_from_the_ends_of_the_files(
    directory: RunDirectory, synthetic: ModuleType
) -> None:
    assert read_before(directory).last_time is None
    log = RunLog(directory)
    for step in [*range(1, 3000), *range(2900, 2950)]:
        log.step_end(synthetic.step_record(step, time=1000.0 + step))
    log.event(Event(EventType.STOP, 9000.0, 2949, 2, {"reason": "signal"}))
    log.close()
    before = read_before(directory, tail_bytes=200_000)
    assert (before.highest_step, before.last_time) == (2999, 9000.0)


def test_the_catalogue_has_exactly_the_columns_of_a_step() -> None:
    """And in their order; ``metrics`` are the recipe's own."""
    names = [column.name for column in fields(StepRecord)]
    assert [*(column.name for column in COLUMNS), "metrics"] == names


def test_the_reason_of_a_skipped_step_and_the_loss_scale_are_read_back(
    directory: RunDirectory, synthetic: ModuleType
) -> None:
    records = [
        synthetic.step_record(1),
        synthetic.step_record(2, skipped="overflow", loss_scale=65536.0, loss=math.inf),
        synthetic.step_record(3, loss_scale=32768.0),
    ]
    log = RunLog(directory)
    for record in records:
        log.step_end(record)
    log.close()
    steps = read_history(directory).steps
    read = [steps.record(row) for row in range(3)]
    assert [(one.skipped, one.loss_scale) for one in read] == [
        (None, None),
        ("overflow", 65536.0),
        (None, 32768.0),
    ]
    assert (read[0], read[2]) == (records[0], records[2])
    # Rows that are chosen keep both.
    chosen = steps.take(steps.step == 2)
    assert chosen.skipped.tolist() == ["overflow"] and chosen.loss_scale.tolist() == [
        65536.0
    ]


def test_files_from_before_a_column_existed_are_read(
    directory: RunDirectory, synthetic: ModuleType
) -> None:
    row = dict(synthetic.step_record(4).__dict__)
    for column in COLUMNS:
        if column.is_optional:
            del row[column.name]
    directory.metrics.write_text(json.dumps(row) + "\n")
    assert read_history(directory).steps.record(0) == synthetic.step_record(4)


def test_a_table_has_no_attribute_without_a_column(synthetic: ModuleType) -> None:
    table = synthetic.step_table([synthetic.step_record(1)])
    assert copy(table).loss.tolist() == table.columns["loss"].tolist()
    with pytest.raises(AttributeError, match="no 'lost'"):
        _ = table.lost


def test_the_loss_scale_is_in_the_row_of_a_step_that_has_one(
    directory: RunDirectory, synthetic: ModuleType
) -> None:
    log = RunLog(directory)
    log.step_end(replace(synthetic.step_record(7), loss_scale=32768.0))
    log.close()
    assert json.loads(directory.metrics.read_text())["loss_scale"] == 32768.0
