"""How the time of a run was used: hand-made logs with kills, stops, failures and clocks that go backwards."""

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from evergrad_trainer.base.records import EvaluationRecord, Event, EventType, RunInfo
from evergrad_trainer.observers.account_files import account
from evergrad_trainer.observers.goodput import CAUSES, Goodput, WorldChange
from evergrad_trainer.observers.history import History, read_history
from evergrad_trainer.observers.time_account import Account, Record


def _account(history: History) -> Goodput:
    return account(history.steps, history.events, history.evaluations)


def _check_sum(goodput: Goodput, elapsed: float) -> None:
    assert set(goodput.lost_seconds) == set(CAUSES)
    assert min(goodput.lost_seconds.values()) >= 0
    assert goodput.elapsed_seconds == math.fsum(
        (goodput.productive_seconds, *goodput.lost_seconds.values())
    )
    assert goodput.elapsed_seconds == pytest.approx(elapsed, abs=1e-4)


def test_an_undisturbed_run_loses_only_startup_saves_evaluations_and_pauses(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=200))
    goodput = _account(read_history(run.directory))
    _check_sum(goodput, run.now - synthetic.BEGIN)
    assert goodput.productive_seconds == pytest.approx(200 * synthetic.STEP_SECONDS)
    assert goodput.lost_seconds["startup"] == pytest.approx(synthetic.STARTUP_SECONDS)
    assert goodput.lost_seconds["checkpoint"] == pytest.approx(
        4 * synthetic.BLOCKING_SECONDS
    )
    assert goodput.lost_seconds["evaluation"] == pytest.approx(
        5 * synthetic.EVALUATION_SECONDS
    )
    assert goodput.lost_seconds["other"] == pytest.approx(
        199 * synthetic.PAUSE_SECONDS, abs=1e-4
    )
    assert (
        goodput.lost_seconds["recompute"]
        == goodput.lost_seconds["downtime"]
        == goodput.lost_seconds["restore"]
        == 0
    )
    assert goodput.ratio == pytest.approx(100 / (run.now - synthetic.BEGIN))
    assert goodput.restarts == () and goodput.notes == ()
    assert [process.ended for process in goodput.processes] == ["complete"]


def test_process_time_is_multiplied_by_the_number_of_processes(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=200))
    goodput = _account(read_history(run.directory))
    [process] = goodput.processes
    # Four at first, two from the middle on: three on average.
    middle = (process.begin + process.end) / 2
    change = WorldChange(middle, 2, 100, 2, 4, "node_lost", "", 0.0)
    process = replace(process, world_size=4, changes=(change,))
    goodput = replace(goodput, processes=(process,))
    assert process.mean_world_size == pytest.approx(3.0)
    of_all = goodput.process_seconds
    assert of_all["productive"] == pytest.approx(3 * goodput.productive_seconds)
    assert math.fsum(of_all.values()) == pytest.approx(3 * goodput.elapsed_seconds)
    # While no process was there, none waited.
    gone = replace(process, seconds={**process.seconds, "downtime": 30.0})
    assert replace(goodput, processes=(gone,)).process_seconds["downtime"] == 0.0


def test_steps_after_the_last_checkpoint_of_a_killed_process_are_recompute(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path)
    run.write(synthetic.Process(last=57, ended="killed"))
    run.write(synthetic.Process(last=200, resumed_from=50, downtime_seconds=30.0))
    goodput = _account(read_history(run.directory))
    _check_sum(goodput, run.now - synthetic.BEGIN)
    assert goodput.productive_seconds == pytest.approx(200 * synthetic.STEP_SECONDS)
    assert goodput.lost_seconds["recompute"] == pytest.approx(7 * synthetic.STEP_SECONDS)
    assert goodput.lost_seconds["downtime"] == pytest.approx(30.0)
    assert goodput.lost_seconds["restore"] == pytest.approx(synthetic.RESTORE_SECONDS)
    assert goodput.lost_seconds["startup"] == pytest.approx(2 * synthetic.STARTUP_SECONDS)
    assert goodput.restarts_by_cause == {"killed": 1}
    assert (goodput.restarts[0].resumed_from, goodput.restarts[0].repeated_steps) == (50, 7)


