"""A user's task on a cluster: its file is carried in the run, and three pods train it under chaos."""

from pathlib import Path
from typing import Any

import pytest
from cluster_runs import ENDLESS, Reference, Runs, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

TASK = Path(__file__).resolve().parents[2] / "examples/custom/averaged.py"
OWN = {
    "recipe": "averaged:Averaged",
    "options": {"decay": 0.5},
    "files": {"averaged.py": TASK.read_text("utf-8")},
}


@pytest.mark.long
def test_a_user_task_on_three_pods_under_chaos_is_bit_equal_to_the_undisturbed_run(
    runs: Runs, faults: Any, reference: Reference
) -> None:
    """The loss of the example equals that of pretraining, so both runs must have the same losses, bit by bit."""
    run = runs.start("own-task", steps=ENDLESS, nodes={"min": 1, "max": 3}, training=OWN)
    run.wait_for_pods(0, 1, 2)
    run.wait_for_world(3)
    faults.kill_container(runs.namespace, run.live_pods()[1]["metadata"]["name"])
    run.wait_for_attempt(1, 1)
    run.wait_for_world(3)
    runs.kubectl("delete", "pod", run.live_pods()[2]["metadata"]["name"], "--wait=false")
    run.wait_for_attempt(2, 1)
    run.wait_for_world(3)
    run.wait_for_step(run.newest_step() + 20)
    assert run.repeated_steps() == 0
    run.expect_same_as(reference)
    assert all(0 <= row["metrics"]["accuracy"] <= 1 for row in run.rows())


def test_an_error_in_user_task_code_fails_the_run_with_its_file_and_line(
    runs: Runs,
) -> None:
    working = OWN["files"]["averaged.py"]  # type: ignore[index]
    broken = working.replace("return sums(output", "return sumz(output")
    assert broken != working, "the example has no such line any more"
    run = runs.start(
        "own-task-broken", steps=ENDLESS, training={**OWN, "files": {"averaged.py": broken}}
    )
    wait_for(lambda: run.is_true("Failed"), "the run's failure")
    condition = run.condition("Failed")
    assert condition["reason"] == "UserError"
    assert (
        "averaged.py:" in condition["message"]
        and "name 'sumz' is not defined" in condition["message"]
    )
