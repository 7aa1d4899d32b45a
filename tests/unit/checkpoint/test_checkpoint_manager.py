"""The policy in a world of one: saving by value, failures, the fence, retention, restore and fallback."""

import errno
import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_state import read_plain_state

from evergrad_common.contract import ErrorKind
from evergrad_manifest.identity import hash_recipe
from evergrad_trainer.base.errors import (
    CheckpointError,
    FencedError,
    SaveError,
    VolumeError,
)
from evergrad_trainer.base.host_errors import trouble_of
from evergrad_trainer.checkpoint import catalog, faults, files, leases, save
from evergrad_trainer.checkpoint.generations import claim_generation
from evergrad_trainer.checkpoint.manifest import Candidate, Identity, Manifest
from evergrad_trainer.training.progress import TrainingProgress, published_step

MakeSolo = Callable[..., Any]
MakeState = Callable[[int], dict[str, torch.Tensor]]


class At:
    """Runs an action at one point, the requested number of times."""

    def __init__(self, point: str, action: Callable[[], object], *, times: int = 1) -> None:
        self._point, self._action, self._times = point, action, times

    def reached(self, point: str, rank: int) -> None:
        if point == self._point and self._times > 0:
            self._times -= 1
            self._action()


def refuse(number: int) -> Callable[[], None]:
    def action() -> None:
        raise OSError(number, os.strerror(number))

    return action


def flip_bit(path: Path, position: int = 70) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


# Saving


@pytest.mark.capability("T-14")
def test_a_save_is_an_event_with_its_facts_and_is_found_by_the_next_start(
    make_solo: MakeSolo,
) -> None:
    solo = make_solo()
    solo.save(10)
    ((type_, fields),) = solo.events
    assert type_ == "save"
    assert (
        fields["checkpoint"] == "step-10"
        and fields["kept"] == 1
        and fields["best"] is False
    )
    assert fields["bytes"] == sum(
        path.stat().st_size
        for path in (solo.directory / "step-10").iterdir()
        if path.name != "manifest.json"
    )
    assert fields["blocking_seconds"] > 0 and fields["seconds"] > 0
    assert solo.manager.published.step == 10
    assert make_solo().restore() == 10


def test_checkpoints_that_later_steps_need_are_kept_longest(make_solo: MakeSolo) -> None:
    solo = make_solo(keep=1)
    solo.manager.anchors = frozenset({20})
    for step in (10, 20, 30, 40):
        solo.save(step)
    assert solo.names() == ["step-20", "step-40"]


@pytest.mark.capability("O-59")
def test_an_asynchronous_save_holds_the_values_at_the_time_of_the_call(
    make_solo: MakeSolo, make_state: MakeState
) -> None:
    gate = threading.Event()
    solo = make_solo(hook=At(faults.MID_SHARD, lambda: gate.wait(30)))
    state, extra = make_state(10), {"step": 10, "cursor": {"docs": 1}}
    solo.manager.save(10, state, extra=extra)
    for value in state.values():
        value.zero_()
    extra["cursor"] = {"docs": 2}
    solo.manager.poll()
    assert solo.events == []  # still under way
    gate.set()
    solo.manager.wait()
    assert solo.types() == ["save"]
    loaded = make_state(0)
    restored = make_solo().manager.restore(loaded)
    assert restored is not None and restored.extra == {"step": 10, "cursor": {"docs": 1}}
    assert all(torch.equal(value, make_state(10)[key]) for key, value in loaded.items())


def test_poll_reports_a_finished_save_once(
    make_solo: MakeSolo, make_state: MakeState
) -> None:
    solo = make_solo()
    solo.manager.save(10, make_state(10), extra={})
    solo.manager._flight.background.join()
    solo.manager.poll()
    solo.manager.poll()
    assert solo.types() == ["save"]


def test_a_second_save_waits_for_the_first(
    make_solo: MakeSolo, make_state: MakeState
) -> None:
    is_second = threading.Event()
    solo = make_solo(hook=At(faults.BEFORE_FSYNC, lambda: is_second.wait(60)))
    solo.manager.save(10, make_state(10), extra={"step": 10})
    assert solo.types() == []
    # The first save cannot have ended before this point. If it has ended when the second returns, the second
    # waited for it.
    is_second.set()
    assert solo.manager.save(20, make_state(20), extra={"step": 20}) > 0.0
    assert solo.types() == ["save"]
    solo.manager.wait()
    assert solo.names() == ["step-10", "step-20"]


def test_a_synchronous_save_is_complete_when_it_returns(
    make_solo: MakeSolo, make_state: MakeState
) -> None:
    solo = make_solo(asynchronous=False)
    seconds = solo.manager.save(10, make_state(10), extra={})
    assert solo.types() == ["save"]
    assert solo.events[0][1]["blocking_seconds"] == seconds >= solo.events[0][1]["seconds"]


