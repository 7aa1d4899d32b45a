"""The status on the wire: conditions, sizes, when it is written, and the events of a change."""

import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated_run import START, Simulation, make_progress, make_run
from status_schema import problems_with, status_schema

from evergrad_common.contract import ErrorKind, encode_termination
from evergrad_operator.core.objects.names import Condition, Reason
from evergrad_operator.core.objects.status_encoding import (
    format_rate,
    pack_counts,
    pack_ranges,
    parse_rate,
    unpack_counts,
    unpack_ranges,
)
from evergrad_operator.core.objects.times import format_duration, format_time, parse_time
from evergrad_operator.core.observe.facts import count_phases, read_runs
from evergrad_operator.core.observe.memory import (
    parse_memory,
)
from evergrad_operator.core.observe.observe import Observation
from evergrad_operator.core.observe.profiles import LONGEST_NOTE, RunProfile
from evergrad_operator.core.status.events import derive_events
from evergrad_operator.core.status.run_status import should_write


def statuses(world: Simulation) -> dict[str, str]:
    return {one["type"]: one["status"] for one in world.status["conditions"]}


def test_the_first_status_has_all_conditions() -> None:
    world = Simulation()
    world.reconcile()
    assert list(statuses(world)) == [kind.value for kind in Condition]
    assert statuses(world) == {
        "Ready": "False",
        "Complete": "False",
        "Failed": "False",
        "Suspended": "False",
        "PodsReady": "False",
        "Progressing": "False",
        "CheckpointHealthy": "Unknown",
        "CoordinatorUnreachable": "False",
        "Stalled": "False",
        "Reconciling": "True",
    }
    for condition in world.status["conditions"]:
        assert condition["reason"] in list(Reason)
        assert condition["observedGeneration"] == 1


def test_the_status_of_a_training_run_shows_phase_progress_and_rates() -> None:
    world = Simulation(make_run(nodes={"min": 2, "max": 4})).run()
    world.end("docs-lm-3-0", 75)
    fields = {
        "loss": 2.41319,
        "tokensPerSecond": 41234.5,
        "etaSeconds": 18734.2,
        "checkpointStep": 1200,
    }
    world.train(1200, totalSteps=20000, generation=7, updatedSecondsAgo=2.0, **fields)
    world.reconcile()
    assert world.status["nodes"] == {
        "summary": "3/4",
        "min": 2,
        "max": 4,
        "ready": 3,
        "running": 3,
    }
    assert world.status["progress"] == {
        "generation": 7,
        "step": 1200,
        "totalSteps": 20000,
        "summary": "1200/20000",
        "percent": 6,
        "loss": "2.413",
        "tokensPerSecond": "41.2k",
        "eta": "5h12m",
        "etaSeconds": 18734,
        "updatedAt": format_time(START - 2),
    }
    assert world.status["checkpoint"] == {"step": 1200, "savedAt": format_time(START)}
    assert statuses(world)["Ready"] == "True"
    assert statuses(world)["CheckpointHealthy"] == "True"


def test_a_transition_time_changes_only_with_the_condition_status() -> None:
    world = Simulation().run()
    since = {one["type"]: one["lastTransitionTime"] for one in world.status["conditions"]}
    world.age(50)
    world.train(phase="Failed", reason="UserError", message="x")
    world.reconcile()
    later = {one["type"]: one["lastTransitionTime"] for one in world.status["conditions"]}
    changed = {kind for kind in since if since[kind] != later[kind]}
    assert changed == {"Ready", "Failed", "PodsReady", "Progressing", "Stalled"}


def test_a_resumed_run_is_not_reported_late_before_its_allowed_time() -> None:
    world = Simulation().run(10)
    world.set_spec(suspend=True)
    world.settle()
    world.leave()
    world.settle()
    world.leave()
    world.settle()
    assert world.status["phase"] == "Suspended"
    world.age(86400)
    world.progress = None
    world.set_spec(suspend=False)
    world.settle()
    assert "updatedAt" not in world.status["progress"], (
        "alerts on the age of the last step would tell of the pause"
    )
    world.start()
    for step in (10, 11):
        world.train(step)
        world.settle()
        assert world.status["phase"] == "Running"
        assert world.condition("Progressing")["status"] != "False"


