"""The watchdog thread reads the supervisor's records while the main thread is busy: ready, begin, soft and
hard changes, and the end."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from patience import PATIENCE

from evergrad_common.contract import ExitCode
from evergrad_trainer.distributed.world import Interrupt
from evergrad_trainer.worker import channel
from evergrad_trainer.worker import watchdog as guard_module
from evergrad_trainer.worker.channel import Channel, channel_pair
from evergrad_trainer.worker.watchdog import Watchdog


@dataclass
class Pair:
    """The supervisor's end, and the watchdog."""

    supervisor: Channel
    watchdog: Watchdog

    def receive_answer(self) -> Any:
        """Return the next record, or fail after a minute."""
        return self.supervisor.receive(60.0)

    def settle(self) -> None:
        """Until the watchdog has taken all that was sent so far."""
        self.supervisor.send(channel.WorkerPing())
        assert self.receive_answer() == channel.WorkerPong()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes this process would have ended with."""
    codes: list[int] = []
    monkeypatch.setattr(guard_module, "os", SimpleNamespace(_exit=codes.append))
    return codes


@pytest.fixture
def pair(exits: list[int]) -> Iterator[Pair]:
    supervisor, end = channel_pair()
    watchdog = Watchdog(end)
    watchdog.start()
    yield Pair(supervisor, watchdog)
    supervisor.close()
    watchdog._thread.join(PATIENCE)
    assert not watchdog._thread.is_alive()
    end.close()


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def begin(generation: int) -> channel.WorkerGo:
    return channel.WorkerGo(generation, 0, 1, "127.0.0.1", 1, 1.0, cause="test")


def awaited(watchdog: Watchdog, *, step: int) -> "list[Any]":
    """A list that gets the order, which another thread waits for."""
    orders: list[Any] = []
    threading.Thread(
        target=lambda: orders.append(watchdog.await_order(step=step)), daemon=True
    ).start()
    return orders


def test_each_change_is_answered_once_with_the_held_step(pair: Pair) -> None:
    orders = awaited(pair.watchdog, step=7)
    for generation in (1, 4):
        pair.supervisor.send(channel.WorkerPlan(generation, hard=False))
        assert pair.receive_answer() == channel.WorkerReady(generation, 7)
    pair.supervisor.send(channel.WorkerPlan(4, hard=True))
    pair.settle()
    pair.supervisor.send(begin(4))
    assert until(lambda: orders == [begin(4)])


def test_a_begin_older_than_the_newest_change_is_ignored(pair: Pair) -> None:
    orders = awaited(pair.watchdog, step=-1)
    pair.supervisor.send(channel.WorkerPlan(2, hard=False))
    assert pair.receive_answer() == channel.WorkerReady(2, -1)
    pair.supervisor.send(channel.WorkerPlan(3, hard=False))
    assert pair.receive_answer() == channel.WorkerReady(3, -1)
    pair.supervisor.send(begin(2))
    pair.settle()
    assert orders == []
    pair.supervisor.send(begin(3))
    assert until(lambda: orders == [begin(3)])


@pytest.mark.parametrize(
    "order", [channel.WorkerFinish(0), channel.WorkerLeave(9, save=True)]
)
def test_the_end_overrides_any_plan(pair: Pair, order: Any) -> None:
    pair.supervisor.send(channel.WorkerPlan(8, hard=False))
    pair.supervisor.send(order)
    pair.settle()
    assert pair.watchdog.await_order(step=0) == order


def test_a_soft_change_is_a_request_for_the_next_boundary_and_cuts_no_connection(
    pair: Pair,
) -> None:
    interrupt = Interrupt()
    pair.watchdog.enter(1, interrupt)
    assert not pair.watchdog.is_changing()
    pair.supervisor.send(channel.WorkerPlan(2, hard=False))
    pair.settle()
    assert (
        pair.watchdog.is_changing()
        and pair.watchdog.is_changing_from(1)
        and not pair.watchdog.is_changing_from(2)
    )
    assert not interrupt.is_set
    pair.watchdog.leave()
    assert not pair.watchdog.is_changing()


def test_a_deferrable_change_waits_once_even_if_it_is_planned_again(
    pair: Pair,
) -> None:
    pair.watchdog.enter(1, Interrupt())
    pair.supervisor.send(channel.WorkerPlan(2, hard=False, patience_seconds=3600.0))
    pair.settle()
    assert pair.watchdog.is_changing() and pair.watchdog.can_wait()
    pair.supervisor.send(channel.WorkerPlan(3, hard=False, patience_seconds=0.0))
    pair.supervisor.send(channel.WorkerPlan(4, hard=False, patience_seconds=3600.0))
    pair.settle()
    assert not pair.watchdog.can_wait(), "the first end of its patience counts"
    pair.watchdog.leave()
    pair.watchdog.enter(4, Interrupt())
    pair.supervisor.send(channel.WorkerPlan(5, hard=False, patience_seconds=3600.0))
    pair.settle()
    assert pair.watchdog.can_wait(), "another group, another patience"


def test_a_soft_change_that_becomes_hard_aborts_the_group(pair: Pair) -> None:
    interrupt = Interrupt()
    pair.watchdog.enter(1, interrupt)
    for hard in (False, True):
        pair.supervisor.send(channel.WorkerPlan(2, hard=hard))
        pair.settle()
        assert interrupt.is_set == hard
    pair.watchdog.leave()


def test_a_hard_change_received_before_an_older_group_is_entered_aborts_it_at_once(
    pair: Pair,
) -> None:
    pair.supervisor.send(channel.WorkerPlan(5, hard=True))
    pair.settle()
    older, same = Interrupt(), Interrupt()
    pair.watchdog.enter(4, older)
    assert older.is_set
    pair.watchdog.leave()
    pair.watchdog.enter(5, same)
    assert not same.is_set
    pair.watchdog.leave()


def test_a_hard_change_for_the_same_or_an_older_generation_aborts_no_group(
    pair: Pair,
) -> None:
    interrupt = Interrupt()
    pair.watchdog.enter(5, interrupt)
    for generation in (4, 5):
        pair.supervisor.send(channel.WorkerPlan(generation, hard=True))
    pair.settle()
    assert not interrupt.is_set and not pair.watchdog.is_changing()
    pair.watchdog.leave()


def test_the_end_of_the_run_aborts_the_group(pair: Pair) -> None:
    interrupt = Interrupt()
    pair.watchdog.enter(1, interrupt)
    pair.supervisor.send(channel.WorkerFinish(75))
    pair.settle()
    assert interrupt.is_set and pair.watchdog.is_changing_from(1)
    pair.watchdog.leave()


def test_connections_of_the_group_are_cut_until_the_group_is_left(
    pair: Pair,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pair.watchdog.enter(1, Interrupt())
        pair.supervisor.send(channel.WorkerPlan(2, hard=True))
        pair.settle()
        # Made while the group is given up, as a group that is still being set up does.
        with (
            socket.create_connection(listener.getsockname()) as late,
            listener.accept()[0] as other,
        ):
            late.settimeout(PATIENCE)
            assert late.recv(1) == b""
            del other
        pair.watchdog.leave()
        with (
            socket.create_connection(listener.getsockname()) as next_one,
            listener.accept()[0] as other,
        ):
            pair.settle()
            other.sendall(b"x")
            next_one.settimeout(PATIENCE)
            assert next_one.recv(1) == b"x"


def test_a_connection_opened_after_the_group_was_formed_is_not_cut(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pair.watchdog.enter(1, Interrupt())
        group = socket.create_connection(listener.getsockname())
        peer = listener.accept()[0]
        pair.watchdog.note_formed()
        own = socket.create_connection(listener.getsockname())
        service = listener.accept()[0]
        with group, peer, own, service:
            for one in (group, own):
                one.settimeout(PATIENCE)
            pair.supervisor.send(channel.WorkerPlan(2, hard=True))
            assert group.recv(1) == b""
            pair.settle()
            pair.watchdog.cut()
            service.sendall(b"x")
            assert own.recv(1) == b"x"
        pair.watchdog.leave()


def test_the_end_of_the_supervisor_ends_the_process(pair: Pair, exits: list[int]) -> None:
    assert exits == []
    pair.supervisor.close()
    assert until(lambda: exits == [ExitCode.INTERNAL])
