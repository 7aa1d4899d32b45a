"""Elastic runs for the tests: a coordinator and nodes of tiny models as processes that tests kill, freeze and
start one by one.

``Cluster.trace`` contains every step that a worker finishes. ``Cluster.check`` checks the invariants of
every run.
"""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import run_helpers
from patience import PATIENCE
from run_helpers import (
    DONE,
    Experiment,
    checkpoints,
    curve,
    merge,
    metric_rows,
    read_lines,
    recipe,
)

from bed.process_state import is_alive, workers_of

"""Time limit in seconds that detects a hang. No event takes nearly as long."""
STEPS = 12
Fault = dict[str, Any]


def elastic_recipe(**changes: Any) -> dict[str, Any]:
    """Return a tiny run of 12 steps of 6 slots whose bits do not depend on the world size, saved every 5
    steps."""
    base = recipe(
        batching={"globalBatchSize": 6, "microBatchSize": 1},
        horizon={"steps": STEPS},
        checkpoint={"every": {"steps": 5}},
        reproducibility={"elastic": "exact"},
    )
    return merge(base, changes)


def fault(
    action: str,
    place: str,
    *,
    node: int | None = None,
    local_rank: int | None = None,
    rank: int | None = None,
    step: int | None = None,
    slot: int | None = None,
    call: int = 1,
    to: str = "self",
    name: str = "",
    is_repeated: bool = False,
    seconds: float = PATIENCE,
) -> Fault:
    """In the workers that match, perform ``action`` at ``place`` (see elastic_processes) once, from the
    ``call``-th call on.

    ``action``: a signal, to the worker (``self``) or its ``node``; ``raise``; ``full`` (as if its volume
    were full); ``lose`` (as if a peer were lost); ``exit``; ``flip`` (a bit of a weight, only at
    ``step``); or ``hold``: block until ``Cluster.release(name)``. ``step`` and ``slot`` are the last ones
    that were started.
    """
    fields = {
        "node": node,
        "local_rank": local_rank,
        "rank": rank,
        "step": step,
        "slot": slot,
        "call": call,
        "to": to,
    }
    name = name or f"{action}-{place}-{node}-{rank}-{step}"
    return {
        **fields,
        "action": action,
        "place": place,
        "name": name,
        "is_repeated": is_repeated,
        "seconds": seconds,
    }


class WarmProcess:
    """The process that forks all other processes. They end with it."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("elastic_processes.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=PATIENCE)
        self._process.stdout.close()


@functools.cache
def warm_process() -> WarmProcess:
    """Return the warm process of this test session."""
    process = WarmProcess()
    atexit.register(process.close)
    return process


@dataclass
class Process:
    """A started process: a coordinator, a node or a command."""

    pid: int
    output: Path
    code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        if self.code is None:
            self.code = warm_process().ask(poll=self.pid)
        return self.code

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        until(lambda: self.poll() is not None, f"the end of {self.output.name}", self.said)
        assert self.code is not None
        return self.code

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def freeze(self) -> list[int]:
        """Suspend the process and its workers. Returns the suspended process IDs."""
        pids = [self.pid, *self.workers()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return pids

    def kill(self) -> None:
        """Kill the process, which may be suspended."""
        if self.poll() is None:
            self.send(signal.SIGKILL)
            self.wait()

    def said(self) -> str:
        """Return its stdout and stderr."""
        paths = [Path(f"{self.output}.{end}") for end in ("out", "err")]
        return "\n".join(
            path.read_text(errors="replace") for path in paths if path.exists()
        )

    @property
    def last_words(self) -> str:
        """Return its termination message."""
        path = Path(f"{self.output}.last-words")
        return path.read_text() if path.exists() else ""

    def workers(self) -> list[int]:
        """Return the process IDs of a node's workers, in the order of their start."""
        return sorted(workers_of(self.pid))