def test_a_group_that_recovered_its_nodes_is_not_reported_late_before_its_allowed_time() -> (
    None
):
    world = Simulation().run(10)
    world.train(10, phase="Waiting")
    world.settle()
    world.age(5000)
    world.settle()
    world.train(10)
    world.settle()
    assert world.condition("Progressing")["status"] == "True"
    world.age(1000)
    world.settle()
    assert world.condition("Progressing")["reason"] == "NoSteps"


def test_a_group_without_steps_for_long_is_reported() -> None:
    world = Simulation().run(10)
    world.age(1000)
    world.reconcile()
    assert world.condition("Progressing")["reason"] == "NoSteps"
    assert (
        f"no step since {format_time(START)}" in world.condition("Progressing")["message"]
    )


def test_a_full_volume_makes_the_checkpoint_condition_unhealthy() -> None:
    world = Simulation().run(10)
    world.age(100)
    world.end("docs-lm-1-0", 70, message="No space left on device")
    world.reconcile()
    assert world.condition("CheckpointHealthy") | {"lastTransitionTime": ""} == {
        "type": "CheckpointHealthy",
        "status": "False",
        "reason": "VolumeFull",
        "message": (
            "The volume is full. There is no checkpoint yet. Enlarge the PersistentVolumeClaim docs-lm "
            "(spec.resources.requests.storage), or delete what is not needed there; the run then saves "
            "again by itself."
        ),
        "observedGeneration": 1,
        "lastTransitionTime": "",
    }


def test_the_first_failed_save_of_a_training_run_makes_the_checkpoint_condition_unhealthy() -> (
    None
):
    world = Simulation().run(10)
    world.train(20, checkpointStep=20, saves={"failed": 0})
    world.settle()
    assert world.condition("CheckpointHealthy")["status"] == "True"

    world.events.clear()
    said = "rank 0: [Errno 28] No space left on device: 'rank-00000.bin'"
    failed = {"failed": 1, "trouble": "no_space", "message": said}
    world.train(30, checkpointStep=20, saves=failed)
    world.settle()
    assert world.status["phase"] == "Running"
    condition = world.condition("CheckpointHealthy")
    assert (condition["status"], condition["reason"]) == ("False", "VolumeFull")
    message = condition["message"]
    assert said in message and "The newest valid checkpoint is of step 20." in message
    assert "Enlarge the PersistentVolumeClaim docs-lm" in message
    assert [(one.type, one.reason) for one in world.events] == [("Warning", "VolumeFull")]
    assert "the last save failed" in world.status["message"]

    # A coordinator or operator that has restarted does not know it any more.
    world.train(31, checkpointStep=20)
    world.settle()
    assert world.condition("CheckpointHealthy")["status"] == "False"
    world.train(40, checkpointStep=40, saves={"failed": 0})
    world.settle()
    assert world.condition("CheckpointHealthy")["status"] == "True"


def test_a_save_that_failed_for_another_reason_is_reported_too() -> None:
    world = Simulation().run(10)
    saves = {
        "failed": 2,
        "trouble": "io",
        "message": "rank 1: [Errno 5] Input/output error",
    }
    world.train(20, saves=saves)
    world.settle()
    condition = world.condition("CheckpointHealthy")
    assert (condition["status"], condition["reason"]) == ("False", "SaveFailed")
    assert condition["message"] == (
        "The last 2 saves failed: rank 1: [Errno 5] Input/output error. There is no checkpoint yet. "
        "Check the volume."
    )


def test_after_a_full_volume_the_next_successful_save_is_healthy_again() -> None:
    world = Simulation(make_run(failurePolicy={"maxFailuresWithoutProgress": 1})).run(10)
    world.train(20, checkpointStep=20)
    world.settle()
    message = encode_termination(ErrorKind.ENVIRONMENT, "3 saves failed", "no_space")
    for attempt in range(2):
        world.age(100)
        world.end(f"docs-lm-1-{attempt}", 70, message=message.decode())
        world.settle()
        world.start()
    assert (world.status["phase"], world.status["reason"]) == ("Failed", "VolumeFull")
    words = world.status["message"]
    assert "The newest valid checkpoint is of step 20." in words
    assert "Enlarge the PersistentVolumeClaim docs-lm" in words
    assert "then resume with: evergrad restart docs-lm -n team" in words
    assert world.status["lastFailure"]["cause"] == "VolumeFull"
    assert list(world.status["restarts"]["byCause"]) == ["VolumeFull"]

    world.set_spec(restartNonce="again")
    for _ in range(4):
        world.reconcile()
        world.leave()
        world.start()
    world.train(25, checkpointStep=20)
    world.settle()
    assert world.condition("CheckpointHealthy")["status"] == "False"
    world.age(100)
    world.train(40, checkpointStep=40)
    world.settle()
    assert world.condition("CheckpointHealthy")["status"] == "True"


