"""A task of the user's own that reads no text and trains no language model: the file names neither model nor
data, and the run is as elastic and as exact as any other."""

import json
from typing import Any

import pytest
from run_helpers import (
    INTERNAL,
    STOPPED_SAVED,
    USER_ERROR,
    Experiment,
    assert_same_curve,
    assert_same_state,
    events,
    fault,
    read_lines,
)

TASK = '''
"""Fits points of a curve, which it makes itself, by a small network."""

import hashlib
import json

import torch
from torch import nn

from evergrad_trainer.task import Evaluator, Loss, Modules, Rows, Section, Stage


class Options(Section):
    points: int = 96


class Points:
    fill = {"x": 0, "y": 0}

    def __init__(self, path):
        self.table = torch.tensor(json.loads(path.read_text()))
        self.fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()

    def __len__(self):
        return len(self.table)

    def read(self, items):
        rows = self.table[list(items)]
        return Rows({"x": rows[:, :1].clone(), "y": rows[:, 1:].clone()}, weight=len(items))

    def describe(self, item):
        return f"point {item}"


class Curve:
    Options = Options
    metrics = {"error": "Mean absolute error."}

    def __init__(self, setup):
        self.setup = setup

    def prepare(self, prepared, folder):
        path = folder / "points.json"
        made = not path.exists()
        if made:
            xs = [number / self.setup.options.points for number in range(self.setup.options.points)]
            path.write_text(json.dumps([[x, x * x] for x in xs]))
        with (folder / "log").open("a") as log:
            log.write(f"{made}\\n")
        return {"file": path.name}

    def stages(self, prepared):
        return [Stage({"points": (Points(prepared.folder / prepared.facts["file"]), 1.0)})]

    def evaluators(self, prepared):
        return {"all": Evaluator([Points(prepared.folder / prepared.facts["file"])])}

    def observers(self):
        return ()

    def build(self, build_model):
        torch.manual_seed(torch.initial_seed())
        body, head = nn.Linear(1, 16), nn.Linear(16, 1)
        return Modules({"body": body, "head": head}, frozen={"scale": nn.Linear(1, 1)})

    def loss(self, modules, batch, stage):
        hidden = torch.tanh(modules.trained["body"](modules.frozen["scale"](batch["x"])))
        gap = modules.trained["head"](hidden) - batch["y"]
        return Loss(gap.square().sum(), {"error": gap.detach().abs().sum()})

    def enter(self, modules, stage):
        pass

    def after_update(self, modules, metrics):
        pass
'''


def training(**changes: Any) -> dict[str, Any]:
    return {
        "recipe": "curve:Curve",
        "batching": {"globalBatchSize": 8, "microBatchSize": 2},
        "optimizer": {"learningRate": 1e-2},
        "horizon": {"steps": 10},
        "checkpoint": {"every": {"steps": 3}},
        "evaluation": {"every": {"steps": 5}},
        "runtime": {"device": "cpu", "precision": "fp32"},
        "reproducibility": {"elastic": "exact"},
        **changes,
    }


def write_curve(experiment: Experiment, text: str = TASK, **changes: Any) -> None:
    experiment.write(training(**changes))
    (experiment.path / "curve.py").write_text(text, "utf-8")


def test_a_task_without_text_is_killed_and_resumed_bit_equal_to_an_undisturbed_run(
    experiment: Experiment,
) -> None:
    write_curve(experiment)
    experiment.run(directory="undisturbed")
    write_curve(experiment, stop={"afterStep": 4})
    experiment.run(directory="stopped", expect=STOPPED_SAVED)
    write_curve(experiment)
    experiment.run(directory="stopped")
    killed = fault("step", call=8, action="SIGKILL", to="command")
    experiment.run(directory="killed", faults=[killed], expect=-9)
    experiment.run(directory="killed")

    whole = experiment.at("undisturbed")
    for name in ("stopped", "killed"):
        assert_same_curve(whole, experiment.at(name))
        assert_same_state(whole, experiment.at(name))
    rows = read_lines(whole / "metrics.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"] and "error" in rows[-1]["metrics"]
    assert [row["name"] for row in read_lines(whole / "evaluation.jsonl")] == ["all", "all"]
    # Prepared once, by the first start; each later one found it.
    (log,) = experiment.path.glob("runs/.prepared/task-*/log")
    assert log.read_text().splitlines() == ["True"] + ["False"] * 4
    (newest,) = whole.glob("checkpoints/step-*10*/manifest.json")
    assert json.loads(newest.read_text("utf-8"))["extra"]["state"]["frozen"].keys() == {
        "scale"
    }


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "rows = self.table[list(items)]",
            "rows = self.tables[list(items)]",
            "AttributeError: 'Points' object has no attribute 'tables'",
        ),
        (
            "path.write_text(json.dumps(",
            "path.write_text(json.dump(",
            "the task of spec.training.recipe failed in prepare",
        ),
        (
            'return {"file": path.name}',
            'return {"file": path}',
            "prepare returns what is no JSON",
        ),
        (
            "def build(self, build_model):",
            "def build(self, model):\n        model()\n\n    def b(self):",
            "spec.training.model: missing",
        ),
    ],
)
def test_errors_of_its_preparation_and_sources_are_reported(
    experiment: Experiment, old: str, new: str, said: str
) -> None:
    assert old in TASK
    write_curve(experiment, TASK.replace(old, new, 1))
    err = experiment.run(expect=USER_ERROR).err
    assert said in err and "Traceback" not in err


