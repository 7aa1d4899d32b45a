"""The history of a run for its page: stored items, merged items, and sent updates."""

import json
from typing import Any

import pytest
from simulated_cluster import Cluster, make_settings

from evergrad_common.causes import USES
from evergrad_common.metrics.columns import MOST_DECLARED
from evergrad_coordinator.protocol import EvaluationReport, Progress
from evergrad_coordinator.rules.downsampled_series import MOST_COLUMNS, MOST_ROWS, Track
from evergrad_coordinator.rules.group import Group, new_group
from evergrad_coordinator.rules.history import (
    MOST_CHECKPOINTS,
    MOST_EVENTS,
    RunHistory,
    build_page_status,
    note_event,
    observe,
    rewind,
    take_update,
)
from evergrad_coordinator.rules.state import MOST_SETS


def apply(track: dict[str, Any], change: dict[str, Any] | None) -> None:
    """Apply a change as the page does."""
    if change is None:
        return
    begin = change["from"]
    track["x"] = track.get("x", [])[:begin] + change["x"]
    columns = track.setdefault("columns", {})
    for name, parts in change["columns"].items():
        before = columns.get(name, [[], [], []])
        columns[name] = [old[:begin] + new for old, new in zip(before, parts, strict=True)]


def whole(track: Track) -> dict[str, Any]:
    track.rewind()
    change = track.take_change()
    assert change is not None and change.pop("from") == 0
    return change


# ---- one series --------------------------------------------------------------------------------------------


def test_few_samples_are_stored_unchanged() -> None:
    track = Track()
    for step in (1, 2, 3):
        track.add(step, {"loss": step / 4})
    assert whole(track) == {
        "x": [1, 2, 3],
        "columns": {"loss": [[0.25, 0.5, 0.75]] * 3},
    }


def test_many_samples_become_means_that_keep_the_minimum_and_the_maximum() -> None:
    track = Track()
    for step in range(1, 10 * MOST_ROWS + 1):
        track.add(step, {"loss": 100.0 if step == 5000 else -3.0 if step == 7 else 1.0})
    assert MOST_ROWS / 2 <= len(track.x) <= MOST_ROWS
    assert track.x[-1] == 10 * MOST_ROWS
    mean, least, most = whole(track)["columns"]["loss"]
    assert max(most) == 100 and min(least) == -3
    assert all(low <= one <= high for low, one, high in zip(least, mean, most, strict=True))
    assert sorted(track.x) == list(track.x)


def test_the_mean_of_all_rows_is_the_mean_of_all_samples() -> None:
    track, number = Track(), 5 * MOST_ROWS
    for step in range(number):
        track.add(step, {"loss": float(step % 13)})
    loss = track.columns["loss"]
    assert sum(loss.num) == number
    total = sum(mean * num for mean, num in zip(loss.mean, loss.num, strict=True))
    assert total == pytest.approx(sum(step % 13 for step in range(number)))


def test_a_step_that_is_trained_again_replaces_the_lost_steps() -> None:
    track = Track()
    for step in (1, 2, 3, 4, 5):
        track.add(step, {"loss": 1.0})
    track.add(3, {"loss": 2.0})
    assert whole(track)["x"] == [1, 2, 3]
    assert whole(track)["columns"]["loss"][0] == [1, 1, 2]


def test_a_number_that_is_reported_later_has_no_earlier_values() -> None:
    track = Track()
    track.add(1, {"loss": 1.0})
    track.add(2, {"loss": 1.0, "kl": 4.0})
    track.add(3, {"kl": 5.0})
    assert whole(track)["columns"] == {
        "loss": [[1, 1, None]] * 3,
        "kl": [[None, 4, 5]] * 3,
    }


def test_numbers_beyond_the_bound_are_omitted() -> None:
    track = Track()
    track.add(1, {f"metric_{number}": 1.0 for number in range(MOST_COLUMNS + 5)})
    track.add(2, {f"other_{number}": 1.0 for number in range(5)})
    assert len(track.columns) == MOST_COLUMNS


