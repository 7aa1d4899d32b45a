"""Requests to coordinators: bounded in size, time and number; invalid responses are ignored."""

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import virtual_time
from patience import PATIENCE

from evergrad_operator.core.decision import NodeBounds
from evergrad_operator.core.objects.errors import (
    LeaseLostError,
    OperatorError,
    UnauthorizedError,
)
from evergrad_operator.edge.api.transport import OpenGate
from evergrad_operator.edge.reconcile.coordinator_poller import (
    MAX_BYTES,
    CoordinatorResponse,
    Coordinators,
    PollSettings,
)

KEY = ("ns", "run")
"""Longest wait in seconds for any event. On an idle machine no event takes a second."""


class Coordinator:
    """Answers as configured, and counts the requests."""

    def __init__(
        self,
        body: bytes = b"{}",
        *,
        head: str = "HTTP/1.1 200 OK",
        seconds: float = 0.0,
        length: int | None = None,
    ) -> None:
        self.body, self.head, self.seconds, self.length = body, head, seconds, length
        self.requests: list[str] = []
        self.tokens: set[str] = set()
        self.writers: list[asyncio.StreamWriter] = []
        self.server: asyncio.Server | None = None

    async def listen(self) -> int:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self.server.sockets[0].getsockname()[1])

    def close(self) -> None:
        assert self.server is not None
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.writers.append(writer)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
        self.tokens |= {
            line.partition(": ")[2]
            for line in head.split("\r\n")
            if line.startswith("Authorization: ")
        }
        body = await reader.readexactly(length)
        self.requests.append(head.split("\r\n")[0] + body.decode())
        await asyncio.sleep(self.seconds)
        size = len(self.body) if self.length is None else self.length
        writer.write(f"{self.head}\r\nContent-Length: {size}\r\n\r\n".encode() + self.body)
        writer.close()


def ask(
    coordinator: Coordinator, *, num_news: int = 1, **settings: Any
) -> tuple[Coordinators, list[bool]]:
    """Return the final state after a number of notifications, and all notifications."""
    news: list[bool] = []

    async def main() -> Coordinators:
        port = await coordinator.listen()
        known = Coordinators(
            PollSettings(port=port, every=0.05, timeout=PATIENCE, **settings),
            on_news=lambda key, urgent: news.append(urgent),
        )
        known.follow(KEY, "127.0.0.1", 3, token="t")
        task = asyncio.create_task(known.run())
        await until(lambda: len(news) >= num_news)
        await known.close()
        await task
        coordinator.close()
        await asyncio.sleep(0)
        return known

    return asyncio.run(main()), news


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.002)


def test_the_newest_status_is_stored_with_its_attempt() -> None:
    known, news = ask(Coordinator(json.dumps({"phase": "Running", "step": 7}).encode()))
    answer = known.answer(KEY)
    assert answer is not None
    assert (answer.raw, answer.attempt) == ({"phase": "Running", "step": 7}, 3)
    assert news == [True]


def test_progress_alone_is_a_change_but_not_urgent() -> None:
    coordinator = Coordinator(json.dumps({"phase": "Running", "step": 1}).encode())

    async def advance() -> None:
        coordinator.body = json.dumps(
            {"phase": "Running", "step": len(coordinator.requests)}
        ).encode()

    original = coordinator._serve

    async def serve(reader: Any, writer: Any) -> None:
        await advance()
        await original(reader, writer)

    coordinator._serve = serve  # type: ignore[method-assign]
    _, news = ask(coordinator, num_news=4)
    assert news[0] is True
    assert set(news[1:]) == {False}


@pytest.mark.parametrize(
    "build",
    [
        lambda: Coordinator(b"[1]"),
        lambda: Coordinator(b"not json"),
        lambda: Coordinator(b"{}", head="HTTP/1.1 503 Service Unavailable"),
        lambda: Coordinator(b"{}", head="nonsense"),
        lambda: Coordinator(b"{}", seconds=5.0),
        lambda: Coordinator(b"{}", length=MAX_BYTES + 1),
        lambda: Coordinator(b"{}", length=-1),
        lambda: Coordinator(b"{", length=100),
        lambda: Coordinator(b"[" * 100_000),
    ],
)
def test_an_invalid_response_is_ignored_and_polled_less_frequently(
    build: Callable[[], Coordinator],
) -> None:
    news: list[bool] = []

    async def main() -> tuple[Coordinators, list[float | None]]:
        coordinator = build()
        settings = PollSettings(port=await coordinator.listen(), every=0.05, timeout=0.2)
        known = Coordinators(settings, on_news=lambda key, urgent: news.append(urgent))
        known.follow(KEY, "127.0.0.1", 3, token="t")
        pauses = [await known._poll(KEY) for _ in range(3)]
        coordinator.close()
        await asyncio.sleep(0)
        return known, pauses

    known, pauses = asyncio.run(main())
    assert known.answer(KEY) is None
    assert news == []
    first, second, third = (pause or 0.0 for pause in pauses)
    assert 0.05 < first < second < third


