"""The lease: only one holder at a time, even if a process is stopped, slow or cut off."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import virtual_time
from fake_kubernetes.cluster import FakeCluster
from fake_kubernetes.store import RefusedError, Store

from evergrad_operator.core.objects.errors import ApiError
from evergrad_operator.core.objects.kinds import KINDS
from evergrad_operator.edge.api.lease import LeaseGate, LeaseSettings

PLACE = "leases", "ns", "evergrad-operator"


class LeaseCluster(FakeCluster):
    """The requests of a gate to the API server."""

    async def create(self, body: Any, *, is_fenced: bool = True) -> Any:
        return self._try(lambda: self.store.create(KINDS[body["kind"]].plural, body))

    async def replace(self, body: Any, *, is_fenced: bool = True) -> Any:
        return self._try(lambda: self.store.replace(KINDS[body["kind"]].plural, body))


def build_gate(name: str, clock: Callable[[], float], seconds: float = 15.0) -> LeaseGate:
    return LeaseGate(LeaseSettings("ns", "evergrad-operator", name, seconds), clock=clock)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cluster() -> Any:
    return LeaseCluster(Store())


def test_nothing_is_written_before_the_lease_is_held(clock: Clock) -> None:
    assert build_gate("a", clock).remaining() <= 0


def test_the_first_candidate_gets_the_lease_and_the_second_waits_a_whole_duration(
    clock: Clock, cluster: Any
) -> None:
    first, second = build_gate("a", clock), build_gate("b", clock)
    assert asyncio.run(first._try(cluster))
    assert 10 < first.remaining() <= 15
    assert not asyncio.run(second._try(cluster))
    clock.now += 14.9
    assert not asyncio.run(second._try(cluster))
    clock.now += 0.3
    assert first.remaining() < 0
    assert asyncio.run(second._try(cluster))
    assert cluster.store.get(*PLACE)["spec"]["leaseTransitions"] == 1


def test_the_lease_of_the_holder_ends_before_another_candidate_can_take_it(
    clock: Clock, cluster: Any
) -> None:
    first, second = build_gate("a", clock), build_gate("b", clock)
    assert asyncio.run(first._try(cluster))
    taken_at = None
    while taken_at is None:
        clock.now += 0.1
        if asyncio.run(second._try(cluster)):
            taken_at = clock.now
            assert first.remaining() <= 0
    assert taken_at < 1020


def test_a_renewal_that_a_candidate_observes_restarts_its_wait(
    clock: Clock, cluster: Any
) -> None:
    first, second = build_gate("a", clock), build_gate("b", clock)
    asyncio.run(first._try(cluster))
    for _ in range(10):
        clock.now += 5
        assert asyncio.run(first._try(cluster))
        assert not asyncio.run(second._try(cluster))
    assert cluster.store.get(*PLACE)["spec"]["leaseTransitions"] == 0


def test_a_holder_that_was_stopped_finds_its_lease_expired_and_then_taken(
    clock: Clock, cluster: Any
) -> None:
    first, second = build_gate("a", clock), build_gate("b", clock)
    asyncio.run(first._try(cluster))
    asyncio.run(second._try(cluster))
    clock.now += 16
    asyncio.run(second._try(cluster))
    assert first.remaining() < 0 < second.remaining()
    assert not asyncio.run(first._try(cluster))
    assert first.remaining() < 0 < second.remaining()


def test_one_of_two_concurrent_candidates_gets_the_lease(
    clock: Clock, cluster: Any
) -> None:
    asyncio.run(build_gate("old", clock)._try(cluster))
    first, second = build_gate("a", clock), build_gate("b", clock)
    assert not asyncio.run(first._try(cluster)) and not asyncio.run(second._try(cluster))
    clock.now += 20
    original = cluster.get

    async def get_then_lose(*place: Any) -> Any:
        raw = await original(*place)
        cluster.get = original
        assert await second._try(cluster)
        return raw

    cluster.get = get_then_lose
    assert not asyncio.run(first._try(cluster))
    assert first.remaining() < 0 < second.remaining()


def test_a_released_lease_is_free_at_once(clock: Clock, cluster: Any) -> None:
    first, second = build_gate("a", clock), build_gate("b", clock)
    asyncio.run(first._try(cluster))
    asyncio.run(second._try(cluster))
    asyncio.run(first.release(cluster))
    assert first.remaining() < 0
    assert asyncio.run(second._try(cluster))


def test_a_restarted_holder_of_the_same_name_takes_its_lease_again_at_once(
    clock: Clock, cluster: Any
) -> None:
    asyncio.run(build_gate("pod_uid", clock)._try(cluster))
    assert asyncio.run(build_gate("pod_uid", clock)._try(cluster))


def test_a_holder_that_cannot_renew_keeps_the_lease_until_its_end_only(
    cluster: Any,
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        gate = build_gate("a", loop.time, seconds=1.6)
        changes: list[bool] = []
        gate.on_change = changes.append
        await gate.acquire(cluster)

        def refuse(write: Any) -> None:
            raise RefusedError(500, "InternalError")

        cluster.store.before = refuse
        started = loop.time()
        await gate.keep(cluster)
        assert loop.time() - started >= 0.4
        assert gate.remaining() <= 0
        assert changes == [True, False]

    virtual_time.run(main())


def test_a_renewal_that_hangs_does_not_outlast_the_lease(cluster: Any) -> None:
    async def hang(*_: Any) -> Any:
        await asyncio.sleep(60)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        gate = build_gate("a", loop.time, seconds=1.6)
        await gate.acquire(cluster)
        cluster.get = hang
        async with asyncio.timeout(20):  # of the virtual clock
            await gate.keep(cluster)
        assert gate.remaining() <= 0

    virtual_time.run(main())


def test_a_holder_that_lost_the_lease_takes_it_again_when_the_api_server_answers(
    cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        gate = build_gate("a", loop.time)
        changes: list[bool] = []
        gate.on_change = changes.append
        await gate.acquire(cluster)
        answer = cluster.get

        async def fail(*_: Any) -> Any:
            raise ApiError(0, "Unreachable", "away")

        cluster.get = fail
        await gate.keep(cluster)
        waiting = asyncio.create_task(gate.acquire(cluster))
        await asyncio.sleep(60)
        assert not waiting.done() and gate.remaining() <= 0
        cluster.get = answer
        await waiting
        assert gate.remaining() > 0 and changes == [True, False, True]
        assert not gate.has_other_holder

    virtual_time.run(main())
    # A minute of attempts logs one line, not thirty.
    assert len([text for text in caplog.messages if "Unreachable" in text]) == 1


def test_a_lease_that_became_free_while_the_process_was_stopped_is_not_renewed(
    clock: Clock, cluster: Any
) -> None:
    first, second = build_gate("a", clock), build_gate("b", clock)
    assert asyncio.run(first._try(cluster))
    asyncio.run(second._try(cluster))
    answer = cluster.get

    async def be_stopped_before_the_answer(*place: Any) -> Any:
        # In the meantime the other has held the lease, written, and released it.
        cluster.get = answer
        clock.now += 20
        assert await second._try(cluster)
        await second.release(cluster)
        return await answer(*place)

    cluster.get = be_stopped_before_the_answer
    assert not asyncio.run(first._try(cluster, is_renewal=True))
    assert first.remaining() <= 0
    assert asyncio.run(first._try(cluster)), "as a new holder it may have it"


def test_a_candidate_keeps_waiting_if_the_server_does_not_answer(
    clock: Clock, cluster: Any
) -> None:
    async def fail(*_: Any) -> Awaitable[Any]:
        raise ApiError(0, "Unreachable", "away")

    cluster.get = fail
    assert not asyncio.run(build_gate("a", clock)._try(cluster))