def test_steps_lost_by_a_resume_are_not_productive_even_before_they_are_repeated(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path)
    run.write(synthetic.Process(last=57, ended="killed"))
    run.write(synthetic.Process(last=53, resumed_from=50, ended="killed"))
    goodput = _account(read_history(run.directory))
    assert goodput.productive_seconds == pytest.approx(53 * synthetic.STEP_SECONDS)
    assert goodput.lost_seconds["recompute"] == pytest.approx(7 * synthetic.STEP_SECONDS)
    assert goodput.processes[-1].ended == "running or killed"


def test_a_stop_by_signal_loses_no_step(tmp_path: Path, synthetic: ModuleType) -> None:
    run = synthetic.RunWriter(tmp_path)
    run.write(synthetic.Process(last=57, ended="signal"))
    run.write(synthetic.Process(last=200, resumed_from=57, downtime_seconds=5.0))
    goodput = _account(read_history(run.directory))
    _check_sum(goodput, run.now - synthetic.BEGIN)
    assert goodput.lost_seconds["recompute"] == 0
    assert goodput.restarts_by_cause == {"signal": 1}
    assert goodput.restarts[0].repeated_steps == 0
    assert goodput.restarts[0].downtime_seconds == pytest.approx(5.0)


def test_a_failure_is_distinguished_from_a_kill_and_has_its_error(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path)
    run.write(synthetic.Process(last=56, ended="failed"))
    run.write(synthetic.Process(last=60, resumed_from=50, ended="killed"))
    run.write(synthetic.Process(last=200, resumed_from=50))
    goodput = _account(read_history(run.directory))
    _check_sum(goodput, run.now - synthetic.BEGIN)
    assert goodput.restarts_by_cause == {"failed": 1, "killed": 1}
    assert goodput.restarts[0].detail == "SaveError: 3 saves in a row have failed."
    assert goodput.lost_seconds["recompute"] == pytest.approx(
        (6 + 10) * synthetic.STEP_SECONDS
    )


def test_the_time_of_a_process_killed_before_its_first_step_is_startup_and_restore(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path)
    run.write(synthetic.Process(last=50, ended="killed"))
    run.write(synthetic.Process(last=50, resumed_from=50, ended="killed"))
    goodput = _account(read_history(run.directory))
    _check_sum(goodput, run.now - synthetic.BEGIN)
    second = goodput.processes[1]
    assert (second.num_steps, second.last_step) == (0, None)
    assert second.seconds["restore"] == pytest.approx(synthetic.RESTORE_SECONDS)
    assert second.seconds["startup"] == pytest.approx(synthetic.STARTUP_SECONDS)
    assert goodput.productive_seconds == pytest.approx(50 * synthetic.STEP_SECONDS)


def test_a_run_killed_before_any_checkpoint_restarts_and_all_its_steps_are_recompute(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path)
    run.write(synthetic.Process(last=30, ended="killed"))
    run.write(synthetic.Process(last=10, resumed_from=None, ended="killed"))
    goodput = _account(read_history(run.directory))
    assert goodput.lost_seconds["recompute"] == pytest.approx(30 * synthetic.STEP_SECONDS)
    assert goodput.restarts[0].resumed_from == 0
    assert goodput.restarts[0].repeated_steps == 30


def test_events_before_the_start_event_belong_to_the_same_process(
    synthetic: ModuleType,
) -> None:
    begin = synthetic.BEGIN
    events = [
        Event(
            EventType.START,
            begin + 1,
            0,
            1,
            {"process_start_time": begin, "resumed_from": None},
        ),
        Event(
            EventType.RESTORED, begin + 23, 0, 2, {"checkpoint": "step-2", "seconds": 2.0}
        ),
        Event(
            EventType.START,
            begin + 24,
            2,
            2,
            {"process_start_time": begin + 20, "resumed_from": 2},
        ),
    ]
    rows = [synthetic.step_record(step, time=begin + 2 + step) for step in (1, 2, 3)]
    rows += [synthetic.step_record(3, generation=2, time=begin + 25)]
    goodput = account(synthetic.step_table(rows), events, [])
    _check_sum(goodput, 25.0)
    assert [process.seconds["restore"] for process in goodput.processes] == [0.0, 2.0]
    assert goodput.lost_seconds["downtime"] == pytest.approx(15.0)