@pytest.mark.skipif(
    sys.platform != "linux", reason="threads have a priority of their own on Linux only"
)
def test_a_background_save_runs_at_low_priority_and_an_awaited_save_does_not(
    make_solo: MakeSolo, make_state: MakeState
) -> None:
    found: list[int] = []
    hook = At(
        faults.BEFORE_FSYNC,
        lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())),
        times=2,
    )
    solo = make_solo(hook=hook)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    solo.manager.save(10, make_state(10), extra={})
    solo.manager.wait()
    solo.save(20)
    assert found == [max(before, 10), before]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.acceptance("input-O-64")
def test_a_state_or_extra_that_cannot_be_stored_is_refused_at_the_call(
    make_solo: MakeSolo, make_state: MakeState
) -> None:
    solo = make_solo()
    with pytest.raises(TypeError, match=r"optimizer\.lr \(float\)"):
        solo.manager.save(10, {**make_state(10), "optimizer.lr": 0.1}, extra={})
    with pytest.raises(TypeError, match="not JSON serializable"):
        solo.manager.save(10, make_state(10), extra={"set": {1}})
    with pytest.raises(ValueError, match="not JSON compliant"):
        solo.manager.save(10, make_state(10), extra={"loss": float("nan")})
    solo.save(10)
    assert solo.types() == ["save"]


def test_saving_the_same_state_of_a_step_twice_leaves_one_checkpoint(
    make_solo: MakeSolo,
) -> None:
    solo = make_solo()
    solo.save(10)
    solo.save(10, best=True)
    assert solo.names() == ["step-10"]
    assert solo.types() == ["save", "save"]
    assert json.loads((solo.directory / "best.json").read_text())["checkpoint"] == "step-10"
    assert os.listdir(solo.directory / ".tmp") == []


@pytest.mark.capability("O-58")
def test_another_state_of_a_published_step_gets_its_own_name_and_the_newest_generation_loads(
    make_solo: MakeSolo, make_state: MakeState
) -> None:
    make_solo(keep=5).save(10)
    for _ in range(2):
        solo = make_solo(keep=5)
        for extra in ({"attempt": 1}, {"attempt": 2}):
            solo.manager.save(10, make_state(11), extra=extra, wait=True)
    assert solo.names() == [
        "step-10",
        "step-10.g2",
        "step-10.g2.2",
        "step-10.g3",
        "step-10.g3.2",
    ]
    restored = make_solo().manager.restore(make_state(0))
    assert (restored.path.name, restored.generation, restored.extra) == (
        "step-10.g3.2",
        3,
        {"attempt": 2},
    )


def test_a_damaged_checkpoint_of_the_same_step_is_not_overwritten(
    make_solo: MakeSolo,
) -> None:
    make_solo().save(10)
    flip_bit(make_solo().directory / "step-10" / "rank-00000.bin")
    make_solo().save(10)
    solo = make_solo()
    assert solo.names() == ["step-10", "step-10.g3"]
    assert solo.restore() == 10


# Failures


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize(
    "point",
    [faults.MID_SHARD, faults.BEFORE_FSYNC, faults.BEFORE_MANIFEST, faults.BEFORE_RENAME],
)
def test_a_disk_error_fails_the_save_leaves_no_files_and_the_next_save_succeeds(
    make_solo: MakeSolo, point: str, number: int
) -> None:
    make_solo().save(10)
    solo = make_solo(hook=At(point, refuse(number)))
    solo.save(20)
    assert solo.types() == ["save_failed"]
    assert f"rank 0: [Errno {number}] {os.strerror(number)}" in solo.events[0][1]["reason"]
    assert solo.events[0][1]["failures"] == 1
    assert solo.manager.published is None
    assert solo.names() == ["step-10"] and os.listdir(solo.directory / ".tmp") == []
    assert make_solo().restore() == 10
    solo = make_solo()
    solo.save(20)
    assert solo.names() == ["step-10", "step-20"]


def test_an_error_after_the_rename_does_not_unpublish(make_solo: MakeSolo) -> None:
    make_solo().save(10)
    solo = make_solo(keep=1, hook=At(faults.RETENTION, refuse(errno.EIO)))
    solo.save(20)
    assert solo.types() == ["save"]
    assert make_solo().restore() == 20


