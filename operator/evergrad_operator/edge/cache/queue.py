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
"""Entries that may be superseded before the heap is cleared of them: a small queue is not worth the work."""
Process = Callable[[K], Awaitable[float | None]]
"""Works on one key and returns the seconds until the key is due again, or None. An exception makes it due
after a back-off."""


@dataclass(frozen=True)
class Backoff:
    """Delay after the n-th failure in a row: ``first`` · 2ⁿ⁻¹, at most ``longest``, less up to half of it by
    chance. Seconds."""

    first: float = 0.5
    longest: float = 60.0
    longest_after_news: float = 5.0
    """Longest delay if news came during the work that failed, such as the correction of what it failed for.
    Not less: the work itself may cause news each time, and would be repeated at full speed."""

    def delay(self, failures: int) -> float:
        """Return the seconds to wait after this many failures in a row, at least one."""
        # The exponent is bounded: a key that fails for days would overflow a float.
        doubled = self.first * 2.0 ** min(failures - 1, 40)
        return min(self.longest, doubled) * random.uniform(0.5, 1.0)


@dataclass(frozen=True)
class QueueState:
    """The queue at one moment: keys that are due, seconds that the oldest of them has waited, and seconds
    that the slowest worker has worked.

    ``stalled``: seconds for which work was due or under way and none has finished.
    """

    depth: int
    oldest_age: float
    longest_work: float
    added: int
    failing: int
    stalled: float


class WorkQueue(Generic[K]):
    """Keys that are due, now or later. ``spacing``: least seconds between the end of work on a key and its
    next start.

    A key that is added while it is worked on becomes due again afterwards. The earliest of several due times
    counts.
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
        """Keys that were dropped while they are worked on: nothing is kept of their end."""
        self._wake = asyncio.Event()
        self._is_closed = False
        self._is_paused = False
        self._progressed_at = float("-inf")
        """When work on a key ended last, or was resumed."""

    def add(self, key: K, *, after: float = 0.0) -> None:
        """Make ``key`` due in ``after`` seconds, unless it is due earlier."""
        if self._is_closed:
            return
        self._num_added += 1

        # A key that was just worked on waits a moment: events of one change come in bursts.
        earliest = self._last_end.get(key, 0.0) + self._spacing
        due = max(self._clock() + after, earliest)
        if due >= self._due.get(key, float("inf")):
            return
        self._due[key] = due
        # A key that is worked on gets its place in the heap at the end of that work.
        if key in self._active:
            return
        self._num_pushed += 1
        heapq.heappush(self._heap, (due, self._num_pushed, key))

        # An entry that an earlier time has superseded leaves only at the heap's head. One that is due in a
        # week, pushed anew by each pass of a run with a deadline, would stay for that week: at most as many
        # entries as there are keys may be superseded.
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
        """Forget everything about a key that does not exist any more.

        Work on it that has begun goes on to its end.
        """
        self._due.pop(key, None)
        self._failures.pop(key, None)
        self._last_end.pop(key, None)
        if key in self._active:
            self._dropped.add(key)

    def failures(self, key: K) -> int:
        """Return how often in a row work on the key has failed."""
        return self._failures.get(key, 0)

    def observe(self) -> QueueState:
        """Return the queue's state at this moment."""
        # A key that is worked on waits for nothing but its own end, which ``longest_work`` measures.
        now = self._clock()
        ready = [
            now - due
            for key, due in self._due.items()
            if due <= now and key not in self._active
        ]
        works = [now - started for started, _ in self._active.values()]
        oldest_age, longest_work = max(ready, default=0.0), max(works, default=0.0)

        # A long queue is not a stall: at a start, all runs are due together. While the queue is paused, its
        # owner lets nothing start.
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
        """Work on keys, at most ``workers`` at a time, until cancelled or closed."""
        while not self._is_closed:
            self._wake.clear()
            while self._heap and len(self._active) < workers and not self._is_paused:
                due, _, key = self._heap[0]
                # An entry that an earlier time has superseded, or whose key is worked on, is passed over.
                is_passed_over = key in self._active or self._due.get(key) != due
                if not is_passed_over and due > self._clock():
                    break
                heapq.heappop(self._heap)
                if is_passed_over:
                    continue
                del self._due[key]
                task = asyncio.create_task(self._work(process, key), name=f"work on {key}")
                self._active[key] = (self._clock(), task)

            # Wait until the next key is due, or something is added or done. While every worker is busy, only
            # the end of one matters.
            seconds: float | None = None
            if self._heap and len(self._active) < workers and not self._is_paused:
                seconds = max(0.0, self._heap[0][0] - self._clock())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()

    async def pause(self) -> None:
        """Start nothing new until ``resume``, and cancel the work under way.

        A key whose work is cancelled is due only if it was added meanwhile.
        """
        self._is_paused = True
        tasks = [task for _, task in self._active.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def resume(self) -> None:
        """Work on keys again. Those that were due meanwhile come first."""
        self._is_paused = False
        self._progressed_at = self._clock()
        self._wake.set()

    async def close(self, *, seconds: float) -> None:
        """Start nothing new, wait at most ``seconds`` for the work under way, then cancel the rest."""
        self._is_closed = True
        self._wake.set()
        tasks = [task for _, task in self._active.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self, process: Process[K], key: K) -> None:
        # A failure concerns one key alone, which becomes due again later. ``process`` reports its errors
        # itself.
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

            # A time that was added while the work went on counts from its end, or from its own time if that
            # is later.
            waiting = self._due.pop(key, None)
            has_failed = self.failures(key) > 0 and delay is not None
            delays: list[float] = [] if delay is None else [delay]
            if waiting is not None:
                # After a failure news only shorten the backoff: they must not turn it into a busy loop.
                least = self._backoff.longest_after_news if has_failed else 0.0
                delays.append(max(least, waiting - self._clock()))
            if delays:
                self.add(key, after=min(delays))

            # The metric counts what others added, not that a key was taken up again.
            if delay is not None or waiting is not None:
                self._num_added -= 1
            # A worker is free now, whatever became of the key.
            self._wake.set()
