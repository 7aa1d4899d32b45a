"""Finds workers that stand still although another one of their group has ended with 0.

A rank may work longer than the others: it writes the final model, or evaluates it. Such a rank uses a
processor, reads, writes, prints or waits for a disk. A rank that does none of these for the whole time
allowed is hung: in a destructor, or in a collective that no other rank will ever join.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from evergrad_trainer.node.workers import Worker

FINISH_SECONDS = 300.0
"""As long as torchrun's agents wait for each other once their own workers have ended (its exit barrier)."""
_IDLE_SHARE = 0.01
"""Of one core: threads that only wake up to look at something use less."""
_IDLE_SECONDS = 0.2
"""Of a processor, at any time: a tenth of what starting Python takes."""
_IDLE_BYTES = 64 * 1024
"""Read and written: less is messages, a block of a file is more."""


@dataclass(frozen=True)
class Activity:
    """What a worker and the processes that it has started have done so far."""

    cpu_seconds: float
    moved_bytes: int
    waits_for_disk: bool
    """Whether a thread is in an operation of a disk or a network file system."""


@dataclass
class _Mark:
    at: float
    activity: Activity


class Stragglers:
    """Remembers when each worker last did something, once it is asked for the first time."""

    def __init__(
        self,
        *,
        limit_seconds: float,
        end: Callable[[Worker], None] = Worker.kill,
        observe: Callable[[int], Activity] | None = None,
    ) -> None:
        """``limit_seconds``: 0 for ever. ``end`` ends a worker that hangs."""
        self._limit_seconds = limit_seconds
        self._end = end
        self._observe = observe_activity if observe is None else observe
        self._marks: dict[int, _Mark] = {}

    def end_hung(self, workers: Iterable[Worker], *, now: float) -> None:
        """End each worker that has stood still for longer than the limit."""
        if self._limit_seconds <= 0:
            return
        for worker in workers:
            # Once: an end that begins with its stacks takes a while.
            if worker.why_killed:
                continue
            activity = self._observe(worker.pid)
            mark = self._marks.get(worker.serial)
            if mark is None or _has_moved(mark, activity, worker, now=now):
                self._marks[worker.serial] = _Mark(now, activity)
            elif now - mark.at > self._limit_seconds:
                worker.why_killed = (
                    f"was ended: it stood still for {self._limit_seconds:g} s (no processor, file or "
                    "output) after another worker had ended with 0"
                )
                self._end(worker)


def _has_moved(mark: _Mark, activity: Activity, worker: Worker, *, now: float) -> bool:
    # A child that has ended takes its part of the sums with it: less is movement as well.
    cpu_seconds = abs(activity.cpu_seconds - mark.activity.cpu_seconds)
    return (
        activity.waits_for_disk
        or worker.printed_at > mark.at
        or cpu_seconds > _IDLE_SECONDS + _IDLE_SHARE * (now - mark.at)
        or abs(activity.moved_bytes - mark.activity.moved_bytes) > _IDLE_BYTES
    )


def observe_activity(pid: int) -> Activity:
    """What process ``pid`` and its descendants have done; what ``/proc`` does not show counts as nothing."""
    cpu_seconds, moved_bytes, waits_for_disk = 0.0, 0, False
    ticks = os.sysconf("SC_CLK_TCK")
    for one in _list_family(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = _read_fields(Path(f"/proc/{one}/stat"))
            cpu_seconds += (int(fields[11]) + int(fields[12])) / ticks
        with contextlib.suppress(OSError, ValueError):
            lines = Path(f"/proc/{one}/io").read_text("ascii").splitlines()
            values = dict(line.split(": ") for line in lines)
            moved_bytes += int(values["rchar"]) + int(values["wchar"])
        for task in Path(f"/proc/{one}/task").glob("*/stat"):
            with contextlib.suppress(OSError, IndexError):
                waits_for_disk |= _read_fields(task)[0] == "D"
    return Activity(cpu_seconds, moved_bytes, waits_for_disk)


def _list_family(pid: int) -> list[int]:
    """A process and all that it has started, and these have started."""
    family = [pid]
    for one in family:
        for path in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                family += [int(child) for child in path.read_text("ascii").split()]
    return family


def _read_fields(stat: Path) -> list[str]:
    """The fields behind the name, which may hold anything: the first is the state."""
    return stat.read_text("utf-8", errors="replace").rpartition(")")[2].split()
