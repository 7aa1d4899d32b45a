"""Compiled kernels on the volume: the next process finds them, and no trouble of the volume ends it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from evergrad_trainer.models import compile_cache
from evergrad_trainer.models.compile_cache import load_compiled, save_compiled

CPU = torch.device("cpu")


class Compiler:
    """torch's two calls: the kernels that it has compiled, and the kernels that it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: bytes | None = None
        self.given: list[bytes] = []
        monkeypatch.setattr(torch.compiler, "save_cache_artifacts", self._save)
        monkeypatch.setattr(torch.compiler, "load_cache_artifacts", self._load)

    def _save(self) -> Any:
        return None if self.compiled is None else (self.compiled, object())

    def _load(self, data: bytes) -> Any:
        self.given.append(data)
        return object() if data.startswith(b"kernels") else None


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


def test_code_compiled_by_one_process_is_loaded_by_the_next(
    compiler: Compiler, tmp_path: Path
) -> None:
    folder = tmp_path / "compiled"
    assert load_compiled(folder, CPU) == 0
    assert not save_compiled(folder, CPU, loaded_bytes=0)
    compiler.compiled = b"kernels of a block"
    assert save_compiled(folder, CPU, loaded_bytes=0)
    size = load_compiled(folder, CPU)
    assert compiler.given == [b"kernels of a block"] and size == len(compiler.compiled)
    # The process that loaded them has nothing new, but a process that compiled more has.
    (path,) = folder.iterdir()
    path.write_bytes(b"not written again")
    assert save_compiled(folder, CPU, loaded_bytes=size) == size
    assert path.read_bytes() == b"not written again"
    compiler.compiled += b", and of another"
    assert save_compiled(folder, CPU, loaded_bytes=size) == len(compiler.compiled)
    assert path.read_bytes() == compiler.compiled
    assert [path.suffix for path in folder.iterdir()] == [".bin"]


def test_a_truncated_file_is_ignored_and_written_again(
    compiler: Compiler, tmp_path: Path
) -> None:
    compiler.compiled = b"kernels"
    save_compiled(tmp_path, CPU, loaded_bytes=0)
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"torn")
    assert load_compiled(tmp_path, CPU) == 0
    assert save_compiled(tmp_path, CPU, loaded_bytes=0) and path.read_bytes() == b"kernels"


def test_cache_files_are_bounded_in_size_and_number(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compiled = b"kernels"
    for index in range(6):
        monkeypatch.setattr(torch, "__version__", f"3.{index}")
        assert save_compiled(tmp_path, CPU, loaded_bytes=0)
        for age, path in enumerate(sorted(tmp_path.iterdir(), key=os.path.getmtime)):
            os.utime(path, (age, age))
    assert len(list(tmp_path.iterdir())) == compile_cache.MAX_FILES
    # The newest is among them.
    assert load_compiled(tmp_path, CPU) == len(b"kernels")
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 3)
    monkeypatch.setattr(torch, "__version__", "4.0")
    assert not save_compiled(tmp_path, CPU, loaded_bytes=0)


def test_a_volume_error_costs_only_the_time_to_compile(
    compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.compiled = b"kernels"
    (tmp_path / "file").touch()
    assert not save_compiled(tmp_path / "file", CPU, loaded_bytes=0)
    assert load_compiled(tmp_path / "file", CPU) == 0
    assert caplog.text.count("compiled kernels cannot be") == 2
