"""A work queue of keys: deduplication, one worker per key, exponential backoff with jitter, delayed keys."""

import asyncio
import contextlib
import heapq
import random
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from evergrad_operator.core.objects.backoff import find_delay

K = TypeVar("K", bound=Hashable)
_SPARE_ENTRIES = 64
"""Number of superseded entries below which the heap is not cleaned up, because it is not worth the work."""
Process = Callable[[K], Awaitable[float | None]]
"""Processes one key, and returns the seconds until the key is due again, or None.

If it raises an exception, the key is due after a backoff.
"""


@dataclass(frozen=True)
class Backoff:
    """Delay after the n-th consecutive failure, in seconds: ``first`` · 2ⁿ⁻¹, but at most ``longest``.

    A random part of up to half of the delay is subtracted. For example, with the defaults, the delay after
    the third failure is 1 to 2 s.
    """

    first: float = 0.5
    longest: float = 60.0
    longest_after_news: float = 5.0
    """Maximum delay if the key was added during the failed work, for example by a correction of the cause.

    It is not shorter, because the work itself may add the key each time, and would then be repeated without a
    pause.
    """

    def delay(self, failures: int) -> float:
        """Return the seconds to wait after ``failures`` consecutive failures. ``failures`` is at least 1."""
        delay = find_delay(failures, first=self.first, longest=self.longest)
        return delay * random.uniform(0.5, 1.0)


@dataclass(frozen=True)
class QueueState:
    """The state of the queue at one moment.

    ``depth``: number of due keys. ``oldest_age``: seconds for which the oldest of them has been due.
    ``longest_work``: seconds of the longest running work. ``added``: number of calls of ``add``. ``failing``:
    number of keys whose last work failed. ``stalled``: seconds for which work was due or running and none
    has ended.
    """

    depth: int
    oldest_age: float
    longest_work: float
    added: int
    failing: int
    stalled: float


