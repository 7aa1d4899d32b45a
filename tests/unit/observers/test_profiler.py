"""The schedule of traces, and the files that they leave."""

import gzip
import json
import os
from pathlib import Path
from types import ModuleType

import pytest
import torch

from evergrad_manifest.training import Profile
from evergrad_trainer.base import torch_private
from evergrad_trainer.base.records import RunInfo
from evergrad_trainer.observers.profiler import (
    PARTIAL_SECONDS,
    Profiler,
    begin_trace,
    is_first,
    prune,
)


class FakeTrace:
    """A trace of nothing."""

    def __init__(self, heard: list[str]) -> None:
        self._heard = heard

    def start(self) -> None:
        self._heard.append("start")

    def stop(self) -> None:
        self._heard.append("stop")

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("{}")


def settings(**values: object) -> Profile:
    return Profile.model_validate(values)


@pytest.mark.parametrize(("every", "expected"), [(None, [4]), (3, [4, 7, 10]), (4, [4, 8])])
def test_traces_start_at_steps_that_follow_from_the_manifest(
    every: int | None, expected: list[int]
) -> None:
    given = {"steps": 2, "firstStep": 4} | ({} if every is None else {"every": every})
    found = [step for step in range(1, 12) if is_first(settings(**given), step)]
    assert found == expected


@pytest.mark.capability("C-46")
def test_each_window_is_one_file_and_the_newest_files_are_kept(
    synthetic: ModuleType, tmp_path: Path
) -> None:
    heard: list[str] = []
    given = settings(steps=2, firstStep=2, every=3, keep=2)
    profiler = Profiler(given, tmp_path / "profiles", begin=lambda _: FakeTrace(heard))
    for step in range(1, 12):
        heard.append(str(step))
        profiler.step_end(synthetic.step_record(step))
        if profiler._writing is not None:
            profiler._writing.join()
    profiler.close()
    # Steps 2 and 3, 5 and 6, 8 and 9, and 11, with which the run ends.
    windows = "1 start 2 3 stop 4 start 5 6 stop 7 start 8 9 stop 10 start 11 stop"
    assert " ".join(heard) == windows
    names = sorted(path.name.split(".")[0] for path in (tmp_path / "profiles").iterdir())
    assert names == ["step-11", "step-8"]


