"""Applies a plan of disturbances to a run on this machine, and reports each disturbance on stdout."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from evergrad_chaos.nodes import DisturbedNodes
from evergrad_chaos.plan import (
    KIND_VARIABLE,
    ChaosEvent,
    Disturbance,
    choose_victim,
    plan_events,
)
from evergrad_chaos.recovery import PATIENCE_SECONDS, Recovery
from evergrad_chaos.tally import ChaosTally, count_repeated, describe_tally
from evergrad_trainer.node.local import LocalCoordinator, run_local
from evergrad_trainer.run.directory import RunDirectory

_STATUS_SECONDS = 0.1


def make_nodes(main: Callable[[int], int], num_nodes: int) -> DisturbedNodes:
    """Return nodes on this machine; each node calls ``main`` with its index in a separate process."""
    return DisturbedNodes(main, num_nodes)


def run_disturbed(
    seed: int, coordinator: LocalCoordinator, nodes: DisturbedNodes, *, directory: Path
) -> int:
    """Call ``run_local`` with disturbances, print a summary at the end, and return the run's exit code."""
    chaos = Chaos(seed, coordinator, nodes)
    try:
        return run_local(coordinator, nodes, on_tick=chaos.tick)
    finally:
        repeated = count_repeated(RunDirectory(directory).metrics)
        print(describe_tally(chaos.tally, repeated=repeated), flush=True)