def test_too_many_failures_in_a_row_raise_and_a_success_resets_the_count(
    make_solo: MakeSolo,
) -> None:
    solo = make_solo(
        hook=At(faults.MID_SHARD, refuse(errno.ENOSPC), times=2), maxFailures=3
    )
    solo.save(10)
    solo.save(20)
    solo.save(30)
    assert [fields.get("failures") for _, fields in solo.events] == [1, 2, None]
    failing = make_solo(
        hook=At(faults.MID_SHARD, refuse(errno.ENOSPC), times=9), maxFailures=2
    )
    failing.save(40)
    words = r"2 saves in a row have failed; the last one: rank 0: .*No space left on device"
    with pytest.raises(SaveError, match=words) as caught:
        failing.save(50)
    assert failing.types() == ["save_failed", "save_failed"]
    assert {fields["trouble"] for _, fields in failing.events} == {"no_space"}
    assert caught.value.kind is ErrorKind.ENVIRONMENT, "the run goes on once there is room"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(
    "point",
    [faults.MID_SHARD, faults.BEFORE_FSYNC, faults.BEFORE_MANIFEST, faults.BEFORE_RENAME],
)
def test_on_a_full_volume_the_oldest_checkpoint_is_removed_and_the_save_succeeds(
    make_solo: MakeSolo, point: str, number: int
) -> None:
    start = make_solo()
    for step in (10, 20, 30):
        start.save(step)
    solo = make_solo(hook=At(point, refuse(number)), keep=3)
    solo.save(40)
    assert solo.types() == ["save", "warning"]
    assert solo.events[0][1]["removed"] == "step-10" and solo.events[0][1]["kept"] == 3
    assert "step-10 was removed" in solo.events[1][1]["message"]
    assert solo.names() == ["step-20", "step-30", "step-40"]
    assert os.listdir(solo.directory / ".tmp") == []
    assert make_solo().restore() == 40


def test_a_full_volume_never_removes_the_newest_or_a_pinned_checkpoint(
    make_solo: MakeSolo, make_state: MakeState
) -> None:
    start = make_solo(keep=9)
    start.save(10, best=True)
    start.manager.save(20, make_state(20), extra={"step": 20, "permanent": True}, wait=True)
    start.save(30)
    start.save(40)
    solo = make_solo(
        hook=At(faults.MID_SHARD, refuse(errno.ENOSPC), times=9), keep=9, maxFailures=9
    )
    solo.manager.anchors = frozenset({30})
    solo.save(50)
    assert solo.types() == ["save_failed"]
    assert solo.names() == ["step-10", "step-20", "step-30", "step-40"]
    solo.manager.anchors = frozenset()
    with leases.hold(solo.directory, "step-30"):
        solo.save(50)
    assert solo.names() == ["step-10", "step-20", "step-30", "step-40"]

    # Only one may still be removed; the second attempt fails as well, and nothing more is removed.
    solo.save(50)
    assert solo.names() == ["step-10", "step-20", "step-40"]
    assert solo.types() == ["save_failed", "save_failed", "save_failed", "warning"]
    solo.save(60)
    assert solo.names() == ["step-10", "step-20", "step-40"]


def test_a_pointer_that_cannot_be_written_does_not_prevent_retention(
    make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = make_solo()
    for step in (10, 20):
        start.save(step)
    write, refused = catalog.replace_durably, []

    def write_if_retired(path: Path, data: bytes) -> None:
        if (path.parent / "step-10").exists():
            refused.append(path.name)
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))
        write(path, data)

    monkeypatch.setattr(catalog, "replace_durably", write_if_retired)
    solo = make_solo(keep=2)
    solo.save(30)
    assert refused == ["latest"]
    assert solo.types() == ["save"] and solo.names() == ["step-20", "step-30"]
    assert json.loads((solo.directory / "latest").read_bytes())["checkpoint"] == "step-30"


def test_the_last_failed_save_names_the_newest_checkpoint_and_the_remedy(
    make_solo: MakeSolo,
) -> None:
    make_solo().save(10)
    solo = make_solo(hook=At(faults.MID_SHARD, refuse(errno.EDQUOT)), maxFailures=1)
    with pytest.raises(SaveError) as caught:
        solo.save(20)
    assert caught.value.trouble == "no_space"
    words = str(caught.value)
    assert (
        "The newest valid checkpoint is step-10, and a restart continues from it." in words
    )
    assert "enlarge the volume or its quota; then start the run again" in words


def test_poll_raises_at_the_last_allowed_failure(
    make_solo: MakeSolo, make_state: MakeState
) -> None:
    solo = make_solo(hook=At(faults.MID_SHARD, refuse(errno.ENOSPC)), maxFailures=1)
    solo.manager.save(10, make_state(10), extra={})
    solo.manager._flight.background.join()
    with pytest.raises(SaveError):
        solo.manager.poll()


def test_a_directory_that_vanishes_fails_saves_and_does_not_stop_training(
    make_solo: MakeSolo,
) -> None:
    solo = make_solo()
    shutil.rmtree(solo.directory)
    solo.save(10)
    solo.manager.poll()
    assert solo.types() == ["save_failed"]
    assert "No such file or directory" in solo.events[0][1]["reason"]


