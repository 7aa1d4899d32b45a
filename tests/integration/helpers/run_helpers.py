"""Runs of ``evergrad`` for the tests, each in its own process, forked from a warm one so that torch is
imported once.

Test side: an ``Experiment`` is a directory with a manifest and documents; ``experiment.run(...)`` is
``evergrad run``. Started as a script, this file is the warm process: it forks a child for each line it
reads and reports exit statuses.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# This file is a program, too.
_TESTS = Path(__file__).resolve().parents[2]
for _folder in (_TESTS, _TESTS.parent / "tools", Path(__file__).parent):
    if str(_folder) not in sys.path:
        sys.path.append(str(_folder))

from patience import PATIENCE  # noqa: E402

"""Time limit of one command in seconds, so that a hang fails its test instead of the whole suite."""

DONE, USER_ERROR, INTERNAL, STOPPED_SAVED, STOPPED_UNSAVED = 0, 64, 70, 75, 76
Rows = dict[int, dict[str, Any]]
Fault = dict[str, Any]

MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
WORDS = [
    "the",
    "run",
    "stopped",
    "where",
    "a",
    "node",
    "was",
    "lost",
    "and",
    "another",
    "went",
    "on",
    "with",
    "exactly",
    "the",
    "same",
    "samples",
    "as",
    "before",
    "in",
    "that",
    "order",
]


def fault(
    at: str,
    *,
    call: int,
    action: str,
    rank: int | None = 0,
    to: str = "self",
    seconds: float = 0.05,
) -> Fault:
    """Plan a fault at the ``call``-th call (from 1; 0: every call) of ``at`` in ``rank`` (None: any rank).

    ``action`` is a signal (for example ``SIGTERM``), ``sleep``, ``hold`` (wait until the file ``go-on`` is in
    the experiment's folder), or ``flip`` (flip a bit of a weight at ``step``, once in an experiment).

    ``to``: send the signal to this process (``self``) or to the ``command``. SIGTERM for a worker that a node
    supervises is always sent to the command. After a signal the process waits until it has noticed the
    signal, so that the next step always observes it. ``seconds``: time to sleep.
    """
    module, name = POINTS[at]
    return {
        "module": module,
        "name": name,
        "call": call,
        "action": action,
        "rank": rank,
        "to": to,
        "seconds": seconds,
    }


POINTS = {
    "step": ("evergrad_trainer.training.step", "Stepper.run"),
    "update": ("evergrad_trainer.training.step", "Stepper._update"),
    "evaluation": ("evergrad_trainer.training.evaluation", "EvaluationRunner.run"),
    "batch": ("evergrad_trainer.data.evaluation_sets", "EvaluationSet.batch"),
    "save": ("evergrad_trainer.checkpoint.manager", "CheckpointManager.save"),
    "shard": ("evergrad_trainer.checkpoint.shard_file", "ShardFile.finish"),
    "publish": ("evergrad_trainer.checkpoint.save", "_publish"),
    "published": ("evergrad_trainer.checkpoint.save", "_settle"),
    "snapshot": ("evergrad_trainer.training.snapshots", "Snapshots.take"),
    "export": ("evergrad_trainer.export", "export_checkpoint"),
    "receive": ("evergrad_trainer.distributed.world", "World.receive"),
    "track": ("evergrad_trainer.observers.trackers.tensorboard", "TensorBoard.write"),
}


def constant(name: str, value: float) -> Fault:
    """Plan a new value of a module's constant, for a command and the workers that it forks."""
    module, _, name = name.rpartition(".")
    return {"module": module, "name": name, "action": "set", "value": value}


@dataclass(frozen=True)
class Ended:
    """The result of one command: its exit code (negative: the signal) and its output."""

    code: int
    out: str
    err: str

    def expect(self, code: int) -> "Ended":
        """Return itself if the command ended with ``code``, else raise AssertionError with its output.

        The output must not contain a traceback.
        """
        assert self.code == code, (
            f"exit code {self.code} instead of {code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"
        )
        if code in (DONE, USER_ERROR, STOPPED_SAVED):
            assert "Traceback" not in self.err, self.err
        return self


@dataclass
class Started:
    """A running command."""

    pid: int
    scratch: Path
    ended: Ended | None = None

    def send(self, number: int) -> None:
        """Send a signal to the command."""
        os.kill(self.pid, number)

    def wait(self, *, seconds: float = PATIENCE) -> Ended:
        """Wait for the end and return the result. Kill the command after ``seconds``."""
        if self.ended is None:
            status = warm_process().ask(wait=self.pid, seconds=seconds)
            out, err = ((self.scratch / name).read_text() for name in ("stdout", "stderr"))
            self.ended = Ended(status, out, err)
        return self.ended

    def workers(self) -> list[int]:
        """Return the process IDs of the workers that a node started first, in rank order."""
        return [int(path.read_text()) for path in sorted(self.scratch.glob("worker-*.pid"))]


class WarmProcess:
    """The process that forks commands.

    When this object's pipe closes, the process kills all remaining commands and ends.
    """

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


@functools.cache
def warm_process() -> WarmProcess:
    """Return the warm process of this test session."""
    process = WarmProcess()
    atexit.register(process.close)
    return process


def start_command(
    arguments: Sequence[str],
    *,
    cwd: Path,
    faults: Sequence[Fault] = (),
    environment: Mapping[str, str] | None = None,
) -> Started:
    """Start ``evergrad <arguments>`` in ``cwd``."""
    scratch = cwd / ".commands" / str(time.monotonic_ns())
    scratch.mkdir(parents=True)
    task = {
        "arguments": list(arguments),
        "cwd": str(cwd),
        "scratch": str(scratch),
        "faults": list(faults),
    }
    return Started(
        warm_process().ask(spawn={**task, "environment": dict(environment or {})}), scratch
    )


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes`` merged into its mappings. A None value removes the key."""
    merged = dict(base)
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def recipe(**changes: Any) -> dict[str, Any]:
    """Return ``spec.training`` of a tiny run: 8 steps of 4 one-sample slots, saved every 3 steps."""
    base = {
        "model": {"config": MODEL},
        "data": {
            "sources": [{"name": "docs", "path": "documents.jsonl"}],
            "sequenceLength": 16,
        },
        "batching": {"globalBatchSize": 4, "microBatchSize": 1},
        "optimizer": {"learningRate": 3e-3},
        "horizon": {"steps": 8},
        "checkpoint": {"every": {"steps": 3}, "keep": 50},
        "runtime": {"precision": "fp32", "threads": 1, "device": "cpu"},
    }
    return merge(base, changes)


def write_documents(path: Path, *, count: int = 60, seed: int = 0) -> Path:
    """Write a JSONL file of ``count`` small documents, and return its path."""
    source = random.Random(seed)
    texts = (" ".join(source.choices(WORDS, k=source.randint(3, 30))) for _ in range(count))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@dataclass
class Experiment:
    """A directory with documents and manifests. Run directories are under ``runs/``."""

    path: Path
    started: list[Started] = field(default_factory=list)

    def write(
        self, training: Mapping[str, Any] | None = None, *, name: str = "tiny", **spec: Any
    ) -> Path:
        """Write ``<name>.yaml`` (JSON is YAML too)."""
        manifest = {
            "apiVersion": "evergrad.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": name},
            "spec": {**spec, "training": training or recipe()},
        }
        path = self.path / f"{name}.yaml"
        path.write_text(json.dumps(manifest, indent=2))
        return path

    def start(
        self,
        *arguments: str,
        name: str = "tiny",
        directory: str | None = None,
        **options: Any,
    ) -> Started:
        """Start ``evergrad run`` of ``<name>.yaml`` in ``runs/<directory or name>``."""
        where = str(self.path / "runs" / (directory or name))
        command = start_command(
            ["run", f"{name}.yaml", "--run-directory", where, *arguments],
            cwd=self.path,
            **options,
        )
        self.started.append(command)
        return command

    def run(self, *arguments: str, expect: int | None = DONE, **options: Any) -> Ended:
        """Start a run, wait for its end, and check that its exit code is ``expect`` (None: any code)."""
        ended = self.start(*arguments, **options).wait()
        return ended if expect is None else ended.expect(expect)

    def command(self, *arguments: str) -> Ended:
        """Run another command."""
        return start_command(arguments, cwd=self.path).wait()

    def at(self, directory: str = "tiny") -> Path:
        """Return the path of a run directory."""
        return self.path / "runs" / directory

    def close(self) -> None:
        """Kill all processes that the test left behind."""
        for command in self.started:
            if command.ended is None:
                with contextlib.suppress(ProcessLookupError):
                    command.send(signal.SIGKILL)
                command.wait()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file. Ignore an incomplete last line of a file in use."""
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n")
    ]


