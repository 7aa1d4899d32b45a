"""Other processes that read a checkpoint prevent its removal, and dead processes do not."""

import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

from evergrad_trainer.checkpoint import leases
from evergrad_trainer.checkpoint.leases import LEASE_SECONDS, find_leased, hold

MakeSolo = Callable[..., Any]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.002)


def set_time(path: Path, seconds: float) -> None:
    os.utime(path, (seconds, seconds))


def only_lease(directory: Path) -> Path:
    (path,) = (directory / "leases").iterdir()
    return path


def test_a_held_checkpoint_is_kept_until_its_lease_is_released(
    make_solo: MakeSolo,
) -> None:
    solo = make_solo(keep=1)
    solo.save(1)
    with hold(solo.directory, "step-1"):
        solo.save(2)
        solo.save(3)
        assert solo.names() == ["step-1", "step-3"]
    assert list((solo.directory / "leases").iterdir()) == []
    solo.save(4)
    assert solo.names() == ["step-4"]


def test_a_lease_that_is_not_renewed_expires(
    make_solo: MakeSolo,
) -> None:
    solo = make_solo(keep=1)
    solo.save(1)
    # As a killed reader leaves it.
    lease = solo.directory / "leases" / "step-1.77-abc"
    lease.parent.mkdir()
    lease.write_text('{"checkpoint": "step-1"}\n')
    solo.save(2)
    assert solo.names() == ["step-1", "step-2"]
    set_time(lease, time.time() - LEASE_SECONDS - 60)
    solo.save(3)
    assert solo.names() == ["step-3"] and not lease.exists()


@pytest.mark.parametrize("age", [LEASE_SECONDS + 1, -LEASE_SECONDS - 1])
def test_a_lease_expires_although_the_clock_of_the_volume_was_set_back(
    tmp_path: Path, age: float
) -> None:
    with hold(tmp_path, "step-5"):
        lease = only_lease(tmp_path)
        written = lease.stat().st_mtime
        assert find_leased(tmp_path, now=written + LEASE_SECONDS - 1) == {"step-5"}
        assert find_leased(tmp_path, now=written + age) == set()
        assert not lease.exists()


def test_a_lease_that_is_being_written_counts_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases" / "step-7.g3.1-ff").touch()
    now = (tmp_path / "leases" / "step-7.g3.1-ff").stat().st_mtime
    assert find_leased(tmp_path, now=now) == {"step-7.g3"}


def refuse(*_: Any, **__: Any) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_an_expired_lease_that_cannot_be_removed_does_not_block_retention(
    make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a killed reader of another user leaves it."""
    solo = make_solo(keep=1)
    solo.save(1)
    lease = solo.directory / "leases" / "step-1.77-abc"
    lease.parent.mkdir()
    lease.write_text('{"checkpoint": "step-1"}\n')
    set_time(lease, time.time() - LEASE_SECONDS - 60)
    unlink = Path.unlink

    def unlink_own(path: Path, **options: Any) -> None:
        if path == lease:
            refuse()
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", unlink_own)
    solo.save(2)
    solo.save(3)
    assert solo.names() == ["step-3"] and lease.exists()


def test_an_unreadable_lease_counts_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hold(tmp_path, "step-7.g3"):
        now = only_lease(tmp_path).stat().st_mtime
        monkeypatch.setattr(Path, "read_bytes", refuse)
        assert find_leased(tmp_path, now=now) == {"step-7.g3"}


def test_leases_that_cannot_be_listed_do_not_block_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with hold(tmp_path, "step-7"):
        now = only_lease(tmp_path).stat().st_mtime
        monkeypatch.setattr(Path, "iterdir", refuse)
        assert find_leased(tmp_path, now=now) == set()
        monkeypatch.undo()
    assert "they cannot be listed" in caplog.text


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o2775])
def test_the_folder_of_leases_has_the_access_rights_of_the_checkpoints(
    tmp_path: Path, mode: int
) -> None:
    """A reader with another user creates the folder for the run, which must write its own leases there."""
    owner = os.getuid(), os.getgid()
    if os.getuid() == 0:
        owner = 1234, 5678
        os.chown(tmp_path, *owner)
    tmp_path.chmod(mode)
    with hold(tmp_path, "step-1"):
        found = (tmp_path / "leases").stat()
    assert stat.S_IMODE(found.st_mode) == mode
    assert (found.st_uid, found.st_gid) == owner


def test_a_reader_that_cannot_change_the_owner_of_the_folder_holds_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("chown", "chmod"):
        monkeypatch.setattr(os, name, refuse)
    with hold(tmp_path, "step-1"):
        now = only_lease(tmp_path).stat().st_mtime
        assert find_leased(tmp_path, now=now) == {"step-1"}


def test_two_readers_hold_one_checkpoint_until_both_leases_are_released(
    tmp_path: Path,
) -> None:
    now = time.time()
    with hold(tmp_path, "step-1"):
        with hold(tmp_path, "step-1"):
            assert len(list((tmp_path / "leases").iterdir())) == 2
        assert find_leased(tmp_path, now=now) == {"step-1"}
    assert find_leased(tmp_path, now=now) == set()


def test_a_holder_renews_its_lease_and_recreates_it_if_it_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 0.005)
    threads = threading.active_count()
    with hold(tmp_path, "step-1"):
        lease = only_lease(tmp_path)
        set_time(lease, 1000.0)
        wait_until(lambda: lease.stat().st_mtime > 1000.0)
        lease.unlink()
        wait_until(lease.exists)
    assert not lease.exists() and threading.active_count() == threads