def test_a_missing_coordinator_raises_no_error() -> None:
    async def main() -> None:
        known = Coordinators(PollSettings(port=1, timeout=0.2))
        known.follow(KEY, "127.0.0.1", 0, token="t")
        task = asyncio.create_task(known.run())
        await asyncio.sleep(0.05)
        assert known.answer(KEY) is None
        await known.close()
        await task

    asyncio.run(main())


def test_the_status_of_an_older_coordinator_is_not_attributed_to_the_newer_one() -> None:
    known, _ = ask(Coordinator(b'{"step": 1}'))
    known.follow(KEY, "127.0.0.1", 4, token="t")
    assert known.answer(KEY) is None
    known.leave(KEY)
    assert not known._followed


def test_a_coordinator_that_is_unfollowed_during_a_poll_leaves_no_state_or_notification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[bool] = []

    async def main() -> Coordinators:
        known = Coordinators(on_news=lambda key, urgent: told.append(urgent))
        ended = asyncio.Event()

        async def leave_and_fail(*_: Any) -> CoordinatorResponse:
            known.leave(KEY)
            ended.set()
            raise OperatorError("its pod is gone")

        monkeypatch.setattr(known, "_read_status", leave_and_fail)
        known.on_failure = lambda cause: told.append(True)
        known.follow(KEY, "127.0.0.1", 3, token="t")
        task = asyncio.create_task(known.run())
        await asyncio.wait_for(ended.wait(), PATIENCE)
        await known.close()
        await task
        return known

    queue = asyncio.run(main())._queue
    assert told == []
    assert not (queue._due or queue._heap or queue._last_end or queue._failures)


def test_an_immediate_poll_keeps_the_last_status_if_the_response_is_invalid() -> None:
    async def main() -> None:
        coordinator = Coordinator(b'{"step": 1}')
        known = Coordinators(
            PollSettings(port=await coordinator.listen(), timeout=PATIENCE)
        )
        await known.ask(KEY)
        assert known.answer(KEY) is None and not coordinator.requests  # none is followed
        known.follow(KEY, "127.0.0.1", 3, token="t")
        await known.ask(KEY)
        coordinator.body = b"no JSON"
        await known.ask(KEY)
        answer = known.answer(KEY)
        assert answer is not None and (answer.raw, answer.attempt) == ({"step": 1}, 3)
        assert len(coordinator.requests) == 2
        coordinator.close()

    asyncio.run(main())


def test_a_response_does_not_replace_the_response_of_a_later_request() -> None:
    """A poll may be answered after a pass that sent its request later."""

    async def main() -> None:
        known = Coordinators()
        known.follow(KEY, "10.0.0.1", 3, token="t")
        answers = [
            CoordinatorResponse({"step": step}, 3, float(step)) for step in (1, 3, 2, 4)
        ]

        async def read(key: Any, followed: Any) -> CoordinatorResponse:
            return answers.pop(0)

        known._read_status = read  # type: ignore[method-assign]
        seen = []
        while answers:
            await known.ask(KEY)
            answer = known.answer(KEY)
            assert answer is not None
            seen.append(answer.raw["step"])
        assert seen == [1, 3, 3, 4]

    asyncio.run(main())


def test_bounds_are_posted_and_a_refusal_keeps_the_message_of_the_coordinator() -> None:
    async def main() -> Coordinator:
        coordinator = Coordinator(b"ok")
        port = await coordinator.listen()
        known = Coordinators(PollSettings(port=port))
        with pytest.raises(OperatorError, match="no coordinator"):
            await known.post_bounds(KEY, NodeBounds(1, 2, 3))
        known.follow(KEY, "127.0.0.1", 0, token="t")
        await known.post_bounds(KEY, NodeBounds(1, 2, 3))
        coordinator.head, coordinator.body = (
            "HTTP/1.1 400 Bad Request",
            b"bounds: max is below min",
        )
        with pytest.raises(OperatorError, match="max is below min"):
            await known.post_bounds(KEY, NodeBounds(3, 2, 3))
        coordinator.close()
        await asyncio.sleep(0)
        return coordinator

    assert (
        asyncio.run(main()).requests[0]
        == 'POST /bounds HTTP/1.1{"min": 1, "max": 2, "maxFailures": 3}'
    )


def test_every_request_carries_the_token_of_the_run() -> None:
    async def main() -> Coordinator:
        coordinator = Coordinator(b'{"step": 1}')
        known = Coordinators(PollSettings(port=await coordinator.listen()))
        known.follow(KEY, "127.0.0.1", 0, token="first")
        await known.ask(KEY)
        known.follow(KEY, "127.0.0.1", 1, token="second")
        await known.post_bounds(KEY, NodeBounds(1, 2, 3))
        coordinator.close()
        await asyncio.sleep(0)
        return coordinator

    assert asyncio.run(main()).tokens == {"Bearer first", "Bearer second"}


