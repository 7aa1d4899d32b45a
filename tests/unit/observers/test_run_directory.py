"""The run directory: strict JSON, atomic files, torn lines, and errors that name the path and the remedy."""

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from evergrad_trainer.base.errors import RunDirectoryError, VolumeError
from evergrad_trainer.run.directory import (
    JsonLines,
    RunDirectory,
    dumps_strict,
    mend_last_line,
    read_json_object,
    run_directory_error,
    write_atomically,
)

_SMALL_DISK = """
import os, pathlib, subprocess, sys
from evergrad_trainer.base.errors import RunDirectoryError, VolumeError
from evergrad_trainer.run.directory import RunDirectory
disk = pathlib.Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=20", "none", str(disk)], check=True)
"""


def _run_in_own_mount_namespace(script: str, directory: Path) -> str:
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        sys.executable,
        "-c",
        _SMALL_DISK + script,
        str(directory),
    ]
    if (
        subprocess.run([*command[:4], "true"], capture_output=True, check=False).returncode
        != 0
    ):
        pytest.skip(
            "this machine allows no mount namespaces, so no disk can be made full or read-only"
        )
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.acceptance("8d-15a")
def test_non_finite_floats_become_null_and_keys_keep_their_order() -> None:
    text = dumps_strict(
        {"b": math.nan, "a": [math.inf, -math.inf, 1.5], "c": {"d": (math.nan,)}}
    )
    assert text == '{"b":null,"a":[null,null,1.5],"c":{"d":[null]}}'


def test_finite_floats_round_trip_bit_by_bit() -> None:
    for value in (0.1, 1e-310, 2.413000000000001, -0.0, 1.7976931348623157e308):
        again = json.loads(dumps_strict({"x": value}))["x"]
        assert again.hex() == value.hex()


def test_text_with_unpaired_surrogates_is_written(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.json", dumps_strict({"name": "\udcff"}))
    assert read_json_object(tmp_path / "a.json") == {"name": "?"}


def test_a_written_file_replaces_the_old_one_and_leaves_no_temporary_file(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(tmp_path / "runs" / "one")
    directory.create()
    directory.write_resolved({"spec": {"a": 1}})
    directory.write_resolved({"spec": {"a": 2}})
    assert directory.read_resolved() == {"spec": {"a": 2}}
    assert sorted(path.name for path in directory.path.iterdir()) == [
        "checkpoints",
        "logs",
        "run.json",
    ]


def test_a_new_directory_has_nothing_to_read(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "new")
    assert directory.read_resolved() is None
    assert directory.read_complete() is None
    assert not directory.is_complete() and not directory.stop_requested()
    assert directory.consume_stop_file() is None
    assert not directory.path.exists()


def test_completion_is_marked_and_can_be_reverted(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.mark_complete({"total_steps": 7, "loss": math.nan})
    assert directory.is_complete()
    assert directory.read_complete() == {"total_steps": 7, "loss": None}
    directory.unmark_complete()
    directory.unmark_complete()
    assert not directory.is_complete()


def test_a_stop_file_is_read_once_and_removed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.stop.write_bytes(b"maintenance \xff at noon\nsecond line")
    assert directory.stop_requested()
    request = directory.consume_stop_file()
    assert request is not None
    assert request.note == "maintenance \ufffd at noon"
    assert request.time > 0
    assert not directory.stop_requested()


def test_an_empty_stop_file_is_a_request_too(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.stop.touch()
    request = directory.consume_stop_file()
    assert request is not None and request.note == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "is not valid JSON"), ("[1]", "holds a list, not a JSON object")],
)
def test_a_broken_small_file_is_refused_with_its_path(
    tmp_path: Path, text: str, why: str
) -> None:
    directory = RunDirectory(tmp_path)
    directory.resolved.write_text(text)
    with pytest.raises(RunDirectoryError, match=why) as caught:
        directory.read_resolved()
    assert str(directory.resolved) in str(caught.value)


def test_a_small_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(RunDirectoryError, match=r"run\.json: is not valid JSON"):
        RunDirectory(tmp_path).read_resolved()


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.write_text("")
    with pytest.raises(RunDirectoryError, match="a file of that name is in the way"):
        RunDirectory(path).create()
    with pytest.raises(
        RunDirectoryError, match="a part of the path is a file, not a directory"
    ):
        RunDirectory(path / "below").create()
    with pytest.raises(RunDirectoryError, match="is a file, not a run directory"):
        RunDirectory(path).require_run()


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RunDirectoryError,
        match=r"is not a run directory; it has none of run\.json, metrics\.jsonl and events\.jsonl",
    ):
        RunDirectory(tmp_path).require_run()
    with pytest.raises(RunDirectoryError, match="does not exist"):
        RunDirectory(tmp_path / "gone").require_run()
    (tmp_path / "metrics.jsonl").touch()
    RunDirectory(tmp_path).require_run()


