"""Names of failures: a full volume is one cause, and no sentinel of the protocol appears in a message."""

from evergrad_coordinator.protocol import Broken
from evergrad_coordinator.rules.budget import FailureBudget, GenerationFailure
from evergrad_coordinator.rules.state import TrainingState


def describe(report: Broken) -> str:
    budget = FailureBudget(limit=0, recovery="fresh")
    budget.report(GenerationFailure("0", 1.0, report), TrainingState())
    return budget.describe()


def test_a_worker_that_failed_before_any_step_is_described_without_minus_one() -> None:
    words = describe(Broken(1, "worker_crash", rank=-1, step=-1, exit_code=1))
    assert (
        "Last: worker_crash on a worker without a rank (node 0) before a step was reported, exit code 1."
        in words
    )
    assert "-1" not in words
    words = describe(Broken(1, "worker_crash", rank=2, step=7, exit_code=1))
    assert "worker_crash on rank 2 (node 0) after step 7, exit code 1." in words


def test_a_full_volume_is_its_own_cause_and_counts_like_a_host_fault() -> None:
    report = Broken(1, "environment", rank=0, step=7, exit_code=70, trouble="no_space")
    failure = GenerationFailure("0", 1.0, report)
    assert failure.cause == "volume_full" and failure.is_of_host
    other = GenerationFailure("0", 1.0, Broken(1, "environment", trouble="io"))
    assert other.cause == "environment"
    # A newer node may send a trouble that this version does not contain.
    assert (
        GenerationFailure("0", 1.0, Broken(1, "environment", trouble="new")).cause
        == "environment"
    )