def test_a_coordinator_that_refuses_the_token_is_reported_with_the_remedy() -> None:
    async def main() -> None:
        coordinator = Coordinator(b"no", head="HTTP/1.1 401 Unauthorized")
        known = Coordinators(PollSettings(port=await coordinator.listen()))
        known.follow(KEY, "127.0.0.1", 0, token="a wrong one")
        with pytest.raises(UnauthorizedError, match=r"spec\.restartNonce") as told:
            await known.post_bounds(KEY, NodeBounds(1, 2, 3))
        assert "a wrong one" not in str(told.value)
        await known.ask(KEY)
        assert known.answer(KEY) is None
        coordinator.close()
        await asyncio.sleep(0)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("failure", "reason", "cause"),
    [
        (TimeoutError(), "CoordinatorUnreachable", "timeout"),
        (ConnectionRefusedError(), "CoordinatorUnreachable", "refused"),
        (OSError("no route to host"), "CoordinatorUnreachable", "unreachable"),
        (UnauthorizedError("the token"), "CoordinatorUnauthorized", "unauthorized"),
        (ValueError("not a status"), "CoordinatorUnreachable", "bad_answer"),
    ],
)
def test_silence_is_measured_from_the_first_failed_poll_and_reported_at_its_thresholds(
    failure: Exception, reason: str, cause: str
) -> None:
    now, told, causes = [1000.0], list[float](), list[str]()

    async def main() -> None:
        known = Coordinators(
            clock=lambda: now[0], on_news=lambda key, is_urgent: told.append(now[0])
        )
        known.on_failure = causes.append
        known.follow(KEY, "10.0.0.1", 3, token="t")
        is_well = True

        async def answer(key: Any, followed: Any) -> CoordinatorResponse:
            if is_well:
                return CoordinatorResponse({"phase": "Running"}, followed.attempt, now[0])
            error = (
                failure
                if isinstance(failure, UnauthorizedError)
                else OperatorError("no answer")
            )
            raise error from (None if error is failure else failure)

        known._read_status = answer  # type: ignore[method-assign]
        await known._poll(KEY)
        assert known.silence(KEY) is None
        is_well, began = (
            False,
            now[0] + 250.0,
        )  # of many coordinators, each is polled rarely
        now[0] = began
        told.clear()
        while now[0] - began < 130.0:
            delay = await known._poll(KEY)
            assert delay is not None
            now[0] += delay
        assert [
            mark
            for mark in told
            if min(abs(mark - began - one) for one in (10, 15, 30, 60, 120)) > 0.5
        ] == []
        assert len(told) == 5
        silence = known.silence(KEY)
        assert silence is not None
        assert (silence.reason, silence.attempt, silence.has_answered) == (reason, 3, True)
        assert silence.has_timed_out == (cause == "timeout")
        assert silence.seconds >= 130.0
        assert known.answer(KEY) is None  # its last response may be outdated
        assert set(causes) == {cause}
        is_well = True
        told.clear()
        await known._poll(KEY)
        assert known.silence(KEY) is None and told == [now[0]]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("followed", "seconds"),
    [(1, 5.0), (200, 5.0), (400, 10.0), (800, 20.0), (10_000, 20.0)],
)
def test_the_rate_of_polls_scales_with_the_number_of_runs(
    followed: int, seconds: float
) -> None:
    assert PollSettings().find_interval(followed) == seconds


def test_each_of_thousands_of_coordinators_is_polled_at_least_every_30_s() -> None:
    number = 3000
    asked: dict[tuple[str, str], list[float]] = {}

    class Answering(Coordinators):
        async def _read_status(self, key: Any, followed: Any) -> CoordinatorResponse:
            now = asyncio.get_running_loop().time()
            asked.setdefault(key, []).append(now)
            await asyncio.sleep(0.01)
            return CoordinatorResponse({}, followed.attempt, now)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        known = Answering(clock=loop.time)
        for one in range(number):
            known.follow(("ns", f"r{one}"), "127.0.0.1", 1, token="t")
        task = asyncio.create_task(known.run())
        await asyncio.sleep(65)
        end = loop.time()
        await known.close()
        await task
        assert len(asked) == number
        gaps = [
            later - earlier
            for times in asked.values()
            for earlier, later in pairwise([*times, end])
        ]
        assert max(gaps) <= 30

    virtual_time.run(main())


def test_without_the_lease_no_bounds_are_posted() -> None:
    coordinator = Coordinator()

    class Lost:
        def remaining(self) -> float:
            return 0.0

    async def main() -> None:
        port = await coordinator.listen()
        known = Coordinators(PollSettings(port=port, timeout=PATIENCE))
        known.follow(KEY, "127.0.0.1", 1, token="t")
        known.gate = Lost()
        with pytest.raises(LeaseLostError):
            await known.post_bounds(KEY, NodeBounds(1, 2, 3))
        known.gate = OpenGate()
        await known.post_bounds(KEY, NodeBounds(1, 2, 3))
        coordinator.close()

    asyncio.run(main())
    assert [line.split()[0] for line in coordinator.requests] == ["POST"]


def test_coordinators_that_are_unfollowed_together_are_no_longer_polled() -> None:
    known = Coordinators()
    for one in range(3):
        known.follow(("ns", f"r{one}"), "127.0.0.1", 1, token="t")
    assert known.count() == 3
    known.leave_all()
    assert known.count() == 0 and known.answer(("ns", "r0")) is None