def test_a_full_disk_is_reported_and_the_old_file_stays(tmp_path: Path) -> None:
    out = _run_in_own_mount_namespace(
        """
directory = RunDirectory(disk / "run")
directory.create()
directory.write_resolved({"a": 1})
try:
    directory.write_resolved({"a": "x" * 100_000})
except VolumeError as error:
    print(error)
print(directory.read_resolved(), sorted(path.name for path in directory.path.iterdir()))
""",
        tmp_path,
    )
    message, rest = out.splitlines()
    assert "run.json: cannot be written; No space left on device." in message
    assert rest == "{'a': 1} ['checkpoints', 'logs', 'run.json']"


def test_a_read_only_file_system_is_reported_before_training_starts(
    tmp_path: Path,
) -> None:
    out = _run_in_own_mount_namespace(
        """
RunDirectory(disk / "run").create()
subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
for path in (disk / "run", disk / "other"):
    try:
        RunDirectory(path).create()
    except RunDirectoryError as error:
        print(error)
""",
        tmp_path,
    )
    existing, new = out.splitlines()
    assert existing.endswith(
        "run: cannot be written to; the file system is read-only. Choose a directory that can be written."
    )
    assert new.endswith(
        "other: cannot be created; the file system is read-only. Choose a directory that can be written."
    )


def test_every_known_cause_has_a_remedy() -> None:
    for number in (errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.ENAMETOOLONG):
        error = run_directory_error(
            OSError(number, os.strerror(number)), "x", what="cannot be written"
        )
        assert isinstance(error, RunDirectoryError)
        assert (
            error.problems[0].why
            and error.problems[0].remedy
            and error.problems[0].path == "x"
        )


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT]
)
def test_a_temporary_error_is_a_host_fault_and_not_a_user_error(number: int) -> None:
    error = run_directory_error(
        OSError(number, os.strerror(number)), "x", what="cannot be written"
    )
    assert (
        isinstance(error, VolumeError)
        and error.exit_code == 70
        and error.kind == "environment"
    )
    assert str(error).startswith(f"x: cannot be written; {os.strerror(number)}. ")


def _lines(path: Path) -> tuple[list[dict[str, object]], int]:
    lines = JsonLines(path)
    return [row for _, row in lines], lines.torn_bytes


def test_a_truncated_last_line_is_skipped_when_reading_and_removed_when_repairing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}\n{"a":3,"lo')
    assert _lines(path) == ([{"a": 1}, {"a": 2}], 10)
    assert mend_last_line(path) == 10
    assert path.read_bytes() == b'{"a":1}\n{"a":2}\n'
    assert mend_last_line(path) == 0


def test_an_object_that_only_lacks_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2}')
    assert _lines(path) == ([{"a": 1}, {"a": 2}], 0)
    assert mend_last_line(path) == 0
    assert path.read_bytes() == b'{"a":1}\n{"a":2}\n'


def test_a_file_of_one_truncated_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for torn in (b"{", b"\0" * 40, b"\xff\xfe", b'"text'):
        path.write_bytes(torn)
        assert mend_last_line(path) == len(torn)
        assert path.read_bytes() == b""


def test_a_truncated_line_longer_than_a_block_is_found_completely(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a":1}\n' + b'{"b":"' + b"x" * 200_000)
    assert mend_last_line(path) == 200_006
    assert path.read_bytes() == b'{"a":1}\n'


def test_missing_and_empty_files_have_no_lines(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name in ("missing", "empty"):
        assert _lines(tmp_path / name) == ([], 0)
        assert mend_last_line(tmp_path / name) == 0


def test_a_broken_line_in_the_middle_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":\n{"a":3}\n')
    with pytest.raises(
        RunDirectoryError,
        match=r"metrics\.jsonl line 2: is not a JSON object\. Remove the line",
    ):
        _lines(path)
    path.write_bytes(b'{"a":1}\n[' * 1 + b"[" * 100_000 + b"\n")
    with pytest.raises(RunDirectoryError, match="line 2: is not a JSON object"):
        _lines(path)
