"""The prefetcher: correct batches with every plan, errors at the right call, and no remaining thread."""

import random
import threading
import time
from collections import Counter

import pytest
import torch
from patience import PATIENCE

from evergrad_trainer.data.batch import Batch, pin
from evergrad_trainer.data.prefetch import Prefetcher


class Stream:
    """Returns numbered batches, and waits or fails at given numbers."""

    def __init__(self) -> None:
        self.reads: Counter[tuple[int, int]] = Counter()
        self.threads: set[str] = set()
        self.failing: set[tuple[int, int]] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()

    def slot(self, step: int, slot: int) -> Batch:
        self.begun.set()
        self.gate.wait(timeout=PATIENCE)
        self.reads[(step, slot)] += 1
        self.threads.add(threading.current_thread().name)
        if (step, slot) in self.failing:
            raise RuntimeError(f"step {step}, slot {slot}")
        tensor = torch.tensor([[step, slot]])
        return Batch(
            {"step": tensor[:, 0], "slot": tensor[:, 1]}, weight=2, samples=(), hash=0
        )


def prefetch_threads() -> set[threading.Thread]:
    """Includes threads of other tests' prefetchers, which end only with the process."""
    return {
        thread for thread in threading.enumerate() if thread.name == "evergrad-prefetch"
    }


@pytest.mark.acceptance("8d-1e")
def test_the_requested_batch_is_returned_for_any_prediction() -> None:
    stream, rng, before = Stream(), random.Random(0), prefetch_threads()
    prefetcher = Prefetcher(stream)
    for _ in range(300):
        step, slot = rng.randint(1, 5), rng.randint(0, 3)
        upcoming = [
            (rng.randint(1, 5), rng.randint(0, 3)) for _ in range(rng.randint(0, 3))
        ]
        batch = prefetcher.take(step, slot, upcoming=upcoming)
        assert (int(batch.tensors["step"]), int(batch.tensors["slot"])) == (step, slot)
    prefetcher.close()
    assert prefetch_threads() <= before


def test_a_predicted_batch_is_read_once_and_in_the_background() -> None:
    stream = Stream()
    prefetcher = Prefetcher(stream)
    plan = [(step, slot) for step in range(1, 20) for slot in range(2)]
    for key, following in zip(plan, [*plan[1:], None], strict=True):
        prefetcher.take(*key, upcoming=[following] if following else [])
        deadline = time.monotonic() + PATIENCE
        while following and not stream.reads[following] and time.monotonic() < deadline:
            time.sleep(0.001)
    prefetcher.close()
    assert set(stream.reads.values()) == {1}
    assert stream.reads.keys() == set(plan)
    assert stream.threads == {"MainThread", "evergrad-prefetch"}


def test_reading_continues_while_the_caller_works() -> None:
    stream = Stream()
    prefetcher = Prefetcher(stream)
    prefetcher.take(1, 0)
    stream.gate.clear()
    stream.begun.clear()
    taker = threading.Thread(target=lambda: prefetcher.take(1, 1, upcoming=[(1, 2)]))
    taker.start()
    assert stream.begun.wait(timeout=PATIENCE)
    stream.gate.set()
    taker.join(timeout=PATIENCE)
    assert int(prefetcher.take(1, 2).tensors["slot"]) == 2
    prefetcher.close()
    assert stream.reads[(1, 2)] == 1


@pytest.mark.acceptance("input-T-50")
@pytest.mark.capability("T-50")
def test_a_background_error_is_raised_only_when_the_batch_is_taken() -> None:
    stream = Stream()
    stream.failing = {(2, 0)}
    prefetcher = Prefetcher(stream)
    prefetcher.take(1, 0, upcoming=[(2, 0), (2, 1)])
    with pytest.raises(RuntimeError, match="step 2, slot 0"):
        prefetcher.take(2, 0, upcoming=[(2, 1)])
    assert int(prefetcher.take(2, 1).tensors["slot"]) == 1
    stream.failing.clear()
    assert int(prefetcher.take(2, 0).tensors["step"]) == 2
    prefetcher.close()


def test_an_error_of_a_batch_that_is_never_taken_is_dropped() -> None:
    stream = Stream()
    stream.failing = {(9, 9)}
    prefetcher = Prefetcher(stream)
    prefetcher.take(1, 0, upcoming=[(9, 9)])
    prefetcher.take(1, 1, upcoming=[(1, 2)])
    assert int(prefetcher.take(1, 2).tensors["slot"]) == 2
    prefetcher.close()


def test_a_closed_prefetcher_still_reads_in_the_thread_of_the_caller() -> None:
    stream, before = Stream(), prefetch_threads()
    prefetcher = Prefetcher(stream)
    prefetcher.take(1, 0, upcoming=[(1, 1)])
    prefetcher.close()
    prefetcher.close()
    assert int(prefetcher.take(3, 0, upcoming=[(3, 1)]).tensors["step"]) == 3
    assert prefetch_threads() <= before


def test_batches_are_pinned_by_the_thread_that_reads_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[str] = []

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        pinned.append(threading.current_thread().name)
        return self.clone()

    # Pinning memory needs a device, so record the calls instead.
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    stream = Stream()
    prefetcher = Prefetcher(stream, prepare=pin)
    first = prefetcher.take(1, 0, upcoming=[(1, 1)])
    second = prefetcher.take(1, 1)
    prefetcher.close()
    assert [int(one.tensors["slot"]) for one in (first, second)] == [0, 1]
    # Two tensors a batch; the second batch was read ahead, unless this thread was quicker.
    assert len(pinned) >= 4 and threading.current_thread().name in pinned
