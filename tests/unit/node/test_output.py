"""A worker's output: complete in its file, and line by line with its rank in front on the node's stderr."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from evergrad_trainer.node.output import WorkerOutput


def read_all(
    path: Path, write: Callable[[int, list[int]], None], *, is_forwarded: bool = True
) -> WorkerOutput:
    """Return the results of the output that ``write(descriptor, ranks)`` writes. ``ranks[0]`` is the worker's
    rank at that time."""

    async def run() -> WorkerOutput:
        read_end, write_end = os.pipe()
        ranks = [-1]
        output = WorkerOutput(
            read_end,
            path=path,
            node="3",
            rank=lambda: ranks[0],
            is_forwarded=is_forwarded,
            on_output=lambda: None,
        )
        try:
            write(write_end, ranks)
        finally:
            os.close(write_end)
        output.drain()
        output.close()
        output.close()
        return output

    return asyncio.run(run())


def test_the_output_of_a_worker_is_forwarded_although_its_file_cannot_be_opened(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("no folder")
    output = read_all(
        tmp_path / "logs" / "out",
        lambda descriptor, ranks: os.write(descriptor, b"one\n") and None,
    )
    assert list(output.last_lines) == ["one"]
    assert "one" in capfd.readouterr().err


def test_lines_have_the_rank_at_the_time_of_writing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def write(descriptor: int, ranks: list[int]) -> None:
        ranks[0] = 5
        os.write(descriptor, b"one\ntwo\nthr")
        os.write(descriptor, b"ee without an end")

    output = read_all(tmp_path / "logs" / "out", write)
    assert (
        capfd.readouterr().err
        == "[node 3 rank 5] one\n[node 3 rank 5] two\n[node 3 rank 5] three without an end\n"
    )
    assert (tmp_path / "logs" / "out").read_bytes() == b"one\ntwo\nthree without an end"
    assert list(output.last_lines) == ["one", "two", "three without an end"]


def test_output_of_a_worker_without_a_rank_and_non_text_bytes_are_forwarded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    read_all(
        tmp_path / "out", lambda descriptor, _: os.write(descriptor, b"\xff\xfe\n") and None
    )
    assert capfd.readouterr().err.startswith("[node 3] ")
    assert (tmp_path / "out").read_bytes() == b"\xff\xfe\n"


def test_output_that_is_not_forwarded_is_stored(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = read_all(
        tmp_path / "out",
        lambda descriptor, _: os.write(descriptor, b"x\n") and None,
        is_forwarded=False,
    )
    assert (
        capfd.readouterr().err == ""
        and (tmp_path / "out").read_text() == "x\n"
        and list(output.last_lines) == ["x"]
    )


def test_few_last_lines_are_stored_and_a_later_process_appends_to_the_file(
    tmp_path: Path,
) -> None:
    lines = b"".join(b"line %d\n" % number for number in range(100))
    for _ in range(2):
        output = read_all(
            tmp_path / "out",
            lambda descriptor, _: os.write(descriptor, lines) and None,
            is_forwarded=False,
        )
    assert (output.last_lines[0], output.last_lines[-1]) == ("line 60", "line 99")
    assert (tmp_path / "out").read_bytes() == lines * 2