def test_a_process_that_failed_before_its_start_event_is_a_separate_process(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=60, ended="killed"))
    history = read_history(run.directory)
    end = run.now
    failed = [
        Event(
            EventType.FAILED,
            end + 10,
            0,
            2,
            {"error": "CheckpointError", "message": "none validates.", "exit_code": 64},
        ),
        Event(EventType.END, end + 11, 0, 2, {"exit_code": 64}),
    ]
    again = Event(
        EventType.START,
        end + 31,
        50,
        3,
        {"process_start_time": end + 30, "resumed_from": 50},
    )
    goodput = account(history.steps, [*history.events, *failed, again], history.evaluations)
    assert [(restart.cause, restart.detail) for restart in goodput.restarts] == [
        ("killed", ""),
        ("failed", "CheckpointError: none validates."),
    ]
    assert goodput.lost_seconds["downtime"] == pytest.approx(10 + 19)
    assert goodput.lost_seconds["recompute"] == pytest.approx(10 * synthetic.STEP_SECONDS)


def test_a_new_generation_without_a_start_is_the_same_process_in_a_new_world(
    synthetic: ModuleType,
) -> None:
    start = Event(
        EventType.START,
        synthetic.BEGIN,
        0,
        1,
        {"process_start_time": synthetic.BEGIN, "resumed_from": None},
    )
    rows = [
        synthetic.step_record(
            step, generation=1 + step // 5, time=synthetic.BEGIN + step / 2
        )
        for step in range(1, 11)
    ]
    goodput = account(synthetic.step_table(rows), [start], [])
    assert goodput.restarts == ()
    assert goodput.processes[0].num_steps == 10


def test_a_world_change_is_not_a_restart_and_its_pause_is_reconfiguration(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path)
    run.write(synthetic.Process(last=57, ended="killed"))
    run.change_world(
        synthetic.World(
            last=90, cause="node_lost", detail="node 0 lost", world_size=1, ended="killed"
        )
    )
    run.change_world(
        synthetic.World(
            last=200,
            cause="node_joined",
            detail="node 0 joined",
            world_size=2,
            paused_seconds=0.1,
        )
    )
    goodput = _account(read_history(run.directory))
    _check_sum(goodput, run.now - synthetic.BEGIN)
    assert goodput.restarts == () and goodput.notes == ()
    assert [process.ended for process in goodput.processes] == ["complete"]
    assert goodput.productive_seconds == pytest.approx(200 * synthetic.STEP_SECONDS)
    assert goodput.lost_seconds["recompute"] == goodput.lost_seconds["downtime"] == 0
    assert goodput.lost_seconds["reconfiguration"] == pytest.approx(0.45, abs=1e-4)
    assert goodput.changes_by_cause == {"node_lost": 1, "node_joined": 1}
    assert goodput.reconfiguration_seconds_by_cause == pytest.approx(
        {"node_lost": 0.3, "node_joined": 0.15}, abs=1e-4
    )
    assert [size for _, size in goodput.world_sizes] == [2, 1, 2, 0]
    assert [time for time, _ in goodput.world_sizes] == sorted(
        time for time, _ in goodput.world_sizes
    )
    assert (
        goodput.changes[0].step,
        goodput.changes[0].from_world_size,
        goodput.changes[0].detail,
    ) == (
        57,
        2,
        "node 0 lost",
    )


def test_steps_that_a_new_world_must_repeat_are_recompute_even_before_it_does(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path)
    run.write(synthetic.Process(last=57, ended="killed"))
    run.change_world(synthetic.World(last=54, forgotten=3, ended="killed"))
    assert _account(read_history(run.directory)).lost_seconds["recompute"] == pytest.approx(
        3 * synthetic.STEP_SECONDS
    )
    run.change_world(synthetic.World(last=70, ended="killed"))
    goodput = _account(read_history(run.directory))
    assert goodput.lost_seconds["recompute"] == pytest.approx(3 * synthetic.STEP_SECONDS)
    assert goodput.productive_seconds == pytest.approx(70 * synthetic.STEP_SECONDS)


def test_worlds_without_steps_each_have_the_time_until_their_own_event(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path)
    run.write(synthetic.Process(last=57, ended="killed"))
    run.change_world(
        synthetic.World(
            last=57,
            cause="node_lost",
            detail="node 0 lost",
            paused_seconds=0.5,
            ended="killed",
        )
    )
    run.change_world(
        synthetic.World(
            last=60,
            cause="worker_crash",
            detail="generation 2 broke",
            paused_seconds=2.0,
            settle_seconds=0.25,
            ended="killed",
        )
    )
    goodput = _account(read_history(run.directory))
    _check_sum(goodput, run.now - synthetic.BEGIN)
    assert goodput.reconfiguration_seconds_by_cause == pytest.approx(
        {"node_lost": 0.5, "worker_crash": 2.25}, abs=1e-4
    )