def test_updates_applied_one_by_one_give_the_whole_history() -> None:
    track, page = Track(), dict[str, Any]()
    for number in range(3 * MOST_ROWS):
        # It decreases occasionally, and gets a further number on the way.
        step = number if number % 701 else number // 2
        values = {"loss": number / 7}
        track.add(step, values | ({"kl": 1.0} if number > 1000 else {}))
        if number % 3 == 0:
            apply(page, track.take_change())
    apply(page, track.take_change())
    assert page == whole(track)


def test_nothing_is_sent_without_changes() -> None:
    track = Track()
    track.add(1, {"loss": 1.0})
    assert track.take_change() is not None
    assert track.take_change() is None


# ---- the history of a group --------------------------------------------------------------------------------


def make_group() -> Group:
    return new_group(make_settings(), generation=0, now=0.0)


def report(group: Group, step: int, *, now: float, **values: Any) -> None:
    training = group.training
    training.step, training.updated_at = step, now
    for name, value in values.items():
        setattr(training, name, value)


def read(history: RunHistory, group: Group, *, now: float) -> dict[str, Any]:
    observe(history, group, now=now)
    return take_update(history, build_page_status(group, now=now), now=now)


def test_a_report_of_a_node_is_recorded_with_all_its_numbers() -> None:
    cluster = Cluster(make_settings(expect=2, max_nodes=2))
    for name in range(2):
        cluster.start(name)
    cluster.run_until_running()
    group, now = cluster.group, cluster.now
    history = RunHistory(began_at=now)
    cluster.nodes[0].send(
        Progress(
            group.generation,
            40,
            loss=2.5,
            tokens_per_second=9.0,
            checkpoint_step=30,
            values={"learning_rate": 0.5, "kl": 0.25},
            evaluations={"held out": EvaluationReport(20, {"loss": 2.0})},
        )
    )
    update = read(history, group, now=now + 1)
    assert update["steps"]["x"] == [40]
    assert {name: parts[0] for name, parts in update["steps"]["columns"].items()} == {
        "loss": [2.5],
        "tokens_per_second": [9],
        "learning_rate": [0.5],
        "kl": [0.25],
    }
    assert update["evaluations"]["held out"]["x"] == [20]
    assert update["checkpoints"] == [[1.0, 30]]
    assert update["times"]["columns"]["processes"][0] == [2]
    assert update["status"]["run"] == group.settings.run


def test_the_same_report_is_recorded_once() -> None:
    group, history = make_group(), RunHistory(began_at=0.0)
    report(group, 5, now=1.0, loss=1.0)
    read(history, group, now=1.0)
    update = read(history, group, now=2.0)
    assert "steps" not in update
    assert update["times"]["x"] == [2]


def test_a_step_that_is_reported_again_with_an_evaluation_changes_no_curve() -> None:
    group, history = make_group(), RunHistory(began_at=0.0)
    for second in range(2 * MOST_ROWS):
        report(group, second, now=float(second), loss=1.0)
        read(history, group, now=float(second))
    before = [len(history.steps.x), *history.steps.columns["loss"].num]
    report(group, 2 * MOST_ROWS - 1, now=1e6, loss=1.0)
    group.training.evaluations = {"held out": EvaluationReport(5, {"loss": 2.0})}
    update = read(history, group, now=1e6)
    assert "steps" not in update and "held out" in update["evaluations"]
    assert [len(history.steps.x), *history.steps.columns["loss"].num] == before


def test_only_changed_parts_of_the_status_are_sent() -> None:
    group, history = make_group(), RunHistory(began_at=0.0)
    read(history, group, now=0.0)
    report(group, 5, now=1.0, loss=1.0)
    assert read(history, group, now=1.0)["status"] == {
        "step": 5,
        "loss": 1.0,
        "updatedSecondsAgo": 0.0,
    }


