"""The example of each recipe on a cluster: the commands of its page without changes, on two nodes, and the
report for a user."""

import html
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import ROOT, Runs, read_rows, wait_for

from bed.product_images import version

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(3600)]

SECONDS = 1500.0
"""Time limit of the commands of one page; two nodes share the two cores of a small machine."""
IMAGE = f"registry.example.com/evergrad-trainer:{version()}"
"""The trainer's image in the pages."""
SETTINGS = (
    "--set spec.nodes.min=2 --set spec.nodes.max=2 --set spec.training.runtime.threads=1"
)
"""Two nodes, and none before the other has started; one thread each, for the same reason as above."""
PLOTS = ("Training loss", "Evaluation loss", "Learning rate", "Throughput", "Gradient norm")
SECTIONS = ("Where the time went", "Evaluations", "Checkpoints", "Restarts", "Environment")


@dataclass(frozen=True)
class Example:
    """The runs on the page of one example. ``runs``: run → its PVC, in order."""

    folder: str
    runs: dict[str, str]
    metrics: tuple[str, ...] = ()
    """Content of the last run's report in addition to the loss: metrics of its recipe, and its evaluation
    sets."""


PYDOC = Example("pydoc", {"pydoc-lm": "pydoc-lm"}, ("heldOut",))
SFT = Example(
    "sft",
    {"letters-sft": "letters-sft"},
    ("heldOut", "heldOut-generated", "exact_match", "parse_rate", "rmse"),
)
TWO_STAGES = Example(
    "two-stage-kl",
    {"two-stages": "two-stages"},
    ("stage1", "stage2", "policy_loss", "reference_loss", "penalty", "kl"),
)
LATENT_EDIT = Example(
    "latent-edit",
    {"latent-edit": "latent-edit"},
    (
        "test",
        "gain",
        "unchanged_loss",
        "mean_loss",
        "prediction_variance",
        "target_variance",
    ),
)
PREFERENCE = Example(
    "preference",
    {"brief-sft": "brief-sft", "brief": "brief-sft"},
    ("heldOut", "accuracy", "margin", "chosen_reward", "rejected_reward"),
)