def test_an_evaluation_and_a_save_before_a_change_are_not_counted_as_reconfiguration_too(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path, save_every=40, evaluate_every=40)
    run.write(synthetic.Process(last=40, ended="killed"))
    run.change_world(synthetic.World(last=60, ended="killed"))
    goodput = _account(read_history(run.directory))
    _check_sum(goodput, run.now - synthetic.BEGIN)
    assert goodput.lost_seconds["reconfiguration"] == pytest.approx(0.3, abs=1e-4)
    assert goodput.lost_seconds["evaluation"] == pytest.approx(synthetic.EVALUATION_SECONDS)


def test_a_world_change_before_the_first_step_is_not_startup(
    synthetic: ModuleType,
) -> None:
    begin = synthetic.BEGIN
    events = [
        Event(
            EventType.START,
            begin + 2,
            0,
            1,
            {"process_start_time": begin, "resumed_from": None, "world_size": 3},
        ),
        Event(
            EventType.WORLD,
            begin + 5,
            0,
            2,
            {
                "world_size": 2,
                "from_world_size": None,
                "cause": "node_lost",
                "detail": "node 2 lost",
            },
        ),
    ]
    row = synthetic.step_record(1, generation=2, time=begin + 6.5)
    goodput = account(synthetic.step_table([row]), events, [])
    _check_sum(goodput, 6.5)
    assert goodput.lost_seconds["startup"] == pytest.approx(2.0)
    assert goodput.lost_seconds["reconfiguration"] == pytest.approx(4.0)


def test_a_stop_in_its_own_world_ends_the_run_that_was_trained_before(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path)
    run.write(synthetic.Process(last=57, ended="killed"))
    run.change_world(synthetic.World(last=60, ended="killed"))
    history = read_history(run.directory)
    left = [
        Event(EventType.STOP, run.now + 1, 60, 7, {"reason": "signal", "saved": True}),
        Event(EventType.END, run.now + 1, 60, 7, {"exit_code": 75}),
    ]
    goodput = account(history.steps, [*history.events, *left], history.evaluations)
    assert goodput.restarts == ()
    assert [process.ended for process in goodput.processes] == ["signal"]


def test_a_failure_that_other_nodes_survived_is_not_the_end_of_the_run(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path)
    run.write(synthetic.Process(last=57, ended="failed"))
    run.change_world(
        synthetic.World(
            last=60, cause="worker_crash", detail="generation 1 broke", ended="killed"
        )
    )
    history = read_history(run.directory)
    assert [process.ended for process in _account(history).processes] == [
        "running or killed"
    ]
    # In a world that had not begun to train: generation 3 failed, and generation 4 continued.
    failed = [
        Event(
            EventType.FAILED,
            run.now + 1,
            60,
            3,
            {"error": "OSError", "message": "disk", "exit_code": 70},
        ),
        Event(EventType.END, run.now + 1, 60, 3, {"exit_code": 70}),
        Event(
            EventType.WORLD,
            run.now + 2,
            60,
            4,
            {"world_size": 1, "cause": "worker_crash", "detail": "generation 3 broke"},
        ),
    ]
    goodput = account(history.steps, [*history.events, *failed], history.evaluations)
    assert goodput.restarts == ()
    assert goodput.changes_by_cause == {"worker_crash": 2}


def test_a_node_that_survived_its_workers_did_not_start_before_they_were_lost(
    synthetic: ModuleType,
) -> None:
    begin = synthetic.BEGIN
    events = [
        Event(
            EventType.START,
            begin + 2,
            0,
            1,
            {"process_start_time": begin, "resumed_from": None},
        ),
        Event(
            EventType.START,
            begin + 20,
            0,
            2,
            {"process_start_time": begin, "resumed_from": None},
        ),
    ]
    rows = [
        synthetic.step_record(1, time=begin + 3),
        synthetic.step_record(1, generation=2, time=begin + 21),
    ]
    goodput = account(synthetic.step_table(rows), events, [])
    _check_sum(goodput, 21.0)
    assert goodput.notes == ()
    assert goodput.lost_seconds["downtime"] == 0
    assert goodput.lost_seconds["startup"] == pytest.approx(2.5 + 17.5)


