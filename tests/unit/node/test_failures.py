"""The end of a process, its cause, and the part of it that Kubernetes keeps."""

from pathlib import Path

import pytest

from evergrad_common.contract import (
    MAX_TERMINATION_BYTES,
    ErrorKind,
    decode_termination,
)
from evergrad_trainer.node.failures import (
    count_oom_kills,
    describe_end,
    write_termination_message,
)


@pytest.mark.parametrize(
    ("code", "was_oom", "words"),
    [
        (-9, False, "was killed by SIGKILL"),
        (-9, True, "was killed because the node ran out of memory"),
        (-200, False, "was killed by signal 200"),
        (0, False, "ended with exit code 0 before the run was over"),
        (3, False, "ended with exit code 3"),
    ],
)
def test_an_exit_code_is_described_in_words(code: int, was_oom: bool, words: str) -> None:
    assert describe_end(code, was_oom=was_oom) == words


def test_out_of_memory_kills_are_counted_in_both_cgroup_versions(
    tmp_path: Path,
) -> None:
    assert count_oom_kills(tmp_path) is None
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.oom_control").write_text(
        "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
    )
    assert count_oom_kills(tmp_path) == 2
    (tmp_path / "memory.events").write_text("low 0\nhigh 4\nmax 9\noom 1\noom_kill 5\n")
    assert count_oom_kills(tmp_path) == 5


def test_the_root_cause_is_written_with_its_kind_to_the_termination_log(
    tmp_path: Path,
) -> None:
    text = "root cause first\n" + "frame ä\n" * 5000 + "last line"
    write_termination_message(tmp_path / "log", ErrorKind.ENVIRONMENT, text)
    left = (tmp_path / "log").read_text()
    assert len(left) <= MAX_TERMINATION_BYTES
    kind, said = decode_termination(left)
    assert kind is ErrorKind.ENVIRONMENT
    assert said.startswith("root cause first") and said.endswith("last line")
    write_termination_message(
        tmp_path / "nowhere" / "log", ErrorKind.INPUT, "cannot be written"
    )
    write_termination_message(None, ErrorKind.INPUT, "nobody reads it")
