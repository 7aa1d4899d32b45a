"""The local launcher: W worker processes on this machine, forked warm, one exit code for all of them."""

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess

from evergrad_coordinator.contract import ExitCode
from evergrad_trainer.worker.processes import die_with_parent, run_and_exit

_log = logging.getLogger(__name__)
_GRACE_SECONDS = 10.0
"""How long the others may take to leave after one worker failed: they notice the closed connection themselves."""


@dataclass
class _Group:
    """The workers of one launch and what has been asked of them."""

    workers: list[BaseProcess] = field(default_factory=list)
    ended: dict[int, int] = field(default_factory=dict)
    """Exit code by rank, in the order of their ends."""
    failed_at: float | None = None

    def send(self, number: int) -> None:
        """Pass a signal on to every worker that still runs."""
        for worker in self.workers:
            if worker.is_alive() and worker.pid is not None:
                os.kill(worker.pid, number)


def launch_workers(target: Callable[[], int], *, num_workers: int, use_fork: bool) -> int:
    """Run ``target`` in ``num_workers`` processes with torchrun's variables set; returns the exit code of the whole.

    SIGTERM and SIGINT are passed on. When one worker fails the others are given a moment and then killed. Workers die with
    this process. ``use_fork`` starts them warm; it must be off once this process has touched an accelerator.
    """
    context = multiprocessing.get_context("fork") if use_fork else multiprocessing.get_context("spawn")
    port = _free_port()
    group = _Group()
    previous = {
        number: signal.signal(number, lambda number, _: group.send(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        for rank in range(num_workers):
            arguments = (target, _variables(rank, num_workers, port), os.getpid())
            worker: BaseProcess = context.Process(
                target=_worker_main, args=arguments, name=f"evergrad-rank-{rank}"
            )
            worker.start()
            group.workers.append(worker)
        _wait(group)
    finally:
        group.send(signal.SIGKILL)
        for worker in group.workers:
            worker.join()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return combine_exit_codes(group.ended)


def combine_exit_codes(ended: Mapping[int, int]) -> int:
    """One exit code for a group: wrong input first, then failures (also by signal), then the weaker of the stops."""
    codes = set(ended.values())
    for code in (ExitCode.USER_ERROR, ExitCode.INTERNAL):
        if code in codes:
            return int(code)
    if any(code not in (ExitCode.DONE, ExitCode.STOPPED_SAVED, ExitCode.STOPPED_UNSAVED) for code in codes):
        return int(ExitCode.INTERNAL)
    for code in (ExitCode.STOPPED_UNSAVED, ExitCode.STOPPED_SAVED):
        if code in codes:
            return int(code)
    return int(ExitCode.DONE)


def _wait(group: _Group) -> None:
    while len(group.ended) < len(group.workers):
        alive = [worker.sentinel for rank, worker in enumerate(group.workers) if rank not in group.ended]
        multiprocessing.connection.wait(alive, timeout=0.5)
        for rank, worker in enumerate(group.workers):
            if rank not in group.ended and worker.exitcode is not None:
                group.ended[rank] = worker.exitcode
                _note_end(group, rank, worker.exitcode)
        if group.failed_at is not None and time.monotonic() - group.failed_at > _GRACE_SECONDS:
            group.send(signal.SIGKILL)


def _note_end(group: _Group, rank: int, code: int) -> None:
    fine = (ExitCode.DONE, ExitCode.STOPPED_SAVED, ExitCode.STOPPED_UNSAVED)
    if code in fine or group.failed_at is not None:
        return
    group.failed_at = time.monotonic()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    print(f"evergrad: rank {rank} {how}; the others leave too", file=sys.stderr, flush=True)


def _worker_main(target: Callable[[], int], variables: dict[str, str], parent: int) -> None:
    die_with_parent(parent)
    # Out of the terminal's foreground group: Ctrl-C reaches the launcher alone, which passes it on once.
    os.setpgid(0, 0)
    os.environ.update(variables)
    run_and_exit(target)


def _variables(rank: int, num_workers: int, port: int) -> dict[str, str]:
    """torchrun's variables for one worker of this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
