"""The end of a worker in words, for want of memory or not, and what Kubernetes keeps of it."""

from pathlib import Path

import pytest

from evergrad_trainer.node.failures import (
    MAX_BYTES,
    count_oom_kills,
    describe_end,
    termination_message,
    write_termination_message,
)


@pytest.mark.parametrize(
    ("code", "was_oom", "words"),
    [
        (-9, False, "was killed by SIGKILL"),
        (-9, True, "was killed because the node ran out of memory"),
        (-11, False, "was killed by SIGSEGV"),
        (-123, False, "was killed by signal 123"),
        (0, False, "ended with exit code 0 before the run was over"),
        (70, False, "ended with exit code 70"),
    ],
)
def test_an_end_is_told_in_words(code: int, was_oom: bool, words: str) -> None:
    assert describe_end(code, was_oom=was_oom) == words


def test_kills_for_want_of_memory_are_counted_in_both_kinds_of_cgroups(tmp_path: Path) -> None:
    assert count_oom_kills(tmp_path) is None
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert count_oom_kills(tmp_path) == 2
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 3\noom_kill 5\n")
    assert count_oom_kills(tmp_path) == 5


def test_a_file_without_the_line_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\noom_kill many\n")
    assert count_oom_kills(tmp_path) is None


@pytest.mark.parametrize("text", ["short", "ä" * 10_000, "begin " + "x" * 9_000 + " end"])
def test_last_words_fit_and_keep_begin_and_end(text: str) -> None:
    data = termination_message(f"\n{text}\n")
    assert len(data) <= MAX_BYTES
    assert data.startswith(text.encode()[:5]) and data.endswith(text.encode()[-3:])


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    write_termination_message(tmp_path / "missing" / "log", "text")
    write_termination_message(tmp_path / "log", "text")
    assert (tmp_path / "log").read_text() == "text"
