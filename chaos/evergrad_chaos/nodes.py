"""Runs local nodes that can be disturbed."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from evergrad_common.contract import ExitCode
from evergrad_trainer.node.local import LocalNodes


class DisturbedNodes(LocalNodes):
    """Local nodes that can be frozen for a time, can leave and return, or can join as an additional node."""

    def __init__(self, main: Callable[[int], int], num_nodes: int) -> None:
        super().__init__(main, num_nodes)
        self.away: set[int] = set()
        """Indices of nodes that were requested to leave."""
        self.frozen: dict[int, float] = {}
        """Process id → monotonic time at which the process continues."""

    def poll(self) -> None:
        now = time.monotonic()
        for pid in [pid for pid, until in self.frozen.items() if now >= until]:
            self._thaw(pid)
        super().poll()
        # A node that was killed before it could leave is replaced like any other lost node.
        self.away = {
            index for index in self.away if (self.nodes[index].process.exitcode or 0) >= 0
        }
        if self.away.issuperset(self.ended):
            # These nodes left as requested; they are now replaced like lost nodes.
            for index in [
                index for index, code in self.ended.items() if code != ExitCode.DONE
            ]:
                del self.ended[index]
                self.away.discard(index)
                if index >= self.num_nodes:
                    del self.nodes[index]

    def signal(self, number: int) -> None:
        self.thaw_all()
        super().signal(number)

    def freeze(self, pids: list[int], *, seconds: float) -> None:
        """Stop processes for ``seconds``."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self.frozen[pid] = time.monotonic() + seconds

    def thaw_all(self) -> None:
        for pid in list(self.frozen):
            self._thaw(pid)

    def alive(self) -> dict[int, int]:
        """Return the process ids, by index, of the nodes that run and were not requested to leave."""
        return {
            node.index: node.process.pid
            for node in self.nodes.values()
            if node.process.exitcode is None
            and node.process.pid is not None
            and node.index not in self.away
        }

    def workers(self, index: int) -> list[int]:
        """Return the process ids of a node's workers.

        These are its child processes, except its own helpers, which are in the node's process group.
        """
        pid = self.nodes[index].process.pid or 0
        with contextlib.suppress(OSError):
            children = map(
                int, Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
            )
            return sorted(
                child for child in children if os.getpgid(child) != os.getpgid(pid)
            )
        return []

    def _thaw(self, pid: int) -> None:
        del self.frozen[pid]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