class Walk:
    """The commands of pages, as a user enters them: in a copy of the examples, with the namespace of the test
    as the context's namespace."""

    def __init__(self, runs: Runs, image: str, folder: Path) -> None:
        made = shutil.ignore_patterns("*.jsonl*", "corpus")
        shutil.copytree(ROOT / "examples", folder / "examples", ignore=made)
        given = runs.kubectl("config", "view", "--raw", "--minify", "-o", "json")
        config = json.loads(given)
        config["contexts"][0]["context"]["namespace"] = runs.namespace
        (folder / "kubeconfig").write_text(json.dumps(config))
        programs = [str(Path(sys.executable).parent), str(runs.cluster.kubectl.parent)]
        self.folder = folder
        self._image = image
        self._started: list[subprocess.Popen[str]] = []
        self._environment = {
            **os.environ,
            "PATH": os.pathsep.join([*programs, os.environ["PATH"]]),
            "KUBECONFIG": str(folder / "kubeconfig"),
        }

    def start(self, script: str) -> "subprocess.Popen[str]":
        """Return the commands of ``script``, which stops at the first failure."""
        process = subprocess.Popen(
            ["bash", "-c", f"set -euo pipefail\n{script}"],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def finish(self, process: "subprocess.Popen[str]") -> str:
        """Return the commands' output after all of them have succeeded."""
        said, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, said[-8000:]
        return said

    def train(self, example: Example, *, settings: str = "") -> "subprocess.Popen[str]":
        """Start with the commands of an example's page, with ``settings`` merged into each of its files."""
        script = commands_of(ROOT / f"examples/{example.folder}/README.md", "On a cluster")
        assert script.count(" --wait") == len(example.runs)
        return self.start(script.replace(" --wait", f" {settings} --wait"))

    def fetch(self, name: str, claim: str) -> Path:
        """Copy the files of a run as the page describes, and return their folder."""
        script = commands_of(ROOT / "docs/operate/cluster.md", "The files of a run")
        for word, own in (
            ("CLAIM,quickstart", f"CLAIM,{claim}"),
            (IMAGE, self._image),
            ("-C /volume quickstart", f"-C /volume {name}"),
            ("get trun quickstart", f"get trun {name}"),
            ("evergrad report quickstart", f"evergrad report {name}"),
        ):
            assert word in script, script
            script = script.replace(word, own)
        self.finish(self.start(script))
        return self.folder / name

    def close(self) -> None:
        """Kill all processes that still run, with their descendants."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def commands_of(page: Path, title: str) -> str:
    """Return the commands of a section: its indented lines."""
    found = re.search(
        rf"^## {title}\n(.*?)(?=^## |\Z)", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    assert found is not None, f"{page} has no section {title!r}"
    lines = [line[4:] for line in found[1].splitlines() if line.startswith("    ")]
    assert lines
    return "\n".join(lines)


@pytest.fixture
def run_walkthrough(runs: Runs, operator: Any, tmp_path: Path) -> Iterator[Walk]:
    one = Walk(runs, operator.trainer_image, tmp_path)
    yield one
    one.close()


def expect_whole(directory: Path, wanted: tuple[str, ...]) -> None:
    """Check that the report in ``directory`` is complete, has a decreasing loss, and contains ``wanted`` by
    name."""
    text = (directory / "report.html").read_text("utf-8")
    page = html.unescape(text)
    assert ">Complete</span>" in page
    titles = [
        re.sub(r"<[^>]*>", "", one)
        for one in re.findall(r"<h[23][^>]*>(.*?)</h[23]>", page)
    ]
    assert {*SECTIONS} <= {*titles}
    assert [
        one for one in PLOTS if not any(title.startswith(one) for title in titles)
    ] == []
    assert "Resolved configuration" in page
    for empty in ("Nothing was evaluated", "No checkpoint has been", "No step has been"):
        assert empty not in page

    # Each figure is drawn, the first of them is the loss, and its last number is the smaller one.
    figures = re.findall(r"<figure.*?</figure>", page, re.DOTALL)
    assert len(figures) >= len(PLOTS) + 1
    assert [one for one in figures if one.count("<path") < 2] == []
    said = re.search(r"Training loss against the step, from (\S+) to (\S+)\.", figures[0])
    assert said is not None
    assert float(said[2]) < float(said[1])
    rows = read_rows(directory / "metrics.jsonl")
    losses = [row["loss"] for row in rows]
    assert sum(losses[-10:]) < sum(losses[:10])

    cells = {
        re.sub(r"<[^>]*>", "", one)
        for one in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", page, re.DOTALL)
    }
    shown = cells | {title.partition(",")[0] for title in titles}
    assert [one for one in wanted if one not in shown] == []
    assert (directory / "report.md").stat().st_size > 0
    complete = json.loads((directory / "complete.json").read_text())
    assert complete["step"] == rows[-1]["step"]


def keep(directory: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Print the path of the report for a user."""
    report = folder / f"report-of-{directory.name}.html"
    shutil.copy(directory / "report.html", report)
    with capsys.disabled():
        print(f"\nthe report of {directory.name}: {report}")


@pytest.mark.parametrize(
    "example", [PYDOC, SFT, LATENT_EDIT, PREFERENCE], ids=lambda one: one.folder
)
def test_the_example_of_a_recipe_trains_on_two_nodes_and_its_report_is_complete(
    example: Example,
    runs: Runs,
    run_walkthrough: Walk,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_walkthrough.finish(run_walkthrough.train(example, settings=SETTINGS))
    for name, claim in example.runs.items():
        run = runs.adopt(name)
        assert run.status()["phase"] == "Complete"
        assert run.restarts() == {}
        directory = run_walkthrough.fetch(name, claim)
        keep(directory, tmp_path, capsys)
        is_last = name == [*example.runs][-1]
        expect_whole(directory, example.metrics if is_last else ())
        assert {row["world_size"] for row in read_rows(directory / "metrics.jsonl")} == {2}


def test_the_example_of_two_stages_is_bit_equal_to_an_undisturbed_run_after_a_killed_pod(
    runs: Runs,
    run_walkthrough: Walk,
    faults: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    process = run_walkthrough.train(TWO_STAGES)
    run = runs.adopt("two-stages")

    def is_training() -> bool:
        assert process.poll() is None, process.communicate()[0][-8000:]
        if runs.get("trainingruns", "two-stages") is None:
            return False
        last = (run.rows() or [{"step": 0, "world_size": 0}])[-1]
        return bool(last["step"] >= 3 and last["world_size"] == 2)

    wait_for(is_training, "the third step, of two nodes", seconds=SECONDS)
    faults.kill_container(runs.namespace, run.live_pods()[1]["metadata"]["name"])
    run_walkthrough.finish(process)
    assert 137 in [one.get("exitCode") for one in run.status()["attempts"]]

    directory = run_walkthrough.fetch("two-stages", "two-stages")
    keep(directory, tmp_path, capsys)
    expect_whole(directory, (*TWO_STAGES.metrics, "World size", "Changes of the world"))
    assert {row["world_size"] for row in read_rows(directory / "metrics.jsonl")} == {1, 2}

    # The same file on this machine, in one undisturbed process.
    alone = "evergrad run examples/two-stage-kl/trainingrun.yaml --run-directory runs/two-stages"
    run_walkthrough.finish(run_walkthrough.start(alone))
    compared = run_walkthrough.finish(
        run_walkthrough.start(
            "evergrad compare-runs runs/two-stages two-stages --exact --state"
        )
    )
    assert "losses equal bit by bit" in compared
    assert "The states after step 240 are equal bit by bit" in compared