def test_a_page_gets_the_time_accounting_and_the_texts_once() -> None:
    group, history = make_group(), RunHistory(began_at=0.0)
    ledger = group.ledger
    ledger.nodes = {"training": 3, "idle": 1}
    ledger.close_interval(now=10.0)
    first = read(history, group, now=10.0)["status"]
    assert first["uses"] == {"training": 30, "idle": 10}
    assert first["useTexts"] == USES
    # Values that programs subtract are not shown on a page.
    assert "usage" not in first
    ledger.close_interval(now=20.4)
    assert read(history, group, now=20.4)["status"] == {
        "uses": {"training": 61, "idle": 20}
    }
    ledger.close_interval(now=20.401)
    assert "status" not in read(history, group, now=20.401)


def test_a_page_that_is_opened_later_gets_the_whole_history() -> None:
    group, history = make_group(), RunHistory(began_at=0.0)
    for second in range(50):
        report(group, second, now=float(second), loss=1.0, checkpoint_step=second)
        note_event(history, "gone", {"node": second, "why": "silence"}, now=second)
        read(history, group, now=float(second))
    rewind(history)
    update = take_update(history, build_page_status(group, now=50.0), now=50.0)
    assert update["steps"]["x"] == list(range(50))
    assert len(update["events"]) == len(update["checkpoints"]) == 50
    assert update["events"][3] == [3, "gone", "node 3 is gone: silence"]
    assert set(update["status"]) >= {"run", "phase", "nodes", "restarts"}


def test_an_event_without_its_fields_raises_no_error() -> None:
    history = RunHistory(began_at=0.0)
    note_event(history, "broken", {}, now=1.0)
    note_event(history, "gone", {"node": "{x}" * 1000, "why": "y"}, now=1.0)
    _, [at, kind, text] = list(history.events.newest)
    assert (at, kind, len(text)) == (1, "gone", 300)


@pytest.mark.parametrize(
    "num_metrics", [3, pytest.param(MOST_DECLARED, marks=pytest.mark.long)]
)
def test_eight_hours_at_ten_steps_a_second_stay_within_the_bounds(num_metrics: int) -> None:
    """288,000 steps, of which one per second is read, with evaluations, saves and nodes that join and leave."""
    group, history = make_group(), RunHistory(began_at=0.0)
    largest = 0
    for second in range(8 * 3600):
        values = {
            f"metric_{number}": 1 / (second + 3 + number) for number in range(num_metrics)
        }
        # As many as a node reports.
        results = {f"result_{number}": 1 / (second + 1 + number) for number in range(8)}
        report(
            group, 10 * (second + 1), now=float(second), values=values,
            loss=12.345678 / (second + 1), tokens_per_second=54321.987, eta_seconds=1.0,
            checkpoint_step=10 * (second - second % 60),
            evaluations={
                f"set_{number}": EvaluationReport(10 * (second - second % 120), results)
                for number in range(MOST_SETS)
            },
        )  # fmt: skip
        if second % 30 == 0:
            note_event(history, "gone", {"node": 3, "why": "silence " * 30}, now=second)
        # One page is open all the time, and another one is opened every ten minutes.
        observe(history, group, now=float(second))
        if second % 600 == 0 or second == 8 * 3600 - 1:
            rewind(history)
            text = json.dumps(
                take_update(
                    history, build_page_status(group, now=float(second)), now=float(second)
                )
            )
            largest = max(largest, len(text))
        else:
            take_update(
                history, build_page_status(group, now=float(second)), now=float(second)
            )
    assert group.training.step == 288_000
    tracks = [history.steps, history.times, *history.evaluations.values()]
    assert all(len(one.x) <= MOST_ROWS for one in tracks)
    assert history.steps.x[-1] == 288_000
    assert len(history.events.newest) <= MOST_EVENTS
    assert len(history.checkpoints.newest) <= MOST_CHECKPOINTS
    print(f"{num_metrics} metrics: {largest / 1024**2:.2f} MiB at once")
    assert largest < 3 * 1024**2
