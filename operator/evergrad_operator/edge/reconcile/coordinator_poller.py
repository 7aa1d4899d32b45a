"""Polls the coordinators of running runs for their status, and posts new bounds to them.

It uses plain HTTP to the pods' addresses. Answers are not trusted: their size, time and number are bounded,
and an answer that cannot be parsed counts as a failed poll.
"""

import asyncio
import contextlib
import errno
import json
import logging
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from evergrad_operator.core.decision import NodeBounds
from evergrad_operator.core.objects.backoff import find_delay
from evergrad_operator.core.objects.errors import OperatorError, UnauthorizedError
from evergrad_operator.core.objects.names import STATUS_PORT, Key, Reason
from evergrad_operator.core.observe.observe import UNREACHABLE_SECONDS, Silence
from evergrad_operator.edge.api.transport import Gate, OpenGate, check_gate
from evergrad_operator.edge.cache.queue import Backoff, WorkQueue

log = logging.getLogger(__name__)
MAX_BYTES: Final = 256 * 1024
_FAST_CHANGES = (
    "step",
    "loss",
    "tokensPerSecond",
    "etaSeconds",
    "updatedSecondsAgo",
    "lostSeconds",
    "usage",
    "newSteps",
    "preparation",
)
SILENCES: Final = (10.0, 15.0, 30.0, UNREACHABLE_SECONDS, 120.0, 240.0, 480.0)
"""Seconds of silence after which a pass is queued. The coordinator may be gone without a watch event."""
_JUST_AFTER: Final = 0.1
_NO_WAY: Final = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


@dataclass(frozen=True)
class PollSettings:
    """Bounds of polling. Times are in seconds.

    By default, each of up to 200 runs is polled every 5 s. With more runs the interval grows so that there
    are ``per_second`` polls, but only up to ``longest``. With more than 800 runs, the interval is 20 s and
    the rate grows with the number of runs.
    """

    every: float = 5.0
    """Minimum seconds between two polls of one coordinator."""
    longest: float = 20.0
    """Maximum seconds between two polls of one coordinator, for any number of coordinators.

    The known progress of a run is therefore at most 30 s old, even if one poll fails.
    """
    per_second: float = 40.0
    """Maximum number of polls per second, until the interval has reached ``longest``."""
    timeout: float = 3.0
    """Maximum seconds for one answer."""
    at_once: int = 256
    """Maximum number of concurrent polls.

    With 10,000 runs there are 500 polls a second. If every tenth coordinator does not answer, 150 polls wait
    for their timeout.
    """
    port: int = STATUS_PORT

    def find_interval(self, followed: int) -> float:
        """Return the seconds between two polls of one coordinator, if there are ``followed`` coordinators.

        For example, the default settings return 5.0 for 100 coordinators and 10.0 for 400.
        """
        return max(self.every, min(self.longest, followed / self.per_second))


@dataclass(frozen=True)
class CoordinatorResponse:
    """The last answer of a coordinator.

    ``raw``: its JSON. ``attempt``: attempt of the coordinator's pod. ``at``: time of the request, on the
    clock of ``Coordinators``.
    """

    raw: Mapping[str, Any]
    attempt: int
    at: float


@dataclass
class _Followed:
    address: str
    attempt: int
    token: str = field(repr=False)
    answer: CoordinatorResponse | None = None
    has_answered: bool = False
    failures: int = 0
    silent_since: float | None = None
    """Time of the first failed poll after the last answer; None if the coordinator answers."""
    reported: float = 0.0
    """The last of ``SILENCES`` for which a pass was queued, or 0."""
    error: OperatorError | None = None


