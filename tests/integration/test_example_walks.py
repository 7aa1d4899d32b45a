"""The walks through the smaller examples: each command of their pages works, in the order of the page."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1800
_BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def play(folder: Path, script: str) -> str:
    """Run ``script`` in ``folder`` up to its first failure, and return what it prints."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", f"set -e\n{script}"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def read_blocks(example: str) -> list[str]:
    return _BLOCK.findall((ROOT / f"examples/{example}/README.md").read_text("utf-8"))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with the examples, as in a fresh clone."""
    left_out = shutil.ignore_patterns("documents.jsonl", "rows.jsonl", "__pycache__")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=left_out)
    return tmp_path


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_the_walk_of_an_own_task_runs_as_written(copy: Path) -> None:
    printed = play(copy, "\n".join(read_blocks("custom")))
    assert '"name":"average"' in printed
    assert (copy / "runs/averaged/complete.json").is_file()


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_the_walk_of_rows_runs_as_written(copy: Path) -> None:
    printed = play(copy, "\n".join(read_blocks("sft")))
    assert "heldOut-generated" in printed and '"exact_match"' in printed
    assert (copy / "runs/letters-sft/complete.json").is_file()


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_the_walk_of_pythons_documentation_runs_as_written_but_for_its_kill(
    copy: Path,
) -> None:
    # Fewer steps than a reader would want to watch.
    manifest = copy / "examples/pydoc/trainingrun.yaml"
    text = manifest.read_text("utf-8")
    assert "steps: 300" in text
    manifest.write_text(text.replace("steps: 300", "steps: 30"), "utf-8")
    # `make run` is the second block in other words. The kill would end every such run of the machine.
    blocks = [block for block in read_blocks("pydoc") if not block.startswith(("make", "kill"))]
    script = "\n".join(blocks).replace("horizon.steps=400", "horizon.steps=40")
    # Sums of two nodes and of one are rounded differently: the comparison may find a step that differs.
    compared = "evergrad compare-runs runs/pydoc-lm runs/undisturbed"
    assert compared in script
    play(copy, script.replace(compared, f"{compared} || [ $? = 1 ]"))
    rows = (copy / "runs/pydoc-lm/metrics.jsonl").read_text("utf-8").splitlines()
    assert json.loads(rows[-1])["step"] == 40
    assert (copy / "runs/pydoc-lm/report.html").is_file()
    assert list((copy / "runs/exported").glob("*.safetensors"))


def test_the_commands_that_write_documents_run_as_written(copy: Path) -> None:
    for name, line in (
        ("computed", {"SMILES": "CCO", "weight": 46.07}),
        ("assay", {"description": "binding", "values": [{"SMILES": "CCO", "value": 1.0}]}),
    ):
        (copy / name).mkdir()
        (copy / name / "part.jsonl").write_text(json.dumps(line) + "\n", "utf-8")
    play(copy, "\n".join(read_blocks("documents")))
    assert len((copy / "computed.jsonl").read_text("utf-8").splitlines()) == 4
    assert (copy / "assay.jsonl").read_text("utf-8")
