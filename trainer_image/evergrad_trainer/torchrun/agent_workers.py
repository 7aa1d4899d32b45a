"""The workers of a torchrun agent, seen from outside: a rendezvous handler gets no word of them from torch.

Linux only: ``/proc`` shows the agent's children with their variables, and a pidfd tells the end of one before
the agent collects it. Elsewhere nothing is known of a worker's end, and the failure is still reported,
without its cause.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from evergrad.node_state import LEASE_LOST
from evergrad_common.causes import BreakCause
from evergrad_common.codec import MAX_TEXT
from evergrad_common.contract import ExitCode
from evergrad_coordinator.protocol import Broken
from evergrad_trainer.worker.peer_failures import is_peer_failure

_FIND_SECONDS = 20.0
_FIND_EVERY_SECONDS = 0.02
_TAIL_BYTES = 16 * 1024


def say(text: str) -> None:
    """Print a line for people who look at the agent's output."""
    print(f"evergrad: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class SeenEnd:
    """How one worker of an agent ended, as seen from outside.

    ``exit_code`` is None where the agent was quicker to collect it; negative for a signal.
    """

    rank: int
    exit_code: int | None
    at: float
    """CLOCK_MONOTONIC seconds."""
    message: str = ""


def build_broken(
    generation: int, *, end: SeenEnd | None, world_size: int, step: int, now: float
) -> Broken:
    """The report that ``generation`` cannot continue, with what is known of the worker that ended first."""
    # The platform does not show the end of somebody else's child.
    if end is None:
        return Broken(
            generation,
            cause="worker_crash",
            step=step,
            message="a worker ended; how is not known on this platform",
        )
    return Broken(
        generation,
        cause=classify(end, world_size=world_size),
        rank=end.rank,
        step=step,
        exit_code=end.exit_code,
        message=end.message.encode("utf-8", errors="replace").decode("utf-8")[:MAX_TEXT],
        is_final=end.exit_code == ExitCode.USER_ERROR,
        time_since=max(0.0, now - end.at),
    )


def classify(end: SeenEnd, *, world_size: int) -> BreakCause:
    """The cause as this node sees it. ``world_size``: of the group that the worker was in."""
    if end.exit_code == ExitCode.USER_ERROR:
        return "user_error"
    # A worker that left as asked, or whose lease was lost: both follow from something else.
    if end.exit_code in (ExitCode.STOPPED_SAVED, LEASE_LOST) or is_peer_failure(
        end.message, world_size=world_size
    ):
        return "peer_lost"
    if "OutOfMemoryError" in end.message or "out of memory" in end.message:
        return "out_of_memory"
    return "worker_crash"


class WorkerWatch:
    """Watches the workers of one generation on the running loop; ``on_end`` is called for each, in order."""

    def __init__(
        self,
        *,
        port: int,
        on_end: Callable[[SeenEnd], None],
    ) -> None:
        self._port = port
        self._on_end = on_end
        self._living: dict[int, tuple[int, Mapping[str, str]]] = {}
        """pidfd → (process id, its variables)."""
        self._expected = 0
        self._seen: set[int] = set()

    @property
    def are_gone(self) -> bool:
        """Whether all workers were seen, and have ended."""
        return 0 < self._expected <= len(self._seen) and not self._living

    async def find(self) -> None:
        """Look for the workers that the agent is starting now, until all are found."""
        until = time.monotonic() + _FIND_SECONDS
        while time.monotonic() < until:
            # Children of every thread of the agent: which one starts the workers is torch's business.
            children: list[int] = []
            with contextlib.suppress(OSError):
                for listed in Path("/proc/self/task").glob("*/children"):
                    children += [int(number) for number in listed.read_text().split()]
            for process in children:
                if process in self._seen:
                    continue
                # One that has ended since is no worker of this generation.
                try:
                    data = Path(f"/proc/{process}/environ").read_bytes()
                except OSError:
                    continue
                pairs = data.decode(errors="replace").split("\0")
                variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                # Until it has become the worker's program, a child shows the agent's variables.
                is_ours = variables.get("MASTER_PORT") == str(self._port)
                if not is_ours or "LOCAL_RANK" not in variables:
                    continue
                try:
                    descriptor = os.pidfd_open(process)
                except (OSError, AttributeError):
                    continue
                # A pidfd is readable at the end, before the agent collects the process, and never means
                # another one.
                self._expected = int(variables["LOCAL_WORLD_SIZE"])
                self._seen.add(process)
                self._living[descriptor] = (process, variables)
                loop = asyncio.get_running_loop()
                loop.add_reader(descriptor, self._note_end, descriptor)
            if 0 < self._expected <= len(self._seen):
                return
            await asyncio.sleep(_FIND_EVERY_SECONDS)

    def close(self) -> None:
        """Stop watching."""
        for descriptor in self._living:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
        self._living.clear()

    def _note_end(self, descriptor: int) -> None:
        _, variables = self._living.pop(descriptor)
        asyncio.get_running_loop().remove_reader(descriptor)
        # WNOWAIT leaves the process for the agent to collect; if that was quicker, the code is lost to us.
        exit_code: int | None = None
        with contextlib.suppress(ChildProcessError, AttributeError):
            end = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                is_own = end.si_code == os.CLD_EXITED
                exit_code = end.si_status if is_own else -end.si_status
        # Only now: the number must not name another process while it is asked about.
        os.close(descriptor)
        seen = SeenEnd(
            rank=int(variables.get("RANK", -1)), exit_code=exit_code, at=time.monotonic()
        )
        if exit_code != 0:
            seen = replace(
                seen, message=read_message(variables.get("TORCHELASTIC_ERROR_FILE"))
            )
        self._on_end(seen)


def read_message(error_file: str | None) -> str:
    """Read the worker's last words: its error file (written by ``@record``), else the end of its redirected
    stderr, else ""."""
    if not error_file or error_file == os.devnull:
        return ""
    # Written by @record, and then the whole truth; torch leaves it out where the script is not decorated.
    try:
        message = json.loads(Path(error_file).read_text())["message"]
        return str(message["message"] if isinstance(message, dict) else message)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    # Beside it, if torchrun was told to redirect: the last line of a traceback names the error.
    try:
        with Path(error_file).with_name("stderr.log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.strip()), "")
