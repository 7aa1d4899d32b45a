"""Disturbances for a run on this machine: a plan that follows from its seed, and the hand that carries it out
and says so."""

import contextlib
import http.client
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from evergrad_coordinator.contract import ExitCode
from evergrad_trainer.node.local import LocalCoordinator, LocalNodes, run_local
from evergrad_trainer.run_directory import RunDirectory

Kind = Literal[
    "kill_node",
    "kill_worker",
    "freeze_node",
    "freeze_supervisor",
    "freeze_worker",
    "leave",
    "join",
    "kill_coordinator",
    "lose_all",
    "starve",
    "kill_source",
]
_WEIGHTS: dict[Kind, int] = {
    "kill_node": 22,
    "kill_worker": 22,
    "freeze_node": 10,
    "freeze_supervisor": 8,
    "freeze_worker": 10,
    "leave": 9,
    "join": 8,
    "kill_coordinator": 9,
    "lose_all": 2,
}
_ONLY: dict[str, Kind] = {"feeding": "starve", "coordinator": "kill_coordinator"}
"""Kinds of chaos that consist of one disturbance: sources that die while they feed; coordinators that die."""
KIND_VARIABLE = "EVERGRAD_CHAOS_KIND"
"""``feeding`` (with two nodes) or ``coordinator``, for tests; without it events of all kinds are drawn."""
_FREEZES = frozenset({"freeze_node", "freeze_supervisor", "freeze_worker"})
_PAIRS = 0.25
"""This part of all events has a second disturbance, which often meets the recovery from the first."""
_STATUS_SECONDS = 0.1
_PATIENCE_SECONDS = 90.0
"""A run that has not recovered by then hangs; it is not disturbed any more, so that one can look at it."""


@dataclass(frozen=True)
class Disturbance:
    """One thing that happens. ``pick``: which of those it can happen to, from 0 to 1, rather a late one.

    ``seconds``: how long it is frozen. ``delay_seconds``: after the first disturbance of its event.
    """

    kind: Kind
    pick: float
    seconds: float = 0.0
    delay_seconds: float = 0.0


@dataclass(frozen=True)
class Event:
    """After ``pause_seconds`` of undisturbed training.

    ``awaits_all``: the next one waits until all nodes train again.
    """

    pause_seconds: float
    disturbances: tuple[Disturbance, ...]
    awaits_all: bool


def plan_events(seed: int, kind: str = "") -> Iterator[Event]:
    """The endless sequence of that seed; ``kind``: see ``KIND_VARIABLE``."""
    source = random.Random(seed)
    while kind:
        one = Disturbance(_ONLY[kind], source.random(), round(source.uniform(0.0, 0.8), 3))
        yield Event(source.uniform(0.0, 0.6), (one,), awaits_all=True)
    while True:
        first = _draw(source, delay_seconds=0.0)
        disturbances = [first]
        if first.kind != "lose_all" and source.random() < _PAIRS:
            delay = 0.0 if source.random() < 0.4 else source.uniform(0.0, 1.6)
            second = _draw(source, delay_seconds=delay)
            disturbances += [second] if second.kind != "lose_all" else []
        yield Event(
            source.uniform(0.0, 0.6), tuple(disturbances), awaits_all=source.random() < 0.5
        )


def _draw(source: random.Random, *, delay_seconds: float) -> Disturbance:
    kind = source.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
    # Below three seconds nobody is missed; above, the node is lost and comes back.
    length = source.uniform(1.0, 2.5) if source.random() < 0.7 else source.uniform(3.2, 6.0)
    # Some live long, as most do in a cluster: what they hold must not grow.
    pick = source.random() ** 0.6
    return Disturbance(
        kind, pick, round(length, 3) if kind in _FREEZES else 0.0, round(delay_seconds, 3)
    )


def choose_victim(pick: float, alive: Mapping[int, int], whole: Set[int]) -> int | None:
    """Index of a node that may be disturbed: without it somebody still holds the newest state. None if there
    is none.

    ``alive``: process id by index; ``whole``: the process ids of those that hold the state.
    """
    can_go = sorted(index for index, pid in alive.items() if whole - {pid})
    return can_go[min(int(pick * len(can_go)), len(can_go) - 1)] if can_go else None