def test_a_status_of_a_thousand_failing_nodes_is_below_16_kib() -> None:
    rng = random.Random(5)
    world = Simulation(
        make_run("x" * 45, nodes={"min": 1, "max": 1024}, restartNonce="n" * 64)
    )
    world.profile = RunProfile(
        {"template": {"annotations": {"note": "x" * (LONGEST_NOTE - 200)}}},
        sources=("p" * 63, f"ConfigMap {'n' * 63}/evergrad-profile"),
    )
    world.reconcile()
    world.start()
    causes = {f"cause_{number}": number for number in range(40)}
    message = "😀" * 5000
    failure = {
        "cause": "worker_crash",
        "node": "1023",
        "rank": 8191,
        "step": 10**9,
        "exitCode": -11,
        "message": message,
    }
    world.train(
        10**9,
        totalSteps=10**9,
        restarts=causes,
        lostSeconds=causes,
        lastFailure={**failure, "secondsAgo": 1},
    )
    for name, pod in list(world.pods.items()):
        if "coordinator" not in name and rng.random() < 0.5:
            attempt = str(rng.randrange(1000))
            pod["metadata"]["labels"]["evergrad.dev/attempt"] = attempt
            pod["metadata"]["name"] = f"{name[:-2]}-{attempt}"
            if rng.random() < 0.5:
                world.end(name, 137, message=message)
    world.config = type(world.config)("t" * 500, "o" * 500)
    world.reconcile()
    size = len(json.dumps(world.status, ensure_ascii=False).encode())
    assert size < 16 * 1024, size
    assert (
        parse_memory(world.status).attempts == world.decision.memory.attempts
        or len(world.decision.nodes_to_create) > 0
    )


def test_a_long_message_of_multibyte_characters_stays_within_all_bounds() -> None:
    world = Simulation(make_run(nodes={"min": 1, "max": 1024}))
    world.reconcile()
    world.start()
    for index in range(1024):
        world.end(f"docs-lm-{index}-0", 64, message="😀" * 4096)
    world.reconcile()
    assert len(json.dumps(world.status, ensure_ascii=False).encode()) < 16 * 1024
    for condition in world.status["conditions"]:
        assert len(condition["message"].encode()) <= 1024
    assert len(world.status["lastFailure"]["message"].encode()) <= 1024


def test_non_text_values_do_not_prevent_the_status() -> None:
    world = Simulation().run()
    world.end("docs-lm-0-0", 64, message="bad \ud800 bytes")
    world.reconcile()
    json.dumps(world.status, ensure_ascii=False).encode()


ODD = (-1, 0, -(2**70), 2**70, 1e300, -0.5, 3.7, "7", "nan", None, True, [], {})
NUMBERS = st.sampled_from(ODD) | st.integers() | st.floats()
COUNTERS = st.dictionaries(st.text(max_size=100), NUMBERS, max_size=40)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_for_any_coordinator_status_the_api_server_accepts_the_run_status(
    data: st.DataObject,
) -> None:
    whole = (
        "generation",
        "step",
        "totalSteps",
        "loss",
        "tokensPerSecond",
        "etaSeconds",
        "checkpointStep",
        "updatedSecondsAgo",
    )
    said = {
        key: data.draw(NUMBERS, label=key) for key in (*whole, "worldSize", "maxFailures")
    }
    said["nodes"] = {
        key: data.draw(NUMBERS, label=key) for key in ("min", "max", "ready", "connected")
    }
    failure = {
        key: data.draw(NUMBERS, label=key)
        for key in ("rank", "step", "exitCode", "secondsAgo", "withoutProgress")
    }
    failure |= {
        key: data.draw(st.text() | st.integers().map(str), label=key)
        for key in ("cause", "node", "message")
    }
    said |= {
        "restarts": data.draw(COUNTERS),
        "lostSeconds": data.draw(COUNTERS),
        "lastFailure": failure,
    }
    world = Simulation()
    world.reconcile()
    world.start()
    world.progress = make_progress(
        0,
        phase=data.draw(st.sampled_from(["Running", "Failed", "Waiting", "Complete"])),
        **said,
    )
    for _ in range(2):
        world.reconcile()
        assert problems_with(world.status, status_schema()) == []
        json.dumps(world.status, ensure_ascii=False, allow_nan=False)
        world.age(20)


