"""A log of bounded size: the beginning and the newest end, and what was dropped between them."""

import errno
import logging
import os
from pathlib import Path

import pytest

from evergrad_trainer.base.bounded_file import BoundedFile
from evergrad_trainer.observers.logs import setup_logging
from evergrad_trainer.run.directory import RunDirectory


def write_lines(path: Path, numbers: range) -> None:
    file = BoundedFile(path, head_bytes=1000, part_bytes=500)
    for number in numbers:
        file.write(f"line {number:5d}\n".encode())
    file.close()


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_a_short_log_is_one_file(tmp_path: Path) -> None:
    write_lines(tmp_path / "w.out", range(50))
    assert os.listdir(tmp_path) == ["w.out"]
    assert lines_of(tmp_path / "w.out") == [f"line {number:5d}" for number in range(50)]


def test_a_long_log_keeps_its_start_and_its_end_and_states_what_was_dropped(
    tmp_path: Path,
) -> None:
    write_lines(tmp_path / "w.out", range(10_000))
    assert sorted(os.listdir(tmp_path)) == ["w.out", "w.out.newest", "w.out.older"]
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1000 + 2 * 500 + 400
    head, older, newest = (
        lines_of(tmp_path / f"w.out{end}") for end in ("", ".older", ".newest")
    )
    assert head[0] == "line     0"
    assert head[-1] == "[evergrad] the output continues in w.out.older and w.out.newest"
    assert newest[-1] == "line  9999"
    assert newest[0].startswith("[evergrad] this continues w.out.older; at least ")
    assert newest[0].endswith(" bytes between w.out and w.out.older were dropped")

    # Between the two parts of the end nothing is missing.
    end = [line for line in (*older, *newest) if line.startswith("line")]
    first = int(end[0].split()[1])
    assert end == [f"line {number:5d}" for number in range(first, 10_000)]
    dropped = int(newest[0].split(" at least ")[1].split()[0])
    kept = [line for line in head if line.startswith("line")]
    assert dropped >= 11 * (first - len(kept)), "what is missing is reported"


def test_a_restarted_process_appends_to_the_log_of_the_previous_one(
    tmp_path: Path,
) -> None:
    write_lines(tmp_path / "w.out", range(120))
    write_lines(tmp_path / "w.out", range(120, 130))
    found = lines_of(tmp_path / "w.out") + lines_of(tmp_path / "w.out.newest")
    assert [line for line in found if line.startswith("line")] == [
        f"line {number:5d}" for number in range(130)
    ]


def test_a_line_that_does_not_end_is_bounded_too(tmp_path: Path) -> None:
    file = BoundedFile(tmp_path / "w.out", head_bytes=1000, part_bytes=500)
    for _ in range(400):
        file.write(b"x" * 1000)
    file.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3 * 2**16 + 3 * 2000


def test_output_refused_by_a_full_volume_is_reported_when_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = BoundedFile(tmp_path / "w.out")
    file.write(b"before\n")

    def refuse(data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(file, "_append", refuse)
        file.write(b"lost\n")
        file.write(b"lost too\n")
    file.write(b"after\n")
    file.close()
    assert lines_of(tmp_path / "w.out") == [
        "before",
        "[evergrad] 14 bytes are missing here because the volume refused them",
        "after",
    ]


def test_a_log_on_a_full_volume_raises_nothing_and_prints_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: BoundedFile, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(BoundedFile, "_append", refuse)
    logs = setup_logging(RunDirectory(tmp_path), rank=1)
    try:
        logging.getLogger("x").info("a line")
    finally:
        logs.close()
    assert capsys.readouterr().err == ""