class DisturbedNodes(LocalNodes):
    """Nodes that may be frozen and thaw by themselves, leave and come back, or come as one more."""

    def __init__(self, main: Callable[[int], int], num_nodes: int) -> None:
        super().__init__(main, num_nodes)
        self.away: set[int] = set()
        """Were asked to leave and will be back."""
        self.frozen: dict[int, float] = {}
        """Process id → when it thaws."""

    def poll(self) -> None:
        now = time.monotonic()
        for pid in [pid for pid, until in self.frozen.items() if now >= until]:
            self._thaw(pid)
        super().poll()
        # One that was killed before it could leave is replaced like any other that is lost.
        self.away = {
            index for index in self.away if (self.nodes[index].process.exitcode or 0) >= 0
        }
        if self.away.issuperset(self.ended):
            # Left as they were asked to: they will be replaced like lost ones.
            for index in [index for index, code in self.ended.items() if code != ExitCode.DONE]:
                del self.ended[index]
                self.away.discard(index)
                if index >= self.num_nodes:
                    del self.nodes[index]

    def signal(self, number: int) -> None:
        self.thaw_all()
        super().signal(number)

    def freeze(self, pids: list[int], *, seconds: float) -> None:
        """Stop processes for so long."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self.frozen[pid] = time.monotonic() + seconds

    def thaw_all(self) -> None:
        for pid in list(self.frozen):
            self._thaw(pid)

    def alive(self) -> dict[int, int]:
        """Process id by index of the nodes that run and are not on their way out."""
        return {
            node.index: node.process.pid
            for node in self.nodes.values()
            if node.process.exitcode is None
            and node.process.pid is not None
            and node.index not in self.away
        }

    def workers(self, index: int) -> list[int]:
        """Process ids of a node's workers: its children but for its own helpers, which are in its process
        group."""
        pid = self.nodes[index].process.pid or 0
        with contextlib.suppress(OSError):
            children = map(
                int, Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
            )
            return sorted(child for child in children if os.getpgid(child) != os.getpgid(pid))
        return []

    def _thaw(self, pid: int) -> None:
        del self.frozen[pid]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@dataclass
class Tally:
    """What has happened so far. Sums go over all processes the coordinator has had."""

    num_events: int = 0
    generation: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    lost_seconds: dict[str, float] = field(default_factory=dict)
    lost_before: dict[str, float] = field(default_factory=dict)
    """Of the coordinator's processes that are gone."""
    longest_seconds: float = 0.0

    def note_status(self, status: dict[str, Any]) -> None:
        """Take over what the living coordinator says."""
        self.generation = max(self.generation, int(status["generation"]))
        self.lost_seconds = dict(status["lostSeconds"])

    def end_coordinator(self) -> None:
        """The next one counts from zero."""
        self.lost_before, self.lost_seconds = self.total_lost(), {}

    def total_lost(self) -> dict[str, float]:
        """Seconds by cause."""
        causes = sorted({*self.lost_before, *self.lost_seconds})
        return {
            cause: self.lost_before.get(cause, 0.0) + self.lost_seconds.get(cause, 0.0)
            for cause in causes
        }


def describe_tally(tally: Tally, *, repeated: int) -> str:
    """The summary's line."""
    kinds = ", ".join(
        f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(tally.kinds.items())
    )
    lost = ", ".join(
        f"{cause.replace('_', ' ')} {seconds:.1f}"
        for cause, seconds in tally.total_lost().items()
    )
    return (
        f"chaos: {tally.num_events} events ({kinds or 'none'}), generation {tally.generation}, "
        f"steps repeated: {repeated}, "
        f"longest recovery {tally.longest_seconds:.1f} s, seconds lost by cause: {lost or 'none'}"
    )


def count_repeated(metrics: Path) -> int:
    """Rows of a run's metrics whose step had been finished before."""
    repeated, newest = 0, -1
    with contextlib.suppress(FileNotFoundError), metrics.open(encoding="utf-8") as lines:
        for line in lines:
            step = int(json.loads(line)["step"])
            repeated += step <= newest
            newest = max(newest, step)
    return repeated


