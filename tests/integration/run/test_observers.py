"""Trackers, monitors, early stopping and traces in real runs: kills and changes of rank 0 leave one run
without gaps, and repeat no decision."""

import gzip
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_helpers import Cluster, elastic_recipe, train_undisturbed
from elastic_helpers import fault as elastic_fault
from patience import PATIENCE
from run_helpers import (
    DONE,
    STOPPED_SAVED,
    USER_ERROR,
    Experiment,
    assert_same_state,
    checkpoints,
    constant,
    curve,
    events,
    fault,
    read_lines,
    recipe,
    steps_of,
)

from evergrad_trainer.report.facts import gather_facts
from evergrad_trainer.run.directory import RunDirectory

CLOSING = "evergrad_trainer.observers.trackers.observer.CLOSING_SECONDS"
PATIENT = {CLOSING: 150.0}
"""No test depends on how fast a library is imported."""
EVALUATED = {"data": {"heldOut": {"count": 6}}, "evaluation": {"every": {"steps": 4}}}
Points = dict[str, list[tuple[int, float]]]


def has(*packages: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in packages)


def show_tensorboard(folder: Path) -> tuple[list[str], Points]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    shown.Reload()
    names = shown.Tags()["scalars"]
    points = {
        name: [(one.step, one.value) for one in shown.Scalars(name)] for name in names
    }
    # One folder is one run.
    return ["tensorboard"], points


def show_wandb(folder: Path) -> tuple[list[str], Points]:
    """Return the content that `wandb sync` would send, file by file."""
    from wandb.proto import wandb_internal_pb2

    from evergrad_trainer.observers.trackers.weights_and_biases import _read_records

    ids, points = set[str](), Points()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        ids.add(path.stem.removeprefix("run-"))
        for data in _read_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    step = int(record.history.step.num)
                    points.setdefault(name, []).append((step, json.loads(item.value_json)))
    return sorted(ids), points


def show_mlflow(folder: Path) -> tuple[list[str], Points]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("evergrad")
    runs = client.search_runs([experiment.experiment_id])
    points = Points()
    for run in runs:
        for name in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, name)
            points.setdefault(name, []).extend((one.step, one.value) for one in history)
    return [run.info.run_id for run in runs], points


def show_aim(folder: Path) -> tuple[list[str], Points]:
    import aim

    # Runs are read through an index, which `aim up` keeps as it begins to show them.
    command = Path(sys.executable).with_name("aim")
    reindex = [command, "storage", "--repo", folder, "reindex", "--yes"]
    subprocess.run(reindex, check=True, capture_output=True, timeout=PATIENCE)
    repo = aim.Repo.from_path(str(folder))
    points, ids = Points(), []
    for run in repo.iter_runs():
        ids.append(run.hash)
        for metric in run.metrics():
            # Only its values are stored by hashes of their steps.
            steps, (values, *_) = metric.data.items_list()
            points.setdefault(metric.name, []).extend(zip(steps, values, strict=True))
    return ids, points


SHOWN: dict[str, Callable[[Path], tuple[list[str], Points]]] = {
    "tensorboard": show_tensorboard,
    "wandb": show_wandb,
    "mlflow": show_mlflow,
    "aim": show_aim,
}
NEEDED = {"mlflow": ("mlflow", "sqlalchemy", "alembic")}
TRACKERS = [
    pytest.param(
        name,
        marks=[
            pytest.mark.skipif(
                not has(*NEEDED.get(name, (name,))),
                reason=f"the extra {name} is not installed",
            ),
            pytest.mark.filterwarnings("default"),
        ],
    )
    for name in SHOWN
]


def assert_shown(tracker: str, directory: Path) -> None:
    """The tracker shows one run, with each step and each evaluation once, as the run's files have them."""
    ids, points = SHOWN[tracker](directory / "trackers" / tracker)
    assert len(ids) == 1, ids
    rows = curve(directory)
    for name in ("loss", "learning_rate", "grad_norm"):
        found = dict(points[f"train/{name}"])
        assert [step for step, _ in sorted(points[f"train/{name}"])] == sorted(rows), name
        assert found == pytest.approx({step: row[name] for step, row in rows.items()}), name
    evaluations = {
        row["step"]: row["loss"] for row in read_lines(directory / "evaluation.jsonl")
    }
    shown = sorted(points["evaluation/heldOut/loss"])
    assert [step for step, _ in shown] == sorted(evaluations)
    assert dict(shown) == pytest.approx(evaluations)


