"""The walks through the smaller examples: each command of their pages works, in the order of the page."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, SECONDS, play, read_blocks


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with the examples, as in a fresh clone."""
    left_out = shutil.ignore_patterns("documents.jsonl", "rows.jsonl", "__pycache__")
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=left_out)
    return tmp_path


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_the_walkthrough_of_an_own_task_runs_as_written(copy: Path) -> None:
    printed = play("\n".join(read_blocks("examples/custom/README.md")), copy)
    assert '"name":"average"' in printed
    assert (copy / "runs/averaged/complete.json").is_file()


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_the_walkthrough_of_rows_runs_as_written(copy: Path) -> None:
    printed = play("\n".join(read_blocks("examples/sft/README.md")), copy)
    assert "heldOut-generated" in printed and '"exact_match"' in printed
    assert (copy / "runs/letters-sft/complete.json").is_file()


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_the_walkthrough_of_the_python_documentation_runs_as_written_except_for_its_kill(
    copy: Path,
) -> None:
    # Fewer steps than a reader would want to watch.
    replace(copy / "examples/pydoc/trainingrun.yaml", "steps: 300", "steps: 30")
    # `make run` equals the second block; the next test kills the process.
    make, train, kill, *others = read_blocks("examples/pydoc/README.md")
    assert make.startswith("make run") and kill.startswith("kill -9 ")
    # Sums of two nodes and of one are rounded differently: the comparison may find a step that differs.
    script = "\n".join([train, *others]).replace("horizon.steps=400", "horizon.steps=40")
    compared = "evergrad compare-runs runs/pydoc-lm runs/undisturbed"
    assert compared in script
    play(script.replace(compared, f"{compared} || [ $? = 1 ]"), copy)
    assert read_rows(copy)[-1]["step"] == 40
    assert (copy / "runs/pydoc-lm/report.html").is_file()
    assert list((copy / "runs/exported").glob("*.safetensors"))


def replace(manifest: Path, old: str, new: str) -> None:
    text = manifest.read_text("utf-8")
    assert text.count(old) == 1
    manifest.write_text(text.replace(old, new), "utf-8")


def read_rows(copy: Path) -> list[dict[str, Any]]:
    text = (copy / "runs/pydoc-lm/metrics.jsonl").read_text("utf-8")
    # A line that was cut by a kill is none.
    return [json.loads(line) for line in text.split("\n")[:-1]]


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_a_run_killed_as_on_the_page_resumes_at_its_newest_checkpoint(
    copy: Path,
) -> None:
    # The page's pgrep finds such runs on the whole machine. In a pid namespace there are no others.
    alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    alone += [] if os.geteuid() == 0 else ["--map-root-user"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user can make no namespace of processes.")
    # Its first checkpoint is saved long before its end, on a fast machine too.
    manifest = copy / "examples/pydoc/trainingrun.yaml"
    replace(manifest, "checkpoint: {every: {steps: 50}", "checkpoint: {every: {steps: 10}")
    _, train, kill, *_ = read_blocks("examples/pydoc/README.md")
    write, run = train.splitlines()

    # In a file, so that pgrep's pattern is not in the arguments of a shell.
    saved = "runs/pydoc-lm/checkpoints/step-10"
    (copy / "rude.sh").write_text(
        f"{write}\n{run} &\nuntil [ -d {saved} ]; do kill -0 $!; sleep 0.05; done\n"
        f"{kill}wait $! || [ $? = 137 ]\n",
        "utf-8",
    )
    play(f"{' '.join(alone)} bash -e rude.sh", copy)
    assert not (copy / "runs/pydoc-lm/complete.json").exists()
    before = read_rows(copy)

    play(run, copy)
    again = [row for row in read_rows(copy) if row["generation"] > before[-1]["generation"]]
    assert again[0]["step"] > 10 and again[0]["step"] % 10 == 1 and again[-1]["step"] == 300
    # Steps that are trained twice take the same samples.
    hashes = {row["step"]: row["sample_hash"] for row in before}
    repeated = [row for row in again if row["step"] in hashes]
    assert all(row["sample_hash"] == hashes[row["step"]] for row in repeated)


def test_the_commands_that_write_documents_run_as_written(copy: Path) -> None:
    for name, line in (
        ("computed", {"SMILES": "CCO", "weight": 46.07}),
        ("assay", {"description": "binding", "values": [{"SMILES": "CCO", "value": 1.0}]}),
    ):
        (copy / name).mkdir()
        (copy / name / "part.jsonl").write_text(json.dumps(line) + "\n", "utf-8")
    play("\n".join(read_blocks("examples/documents/README.md")), copy)
    assert len((copy / "computed.jsonl").read_text("utf-8").splitlines()) == 4
    assert (copy / "assay.jsonl").read_text("utf-8")