class WorkQueue(Generic[K]):
    """A queue of keys that are due now or later.

    If a key is added while it is processed, it is due again afterwards. If a key is added several times, the
    earliest due time counts.

    ``spacing``: minimum seconds between the end of the work on a key and its next start.
    """

    def __init__(
        self,
        *,
        backoff: Backoff | None = None,
        spacing: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backoff = backoff or Backoff()
        self._spacing = spacing
        self._clock = clock
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._num_pushed = 0
        self._num_added = 0
        self._active: dict[K, tuple[float, asyncio.Task[None]]] = {}
        self._failures: dict[K, int] = {}
        self._last_end: dict[K, float] = {}
        self._dropped: set[K] = set()
        """Keys that were dropped during their work. The end of this work is not recorded."""
        self._wake = asyncio.Event()
        self._is_closed = False
        self._is_paused = False
        self._progressed_at = float("-inf")
        """Time at which work last ended, or at which the queue was last resumed."""

    def add(self, key: K, *, after: float = 0.0) -> None:
        """Make ``key`` due in ``after`` seconds, unless it is already due earlier."""
        if self._is_closed:
            return
        self._num_added += 1

        # Keep the spacing after the last work on the key, because events of one change arrive in bursts.
        earliest = self._last_end.get(key, 0.0) + self._spacing
        due = max(self._clock() + after, earliest)
        if due >= self._due.get(key, float("inf")):
            return
        self._due[key] = due
        # If the key is being processed, it is pushed to the heap when this work ends.
        if key in self._active:
            return
        self._num_pushed += 1
        heapq.heappush(self._heap, (due, self._num_pushed, key))

        # A superseded entry leaves the heap only at its head. If each pass of a run with a deadline pushes an
        # entry that is due in a week, these entries would stay for a week. Clean up the heap when it has more
        # superseded entries than keys.
        if len(self._heap) > 2 * len(self._due) + _SPARE_ENTRIES:
            kept = {}
            for entry in self._heap:
                entry_due, _, waiting = entry
                is_newest = self._due.get(waiting) == entry_due
                if is_newest and waiting not in self._active:
                    kept[waiting] = entry
            self._heap = list(kept.values())
            heapq.heapify(self._heap)
        if self._heap[0][2] == key:
            self._wake.set()

    def drop(self, key: K) -> None:
        """Drop all data of a key that no longer exists.

        Work that has started continues to its end.
        """
        self._due.pop(key, None)
        self._failures.pop(key, None)
        self._last_end.pop(key, None)
        if key in self._active:
            self._dropped.add(key)

    def failures(self, key: K) -> int:
        """Return the number of consecutive failures of the key."""
        return self._failures.get(key, 0)

    def observe(self) -> QueueState:
        """Return the current state of the queue."""
        # Do not count a key as waiting while it is processed; ``longest_work`` measures this time.
        now = self._clock()
        ready = [
            now - due
            for key, due in self._due.items()
            if due <= now and key not in self._active
        ]
        works = [now - started for started, _ in self._active.values()]
        oldest_age, longest_work = max(ready, default=0.0), max(works, default=0.0)

        # A long queue is not a stall, because all runs are due together at a start. A paused queue is not
        # stalled either.
        waiting = 0.0 if self._is_paused else max(oldest_age, longest_work)
        return QueueState(
            depth=len(ready),
            oldest_age=oldest_age,
            longest_work=longest_work,
            added=self._num_added,
            failing=len(self._failures),
            stalled=min(waiting, now - self._progressed_at),
        )

    async def run(self, process: Process[K], *, workers: int) -> None:
        """Process keys, at most ``workers`` at a time, until the queue is closed or the task is cancelled."""
        while not self._is_closed:
            self._wake.clear()
            while self._heap and len(self._active) < workers and not self._is_paused:
                due, _, key = self._heap[0]
                # Skip a superseded entry, and an entry whose key is being processed.
                is_passed_over = key in self._active or self._due.get(key) != due
                if not is_passed_over and due > self._clock():
                    break
                heapq.heappop(self._heap)
                if is_passed_over:
                    continue
                del self._due[key]
                task = asyncio.create_task(self._work(process, key), name=f"work on {key}")
                self._active[key] = (self._clock(), task)

            # Wait until the next key is due, a key is added or work ends. If all workers are busy, wait only
            # for such an event.
            seconds: float | None = None
            if self._heap and len(self._active) < workers and not self._is_paused:
                seconds = max(0.0, self._heap[0][0] - self._clock())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()

    async def pause(self) -> None:
        """Start no work until ``resume``, and cancel the running work.

        A key whose work is cancelled is due again only if it was added during the work.
        """
        self._is_paused = True
        tasks = [task for _, task in self._active.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def resume(self) -> None:
        """Process keys again. Keys that became due during the pause come first."""
        self._is_paused = False
        self._progressed_at = self._clock()
        self._wake.set()

    async def close(self, *, seconds: float) -> None:
        """Start no more work, wait at most ``seconds`` for the running work, then cancel the rest."""
        self._is_closed = True
        self._wake.set()
        tasks = [task for _, task in self._active.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, process: Process[K], key: K) -> None:
        # A failure affects only one key, which is retried later. ``process`` logs its errors itself.
        delay: float | None = None
        try:
            delay = await process(key)
            self._failures.pop(key, None)
        except Exception:  # noqa: BLE001
            self._failures[key] = self._failures.get(key, 0) + 1
            delay = self._backoff.delay(self._failures[key])
        finally:
            del self._active[key]
            self._progressed_at = self._clock()
            if key not in self._dropped:
                self._last_end[key] = self._progressed_at
            self._dropped.discard(key)

            # If the key was added during the work, it is due now, or at the added time if that is later.
            waiting = self._due.pop(key, None)
            has_failed = self.failures(key) > 0 and delay is not None
            delays: list[float] = [] if delay is None else [delay]
            if waiting is not None:
                # After a failure, an added key only shortens the backoff, so that there is no busy loop.
                least = self._backoff.longest_after_news if has_failed else 0.0
                delays.append(max(least, waiting - self._clock()))
            if delays:
                self.add(key, after=min(delays))

            # The metric must count only calls of ``add`` from outside, not this requeue.
            if delay is not None or waiting is not None:
                self._num_added -= 1
            # A worker is free now, so wake up ``run``.
            self._wake.set()
