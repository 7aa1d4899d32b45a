"""Monitors: cases that were calculated by hand, and states that continue in another process."""

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.training import Training
from evergrad_trainer.base.records import EvaluationRecord, Event
from evergrad_trainer.observers.base import BaseObserver
from evergrad_trainer.observers.build import build_lasting
from evergrad_trainer.observers.monitors import Monitors, build_monitors, check_watched
from evergrad_trainer.observers.stateful_observers import MAX_STATE_BYTES, Lasting, Together
from evergrad_trainer.observers.watches import Rule, Watch, WatchAlert

TRAINING = {
    "model": {"config": {"model_type": "llama"}},
    "data": {"sources": [{"name": "docs", "path": "docs.jsonl"}], "sequenceLength": 16},
    "batching": {"globalBatchSize": 8, "microBatchSize": 2},
    "optimizer": {"learningRate": 1e-3},
    "horizon": {"steps": 10},
}


def alerts_of(
    rule: Rule, values: Iterable[float], **others: Iterable[float]
) -> list[WatchAlert]:
    """The alerts of a watch over values at steps 1, 2, 3, …"""
    watch = Watch(rule)
    rows = zip(values, *others.values(), strict=True)
    found = []
    for step, (value, *rest) in enumerate(rows, start=1):
        measured = {rule.metric: value, **dict(zip(others, rest, strict=True))}
        alert = watch.look(step, measured)
        if alert is not None:
            found.append(alert)
    return found


def as_tuples(alerts: list[WatchAlert]) -> list[tuple[int, float, float]]:
    return [(one.step, one.value, one.threshold) for one in alerts]


@pytest.mark.acceptance("number-G-85")
@pytest.mark.capability("G-85")
def test_a_collapse_below_half_of_the_first_value_is_reported_at_each_start() -> None:
    rule = Rule("collapse", "spread", "warn", ratio=0.5)
    values = [1.0, 0.6, 0.5, 0.49, 0.2, 0.51, 0.4]
    assert as_tuples(alerts_of(rule, values)) == [(4, 0.49, 0.5), (7, 0.4, 0.5)]


@pytest.mark.capability("G-85")
def test_a_collapse_can_be_judged_by_another_metric_of_the_same_step() -> None:
    # The hand-made batch of the digest: predictions vary by 0.25 and targets by 0.125.
    rule = Rule("collapse", "prediction", "warn", ratio=0.5, of="target")
    found = alerts_of(rule, [0.25, 0.0625, 0.0624], target=[0.125, 0.125, 0.125])
    assert as_tuples(found) == [(3, 0.0624, 0.0625)]


@pytest.mark.capability("G-85")
def test_a_limit_is_an_absolute_value() -> None:
    rule = Rule("divergence", "kl", "warn", limit=10.0)
    assert as_tuples(alerts_of(rule, [3.0, 10.0, 10.5, 11.0, 9.0])) == [(3, 10.5, 10.0)]
    rule = Rule("collapse", "kl", "warn", limit=0.1)
    assert as_tuples(alerts_of(rule, [3.0, 0.1, 0.05])) == [(3, 0.05, 0.1)]


def test_a_divergence_is_a_mean_above_twice_the_lowest_mean() -> None:
    # Means of two: 3, 2.5, 1.5, 2.5, 3.5; the lowest before the last is 1.5.
    rule = Rule("divergence", "loss", "warn", window=2, ratio=2.0)
    assert as_tuples(alerts_of(rule, [4.0, 2.0, 3.0, 0.0, 5.0, 2.0])) == [(6, 3.5, 3.0)]


@pytest.mark.acceptance("input-5e-18")
def test_a_ratio_has_the_same_distance_for_negative_values() -> None:
    # The lowest is -4: twice as far above it is 0.
    rule = Rule("divergence", "reward", "warn", ratio=2.0)
    assert as_tuples(alerts_of(rule, [-4.0, -0.5, 0.5])) == [(3, 0.5, 0.0)]


def test_a_plateau_is_patience_without_a_sufficient_gain() -> None:
    rule = Rule("plateau", "loss", "warn", patience=2, min_delta=0.1)
    values = [1.0, 0.95, 0.85, 0.84, 0.83, 0.5, 0.5, 0.5]
    assert as_tuples(alerts_of(rule, values)) == [(5, 0.83, 0.85), (8, 0.5, 0.5)]
    rule = Rule("plateau", "accuracy", "warn", patience=2, mode="max")
    assert as_tuples(alerts_of(rule, [0.1, 0.2, 0.2, 0.15, 0.3])) == [(4, 0.15, 0.2)]


def test_steps_without_a_number_are_ignored() -> None:
    rule = Rule("plateau", "loss", "warn", patience=2)
    assert as_tuples(alerts_of(rule, [1.0, math.nan, 1.5, math.inf, 2.0])) == [
        (5, 2.0, 1.0)
    ]