def metric_rows(directory: Path) -> list[dict[str, Any]]:
    """Return all rows of ``metrics.jsonl``."""
    return read_lines(directory / "metrics.jsonl")


def steps_of(directory: Path) -> list[int]:
    """Return the steps in the order in which they were trained, including repeated steps."""
    return [row["step"] for row in metric_rows(directory)]


def curve(directory: Path) -> Rows:
    """Return the last row of each step, by step."""
    return {row["step"]: row for row in metric_rows(directory)}


def events(directory: Path, type_: str) -> list[dict[str, Any]]:
    """Return the events of one type."""
    return [
        event for event in read_lines(directory / "events.jsonl") if event["type"] == type_
    ]


def checkpoints(directory: Path) -> list[int]:
    """Return the steps of the published checkpoints, in ascending order."""
    return sorted(
        int(path.name.split("-")[1].split(".")[0])
        for path in (directory / "checkpoints").glob("step-*")
    )


EXACT = ("sample_hash", "loss", "grad_norm", "learning_rate", "tokens", "valid_tokens")


def assert_same_curve(
    one: Path, other: Path, *, exact: bool = True, tolerance: float = 1e-5
) -> None:
    """Check that both runs trained the same steps on the same samples with equal losses.

    If not exact, losses may differ by the relative ``tolerance``.
    """
    a, b = curve(one), curve(other)
    assert sorted(a) == sorted(b)
    for step in sorted(a):
        assert a[step]["sample_hash"] == b[step]["sample_hash"], (
            f"step {step}: other samples"
        )
        if exact:
            assert [a[step][key] for key in EXACT] == [b[step][key] for key in EXACT], (
                f"step {step}"
            )
        else:
            assert abs(a[step]["loss"] - b[step]["loss"]) <= tolerance * abs(
                a[step]["loss"]
            ), f"step {step}: loss"


