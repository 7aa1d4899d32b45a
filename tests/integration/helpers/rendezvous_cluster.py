"""A coordinator and torchrun agents on this machine, for the tests. Every process ends with its ``Cluster``.

The worker is rendezvous_worker.py, unless a test provides another one.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from patience import PATIENCE

WORKER = Path(__file__).with_name("rendezvous_worker.py")
"""Time limit in seconds that detects a hang. No event takes nearly as long."""
RUN = "rendezvous"
PYTHON = os.environ.get("EVERGRAD_TEST_PYTHON", sys.executable)
"""The interpreter of agents and workers. Another interpreter has another torch."""


@dataclass(frozen=True)
class Step:
    """One all_reduce of one rank."""

    at: float
    node: str
    process: int
    generation: int
    rank: int
    world_size: int
    total: float


class Cluster:
    """Processes in one directory. ``steps`` contains the steps that all workers have written so far."""

    def __init__(self, directory: Path, *coordinator_arguments: str) -> None:
        self.directory = directory
        self.agents: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._coordinator_arguments = coordinator_arguments
        self._ports = {"port": 0, "statusPort": 0}
        self._processes: list[subprocess.Popen[bytes]] = []
        directory.mkdir(exist_ok=True)

    # ---- coordinator ---------------------------------------------------------------------------------------

    def start_coordinator(self, *more: str) -> None:
        """Start the coordinator, or start it again at the same address."""
        address = self.directory / "address.json"
        address.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "evergrad_coordinator",
            "--run",
            RUN,
            "--recovery",
            "fresh",
            "--host",
            "127.0.0.1",
        ]
        command += [
            "--port",
            str(self._ports["port"]),
            "--status-port",
            str(self._ports["statusPort"]),
        ]
        command += [
            "--address-file",
            str(address),
            "--state",
            str(self.directory / "generation"),
            "--linger",
            "600",
        ]
        command += ["--token-file", str(self.directory / "token")]
        self._coordinator = self._start(
            [*command, *self._coordinator_arguments, *more], "coordinator"
        )
        self.until(
            lambda: address.exists() or self._coordinator_has_ended(),
            "the coordinator's address",
        )
        self._ports = json.loads(address.read_text())

    def kill_coordinator(self) -> None:
        assert self._coordinator is not None
        self._coordinator.kill()
        self._coordinator.wait(PATIENCE)

    def status(self) -> dict[str, Any]:
        headers = {
            "Authorization": f"Bearer {(self.directory / 'token').read_text().strip()}"
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._ports['statusPort']}/status", headers=headers
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return dict(json.load(answer))

    def count(self, state: str) -> int:
        """Return the number of nodes in this state."""
        return sum(node["state"] == state for node in self.status()["nodes"]["members"])

    def _coordinator_has_ended(self) -> bool:
        assert self._coordinator is None or self._coordinator.poll() is None, (
            self.directory / "coordinator.log"
        ).read_text()
        return False

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self._ports['port']}"

    # ---- agents --------------------------------------------------------------------------------------------

    def start_agent(
        self,
        node: str,
        *,
        script: Sequence[str] = (),
        max_nodes: int = 4,
        options: Sequence[str] = (),
        **variables: str,
    ) -> "subprocess.Popen[bytes]":
        """Start torchrun for one node. Its last process is ``agents[node][-1]``."""
        command = [
            PYTHON,
            "-m",
            "torch.distributed.run",
            f"--nnodes=1:{max_nodes}",
            "--nproc-per-node=1",
            "--rdzv-backend=evergrad",
        ]
        command += [
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={RUN}",
            "--max-restarts=1000000",
        ]
        command += [*options, *(script or [str(WORKER)])]
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("EVERGRAD_", "TORCHELASTIC_"))
        }
        environment |= {
            "OMP_NUM_THREADS": "1",
            "PYTHONSAFEPATH": "1",
            "EVERGRAD_NODE": node,
        }
        environment |= {"EVERGRAD_TOKEN_FILE": str(self.directory / "token")}
        environment |= {"TEST_DIRECTORY": str(self.directory), **variables}
        agent = self._start(command, f"agent-{node}", environment)
        self.agents.setdefault(node, []).append(agent)
        return agent

    def agent(self, node: str) -> "subprocess.Popen[bytes]":
        return self.agents[node][-1]

    def worker(self, node: str) -> int:
        """Return the process ID of the node's worker, from its newest step."""
        return [step.process for step in self.steps() if step.node == node][-1]

    def kill_pod(self, node: str) -> None:
        """Kill agent and worker together, as if a pod were deleted by force."""
        workers = psutil.Process(self.agent(node).pid).children()
        self.agent(node).send_signal(signal.SIGKILL)
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        self.agent(node).wait(PATIENCE)

    def freeze(self, *processes: int) -> None:
        """Suspend processes."""
        for process in processes:
            os.kill(process, signal.SIGSTOP)

    def thaw(self, *processes: int) -> None:
        for process in processes:
            os.kill(process, signal.SIGCONT)

    def wait_exit(self, node: str) -> int:
        return self.agent(node).wait(PATIENCE)

    def is_running(self, node: str) -> bool:
        return self.agent(node).poll() is None

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    # ---- observations --------------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        found: list[Step] = []
        for path in self.directory.glob("steps-*"):
            whole = path.read_text().split("\n")[:-1]
            found += [Step(**json.loads(line)) for line in whole]
        return sorted(found, key=lambda step: step.at)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited in vain for {what}\n{self.describe()}")
            time.sleep(0.02)

    def until_world(self, world_size: int, *, above: int = 0) -> int:
        """Wait until every rank of a group of ``world_size`` has made a step in a generation above ``above``.
        Returns that generation."""

        def find() -> int:
            ranks: dict[int, set[int]] = {}
            for step in self.steps():
                if step.world_size == world_size and step.generation > above:
                    ranks.setdefault(step.generation, set()).add(step.rank)
            return max(
                (one for one, seen in ranks.items() if len(seen) == world_size), default=0
            )

        self.until(lambda: find() > 0, f"a world of {world_size} above generation {above}")
        return find()

    def finish_training(self) -> None:
        """Request all workers to end successfully at one step."""
        (self.directory / "finish").touch()

    def check(self, *, is_thaw: bool = False) -> None:
        """Check the invariants.

        ``is_thaw``: a process that was frozen may write one last step of an old generation.
        """
        steps = self.steps()
        assert steps
        places: dict[tuple[int, int], tuple[str, int]] = {}
        newest = late = 0
        for step in steps:
            assert step.total == step.world_size, step
            assert places.setdefault(
                (step.generation, step.rank), (step.node, step.world_size)
            ) == (
                step.node,
                step.world_size,
            )
            late += step.generation < newest
            newest = max(newest, step.generation)
        assert late <= is_thaw, (
            f"{late} steps of an older generation after the first of a newer one"
        )
        for generation in {step.generation for step in steps}:
            nodes = [node for (one, _), (node, _) in places.items() if one == generation]
            assert len(nodes) == len(set(nodes)), (
                f"generation {generation} has a node at two ranks: {nodes}"
            )

    def describe(self) -> str:
        parts = [
            f"{path.name}:\n{path.read_text(errors='replace')[-2500:]}"
            for path in sorted(self.directory.glob("*.log"))
        ]
        return "\n".join(parts) + f"\nlast steps: {self.steps()[-4:]}"

    def close(self) -> None:
        for process in self._processes:
            workers = []
            if process.poll() is None:
                workers = psutil.Process(process.pid).children()
                process.kill()
            process.wait(PATIENCE)
            for worker in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()
        for orphan in {step.process for step in self.steps()}:
            with contextlib.suppress(OSError):
                if (
                    str(self.directory).encode()
                    in Path(f"/proc/{orphan}/environ").read_bytes()
                ):
                    os.kill(orphan, signal.SIGKILL)

    def _start(
        self, command: Sequence[str], name: str, environment: dict[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        with (self.directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        self._processes.append(process)
        return process
