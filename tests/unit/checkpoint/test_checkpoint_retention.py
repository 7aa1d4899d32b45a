"""Which checkpoints are removed and which is the best: values in, names out."""

from hypothesis import given
from hypothesis import strategies as st

from evergrad_trainer.checkpoint.layout import Version
from evergrad_trainer.checkpoint.manifest import Candidate, Identity, Manifest
from evergrad_trainer.checkpoint.retention import choose_best, choose_removals


def build_candidate(step: int, *, best: bool = False, generation: int = 1) -> Candidate:
    version = Version(step, generation, step)
    return Candidate(
        f"step-{step}",
        version,
        Manifest(version, 1, Identity("", "", ""), {}, best, (), {}, 0.0),
    )


def test_the_oldest_are_removed_first_and_the_newest_are_kept() -> None:
    candidates = [build_candidate(step) for step in (300, 100, 400, 200)]
    assert choose_removals(candidates, keep=2, pinned=set()) == ["step-100", "step-200"]


def test_pinned_checkpoints_are_kept_in_addition_to_the_newest() -> None:
    candidates = [build_candidate(step) for step in (100, 200, 300, 400)]
    assert choose_removals(candidates, keep=2, pinned={"step-100"}) == ["step-200"]


@given(st.sets(st.integers(1, 50)), st.integers(1, 10), st.sets(st.integers(1, 50)))
def test_the_newest_and_every_pinned_checkpoint_are_kept_for_any_number_to_keep(
    steps: set[int], keep: int, pins: set[int]
) -> None:
    pinned = {f"step-{step}" for step in pins}
    removals = choose_removals(
        [build_candidate(step) for step in steps], keep=keep, pinned=pinned
    )
    kept = {f"step-{step}" for step in steps} - set(removals)
    assert {f"step-{step}" for step in sorted(steps)[-keep:]} <= kept
    assert len(kept - pinned) <= keep
    assert not pinned & set(removals)


def test_the_best_checkpoint_is_the_one_that_the_pointer_names() -> None:
    candidates = [build_candidate(step) for step in (100, 200)]
    assert choose_best(candidates, "step-100") == "step-100"
    assert choose_best(candidates, None) is None
    assert choose_best(candidates, "step-50") is None


def test_a_newer_best_checkpoint_overrides_a_pointer_that_a_kill_left_behind() -> None:
    candidates = [
        build_candidate(100, best=True),
        build_candidate(200, best=True),
        build_candidate(300),
    ]
    assert choose_best(candidates, "step-100") == "step-200"


def test_a_pointer_to_a_checkpoint_that_was_not_saved_as_best_counts() -> None:
    candidates = [build_candidate(100, best=True), build_candidate(200)]
    assert choose_best(candidates, "step-200") == "step-200"
