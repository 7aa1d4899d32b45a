"""A start reports the changes since the previous start: its file, files of a task, and versions."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evergrad_manifest.derive import HorizonNumbers
from evergrad_trainer.base.records import EventType
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.worker import run_records
from evergrad_trainer.worker.run_records import _announce_versions, _changed_files
from evergrad_trainer.worker.session import Session


def warnings_of(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    said: list[str] = []

    def emit(type_: str, fields: dict[str, Any]) -> None:
        assert type_ == EventType.WARNING
        said.append(fields["message"])

    session = cast(Session, SimpleNamespace(emit=emit))
    _announce_versions(session, {"versions": old}, {"versions": new})
    return said


def test_a_resume_with_another_torch_gives_a_warning_with_both_versions() -> None:
    old = {"evergrad": "0.1", "torch": "2.12", "transformers": "5.0", "python": "3.11"}
    (message,) = warnings_of(old, {**old, "torch": "2.13", "python": "3.12"})
    assert "torch 2.12 then, 2.13 now" in message and "evergrad" not in message


@pytest.mark.parametrize("old", [{}, {"torch": None}, {"torch": "2.13", "python": "3.10"}])
def test_equal_and_unrecorded_versions_give_no_warning(
    old: dict[str, Any],
) -> None:
    assert warnings_of(old, {"torch": "2.13", "python": "3.11"}) == []


def test_a_run_records_its_model_at_each_start_and_keeps_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        run_records, "resolved_record", lambda *_, model, **__: {"model": model}
    )
    began = {"transformers": "5.0", "config": {"key": 1}}
    later = {"transformers": "5.1", "config": {"key": 1, "later": 2}}
    latest = {"transformers": "5.2", "config": {"key": 1, "later": 2, "latest": 3}}

    def record(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
        plan = SimpleNamespace(
            run=None,
            prepared=None,
            numbers=HorizonNumbers(1, 1, 1, 1.0, 1, 1, 1, 0, 0),
            base_directory=tmp_path,
            run_directory=tmp_path,
            model=SimpleNamespace(describe=lambda: now),
        )
        facts: dict[str, Any] = {
            "plan": plan,
            "identity": None,
            "progress": SimpleNamespace(run_id="id"),
            "data": SimpleNamespace(train=SimpleNamespace(start=None)),
            "begun_from": None,
        }
        written = run_records._build_record(cast(Session, SimpleNamespace(**facts)), before)
        return {key: value for key, value in written.items() if "odel" in key}

    # The first one is stored only if it differs.
    assert record(began, {}) == {"model": began}
    assert record(began, {"model": began}) == {"model": began}
    upgraded = record(later, {"model": began})
    assert upgraded == {"model": later, "firstModel": began}
    assert record(latest, upgraded) == {"model": latest, "firstModel": began}
    assert record(began, upgraded) == {"model": began}


def test_changes_that_a_killed_start_did_not_announce_are_announced_by_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class KilledError(Exception):
        pass

    def kill(*facts: Any, **more: Any) -> None:
        raise KilledError

    directory, said = RunDirectory(tmp_path), list[tuple[str, dict[str, Any]]]()

    def start(rate: str, steps: int) -> None:
        """One with that learning rate and horizon, as far as the file is concerned."""
        observers = SimpleNamespace(run_start=lambda info: None, event=lambda event: None)
        record = {"manifest": {"rate": rate}, "derived": {"totalSteps": steps}}
        training = SimpleNamespace(files={})
        run = SimpleNamespace(metadata=SimpleNamespace(name="run"), training=training)
        plan = SimpleNamespace(
            run=run,
            command=(),
            task_files={},
            tokenizer={},
            process_start=0.0,
            numbers=SimpleNamespace(total_steps=steps),
        )
        session = SimpleNamespace(
            world=SimpleNamespace(is_main=True, size=1, generation=1),
            plan=plan,
            progress=SimpleNamespace(finished_steps=0),
            directory=directory,
            observers=observers,
            task_before={},
            release_events=lambda: None,
            emit=lambda type_, fields: said.append((type_, fields)),
        )
        monkeypatch.setattr(run_records, "_build_record", lambda *parts: record)
        monkeypatch.setattr(
            run_records,
            "changed_settings",
            lambda old, new: [("rate", old["rate"], rate)] if old["rate"] != rate else [],
        )
        run_records.announce(cast(Any, session), cast(Any, SimpleNamespace(kernels={})))

    monkeypatch.setattr(run_records, "from_wire", lambda manifest: manifest)
    monkeypatch.setattr(run_records, "describe_run", lambda *parts: None)
    monkeypatch.setattr(run_records, "record_process", lambda *parts, **facts: {})
    monkeypatch.setattr(
        run_records,
        "_announce_extension",
        lambda session, from_steps: session.emit("extended", {"from": from_steps}),
    )
    start("low", 8)
    assert said == []
    with monkeypatch.context() as dying:
        dying.setattr(run_records, "record_process", kill)
        with pytest.raises(KilledError):
            start("high", 10)
    recorded = directory.read_resolved()
    assert recorded is not None and recorded["manifest"] == {"rate": "high"}
    start("high", 10)
    changes = [{"path": "rate", "old": "low", "new": "high"}]
    told = [("changed", {"changes": changes}), ("extended", {"from": 8})]
    assert said == told
    # After they were reported, they are not changes any more.
    start("high", 10)
    assert said == told
    recorded = directory.read_resolved()
    assert recorded is not None and "announced" not in recorded


def test_changed_files_of_a_task_are_reported_with_both_hashes() -> None:
    before, now = {"mine.py": "a", "table.py": "b"}, {"mine.py": "c", "other.py": "d"}
    assert _changed_files(before, now) == [
        ("spec.training.recipe (mine.py)", "a", "c"),
        ("spec.training.recipe (other.py)", "(absent)", "d"),
        ("spec.training.recipe (table.py)", "b", "(absent)"),
    ]
    # A checkpoint of an older version does not contain the task's files.
    assert _changed_files({}, now) == []


def test_compiled_kernels_are_not_written_again_in_the_next_world(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known: list[int] = []

    def save(folder: Path, device: Any, *, loaded_bytes: int) -> int:
        known.append(loaded_bytes)
        return 700

    monkeypatch.setattr(run_records, "save_compiled", save)
    monkeypatch.setattr(run_records, "should_compile", lambda runtime, device: True)
    plan = SimpleNamespace(
        process_start=0.0, run=SimpleNamespace(training=SimpleNamespace(runtime=None))
    )
    facts: dict[str, Any] = {
        "mark": lambda name: None,
        "plan": plan,
        "is_announced": False,
        "world": SimpleNamespace(device="cpu", is_main=True),
        "directory": SimpleNamespace(compiled=tmp_path),
    }
    session = cast(Session, SimpleNamespace(**facts, compiled_bytes=0, marks={}))
    for _ in range(2):
        run_records.announce_first_step(session)
    assert known == [0, 700]
