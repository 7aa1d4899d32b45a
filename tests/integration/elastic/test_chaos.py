"""A run that is killed, frozen and reconfigured at random ends with the same bits as an undisturbed run.

``make chaos EVENTS=300 SEED=7`` does the same for longer. ``KIND`` selects one of ``chaos_helpers.VARIANTS``
instead of all kinds of events over gloo.
"""

import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from chaos_helpers import (
    BURIED,
    VARIANTS,
    Disturbed,
    await_events,
    final_step,
    find_repeats,
    growth,
    planned_generations,
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

from evergrad_trainer.checkpoint.store import open_store
from evergrad_trainer.observers.account_files import account
from evergrad_trainer.observers.history import read_history
from evergrad_trainer.run.directory import RunDirectory

KIND = os.environ.get("CHAOS_KIND") or "any"
VARIANT = VARIANTS[KIND]
EVENTS = int(os.environ.get("CHAOS_EVENTS") or VARIANT.most)
SEED = int(os.environ.get("CHAOS_SEED") or 371)
"""The default has all kinds among its first 30 events, many of them in pairs, and short freezes."""

# Each event and the end have a separate limit; their sum does not detect a hang.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]


@pytest.fixture(scope="module")
def experiment(make_experiment: Callable[[], Experiment]) -> Experiment:
    return make_experiment()


@pytest.fixture(scope="module")
def disturbed(experiment: Experiment) -> Iterator[Disturbed]:
    """Disturbed EVENTS times, and stopped then."""
    run = start_disturbed(experiment, VARIANT, seed=SEED)
    try:
        await_events(run, count=EVENTS)
        (run.directory / "stop").touch()
        run.started.wait().expect(STOPPED_SAVED)
    finally:
        run.watch.close()
    yield run


@pytest.fixture(scope="module")
def calm(experiment: Experiment, disturbed: Disturbed) -> Path:
    """The same run in one process, undisturbed, up to the same step."""
    count = str(final_step(disturbed.directory))
    experiment.start(*VARIANT.calm, "--stop-after-steps", count, directory="calm").wait(
        seconds=PATIENCE * max(1.0, EVENTS / 30)
    ).expect(STOPPED_SAVED)
    return experiment.at("calm")


def test_every_disturbance_is_recovered_from(disturbed: Disturbed) -> None:
    lines = disturbed.lines()
    recovered = [line for line in lines if "the run goes on" in line]
    assert len(recovered) >= EVENTS
    assert not [line for line in lines if "no recovery" in line]
    assert lines[-1].startswith(f"chaos: {EVENTS}") or lines[-1].startswith(
        f"chaos: {EVENTS + 1}"
    ), lines[-1]


def test_counted_steps_have_the_samples_and_losses_of_an_undisturbed_run(
    disturbed: Disturbed, calm: Path
) -> None:
    count = final_step(disturbed.directory)
    found, wanted = curve(disturbed.directory), curve(calm)
    assert sorted(wanted) == list(range(1, count + 1))
    different = [
        (step, key, found[step][key], wanted[step][key])
        for step in wanted
        for key in EXACT
        if step not in found or found[step][key] != wanted[step][key]
    ]
    assert not different, (
        f"{len(different)} values differ, the first: {different[0]}; {disturbed.describe()}"
    )


@pytest.mark.acceptance("8d-2d")
def test_the_final_state_is_bit_equal_to_an_undisturbed_run(
    disturbed: Disturbed, calm: Path
) -> None:
    assert (
        checkpoints(disturbed.directory)[-1]
        == checkpoints(calm)[-1]
        == final_step(disturbed.directory)
    )
    assert_same_state(disturbed.directory, calm)


def test_no_finished_step_is_repeated_while_any_process_holds_it(
    disturbed: Disturbed,
) -> None:
    """Only when all nodes are lost; or one step, when its row was written by the only one who had finished it
    and was lost."""
    lost_all = sum(
        "kills all nodes" in line or "kills the only node" in line
        for line in disturbed.lines()
    )
    repeats = find_repeats(disturbed.directory)
    assert sum(one.is_from_checkpoint for one in repeats) <= lost_all, disturbed.describe()
    unexplained = [
        one
        for one in repeats
        if not one.is_from_checkpoint and (one.num_steps > 1 or one.is_same_writer)
    ]
    assert not unexplained, disturbed.describe()


def test_every_checkpoint_on_disk_is_valid(disturbed: Disturbed) -> None:
    store = open_store(disturbed.directory / "checkpoints")
    names = [candidate.name for candidate in store.catalog.scan()]
    assert len(names) >= 2
    for name in names:
        store.reader.validate(name, checksums=True)
    assert store.catalog.set_aside() == []


def test_generations_only_increase(disturbed: Disturbed) -> None:
    generations = planned_generations(disturbed.directory)
    # A group that trains is adopted by the next coordinator as it is.
    assert len(generations) > EVENTS / 3 or KIND == "coordinator"
    assert all(before < after for before, after in pairwise(generations)), generations


@pytest.mark.parametrize(
    ("what", "most", "leaked"),
    [("descriptors", 8, BURIED[0]), ("threads", 4, BURIED[1]), ("memory", 16, 0)],
)
def test_memory_and_descriptors_of_processes_do_not_grow(
    disturbed: Disturbed, what: str, most: float, leaked: int
) -> None:
    grown = {
        name: growth(samples, what)
        for name, samples in disturbed.watch.old_enough().items()
    }
    assert any(name.startswith("launcher") for name in grown)
    assert any(name.startswith("worker") for name in grown) or KIND == "transfer", grown
    limits = {name: most + leaked * name.startswith("worker") for name in grown}
    assert {name: value for name, value in grown.items() if value > limits[name]} == {}


def test_the_accounts_sum_to_the_elapsed_time(disturbed: Disturbed) -> None:
    history = read_history(RunDirectory(disturbed.directory))
    accounts = account(history.steps, history.events, history.evaluations)
    first = next(event for event in history.events if event.type == "start")
    passed = max(event.time for event in history.events) - float(
        first.fields["process_start_time"]
    )
    assert accounts.elapsed_seconds == pytest.approx(passed, rel=0.01)
    assert accounts.notes == ()


def test_no_process_is_left_running(disturbed: Disturbed) -> None:
    assert processes_in(disturbed.directory.parents[1]) == []