def test_every_status_matches_the_crd_schema() -> None:
    world = Simulation(make_run(activeDeadlineSeconds=600, restartNonce="a")).run()
    failure = {
        "cause": "worker_crash",
        "node": "0",
        "rank": 0,
        "step": 3,
        "exitCode": 1,
        "message": "x",
        "secondsAgo": 1,
    }
    fields = {
        "loss": 2.0,
        "tokensPerSecond": 3.0,
        "etaSeconds": 9,
        "checkpointStep": 1,
        "generation": 3,
    }
    world.train(
        20,
        restarts={"worker_crash": 1},
        lostSeconds={"worker_crash": 1.5},
        lastFailure=failure,
        **fields,
    )
    world.reconcile()
    seen = [world.status]
    world.age(100)
    world.end("docs-lm-0-0", 1)
    world.vanish("docs-lm-coordinator-0")
    world.reconcile()
    seen.append(world.status)
    world.age(1000)
    world.reconcile()
    seen.append(world.status)
    for status in seen:
        assert problems_with(status, status_schema()) == []


# ---- writing -----------------------------------------------------------------------------------------------


def test_an_equal_status_is_never_written() -> None:
    world = Simulation().run()
    assert (
        should_write(world.status, world.status, now=START, last_progress_write=None).write
        is False
    )
    assert (
        should_write(world.status, world.status, now=START, last_progress_write=None).after
        is None
    )


def test_progress_alone_is_written_every_ten_seconds_and_a_transition_at_once() -> None:
    world = Simulation().run(10)
    old = world.status
    world.train(11, lostSeconds={"worker_crash": 3})
    world.reconcile()
    new = world.status
    assert old != new
    wait = should_write(old, new, now=START + 3, last_progress_write=START)
    assert (wait.write, wait.after) == (False, 7.0)
    assert should_write(old, new, now=START + 10, last_progress_write=START).write
    world.end("docs-lm-0-0", 64)
    world.reconcile()
    assert should_write(old, world.status, now=START + 1, last_progress_write=START).write


def test_pods_that_start_one_after_another_are_counted_once_a_second() -> None:
    world = Simulation()
    world.reconcile()
    world.reconcile()
    old, names = world.status, world.live()
    world.start(names[0])
    world.reconcile()
    assert old["nodes"]["running"] != world.status["nodes"]["running"]
    assert (
        should_write(old, world.status, now=START + 0.25, last_progress_write=START).after
        == 0.75
    )
    assert should_write(old, world.status, now=START + 1, last_progress_write=START).write
    world.end(names[1], 64)
    world.reconcile()
    assert should_write(
        old, world.status, now=START + 0.25, last_progress_write=START
    ).write


def test_a_restarted_operator_uses_the_time_in_the_status() -> None:
    world = Simulation().run(10)
    old = world.status
    world.train(11)
    world.age(4)
    world.reconcile()
    assert (
        should_write(old, world.status, now=START + 4, last_progress_write=None).after
        == 6.0
    )
    assert should_write(old, world.status, now=START + 10, last_progress_write=None).write


def test_the_status_is_written_at_a_bounded_rate_while_a_run_trains() -> None:
    """``kubectl get trun -w`` shows at most one line in 10 s."""
    world = Simulation().run(10)
    world.reconcile()
    stored, written_at, writes = world.status, START, 0
    for second in range(120):
        world.age(1)
        world.raw["status"] = stored
        world.train(
            10 + second,
            loss=3 - second / 100,
            tokensPerSecond=1000.0 + second,
            etaSeconds=500 - second,
            updatedSecondsAgo=0.3,
        )
        world.reconcile()
        if should_write(
            stored, world.status, now=world.now, last_progress_write=written_at
        ).write:
            stored, written_at, writes = world.status, world.now, writes + 1
    assert writes <= 12


# ---- events ------------------------------------------------------------------------------------------------


