"""``make gpu-check`` without an accelerator, and with the CPU in its place."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "tools/benchmarks"
pytestmark = pytest.mark.timeout(1800)


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


def test_a_machine_without_an_accelerator_is_distinguished_from_one_that_fails(
    tmp_path: Path,
) -> None:
    ended = gpu_check(tmp_path / "results")
    assert ended.returncode == 69
    assert "no cuda device is visible on this machine: nothing was checked" in ended.stderr
    assert not (tmp_path / "results").exists()


def test_a_named_part_is_in_both_result_files(tmp_path: Path) -> None:
    ended = gpu_check(tmp_path, "--device", "cpu", "--tiny", "environment")
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert (ended.returncode, document["device"]) == (0, "cpu"), ended.stdout
    assert [row["name"] for row in document["parts"]["environment"]["rows"]] == ["torch"]
    assert "| environment | passed |" in (tmp_path / "gpu.md").read_text()
    unknown = gpu_check(tmp_path, "--device", "cpu", "speeed")
    assert unknown.returncode == 2 and "unknown part 'speeed'" in unknown.stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_precision_compile_and_speed_parts_pass_on_the_cpu(tmp_path: Path) -> None:
    """With models so small that the values mean nothing; each part passes only if its own requirements
    hold."""
    passed = gpu_check(
        tmp_path, "--device", "cpu", "--tiny", "precision", "compile", "speed-124M"
    )
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert passed.returncode == 0, passed.stdout
    assert list(found) == ["precision", "compile", "speed-124M"]
    precisions = {row["name"].partition(":")[0] for row in found["precision"]["rows"]}
    assert precisions == {"fp32", "bf16-autocast", "bf16"}
    [graphs] = [row["value"] for row in found["compile"]["rows"] if row["name"] == "graphs"]
    assert 0 < graphs <= 2
    assert found["speed-124M"]["rows"] and all(
        row["value"] > 0 for row in found["speed-124M"]["rows"]
    )


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_parts_run_in_separate_processes_and_a_failing_part_is_named(
    tmp_path: Path,
) -> None:
    passed = gpu_check(
        tmp_path,
        "--device",
        "cpu",
        "--tiny",
        "offload",
        "fsdp2",
        "world",
        "abort",
        "staging",
        "memory",
        "run",
        "recovery",
    )
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert passed.returncode == 0, passed.stdout
    assert {name: part["passed"] for name, part in found.items()} == dict.fromkeys(
        found, True
    )
    [lost] = [
        row["note"]
        for row in found["recovery"]["rows"]
        if row["name"] == "losses with other bits"
    ]
    # The bits of a loss can differ after a change of the world only if the world has changed.
    assert lost.endswith("worlds of [2, 3]")
    page = (tmp_path / "gpu.md").read_text()
    assert "| staging | device to host |" in page and "| world | passed |" in page
    # The device of this part is not there.
    failed = gpu_check(tmp_path, "--part", "staging")
    assert '"error"' in failed.stdout and "CUDA" in failed.stdout
