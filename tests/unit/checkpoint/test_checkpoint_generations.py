"""Claims of a run directory and the fence."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evergrad_trainer.checkpoint.generations import check_fence, claim_generation, newest_generation
from evergrad_trainer.errors import FencedError, RunDirectoryError


def test_generations_count_from_one_and_leave_a_file_each(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "checkpoints"
    assert [claim_generation(directory) for _ in range(3)] == [1, 2, 3]
    assert sorted(os.listdir(directory / "gen")) == ["000001", "000002", "000003"]
    assert newest_generation(directory, fresh=True) == 3


def test_simultaneous_claims_all_get_different_generations(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        claimed = list(pool.map(lambda _: claim_generation(tmp_path), range(64)))
    assert sorted(claimed) == list(range(1, 65))


def test_only_the_newest_claim_passes_the_fence(tmp_path: Path) -> None:
    older, newer = claim_generation(tmp_path), claim_generation(tmp_path)
    check_fence(tmp_path, newer)
    with pytest.raises(FencedError, match=r"generation 2 has claimed this run directory; this process is generation 1"):
        check_fence(tmp_path, older)


def test_files_of_other_names_are_no_claims(tmp_path: Path) -> None:
    claim_generation(tmp_path)
    (tmp_path / "gen" / ".nfs0001").touch()
    (tmp_path / "gen" / "README").touch()
    assert claim_generation(tmp_path) == 2


def test_a_directory_that_cannot_be_made_is_an_error_of_the_run_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="this start cannot be recorded"):
        claim_generation(tmp_path / "file" / "checkpoints")