class Chaos:
    """Carries the plan out, one event after the other has been recovered from.

    ``tick`` is called some times a second.
    """

    def __init__(self, seed: int, coordinator: LocalCoordinator, nodes: DisturbedNodes) -> None:
        self.tally = Tally()
        self._events = plan_events(seed, os.environ.get(KIND_VARIABLE, ""))
        self._coordinator = coordinator
        self._nodes = nodes
        self._event = Event(1.0, (), awaits_all=True)
        self._todo: list[tuple[float, Disturbance]] = []
        self._whole: set[int] = set()
        """Process ids of nodes that hold the newest state, as far as is known."""
        self._began = time.monotonic()
        self._ripe_at: float | None = None
        self._steps: set[int] = set()
        self._needs_generation = 0
        self._looked_at = 0.0
        self._status: dict[str, Any] | None = None
        self._has_given_up = False
        self._starving: Disturbance | None = None
        """Kills the only node that holds the state, once it feeds the other."""
        self._source = 0
        """The process id of that node."""

    def tick(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        if self._has_given_up:
            return
        if self._todo:
            for item in [item for item in self._todo if item[0] <= now]:
                self._todo.remove(item)
                self._strike(item[1])
            return
        if self._starving is not None:
            self._await_feeding(self._starving, now)
        elif self._ripe_at is not None:
            if now >= self._ripe_at:
                self._begin_next(now)
        elif now - self._looked_at >= _STATUS_SECONDS:
            self._looked_at = now
            self._watch(now)

    # ---- recovery ------------------------------------------------------------------------------------------

    def _watch(self, now: float) -> None:
        status = self._look()
        if status is not None and not self._nodes.frozen and self._has_recovered(status):
            seconds = now - self._began
            if self.tally.num_events:
                self.tally.longest_seconds = max(self.tally.longest_seconds, seconds)
                _say(
                    f"event {self.tally.num_events}: the run goes on, {seconds:.1f} s later: "
                    f"generation {status['generation']}, {status['worldSize']} workers, step {status['step']}"
                )
            self._ripe_at = now + self._event.pause_seconds
        elif now - self._began > _PATIENCE_SECONDS:
            self._has_given_up = True
            _say(
                f"event {self.tally.num_events}: no recovery within {_PATIENCE_SECONDS:g} s; "
                f"leaves the run alone. {status}"
            )

    def _look(self) -> dict[str, Any] | None:
        status = (
            fetch_status(self._coordinator.status_port, self._coordinator.token)
            if self._coordinator.is_running
            else None
        )
        if status is not None:
            self.tally.note_status(status)
        return status

    def _has_recovered(self, status: dict[str, Any]) -> bool:
        """Steps are reported, and not only such as were done before the disturbance: a newer generation's, or
        the third."""
        running = self._running(status)
        if (
            status["phase"] != "Running"
            or status["generation"] < self._needs_generation
            or status["step"] is None
        ):
            return False
        self._steps.add(int(status["step"]))
        alive = self._nodes.alive()
        if self._event.awaits_all:
            is_whole = len(running) == min(len(alive), int(status["nodes"]["max"])) and len(
                alive
            ) == len(self._nodes.nodes)
        else:
            is_whole = len(running) >= min(2, self._nodes.num_nodes)
        if not is_whole or len(self._steps) < (2 if self._needs_generation else 3):
            return False
        self._whole = set(running)
        return True

    def _running(self, status: dict[str, Any]) -> list[int]:
        alive = self._nodes.alive()
        members = [
            int(one["node"]) for one in status["nodes"]["members"] if one["state"] == "running"
        ]
        return [alive[index] for index in members if index in alive]

    # ---- disturbance ---------------------------------------------------------------------------------------

    def _begin_next(self, now: float) -> None:
        self._event = next(self._events)
        self._began, self._ripe_at = now, None
        self._steps = set()
        self._needs_generation = 0
        self.tally.num_events += 1
        self._look()
        self._todo = [(now + one.delay_seconds, one) for one in self._event.disturbances]

    def _strike(self, one: Disturbance) -> None:
        self.tally.kinds[one.kind] = self.tally.kinds.get(one.kind, 0) + 1
        match one.kind:
            case "kill_coordinator":
                self._kill_coordinator()
            case "join":
                self._join()
            case "lose_all":
                self._lose_all()
            case "starve":
                self._starve(one)
            case "kill_source":
                self._tell(f"kills the only node that holds the state (pid {self._source})")
                self._kill_all({self._source})
            case _:
                self._hit(one)

    def _kill_coordinator(self) -> None:
        process = self._coordinator.process
        if process is None or process.poll() is not None:
            return
        self._tell(f"kills the coordinator (pid {process.pid})")
        self._look()
        self.tally.end_coordinator()
        process.kill()

    def _join(self) -> None:
        """One more node; if that is here already, it leaves for good."""
        extra = self._nodes.num_nodes
        if extra not in self._nodes.nodes:
            self._tell(f"starts one more node, {extra}")
            self._nodes.start_node(extra)
        elif extra in self._nodes.alive():
            self._ask_to_leave(extra, self._nodes.alive()[extra], "for good")

    def _lose_all(self) -> None:
        alive = self._nodes.alive()
        self._tell(f"kills all nodes at once (pids {', '.join(map(str, alive.values()))})")
        self._kill_all(set(alive.values()))

    def _kill_all(self, pids: set[int]) -> None:
        """Kill all that hold the state."""
        self._expect_generation(pids)
        self._nodes.thaw_all()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._whole = set()

    def _starve(self, one: Disturbance) -> None:
        """Kill one of two nodes, and the other while it feeds the successor of the first."""
        alive = self._nodes.alive()
        index = choose_victim(one.pick, alive, self._whole)
        if index is None or len(alive) != 2:
            self._tell(
                "would starve a newcomer, but there are not two nodes that hold the state"
            )
            return
        self._source = next(pid for other, pid in alive.items() if other != index)
        self._tell(f"kills node {index} (pid {alive[index]})")
        self._expect_generation({alive[index]})
        self._whole.discard(alive[index])
        os.kill(alive[index], signal.SIGKILL)
        self._starving = one

    def _await_feeding(self, one: Disturbance, now: float) -> None:
        """Until a group of two forms anew: its members bring each other to one state before they say that
        they are up."""
        status = self._look()
        if (
            status is not None
            and status["generation"] >= self._needs_generation
            and status["worldSize"] == 2
        ):
            self._starving = None
            self._todo.append((now + one.seconds, Disturbance("kill_source", one.pick)))
        elif now - self._began > _PATIENCE_SECONDS:
            self._starving = None

    def _hit(self, one: Disturbance) -> None:
        alive = {
            index: pid
            for index, pid in self._nodes.alive().items()
            if pid not in self._nodes.frozen
        }
        index = choose_victim(one.pick, alive, self._whole)
        if index is None:
            self._tell(
                f"would {one.kind.replace('_', ' ')}, but spares the last that holds the state"
            )
            return
        pid, workers = alive[index], self._nodes.workers(index)
        if one.kind == "leave":
            self._ask_to_leave(index, pid, "and to come back")
        elif one.kind == "kill_node":
            self._tell(f"kills node {index} (pid {pid})")
            self._expect_generation({pid})
            os.kill(pid, signal.SIGKILL)
        elif one.kind == "freeze_supervisor" or (one.kind == "freeze_node" and not workers):
            self._tell(
                f"freezes the supervisor of node {index} (pid {pid}) for {one.seconds:.1f} s"
            )
            self._nodes.freeze([pid], seconds=one.seconds)
        elif one.kind == "freeze_node":
            self._tell(
                f"freezes node {index} (pids {pid}, {', '.join(map(str, workers))}) for {one.seconds:.1f} s"
            )
            self._nodes.freeze([pid, *workers], seconds=one.seconds)
        elif workers:
            self._hit_worker(one, index, workers[int(one.pick * 1009) % len(workers)])
        self._whole.discard(pid)

    def _hit_worker(self, one: Disturbance, index: int, worker: int) -> None:
        if one.kind == "freeze_worker":
            self._tell(
                f"freezes a worker of node {index} (pid {worker}) for {one.seconds:.1f} s"
            )
            self._nodes.freeze([worker], seconds=one.seconds)
            return
        self._tell(f"kills a worker of node {index} (pid {worker})")
        self._expect_generation({self._nodes.alive()[index]})
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)

    def _ask_to_leave(self, index: int, pid: int, purpose: str) -> None:
        self._tell(f"asks node {index} (pid {pid}) to leave {purpose}")
        self._nodes.away.add(index)
        self._whole.discard(pid)
        os.kill(pid, signal.SIGTERM)

    def _expect_generation(self, victims: set[int]) -> None:
        """Whoever was in the group cannot be lost without a new one."""
        if victims & self._whole:
            self._needs_generation = self.tally.generation + 1

    def _tell(self, text: str) -> None:
        _say(f"event {self.tally.num_events}: {text}")


def run_disturbed(
    seed: int, coordinator: LocalCoordinator, nodes: DisturbedNodes, *, directory: Path
) -> int:
    """``run_local`` with disturbances; prints a summary at the end. Returns the run's exit code."""
    chaos = Chaos(seed, coordinator, nodes)
    try:
        return run_local(coordinator, nodes, on_tick=chaos.tick)
    finally:
        print(
            describe_tally(
                chaos.tally, repeated=count_repeated(RunDirectory(directory).metrics)
            ),
            flush=True,
        )


def fetch_status(port: int, token: str) -> dict[str, Any] | None:
    """What a coordinator on this machine says of itself; None if it does not answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.request("GET", "/status", headers={"Authorization": f"Bearer {token}"})
        status: dict[str, Any] = json.loads(connection.getresponse().read())
        return status
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def _say(text: str) -> None:
    print(f"chaos: {text}", file=sys.stdout, flush=True)