@pytest.mark.acceptance("number-G-86")
@pytest.mark.capability("G-86")
def test_ten_thousand_healthy_values_raise_no_alert() -> None:
    values = [
        2.0 + 1.5 * math.exp(-step / 900) + 0.3 * math.sin(step) for step in range(10_000)
    ]
    for rule in (
        Rule("collapse", "loss", "stop", ratio=0.4),
        Rule("divergence", "loss", "stop", window=20, ratio=2.0),
        Rule("plateau", "loss", "stop", patience=10_000, window=20),
    ):
        assert alerts_of(rule, values) == [], rule


@pytest.mark.capability("G-69")
@pytest.mark.parametrize(
    "rule",
    [
        Rule("collapse", "loss", "warn", window=3, ratio=0.7),
        Rule("divergence", "loss", "warn", window=4, ratio=1.4),
        Rule("plateau", "loss", "warn", patience=4),
    ],
    ids=lambda rule: rule.kind,
)
def test_a_watch_that_is_restored_at_any_step_decides_as_an_uninterrupted_one(
    rule: Rule,
) -> None:
    values = [3.0 + math.sin(step / 3) + 0.5 * math.sin(step) for step in range(60)]
    whole = alerts_of(rule, values)
    assert len(whole) > 1
    for cut in range(1, len(values)):
        first, second = Watch(rule), Watch(rule)
        found = [first.look(step, {"loss": values[step - 1]}) for step in range(1, cut + 1)]
        second.load_state(json.loads(json.dumps(first.state())))
        found += [
            second.look(step, {"loss": values[step - 1]}) for step in range(cut + 1, 61)
        ]
        assert [one for one in found if one is not None] == whole, cut
        assert second.state()["alerts"] == len(whole)


def test_a_larger_patience_lets_a_stopped_run_continue() -> None:
    before = Watch(Rule("early stop", "loss", "stop", patience=2))
    for step in (1, 2, 3):
        before.look(step, {"loss": 1.0})
    assert before.since == 3
    same, more = Watch(before.rule), Watch(Rule("early stop", "loss", "stop", patience=3))
    for watch in (same, more):
        watch.load_state(before.state())
    assert (same.since, more.since) == (3, None)
    alert = more.look(4, {"loss": 1.0})
    assert alert is not None
    assert alert.describe() == "loss is 1, and was not better than 1 in the last 3 looks"


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        (Rule("divergence", "loss", "stop", limit=3.0), {"limit": 4.5}),
        (Rule("divergence", "loss", "stop", limit=3.0), {"limit": None, "ratio": 5.0}),
        (Rule("divergence", "loss", "stop", ratio=2.0), {"ratio": 4.5}),
        (Rule("divergence", "loss", "stop", window=2, ratio=2.0), {"window": 3}),
        (Rule("collapse", "neg", "stop", limit=-1.5), {"limit": -5.0}),
        (Rule("collapse", "other", "stop", ratio=0.5, of="loss"), {"ratio": 0.2}),
        (Rule("collapse", "other", "stop", ratio=0.5, of="loss"), {"of": "neg"}),
    ],
)
def test_a_run_that_a_monitor_stopped_continues_with_a_bound_that_its_values_meet(
    before: Rule, changes: dict[str, Any]
) -> None:
    first = Watch(before)
    for step in (1, 2, 3, 4):
        # Means of two: 1.5, 2.5, 3.5.
        loss = float(step)
        first.look(step, {"loss": loss, "neg": -loss, "other": 1.0})
    assert first.since is not None
    state = json.loads(json.dumps(first.state()))

    same, changed = Watch(before), Watch(replace(before, **changes))
    for watch in (same, changed):
        watch.load_state(state)
    assert same.state() == first.state()
    assert changed.since is None
    # The value exceeds the new limit, too, so it is reported once more.
    found = [
        changed.look(step, {"loss": 100.0, "neg": -100.0, "other": -1000.0})
        for step in (5, 6)
    ]
    assert any(one is not None for one in found)


