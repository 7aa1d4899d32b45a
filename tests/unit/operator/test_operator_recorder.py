"""Events: repeated events are counted, a crash loop creates fewer than fifteen objects, and no decision uses
them."""

import asyncio
from typing import Any

import pytest
from fake_kubernetes.cluster import FakeCluster
from fake_kubernetes.store import RefusedError, Store

from evergrad_operator.edge.api.event_recorder import Recorder

RUN = {"metadata": {"name": "run", "namespace": "ns", "uid": "u", "resourceVersion": "5"}}


def record(store: Store, *events: tuple[str, str, str]) -> list[dict[str, Any]]:
    async def main() -> None:
        recorder = Recorder(FakeCluster(store))
        for event in events:
            await recorder.record(RUN, *event)

    asyncio.run(main())
    return store.list("events")


def test_the_same_event_is_one_object_with_a_count() -> None:
    (event,) = record(Store(), *[("Warning", "WorkerCrash", "rank 1 died")] * 7)
    assert (event["count"], event["type"], event["reason"], event["message"]) == (
        7,
        "Warning",
        "WorkerCrash",
        "rank 1 died",
    )
    assert event["involvedObject"]["uid"] == "u"
    assert (
        event["reportingComponent"] == event["source"]["component"] == "evergrad-operator"
    )


def test_a_crash_loop_with_fifty_different_messages_creates_fewer_than_fifteen_events() -> (
    None
):
    reasons = ("WorkerCrash", "BackingOff", "Starting", "Training")
    events = record(
        Store(),
        *[
            ("Warning", reason, f"{reason} of pod run-0-{number}")
            for number in range(50)
            for reason in reasons
        ],
    )
    assert len(events) < 15
    assert sum(event["count"] for event in events) == 200
    assert any(event["message"].endswith("run-0-49") for event in events)


def test_a_reason_keeps_its_bound_of_events_among_thousands_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("evergrad_operator.edge.api.event_recorder.MAX_REMEMBERED", 8)

    async def main(store: Store, others: int) -> None:
        recorder = Recorder(FakeCluster(store))
        for turn in range(20):
            await recorder.record(RUN, "Warning", "Crash", f"pod {turn} ended")
            for number in range(others):
                other = {"metadata": {"name": "o", "namespace": "ns", "uid": str(number)}}
                await recorder.record(other, "Normal", f"R{turn}", "m")

    for others in (2, 20):
        store = Store()
        asyncio.run(main(store, others))
        mine = [one for one in store.list("events") if one["reason"] == "Crash"]
        assert len(mine) <= 3, others
        assert any(one["message"] == "pod 19 ended" for one in mine), others


def test_an_event_that_cannot_be_posted_is_skipped() -> None:
    store = Store()

    def refuse(write: Any) -> None:
        raise RefusedError(403, "Forbidden")

    store.before = refuse
    assert record(store, ("Normal", "Complete", "done")) == []


def test_an_expired_event_is_posted_again() -> None:
    store = Store()

    async def main() -> None:
        recorder = Recorder(FakeCluster(store))
        await recorder.record(RUN, "Normal", "Training", "a")
        store.objects.clear()
        for _ in range(2):
            await recorder.record(RUN, "Normal", "Training", "a")

    asyncio.run(main())
    assert [event["count"] for event in store.list("events")] == [1]


def test_an_event_whose_creation_got_no_response_is_counted_further() -> None:
    store = Store()
    cluster = FakeCluster(store)

    class Unanswered:
        """The first creation succeeds without a response, so the next attempt finds the name in use."""

        async def create(self, body: Any) -> Any:
            await cluster.create(body)
            return await cluster.create(body)

        merge = staticmethod(cluster.merge)

    async def main() -> None:
        recorder = Recorder(Unanswered())
        for _ in range(3):
            await recorder.record(RUN, "Normal", "Training", "a")

    asyncio.run(main())
    assert [event["count"] for event in store.list("events")] == [3]


def test_an_event_whose_count_update_got_no_response_keeps_its_count() -> None:
    store = Store()

    def refuse(write: Any) -> None:
        if write.verb == "patch":
            raise RefusedError(500, "InternalError")

    async def main() -> None:
        recorder = Recorder(FakeCluster(store))
        await recorder.record(RUN, "Normal", "Training", "a")
        usual = store.before
        store.before = refuse
        await recorder.record(RUN, "Normal", "Training", "a")
        store.before = usual
        await recorder.record(RUN, "Normal", "Training", "a")

    asyncio.run(main())
    assert [event["count"] for event in store.list("events")] == [3]


def test_a_message_is_bounded() -> None:
    (event,) = record(Store(), ("Normal", "Training", "x" * 5000))
    assert len(event["message"]) == 1024