@dataclass
class Cluster:
    """One run's coordinator and nodes. ``nodes[index]`` is the newest process of that node."""

    experiment: Experiment
    path: Path
    min_nodes: int = 1
    expect: int = 3
    max_nodes: int = 4
    options: tuple[str, ...] = ()
    nodes: dict[int, Process] = field(default_factory=dict)
    started: list[Process] = field(default_factory=list)
    coordinator: Process | None = None
    port: int = 0

    @property
    def directory(self) -> Path:
        """The log of the run itself; several clusters share the prepared data."""
        return self.experiment.at(f"{self.path.parent.name}-{self.path.name}")

    # ---- processes -----------------------------------------------------------------------------------------

    def start_coordinator(self) -> Process:
        """Start the coordinator, or start it again at the same address."""
        address = self.path / "address.json"
        address.unlink(missing_ok=True)
        arguments = [
            "--run",
            "tiny",
            "--min",
            str(self.min_nodes),
            "--max",
            str(self.max_nodes),
            "--expect",
            str(self.expect),
        ]
        arguments += [
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--address-file",
            str(address),
        ]
        arguments += [
            "--state",
            str(self.path / "generation"),
            "--linger",
            "0.2",
            "--exit-when-empty",
            # A process that gets no core for some seconds must not count as lost; tests of silence set
            # shorter limits. An ended process is detected by its connection.
            "--silence",
            "30",
            "--lease",
            "60",
            *self.options,
        ]
        arguments += ["--token-file", str(self.path / "token")]
        self.coordinator = self._start("coordinator", "coordinator", arguments=arguments)
        until(
            lambda: address.exists() or self.coordinator.poll() is not None,
            "the coordinator",
            self.describe,
        )  # type: ignore[union-attr]
        self.port = json.loads(address.read_text())["port"]
        return self.coordinator

    def start(
        self, *, workers: int = 1, faults: Sequence[Fault] = (), **options: Any
    ) -> "Cluster":
        """Start the coordinator and ``expect`` nodes with the same faults."""
        self.start_coordinator()
        for index in range(self.expect):
            self.start_node(index, workers=workers, faults=faults, **options)
        return self

    def start_node(
        self,
        index: int,
        *,
        workers: int = 1,
        faults: Sequence[Fault] = (),
        sets: Sequence[str] = (),
        constants: Mapping[str, float] | None = None,
        resolver: Path | None = None,
        transport: str = "",
        directory: Path | None = None,
        **settings: Any,
    ) -> Process:
        """Start one node.

        ``sets``: changes to its manifest, as for ``--set``. ``constants``: new values of module constants.
        ``settings``: fields of its NodeSettings. ``resolver``: its resolv.conf. ``transport``: the value of
        EVERGRAD_TRANSPORT. ``directory``: a separate run directory, instead of the cluster's.
        """
        arguments = [
            "run",
            "tiny.yaml",
            "--run-directory",
            str(directory or self.directory),
            "--workers",
            str(workers),
        ]
        for one in sets:
            arguments += ["--set", one]
        self.nodes[index] = self._start(
            "node",
            f"node-{index}",
            arguments=arguments,
            faults=list(faults),
            settings={
                "node": str(index),
                "address": "127.0.0.1",
                "coordinator_port": self.port,
                "token": (self.path / "token").read_text().strip(),
                "grace_seconds": 20.0,
                **settings,
            },
            constants=dict(constants or {}),
            transport=transport,
            resolver=None if resolver is None else str(resolver),
        )
        return self.nodes[index]

    def _start(self, kind: str, name: str, **task: Any) -> Process:
        output = self.path / f"{len(self.started):02}-{name}"
        place = {
            "output": str(output),
            "cwd": str(self.experiment.path),
            "scratch": str(self.path),
        }
        pid = warm_process().ask(spawn={"kind": kind, **place, **task})
        process = Process(pid, output)
        self.started.append(process)
        return process

    def release(self, name: str) -> None:
        """Let a held worker continue."""
        (self.path / f"{name}.open").touch()

    def has_happened(self, name: str) -> bool:
        """Return whether a planned fault has happened."""
        return (self.path / f"{name}.happened").exists()

    def until_held(self, name: str = "held") -> None:
        self.until(lambda: self.has_happened(name), f"the fault {name}")

    def close(self) -> None:
        """Kill all processes that the test started, and wait until their workers have ended."""
        workers = [pid for process in self.started for pid in process.workers()]
        for process in reversed(self.started):
            process.kill()
        until(lambda: not any(map(is_alive, workers)), "the workers' end")

    def until_planned(self, reason: str) -> None:
        """Wait until the coordinator has planned a group for ``reason``."""
        self.until(
            lambda: any(line["reason"] == reason for line in self.log("plan")),
            f"a plan because of: {reason}",
        )

    # ---- observations --------------------------------------------------------------------------------------

    def trace(self) -> list[dict[str, Any]]:
        """Return the finished steps of all workers, in the order of their end times."""
        return sorted(read_lines(self.path / "trace.jsonl"), key=lambda row: row["ended"])

    def log(self, event: str) -> list[dict[str, Any]]:
        """Return the log lines for ``event``, from all processes of the coordinator."""
        lines = [
            line
            for path in sorted(self.path.glob("*-coordinator.err"))
            for line in read_lines(path)
        ]
        return [line for line in lines if line["event"] == event]

    def pids(self, node: int) -> set[int]:
        """Return the process IDs of a node that have finished steps."""
        return {row["pid"] for row in self.trace() if row["node"] == node}

    def steps(self, node: int) -> list[int]:
        """Return the steps that a node's first worker has finished, in order."""
        return [
            row["step"]
            for row in self.trace()
            if row["node"] == node and row["local_rank"] == 0
        ]

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        return until(condition, what, self.describe)

    def until_world(self, size: int, *, steps: int = 1) -> int:
        """Wait until a group of ``size`` ranks has finished ``steps`` steps, and return its generation."""

        def find() -> int:
            rows = [row for row in self.trace() if row["size"] == size]
            newest = rows[-1]["generation"] if rows else 0
            return (
                newest
                if len({row["step"] for row in rows if row["generation"] == newest})
                >= steps
                else 0
            )

        return int(self.until(find, f"{steps} steps of a group of {size}"))

    def until_step(self, step: int) -> None:
        """Wait until a worker has finished ``step``."""
        self.until(lambda: any(row["step"] >= step for row in self.trace()), f"step {step}")

    def is_paused(self, *, seconds: float) -> bool:
        """Return whether no worker has finished a step for ``seconds``."""
        trace = self.trace()
        return bool(trace) and time.monotonic() - trace[-1]["ended"] > seconds

    def finish(self, code: int = DONE, *, nodes: Sequence[int] | None = None) -> None:
        """Wait until these nodes (default: all) have ended, and check that each exit code is ``code``."""
        for index in self.nodes if nodes is None else nodes:
            found = self.nodes[index].wait()
            assert found == code, (
                f"node {index} ended with {found} instead of {code}\n{self.describe()}"
            )

    def describe(self) -> str:
        """Return the output of all processes and the last steps, for the message of a failed test."""
        parts = [
            f"---- {path.name}\n{path.read_text(errors='replace')[-6000:]}"
            for path in sorted(self.path.glob("[0-9]*.???"))
        ]
        rows = [
            [row[key] for key in ("generation", "size", "step", "node", "rank", "pid")]
            for row in self.trace()[-8:]
        ]
        return "\n".join(
            [*parts, f"last steps (generation, size, step, node, rank, pid): {rows}"]
        )

    # ---- invariants ----------------------------------------------------------------------------------------

    def check(
        self, reference: Path, *, is_exact: bool = True, is_state_lost: bool = False
    ) -> None:
        """Check the invariants of a complete run.

        ``is_state_lost``: at some moment no replica was alive, so steps may be repeated.
        """
        try:
            check_generations(self.trace())
            if not is_state_lost:
                check_nothing_repeated(self.trace())
            assert not [
                line for line in self.log("gone") if line["why"] == "not ready in time"
            ], "a node did not answer a plan"
            generations = [row["generation"] for row in metric_rows(self.directory)]
            assert generations == sorted(generations), "metrics: generations go back"
            run_helpers.assert_same_curve(self.directory, reference, exact=is_exact)
            assert sorted(curve(self.directory)) == list(range(1, STEPS + 1))
            check_checkpoints(self.directory)
            if is_exact:
                run_helpers.assert_same_state(self.directory, reference)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from error