def test_a_failed_snapshot_is_a_failed_save(
    make_solo: MakeSolo, make_state: MakeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    solo = make_solo()

    def stage(*_: object, **__: object) -> None:
        raise MemoryError("no memory for the copy")

    monkeypatch.setattr(solo.manager._stager, "stage", stage)
    solo.save(10)
    assert solo.events[0][1]["reason"] == "rank 0: no memory for the copy"


def test_a_torch_error_with_one_process_is_not_a_lost_peer(
    make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("an error of the library")

    monkeypatch.setattr(save, "dcp_save", fail)
    solo = make_solo()
    solo.save(10)
    ((type_, fields),) = solo.events
    assert (type_, fields["trouble"]) == ("save_failed", "other")


# The fence


def test_the_older_of_two_runs_on_one_directory_cannot_publish(make_solo: MakeSolo) -> None:
    older = make_solo()
    older.save(10)
    newer = make_solo()
    with pytest.raises(FencedError, match="generation 2 has claimed this run directory"):
        older.save(20)
    assert older.types() == ["save", "save_failed"]
    assert older.names() == ["step-10"] and os.listdir(older.directory / ".tmp") == []
    newer.save(15)
    assert newer.names() == ["step-10", "step-15"]
    with pytest.raises(FencedError):
        older.save(30)


def test_poll_detects_a_newer_claim_without_raising(make_solo: MakeSolo) -> None:
    solo = make_solo()
    solo.manager.poll()
    assert not solo.manager.is_fenced()
    claim_generation(solo.directory)
    solo.manager.poll()
    assert not solo.manager.is_fenced()  # it checks every few seconds only
    solo.manager._fence._next_look = 0.0
    solo.manager.poll()
    assert solo.manager.is_fenced()
    with pytest.raises(FencedError, match="generation 2 has claimed"):
        solo.save(20)


@pytest.mark.parametrize(
    "point",
    [
        faults.AFTER_SHARDS,
        faults.BEFORE_MANIFEST,
        faults.BEFORE_RENAME,
        faults.AFTER_RENAME,
    ],
)
def test_a_claim_during_a_save_leaves_nothing_published(
    make_solo: MakeSolo, tmp_path: Path, point: str
) -> None:
    solo = make_solo(hook=At(point, lambda: claim_generation(tmp_path / "checkpoints")))
    with pytest.raises(FencedError):
        solo.save(10)
    assert solo.names() == []
    assert not (solo.directory / "latest").exists()


def test_a_claim_during_a_save_of_an_already_published_state_leaves_that_checkpoint(
    make_solo: MakeSolo, tmp_path: Path
) -> None:
    make_solo().save(10)
    action = At(faults.AFTER_RENAME, lambda: claim_generation(tmp_path / "checkpoints"))
    solo = make_solo(hook=action)
    with pytest.raises(FencedError):
        solo.save(10)
    assert solo.names() == ["step-10"]
    assert make_solo().restore() == 10


# Retention


@pytest.mark.acceptance("8d-7b")
@pytest.mark.capability("O-55", "C-49")
def test_only_the_newest_checkpoints_are_kept(make_solo: MakeSolo) -> None:
    solo = make_solo(keep=2)
    for step in (10, 20, 30, 40):
        solo.save(step)
    assert solo.names() == ["step-30", "step-40"]
    assert [fields["kept"] for _, fields in solo.events] == [1, 2, 2, 2]
    assert os.listdir(solo.directory / ".trash") == []


@pytest.mark.acceptance("8d-7b")
@pytest.mark.capability("O-20", "O-54", "O-56")
def test_a_permanent_checkpoint_is_kept_although_a_later_start_has_other_settings(
    make_solo: MakeSolo, make_state: MakeState
) -> None:
    solo = make_solo(keep=1)
    for step in (10, 20, 30):
        extra = {"step": step, **({"permanent": True} if step == 20 else {})}
        solo.manager.save(step, make_state(step), extra=extra, wait=True)
    assert solo.names() == ["step-20", "step-30"]
    # The mark is in the checkpoint, so another file, another process and a lost pointer do not remove it.
    again = make_solo(keep=1)
    again.save(40)
    again.save(50)
    assert again.names() == ["step-20", "step-50"]


@pytest.mark.capability("T-48")
def test_the_best_checkpoint_is_kept_until_there_is_a_better_one(
    make_solo: MakeSolo,
) -> None:
    solo = make_solo(keep=1)
    for step in (10, 20, 30):
        solo.save(step, best=step == 10)
    assert solo.names() == ["step-10", "step-30"]
    again = make_solo(keep=1)
    assert again.restore() == 30
    again.save(40, best=True)
    again.save(50)
    assert again.names() == ["step-40", "step-50"]


def test_a_best_mark_of_a_missing_checkpoint_is_moved_and_a_valid_mark_is_kept(
    make_solo: MakeSolo,
) -> None:
    solo = make_solo(keep=2)
    for step in (10, 20):
        solo.save(step)
    solo.manager.mark_best(20)
    # A start moves a damaged checkpoint away, and continues with one that has another best.
    shutil.rmtree(solo.directory / "step-20")
    solo.manager.mark_best(10)
    pointer = solo.directory / "best.json"
    assert json.loads(pointer.read_text())["checkpoint"] == "step-10"
    written = pointer.stat().st_ino
    solo.manager.mark_best(10)
    assert pointer.stat().st_ino == written
    for step in (30, 40):
        solo.save(step)
    assert solo.names() == ["step-10", "step-30", "step-40"]


def test_the_best_checkpoint_stays_pinned_if_a_kill_prevented_its_pointer(
    make_solo: MakeSolo,
) -> None:
    solo = make_solo(keep=1)
    solo.save(10, best=True)
    (solo.directory / "best.json").unlink()
    solo.save(20)
    assert solo.names() == ["step-10", "step-20"]


def test_damaged_checkpoints_do_not_count_and_are_not_removed(make_solo: MakeSolo) -> None:
    solo = make_solo(keep=2)
    solo.save(10)
    solo.save(20)
    os.truncate(solo.directory / "step-20" / "rank-00000.bin", 5)
    solo.save(30)
    assert solo.names() == ["step-10", "step-20", "step-30"]
    assert solo.events[-1][1]["kept"] == 2


def test_an_unreadable_checkpoint_does_not_prevent_the_retirement_of_others(
    make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    solo = make_solo(keep=2)
    solo.save(10)
    solo.save(20)
    hash_file = files.hash_file

    def fail(path: Path, **options: Any) -> str:
        if path.parent.name == "step-10":
            refuse(errno.EIO)()
        return hash_file(path, **options)

    monkeypatch.setattr(files, "hash_file", fail)
    for step in (30, 40):
        solo.save(step)
    assert solo.names() == ["step-10", "step-30", "step-40"]
    assert solo.events[-1][1]["kept"] == 2


def test_a_checkpoint_that_cannot_be_removed_does_not_prevent_the_retirement_of_others(
    make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    solo = make_solo(keep=3)
    for step in (10, 20, 30):
        solo.save(step)
    rename = files.rename_to_free_name

    def fail(source: Path, target: Path) -> bool:
        if source.name == "step-10":
            refuse(errno.EACCES)()
        return rename(source, target)

    monkeypatch.setattr(files, "rename_to_free_name", fail)
    again = make_solo(keep=1)
    again.save(40)
    assert again.names() == ["step-10", "step-40"]
    assert again.events[-1][1]["kept"] == 2


def test_the_checkpoint_just_published_is_kept_next_to_higher_steps(
    make_solo: MakeSolo,
) -> None:
    make_solo(keep=5).save(90)
    solo = make_solo(keep=1)
    solo.save(10)
    assert solo.names() == ["step-10", "step-90"]


def test_a_start_removes_only_attempts_of_smaller_generations_and_leftover_files(
    make_solo: MakeSolo,
) -> None:
    first = make_solo()
    for name in ("step-10.g1.1", "step-10.g2.1", "step-10.g3.1", "notes"):
        (first.directory / ".tmp" / name).mkdir(parents=True)
    (first.directory / ".trash" / "step-5").mkdir(parents=True)
    (first.directory / ".latest.4711-abc.tmp").touch()
    (first.directory / ".mine.4711-abc.tmp").touch()
    assert make_solo().restore() is None
    assert not (first.directory / ".latest.4711-abc.tmp").exists(), (
        "of a pointer half written"
    )
    assert (first.directory / ".mine.4711-abc.tmp").exists(), "not one of this program's"
    assert sorted(os.listdir(first.directory / ".tmp")) == [
        "notes",
        "step-10.g2.1",
        "step-10.g3.1",
    ]
    assert os.listdir(first.directory / ".trash") == []


# Restoring


def test_an_empty_directory_restores_nothing(make_solo: MakeSolo) -> None:
    assert make_solo().restore() is None


def test_a_first_save_that_was_killed_is_not_a_checkpoint(make_solo: MakeSolo) -> None:
    solo = make_solo()
    (solo.directory / ".tmp" / "step-10.g1.1").mkdir(parents=True)
    assert make_solo().restore() is None


def truncate(directory: Path) -> None:
    os.truncate(directory / "rank-00000.bin", 100)


def flip(directory: Path) -> None:
    flip_bit(directory / "rank-00000.bin")


def remove_shard(directory: Path) -> None:
    (directory / "rank-00000.bin").unlink()


def empty_manifest(directory: Path) -> None:
    os.truncate(directory / "manifest.json", 0)


def garbage_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_bytes(b"\x00garbage\xff" * 20)


def remove_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


def flip_table(directory: Path) -> None:
    flip_bit(directory / "tensors.json")


DAMAGE = [
    (truncate, "file rank-00000.bin: has 100 bytes, 1216 were written"),
    (flip, "file rank-00000.bin: checksum differs"),
    (remove_shard, "file rank-00000.bin: is missing"),
    (empty_manifest, "file manifest.json: is empty"),
    (garbage_manifest, "file manifest.json: is not a manifest"),
    (remove_manifest, "file manifest.json: is missing"),
    (flip_table, "file tensors.json: checksum differs"),
]


def restart(make_solo: MakeSolo, *, damage: Callable[[Path], None] = flip) -> Any:
    """The next process of a run whose newer checkpoint of two, step-1200, is damaged."""
    solo = make_solo()
    solo.save(1000)
    solo.save(1200)
    damage(solo.directory / "step-1200")
    return make_solo()


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_a_damaged_checkpoint_is_quarantined_and_the_older_one_loads(
    make_solo: MakeSolo,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    again = restart(make_solo, damage=damage)
    with caplog.at_level(logging.ERROR):
        assert again.restore() == 1000
    (fallback, fields), (restored, _) = again.events
    assert (fallback, restored) == ("fallback", "restored")
    assert (
        fields["checkpoint"] == "step-1200"
        and fields["quarantined_as"] == "quarantine/step-1200"
    )
    assert fields["reason"].startswith(reason)
    assert (
        f"fell back from step 1200 ({fields['reason']}) to step 1000, losing 200 steps"
        in caplog.text
    )
    assert again.names() == ["step-1000"] and os.listdir(
        again.directory / "quarantine"
    ) == ["step-1200"]
    assert make_solo().restore() == 1000


def test_an_unreported_fallback_is_reported_by_the_next_process(
    make_solo: MakeSolo,
) -> None:
    """The only process may be killed between the quarantine of a checkpoint and its first event."""
    lost = restart(make_solo)
    lost.restore()
    ((_, reported), _) = lost.events

    again = make_solo()
    assert again.restore() == 1000
    assert [name for name, _ in again.events] == ["restored"]
    again.manager.note_announced()
    assert again.events[1:] == [("fallback", reported)]
    # A process that has reported it already, or has nothing to report, does so once.
    again.manager.note_announced()
    assert len(again.events) == 2
    after = make_solo()
    after.restore()
    after.manager.note_announced()
    assert [name for name, _ in after.events] == ["restored"]


def test_a_surviving_process_reports_its_fallback_once(make_solo: MakeSolo) -> None:
    again = restart(make_solo)
    again.restore()
    again.manager.note_announced()
    assert [name for name, _ in again.events] == ["fallback", "restored"]


def test_a_quarantined_checkpoint_no_longer_counts_as_published(
    make_solo: MakeSolo,
) -> None:
    """All ranks have lost their state and gone back to an older step; the later one is saved again."""
    solo = make_solo()
    solo.save(30)
    solo.save(40)
    flip_bit(solo.directory / "step-40" / "rank-00000.bin")
    assert solo.restore() == 30
    assert published_step(TrainingProgress(resumed_step=30), solo.manager) == 30
    solo.save(40)
    assert published_step(TrainingProgress(resumed_step=30), solo.manager) == 40
    assert make_solo().restore() == 40


@pytest.mark.capability("O-37")
@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_if_no_checkpoint_validates_the_run_stops_and_nothing_is_moved(
    make_solo: MakeSolo, damage: Callable[[Path], None], reason: str
) -> None:
    solo = make_solo()
    for step in (1000, 1200):
        solo.save(step)
        damage(solo.directory / f"step-{step}")
    with pytest.raises(CheckpointError) as caught:
        make_solo().restore()
    for step in (1000, 1200):
        assert f"step-{step}: cannot be loaded; {reason}" in str(caught.value)
    assert caught.value.exit_code == 64
    assert solo.names() == ["step-1000", "step-1200"]


def test_quarantined_checkpoints_alone_never_lead_to_step_0(make_solo: MakeSolo) -> None:
    solo = make_solo()
    solo.save(10)
    (solo.directory / "quarantine").mkdir()
    (solo.directory / "step-10").rename(solo.directory / "quarantine" / "step-10")
    with pytest.raises(
        CheckpointError,
        match="quarantine/step-10: cannot be loaded; was set aside as damaged",
    ):
        make_solo().restore()


def test_a_checkpoint_is_quarantined_next_to_an_earlier_one_of_its_name(
    make_solo: MakeSolo,
) -> None:
    make_solo().save(10)
    for _ in range(2):
        solo = make_solo()
        solo.save(20)
        flip(solo.directory / "step-20")
        assert make_solo().restore() == 10
    assert sorted(os.listdir(solo.directory / "quarantine")) == ["step-20", "step-20~2"]


def test_without_checksums_sizes_are_still_checked(make_solo: MakeSolo) -> None:
    solo = make_solo()
    for step in (10, 20, 30):
        solo.save(step)
    truncate(solo.directory / "step-30")
    flip_table(solo.directory / "step-20")
    assert make_solo(verify="sizes").restore() == 10


@pytest.mark.parametrize(
    "hint",
    [
        b"",
        b"{}",
        b"[]",
        b'{"checkpoint": "step-999"}',
        b'{"checkpoint": "../step-1"}',
        b'{"checkpoint": 7}',
        b"\xff",
    ],
)
def test_a_hint_to_a_missing_checkpoint_has_no_effect(
    make_solo: MakeSolo, hint: bytes
) -> None:
    solo = make_solo()
    solo.save(10)
    (solo.directory / "latest").write_bytes(hint)
    assert make_solo().restore() == 10


def test_a_file_with_the_name_of_a_checkpoint_is_damage(make_solo: MakeSolo) -> None:
    solo = make_solo()
    solo.save(10)
    (solo.directory / "step-20").write_text("notes")
    assert make_solo().restore() == 10


@pytest.mark.acceptance("8d-4a", "input-G-64")
@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (
            Identity("other", "recipe", "data"),
            "the run's name is 'run'; this run's is 'other'",
        ),
        (
            Identity("run", "changed", "data"),
            "the recipe's hash is 'recipe'; this run's is 'changed'",
        ),
        (
            Identity("run", "recipe", "more"),
            "the data's fingerprint is 'data'; this run's is 'more'",
        ),
    ],
)
def test_checkpoints_of_another_identity_are_refused_with_both_values(
    make_solo: MakeSolo, theirs: Identity, message: str
) -> None:
    make_solo().save(10)
    with pytest.raises(CheckpointError, match=message):
        make_solo(identity=theirs).restore()
    assert make_solo().restore() == 10


def test_a_refused_checkpoint_names_the_differing_recipe_fields(
    make_solo: MakeSolo, make_state: Callable[[int], dict[str, torch.Tensor]]
) -> None:
    recipe = {"optimizer": {"learningRate": 0.001}, "batching": {"microBatchSize": 2}}
    extra = {"state": {"recipe": recipe}}
    make_solo().manager.save(10, make_state(10), extra=extra, wait=True)
    theirs = {**recipe, "optimizer": {"learningRate": 0.01}}
    with pytest.raises(CheckpointError) as raised:
        make_solo(identity=Identity("run", "changed", "data", recipe=theirs)).restore()
    assert "spec.training.optimizer.learningRate: 0.01 here, but the run in " in str(
        raised.value
    )
    assert "began with 0.001" in str(raised.value) and "hash" not in str(raised.value)
    # If both recipes look the same, the message can contain only the hashes.
    with pytest.raises(CheckpointError, match="the recipe's hash is 'recipe'"):
        make_solo(identity=Identity("run", "changed", "data", recipe=recipe)).restore()


def test_a_recipe_that_differs_only_in_the_form_of_a_free_number_is_the_same_run(
    make_solo: MakeSolo, make_state: Callable[[int], dict[str, torch.Tensor]]
) -> None:
    def recipe(theta: float) -> dict[str, object]:
        return {"model": {"config": {"model_type": "llama", "rope_theta": theta}}}

    extra = {"state": {"recipe": recipe(10000.0)}}
    make_solo().manager.save(10, make_state(10), extra=extra, wait=True)
    # The older version that wrote it hashed 10000.0, and this one 10000.
    today = Identity("run", hash_recipe(recipe(10000)), "data", recipe=recipe(10000))
    found = make_solo(identity=today).manager.restore(make_state(0))
    assert found is not None and found.step == 10


def test_a_checkpoint_of_a_newer_program_is_refused_and_not_quarantined(
    make_solo: MakeSolo,
) -> None:
    solo = make_solo()
    solo.save(10)
    solo.save(20)
    path = solo.directory / "step-20" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 9}))
    with pytest.raises(CheckpointError, match="has format 9, this program knows up to 1"):
        make_solo().restore()
    assert solo.names() == ["step-10", "step-20"]