def test_the_file_is_a_trace_of_the_operations_of_the_steps(
    synthetic: ModuleType, tmp_path: Path
) -> None:
    profiler = Profiler(
        settings(steps=1, firstStep=2, memory=True), tmp_path, begin=begin_trace
    )
    profiler.step_end(synthetic.step_record(1))
    torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.step_end(synthetic.step_record(2))
    profiler.close()
    (path,) = tmp_path.glob("step-2.*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)


def test_a_start_before_a_window_is_traced_and_an_end_before_its_first_step_is_not(
    synthetic: ModuleType, tmp_path: Path
) -> None:
    heard: list[str] = []
    given = settings(steps=2, firstStep=2, every=3)
    before = Profiler(given, tmp_path, begin=lambda _: FakeTrace(heard))
    before.step_end(synthetic.step_record(4))
    before.close()
    assert heard == ["start", "stop"] and not list(tmp_path.iterdir())
    after = Profiler(given, tmp_path, begin=lambda _: FakeTrace(heard))
    known = RunInfo("docs", 1, 2, 10, 4, 8, 8, 1, "bf16", "dataParallel", "llama", "")
    after.run_start(known)
    after.step_end(synthetic.step_record(5))
    after.close()
    assert [path.name.split(".")[0] for path in tmp_path.iterdir()] == ["step-5"]


@pytest.mark.capability("A-35", "A-36", "A-62")
def test_the_history_of_device_memory_is_a_separate_file_next_to_the_trace(
    synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls to the device go through two functions. Replace them, because there is no device."""
    told: list[int | None] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch_private, "record_memory", told.append)
    monkeypatch.setattr(torch_private, "dump_memory", lambda path: Path(path).touch())
    given = settings(steps=1, firstStep=2, memory=True, maxEntries="20k")
    folder = tmp_path / "profiles"
    profiler = Profiler(given, folder, begin=lambda _: FakeTrace([]))
    profiler.step_end(synthetic.step_record(1))
    assert told == [20_000] and not folder.exists()
    profiler.step_end(synthetic.step_record(2))
    profiler.close()
    assert told == [20_000, None]
    kinds = sorted(
        path.name.rsplit(".", 3 if "trace" in path.name else 2)[1:]
        for path in folder.iterdir()
    )
    assert kinds == [["memory", "pickle"], ["trace", "json", "gz"]]


@pytest.mark.capability("A-79")
def test_the_memory_history_of_a_failed_first_step_is_kept_without_a_trace(
    synthetic: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int | None] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch_private, "record_memory", told.append)
    monkeypatch.setattr(torch_private, "dump_memory", lambda path: Path(path).touch())
    given = settings(steps=1, firstStep=2, memory=True)
    profiler = Profiler(given, tmp_path, begin=lambda _: FakeTrace([]))
    profiler.step_end(synthetic.step_record(1))
    # Step 2 has run out of memory: the process closes its observers and ends.
    profiler.close()
    assert told[-1] is None
    assert [path.name.split(".")[0] for path in tmp_path.iterdir()] == ["step-2"]
    assert [path.name.rsplit(".", 2)[1:] for path in tmp_path.iterdir()] == [
        ["memory", "pickle"]
    ]


def make_file(folder: Path, name: str, *, at: float) -> None:
    (folder / name).touch()
    os.utime(folder / name, (at, at))


def test_the_newest_trace_is_kept_after_a_run_went_back_to_an_earlier_step(
    tmp_path: Path,
) -> None:
    """Steps 20 and 30 were traced, then the run went back to a checkpoint of step 5, and 10 is traced again."""
    make_file(tmp_path, "step-10.a.1.trace.json.gz", at=1000.0)
    make_file(tmp_path, "step-20.a.1.trace.json.gz", at=2000.0)
    make_file(tmp_path, "step-30.a.1.trace.json.gz", at=3000.0)
    make_file(tmp_path, "step-10.a.2.memory.pickle", at=3999.0)
    make_file(tmp_path, "step-10.a.2.trace.json.gz", at=4000.0)
    prune(tmp_path, keep=2)
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {
        "step-10",
        "step-30",
    }
    prune(tmp_path, keep=1)
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {"step-10"}


def test_partial_traces_of_a_killed_process_are_removed_and_unfinished_ones_kept(
    tmp_path: Path,
) -> None:
    make_file(tmp_path, ".step-2.gone.1.partial.json.gz", at=1000.0)
    make_file(tmp_path, ".step-2.b.1.partial.json.gz", at=4000.0)
    make_file(tmp_path, "step-2.a.1.trace.json.gz", at=1000.0 + PARTIAL_SECONDS + 1)
    prune(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".step-2.b.1.partial.json.gz",
        "step-2.a.1.trace.json.gz",
    ]


def test_files_of_a_step_are_removed_together(tmp_path: Path) -> None:
    for name in (
        "step-2.a.1.trace.json.gz",
        "step-2.b.1.trace.json.gz",
        "step-10.a.1.trace.json.gz",
    ):
        (tmp_path / name).touch()
    (tmp_path / "notes.txt").touch()
    prune(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "step-10.a.1.trace.json.gz",
    ]


def test_a_trace_that_a_stop_interrupts_is_not_marked_complete(
    synthetic: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    one = Profiler(settings(steps=3, firstStep=3), tmp_path, begin=lambda _: FakeTrace([]))
    one.step_end(synthetic.step_record(2))
    for step in (3, 4):
        one.step_end(synthetic.step_record(step))
    one.close()
    assert "traced 2 of 3 steps, because the process stopped" in caplog.text