def train_undisturbed(experiment: Experiment, *arguments: str) -> None:
    """Train ``tiny.yaml`` in one process, into ``undisturbed``."""
    command = [
        "run",
        "tiny.yaml",
        "--run-directory",
        str(experiment.at("undisturbed")),
        *arguments,
    ]
    output = experiment.path / "undisturbed"
    task = {
        "kind": "command",
        "output": str(output),
        "cwd": str(experiment.path),
        "arguments": command,
    }
    process = Process(warm_process().ask(spawn=task), output)
    assert process.wait() == DONE, process.said()


@dataclass
class Functions:
    """Runs functions of a test file, each in a separate process."""

    path: Path
    started: list[Process] = field(default_factory=list)

    def start(self, function: Callable[..., Any], **params: Any) -> Process:
        output = self.path / f"{len(self.started):02}-{function.__name__}"
        task = {
            "kind": "function",
            "file": function.__code__.co_filename,
            "name": function.__name__,
            "params": params,
        }
        self.started.append(
            Process(
                warm_process().ask(
                    spawn={**task, "cwd": str(self.path), "output": str(output)}
                ),
                output,
            )
        )
        return self.started[-1]

    def result(self, process: Process) -> Any:
        """Wait until the function ends, and return its result."""
        assert process.wait() == 0, process.said()
        return json.loads(Path(f"{process.output}.out").read_text())

    def close(self) -> None:
        for process in self.started:
            process.kill()