@pytest.mark.acceptance("8d-4e", "8d-4g")
def test_tensors_that_do_not_match_the_state_are_named(
    make_solo: MakeSolo, make_state: MakeState
) -> None:
    make_solo().save(10)
    state = make_state(0)
    state["model.new"] = torch.zeros(2)
    state["model.weight"] = torch.zeros(33, 8)
    state["optimizer.count"] = torch.zeros(5)
    del state["model.half"]
    with pytest.raises(CheckpointError) as caught:
        make_solo().manager.restore(state)
    text = str(caught.value)
    assert "tensors are missing; model.new." in text
    assert "it holds tensors this model does not have; model.half." in text
    assert "shapes differ; model.weight (stored [33, 7], wanted [33, 8])." in text
    assert (
        "types differ; optimizer.count (stored torch.int64, wanted torch.float32)." in text
    )


def test_parameters_that_require_gradients_are_filled_in_place(
    make_solo: MakeSolo, make_state: MakeState
) -> None:
    make_solo().save(10)
    state = make_state(0)
    parameter = torch.nn.Parameter(torch.zeros(33, 7))
    state["model.weight"] = parameter
    make_solo().manager.restore(state)
    assert torch.equal(parameter.detach(), make_state(10)["model.weight"])


# Abandoning


def test_close_waits_for_the_running_save(
    make_solo: MakeSolo, make_state: MakeState
) -> None:
    solo = make_solo()
    solo.manager.save(10, make_state(10), extra={})
    solo.manager.close()
    assert solo.types() == ["save"] and solo.names() == ["step-10"]