def look() -> Observation:
    return Simulation().look()


def test_events_report_each_change_of_a_run_once() -> None:
    world = Simulation().run(10)
    world.age(100)
    world.disrupt("docs-lm-0-0", "PreemptionByScheduler")
    world.settle()
    world.leave()
    world.start()
    world.train(30, checkpointStep=30)
    world.settle()
    world.train(40, checkpointStep=40)
    world.settle()
    for name in world.live():
        world.end(name, 0)
    world.settle()
    assert [(event.type, event.reason) for event in world.events] == [
        ("Normal", "Training"),
        ("Warning", "Preempted"),
        ("Normal", "CheckpointSaved"),
        ("Normal", "Complete"),
    ]


def test_an_equal_status_causes_no_event() -> None:
    world = Simulation().run(10)
    assert derive_events(world.status, world.status) == ()


def test_many_simultaneous_ends_are_one_event() -> None:
    world = Simulation(make_run(nodes={"min": 1, "max": 12})).run(10)
    world.age(100)
    for name in world.live():
        world.end(name, 75)
    world.reconcile()
    assert [event.message for event in world.events if event.type == "Warning"] == [
        "10 pods and more ended: Stopped"
    ]


# ---- packed values
# ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-1, 10_000), max_size=300))
def test_packed_counts_are_unpacked_unchanged(counts: list[int]) -> None:
    assert unpack_counts(pack_counts(counts)) == tuple(counts)


@given(st.sets(st.integers(0, 1023)))
def test_packed_ranges_are_unpacked_unchanged(numbers: set[int]) -> None:
    assert unpack_ranges(pack_ranges(numbers)) == tuple(sorted(numbers))


@pytest.mark.parametrize("text", ["x", "1x99999", "1,", "--1", "1x-2", "0x"])
def test_malformed_counts_are_unpacked_as_empty(text: str) -> None:
    assert unpack_counts(text) in ((), (0,))


@pytest.mark.parametrize("text", ["x", "3-", "-3", "1-999999", "1,,2"])
def test_malformed_ranges_are_ignored(text: str) -> None:
    assert unpack_ranges(text) in ((), (3,))


def test_a_damaged_status_counts_as_unknown() -> None:
    for status in (
        {"memory": 3, "conditions": 4},
        {"memory": {"attempts": "x"}, "coordinator": [], "progress": "1/2"},
        {},
    ):
        assert parse_memory(status).attempts == ()


@example(rate=999.5)
@example(rate=9.96)
@example(rate=999_950.0)
@given(rate=st.floats(0, 1e12))
def test_a_rate_is_formatted_the_same_after_it_was_read_back(rate: float) -> None:
    shown = format_rate(rate)
    assert format_rate(parse_rate(shown) or 0.0) == shown
    assert len(shown) <= 8


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59, "59s"),
        (60, "1m"),
        (200, "3m20s"),
        (18734, "5h12m"),
        (187200, "2d4h"),
        (86400, "1d"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_kubernetes_timestamps_are_parsed() -> None:
    assert parse_time("2030-03-17T17:46:40Z") == START
    assert parse_time("2030-03-17T17:46:40.123456Z") == pytest.approx(START + 0.123456)
    assert parse_time("2030-03-17T18:46:40+01:00") == START
    assert (parse_time("soon"), parse_time(None)) == (None, None)
    assert format_time(START + 0.9) == "2030-03-17T17:46:40Z"


def test_progress_of_an_older_coordinator_is_ignored() -> None:
    world = Simulation().run(10)
    world.age(100)
    world.vanish("docs-lm-coordinator-0")
    world.settle()
    world.progress = make_progress(
        0, phase="Failed", reason="UserError", message="long ago"
    )
    assert world.reconcile().phase != "Failed"


def test_fleet_totals_include_ended_runs_whose_own_series_end_after_a_day() -> None:
    over = {
        "metadata": {"name": "old"},
        "status": {"phase": "Complete", "completionTime": format_time(START)},
    }
    runs = {("ns", "old"): over, ("ns", "new"): {"metadata": {"name": "new"}}}
    assert [fact.name for fact in read_runs(runs, now=START + 90_000)] == ["new"]
    counts = count_phases(runs.values())
    assert (counts["Complete"], counts["Pending"], counts["Failed"]) == (1, 1, 0)
