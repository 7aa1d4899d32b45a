"""Worlds of real gloo processes for the checkpoint tests, forked from one warm process so that torch is
imported once.

Test side: ``run_world(function, size=2, directory=...)`` runs a module-level function of a test file in every
rank. Started as a script, this file is the warm process: it forks a child for each line it reads and reports
exit statuses.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

# This file is a program, too.
_TESTS = Path(__file__).resolve().parents[2]
for _folder in (_TESTS, _TESTS.parent / "tools", Path(__file__).parent):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

from patience import PATIENCE  # noqa: E402

from bed.process_state import is_alive  # noqa: E402

"""Time limit of a world in seconds, so that a hang fails its test before the suite's timeout."""


@dataclass(frozen=True)
class Ended:
    """The result of one rank: its exit status (negative: the signal) and the result of its function."""

    status: int
    value: Any
    errors: str


class WarmProcess:
    """The process that forks ranks. When this object's pipe closes, it kills all remaining ranks and ends."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def ask(self, **request: Any) -> Any:
        """Send one request, and return its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=PATIENCE)
        self._process.stdout.close()


_warm: list[WarmProcess] = []


def warm_process() -> WarmProcess:
    """Return the warm process of this test session."""
    if not _warm:
        _warm.append(WarmProcess())
        atexit.register(_warm[0].close)
    return _warm[0]


def start_world(
    function: Callable[..., Any],
    *,
    size: int,
    directory: Path,
    scratch: Path,
    **params: Any,
) -> list[int]:
    """Start ``function(world, directory, **params)`` in ``size`` ranks of a new generation.

    Returns their process IDs. If ``finalizes`` is True, the ranks end with the interpreter's regular shutdown
    instead of immediately.
    """
    from evergrad_trainer.checkpoint.generations import claim_generation

    scratch.mkdir(parents=True, exist_ok=True)
    finalizes = params.pop("finalizes", False)
    task = {
        "finalizes": finalizes,
        "file": function.__code__.co_filename,
        "function": function.__name__,
        "size": size,
        "directory": str(directory),
        "generation": claim_generation(directory),
        "scratch": str(scratch),
        "params": params,
    }
    return [warm_process().ask(spawn={**task, "rank": rank}) for rank in range(size)]


def end_world(pids: list[int], scratch: Path) -> list[Ended]:
    """Wait for every rank, and return the results."""
    statuses = [warm_process().ask(wait=pid, seconds=PATIENCE) for pid in pids]
    return [_collect(scratch, rank, status) for rank, status in enumerate(statuses)]


def run_world(
    function: Callable[..., Any], *, size: int, directory: Path, **params: Any
) -> list[Ended]:
    """Run ``function(world, directory, **params)`` in all ranks of a new generation, and wait for them."""
    scratch = directory.parent / f"world-{time.monotonic_ns()}"
    return end_world(
        start_world(function, size=size, directory=directory, scratch=scratch, **params),
        scratch,
    )


def values(ended: list[Ended]) -> list[Any]:
    """Return the results of the ranks. Fails with their stderr if a rank failed."""
    for rank, one in enumerate(ended):
        assert one.status == 0, f"rank {rank} ended with {one.status}:\n{one.errors}"
    return [one.value for one in ended]


def wait_until_dead(pid: int) -> None:
    """Wait until a killed process has ended, reaped or not."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if not is_alive(pid):
            return
        time.sleep(0.002)
    raise TimeoutError(f"process {pid} lives on")


def _collect(scratch: Path, rank: int, status: int) -> Ended:
    value, errors = None, ""
    with contextlib.suppress(FileNotFoundError):
        errors = (scratch / f"stderr-{rank}").read_text()
    with contextlib.suppress(FileNotFoundError):
        value = json.loads((scratch / f"result-{rank}").read_text())
    return Ended(status, value, errors)


def _serve() -> None:
    """Run the warm process: fork for ``spawn``, reap for ``wait``, kill the remaining children at the end."""
    import pytest  # noqa: F401  # test files import it
    import torch.distributed.device_mesh  # noqa: F401

    import evergrad_trainer.checkpoint.manager
    import evergrad_trainer.checkpoint.weights  # noqa: F401

    alive: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "spawn" in request:
            pid = os.fork()
            if pid == 0:
                _run_rank(request["spawn"])
            alive.add(pid)
            answer = pid
        else:
            answer = _reap(request["wait"], request["seconds"])
            alive.discard(request["wait"])
        print(json.dumps(answer), flush=True)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _reap(pid: int, seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -999
        time.sleep(0.003)


def _run_rank(task: dict[str, Any]) -> None:
    """Call the test file's function in a forked child, write its result to a file, and exit."""
    scratch, rank = Path(task["scratch"]), task["rank"]
    errors = os.open(
        scratch / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600
    )
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.dup2(errors, 2)
    status = 1
    try:
        spec = importlib.util.spec_from_file_location("worker", task["file"])
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["worker"] = module
        spec.loader.exec_module(module)
        world = _enter_world(task)
        value = getattr(module, task["function"])(
            world, Path(task["directory"]), **task["params"]
        )
        (scratch / f"result-{rank}").write_text(json.dumps(value))
        status = 0
    except BaseException:  # noqa: BLE001  # whatever it is, the test side has to read it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        if not (task["finalizes"] and status == 0):
            os._exit(status)
    sys.exit(0)


def _enter_world(task: dict[str, Any]) -> Any:
    import torch
    import torch.distributed as dist

    from evergrad_trainer.distributed.world import World

    torch.set_num_threads(1)
    rank, size, generation = task["rank"], task["size"], task["generation"]
    if size == 1:
        return World(generation=generation, rank=0, size=1, device=torch.device("cpu"))
    timeout = timedelta(hours=1)
    meeting = f"file://{task['scratch']}/meeting"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=size, timeout=timeout
    )
    return World(
        generation=generation,
        rank=rank,
        size=size,
        device=torch.device("cpu"),
        group=dist.group.WORLD,
        control=dist.new_group(backend="gloo", timeout=timeout),
        checkpoint=dist.new_group(backend="gloo", timeout=timeout),
    )


if __name__ == "__main__":
    _serve()