def final_state(directory: Path, *, prefix: str = "") -> dict[str, Any]:
    """Return the tensors of the newest checkpoint."""
    from plain_state import read_plain_state

    from evergrad_trainer.checkpoint.weights import hold_checkpoint

    with hold_checkpoint(directory) as checkpoint:
        return read_plain_state(checkpoint, prefix=prefix)


def assert_same_state(one: Path, other: Path, *, prefix: str = "") -> None:
    """Check that the newest checkpoints of both runs are identical bit by bit."""
    import torch

    a, b = final_state(one, prefix=prefix), final_state(other, prefix=prefix)
    assert a.keys() == b.keys() and a
    for key, value in a.items():
        assert torch.equal(value, b[key]), (
            f"{key} differs by up to {(value - b[key]).abs().max()}"
        )


def wait_until(
    condition: Callable[[], Any], *, seconds: float = PATIENCE, what: str = ""
) -> Any:
    """Return the first true value of ``condition``, which is checked every millisecond."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.001)
    raise TimeoutError(what or "the condition never held")


def _serve() -> None:
    """Run the warm process: fork for ``spawn``, reap for ``wait``, kill the remaining children at the end."""
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401

    import evergrad_cli.main as command_line
    import evergrad_trainer.commands.nodes
    import evergrad_trainer.report.build as report
    import evergrad_trainer.worker.run  # noqa: F401

    command_line.build_whole_parser()

    # Drawing takes ten times as long as these runs, and other tests cover it. Runs draw no report; only the
    # report command does.
    draw = report.write_report
    report.write_report = lambda directory, **given: (
        draw(directory, **given)
        if given
        else SimpleNamespace(html=directory / "report.html")
    )
    alive: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "spawn" in request:
            pid = os.fork()
            if pid == 0:
                if request["spawn"]["arguments"][0] == "report":
                    report.write_report = draw
                _run_command(request["spawn"])
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


def _run_command(task: dict[str, Any]) -> None:
    """Run the command line in a forked child, with its output in files."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, path in enumerate(
        (os.devnull, f"{task['scratch']}/stdout", f"{task['scratch']}/stderr")
    ):
        os.dup2(os.open(path, os.O_RDONLY if number == 0 else flags, 0o600), number)
    status = 1
    try:
        os.chdir(task["cwd"])
        os.environ.update(task["environment"])
        sys.argv = ["evergrad", *task["arguments"]]
        _remember_signals()
        _remember_place(Path(task["scratch"]))
        for one in task["faults"]:
            _plan_fault(one)
        main = importlib.import_module("evergrad_cli.main").main
        status = main(task["arguments"])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - the end of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


