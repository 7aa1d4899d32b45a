"""The groups of the recovery benchmarks: nodes whose processes are killed one by one, and the steps that they
write.

A group of Evergrad is a coordinator and ``evergrad node`` processes, forked from this warm process like those
of ``evergrad run --nodes``. A stock group is a store and torchrun agents. All processes die with this
process.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from common import manifest, write_documents

from evergrad_trainer.worker.processes import die_with_parent

WAIT_SECONDS = 240.0
"""Time limit for each wait, to detect a hang."""
SAMPLES, LENGTH = 6, 64
"""A step has six slots of one sample, so that groups of one, two and three nodes share it evenly."""
Step = dict[str, Any]
"""A finished step: step, generation, world_size, time (Unix seconds at its end), and more."""


class BenchmarkError(Exception):
    """A group did not do what the benchmark waits for."""


def training_manifest(
    *, num_nodes: int, is_tiny: bool, compile_mode: str = "off", samples: int = SAMPLES
) -> dict[str, Any]:
    """Return the 10M model in fp32 (or a tiny one for tests), with one slot per sample and one thread per
    worker."""
    document = manifest("bench", shape=(samples, LENGTH))
    training = document["spec"]["training"]
    training["batching"]["microBatchSize"] = 1
    training["runtime"] |= {"threads": 1, "compile": compile_mode}
    training["checkpoint"] = {"every": {"steps": 100_000}}
    if is_tiny:
        training["model"]["config"] |= {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
    document["spec"]["nodes"] = {"min": 1, "max": num_nodes}
    return document


class Steps:
    """The steps of a JSONL file, read while they are written."""

    def __init__(self, path: Path) -> None:
        self.rows: list[Step] = []
        self._path = path
        self._offset = 0

    def read(self) -> None:
        """Read the rows that were written since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for row in map(json.loads, whole.splitlines()):
            # A new rank 0 repeats the row of the last step of a dead rank 0. The step was trained only once.
            if row not in self.rows[-3:]:
                self.rows.append(row)

    def wait(
        self,
        found: Callable[[Step], bool],
        what: str,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> Step:
        """Return the first step for which ``found`` is true. Raises BenchmarkError if it does not come."""
        deadline = time.monotonic() + WAIT_SECONDS
        seen = 0
        while True:
            self.read()
            for row in self.rows[seen:]:
                if found(row):
                    return row
            seen = len(self.rows)
            check()
            if time.monotonic() > deadline:
                raise BenchmarkError(
                    f"{what} did not come within {WAIT_SECONDS:g} s; last step: {self.rows[-1:]}"
                )
            time.sleep(0.01)

    def wait_further(self, row: Step, count: int) -> list[float]:
        """Return the seconds of each of the ``count`` steps that follow ``row`` in its group."""
        generation, last = row["generation"], row["step"] + count
        self.wait(
            lambda one: one["generation"] == generation and one["step"] >= last,
            f"step {last} of the same group",
        )
        return step_seconds(
            [
                one
                for one in self.rows
                if one["generation"] == generation and row["step"] <= one["step"] <= last
            ]
        )


def step_seconds(rows: list[Step]) -> list[float]:
    """Return the seconds from the end of each step to the end of the next step, within a group."""
    pairs = itertools.pairwise(rows)
    return [
        b["time"] - a["time"]
        for a, b in pairs
        if a["generation"] == b["generation"] and b["step"] == a["step"] + 1
    ]


class Group(Protocol):
    """Nodes that train together."""

    steps: Steps

    def start_node(self, index: int) -> None: ...

    def kill(self, index: int) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def running(group: Group, *, num_nodes: int) -> Iterator[Step]:
    """Start all nodes, and yield the first step that all of them have trained together.

    The nodes are ended in every case.
    """
    try:
        for index in range(num_nodes):
            group.start_node(index)
        yield group.steps.wait(
            lambda row: row["world_size"] == num_nodes,
            f"the first step of {num_nodes} nodes",
        )
    finally:
        group.close()


@dataclass(frozen=True)
class NodesSettings:
    """An elastic run in ``folder``.

    ``extra``: additional arguments of its coordinator. ``on_start``: called in each node's process.
    """

    folder: Path
    manifest: dict[str, Any]
    num_nodes: int
    recovery: str = "in-process"
    steps: Path | None = None
    extra: tuple[str, ...] = ()
    on_start: Callable[[], None] = lambda: None


class ElasticNodes:
    """A coordinator and its nodes. A node that is restarted is forked from this warm process."""

    def __init__(self, settings: NodesSettings) -> None:
        """Start the coordinator."""
        folder = self._folder = settings.folder
        folder.mkdir(parents=True, exist_ok=True)
        self._settings = settings
        self.directory = folder / "run"
        self.steps = Steps(settings.steps or self.directory / "metrics.jsonl")
        self.nodes: dict[int, BaseProcess] = {}
        if "training" in settings.manifest["spec"]:
            write_documents(folder / "documents.jsonl")
        (folder / "run.yaml").write_text(json.dumps(settings.manifest), encoding="utf-8")
        self.coordinator = self._start_coordinator()
        self.port = json.loads((folder / "address.json").read_text(encoding="utf-8"))[
            "port"
        ]

    def _start_coordinator(self) -> subprocess.Popen[bytes]:
        settings, folder = self._settings, self._folder
        command = [
            sys.executable, "-m", "evergrad_coordinator", "--run", "bench", "--host", "127.0.0.1",
            "--recovery", settings.recovery, "--min", "1",
            "--max", str(settings.num_nodes), "--expect", str(settings.num_nodes),
            "--state", str(folder / "generation"), "--address-file", str(folder / "address.json"),
            "--token-file", str(folder / "token"), *settings.extra,
        ]  # fmt: skip
        process = start_process(command, output=folder / "coordinator.log")
        deadline = time.monotonic() + 30
        while not (folder / "address.json").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                end_process(process)
                raise BenchmarkError(
                    f"the coordinator did not start: {(folder / 'coordinator.log').read_text()[-2000:]}"
                )
            time.sleep(0.01)
        return process

    def start_node(self, index: int) -> None:
        arguments = [
            "node",
            "run.yaml",
            "--join",
            f"127.0.0.1:{self.port}",
            "--node",
            str(index),
            "--address",
            "127.0.0.1",
        ]
        arguments += ["--run-directory", "run", "--workers", "1", "--token-file", "token"]
        process = multiprocessing.get_context("fork").Process(
            target=_be_node,
            args=(arguments, self._folder, os.getpid(), index, self._settings.on_start),
            name=f"node-{index}",
        )
        process.start()
        self.nodes[index] = process

    def pid(self, index: int) -> int:
        """Return the process id of a node's supervisor."""
        pid = self.nodes[index].pid
        assert pid is not None  # noqa: S101 - it has been started
        return pid

    def kill(self, index: int) -> None:
        """Kill a node, as if it is lost: its workers die with it."""
        os.kill(self.pid(index), signal.SIGKILL)

    def terminate(self, index: int) -> None:
        """Request a node to leave."""
        os.kill(self.pid(index), signal.SIGTERM)

    def wait_end(self, index: int) -> int:
        """Return a node's exit code."""
        self.nodes[index].join(WAIT_SECONDS)
        code = self.nodes[index].exitcode
        if code is None:
            raise BenchmarkError(f"node {index} does not end")
        return code

    def close(self) -> None:
        """Kill all processes, by process id."""
        for process in self.nodes.values():
            if process.exitcode is None:
                process.kill()
            process.join()
        end_process(self.coordinator)


def _be_node(
    arguments: list[str],
    folder: Path,
    parent: int,
    index: int,
    on_start: Callable[[], None],
) -> None:
    die_with_parent(parent)
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    log = os.open(
        folder / "nodes.log",
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        0o600,
    )
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **be_host(index)}
    code = 70
    try:
        from evergrad_cli.main import main

        on_start()
        code = main(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def be_host(index: int) -> dict[str, str]:
    """Return variables that make a process appear to NCCL as a process of another host.

    NCCL refuses two processes of one host on one device. They communicate through sockets of this machine,
    like hosts, and their kernels alternate on the device.
    """
    return {
        "NCCL_HOSTID": f"host-{index}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def warm_up_this_process() -> None:
    """Import what ``evergrad run --nodes`` imports before it forks nodes."""
    from transformers import AutoModelForCausalLM  # noqa: F401

    from evergrad_trainer.node.run import prepare_process

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    prepare_process()


# ---- stock torchrun ----------------------------------------------------------------------------------------

STOCK_BASE = "is_host=false,join_timeout=120,close_timeout=5,read_timeout=20"
STOCK_SETTINGS = {
    "stock_tuned": f"{STOCK_BASE},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5",
    "stock_default": STOCK_BASE,
}
"""The tuned timers are the shortest that do not split a group under load. The default settings keep
torchrun's own timers."""
_STORE = """
import signal, sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("listening", flush=True)
signal.sigwait([signal.SIGTERM])
"""


class StockNodes:
    """torchrun agents with one worker each, and a separate process for their store."""

    def __init__(
        self,
        folder: Path,
        conf: str,
        *,
        steps: Path,
        command: list[str],
    ) -> None:
        """Start the store."""
        folder.mkdir(parents=True, exist_ok=True)
        self.steps = Steps(steps)
        self._folder, self._conf, self._command = folder, conf, command
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._port = free_port()
        self._store = start_process(
            [sys.executable, "-c", _STORE, str(self._port)], output=folder / "store.log"
        )
        deadline = time.monotonic() + 60
        while "listening" not in (folder / "store.log").read_text():
            if time.monotonic() > deadline or self._store.poll() is not None:
                end_process(self._store)
                raise BenchmarkError(
                    f"the store did not start: {(folder / 'store.log').read_text()[-2000:]}"
                )
            time.sleep(0.05)

    def start_node(self, index: int) -> None:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=1:3", "--nproc-per-node=1",
            "--max-restarts=1000000",
            "--monitor-interval=0.1", f"--local-addr=127.0.0.{index + 2}", "--rdzv-id=bench",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._port}", f"--rdzv-conf={self._conf}", *self._command,
        ]  # fmt: skip
        self._agents[index] = start_process(command, output=self._folder / "agents.log")

    def kill(self, index: int) -> None:
        """Kill a node like a pod: the agent and its worker at the same time."""
        agent = self._agents[index]
        pids = [agent.pid, *descendants(agent.pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def close(self) -> None:
        """Kill all processes, by process id."""
        for index, agent in self._agents.items():
            if agent.poll() is None:
                self.kill(index)
        end_process(self._store)


# ---- processes ---------------------------------------------------------------------------------------------


def start_process(
    command: list[str], *, output: Path, variables: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command that dies with this process; its output is appended to a file."""
    parent = os.getpid()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # For torchrun: without this variable, its own store does not survive a change of the group.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # For both sides: a lost answer of the name server would occasionally cost 5 s.
        "RES_OPTIONS": "timeout:1 attempts:1",
        **(variables or {}),
    }
    with output.open("ab") as log:
        return subprocess.Popen(
            command,
            cwd=output.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 - no other thread holds a lock
        )


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Kill and reap a process and its descendants."""
    if process.poll() is None:
        for pid in descendants(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
    process.wait()


def descendants(pid: int) -> list[int]:
    """Return the process ids of all descendants of a process, its children first."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [
                int(word)
                for word in (task / "children").read_text(encoding="ascii").split()
            ]
    return found + [below for child in found for below in descendants(child)]


def free_port() -> int:
    """Return a port on which no process listens at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