def run_ids(directory: Path) -> set[str]:
    """Every id that the run was ever given: in its record, its checkpoints and its trackers' notes."""
    found = {json.loads((directory / "run.json").read_text())["runId"]}
    for path in directory.glob("checkpoints/step-*/manifest.json"):
        state = json.loads(path.read_text())["extra"]["state"]
        found |= {part["run_id"] for part in state.values() if "run_id" in part}
    for path in directory.glob("trackers/*.json"):
        found.add(json.loads(path.read_text())["run"])
    return found


@pytest.fixture(scope="module")
def tracked(make_experiment: Callable[[], Experiment]) -> Iterator[Experiment]:
    """A run with evaluations, trained by one process, with which tracked runs are compared."""
    experiment = make_experiment()
    experiment.write(elastic_recipe(**EVALUATED))
    train_undisturbed(experiment)
    yield experiment


@pytest.fixture
def make_tracked(tracked: Experiment, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    clusters: list[Cluster] = []

    def make(logging: dict[str, Any], **options: Any) -> Cluster:
        tracked.write(elastic_recipe(**EVALUATED, logging=logging))
        path = tmp_path / f"cluster-{len(clusters)}"
        path.mkdir()
        clusters.append(Cluster(tracked, path, **options))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


@pytest.mark.acceptance("8d-15f")
@pytest.mark.capability("A-8", "A-48", "C-25", "C-53", "O-40", "O-77", "T-36", "T-56")
@pytest.mark.parametrize("tracker", TRACKERS)
def test_three_nodes_of_which_rank_0_dies_twice_are_shown_as_one_run_without_gaps(
    tracked: Experiment, make_tracked: Callable[..., Cluster], tracker: str
) -> None:
    """Killed within a step, and between an update and its record; a joining node replaces the first one."""
    kills = [
        elastic_fault("SIGKILL", "slot", rank=0, step=4, to="node", name="first"),
        elastic_fault("SIGKILL", "report", rank=0, step=9, to="node", name="second"),
    ]
    cluster = make_tracked({"trackers": [{"type": tracker}]})
    cluster.start(faults=kills, constants=PATIENT)
    cluster.until(lambda: cluster.has_happened("first"), "the first kill")

    def find_dead() -> list[int]:
        return [index for index, node in cluster.nodes.items() if node.poll() is not None]

    (first,) = cluster.until(find_dead, "the end of the killed node")
    cluster.start_node(first, faults=kills, constants=PATIENT)
    cluster.until(lambda: cluster.has_happened("second"), "the second kill")
    codes = [node.wait() for node in cluster.nodes.values()]
    assert sorted(codes) == [-9, DONE, DONE], cluster.describe()
    cluster.check(tracked.at("undisturbed"))
    assert_shown(tracker, cluster.directory)
    assert len(run_ids(cluster.directory)) == 1
    assert not events(cluster.directory, "warning"), cluster.describe()


@pytest.mark.capability("A-8", "A-48", "C-25", "T-36", "T-56")
@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_run_that_is_killed_and_resumes_at_its_checkpoint_shows_each_step_once(
    experiment: Experiment, tracker: str
) -> None:
    logging = {"trackers": [{"type": tracker}]}
    # Saved before the next step begins, on a busy machine too: the kill finds the checkpoint of step 3.
    saves = {"asynchronous": False}
    experiment.write(recipe(**EVALUATED, logging=logging, checkpoint=saves))
    faults = [fault("step", call=6, action="SIGKILL"), constant(CLOSING, 150.0)]
    experiment.run(faults=faults, expect=-9)
    experiment.run("--stop-after-steps", "3", faults=faults[1:], expect=STOPPED_SAVED)
    experiment.run(faults=faults[1:])
    # Steps 4 and 5 were trained twice.
    assert steps_of(experiment.at()) == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    assert_shown(tracker, experiment.at())
    assert len(run_ids(experiment.at())) == 1


def test_a_tracker_that_is_added_to_a_run_shows_it_from_its_first_step(
    experiment: Experiment,
) -> None:
    experiment.write(recipe(**EVALUATED))
    experiment.run("--stop-after-steps", "5", expect=STOPPED_SAVED)
    experiment.write(recipe(**EVALUATED, logging={"trackers": [{"type": "tensorboard"}]}))
    experiment.run(faults=[constant(CLOSING, 150.0)])
    assert_shown("tensorboard", experiment.at())
    (changed,) = events(experiment.at(), "changed")
    assert [one["path"] for one in changed["changes"]] == ["spec.training.logging.trackers"]


@pytest.mark.capability("C-26")
def test_a_tracker_that_fails_or_hangs_costs_no_step_and_is_reported_in_log_and_records(
    experiment: Experiment,
) -> None:
    (experiment.path / "taken").write_text("a file, and no folder")
    broken = {"type": "tensorboard", "directory": str(experiment.path / "taken")}
    experiment.write(recipe(logging={"trackers": [broken]}))
    ended = experiment.run(faults=[constant(CLOSING, 150.0)])
    (warning,) = events(experiment.at(), "warning")
    assert "is switched off: tensorboard failed, NotADirectoryError" in warning["message"]
    assert warning["message"] in ended.out
    assert steps_of(experiment.at()) == list(range(1, 9))
    logs = "".join(path.read_text() for path in (experiment.at() / "logs").rglob("*.log"))
    assert "tracker tensorboard: NotADirectoryError" in logs

    experiment.write(recipe(logging={"trackers": [{"type": "tensorboard"}]}), name="hung")
    hang = fault("track", call=2, action="sleep", seconds=1000.0)
    experiment.run(name="hung", faults=[hang, constant(CLOSING, 0.2)])
    (warning,) = events(experiment.at("hung"), "warning")
    assert "tensorboard has not taken the last records within 0.2 s" in warning["message"]
    assert steps_of(experiment.at("hung")) == list(range(1, 9))
    # The next process of the run shows the missed records.
    experiment.run(
        "--extend",
        "--set",
        "spec.training.horizon.steps=9",
        name="hung",
        faults=[constant(CLOSING, 150.0)],
    )
    _, points = show_tensorboard(experiment.at("hung") / "trackers" / "tensorboard")
    assert [step for step, _ in points["train/loss"]] == list(range(1, 10))


def test_a_tracker_whose_library_is_missing_is_refused_before_the_first_step(
    experiment: Experiment,
) -> None:
    missing = [name for name in SHOWN if not has(name)]
    if not missing:
        pytest.skip("all of them are installed here")
    experiment.write(recipe(logging={"trackers": [{"type": missing[0]}]}))
    for ended in (
        experiment.run(expect=USER_ERROR),
        experiment.command("preflight", "tiny.yaml"),
    ):
        assert ended.code == USER_ERROR
        said = ended.err + ended.out
        assert f"needs the package {missing[0]}" in said
        assert f"`pip install {missing[0]}`" in said
    assert not (experiment.at() / "metrics.jsonl").exists()


EARLY = {"early": {"metric": "loss", "patience": 2, "minDelta": 100}}
"""No loss is better than the first by so much: decided after step 3, so that step 4 is the last."""


def stops(directory: Path) -> list[tuple[str, int, bool]]:
    return [(row["reason"], row["step"], row["saved"]) for row in events(directory, "stop")]


@pytest.mark.capability("C-42")
def test_an_early_stop_is_decided_equally_after_a_kill_and_is_final(
    experiment: Experiment,
) -> None:
    experiment.write(recipe(stop=EARLY))
    experiment.run(expect=STOPPED_SAVED, directory="whole")
    assert stops(experiment.at("whole")) == [("observer", 4, True)]
    (alert,) = events(experiment.at("whole"), "alert")
    assert (alert["step"], alert["monitor"], alert["policy"]) == (3, "early stop", "stop")

    # The kill happens in step 4, after a checkpoint of step 3, which contains all earlier observations.
    experiment.run(faults=[fault("step", call=4, action="SIGKILL")], expect=-9)
    experiment.run(expect=STOPPED_SAVED)
    assert stops(experiment.at()) == [("observer", 4, True)]
    assert_same_state(experiment.at(), experiment.at("whole"))

    # A start of a run that was stopped so trains nothing.
    experiment.run(expect=STOPPED_SAVED)
    assert stops(experiment.at()) == 2 * [("observer", 4, True)]
    assert sorted(curve(experiment.at())) == [1, 2, 3, 4]

    # With more patience it continues, and keeps counting: decided after step 5.
    more = {"early": {**EARLY["early"], "patience": 4}}
    experiment.write(recipe(stop=more))
    experiment.run(expect=STOPPED_SAVED)
    assert stops(experiment.at())[2:] == [("observer", 6, True)]
    experiment.write(recipe())
    experiment.run()
    assert sorted(curve(experiment.at())) == list(range(1, 9))


@pytest.mark.acceptance("8d-16f")
@pytest.mark.capability("G-90", "G-91")
@pytest.mark.parametrize("killed_in", ["slot", "report"])
def test_three_nodes_stop_together_if_a_monitor_decides_although_rank_0_dies(
    tracked: Experiment, make_tracked: Callable[..., Cluster], killed_in: str
) -> None:
    """Killed within the step after which it is decided, or before it could write that down."""
    monitors = [
        {
            "type": "plateau",
            "metric": "loss",
            "patience": 2,
            "minDelta": 100,
            "policy": "stop",
        }
    ]
    kill = elastic_fault("SIGKILL", killed_in, rank=0, step=3, to="node", name="killed")
    cluster = make_tracked({})
    tracked.write(elastic_recipe(**EVALUATED, monitors=monitors))
    cluster.start(faults=[kill])
    cluster.until(lambda: cluster.has_happened("killed"), "the kill")
    codes = [node.wait() for node in cluster.nodes.values()]
    assert sorted(codes) == [-9, STOPPED_SAVED, STOPPED_SAVED], cluster.describe()
    assert stops(cluster.directory) == [("observer", 4, True)]
    (alert,) = events(cluster.directory, "alert")
    assert (alert["step"], alert["monitor"]) == (3, "plateau")


@pytest.mark.acceptance("8d-11d:latent_edit")
def test_a_monitor_saves_the_run_or_warns_according_to_its_policy(
    experiment: Experiment,
) -> None:
    monitors = [
        {
            "type": "plateau",
            "metric": "loss",
            "patience": 1,
            "minDelta": 100,
            "policy": "save",
        },
        {"type": "divergence", "metric": "grad_norm", "limit": 0, "window": 1},
    ]
    experiment.write(recipe(monitors=monitors, checkpoint={"every": {"steps": 6}}))
    ended = experiment.run()
    # It begins after step 2; all ranks know the next step.
    assert checkpoints(experiment.at()) == [3, 6, 8]
    found = [
        (row["step"], row["monitor"], row["policy"])
        for row in events(experiment.at(), "alert")
    ]
    assert found == [(1, "divergence", "warn"), (2, "plateau", "save")]
    assert (
        'alert step=1 monitor="divergence" policy=warn message=grad_norm is ' in ended.out
    )


@pytest.mark.capability("C-29", "C-30", "C-46")
def test_steps_are_traced_on_a_schedule_that_a_resume_keeps(experiment: Experiment) -> None:
    profile = {"steps": 1, "firstStep": 2, "every": 6, "keep": 1}
    experiment.write(recipe(logging={"profile": profile}))
    patient = [constant("evergrad_trainer.observers.profiler.WRITING_SECONDS", 150.0)]
    experiment.run("--stop-after-steps", "7", faults=patient, expect=STOPPED_SAVED)
    folder = experiment.at() / "profiles"
    assert [path.name.split(".")[0] for path in folder.iterdir()] == ["step-2"]
    experiment.run(faults=patient)
    (path,) = folder.iterdir()
    assert path.name.startswith("step-8.") and path.name.endswith(".trace.json.gz")
    names = {
        one.get("name")
        for one in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    }
    assert any("backward" in str(name).lower() for name in names)


@pytest.mark.capability("A-72", "C-40")
def test_operations_and_utilisation_are_in_the_records_the_lines_and_the_report(
    experiment: Experiment,
) -> None:
    experiment.write(recipe(logging={"peakFlops": "1G", "every": {"steps": 1}}))
    ended = experiment.run()
    (start,) = events(experiment.at(), "start")
    # One block: four matrices of 32 · 32 and three of 32 · 64; a head for the ids of bytes; attention.
    head = 32 * vocabulary(experiment.at())
    expected = (6 * (4 * 32 * 32 + 3 * 32 * 64 + head) + 12 * 32 * 16) * 4 * 16
    assert (start["flops_per_step"], start["peak_flops"]) == (expected, 1e9)
    assert ended.out.count(" mfu=") == 8
    figures = {
        one.title: one for one in gather_facts(RunDirectory(experiment.at())).figures
    }
    assert figures["Utilisation"].value.endswith("%")
    assert "FLOP/s over all processes" in figures["Utilisation"].note


def vocabulary(directory: Path) -> int:
    model = json.loads((directory / "run.json").read_text())["model"]
    return int(model["config"]["vocab_size"])