def test_a_row_that_a_frozen_process_writes_after_its_world_ended_changes_no_account(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path)
    run.write(synthetic.Process(last=57, ended="killed"))
    run.change_world(synthetic.World(last=70, ended="killed"))
    history = read_history(run.directory)
    records = [history.steps.record(row) for row in range(len(history.steps))]
    late = synthetic.step_record(58, generation=1, time=run.now)
    goodput = account(
        synthetic.step_table([*records, late]), history.events, history.evaluations
    )
    assert goodput.lost_seconds["reconfiguration"] == pytest.approx(0.3, abs=1e-4)
    assert goodput.productive_seconds == pytest.approx(70 * synthetic.STEP_SECONDS)
    assert goodput.lost_seconds["recompute"] == pytest.approx(synthetic.STEP_SECONDS)


def test_a_sentence_of_an_older_version_is_shown_and_not_parsed_for_a_cause(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path)
    run.write(synthetic.Process(last=20, ended="killed"))
    run.change_world(
        synthetic.World(last=40, cause="node 1 lost", detail="", ended="killed")
    )
    (change,) = _account(read_history(run.directory)).changes
    assert (change.cause, change.detail) == ("other", "node 1 lost")


def test_a_clock_set_back_between_two_processes_gives_no_negative_downtime_and_is_reported(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path)
    run.write(synthetic.Process(last=50, ended="killed"))
    first = run.now - synthetic.BEGIN
    run.now -= 1000.0
    begun = run.now
    run.write(synthetic.Process(last=100, resumed_from=50))
    goodput = _account(read_history(run.directory))
    _check_sum(goodput, first + run.now - begun)
    assert goodput.lost_seconds["downtime"] == 0
    assert goodput.notes == (
        (
            "generation 2 began 16m40s before the last sign of the one before: the clock went back, "
            "or both ran at once"
        ),
    )


def test_a_clock_set_back_during_a_process_keeps_the_measured_durations_and_is_reported(
    synthetic: ModuleType,
) -> None:
    records = [
        synthetic.step_record(
            step, time=synthetic.BEGIN + step * 0.5 - (100 if step > 5 else 0)
        )
        for step in range(1, 11)
    ]
    start = Event(
        EventType.START,
        synthetic.BEGIN,
        0,
        1,
        {"process_start_time": synthetic.BEGIN, "resumed_from": None},
    )
    goodput = account(synthetic.step_table(records), [start], [])
    assert goodput.productive_seconds == pytest.approx(5.0)
    assert goodput.elapsed_seconds == pytest.approx(5.0)
    assert goodput.notes == ("the clock went back by 1m40s while generation 1 ran",)


def test_a_process_start_time_after_its_start_event_is_ignored(
    synthetic: ModuleType,
) -> None:
    start = Event(
        EventType.START,
        synthetic.BEGIN,
        0,
        1,
        {"process_start_time": synthetic.BEGIN + 500, "resumed_from": None},
    )
    goodput = account(
        synthetic.step_table([synthetic.step_record(1, time=synthetic.BEGIN + 2)]),
        [start],
        [],
    )
    assert goodput.elapsed_seconds == pytest.approx(2.0)
    assert goodput.lost_seconds["startup"] == pytest.approx(1.5)


def test_an_evaluation_before_the_first_step_is_not_startup(synthetic: ModuleType) -> None:
    start = Event(
        EventType.START,
        synthetic.BEGIN,
        0,
        1,
        {"process_start_time": synthetic.BEGIN, "resumed_from": None},
    )
    evaluation = EvaluationRecord(
        0, 1, "heldOut", 5.0, 148.0, 100, 3.0, synthetic.BEGIN + 4
    )
    row = synthetic.step_record(1, time=synthetic.BEGIN + 5)
    goodput = account(synthetic.step_table([row]), [start], [evaluation])
    assert goodput.lost_seconds["evaluation"] == pytest.approx(3.0)
    assert goodput.lost_seconds["startup"] == pytest.approx(1.5)
    assert goodput.elapsed_seconds == pytest.approx(5.0)