def test_abandon_reports_a_save_that_ends_in_time_and_leaves_one_that_does_not(
    make_solo: MakeSolo, make_state: MakeState
) -> None:
    solo = make_solo()
    solo.manager.save(10, make_state(10), extra={})
    solo.manager.abandon()
    assert solo.types() == ["save"]
    gate = threading.Event()
    stuck = make_solo(hook=At(faults.MID_SHARD, lambda: gate.wait(30)))
    stuck.manager.save(20, make_state(20), extra={})
    flight = stuck.manager._flight
    stuck.manager.abandon(patience_seconds=0.05)
    assert stuck.events == []
    stuck.save(30)  # into separate memory: the abandoned one may still be read
    gate.set()
    flight.background.join()
    assert stuck.names() == ["step-10", "step-20", "step-30"]
    for step in (20, 30):
        weight = read_plain_state(stuck.directory / f"step-{step}")["model.weight"]
        assert torch.equal(weight, make_state(step)["model.weight"])


def test_a_listing_that_fails_is_retried_and_then_a_host_fault(
    make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the checkpoints would be reported as lost, and the run would end permanently."""
    make_solo().save(10)
    solo = make_solo()
    monkeypatch.setattr("evergrad_trainer.base.volume.time.sleep", lambda seconds: None)
    catalog = solo.manager._store.catalog
    scan, failures = catalog.scan, [errno.ESTALE, errno.EIO]

    def fail() -> list[Candidate]:
        if failures:
            number = (
                failures[0]
                if len(failures) == 1 and failures[0] == errno.ETIMEDOUT
                else failures.pop()
            )
            raise OSError(number, os.strerror(number))
        return scan()

    monkeypatch.setattr(catalog, "scan", fail)
    assert solo.restore() == 10
    failures.append(errno.ETIMEDOUT)
    with pytest.raises(VolumeError, match="the checkpoints cannot be listed") as raised:
        solo.restore()
    assert raised.value.exit_code == 70


def test_checkpoints_that_cannot_be_read_are_not_reported_as_lost(
    make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_solo().save(10)
    solo = make_solo()
    monkeypatch.setattr("evergrad_trainer.base.volume.time.sleep", lambda seconds: None)
    reader = solo.manager._store.reader

    def fail(name: str, **options: object) -> Manifest:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(reader, "validate", fail)
    with pytest.raises(VolumeError, match="the checkpoint cannot be read"):
        solo.restore()
    assert solo.names() == ["step-10"]


@pytest.mark.parametrize(
    ("number", "trouble"),
    [
        (errno.ENOSPC, "no_space"),
        (errno.EDQUOT, "no_space"),
        (errno.EROFS, "read_only"),
        (errno.EACCES, "permission"),
        (errno.ETIMEDOUT, "timeout"),
        (errno.EIO, "io"),
        (errno.ESTALE, "io"),
    ],
)
def test_the_trouble_of_a_failed_save_is_derived_from_the_error_number(
    number: int, trouble: str
) -> None:
    error = OSError(number, "whatever words")
    assert trouble_of(error) == trouble
    wrapped = VolumeError("other words")
    wrapped.__cause__ = error
    assert trouble_of(wrapped) == trouble
    assert trouble_of(RuntimeError("no space left on device")) == "other"
