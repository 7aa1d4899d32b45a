"""Waits of a world end when its group is given up, and a world of one never waits."""

import threading
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist

from evergrad_trainer.base.errors import PeerLostError
from evergrad_trainer.distributed import process_groups
from evergrad_trainer.distributed import world as world_module
from evergrad_trainer.distributed.process_groups import abandon_world
from evergrad_trainer.distributed.transports import GlooTransport, _ThreadWork
from evergrad_trainer.distributed.world import Interrupt, Membership, World

CPU = torch.device("cpu")


class Work:
    """A collective that is complete when the test sets it, with a given error."""

    def __init__(self, *, is_done: bool = True, error: str = "") -> None:
        self.is_done, self.error, self.num_waits = is_done, error, 0

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        self.num_waits += 1
        if self.error:
            raise RuntimeError(self.error)


def make_world(interrupt: Interrupt | None = None, *, size: int = 2) -> World:
    return World(1, rank=0, size=size, device=CPU, interrupt=interrupt)


def test_a_single_process_agrees_with_itself() -> None:
    world = make_world(size=1)
    assert world.gather_json({"a": 1}) == [{"a": 1}]
    assert world.broadcast_json([1, 2]) == [1, 2]
    assert world.all_agree(True) and not world.all_agree(False)
    assert world.sum_integers(torch.tensor([3])).tolist() == [3]
    world.barrier()
    world.confirm()
    world.raise_if_given_up()


def test_a_failed_collective_is_a_lost_peer() -> None:
    with pytest.raises(PeerLostError, match="Connection closed by peer"):
        make_world(Interrupt()).wait(Work(error="Connection closed by peer"))
    with pytest.raises(PeerLostError, match="Connection closed by peer"):
        make_world().wait(Work(error="Connection closed by peer"))


def test_a_collective_that_never_ends_is_waited_for_until_shortly_after_the_abort() -> None:
    interrupt, work = Interrupt(), Work(is_done=False)
    timer = threading.Timer(0.05, interrupt.set)
    timer.start()
    with pytest.raises(PeerLostError, match="given up during a collective"):
        make_world(interrupt).wait(work)
    timer.join()
    assert interrupt.is_overdue and work.num_waits == 0, (
        "waiting would hold this thread for the whole timeout"
    )


def test_a_successful_collective_counts_although_the_group_is_aborted() -> None:
    """Ranks that have the whole sum finish the step, since others may have done so too."""
    interrupt, work = Interrupt(), Work()
    interrupt.set()
    world = make_world(interrupt)
    world.unfinished.append((work, ()))
    world.wait(work)
    assert work.num_waits == 1 and world.unfinished == []


def test_an_aborted_group_starts_no_more_work() -> None:
    interrupt = Interrupt()
    world = make_world(interrupt)
    world.raise_if_given_up()
    assert not interrupt.is_set and not interrupt.is_overdue
    interrupt.set()
    with pytest.raises(PeerLostError):
        world.raise_if_given_up()


def test_an_interrupt_keeps_its_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(world_module.time, "monotonic", lambda: now[0])
    interrupt = Interrupt()
    interrupt.set()
    now[0] += 0.09
    interrupt.set()
    assert not interrupt.is_overdue
    now[0] += 0.02
    assert interrupt.is_overdue


def test_a_start_that_fails_is_a_lost_peer_and_leaves_nothing_unfinished() -> None:
    world = make_world(Interrupt())

    def begin() -> dist.Work:
        raise RuntimeError("Connection reset by peer")

    with pytest.raises(PeerLostError, match="reset"):
        world._start(begin, torch.zeros(1))
    assert world.unfinished == []


def test_tensors_of_a_collective_are_kept_until_it_has_been_waited_for() -> None:
    world, work, values = make_world(Interrupt()), Work(), torch.zeros(3)
    assert world._start(lambda: cast(dist.Work, work), values) is work
    assert world.unfinished == [(work, (values,))]
    world.wait(work)
    assert world.unfinished == []


def test_an_exchange_in_a_thread_reports_its_error() -> None:
    def fail() -> None:
        raise RuntimeError("Connection closed by peer")

    work = _ThreadWork(fail)
    with pytest.raises(RuntimeError, match="closed"):
        work.wait()
    fine = _ThreadWork(lambda: None)
    fine.wait()
    assert fine.is_completed()


def test_an_exchange_that_hangs_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    end, interrupt = threading.Event(), Interrupt()
    monkeypatch.setattr(dist, "send", lambda *args, **kwargs: end.wait(30))
    world = make_world(interrupt)
    interrupt.set()
    with pytest.raises(PeerLostError):
        world.send(torch.zeros(1), to=1)
    assert len(world.unfinished) == 1
    end.set()
    world.unfinished[0][0].wait()


@pytest.mark.parametrize("is_done", [True, False])
def test_work_that_never_ends_is_kept_alive_with_its_tensors(
    monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    leaked: list[object] = []
    monkeypatch.setattr(process_groups, "_leaked", leaked)
    world, values = make_world(Interrupt()), torch.zeros(3)
    world.unfinished.append((Work(is_done=is_done), (values,)))
    assert abandon_world(world, GlooTransport(), patience_seconds=0.01) is not is_done
    assert len(leaked) == (0 if is_done else 1)
    if not is_done:
        *_, entries = leaked[0]  # type: ignore[misc]
        assert entries[0][1][0] is values  # type: ignore[has-type]


def test_the_patience_for_abandoned_work_applies_once_to_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_groups, "_leaked", [])
    world, now = make_world(Interrupt()), [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(
        process_groups, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    )
    world.unfinished.extend((Work(is_done=False), ()) for _ in range(100))
    assert abandon_world(world, GlooTransport(), patience_seconds=0.1)
    assert 0.1 <= now[0] < 0.2, "100 patiences would be 10 s"


def test_abandoning_nothing_is_not_an_error() -> None:
    assert not abandon_world(None, GlooTransport())


def test_a_membership_moves_and_passes_the_request_on() -> None:
    wish = threading.Event()
    first, second = make_world(), make_world(size=3)
    membership = Membership(first, is_changing=wish.is_set)
    assert membership.world is first and not membership.is_changing()
    wish.set()
    membership.move_to(second)
    assert membership.world is second and membership.is_changing()
    assert not Membership(first).is_changing()
    patient = Membership(first, is_changing=lambda: True, can_wait=lambda: True)
    assert patient.is_changing() and not patient.is_changing(is_saving=True)
    assert membership.is_changing(is_saving=True), "a wish that cannot wait"
