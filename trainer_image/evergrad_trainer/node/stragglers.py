"""Finds workers that hang although another worker of their group has ended with 0.

A rank may work longer than the others, for example because it writes or evaluates the final model. Such a
rank uses a processor, reads, writes, prints or waits for a disk. A rank that does none of these for the whole
limit hangs: in a destructor, or in a collective that no other rank will join.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from evergrad_trainer.node.workers import Worker

FINISH_SECONDS = 300.0
"""Default limit; it is the time for which torchrun's agents wait for each other in their exit barrier."""
_IDLE_SHARE = 0.01
"""Share of one core. Threads that only wake up to check a condition use less."""
_IDLE_SECONDS = 0.2
"""Processor time that never counts as activity; it is a tenth of the time that Python takes to start."""
_IDLE_BYTES = 64 * 1024
"""Bytes read and written that do not count as activity: messages are smaller, blocks of a file larger."""


@dataclass(frozen=True)
class Activity:
    """Total activity of a worker and its descendant processes."""

    cpu_seconds: float
    moved_bytes: int
    waits_for_disk: bool
    """Whether a thread waits for a disk or a network file system."""


@dataclass
class _Mark:
    at: float
    activity: Activity


class Stragglers:
    """Records when each worker was last active, beginning with the first call of ``end_hung``."""

    def __init__(
        self,
        *,
        limit_seconds: float,
        end: Callable[[Worker], None] = Worker.kill,
        observe: Callable[[int], Activity] | None = None,
    ) -> None:
        """Prepare an empty record.

        ``limit_seconds`` is the time without activity after which a worker is ended; 0 means no limit.
        ``end`` ends a worker that hangs.
        """
        self._limit_seconds = limit_seconds
        self._end = end
        self._observe = observe_activity if observe is None else observe
        self._marks: dict[int, _Mark] = {}

    def end_hung(self, workers: Iterable[Worker], *, now: float) -> None:
        """End each worker that has not been active for longer than the limit."""
        if self._limit_seconds <= 0:
            return
        for worker in workers:
            # End each worker only once: logging its stacks first may take a minute.
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
    # The sums decrease when a child process ends, so a decrease also counts as activity.
    cpu_seconds = abs(activity.cpu_seconds - mark.activity.cpu_seconds)
    return (
        activity.waits_for_disk
        or worker.printed_at > mark.at
        or cpu_seconds > _IDLE_SECONDS + _IDLE_SHARE * (now - mark.at)
        or abs(activity.moved_bytes - mark.activity.moved_bytes) > _IDLE_BYTES
    )


def observe_activity(pid: int) -> Activity:
    """Return the activity of process ``pid`` and its descendants; values missing in ``/proc`` count as 0."""
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
    """Return the ids of a process and all its descendants."""
    family = [pid]
    for one in family:
        for path in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                family += [int(child) for child in path.read_text("ascii").split()]
    return family


def _read_fields(stat: Path) -> list[str]:
    """Return the fields after the process name, which may contain any characters; the first is the state."""
    return stat.read_text("utf-8", errors="replace").rpartition(")")[2].split()
