"""The other kinds of chaos, shortly: each ends with the bits of an undisturbed run.

``make chaos KIND=…`` does one of them for longer.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from chaos_helpers import (
    VARIANTS,
    await_events,
    final_step,
    find_repeats,
    processes_in,
    start_disturbed,
)
from patience import PATIENCE
from run_helpers import (
    EXACT,
    STOPPED_SAVED,
    Experiment,
    assert_same_state,
    checkpoints,
    curve,
)

KINDS = [
    pytest.param(kind, marks=pytest.mark.long) for kind in sorted(set(VARIANTS) - {"any"})
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]


@pytest.mark.acceptance("8d-2d")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_one_kind_of_disturbance_ends_bit_equal_to_an_undisturbed_run(
    make_experiment: Callable[[], Experiment], kind: str
) -> None:
    experiment, variant = make_experiment(), VARIANTS[kind]
    run = start_disturbed(experiment, variant, seed=5)
    try:
        await_events(run, count=variant.most)
        (run.directory / "stop").touch()
        run.started.wait().expect(STOPPED_SAVED)
    finally:
        run.watch.close()
    count = final_step(run.directory)
    calm = experiment.start(
        *variant.calm, "--stop-after-steps", str(count), directory="calm"
    )
    calm.wait(seconds=PATIENCE).expect(STOPPED_SAVED)
    check(run.directory, experiment.at("calm"), count, run.describe())
    repeats = [one for one in find_repeats(run.directory) if one.is_from_checkpoint]
    num_lost = sum(
        "kills all nodes" in line or "kills the only node" in line for line in run.lines()
    )
    assert len(repeats) <= num_lost, run.describe()
    assert num_lost > 0 or kind != "transfer", "no source died while it fed a newcomer"
    assert processes_in(experiment.path) == []


def check(found: Path, wanted: Path, count: int, describe: str) -> None:
    """Samples, losses and the final state of both."""
    ours, theirs = curve(found), curve(wanted)
    assert sorted(theirs) == list(range(1, count + 1))
    different = [
        (step, key)
        for step in theirs
        for key in EXACT
        if ours[step][key] != theirs[step][key]
    ]
    assert not different, f"{different[:3]}: {describe}"
    assert checkpoints(found)[-1] == checkpoints(wanted)[-1] == count
    assert_same_state(found, wanted)
