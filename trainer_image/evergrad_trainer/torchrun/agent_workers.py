"""Watches the workers of a torchrun agent from outside, because torch gives a rendezvous handler no
information about them.

Only on Linux: ``/proc`` lists the agent's children with their environment variables, and a pidfd signals the
exit of a child before the agent collects it. On other systems a failure is reported without its cause.
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
    """Print a message to stderr, in the output of the agent."""
    print(f"evergrad: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class SeenEnd:
    """How one worker of an agent ended.

    ``exit_code`` is negative for a signal, and None if the agent collected the process first.
    """

    rank: int
    exit_code: int | None
    at: float
    """CLOCK_MONOTONIC seconds."""
    message: str = ""


def build_broken(
    generation: int, *, end: SeenEnd | None, world_size: int, step: int, now: float
) -> Broken:
    """Build the report that ``generation`` cannot continue, with the known facts about the first worker that
    ended."""
    # Without an observed end, on platforms other than Linux, the cause is unknown.
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
    """Return the cause according to this node. ``world_size``: the size of the worker's group."""
    if end.exit_code == ExitCode.USER_ERROR:
        return "user_error"
    # A worker that stopped on request, or whose lease was lost, is a consequence of another failure.
    if end.exit_code in (ExitCode.STOPPED_SAVED, LEASE_LOST) or is_peer_failure(
        end.message, world_size=world_size
    ):
        return "peer_lost"
    if "OutOfMemoryError" in end.message or "out of memory" in end.message:
        return "out_of_memory"
    return "worker_crash"


class WorkerWatch:
    """Watches the workers of one generation on the running event loop; calls ``on_end`` for each exit, in
    order."""

    def __init__(
        self,
        *,
        port: int,
        on_end: Callable[[SeenEnd], None],
    ) -> None:
        self._port = port
        self._on_end = on_end
        self._living: dict[int, tuple[int, Mapping[str, str]]] = {}
        """Maps each pidfd to the process id and the environment variables of the worker."""
        self._expected = 0
        self._seen: set[int] = set()

    @property
    def are_gone(self) -> bool:
        """Whether all workers were found and have exited."""
        return 0 < self._expected <= len(self._seen) and not self._living

    async def find(self) -> None:
        """Search for the workers that the agent starts, until all are found or the time limit is reached."""
        until = time.monotonic() + _FIND_SECONDS
        while time.monotonic() < until:
            # Look at the children of every thread, because any of torch's threads may start the workers.
            children: list[int] = []
            with contextlib.suppress(OSError):
                for listed in Path("/proc/self/task").glob("*/children"):
                    children += [int(number) for number in listed.read_text().split()]
            for process in children:
                if process in self._seen:
                    continue
                # Ignore a process that has exited in the meantime.
                try:
                    data = Path(f"/proc/{process}/environ").read_bytes()
                except OSError:
                    continue
                pairs = data.decode(errors="replace").split("\0")
                variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                # Before its exec, a child has the agent's variables.
                is_ours = variables.get("MASTER_PORT") == str(self._port)
                if not is_ours or "LOCAL_RANK" not in variables:
                    continue
                try:
                    descriptor = os.pidfd_open(process)
                except (OSError, AttributeError):
                    continue
                # A pidfd becomes readable at the exit, before the agent collects the process, and never
                # refers to another process.
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
        # WNOWAIT leaves the process for the agent to collect. If the agent was first, the code is unknown.
        exit_code: int | None = None
        with contextlib.suppress(ChildProcessError, AttributeError):
            end = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                is_own = end.si_code == os.CLD_EXITED
                exit_code = end.si_status if is_own else -end.si_status
        # Close the pidfd only now, so that the number does not refer to another file during the query.
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
    """Read the worker's error message from its error file (written by ``@record``), or else the last line of
    its redirected stderr, or else return an empty text."""
    if not error_file or error_file == os.devnull:
        return ""
    # @record writes the complete error; without the decorator there is no error file.
    try:
        message = json.loads(Path(error_file).read_text())["message"]
        return str(message["message"] if isinstance(message, dict) else message)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    # If torchrun redirects output, stderr.log is next to it, and the last line of a traceback is the error.
    try:
        with Path(error_file).with_name("stderr.log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.strip()), "")
