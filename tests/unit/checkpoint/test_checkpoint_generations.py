"""Claims of a run directory and the fence."""

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from evergrad_trainer.base.errors import FencedError, RunDirectoryError, VolumeError
from evergrad_trainer.checkpoint.generations import (
    check_fence,
    claim_exactly,
    claim_generation,
    newest_generation,
)


def test_generations_count_from_one_and_leave_one_file_each(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "checkpoints"
    assert [claim_generation(directory) for _ in range(3)] == [1, 2, 3]
    assert sorted(os.listdir(directory / "gen")) == ["000001", "000002", "000003"]
    assert newest_generation(directory, fresh=True) == 3


def test_simultaneous_claims_get_different_generations(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        claimed = list(pool.map(lambda _: claim_generation(tmp_path), range(64)))
    assert sorted(claimed) == list(range(1, 65))


def test_only_the_newest_claim_passes_the_fence(tmp_path: Path) -> None:
    older, newer = claim_generation(tmp_path), claim_generation(tmp_path)
    check_fence(tmp_path, newer)
    with pytest.raises(
        FencedError,
        match=r"generation 2 has claimed this run directory; this process is generation 1",
    ):
        check_fence(tmp_path, older)


def test_files_with_other_names_are_not_claims(tmp_path: Path) -> None:
    claim_generation(tmp_path)
    (tmp_path / "gen" / ".nfs0001").touch()
    (tmp_path / "gen" / "README").touch()
    assert claim_generation(tmp_path) == 2


def test_a_directory_that_cannot_be_created_is_an_error_of_the_run_directory(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="this start cannot be recorded"):
        claim_generation(tmp_path / "file" / "checkpoints")


def test_a_claim_is_retried_while_the_volume_is_unavailable_and_may_find_its_own_first_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt fails after its file was created, the second before."""
    monkeypatch.setattr("evergrad_trainer.base.volume.time.sleep", lambda seconds: None)
    fsync, failures = os.fsync, [errno.EIO, errno.ESTALE]

    def fail(descriptor: int) -> None:
        if failures:
            number = failures.pop()
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    claim_exactly(tmp_path, 5)
    assert newest_generation(tmp_path) == 5
    with pytest.raises(FencedError):
        claim_exactly(tmp_path, 5)
    with pytest.raises(FencedError):
        claim_exactly(tmp_path, 4)
    failures += [errno.EDQUOT]
    assert claim_generation(tmp_path) >= 6


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_volume_the_file_name_alone_claims_a_given_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    claim_exactly(tmp_path, 5)
    assert newest_generation(tmp_path) == 5
    check_fence(tmp_path, 5)
    with pytest.raises(FencedError):
        claim_exactly(tmp_path, 5)


def test_an_empty_claim_of_another_process_is_not_reclaimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is created while the first attempt fails before its own file was created."""
    monkeypatch.setattr("evergrad_trainer.base.volume.time.sleep", lambda seconds: None)
    real, failures = Path.open, [errno.EIO]

    def fail(path: Path, *mode: str, **options: Any) -> Any:
        if failures:
            path.touch()
            number = failures.pop()
            raise OSError(number, os.strerror(number))
        return real(path, *mode, **options)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(FencedError):
        claim_exactly(tmp_path, 5)
    assert newest_generation(tmp_path) == 5


def test_a_claim_on_a_volume_that_stays_full_is_a_host_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evergrad_trainer.base.volume.time.sleep", lambda seconds: None)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    for claim in (claim_generation, lambda directory: claim_exactly(directory, 1000)):
        with pytest.raises(
            VolumeError, match="this start cannot be recorded; No space left"
        ) as raised:
            claim(tmp_path)
        assert raised.value.exit_code == 70