class Coordinators:
    """Polls coordinators and keeps their newest answers.

    ``on_news`` is called with the run's key and ``is_urgent`` when an answer has changed or a silence has
    reached one of ``SILENCES``. ``is_urgent`` is False if only progress fields have changed.
    """

    def __init__(
        self,
        settings: PollSettings | None = None,
        *,
        on_news: Callable[[Key, bool], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self.clock = settings or PollSettings(), clock
        self.on_news: Callable[[Key, bool], None] = on_news or (lambda key, is_urgent: None)
        self.on_failure: Callable[[str], None] = lambda cause: None
        """Called for each failed poll with its cause: timeout, refused, unreachable, unauthorized or
        bad_answer."""
        self.gate: Gate = OpenGate()
        """Checked before each POST: without the lease, another operator may be responsible for the run."""
        self._followed: dict[Key, _Followed] = {}
        self._silent: set[Key] = set()
        """Keys of the silent coordinators.

        Each pass over a silent run needs their number, and counting them would take time with thousands of
        runs.
        """
        self._queue: WorkQueue[Key] = WorkQueue(backoff=Backoff(1.0, 30.0), clock=clock)

    def follow(
        self,
        key: Key,
        address: str,
        attempt: int,
        *,
        token: str,
    ) -> None:
        """Poll the run's coordinator at this address, and stop polling any earlier coordinator of the run.

        ``token``: the run's token.
        """
        known = self._followed.get(key)
        if known is None or (known.address, known.attempt) != (address, attempt):
            self._followed[key] = _Followed(address, attempt, token)
            self._silent.discard(key)
            self._queue.drop(key)
            self._queue.add(key)

    def leave(self, key: Key) -> None:
        """Stop polling the run's coordinator."""
        if self._followed.pop(key, None) is not None:
            self._silent.discard(key)
            self._queue.drop(key)

    def leave_all(self) -> None:
        """Stop polling all coordinators, because another operator may be responsible for the runs now."""
        for key in list(self._followed):
            self.leave(key)

    def count(self) -> int:
        """Return the number of coordinators that are polled."""
        return len(self._followed)

    def answer(self, key: Key) -> CoordinatorResponse | None:
        """Return the newest answer of the run's coordinator, or None."""
        followed = self._followed.get(key)
        return followed.answer if followed else None

    def silence(self, key: Key) -> Silence | None:
        """Return the silence of the run's coordinator, or None if it answers or is not polled."""
        followed = self._followed.get(key)
        if followed is None or followed.silent_since is None or followed.error is None:
            return None
        reason = Reason.COORDINATOR_UNREACHABLE
        if _name_cause(followed.error) == "unauthorized":
            reason = Reason.COORDINATOR_UNAUTHORIZED

        # If no packet came back at all, the pod's host may be lost. If most coordinators are silent, the
        # operator itself may be disconnected.
        failed = followed.error.__cause__
        has_no_way = isinstance(failed, OSError) and failed.errno in _NO_WAY
        silent = len(self._silent)
        return Silence(
            attempt=followed.attempt,
            seconds=self.clock() - followed.silent_since,
            reason=reason,
            message=str(followed.error),
            has_answered=followed.has_answered,
            has_timed_out=has_no_way or isinstance(failed, TimeoutError),
            is_alone=2 * silent <= len(self._followed) or len(self._followed) == 1,
        )

    async def run(self) -> None:
        """Poll until cancelled."""
        await self._queue.run(self._poll, workers=self._settings.at_once)

    async def close(self) -> None:
        """Stop all polls."""
        await self._queue.close(seconds=0.0)

    async def ask(self, key: Key) -> None:
        """Poll the run's coordinator now. ``on_news`` is not called, because a pass waits for the answer."""
        followed = self._followed.get(key)
        if followed is not None:
            with contextlib.suppress(OperatorError):
                self._take_answer(key, followed, await self._read_status(key, followed))

    async def post_bounds(self, key: Key, bounds: NodeBounds) -> None:
        """Post the minimum and maximum number of nodes, and the allowed failures, to the run's coordinator.

        Raises OperatorError if the coordinator does not answer or refuses, and LeaseLostError if this process
        does not hold the lease.
        """
        seconds = min(self._settings.timeout, check_gate(self.gate))
        followed = self._followed.get(key)
        if followed is None:
            raise OperatorError(
                f"{key[0]}/{key[1]}: no coordinator is running that could take the new bounds"
            )
        body = json.dumps(
            {
                "min": bounds.min,
                "max": bounds.max,
                "maxFailures": bounds.max_failures,
            }
        ).encode()
        status, answer = await self._request(
            followed, "POST", "/bounds", body, seconds=seconds
        )
        if status != 200:
            said = answer[:200].decode("utf-8", "replace").strip()
            raise OperatorError(
                f"{key[0]}/{key[1]}: the coordinator refuses the new bounds: {said}"
            )
        # Poll now: until an answer contains the new bounds, each pass would post them again.
        self._queue.add(key)

    async def _poll(self, key: Key) -> float | None:
        followed = self._followed.get(key)
        if followed is None:
            return None
        try:
            answer = await self._read_status(key, followed)
        except OperatorError as error:
            # The coordinator may have been dropped during the request, for example because its run was
            # deleted. Then it is not polled again, and its silence is not reported.
            if self._followed.get(key) is not followed:
                return None
            return self._note_failure(key, followed, error)

        # If the run has another coordinator by now, this answer must not replace the answers of that one.
        if self._followed.get(key) is not followed:
            return None
        old, was_silent = followed.answer, followed.reported > 0
        self._take_answer(key, followed, answer)
        # A pass costs more than a poll. Only a change causes a pass, and a change of progress alone causes a
        # delayed pass.
        if old is None or was_silent:
            self.on_news(key, True)
        elif old.raw != answer.raw:
            is_urgent = _without_progress(old.raw) != _without_progress(answer.raw)
            self.on_news(key, is_urgent)
        return self._settings.find_interval(len(self._followed))

    def _take_answer(
        self, key: Key, followed: _Followed, answer: CoordinatorResponse
    ) -> None:
        # A poll that was sent before the request of a pass may be answered after it. Ignore its older answer.
        if followed.answer is None or answer.at >= followed.answer.at:
            followed.answer = answer
        followed.has_answered = True
        followed.failures, followed.error = 0, None
        followed.silent_since, followed.reported = None, 0.0
        # The coordinator may have been dropped during the request.
        if self._followed.get(key) is followed:
            self._silent.discard(key)

    def _note_failure(self, key: Key, followed: _Followed, error: OperatorError) -> float:
        """Record a failed poll, and return the seconds until the next poll.

        ``on_news`` is called if the silence has reached the next of ``SILENCES``.
        """
        log.debug("%s", error)
        self.on_failure(_name_cause(error))
        now = self.clock()
        followed.failures, followed.error = followed.failures + 1, error
        followed.silent_since = (
            now if followed.silent_since is None else followed.silent_since
        )
        self._silent.add(key)
        silence = now - followed.silent_since

        # Drop the last answer after UNREACHABLE_SECONDS of silence, because it may be out of date.
        if silence >= UNREACHABLE_SECONDS:
            followed.answer = None
        reached = max((one for one in SILENCES if one <= silence), default=0.0)
        if reached > followed.reported:
            followed.reported = reached
            self.on_news(key, True)

        # A single lost answer is usually transient, so the second poll follows after one second.
        if followed.failures == 1:
            return 1.0
        # Add jitter, so that coordinators that became silent together are not polled at the same moments.
        backoff = find_delay(followed.failures, first=1.0, longest=30.0)
        pause = max(backoff, self._settings.find_interval(len(self._followed)))
        pause *= random.uniform(0.7, 1.3)
        # Poll no later than the next of SILENCES, or that silence would be reported late.
        marks = [one - silence + _JUST_AFTER for one in SILENCES if one > silence]
        return min((pause, *marks))

    async def _read_status(self, key: Key, followed: _Followed) -> CoordinatorResponse:
        """Request the status once. Raises OperatorError if there is no answer or it is not a JSON object."""
        asked_at = self.clock()
        status, data = await self._request(
            followed, "GET", "/status", b"", seconds=self._settings.timeout
        )
        try:
            raw = json.loads(data) if status == 200 else None
        except (ValueError, RecursionError):
            raw = None
        if not isinstance(raw, dict):
            raise OperatorError(
                f"{key[0]}/{key[1]}: the coordinator answers {status}, and not with a JSON object"
            )
        return CoordinatorResponse(raw, followed.attempt, asked_at)

    async def _request(
        self,
        followed: _Followed,
        method: str,
        path: str,
        body: bytes,
        *,
        seconds: float,
    ) -> tuple[int, bytes]:
        """Send one request on a new connection, because the coordinator closes a connection after one answer.

        Returns status code and body. Raises OperatorError if the answer is missing, invalid, too long or 401.
        """
        address = followed.address
        # Write the request without an HTTP client: a connection pool does not pay off for polls that are
        # seconds apart, and here every part of the answer is bounded.
        lines = (
            f"{method} {path} HTTP/1.1",
            f"Host: {f'[{address}]' if ':' in address else address}",
            f"Authorization: Bearer {followed.token}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        writer = None
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_connection(
                    address, self._settings.port, limit=MAX_BYTES
                )
                writer.write("\r\n".join((*lines, "", "")).encode("latin-1") + body)
                await writer.drain()
                answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                status = int(answer.split(" ", 2)[1])
                if status == HTTPStatus.UNAUTHORIZED:
                    raise UnauthorizedError(
                        f"the coordinator at {address} refuses the token that the operator derives "
                        "for its run: it was started with another key of the installation. Set "
                        "spec.restartNonce "
                        "to a new text."
                    )
                lengths = re.findall(r"(?im)^content-length:\s*(\d+)\s*$", answer)
                length = int(lengths[0])
                if length > MAX_BYTES:
                    raise ValueError("longer than any status")
                return status, await reader.readexactly(length)
        except (
            TimeoutError,
            OSError,
            EOFError,
            ValueError,
            IndexError,
            asyncio.LimitOverrunError,
        ) as error:
            raise OperatorError(
                f"the coordinator at {address} did not answer {method} {path}: {type(error).__name__}"
            ) from error
        finally:
            # Abort instead of close: a peer that does not answer would keep the socket open for minutes.
            if writer is not None:
                writer.transport.abort()


def _name_cause(error: OperatorError) -> str:
    """Return the cause of a failed poll. It is a label of a metric and therefore has only five values."""
    cause = error.__cause__
    if isinstance(error, UnauthorizedError):
        return "unauthorized"
    if isinstance(cause, TimeoutError):
        return "timeout"
    if isinstance(cause, ConnectionRefusedError):
        return "refused"
    return "unreachable" if isinstance(cause, OSError) else "bad_answer"


def _without_progress(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in raw.items() if key not in _FAST_CHANGES}
