"""Asks the coordinators of running runs how far they are, and tells them new bounds. Over plain HTTP to the pods' addresses.

Whatever answers there is not trusted: size, time and number are bounded, and what cannot be read counts as no answer.
"""

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from evergrad_operator.decision import Bounds
from evergrad_operator.errors import OperatorError, UnauthorizedError
from evergrad_operator.names import STATUS_PORT, Key
from evergrad_operator.queue import Backoff, WorkQueue

log = logging.getLogger(__name__)
MAX_BYTES: Final = 256 * 1024
_FAST_CHANGES = ("step", "loss", "tokensPerSecond", "etaSeconds", "updatedSecondsAgo", "lostSeconds")


@dataclass(frozen=True)
class PollSettings:
    """Seconds between two questions to one coordinator, for one answer; how many are asked at a time, and in a second at most."""

    every: float = 5.0
    timeout: float = 3.0
    at_once: int = 32
    per_second: float = 40.0
    port: int = STATUS_PORT


@dataclass(frozen=True)
class Answer:
    """What a coordinator said last: its JSON, of which attempt it was, and when (the clock of ``Coordinators``)."""

    raw: Mapping[str, Any]
    attempt: int
    at: float


@dataclass
class _Followed:
    address: str
    attempt: int
    token: str = field(repr=False)
    answer: Answer | None = None
    failures: int = 0


class Coordinators:
    """The coordinators that are followed, and their answers. ``on_news`` hears of each, and if it is more than progress."""

    def __init__(
        self,
        settings: PollSettings | None = None,
        *,
        on_news: Callable[[Key, bool], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._clock = settings or PollSettings(), clock
        self.on_news: Callable[[Key, bool], None] = on_news or (lambda key, is_urgent: None)
        self._followed: dict[Key, _Followed] = {}
        self._queue: WorkQueue[Key] = WorkQueue(backoff=Backoff(1.0, 30.0), clock=clock)

    def follow(self, key: Key, address: str, attempt: int, *, token: str) -> None:
        """Ask the coordinator at this address from now on, and no other one of the run. ``token``: the run's."""
        known = self._followed.get(key)
        if known is None or (known.address, known.attempt) != (address, attempt):
            self._followed[key] = _Followed(address, attempt, token)
            self._queue.drop(key)
            self._queue.add(key)

    def leave(self, key: Key) -> None:
        """Ask the run's coordinator no more."""
        if self._followed.pop(key, None) is not None:
            self._queue.drop(key)

    def answer(self, key: Key) -> Answer | None:
        """The newest answer of the coordinator that is followed."""
        followed = self._followed.get(key)
        return followed.answer if followed else None

    def num_followed(self) -> int:
        """How many coordinators are asked."""
        return len(self._followed)

    async def run(self) -> None:
        """Ask, until cancelled."""
        await self._queue.run(self._poll, workers=self._settings.at_once)

    async def close(self) -> None:
        """Ask nobody any more."""
        await self._queue.close(seconds=0.0)

    async def ask(self, key: Key) -> None:
        """Have a new answer now, if the run's coordinator gives one; nobody is told of it."""
        followed = self._followed.get(key)
        if followed is not None:
            with contextlib.suppress(OperatorError):
                followed.answer = await self._read_status(key, followed)

    async def post_bounds(self, key: Key, bounds: Bounds) -> None:
        """Tell the run's coordinator how many nodes may train, and how many failures are borne. Raises OperatorError."""
        followed = self._followed.get(key)
        if followed is None:
            raise OperatorError(f"{key[0]}/{key[1]}: no coordinator is running that could be told the new bounds")
        body = json.dumps({"min": bounds.min, "max": bounds.max, "maxFailures": bounds.max_failures}).encode()
        status, answer = await self._request(followed, "POST", "/bounds", body)
        if status != 200:
            raise OperatorError(
                f"{key[0]}/{key[1]}: the coordinator refuses the new bounds: {answer[:200].decode('utf-8', 'replace').strip()}"
            )
        self._queue.add(key)

    async def _poll(self, key: Key) -> float | None:
        followed = self._followed.get(key)
        if followed is None:
            return None
        try:
            answer = await self._read_status(key, followed)
        except OperatorError as error:
            followed.failures += 1
            log.debug("%s", error)
            # After a minute of silence the answer is no longer one: what it says may be long over.
            if followed.answer is not None and self._clock() - followed.answer.at > 60.0:
                followed.answer = None
                self.on_news(key, True)
            if followed.failures == 1:
                return 1.0
            pause = min(30.0, 2.0 ** min(followed.failures - 1, 5))
            # Those that fell silent together are not asked together again and again.
            return max(pause, self._slowest) * random.uniform(0.7, 1.3)
        if self._followed.get(key) is not followed:
            return None
        followed.failures = 0
        old, followed.answer = followed.answer, answer
        if old is None or old.raw != answer.raw:
            self.on_news(key, old is None or _without_progress(old.raw) != _without_progress(answer.raw))
        return max(self._settings.every, self._slowest)

    async def _read_status(self, key: Key, followed: _Followed) -> Answer:
        """Raises OperatorError for anything that is no status."""
        status, data = await self._request(followed, "GET", "/status", b"")
        try:
            raw = json.loads(data) if status == 200 else None
        except (ValueError, RecursionError):
            raw = None
        if not isinstance(raw, dict):
            raise OperatorError(f"{key[0]}/{key[1]}: the coordinator answers {status}, and not with a JSON object")
        return Answer(raw, followed.attempt, self._clock())

    @property
    def _slowest(self) -> float:
        """Seconds in which all that are followed can be asked once."""
        return len(self._followed) / self._settings.per_second

    async def _request(self, followed: _Followed, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """One request a connection, as the coordinator serves them: status and body. Raises OperatorError."""
        address = followed.address
        lines = (
            f"{method} {path} HTTP/1.1",
            f"Host: {f'[{address}]' if ':' in address else address}",
            f"Authorization: Bearer {followed.token}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        writer = None
        try:
            async with asyncio.timeout(self._settings.timeout):
                reader, writer = await asyncio.open_connection(address, self._settings.port, limit=MAX_BYTES)
                writer.write("\r\n".join((*lines, "", "")).encode("latin-1") + body)
                await writer.drain()
                answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                status = int(answer.split(" ", 2)[1])
                if status == HTTPStatus.UNAUTHORIZED:
                    raise UnauthorizedError(
                        f"the coordinator at {address} does not take the token that the operator derives for its run: the key of "
                        "the installation was another when it was started. Set spec.restartNonce to a new text."
                    )
                return status, await reader.readexactly(_content_length(answer))
        except (TimeoutError, OSError, EOFError, ValueError, IndexError, asyncio.LimitOverrunError) as error:
            raise OperatorError(f"the coordinator at {address} did not answer {method} {path}: {type(error).__name__}") from error
        finally:
            if writer is not None:
                writer.transport.abort()


def _content_length(head: str) -> int:
    for line in head.split("\r\n")[1:]:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length":
            length = int(value)
            if 0 <= length <= MAX_BYTES:
                return length
    raise ValueError("no body that is taken")


def _without_progress(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in raw.items() if key not in _FAST_CHANGES}