def test_rows_without_events_are_accounted_by_their_generations(
    synthetic: ModuleType,
) -> None:
    rows = [
        synthetic.step_record(step, generation=1 + step // 4, time=synthetic.BEGIN + step)
        for step in range(1, 7)
    ]
    goodput = account(synthetic.step_table(rows), [], [])
    assert [process.generation for process in goodput.processes] == [1, 2]
    assert goodput.elapsed_seconds == pytest.approx(5.5)
    assert goodput.productive_seconds == pytest.approx(3.0)


def test_an_empty_run_has_empty_accounts(synthetic: ModuleType) -> None:
    goodput = account(synthetic.step_table([]), [], [])
    assert goodput.elapsed_seconds == 0
    assert math.isnan(goodput.ratio)
    assert goodput.lost_seconds == dict.fromkeys(CAUSES, 0.0)


def test_impossible_durations_never_make_a_part_negative(synthetic: ModuleType) -> None:
    rows = [
        synthetic.step_record(1, step_seconds=math.nan, time=synthetic.BEGIN + 1),
        synthetic.step_record(2, step_seconds=-5.0, time=math.nan),
        synthetic.step_record(3, time=synthetic.BEGIN + 3),
    ]
    save = Event(
        EventType.SAVE,
        synthetic.BEGIN + 3,
        3,
        1,
        {"blocking_seconds": -7, "seconds": "soon"},
    )
    start = Event(
        EventType.START,
        synthetic.BEGIN,
        0,
        1,
        {"process_start_time": "yesterday", "resumed_from": None},
    )
    _check_sum(account(synthetic.step_table(rows), [start, save], []), 3.0)


def _heard(records: list[Record], generations: set[int]) -> list[Record]:
    """Return the records of the generations of one process."""
    return [
        one
        for one in records
        if not isinstance(one, RunInfo) and one.generation in generations
    ]


def _folded(account: Account, records: list[Record]) -> dict[str, float]:
    for record in records:
        account.add(record)
    return account.seconds()


def _takes_over(
    highest_step: int, last_time: float | None = None, *, takes_over: bool = True
) -> RunInfo:
    """Rank 0 is another process from here on."""
    return RunInfo(
        "docs-lm",
        generation=2,
        world_size=1,
        total_steps=200,
        start_step=highest_step,
        tokens_per_step=8192,
        samples_per_step=8,
        parameters=1,
        precision="fp32",
        parallelism="ddp",
        model="gpt2",
        run_directory="runs/docs-lm",
        highest_step=highest_step,
        last_time=last_time,
        takes_over=takes_over,
    )


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    plan=st.lists(
        st.tuples(
            st.integers(0, 40),
            st.sampled_from(["killed", "signal", "failed"]),
            st.floats(0, 100),
        ),
        max_size=5,
    )
)
def test_accounts_of_any_chain_of_processes_match_the_clock(
    plan: list[tuple[int, str, float]],
    tmp_path_factory: pytest.TempPathFactory,
    synthetic: ModuleType,
) -> None:
    run = synthetic.RunWriter(
        tmp_path_factory.mktemp("run"), save_every=15, evaluate_every=20
    )
    saved, downtime = None, 0.0
    for num_steps, ended, gap in plan:
        last = (saved or 0) + num_steps
        run.write(
            synthetic.Process(
                last=last, resumed_from=saved, ended=ended, downtime_seconds=downtime
            )
        )
        saved = (last if ended == "signal" else last - last % 15) or None
        downtime = gap
    run.write(
        synthetic.Process(
            last=(saved or 0) + 10, resumed_from=saved, downtime_seconds=downtime
        )
    )
    goodput = _account(read_history(run.directory))
    _check_sum(goodput, run.now - synthetic.BEGIN)
    assert len(goodput.restarts) == len(plan)
    seen = run.seconds | {
        "step": goodput.productive_seconds + goodput.lost_seconds["recompute"]
    }
    for cause in ("startup", "restore", "checkpoint", "evaluation", "downtime", "other"):
        assert goodput.lost_seconds[cause] == pytest.approx(
            seen.get(cause, 0.0), abs=1e-3
        ), cause
    assert run.seconds["step"] == pytest.approx(seen["step"])
    assert goodput.productive_seconds == pytest.approx(
        ((saved or 0) + 10) * synthetic.STEP_SECONDS
    )


def _check_live(heard: list[Record], goodput: Goodput) -> None:
    """Records fed one by one give the same result as the files, and never a negative part."""
    live = Account()
    for record in heard:
        live.add(record)
        assert min(live.seconds().values()) >= 0
    live.finish()
    assert live.goodput() == goodput


