"""A run directory as the history of its run, and the page that shows it."""

import io
import json
import socket
import struct
import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import synthetic_run as synthetic

from evergrad_cli.local import run_page
from evergrad_cli.local.run_files import RunFiles
from evergrad_cli.local.run_page import follow, serving_files
from evergrad_trainer.observers.account_files import account
from evergrad_trainer.observers.history import read_history

BEGIN = 1_770_000_000.0


def event(at: float, kind: str, **fields: Any) -> str:
    row = {"type": kind, "time": BEGIN + at, "step": 0, "generation": 1, **fields}
    return json.dumps(row) + "\n"


def start(at: float, **fields: Any) -> str:
    values = {"run": "docs-lm", "world_size": 2, "total_steps": 400} | fields
    return event(at, "start", **values)


def step(number: int, *, at: float | None = None, generation: int = 1) -> str:
    row = {
        "step": number,
        "generation": generation,
        "world_size": 2,
        "loss": 5 - number / 100,
        "tokens": 100,
        "step_seconds": 0.1,
        "time": BEGIN + (number if at is None else at),
    }
    return json.dumps(row) + "\n"


def append(path: Path, *lines: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(lines)


@pytest.fixture
def events(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def follow_through(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *acts: Callable[[], None]
) -> list[dict[str, Any]]:
    """Return the updates of a page: one, and one more after each of ``acts``."""
    is_over, left, stream = threading.Event(), list(acts), io.BytesIO()

    def act(_: float) -> bool:
        if left:
            left.pop(0)()
        else:
            is_over.set()
        return True

    monkeypatch.setattr(run_page, "UPDATE_SECONDS", 0.0)
    monkeypatch.setattr(is_over, "wait", act)
    follow(directory, stream, is_over)
    lines = stream.getvalue().splitlines()
    return [json.loads(one[6:]) for one in lines if one.startswith(b"data: ")]


def test_a_page_opened_before_the_first_event_gets_the_whole_status_with_it(
    tmp_path: Path, events: Path, metrics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events.touch()
    # Rows may be read before the event that precedes them, because the files are read one after another.
    updates = follow_through(
        tmp_path,
        monkeypatch,
        lambda: append(metrics, step(1)),
        lambda: append(events, start(0.0)),
        lambda: append(metrics, step(2)),
    )
    before, _, begun, after = updates
    assert (before["beganAt"], before["status"]["phase"]) == (0.0, "Waiting")
    # If the beginning differs, the page discards its content.
    assert begun["beganAt"] == after["beganAt"] == BEGIN
    assert begun["status"].keys() == before["status"].keys()
    assert (begun["status"]["run"], begun["status"]["step"]) == ("docs-lm", 1)
    assert begun["steps"]["from"] == 0 and begun["steps"]["x"] == [1]
    assert begun["times"]["x"] == [0]
    # Afterwards it receives only new items.
    assert "run" not in after["status"] and after["steps"]["from"] == 1
    assert after["times"]["x"] == [2]


def test_a_checkpoint_has_the_saved_step_and_not_the_step_of_its_report(
    tmp_path: Path, events: Path
) -> None:
    saved = event(57, "save", step=57, checkpoint="step-50.g1", bytes=1)
    append(events, start(0), saved)
    files = RunFiles(tmp_path)
    assert files.look(BEGIN + 60)["checkpointStep"] == 50
    assert list(files.history.checkpoints.newest) == [[57.0, 50]]


@pytest.mark.parametrize("others", [0, 100, 300])
def test_a_row_that_a_frozen_process_writes_late_is_not_counted_as_progress(
    tmp_path: Path, events: Path, metrics: Path, others: int
) -> None:
    """It has step 101 of generation 1; the others continued from that step in generation 2."""
    own = [step(number, generation=2) for number in range(101, 401)]
    rows = [
        *map(step, range(1, 101)),
        *own[: 300 - others],
        step(101),
        *own[300 - others :],
    ]
    append(events, start(0))
    append(metrics, *rows)
    results = [
        {"name": "heldOut", "step": number, "generation": generation, "loss": 2.0}
        for number, generation in ((50, 1), (150, 2), (200, 2), (101, 1))
    ]
    append(tmp_path / "evaluation.jsonl", *(json.dumps(one) + "\n" for one in results))
    files = RunFiles(tmp_path)
    status = files.look(BEGIN + 500)
    assert (status["step"], status["loss"]) == (400, 1.0)
    assert list(files.history.steps.x) == list(range(1, 401))
    assert list(files.history.evaluations["heldOut"].x) == [50, 150, 200]


def test_rows_of_generations_that_restart_are_counted(
    tmp_path: Path, events: Path, metrics: Path
) -> None:
    """A user has removed only the checkpoints; a row of the first generation 1 arrives late before that."""
    append(events, start(0), start(50, generation=2))
    append(metrics, *map(step, range(1, 52)))
    append(metrics, *(step(n, at=n, generation=2) for n in range(51, 101)), step(52))
    evaluated = [(50, 1, 50), (100, 2, 100), (52, 1, 101)]
    results = [
        {"name": "heldOut", "step": n, "generation": one, "loss": at, "time": BEGIN + at}
        for n, one, at in evaluated
    ]
    append(tmp_path / "evaluation.jsonl", *(json.dumps(one) + "\n" for one in results))
    files = RunFiles(tmp_path)
    assert files.look(BEGIN + 100)["step"] == 100

    append(events, start(1000))
    append(metrics, *(step(n, at=1000 + n) for n in range(1, 61)))
    anew = {"name": "heldOut", "step": 50, "generation": 1, "loss": 7.0}
    append(tmp_path / "evaluation.jsonl", json.dumps(anew | {"time": BEGIN + 1050}) + "\n")
    status = files.look(BEGIN + 1060)
    assert (status["step"], status["updatedSecondsAgo"]) == (60, 0.0)
    assert list(files.history.steps.x) == list(range(1, 61))
    assert list(files.history.evaluations["heldOut"].x) == [50]


def test_a_clock_that_goes_back_causes_no_negative_times(
    tmp_path: Path, events: Path, metrics: Path
) -> None:
    append(events, start(0), event(100, "save", step=50, checkpoint="step-50"))
    append(events, start(-3600, generation=2))
    append(metrics, *map(step, range(1, 51)))
    append(metrics, *(step(n, at=n - 3650, generation=2) for n in range(51, 56)))
    files = RunFiles(tmp_path)
    status = files.look(BEGIN - 3500)
    assert status["phase"] == "Running"
    assert status["lostSeconds"] == {"process_started": 0.0}
    assert files.newest_time == BEGIN + 100
    assert [one[0] for one in files.history.events.newest] == [0.0, 100.0]
    assert min(files.history.times.x) >= 0


@pytest.mark.parametrize(
    "last",
    [
        [],
        [event(56, "alert", message="the loss rises")],
        [event(57, "failed", message="no memory"), event(57, "end", exit_code=70)],
    ],
)
def test_a_restart_costs_the_time_since_its_save_however_the_process_ended(
    tmp_path: Path, events: Path, last: list[str]
) -> None:
    append(events, start(0), event(50, "save", step=50, checkpoint="step-50"), *last)
    append(events, start(90, generation=2, resumed_from=50))
    assert RunFiles(tmp_path).look(BEGIN + 95)["lostSeconds"] == {"process_started": 40.0}


def test_a_restart_without_a_save_costs_the_whole_process(
    tmp_path: Path, events: Path
) -> None:
    append(events, start(0), event(30, "alert", message="the loss rises"))
    append(events, start(40, resumed_from=None))
    assert RunFiles(tmp_path).look(BEGIN + 50)["lostSeconds"] == {"process_started": 40.0}


def test_no_second_is_lost_twice(tmp_path: Path, events: Path) -> None:
    append(events, start(0), event(50, "save", step=50, checkpoint="step-50"))
    append(events, event(60, "world", cause="node_lost", paused_seconds=4.0))
    append(events, *(start(at, resumed_from=50) for at in (90, 120)))
    # A stop on request: the time until the next start is not lost.
    append(events, event(130, "save", step=60, checkpoint="step-60"))
    append(events, event(131, "stop", reason="signal"), start(200, resumed_from=60))
    append(events, start(210, resumed_from=60))
    lost = RunFiles(tmp_path).look(BEGIN + 220)["lostSeconds"]
    assert lost == {"node_lost": 4.0, "process_started": 36.0 + 30.0 + 10.0}


def test_short_pauses_add_up(tmp_path: Path, events: Path) -> None:
    pauses = [
        event(at, "world", cause="node_lost", paused_seconds=0.04) for at in range(100)
    ]
    append(events, start(0), *pauses)
    status = RunFiles(tmp_path).look(BEGIN + 100)
    assert (status["restarts"], status["lostSeconds"]) == (
        {"node_lost": 100},
        {"node_lost": 4.0},
    )


@pytest.mark.parametrize("ended", ["killed", "failed"])
def test_the_page_and_the_report_agree_on_the_cost_of_a_restart(
    tmp_path: Path, ended: str
) -> None:
    run = synthetic.RunWriter(tmp_path, total_steps=200)
    run.write(synthetic.Process(last=157, ended=ended))
    run.write(synthetic.Process(last=200, resumed_from=150, downtime_seconds=30.0))
    history = read_history(run.directory)
    report = account(history.steps, history.events, history.evaluations).lost_seconds
    between = 7 * synthetic.PAUSE_SECONDS
    cost = report["recompute"] + between + report["downtime"] + synthetic.STARTUP_SECONDS
    lost = RunFiles(tmp_path).look(run.now)["lostSeconds"]
    assert lost["process_started"] == pytest.approx(cost, abs=0.1)


def test_a_recreated_directory_is_read_from_its_start(
    tmp_path: Path, events: Path, metrics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(events, start(0))
    append(metrics, *map(step, range(1, 51)))

    def remove() -> None:
        events.unlink()
        metrics.unlink()

    def recreate() -> None:
        # As long as the old file, and longer: only the first lines show the difference.
        append(events, start(500))
        append(metrics, *(step(number, at=500 + number) for number in range(1, 61)))

    first, gone, anew, more = follow_through(
        tmp_path, monkeypatch, remove, recreate, lambda: append(metrics, step(61, at=561))
    )
    assert (first["beganAt"], first["status"]["step"]) == (BEGIN, 50)
    # The content that was read stays until there is something new.
    assert gone["beganAt"] == BEGIN and "steps" not in gone
    assert (anew["beganAt"], anew["status"]["step"]) == (BEGIN + 500, 60)
    assert anew["status"].keys() == first["status"].keys()
    assert anew["steps"]["x"] == list(range(1, 61))
    assert more["steps"]["x"] == [61]


def test_a_page_forgets_the_steps_of_a_metrics_file_that_was_recreated(
    tmp_path: Path, events: Path, metrics: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(events, start(0))
    append(metrics, *map(step, range(1, 51)))

    def recreate() -> None:
        metrics.unlink()
        append(metrics, step(1, at=500), step(2, at=501))

    first, forget, anew = follow_through(tmp_path, monkeypatch, recreate)
    # If the beginning differs, a page discards its content; a status with a run replaces the whole status.
    assert forget["beganAt"] != first["beganAt"] == anew["beganAt"] == BEGIN
    assert forget["status"]["run"] == "docs-lm" and "steps" not in forget
    assert (anew["steps"]["from"], anew["steps"]["x"]) == (0, [1, 2])
    assert anew["status"].keys() == first["status"].keys()


def test_a_truncated_file_is_read_from_its_start(tmp_path: Path, metrics: Path) -> None:
    append(metrics, *map(step, range(1, 51)))
    files = RunFiles(tmp_path)
    files.look(BEGIN)
    assert not files.is_another_run()
    append(metrics, step(51))
    assert not files.is_another_run()
    metrics.write_bytes(metrics.read_bytes()[:5000])
    assert files.is_another_run()


@pytest.mark.parametrize("path", ["/", "/live"])
def test_a_request_that_a_browser_cancels_prints_nothing_on_the_terminal(
    tmp_path: Path,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "events.jsonl").touch()
    process, is_through = ThreadingHTTPServer.process_request_thread, threading.Event()

    def process_to_its_end(*arguments: Any) -> None:
        process(*arguments)
        is_through.set()

    monkeypatch.setattr(ThreadingHTTPServer, "process_request_thread", process_to_its_end)
    with serving_files(tmp_path, port=0) as port:
        with socket.create_connection(("127.0.0.1", port)) as browser:
            request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
            browser.sendall(request.encode())
            # Closed immediately, with a reset.
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert is_through.wait(100)
    assert capsys.readouterr().err == ""


def test_an_error_of_the_page_itself_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("of the page itself")

    monkeypatch.setattr(run_page, "follow", fail)
    with (
        serving_files(tmp_path, port=0) as port,
        socket.create_connection(("127.0.0.1", port)) as browser,
    ):
        request = f"GET /live HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
        browser.sendall(request.encode())
        while browser.recv(4096):
            pass
    assert "ValueError: of the page itself" in capsys.readouterr().err