def change(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new, 1)
    return text


@pytest.mark.acceptance("input-G-29")
@pytest.mark.capability("G-29")
def test_a_module_that_cannot_be_moved_is_reported_at_the_end_of_the_run(
    experiment: Experiment,
) -> None:
    stuck = """

        def refuse(device):
            raise RuntimeError("the device does not answer")

        head.to = refuse
        return Modules("""
    write_curve(experiment, change(TASK, ("\n        return Modules(", stuck)))
    err = experiment.run(expect=INTERNAL).err
    named = "while the module head was moved to cpu"
    assert "RuntimeError: the device does not answer" in err and named in err
    assert read_lines(experiment.at() / "metrics.jsonl") == []
    (failed,) = events(experiment.at(), "failed")
    assert failed["message"] == f"the device does not answer\n{named}"


READ = "rows = self.table[list(items)]"
NOTED = """
        import threading
        name = threading.current_thread().name
        with open("readers", "a") as log:
            log.write(f"{name}\\n")
        """
WAITING = """
        # The next samples are asked for before a loss is computed, which takes as long as reading them.
        import time
        latest = time.monotonic() + 60
        while "prefetch" not in open("readers").read() and time.monotonic() < latest:
            time.sleep(0.01)
        """
FIRST_OF_LOSS = 'hidden = torch.tanh(modules.trained["body"]'


@pytest.mark.acceptance("input-T-50")
@pytest.mark.capability("T-50")
def test_samples_are_read_ahead_in_a_thread_and_an_error_in_it_ends_the_run(
    experiment: Experiment,
) -> None:
    noted = (READ, NOTED.lstrip("\n ") + READ)
    waiting = (FIRST_OF_LOSS, WAITING.lstrip("\n ") + FIRST_OF_LOSS)
    write_curve(experiment, change(TASK, noted, waiting))
    experiment.run(directory="whole")
    readers = (experiment.path / "readers").read_text().splitlines()
    assert {"MainThread", "evergrad-prefetch"} == set(readers)

    (experiment.path / "readers").unlink()
    torn = (
        'if "prefetch" in name:\n            raise OSError("the table is torn")\n        '
    )
    write_curve(
        experiment, change(TASK, (READ, NOTED.lstrip("\n ") + torn + READ), waiting)
    )
    err = experiment.run(directory="torn", expect=None).err
    assert "the table is torn" in err
    assert read_lines(experiment.at("torn") / "metrics.jsonl") == []
    (failed,) = events(experiment.at("torn"), "failed")
    assert "the table is torn" in failed["message"]


TIMEOUTS = """
        from torch.distributed import distributed_c10d
        group = distributed_c10d._get_default_group()
        seconds = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        with open("timeouts", "a") as log:
            log.write(f"{seconds}\\n")
"""


@pytest.mark.capability("C-54")
def test_exchanges_of_a_run_have_the_timeout_of_the_manifest(
    experiment: Experiment,
) -> None:
    after = "def after_update(self, modules, metrics):"
    text = change(TASK, (f"{after}\n        pass", after + TIMEOUTS))
    runtime = {"device": "cpu", "precision": "fp32", "collectiveTimeoutSeconds": 7200}
    write_curve(experiment, text, runtime=runtime)
    experiment.run("--workers", "2")
    assert (experiment.path / "timeouts").read_text().split() == ["7200.0"] * 20