_LINKS = st.tuples(
    st.sampled_from(["start", "world"]),
    st.integers(0, 30),
    st.sampled_from(["killed", "signal", "failed"]),
    st.floats(0, 100),
    st.floats(0, 20),
    st.sampled_from(
        ["node 1 lost", "node 1 joined", "node 2 leaving", "generation 3 broke"]
    ),
    st.integers(0, 2),
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@example(
    plan=[
        ("start", 1, "killed", 0.0, 0.0, "node 1 lost", 0),
        ("world", 0, "signal", 1.0, 0.0, "node 1 lost", 0),
    ]
)
@example(
    plan=[
        ("start", 1, "killed", 0.0, 0.0, "node 1 lost", 0),
        ("world", 1, "signal", 0.0, 1.0, "node 1 lost", 1),
    ]
)
@example(
    plan=[
        ("start", 0, "killed", 0.0, 0.0, "node 1 lost", 0),
        ("start", 1, "killed", 0.0, 0.0, "node 1 lost", 0),
        ("world", 1, "signal", 0.0, 1.0, "node 1 lost", 1),
    ]
)
@example(
    plan=[
        ("start", 1, "killed", 0.0, 0.0, "node 1 lost", 0),
        ("world", 1, "killed", 0.0, 1.0, "node 1 lost", 0),
        ("world", 1, "signal", 0.0, 1.0, "node 1 lost", 2),
    ]
)
@given(plan=st.lists(_LINKS, max_size=8))
def test_accounts_of_any_history_of_starts_worlds_and_kills_match_the_clock(
    plan: list[tuple[str, int, str, float, float, str, int]],
    tmp_path_factory: pytest.TempPathFactory,
    synthetic: ModuleType,
) -> None:
    run = synthetic.RunWriter(
        tmp_path_factory.mktemp("run"), save_every=15, evaluate_every=20
    )
    run.write(synthetic.Process(last=17, ended="killed"))
    at, saved, ended, worlds, starts = 17, 15, "killed", 0, 0
    for kind, num_steps, ending, gap, settle, cause, forgotten in plan:
        # A state that was saved and left is only on the disk, and steps before the checkpoint are in no
        # memory.
        if kind == "start" or ended == "signal":
            run.write(
                synthetic.Process(
                    last=saved + num_steps,
                    resumed_from=saved,
                    ended=ending,
                    downtime_seconds=gap,
                    restores_first=forgotten == 1,
                )
            )
            at, starts = saved + num_steps, starts + 1
        else:
            forgotten = min(forgotten, at - saved)
            last = at - forgotten + num_steps
            world = synthetic.World(
                last=last,
                cause=cause,
                paused_seconds=gap,
                settle_seconds=settle,
                forgotten=forgotten,
                ended=ending,
            )
            run.change_world(world)
            at, worlds = last, worlds + 1
        saved = at if ending == "signal" else max(saved, at - at % 15)
        ended = ending
    goodput = _account(read_history(run.directory))
    wall = run.now - synthetic.BEGIN
    _check_sum(goodput, wall)
    assert goodput.elapsed_seconds == pytest.approx(wall, rel=0.01)
    _check_live(run.heard, goodput)
    assert (len(goodput.changes), len(goodput.restarts)) == (worlds, starts)
    assert math.fsum(goodput.reconfiguration_seconds_by_cause.values()) == pytest.approx(
        goodput.lost_seconds["reconfiguration"]
    )
    for cause in (
        "startup",
        "restore",
        "checkpoint",
        "evaluation",
        "downtime",
        "reconfiguration",
        "other",
    ):
        assert goodput.lost_seconds[cause] == pytest.approx(
            run.seconds.get(cause, 0.0), abs=1e-2
        ), cause
    assert goodput.productive_seconds == pytest.approx(at * synthetic.STEP_SECONDS)
    assert goodput.productive_seconds + goodput.lost_seconds["recompute"] == pytest.approx(
        run.seconds["step"]
    )


def test_separate_accounts_of_two_processes_sum_to_the_account_of_the_run(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path)
    run.write(synthetic.Process(last=57, ended="killed"))
    killed_at = run.now
    run.write(synthetic.Process(last=200, resumed_from=50, downtime_seconds=30.0))
    goodput = _account(read_history(run.directory))
    first = _folded(Account(), _heard(run.heard, {1}))
    second = _folded(Account(highest_step=57, last_time=killed_at), _heard(run.heard, {2}))
    assert first["productive"] + second["productive"] == pytest.approx(
        goodput.productive_seconds
    )
    lost = {cause: first[cause] + second[cause] for cause in CAUSES}
    assert lost == pytest.approx(goodput.lost_seconds, abs=1e-4)


def test_accounts_exclude_the_time_of_rank_0_on_another_node(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path, save_every=1000, evaluate_every=1000)
    run.write(synthetic.Process(last=10, ended="killed"))
    run.change_world(
        synthetic.World(last=20, cause="node_lost", detail="node 0 lost", ended="killed")
    )
    run.change_world(
        synthetic.World(
            last=30, cause="node_joined", detail="node 0 joined", ended="killed"
        )
    )
    run.change_world(
        synthetic.World(last=40, cause="node_lost", detail="node 0 lost", ended="killed")
    )
    goodput = _account(read_history(run.directory))
    there = [*_heard(run.heard, {1}), _takes_over(20), *_heard(run.heard, {3})]
    here = [
        _takes_over(10),
        *_heard(run.heard, {2}),
        _takes_over(30),
        *_heard(run.heard, {4}),
    ]
    first, second = _folded(Account(), there), _folded(Account(), here)
    assert first["productive"] + second["productive"] == pytest.approx(
        goodput.productive_seconds
    )
    lost = {cause: first[cause] + second[cause] for cause in CAUSES}
    assert lost == pytest.approx(goodput.lost_seconds, abs=1e-3)


def test_a_start_after_a_loss_of_all_state_counts_repeated_steps_and_no_time_twice(
    synthetic: ModuleType,
) -> None:
    live = Account()
    live.add(Event(EventType.START, 2.0, 0, 1, {"process_start_time": 0.5}))
    live.add(synthetic.step_record(1, time=3.0))
    # Elsewhere steps 2 to 5 were trained until 8.0; then all processes were lost, and the nodes' own start is
    # long ago.
    live.add(_takes_over(5, 8.0, takes_over=False))
    live.add(Event(EventType.START, 10.0, 0, 3, {"process_start_time": 0.5}))
    live.add(synthetic.step_record(1, generation=3, time=11.0))
    seconds = live.seconds()
    assert (seconds["productive"], seconds["recompute"]) == (0.5, 0.5)
    assert seconds["downtime"] == 0
    assert seconds["startup"] == pytest.approx(2.0 + 2.5)
    live.add(synthetic.step_record(2, generation=3, time=12.0))
    assert live.seconds()["recompute"] == 1.0, "step 2 is productive in the other account"
    live.add(synthetic.step_record(6, generation=3, time=13.0))
    assert live.seconds()["productive"] == 1.0


def test_a_save_that_is_reported_late_is_subtracted_from_the_other_time(
    synthetic: ModuleType,
) -> None:
    live = Account()
    live.add(Event(EventType.START, 0.0, 0, 1, {"process_start_time": 0.0}))
    now = 0.0
    for step in range(1, 41):
        now += 0.5
        live.add(synthetic.step_record(step, time=now))
        if step % 10 == 0:
            now += 0.25
        if step == 13:
            assert live.seconds()["other"] == pytest.approx(0.25)
        if step % 10 == 3 and step > 10:
            fields = {"seconds": 1.0, "blocking_seconds": 0.25}
            live.add(Event(EventType.SAVE, now, step, 1, fields))
    seconds = live.seconds()
    assert seconds["checkpoint"] == pytest.approx(0.75)
    assert seconds["other"] == pytest.approx(0.0)
    assert math.fsum(seconds.values()) == pytest.approx(40 * 0.5 + 3 * 0.25)


def test_steps_beyond_the_memory_bound_stay_productive(synthetic: ModuleType) -> None:
    live = Account(most_steps=10)
    live.add(Event(EventType.START, 0.0, 0, 1, {}))
    for step in range(1, 26):
        live.add(synthetic.step_record(step, time=float(step)))
    live.add(Event(EventType.START, 30.0, 0, 2, {"resumed_from": None}))
    seconds = live.seconds()
    # At 21 steps the oldest 11 were let go.
    assert seconds["productive"] == pytest.approx(11 * 0.5)
    assert seconds["recompute"] == pytest.approx(14 * 0.5)
