"""``make gpu-check`` without an accelerator, and with the CPU in its place."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
pytestmark = pytest.mark.timeout(600)


def gpu_check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            str(BENCHMARKS / "gpu_check.py"),
            "--results",
            str(folder),
            *arguments,
        ],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_machine_without_an_accelerator_is_told_apart_from_one_that_fails(
    tmp_path: Path,
) -> None:
    ended = gpu_check(tmp_path / "results")
    assert ended.returncode == 69
    assert "no cuda device is visible on this machine: nothing was checked" in ended.stderr
    assert not (tmp_path / "results").exists()


@pytest.mark.long
def test_parts_run_in_processes_of_their_own_and_one_that_fails_is_named(
    tmp_path: Path,
) -> None:
    passed = gpu_check(
        tmp_path, "--device", "cpu", "--tiny", "fsdp2", "world", "abort", "staging"
    )
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert passed.returncode == 0, passed.stdout
    assert {name: part["passed"] for name, part in found.items()} == dict.fromkeys(found, True)
    page = (tmp_path / "gpu.md").read_text()
    assert "| staging | device to host |" in page and "| world | passed |" in page
    # The device of this part is not there.
    failed = gpu_check(tmp_path, "--part", "staging")
    assert '"error"' in failed.stdout and "CUDA" in failed.stdout