_signals: list[Any] = []
"""The signal handlers of a forked child."""


def _remember_signals() -> None:
    catcher = importlib.import_module("evergrad_trainer.worker.signals").StopSignals
    install = catcher.install

    def wrapper(self: Any) -> None:
        _signals.append(self)
        install(self)

    catcher.install = wrapper


@dataclass
class _Place:
    """In a forked child, return the command that it belongs to and, in a worker of a node, its local rank and
    the component that listens for its node."""

    command: int = 0
    local_rank: int | None = None
    watchdogs: list[Any] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return (
            int(os.environ.get("RANK", "0")) if self.local_rank is None else self.local_rank
        )

    def has_noticed(self) -> bool:
        """Return whether this process has noticed the request to stop."""
        return any(one.is_requested for one in _signals) or any(
            one.is_changing() for one in self.watchdogs
        )


_place = _Place()


def _remember_place(scratch: Path) -> None:
    _place.command = os.getpid()
    workers = importlib.import_module("evergrad_trainer.node.workers")
    watchdog = importlib.import_module("evergrad_trainer.worker.watchdog").Watchdog
    be_worker, listen = workers._worker_main, watchdog.start

    def watched_worker(start: Any) -> None:
        _place.local_rank = start.order.local_rank
        if not (path := scratch / f"worker-{_place.local_rank}.pid").exists():
            path.write_text(str(os.getpid()))
        be_worker(start)

    def watched_watchdog(self: Any) -> None:
        _place.watchdogs.append(self)
        listen(self)

    workers._worker_main, watchdog.start = watched_worker, watched_watchdog


def _flip_once(stepper: Any) -> None:
    """Flip one bit of one weight of this rank, to simulate a memory error."""
    torch = importlib.import_module("torch")
    flipped = Path("flipped")
    if flipped.exists():
        return
    flipped.touch()
    weight = next(iter(stepper._parts.model.parameters())).detach()
    held = weight.to_local() if hasattr(weight, "to_local") else weight
    held.view(-1).view(torch.int32)[7] ^= 1 << 21


def _plan_fault(planned: Fault) -> None:
    """Install the fault before its function. Workers that are forked later inherit it."""
    owner = importlib.import_module(planned["module"])
    if planned["action"] == "set":
        assert hasattr(owner, planned["name"])
        setattr(owner, planned["name"], planned["value"])
        return
    *classes, name = planned["name"].split(".")
    for one in classes:
        owner = getattr(owner, one)
    original = getattr(owner, name)
    calls = 0

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        is_here = planned["rank"] is None or _place.rank == planned["rank"]
        if is_here and planned["call"] in (0, calls):
            if planned["action"] == "sleep":
                time.sleep(planned["seconds"])
            elif planned["action"] == "flip":
                _flip_once(args[0])
            elif planned["action"] == "hold":
                wait_until(
                    Path("go-on").exists, what="the test has not let go of what it held"
                )
            else:
                is_asked_by_node = bool(_place.watchdogs) and planned["action"] == "SIGTERM"
                is_own = planned["to"] == "self" and not is_asked_by_node
                os.kill(
                    os.getpid() if is_own else _place.command,
                    signal.Signals[planned["action"]],
                )
                wait_until(_place.has_noticed, what="the signal was never noticed")
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


if __name__ == "__main__":
    _serve()
