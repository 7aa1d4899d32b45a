"""A task's observers: their state, its limits, and the result if an observer fails."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest

from evergrad_trainer.base.records import Event, StepRecord
from evergrad_trainer.observers.base import BaseObserver
from evergrad_trainer.observers.stateful_observers import MAX_STATE_BYTES, Lasting, Together


class Counting(BaseObserver):
    """Stores the steps that it receives."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.is_closed = False

    def step_end(self, record: StepRecord) -> None:
        self.seen.append(record.step)

    def state(self) -> Mapping[str, Any]:
        return {"seen": self.seen} if self.seen else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.seen = list(state.get("seen", []))

    def close(self) -> None:
        self.is_closed = True


class Failing(Counting):
    """Fails when its state is requested for the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.times_asked = 0

    def state(self) -> Mapping[str, Any]:
        self.times_asked += 1
        if self.times_asked > 1:
            raise RuntimeError("no state")
        return super().state()


@pytest.mark.acceptance("8d-16c")
@pytest.mark.capability("O-64")
def test_the_state_continues_in_another_process(synthetic: ModuleType) -> None:
    first = Lasting([Counting(), Counting(), BaseObserver()])
    for step in (1, 2):
        first.step_end(synthetic.step_record(step))
    values = first.values()
    assert values == {"Counting": {"seen": [1, 2]}, "Counting#2": {"seen": [1, 2]}}
    counting = Counting()
    second = Lasting([counting])
    second.step_end(synthetic.step_record(7))
    second.load_values(values)
    second.step_end(synthetic.step_record(3))
    assert counting.seen == [1, 2, 3]


def test_a_state_saved_before_observers_existed_is_the_initial_state(
    synthetic: ModuleType,
) -> None:
    counting = Counting()
    lasting = Lasting([counting])
    lasting.step_end(synthetic.step_record(1))
    lasting.load_values({})
    assert counting.seen == []
    lasting.step_end(synthetic.step_record(1))
    lasting.reset()
    assert counting.seen == []
    assert lasting.values() == {}


@pytest.mark.acceptance("8d-16b")
def test_an_observer_that_fails_keeps_its_previous_state_and_the_others_continue(
    synthetic: ModuleType,
) -> None:
    lasting = Lasting([Failing(), Counting()])
    lasting.step_end(synthetic.step_record(1))
    assert lasting.values() == {"Failing": {"seen": [1]}, "Counting": {"seen": [1]}}
    for step in range(2, 6):
        lasting.step_end(synthetic.step_record(step))
        values = lasting.values()
    assert values == {"Failing": {"seen": [1]}, "Counting": {"seen": [1, 2, 3, 4, 5]}}
    assert lasting.failures["Failing"] > 0


@pytest.mark.acceptance("input-O-64")
@pytest.mark.parametrize(
    "state", [{"x": float("nan")}, {"x": object()}, {"x": "y" * MAX_STATE_BYTES}]
)
def test_a_state_that_no_checkpoint_can_store_is_a_failure_of_its_observer(
    state: dict[str, Any],
) -> None:
    class Odd(BaseObserver):
        def state(self) -> Mapping[str, Any]:
            return state

    lasting = Lasting([Odd()])
    assert lasting.values() == {}
    assert lasting.failures == {"Odd": 1}


def test_an_essential_observer_whose_state_fails_ends_the_run_too() -> None:
    class Strict(BaseObserver):
        essential = True

        def state(self) -> Mapping[str, Any]:
            raise RuntimeError("it must not be lost")

    with pytest.raises(RuntimeError, match="it must not be lost"):
        Lasting([Strict()]).values()


def test_rank_0_closes_its_own_observers_and_keeps_those_of_the_task(
    synthetic: ModuleType,
) -> None:
    own, counting = Counting(), Counting()
    together = Together(own, Lasting([counting]))
    together.step_end(synthetic.step_record(1))
    together.close()
    assert (own.seen, counting.seen) == ([1], [1])
    assert (own.is_closed, counting.is_closed) == (True, False)
    together.lasting.close()
    assert counting.is_closed


def test_observers_of_the_run_are_notified_of_a_disabled_observer_of_the_task(
    synthetic: ModuleType,
) -> None:
    class Deaf(BaseObserver):
        def step_end(self, record: StepRecord) -> None:
            raise ValueError("no step for me")

    class Hearing(BaseObserver):
        def __init__(self) -> None:
            self.events: list[Event] = []

        def event(self, event: Event) -> None:
            self.events.append(event)

    own, lasting = Hearing(), Lasting([Deaf()])
    together = Together(own, lasting)
    for step in range(1, 5):
        together.step_end(synthetic.step_record(step))
    assert [(event.type, event.step) for event in own.events] == [("warning", 3)]
    assert "observer Deaf is switched off" in own.events[0].fields["message"]

    # Another rank writes from here on.
    together.close()
    lasting.listener.event(own.events[0])
    assert len(own.events) == 1
