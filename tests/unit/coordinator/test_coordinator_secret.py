"""The token of a run."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evergrad_common import secret
from evergrad_common.secret import is_token, obtain_token, read_token


@pytest.mark.parametrize("said", ["", "secre", "secret ", "\ud800", "sécret"])
def test_only_the_exact_token_is_accepted(said: str) -> None:
    assert not is_token(said, "secret")
    assert is_token("secret", "secret")


def test_a_run_without_a_token_accepts_no_token() -> None:
    assert not is_token("", "")


def test_a_token_is_created_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = obtain_token(file)
    assert obtain_token(file) == read_token(file) == token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_two_simultaneous_starts_agree_on_one_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    others: list[str] = []
    make = secret.new_token

    def make_after_another() -> str:
        monkeypatch.setattr(secret, "new_token", make)
        others.append(obtain_token(file))
        return make()

    monkeypatch.setattr(secret, "new_token", make_after_another)
    assert [obtain_token(file)] == others == [read_token(file)]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("step", ["new_token", "os.fsync", "os.link"])
def test_a_kill_between_two_steps_does_not_prevent_a_later_start(
    tmp_path: Path, step: str
) -> None:
    file = tmp_path / "token"
    place, _, name = f"secret.{step}".rpartition(".")
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from evergrad_common import secret\n"
        f"{place}.{name} = lambda *_: os._exit(9)\n"
        "secret.obtain_token(Path(sys.argv[1]))\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(file)], check=False)
    assert killed.returncode == 9
    assert obtain_token(file) == read_token(file) != ""


def test_a_full_disk_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        obtain_token(tmp_path / "token")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "given\n"])
def test_a_volume_without_hard_links_gets_a_token_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    def fail(*_: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", fail)
    file = tmp_path / "token"
    if content:
        file.write_text(content)
    token = obtain_token(file)
    assert token == read_token(file) and token != ""
    assert not content or token == content.strip()
    assert list(tmp_path.iterdir()) == [file]