def until(
    condition: Callable[[], Any], what: str, describe: Callable[[], str] = lambda: ""
) -> Any:
    """Wait for the first true value of ``condition``, and return it.

    Raises AssertionError after :data:`PATIENCE`.
    """
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited in vain for {what}\n{describe()}")
        time.sleep(0.005)
    return value


def check_generations(trace: Sequence[Mapping[str, Any]]) -> None:
    """Check that each generation is one world and ends before a newer generation finishes its first step."""
    places: dict[tuple[int, int], tuple[int, int]] = {}
    newest = 0
    for row in trace:
        place = row["size"], row["pid"]
        assert places.setdefault((row["generation"], row["rank"]), place) == place, (
            f"two worlds in one generation: {row}"
        )
        assert row["generation"] >= newest, (
            f"a step of generation {row['generation']} after one of {newest}"
        )
        newest = row["generation"]
    for generation in {row["generation"] for row in trace}:
        members = [
            (size, pid) for (one, _), (size, pid) in places.items() if one == generation
        ]
        assert len({size for size, _ in members}) == 1, (
            f"generation {generation} has several sizes"
        )
        assert len({pid for _, pid in members}) == len(members), (
            f"generation {generation}: a process at two ranks"
        )


def check_nothing_repeated(trace: Sequence[Mapping[str, Any]]) -> None:
    """Check that no worker trains a step that a member of its group has already finished.

    The member with the newest state transfers it to the others.
    """
    finished: dict[int, int] = {}
    generations = sorted({row["generation"] for row in trace})
    for generation in generations:
        rows = [row for row in trace if row["generation"] == generation]
        members = {row["pid"] for row in rows}
        held = max((finished.get(pid, 0) for pid in members), default=0)
        first = min(row["step"] for row in rows)
        assert held == 0 or first == held + 1, (
            f"generation {generation} begins with step {first}; {held} was finished"
        )
        for row in rows:
            finished[row["pid"]] = row["step"]


def check_checkpoints(directory: Path) -> None:
    """Validate every visible checkpoint, including the checksums of its files."""
    from evergrad_trainer.checkpoint.store import open_store

    store = open_store(directory / "checkpoints")
    candidates = store.catalog.scan()
    assert len(candidates) == len(checkpoints(directory)) > 0
    for candidate in candidates:
        store.reader.validate(candidate.name, checksums=True)
