"""N steps are K steps, an end by any signal, and the rest: the same samples, the same bits, no step lost or
twice."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from run_helpers import (
    STOPPED_SAVED,
    Experiment,
    assert_same_curve,
    assert_same_state,
    checkpoints,
    curve,
    events,
    fault,
    final_state,
    metric_rows,
    recipe,
    steps_of,
    wait_until,
)

STEPS = 8
SAVE_EVERY = 3
POINTS = pytest.mark.parametrize(
    "last", [5, 6, 7], ids=["before a checkpoint", "at a checkpoint", "after a checkpoint"]
)


@dataclass(frozen=True)
class Setting:
    """How a run is trained: ``slots`` micro-batches a process and step."""

    workers: int
    slots: int
    parallelism: str = "dataParallel"

    def __str__(self) -> str:
        return f"{self.workers} processes, {self.slots} slots each, {self.parallelism}"

    @property
    def training(self) -> dict[str, Any]:
        return recipe(
            batching={"globalBatchSize": self.workers * self.slots},
            checkpoint={"every": {"steps": SAVE_EVERY}, "asynchronous": False},
            horizon={"steps": STEPS},
            runtime={"parallelism": self.parallelism},
        )


SETTINGS = [
    Setting(1, 3),
    Setting(2, 1),
    Setting(2, 3, "fsdp2"),
    *(
        pytest.param(setting, marks=pytest.mark.long)
        for setting in (
            Setting(1, 1),
            Setting(1, 3, "fsdp2"),
            Setting(2, 3),
            Setting(2, 1, "fsdp2"),
        )
    ),
]


@dataclass(frozen=True)
class Undisturbed:
    """A run that nothing happened to, and how to start others of its recipe."""

    experiment: Experiment
    setting: Setting

    def run(self, directory: str, **options: Any) -> Any:
        return self.experiment.run(
            "--workers", str(self.setting.workers), directory=directory, **options
        )

    @property
    def path(self) -> Path:
        return self.experiment.at("undisturbed")

    def assert_equal(self, directory: str) -> None:
        """``compare-runs --exact`` reports equality, and the final tensors are equal."""
        assert_same_curve(self.path, self.experiment.at(directory))
        assert_same_state(self.path, self.experiment.at(directory))
        self.experiment.command(
            "compare-runs", str(self.path), str(self.experiment.at(directory)), "--exact"
        ).expect(0)


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def undisturbed(
    request: pytest.FixtureRequest, make_experiment: Callable[[], Experiment]
) -> Undisturbed:
    experiment = make_experiment()
    experiment.write(request.param.training)
    one = Undisturbed(experiment, request.param)
    one.run("undisturbed")
    assert steps_of(one.path) == list(range(1, STEPS + 1))
    return one


@pytest.mark.acceptance("8d-1a:pretrain", "8d-1d:pretrain", "8d-6c:pretrain", "8d-9b")
@pytest.mark.capability("G-32", "O-45", "T-2")
@POINTS
def test_a_run_stopped_on_request_and_started_again_equals_an_undisturbed_run(
    undisturbed: Undisturbed, last: int
) -> None:
    directory = f"stopped-after-{last}"
    # Sent to one rank while step ``last - 1`` runs: all agree on it at the beginning of step ``last``, which
    # is then the last.
    sent = fault("step", call=last - 1, action="SIGTERM")
    undisturbed.run(directory, expect=STOPPED_SAVED, faults=[sent])
    path = undisturbed.experiment.at(directory)
    assert steps_of(path) == list(range(1, last + 1))
    assert checkpoints(path)[-1] == last
    assert [(event["reason"], event["saved"]) for event in events(path, "stop")] == [
        ("signal", True)
    ]

    undisturbed.run(directory)
    assert steps_of(path) == list(range(1, STEPS + 1)), (
        "a step was trained twice, or left out"
    )
    assert events(path, "start")[-1]["resumed_from"] == last
    undisturbed.assert_equal(directory)


@pytest.mark.acceptance("8d-1b:pretrain", "8d-12b")
@pytest.mark.capability("G-89", "C-13", "C-45", "O-19")
@POINTS
def test_a_run_killed_and_started_again_repeats_exactly_the_steps_after_its_last_checkpoint(
    undisturbed: Undisturbed, last: int
) -> None:
    directory = f"killed-after-{last}"
    # Kill the whole command, because a single lost worker is replaced. Rank 0 requests it: by then it has
    # written the rows of all earlier steps.
    killed = fault("step", call=last + 1, action="SIGKILL", rank=0, to="command")
    undisturbed.run(directory, expect=-9, faults=[killed])
    path = undisturbed.experiment.at(directory)
    assert steps_of(path) == list(range(1, last + 1))
    newest = checkpoints(path)[-1]
    assert newest == last - last % SAVE_EVERY

    undisturbed.run(directory)
    rows = metric_rows(path)
    assert [(row["step"], row["generation"]) for row in rows] == [
        *((step, 1) for step in range(1, last + 1)),
        *((step, 2) for step in range(newest + 1, STEPS + 1)),
    ]
    first_time = {row["step"]: row["sample_hash"] for row in rows if row["generation"] == 1}
    assert all(
        first_time.get(step, row["sample_hash"]) == row["sample_hash"]
        for step, row in curve(path).items()
    )
    assert events(path, "restored")[-1]["checkpoint"].startswith(f"step-{newest}")
    undisturbed.assert_equal(directory)


@pytest.mark.acceptance("8d-2d")
@pytest.mark.long
def test_many_stops_and_kills_in_one_run_do_not_change_its_curve(
    experiment: Experiment,
) -> None:
    experiment.write(recipe(horizon={"steps": 20}, checkpoint={"every": {"steps": 4}}))
    experiment.run(directory="undisturbed")
    for call, action in (
        (3, "SIGKILL"),
        (6, "SIGTERM"),
        (2, "SIGKILL"),
        (5, "SIGKILL"),
        (1, "SIGTERM"),
        (4, "SIGKILL"),
    ):
        code = experiment.run(
            expect=None, faults=[fault("step", call=call, action=action)]
        ).code
        assert code == (-9 if action == "SIGKILL" else STOPPED_SAVED)
    experiment.run()
    assert_same_curve(experiment.at("undisturbed"), experiment.at())
    assert_same_state(experiment.at("undisturbed"), experiment.at())
    assert [row["step"] for row in metric_rows(experiment.at()) if row["generation"] == 7][
        -1
    ] == 20


@pytest.mark.acceptance("8d-2b:pretrain")
def test_a_kill_while_a_checkpoint_is_written_resumes_at_the_previous_one(
    experiment: Experiment,
) -> None:
    experiment.write(recipe(checkpoint={"asynchronous": False}))
    experiment.run(directory="undisturbed")
    experiment.run(expect=-9, faults=[fault("shard", call=2, action="SIGKILL")])
    assert checkpoints(experiment.at()) == [3]
    experiment.run()
    assert [row["step"] for row in metric_rows(experiment.at())] == [
        1,
        2,
        3,
        4,
        5,
        6,
        4,
        5,
        6,
        7,
        8,
    ]
    assert_same_curve(experiment.at("undisturbed"), experiment.at())
    assert not list((experiment.at() / "checkpoints" / ".tmp").glob("*")), (
        "what the killed process wrote was left behind"
    )


def test_a_run_killed_before_its_first_checkpoint_starts_again(
    experiment: Experiment,
) -> None:
    experiment.run(directory="undisturbed")
    experiment.run(expect=-9, faults=[fault("step", call=3, action="SIGKILL")])
    assert checkpoints(experiment.at()) == []
    again = experiment.run()
    assert steps_of(experiment.at()) == [1, 2, *range(1, 9)]
    assert (
        "no checkpoint was saved before the last process of this run ended: training starts again at step 1, "
        "and steps 1 to 2 are trained again" in again.out + again.err
    )
    assert_same_curve(experiment.at("undisturbed"), experiment.at())


@pytest.mark.acceptance("8d-2d")
def test_a_real_signal_at_any_time_loses_nothing(experiment: Experiment) -> None:
    """No planned fault: a real kill from another process, whenever it lands."""
    import signal

    experiment.write(recipe(horizon={"steps": 60}))
    experiment.run(directory="undisturbed")
    for number, seen in ((signal.SIGKILL, 4), (signal.SIGTERM, 9), (signal.SIGKILL, 15)):
        run = experiment.start(faults=[fault("step", call=0, action="sleep", seconds=0.1)])
        wait_until(lambda seen=seen: max(steps_of(experiment.at()), default=0) >= seen)  # type: ignore[misc]
        run.send(number)
        assert run.wait().code == (STOPPED_SAVED if number == signal.SIGTERM else -9)
    experiment.run()
    assert_same_curve(experiment.at("undisturbed"), experiment.at())
    assert_same_state(experiment.at("undisturbed"), experiment.at())


def test_dropout_draws_the_same_numbers_after_a_resume(experiment: Experiment) -> None:
    model = {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 16,
    }
    experiment.write({**recipe(), "model": {"config": model}})
    experiment.run(directory="undisturbed")
    experiment.run("--stop-after-steps", "4", expect=STOPPED_SAVED)
    experiment.run()
    assert_same_curve(experiment.at("undisturbed"), experiment.at())
    assert_same_state(experiment.at("undisturbed"), experiment.at())


@pytest.mark.capability("O-36", "T-15")
@pytest.mark.parametrize("precision", ["bf16-autocast", "bf16"])
def test_every_precision_resumes_bit_equal(experiment: Experiment, precision: str) -> None:
    import torch

    experiment.write(recipe(runtime={"precision": precision}))
    experiment.run(directory="undisturbed")
    experiment.run("--stop-after-steps", "4", expect=STOPPED_SAVED)
    experiment.run()
    assert_same_curve(experiment.at("undisturbed"), experiment.at())
    assert_same_state(experiment.at("undisturbed"), experiment.at())
    dtypes = {tensor.dtype for tensor in final_state(experiment.at()).values()}
    assert dtypes == {torch.bfloat16 if precision == "bf16" else torch.float32}
