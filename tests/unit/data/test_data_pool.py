"""Helper processes of ``prepare``: the answers that a run of jobs gets are those to its own jobs."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bed.process_state import children_of
from evergrad_trainer.data.preparation.chunk import Attempt, TokenizeJob
from evergrad_trainer.data.preparation.content import Chunk, ContentPiece
from evergrad_trainer.data.preparation.pool import ProcessPool
from evergrad_trainer.data.preparation.texts import TextFormat
from evergrad_trainer.data.tokenizers import ByteTokenizer

MANY, FEW = 30_000, 10


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    before = children_of(os.getpid())
    pool = ProcessPool(ByteTokenizer(), workers=2)
    yield pool
    pool.close()
    assert children_of(os.getpid()) == before


def job(folder: Path, number: int, lines: int, *, is_gone: bool = False) -> TokenizeJob:
    """A job on ``lines`` documents; ``is_gone``: its directory has been published and tidied up."""
    path = folder / f"{lines}.jsonl"
    path.write_text("".join(json.dumps({"text": "ab" * 50}) + "\n" for _ in range(lines)))
    attempt = Attempt(folder / ("gone" if is_gone else f"attempt-{lines}"))
    for directory in () if is_gone else (attempt.data, attempt.chunks, attempt.partial):
        directory.mkdir(parents=True, exist_ok=True)
    size = path.stat().st_size
    chunk = Chunk(number, (ContentPiece(path, 0, size, 1, size),))
    form = TextFormat("jsonl", "text", "file")
    return TokenizeJob(form, attempt.directory, (chunk,), is_whole=False)


def counts(pool: ProcessPool, *jobs: TokenizeJob) -> list[tuple[int, int]]:
    return sorted((one.number, one.documents["train"]) for one in pool.run(jobs))


def test_a_late_result_of_a_failed_run_is_not_attributed_to_the_next_jobs(
    pool: ProcessPool, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError):
        counts(pool, job(tmp_path, 7, MANY), job(tmp_path, 0, FEW, is_gone=True))
    both = [job(tmp_path, number, FEW) for number in (0, 1)]
    assert counts(pool, *both) == [(0, FEW), (1, FEW)]


def test_late_results_after_a_partly_consumed_run_are_ignored(
    pool: ProcessPool, tmp_path: Path
) -> None:
    outcomes = iter(pool.run([job(tmp_path, 0, FEW), job(tmp_path, 7, MANY)]))
    next(outcomes)
    del outcomes
    both = [job(tmp_path, number, FEW) for number in (0, 1)]
    assert counts(pool, *both) == [(0, FEW), (1, FEW)]
