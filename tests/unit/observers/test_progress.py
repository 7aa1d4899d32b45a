"""The output for users while a run trains, with and without a terminal, and the logs per rank."""

import io
import logging
import os
import pty
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from evergrad_common.text import (
    compact,
    count,
    duration,
    percent,
    real,
    short_count,
    size,
    utc,
)
from evergrad_trainer.base.records import EvaluationRecord, Event, EventType, RunInfo
from evergrad_trainer.observers.bar import ProgressBar, render_line
from evergrad_trainer.observers.live_state import LiveState, Rate
from evergrad_trainer.observers.logs import EventLog, setup_logging
from evergrad_trainer.observers.progress import ProgressLines, build_progress
from evergrad_trainer.run.directory import RunDirectory

INFO = RunInfo(
    "docs-lm",
    3,
    2,
    20_000,
    1200,
    8192,
    32,
    10_200_000,
    "bf16-autocast",
    "dataParallel",
    "llama",
    "runs/docs-lm",
    "http://localhost:9/metrics",
)
EVALUATION = EvaluationRecord(1240, 3, "heldOut", 2.51307, 12.3429, 40960, 3.14159, 1.0)


WORLD = {
    "world_size": 2,
    "from_world_size": 3,
    "cause": "node_lost",
    "detail": "node 0 lost",
    "paused_seconds": 0.1234,
    "pid": 7,
}


