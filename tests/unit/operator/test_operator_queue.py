"""The queue: once per key, one worker per key, back-off and delays."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import virtual_time
from patience import PATIENCE

from evergrad_operator.edge.cache.queue import Backoff, WorkQueue

Work = Callable[[str], Awaitable[float | None]]
ROUNDING = 1e-9
"""Rounding error of times that are added to the time of the loop."""


def make_queue(**settings: Any) -> WorkQueue[Any]:
    """A queue that uses the clock of the loop."""
    return WorkQueue(clock=asyncio.get_running_loop().time, **settings)


async def work_for(
    queue: WorkQueue[str], process: Work, seconds: float, *, workers: int = 4
) -> None:
    task = asyncio.create_task(queue.run(process, workers=workers))
    await asyncio.sleep(seconds)
    await queue.close(seconds=1.0)
    await task


def test_a_key_that_is_added_several_times_before_its_turn_is_processed_once() -> None:
    done: list[str] = []

    async def process(key: str) -> None:
        done.append(key)

    async def main() -> None:
        queue: WorkQueue[str] = make_queue()
        for _ in range(100):
            queue.add("a")
        assert queue.observe().depth == 1
        await work_for(queue, process, 0.05)

    virtual_time.run(main())
    assert done == ["a"]


def test_additions_during_failing_work_shorten_a_long_backoff_only_to_five_seconds() -> (
    None
):
    starts: list[float] = []

    async def main() -> None:
        queue: WorkQueue[str] = make_queue(backoff=Backoff(first=60.0, longest=60.0))

        async def process(key: str) -> None:
            starts.append(asyncio.get_running_loop().time())
            # The file is corrected while the first pass is about to fail. Later passes cause changes
            # themselves.
            queue.add(key)
            await asyncio.sleep(1.0)
            raise OSError("the API server does not answer")

        queue.add("a")
        await work_for(queue, process, 600.0)

    virtual_time.run(main())
    pauses = {round(later - earlier, 3) for earlier, later in pairwise(starts)}
    assert pauses == {6.0}, "a second of work and five of backoff"


def test_a_key_that_is_added_while_it_is_processed_is_processed_again_and_never_concurrently() -> (
    None
):
    active, most, done = set[str](), [0], list[str]()

    async def main() -> None:
        queue: WorkQueue[str] = make_queue()

        async def process(key: str) -> None:
            assert key not in active
            active.add(key)
            most[0] = max(most[0], len(active))
            if len(done) < 3:
                queue.add(key)
                queue.add(key)
            await asyncio.sleep(0.01)
            active.discard(key)
            done.append(key)

        queue.add("a")
        queue.add("b")
        await work_for(queue, process, 0.3)

    virtual_time.run(main())
    assert 4 <= len(done) <= 6 and set(done) == {"a", "b"}
    assert most[0] == 2


def test_the_number_of_keys_in_process_is_limited_by_the_number_of_workers() -> None:
    active, most = [0], [0]

    async def process(key: int) -> None:
        active[0] += 1
        most[0] = max(most[0], active[0])
        await asyncio.sleep(0.005)
        active[0] -= 1

    async def main() -> None:
        queue: WorkQueue[int] = make_queue()
        for key in range(40):
            queue.add(key)
        task = asyncio.create_task(queue.run(process, workers=3))
        await asyncio.sleep(0.2)
        await queue.close(seconds=1.0)
        await task

    virtual_time.run(main())
    assert most[0] == 3


def test_a_failing_key_backs_off_and_its_backoff_resets_after_a_success() -> None:
    tries: list[float] = []
    failures: list[int] = []

    async def main() -> None:
        queue: WorkQueue[str] = make_queue(backoff=Backoff(0.02, 1.0))

        async def process(key: str) -> None:
            tries.append(asyncio.get_running_loop().time())
            failures.append(queue.failures(key))
            if len(tries) < 5:
                raise ValueError("not yet")

        queue.add("a")
        await work_for(queue, process, 1.0)
        assert queue.failures("a") == 0

    virtual_time.run(main())
    assert failures == [0, 1, 2, 3, 4]
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert all(gap >= 0.5 * 0.02 * 2**number - ROUNDING for number, gap in enumerate(gaps))


def test_other_keys_continue_while_one_fails_or_hangs() -> None:
    done: list[str] = []

    async def process(key: str) -> None:
        if key == "hangs":
            await asyncio.sleep(60)
        if key == "fails":
            raise RuntimeError
        done.append(key)

    async def main() -> None:
        queue: WorkQueue[str] = make_queue()
        for key in ("hangs", "fails", "a", "b"):
            queue.add(key)
        task = asyncio.create_task(queue.run(process, workers=2))
        await asyncio.sleep(0.1)
        assert queue.observe().longest_work > 0.05
        await queue.close(seconds=0.01)
        await task

    virtual_time.run(main())
    assert sorted(done) == ["a", "b"]


def test_the_earliest_of_several_due_times_applies() -> None:
    done: list[str] = []

    async def process(key: str) -> None:
        done.append(key)

    async def main() -> None:
        queue: WorkQueue[str] = make_queue()
        queue.add("a", after=30.0)
        queue.add("a", after=0.02)
        queue.add("a", after=60.0)
        await work_for(queue, process, 0.2)

    virtual_time.run(main())
    assert done == ["a"]


def test_a_key_is_processed_again_after_the_seconds_that_a_worker_returns() -> None:
    times: list[float] = []

    async def process(key: str) -> float | None:
        times.append(asyncio.get_running_loop().time())
        return 0.05 if len(times) < 2 else None

    async def main() -> None:
        queue: WorkQueue[str] = make_queue()
        queue.add("a")
        await work_for(queue, process, 0.3)

    virtual_time.run(main())
    assert len(times) == 2
    assert times[1] - times[0] >= 0.05 - ROUNDING


def test_the_first_turn_of_a_key_is_immediate_and_later_turns_are_spaced() -> None:
    times: list[float] = []

    async def main() -> None:
        queue: WorkQueue[str] = make_queue(spacing=0.08)

        async def process(key: str) -> None:
            times.append(asyncio.get_running_loop().time())

        started = asyncio.get_running_loop().time()
        task = asyncio.create_task(queue.run(process, workers=1))
        for _ in range(30):
            queue.add("a")
            await asyncio.sleep(0.01)
        await queue.close(seconds=1.0)
        await task
        assert times[0] - started < 0.08

    virtual_time.run(main())
    assert all(later - earlier >= 0.08 - ROUNDING for earlier, later in pairwise(times))
    assert len(times) <= 5


def test_a_dropped_key_is_not_processed() -> None:
    done: list[str] = []

    async def process(key: str) -> None:
        done.append(key)

    async def main() -> None:
        queue: WorkQueue[str] = make_queue()
        queue.add("a", after=0.02)
        queue.drop("a")
        await work_for(queue, process, 0.1)

    virtual_time.run(main())
    assert done == []


def test_keys_that_are_dropped_while_they_are_processed_leave_no_state() -> None:
    async def main() -> WorkQueue[str]:
        queue: WorkQueue[str] = make_queue(spacing=0.1)

        async def forget(key: str) -> None:
            queue.drop(key)  # the pass over a run that does not exist any more

        for number in range(100):
            queue.add(f"run-{number}")
        await work_for(queue, forget, 1.0)
        return queue

    queue = virtual_time.run(main())
    assert not (
        queue._last_end or queue._failures or queue._due or queue._heap or queue._dropped
    )


def test_a_week_of_passes_over_runs_with_a_deadline_leaves_one_entry_per_run() -> None:
    week, now = 7 * 86_400.0, [0.0]
    keys = [f"run-{number}" for number in range(10)]
    left: set[str] = set()
    is_done = asyncio.Event()

    async def process(key: str) -> float:
        left.discard(key)
        if not left:
            is_done.set()
        return week - now[0]  # until the run's deadline

    async def main() -> int:
        queue: WorkQueue[str] = WorkQueue(spacing=0.1, clock=lambda: now[0])
        task = asyncio.create_task(queue.run(process, workers=4))
        most = 0
        while now[0] < week - 700.0:
            left.update(keys)
            is_done.clear()
            for key in keys:
                queue.add(key, after=2.0)  # a change of a coordinator's status
            now[0] += 600.0
            await asyncio.wait_for(is_done.wait(), PATIENCE)
            most = max(most, len(queue._heap))
        await queue.close(seconds=1.0)
        await task
        return most

    assert asyncio.run(main()) <= 2 * len(keys) + 64


def test_a_long_queue_whose_keys_finish_is_not_stalled() -> None:
    async def process(key: str) -> None:
        await asyncio.sleep(0.1)

    async def main() -> None:
        queue: WorkQueue[Any] = make_queue()
        for number in range(3000):
            queue.add(number)
        task = asyncio.create_task(queue.run(process, workers=1))
        await asyncio.sleep(200)
        state = queue.observe()
        assert state.oldest_age > 199 and state.stalled < 1
        await queue.close(seconds=1.0)
        await task

    virtual_time.run(main())


def test_a_queue_in_which_nothing_finishes_is_stalled() -> None:
    async def hang(key: str) -> None:
        await asyncio.sleep(10_000)

    async def main() -> None:
        queue: WorkQueue[str] = make_queue()
        assert queue.observe().stalled == 0.0
        await asyncio.sleep(500)
        assert queue.observe().stalled == 0.0, "nothing was due"
        queue.add("a")
        queue.add("b")
        task = asyncio.create_task(queue.run(hang, workers=1))
        await asyncio.sleep(150)
        assert 149 < queue.observe().stalled < 151
        await queue.close(seconds=1.0)
        await task

    virtual_time.run(main())


def test_a_paused_queue_cancels_its_work_and_starts_none_until_it_is_resumed() -> None:
    started: list[str] = []
    ended: list[str] = []

    async def process(key: str) -> None:
        started.append(key)
        await asyncio.sleep(5)
        ended.append(key)

    async def main() -> None:
        queue: WorkQueue[str] = make_queue()
        queue.add("a")
        task = asyncio.create_task(queue.run(process, workers=2))
        await asyncio.sleep(1)
        await queue.pause()
        queue.add("b")
        await asyncio.sleep(1000)
        assert (started, ended) == (["a"], [])
        assert queue.observe().stalled == 0.0, "it waits for its owner"
        queue.resume()
        assert queue.observe().stalled == 0.0, "what was paused counts from here"
        await asyncio.sleep(6)
        assert (started, ended) == (["a", "b"], ["b"])
        await queue.close(seconds=1.0)
        await task

    virtual_time.run(main())