class Heard(BaseObserver):
    """Stores the events that it receives."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        self.events.append(event)


def lasting_of(**training: Any) -> Lasting:
    return build_lasting(Training.model_validate({**TRAINING, **training}), [], None)


@pytest.mark.capability("G-91")
def test_an_alert_is_an_event_of_rank_0_and_a_request_of_all_ranks(
    synthetic: ModuleType,
) -> None:
    monitors = [
        {"type": "plateau", "metric": "loss", "patience": 1, "policy": "save"},
        {"type": "divergence", "metric": "grad_norm", "limit": 5, "window": 1},
    ]
    here, elsewhere, heard = (
        lasting_of(monitors=monitors),
        lasting_of(monitors=monitors),
        Heard(),
    )
    together = Together(heard, here)
    for step, loss, norm in ((1, 2.0, 1.0), (2, 2.0, 6.0), (3, 2.0, 7.0)):
        record = synthetic.step_record(step, loss=loss, grad_norm=norm)
        together.step_end(record)
        elsewhere.step_end(record)
        # Only once, where it begins: the step after it is saved.
        assert here.wishes() == elsewhere.wishes() == ({"save"} if step == 2 else set())
    assert here.values() == elsewhere.values()
    fields = [(one.type, one.step, one.fields["monitor"]) for one in heard.events]
    assert fields == [("alert", 2, "plateau"), ("alert", 2, "divergence")]
    last = heard.events[-1].fields
    assert (last["value"], last["threshold"], last["policy"]) == (6.0, 5.0, "warn")
    assert last["message"] == "grad_norm is 6, above 5"


def test_an_alert_that_the_first_process_could_not_write_is_reported_by_the_next(
    synthetic: ModuleType,
) -> None:
    """It is raised on every rank, and rank 0 is killed before its own is written."""
    monitors = [
        {"type": "plateau", "metric": "loss", "patience": 1, "minDelta": 1},
        {"type": "divergence", "metric": "grad_norm", "window": 2},
        {"type": "collapse", "metric": "grad_norm", "limit": 1.5},
        {"type": "collapse", "metric": "loss", "of": "grad_norm"},
    ]
    survivor, first = lasting_of(monitors=monitors), Heard()
    lost = Together(first, lasting_of(monitors=monitors))
    for step, loss, norm in ((1, 2.0, 1.0), (2, 2.0, 1.0), (3, 2.0, 9.0)):
        record = synthetic.step_record(step, loss=loss, grad_norm=norm)
        lost.step_end(record)
        survivor.step_end(record)
        # A joining node that has received its state may be the next, too.
        newcomer = lasting_of(monitors=monitors)
        newcomer.load_values(json.loads(json.dumps(survivor.values())))
        before = survivor.values()
        for one in (survivor, newcomer):
            heard = Heard()
            together = Together(heard, one)
            one.repeat(record)
            together.close()
            expected = [event for event in first.events if event.step == step]
            assert [replace(event, time=0.0) for event in heard.events] == [
                replace(event, time=0.0) for event in expected
            ]
            assert one.values() == before
    said_at = [(event.step, event.fields["monitor"]) for event in first.events]
    assert said_at == [(1, "collapse"), (2, "plateau"), (3, "divergence"), (3, "collapse")]


def test_an_early_stop_follows_an_evaluation_and_continues_in_another_process(
    synthetic: ModuleType,
) -> None:
    early = {"metric": "held/accuracy", "mode": "max", "patience": 2}
    lasting = lasting_of(stop={"early": early})

    def evaluate(one: Lasting, step: int, accuracy: float) -> None:
        one.step_end(synthetic.step_record(step))
        one.evaluation_end(
            EvaluationRecord(
                step, 1, "held", 2.0, 7.4, 10, 0.1, 0.0, metrics={"accuracy": accuracy}
            )
        )

    for step, accuracy in ((10, 0.5), (20, 0.4)):
        evaluate(lasting, step, accuracy)
        assert lasting.wishes() == set()
    other = lasting_of(stop={"early": early})
    other.load_values(json.loads(json.dumps(lasting.values())))
    evaluate(other, 30, 0.5)
    assert other.wishes() == {"stop"}


def test_the_longest_state_of_monitors_fits_into_a_checkpoint(
    synthetic: ModuleType,
) -> None:
    metrics = {f"a_metric_{number}": 1 / 3 + number / 7 for number in range(8)}
    watches = [
        Watch(Rule("collapse", name, "warn", window=100, of="a_metric_0", ratio=0.001))
        for name in metrics
    ]
    lasting = Lasting([Monitors(watches)])
    for step in range(1, 200):
        lasting.step_end(synthetic.step_record(step, metrics=metrics))
    (state,) = lasting.values().values()
    assert len(json.dumps(state)) < MAX_STATE_BYTES
    assert lasting.switched_off == frozenset()


@pytest.mark.acceptance("input-G-85")
def test_a_metric_that_is_never_measured_is_refused() -> None:
    training = Training.model_validate(
        {
            **TRAINING,
            "recipe": "mine:Task",
            "monitors": [
                {"type": "plateau", "metric": "held/acuracy", "patience": 3},
                {"type": "collapse", "metric": "spread", "of": "nothing"},
            ],
        }
    )
    check = {"metrics": ["spread"], "evaluations": {"held": ["loss", "accuracy"]}}
    with pytest.raises(ConfigurationError) as caught:
        check_watched(training, **check)  # type: ignore[arg-type]
    first, second = map(str, caught.value.problems)
    assert "spec.training.monitors[0].metric: 'held/acuracy' is not a metric" in first
    assert "did you mean `held/accuracy`?" in first
    assert "spec.training.monitors[1].of: 'nothing'" in second and "spread" in second
    assert build_monitors(Training.model_validate(TRAINING)) is None