class Clock:
    """A clock that advances only on request."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.capability("O-13", "A-13", "T-32", "T-44")
def test_lines_are_printed_every_n_steps_and_at_every_notable_event(
    synthetic: ModuleType,
) -> None:
    stream, clock = io.StringIO(), Clock()
    lines = ProgressLines(stream, every=20, clock=clock)
    lines.run_start(INFO)
    lines.event(Event(EventType.START, 0.0, 1200, 3, {}))
    lines.event(
        Event(EventType.RESTORED, 0.0, 1200, 3, {"checkpoint": "step-1200", "seconds": 0.5})
    )
    for step in range(1201, 1241):
        clock.now += 0.5
        lines.step_end(synthetic.step_record(step, loss=2.41318, grad_norm=0.7666))
    lines.evaluation_end(EVALUATION)
    lines.event(
        Event(
            EventType.SAVE,
            0.0,
            1241,
            3,
            {"checkpoint": "step-1240", "seconds": 0.61, "bytes": 12_345_678},
        )
    )
    lines.event(Event(EventType.WARNING, 0.0, 1241, 3, {"message": "two\nlines"}))
    lines.event(Event(EventType.STOP, 0.0, 1241, 3, {"reason": "signal", "saved": True}))
    lines.close()
    facts = "model=llama parameters=10.2M processes=2 precision=bf16-autocast parallelism=dataParallel"
    facts += " tokens_per_step=8192 directory=runs/docs-lm"
    assert stream.getvalue().splitlines() == [
        f"start run=docs-lm step=1200/20000 {facts}",
        "metrics address=http://localhost:9/metrics",
        "restored checkpoint=step-1200 seconds=0.50",
        "step 1220/20000 loss=2.4132 tokens/s=16384 eta=2h36m learning_rate=0.001 grad_norm=0.767",
        "step 1240/20000 loss=2.4132 tokens/s=16384 eta=2h36m learning_rate=0.001 grad_norm=0.767",
        "evaluation step=1240 set=heldOut loss=2.5131 perplexity=12.34 seconds=3.14",
        "save step=1240 seconds=0.61 size=11.8MiB",
        "warning two lines",
        "stop step=1241 reason=signal saved=true",
    ]


def test_a_line_has_the_number_of_samples_that_each_source_gave_in_another_run() -> None:
    stream = io.StringIO()
    lines = ProgressLines(stream, every=20, clock=Clock())
    fields: dict[str, Any] = {"path": "runs/first", "from_step": 6, "load": "position"}
    lines.event(
        Event(EventType.BEGUN_FROM, 0.0, 6, 3, {**fields, "sources": {"b": 18, "c": 0}})
    )
    lines.event(Event(EventType.BEGUN_FROM, 0.0, 6, 3, {**fields, "load": "everything"}))
    assert stream.getvalue().splitlines() == [
        'begun_from path=runs/first step=6 load=position sources={"b":18,"c":0}',
        "begun_from path=runs/first step=6 load=everything",
    ]


def test_metrics_of_a_recipe_are_at_the_end_of_a_line_and_in_a_wide_bar(
    synthetic: ModuleType,
) -> None:
    stream = io.StringIO()
    lines = ProgressLines(stream, every=1, clock=Clock())
    lines.run_start(INFO)
    record = synthetic.step_record(1201, grad_norm=0.5, metrics={"kl": 0.125})
    lines.step_end(record)
    lines.evaluation_end(replace(EVALUATION, metrics={"accuracy": 0.75}))
    assert stream.getvalue().splitlines()[-2].endswith(" grad_norm=0.500 kl=0.125")
    assert stream.getvalue().splitlines()[-1].endswith(" seconds=3.14 accuracy=0.75")
    state = LiveState(Clock())
    state.start(INFO)
    state.finish_step(record)
    assert "kl 0.125" in render_line(state, 300).plain
    assert "kl" not in render_line(state, 80).plain
    state.start(replace(INFO, metrics={"kl": {"unit": "nats", "help": "divergence"}}))
    assert "kl 0.125 nats" in render_line(state, 300).plain


def test_a_new_rank_0_reports_the_changed_nodes_instead_of_another_start(
    synthetic: ModuleType,
) -> None:
    stream = io.StringIO()
    lines = ProgressLines(stream, every=10, clock=Clock())
    lines.run_start(replace(INFO, takes_over=True))
    lines.event(Event(EventType.WORLD, 0.0, 1207, 4, WORLD))
    lines.step_end(synthetic.step_record(1210, world_size=2))
    lines.event(
        Event(
            EventType.WORLD,
            0.0,
            1210,
            5,
            {"world_size": 3, "from_world_size": None, "cause": 'no"quote'},
        )
    )
    printed = stream.getvalue().splitlines()
    assert printed[0] == 'world size=2 from=3 cause="node 0 lost" paused=0.12s'
    assert printed[1].startswith("step 1210/20000 ")
    assert printed[2] == r'world size=3 cause="no\"quote"'
    assert len(printed) == 3


def test_the_last_step_is_always_printed(synthetic: ModuleType) -> None:
    stream = io.StringIO()
    lines = ProgressLines(stream, every=1000, clock=Clock())
    lines.run_start(INFO)
    lines.step_end(synthetic.step_record(20_000))
    assert stream.getvalue().splitlines()[-1].startswith("step 20000/20000 ")


@pytest.mark.acceptance("number-C-39")
@pytest.mark.capability("C-39")
def test_the_rate_includes_pauses_and_excludes_the_first_step_and_expired_steps() -> None:
    clock = Clock()
    rate = Rate(window_seconds=60.0, clock=clock)
    assert rate.per_second == 0
    rate.add(100, first_seconds=2.0)
    assert rate.per_second == pytest.approx(50.0)
    for _ in range(10):
        clock.now += 1.0
        rate.add(100, first_seconds=0.0)
    assert rate.per_second == pytest.approx(1000 / 10)
    clock.now += 28.0
    rate.add(100, first_seconds=0.0)
    assert rate.per_second == pytest.approx(1100 / 38)
    for _ in range(200):
        clock.now += 1.0
        rate.add(100, first_seconds=0.0)
    assert rate.per_second == pytest.approx(100.0)


def test_the_rate_stores_a_bounded_number_of_points_for_steps_of_any_length() -> None:
    clock = Clock()
    rate = Rate(window_seconds=60.0, clock=clock)
    for _ in range(200_000):
        clock.now += 0.001
        rate.add(1, first_seconds=0.001)
    assert rate.per_second == pytest.approx(1000.0, rel=1e-3)
    assert len(rate._points) < 300


def test_a_clock_that_does_not_advance_causes_no_division_by_zero() -> None:
    rate = Rate(window_seconds=60.0, clock=Clock())
    rate.add(5, first_seconds=0.0)
    assert rate.per_second == 0


def _state(synthetic: ModuleType) -> LiveState:
    clock = Clock()
    state = LiveState(clock)
    state.start(INFO)
    for step in range(1201, 1235):
        clock.now += 0.5
        state.finish_step(synthetic.step_record(step, loss=2.01391))
    state.finish_evaluation(EVALUATION)
    return state


@pytest.mark.capability("A-78")
@pytest.mark.capability("A-78")
@pytest.mark.parametrize(
    ("trained", "said"),
    [(None, ""), (10_200_000, ""), (81_920, " trainable=81.9k")],
)
def test_the_first_line_has_the_number_of_trained_parameters_if_some_are_frozen(
    trained: int | None, said: str
) -> None:
    stream = io.StringIO()
    lines = ProgressLines(stream, every=20, clock=Clock())
    lines.run_start(replace(INFO, trainable_parameters=trained))
    assert f"parameters=10.2M{said} processes=2" in stream.getvalue()
    assert "tokens_per_step=8192" in stream.getvalue()


def test_the_bar_shows_all_facts_if_there_is_enough_space(synthetic: ModuleType) -> None:
    line = render_line(_state(synthetic), 150).plain
    assert line.startswith("docs-lm  ━")
    assert line.endswith(
        "1,234/20,000  6%  loss 2.0139  16.4k tokens/s  ETA 2h36m  2 processes  saved 1,200  heldOut 2.5131"
    )


def test_the_bar_shows_for_a_while_which_nodes_left_and_how_many_remain(
    synthetic: ModuleType,
) -> None:
    clock = Clock()
    state = LiveState(clock)
    state.start(replace(INFO, world_size=3, takes_over=True))
    assert state.saved_step is None
    state.activity = "evaluating heldOut 3/12"
    state.see(Event(EventType.WORLD, 0.0, 1207, 4, WORLD))
    line = render_line(state, 150).plain
    assert "2 processes  node 0 lost" in line and "evaluating" not in line
    clock.now += 60.0
    state.finish_step(synthetic.step_record(1208, world_size=1))
    line = render_line(state, 150).plain
    assert "lost" not in line and "process" not in line
    state.see(
        Event(
            EventType.WORLD,
            0.0,
            1208,
            5,
            {"world_size": 1, "cause": "node_lost", "detail": "node 1 lost"},
        )
    )
    assert "1 process  node 1 lost" in render_line(state, 150).plain


@pytest.mark.parametrize("width", range(4, 160, 3))
def test_the_bar_never_exceeds_the_terminal_unless_the_step_alone_does(
    synthetic: ModuleType, width: int
) -> None:
    line = render_line(_state(synthetic), width).plain
    assert "1,234/20,000" in line
    assert len(line) <= max(width, len("1,234/20,000"))


def test_a_narrow_bar_keeps_step_and_loss_longest(synthetic: ModuleType) -> None:
    line = render_line(_state(synthetic), 50).plain
    assert "1,234/20,000" in line and "loss 2.0139" in line
    assert "saved" not in line and "heldOut" not in line


def test_a_terminal_without_unicode_gets_ascii_characters(synthetic: ModuleType) -> None:
    line = render_line(_state(synthetic), 120, is_unicode=False).plain
    assert line.isascii()
    assert "##" in line or "--" in line


def test_a_bar_before_the_first_step_has_no_loss_and_no_eta() -> None:
    state = LiveState(Clock())
    state.start(INFO)
    line = render_line(state, 120).plain
    assert "loss –" in line and "ETA –" in line


def test_a_finished_bar_shows_the_total_time_instead_of_an_eta(
    synthetic: ModuleType,
) -> None:
    clock = Clock()
    state = LiveState(clock)
    state.start(INFO)
    clock.now += 75.0
    state.finish_step(synthetic.step_record(20_000))
    line = render_line(state, 120).plain
    assert "20,000/20,000  100%" in line and "in 1m15s" in line and "ETA" not in line


@pytest.fixture
def terminal() -> Iterator[tuple[io.TextIOWrapper, int]]:
    controller, follower = pty.openpty()
    stream = os.fdopen(follower, "w", encoding="utf-8")
    yield stream, controller
    stream.close()
    os.close(controller)


def _read(controller: int) -> str:
    os.set_blocking(controller, False)
    data = b""
    while True:
        try:
            data += os.read(controller, 1 << 16)
        except BlockingIOError:
            return data.decode()


def test_on_a_terminal_the_bar_is_drawn_and_events_scroll_above_it(
    terminal: tuple[io.TextIOWrapper, int],
    synthetic: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    stream, controller = terminal
    bar = build_progress(stream, every=10)
    assert isinstance(bar, ProgressBar)
    bar.run_start(INFO)
    for step in range(1201, 1300):
        bar.step_end(synthetic.step_record(step))
    bar.evaluation_progress("heldOut", 3, 12)
    bar.evaluation_end(EVALUATION)
    bar.event(Event(EventType.SAVE, 0.0, 1299, 3, {"checkpoint": "step-1299"}))
    bar.event(
        Event(
            EventType.FALLBACK,
            0.0,
            1299,
            3,
            {"checkpoint": "step-1200", "reason": "hash differs"},
        )
    )
    print("somebody else's line", file=sys.stdout)
    bar.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", _read(controller))
    assert (
        "10.2M parameters, 20,000 steps of 8,192 tokens, 2 processes, bf16-autocast, dataParallel"
        in text
    )
    assert "heldOut  loss 2.5131  perplexity 12.34  best so far" in text
    assert "step-1200 was passed over: hash differs" in text
    assert "saved 1,299" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("type_", "fields", "sentence"),
    [
        (
            EventType.STOP,
            {"reason": "signal", "saved": True},
            "stopped at step 1,204: stopped by a signal; its state is saved",
        ),
        (
            EventType.STOP,
            {"reason": "stop_file", "saved": False},
            "stopped at step 1,204: stopped by the stop file; its state is not saved",
        ),
        (
            EventType.COMPLETE,
            {"total_steps": 1204},
            "complete: all 1,204 steps are trained",
        ),
        (EventType.WARNING, {"message": "the volume fills"}, "warning: the volume fills"),
        (
            EventType.SAVE_FAILED,
            {"reason": "no space"},
            "the save of step 1,204 failed: no space",
        ),
        (EventType.FAILED, {"message": "lost"}, "failed at step 1,204: lost"),
    ],
)
def test_a_terminal_shows_events_as_sentences_and_not_as_log_lines(
    terminal: tuple[io.TextIOWrapper, int],
    monkeypatch: pytest.MonkeyPatch,
    type_: str,
    fields: dict[str, object],
    sentence: str,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    stream, controller = terminal
    bar = build_progress(stream, every=10)
    bar.run_start(INFO)
    bar.event(Event(type_, 0.0, 1204, 3, fields))
    bar.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", _read(controller))
    assert sentence in text
    assert "reason=" not in text and "saved=" not in text


def test_a_bar_of_a_new_rank_0_prints_no_introduction(
    terminal: tuple[io.TextIOWrapper, int],
    synthetic: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "150")
    stream, controller = terminal
    bar = build_progress(stream, every=10)
    bar.run_start(replace(INFO, takes_over=True))
    bar.event(Event(EventType.WORLD, 0.0, 1207, 4, WORLD))
    bar.step_end(synthetic.step_record(1208))
    bar.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", _read(controller))
    assert "parameters" not in text and "run directory" not in text
    assert 'world size=2 from=3 cause="node 0 lost" paused=0.12s' in text
    assert "2 processes  node 0 lost" in text.splitlines()[-1]


def test_without_a_terminal_only_plain_text_is_written(synthetic: ModuleType) -> None:
    stream = io.StringIO()
    progress = build_progress(stream, every=1)
    assert isinstance(progress, ProgressLines)
    progress.run_start(INFO)
    progress.step_end(synthetic.step_record(1))
    progress.close()
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"), (0.0000004, "0.4µs"), (0.0123, "12.3ms"), (0.9994, "999ms"), (0.9996, "1.0s"),
        (12.34, "12.3s"), (59.96, "1m00s"), (75, "1m15s"), (3599.6, "1h00m"), (18720, "5h12m"),
        (172799, "2d00h"), (200000, "2d08h"), (4e8, "4,629d15h"), (-75, "-1m15s"), (float("nan"), "–"), (float("inf"), "–"),
    ],
)  # fmt: skip
def test_durations_are_formatted_for_readers(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers_are_formatted_for_readers() -> None:
    assert [short_count(n) for n in (0, 12, 999, 999.7, 1000, 41234, 999_499, 999_501, 10_200_000, 1.5e12, 1e18)] == [
        "0", "12", "999", "1k", "1k", "41.2k", "999k", "1M", "10.2M", "1.5T", "1e+18",
    ]  # fmt: skip
    assert [size(n) for n in (0, 1000, 1536, 123_456_789, 5 * 2**40)] == [
        "0 B",
        "0.98 KiB",
        "1.5 KiB",
        "118 MiB",
        "5 TiB",
    ]
    assert [real(x) for x in (2.41318, 0.0, 1e-7, 3e9, -2.5, float("nan"))] == [
        "2.4132",
        "0.0000",
        "1.000e-07",
        "3.000e+09",
        "-2.5000",
        "–",
    ]
    assert [compact(x) for x in (0.001, 2.5e-5, 12.3429, float("inf"))] == [
        "0.001",
        "2.5e-05",
        "12.34",
        "–",
    ]
    assert [percent(x) for x in (0, 1, 0.9834, 0.00001, 0.99999, float("nan"))] == [
        "0%",
        "100%",
        "98.3%",
        "<0.1%",
        ">99.9%",
        "–",
    ]
    assert [count(x) for x in (1234567, 0.4, float("nan"))] == ["1,234,567", "0", "–"]
    assert [utc(x) for x in (0.0, 1_770_000_000.9, 1e30, float("nan"))] == [
        "1970-01-01 00:00:00",
        "2026-02-02 02:40:00",
        "–",
        "–",
    ]


@pytest.mark.capability("O-31")
def test_each_rank_has_its_own_log_file_and_only_rank_0_writes_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path)
    for rank in (0, 1):
        logs = setup_logging(directory, rank=rank)
        logging.getLogger("evergrad_trainer.training.loop").info("quiet %d", rank)
        logging.getLogger("evergrad_trainer.training.loop").warning("loud %d", rank)
        logs.close()
    assert capsys.readouterr().err == "warning: loud 0\n"
    assert sorted(path.name for path in directory.logs.iterdir()) == [
        "node-0-rank-0.log",
        "node-0-rank-1.log",
    ]
    text = (directory.logs / "node-0-rank-1.log").read_text()
    assert re.search(
        r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} node 0 rank 1 INFO "
        r"evergrad_trainer\.training\.loop: quiet 1$",
        text,
        re.MULTILINE,
    )
    assert "WARNING evergrad_trainer.training.loop: loud 1" in text


def test_logging_leaves_no_handler_after_it_is_closed_and_appends_when_opened_again(
    tmp_path: Path,
) -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    for _ in range(2):
        logs = setup_logging(RunDirectory(tmp_path), rank=3, node=1)
        EventLog().event(Event(EventType.STOP, 1.0, 5, 2, {"reason": "signal"}))
        logs.close()
    assert (root.handlers, root.level) == (handlers, level)
    lines = (tmp_path / "logs" / "node-1-rank-3.log").read_text().splitlines()
    assert len(lines) == 2
    assert lines[0].endswith(
        'event {"type":"stop","time":1.0,"step":5,"generation":2,"reason":"signal"}'
    )


def test_a_python_warning_goes_to_the_log_of_its_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = setup_logging(RunDirectory(tmp_path), rank=1)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old option", DeprecationWarning, stacklevel=1)
    logs.close()
    assert "old option" in (tmp_path / "logs" / "node-0-rank-1.log").read_text()
    assert capsys.readouterr().err == ""
