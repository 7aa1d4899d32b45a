"""Work queue of keys: deduplicating, one worker at a time per key, exponential back-off with jitter, delayed
re-queue."""

import asyncio
import contextlib
import heapq
import random
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
_SPARE_ENTRIES = 64
Process = Callable[[K], Awaitable[float | None]]
"""Works on one key; seconds after which the key shall come again, or None.

Raises to be tried again after a back-off.
"""


@dataclass(frozen=True)
class Backoff:
    """Delay after the n-th failure in a row: ``first`` · 2ⁿ⁻¹, at most ``longest``, less up to half of it by
    chance. Seconds."""

    first: float = 0.5
    longest: float = 60.0

    def delay(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row, one at least."""
        return float(
            min(self.longest, self.first * 2.0 ** min(failures - 1, 40))
        ) * random.uniform(0.5, 1.0)


@dataclass(frozen=True)
class QueueState:
    """The queue at one moment: keys that are due, seconds that the oldest of them waits and that the
    slowest worker works."""

    depth: int
    oldest_age: float
    longest_work: float
    added: int
    failing: int


class WorkQueue(Generic[K]):
    """Keys that are due, or will be. ``spacing``: seconds between the end of work on a key and its next
    start.

    A key that is added while it is worked on comes again afterwards; of several due times the earliest
    counts.
    """

    def __init__(
        self,
        *,
        backoff: Backoff | None = None,
        spacing: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backoff, self._spacing, self._clock = backoff or Backoff(), spacing, clock
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._num_pushed = 0
        self._num_added = 0
        self._active: dict[K, tuple[float, asyncio.Task[None]]] = {}
        self._failures: dict[K, int] = {}
        self._last_end: dict[K, float] = {}
        self._dropped: set[K] = set()
        """Keys that were dropped while they are worked on: of their end nothing is kept."""
        self._wake = asyncio.Event()
        self._is_closed = False

    def add(self, key: K, *, after: float = 0.0) -> None:
        """Let ``key`` come in ``after`` seconds, or earlier if it was to come earlier."""
        if self._is_closed:
            return
        self._num_added += 1
        # A key that was just worked on waits a moment: events of one change come in bursts.
        due = max(self._clock() + after, self._last_end.get(key, 0.0) + self._spacing)
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            if key not in self._active:
                self._push(key, due)

    def drop(self, key: K) -> None:
        """Forget everything about a key that does not exist any more.

        Work on it that has begun goes on to its end.
        """
        self._due.pop(key, None)
        self._failures.pop(key, None)
        self._last_end.pop(key, None)
        if key in self._active:
            self._dropped.add(key)

    def failures(self, key: K) -> int:
        """How often in a row work on the key has failed."""
        return self._failures.get(key, 0)

    def observe(self) -> QueueState:
        """The queue now."""
        now = self._clock()
        ready = [
            now - due
            for key, due in self._due.items()
            if due <= now and key not in self._active
        ]
        return QueueState(
            depth=len(ready),
            oldest_age=max(ready, default=0.0),
            longest_work=max(
                (now - started for started, _ in self._active.values()), default=0.0
            ),
            added=self._num_added,
            failing=len(self._failures),
        )

    async def run(self, process: Process[K], *, workers: int) -> None:
        """Work on keys, at most ``workers`` at a time, until cancelled or closed."""
        while not self._is_closed:
            self._wake.clear()
            while len(self._active) < workers and (key := self._pop()) is not None:
                started = self._clock()
                self._active[key] = (
                    started,
                    asyncio.create_task(self._work(process, key), name=f"work on {key}"),
                )
            # Until the next key is due, or something is added or done. While every worker is busy, only the
            # end of one matters.
            seconds: float | None = None
            if self._heap and len(self._active) < workers:
                seconds = max(0.0, self._heap[0][0] - self._clock())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()

    async def close(self, *, seconds: float) -> None:
        """Start nothing new; wait for what is being worked on, at most so long, then cancel it."""
        self._is_closed = True
        self._wake.set()
        tasks = [task for _, task in self._active.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, process: Process[K], key: K) -> None:
        # Whatever goes wrong with one key is that key's own: it comes again later. ``process`` reports its
        # errors itself.
        delay: float | None = None
        try:
            delay = await process(key)
            self._failures.pop(key, None)
        except Exception:  # noqa: BLE001
            self._failures[key] = self._failures.get(key, 0) + 1
            delay = self._backoff.delay(self._failures[key])
        finally:
            del self._active[key]
            if key not in self._dropped:
                self._last_end[key] = self._clock()
            self._dropped.discard(key)
            # A time that was added while the work went on counts from its end, or from its own time if that
            # is later.
            waiting = self._due.pop(key, None)
            # After a failure only the backoff counts: news must not turn it into a busy loop.
            if self.failures(key) and delay is not None:
                self.add(key, after=delay)
            else:
                delays = [
                    wait
                    for wait in (delay, None if waiting is None else waiting - self._clock())
                    if wait is not None
                ]
                if delays:
                    self.add(key, after=min(delays))
            self._num_added -= bool(delay is not None or waiting is not None)
            self._wake.set()

    def _push(self, key: K, due: float) -> None:
        self._num_pushed += 1
        heapq.heappush(self._heap, (due, self._num_pushed, key))
        # An entry that an earlier time has superseded leaves only at the heap's head. One that is due in a
        # week, pushed anew by each pass of a run with a deadline, would stay for that week: at most as many
        # as there are keys may be superseded.
        if len(self._heap) > 2 * len(self._due) + _SPARE_ENTRIES:
            kept = [
                entry
                for entry in self._heap
                if self._due.get(entry[2]) == entry[0] and entry[2] not in self._active
            ]
            self._heap = list({entry[2]: entry for entry in kept}.values())
            heapq.heapify(self._heap)
        if self._heap[0][2] == key:
            self._wake.set()

    def _pop(self) -> K | None:
        """The next key that is due and not worked on.

        An entry that an earlier time has superseded is passed over.
        """
        now = self._clock()
        while self._heap:
            due, _, key = self._heap[0]
            if key in self._active or self._due.get(key) != due:
                heapq.heappop(self._heap)
            elif due <= now:
                heapq.heappop(self._heap)
                del self._due[key]
                return key
            else:
                return None
        return None