class Chaos:
    """Applies one event after another; each event waits until the run has recovered from the previous event.

    ``tick`` must be called several times per second.
    """

    def __init__(
        self, seed: int, coordinator: LocalCoordinator, nodes: DisturbedNodes
    ) -> None:
        self.tally = ChaosTally()
        self._events = plan_events(seed, os.environ.get(KIND_VARIABLE, ""))
        self._coordinator = coordinator
        self._nodes = nodes
        self._recovery = Recovery(coordinator, nodes, self.tally)
        self._event = ChaosEvent(1.0, (), awaits_all=True)
        self._todo: list[tuple[float, Disturbance]] = []
        self._ripe_at: float | None = None
        self._looked_at = 0.0
        self._has_given_up = False
        self._starving: Disturbance | None = None
        """The disturbance that kills the only holder of the state while it transfers the state; or None."""
        self._source = 0
        """Process id of the node that is the only holder of the state."""

    def tick(self) -> None:
        """Apply the disturbances that are due, or check whether the run has recovered."""
        now = time.monotonic()
        if self._has_given_up:
            return
        if self._todo:
            for item in [item for item in self._todo if item[0] <= now]:
                self._todo.remove(item)
                self._strike(item[1])
            return
        if self._starving is not None:
            self._await_transfer(self._starving, now)
        elif self._ripe_at is not None:
            if now >= self._ripe_at:
                self._event, self._ripe_at = next(self._events), None
                self.tally.num_events += 1
                self._recovery.begin(now)
                self._todo = [
                    (now + one.delay_seconds, one) for one in self._event.disturbances
                ]
        elif now - self._looked_at >= _STATUS_SECONDS:
            self._check_recovery(now)

    def _await_transfer(self, starving: Disturbance, now: float) -> None:
        """Kill the only holder of the state when a group of two forms again, or give up."""
        # A group of two is forming again: its members transfer the state before they report that they
        # are up.
        status = self._recovery.look()
        if (
            status is not None
            and status["generation"] >= self._recovery.needs_generation
            and status["worldSize"] == 2
        ):
            source = Disturbance("kill_source", starving.pick)
            self._todo.append((now + starving.seconds, source))
            self._starving = None
        elif now - self._recovery.began > PATIENCE_SECONDS:
            self._starving = None

    def _check_recovery(self, now: float) -> None:
        """Check whether the run has recovered. If it hangs, apply no further event."""
        self._looked_at = now
        recovery = self._recovery
        status, seconds = recovery.look(), now - recovery.began
        # A run with a frozen process may look healthy without it and be disturbed when the process
        # continues, so recovery counts only without frozen processes.
        if (
            status is not None
            and not self._nodes.frozen
            and recovery.is_complete(status, awaits_all=self._event.awaits_all)
        ):
            if self.tally.num_events:
                self.tally.longest_seconds = max(self.tally.longest_seconds, seconds)
                self._say(
                    f"the run goes on, {seconds:.1f} s later: generation {status['generation']}, "
                    f"{status['worldSize']} workers, step {status['step']}"
                )
            self._ripe_at = now + self._event.pause_seconds
        elif seconds > PATIENCE_SECONDS:
            self._has_given_up = True
            self._say(
                f"no recovery within {PATIENCE_SECONDS:g} s; leaves the run alone. {status}"
            )

    def _strike(self, one: Disturbance) -> None:
        self.tally.kinds[one.kind] = self.tally.kinds.get(one.kind, 0) + 1
        match one.kind:
            case "kill_coordinator":
                process = self._coordinator.process
                if process is not None and process.poll() is None:
                    self._say(f"kills the coordinator (pid {process.pid})")
                    # Read the status first, because the next coordinator counts lost seconds from zero.
                    self._recovery.look()
                    self.tally.end_coordinator()
                    process.kill()
            case "join":
                # Start one more node. If it already runs, request it to leave permanently.
                extra = self._nodes.num_nodes
                if extra not in self._nodes.nodes:
                    self._say(f"starts one more node, {extra}")
                    self._nodes.start_node(extra)
                elif extra in self._nodes.alive():
                    self._ask_to_leave(extra, self._nodes.alive()[extra], "for good")
            case "lose_all":
                pids = self._nodes.alive().values()
                self._say(f"kills all nodes at once (pids {', '.join(map(str, pids))})")
                self._kill_all(set(pids))
            case "starve":
                # Kill one of two nodes, and then the other while it transfers its state to the replacement.
                alive = self._nodes.alive()
                index = choose_victim(one.pick, alive, self._recovery.whole)
                if index is None or len(alive) != 2:
                    self._say("would starve a newcomer, but not two nodes hold the state")
                    return
                self._source = next(pid for other, pid in alive.items() if other != index)
                self._say(f"kills node {index} (pid {alive[index]})")
                self._recovery.expect_generation({alive[index]})
                self._recovery.whole.discard(alive[index])
                os.kill(alive[index], signal.SIGKILL)
                self._starving = one
            case "kill_source":
                self._say(f"kills the only node that holds the state (pid {self._source})")
                self._kill_all({self._source})
            case _:
                self._hit(one)

    def _kill_all(self, pids: set[int]) -> None:
        """Kill these processes, which are all holders of the state."""
        self._recovery.expect_generation(pids)
        self._nodes.thaw_all()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._recovery.whole = set()

    def _hit(self, one: Disturbance) -> None:
        """Disturb one node or one of its workers, if another node still holds the state."""
        alive = {
            index: pid
            for index, pid in self._nodes.alive().items()
            if pid not in self._nodes.frozen
        }
        index = choose_victim(one.pick, alive, self._recovery.whole)
        if index is None:
            name = one.kind.replace("_", " ")
            self._say(f"would {name}, but spares the last that holds the state")
            return
        pid, workers = alive[index], self._nodes.workers(index)
        worker = workers[int(one.pick * 1009) % len(workers)] if workers else None
        length = f"for {one.seconds:.1f} s"
        if one.kind == "leave":
            self._ask_to_leave(index, pid, "and to come back")
        elif one.kind == "kill_node":
            self._say(f"kills node {index} (pid {pid})")
            self._recovery.expect_generation({pid})
            os.kill(pid, signal.SIGKILL)
        elif one.kind == "freeze_supervisor" or (one.kind == "freeze_node" and not workers):
            self._say(f"freezes the supervisor of node {index} (pid {pid}) {length}")
            self._nodes.freeze([pid], seconds=one.seconds)
        elif one.kind == "freeze_node":
            pids = ", ".join(map(str, [pid, *workers]))
            self._say(f"freezes node {index} (pids {pids}) {length}")
            self._nodes.freeze([pid, *workers], seconds=one.seconds)
        elif worker is not None and one.kind == "freeze_worker":
            self._say(f"freezes a worker of node {index} (pid {worker}) {length}")
            self._nodes.freeze([worker], seconds=one.seconds)
        elif worker is not None:
            self._say(f"kills a worker of node {index} (pid {worker})")
            self._recovery.expect_generation({pid})
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        self._recovery.whole.discard(pid)

    def _ask_to_leave(self, index: int, pid: int, purpose: str) -> None:
        self._say(f"asks node {index} (pid {pid}) to leave {purpose}")
        self._nodes.away.add(index)
        self._recovery.whole.discard(pid)
        os.kill(pid, signal.SIGTERM)

    def _say(self, text: str) -> None:
        print(f"chaos: event {self.tally.num_events}: {text}", file=sys.stdout, flush=True)
