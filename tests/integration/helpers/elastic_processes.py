"""The warm process of the elastic tests: forks coordinators, nodes and commands, and plans faults in nodes'
workers.

Started as a script, it answers one JSON request per line (``spawn``, ``poll``) and kills the remaining
processes when its input ends. A forked node records every finished step of its workers (``trace.jsonl`` of
its cluster), independently of who wrote the metrics.
"""

import contextlib
import ctypes
import errno
import functools
import importlib
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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOREVER = 60.0
"""Longest time in seconds that a held worker blocks."""

PLACES = {
    "setup": ("evergrad_trainer.worker.worlds", "form_world"),
    "meeting": ("evergrad_trainer.distributed.process_groups", "PrefixStore"),
    "settle": ("evergrad_trainer.worker.worker_loop", "settle"),
    "announce": ("evergrad_trainer.worker.worker_loop", "announce"),
    "provenance": ("evergrad_trainer.worker.run_records", "record_process"),
    "send": ("evergrad_trainer.distributed.world", "World.send"),
    "receive": ("evergrad_trainer.distributed.world", "World.receive"),
    "slot": ("evergrad_trainer.worker.liveness", "WorkerHeartbeat.beat"),
    "step": ("evergrad_trainer.training.step", "Stepper.run"),
    "forward": ("evergrad_trainer.training.step", "Stepper._forward_backward"),
    "tally": ("evergrad_trainer.training.exchange", "Sums.exchange"),
    "reducing": ("evergrad_trainer.distributed.world", "World.start_sum"),
    "update": ("evergrad_trainer.training.step", "Stepper._update"),
    "report": ("evergrad_trainer.training.loop", "build_record"),
    "evaluation": ("evergrad_trainer.training.evaluation", "EvaluationRunner.run"),
    "batch": ("evergrad_trainer.data.evaluation_sets", "EvaluationSet.batch"),
    "save": ("evergrad_trainer.checkpoint.manager", "CheckpointManager.save"),
    "shard": ("evergrad_trainer.checkpoint.shard_file", "ShardFile.finish"),
    "publish": ("evergrad_trainer.checkpoint.save", "_publish"),
    "published": ("evergrad_trainer.checkpoint.save", "_settle"),
    "snapshot": ("evergrad_trainer.training.snapshots", "Snapshots.take"),
}
"""Functions before which a fault may be planned. The exception is ``reducing``: its fault happens after the
call, while the sum is in progress."""


@dataclass
class _Here:
    """The identity and the current step of this process."""

    node: int = -1
    local_rank: int = -1
    rank: int = -1
    step: int = 0
    slot: int = -1
    generation: int = -1


_here = _Here()
_SELECTS = ("node", "local_rank", "rank", "step", "slot")


def serve() -> None:
    """Serve requests on stdin: ``spawn`` forks a process, ``poll`` returns its exit code."""
    tests = Path(__file__).resolve().parents[2]
    sys.path += map(str, (Path(__file__).parent, tests, tests.parent / "tools"))
    _import_everything()
    alive: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "spawn" in request:
            sys.stdout.flush()
            answer: Any = os.fork()
            if answer == 0:
                _become(request["spawn"])
            alive.add(answer)
        else:
            answer = _poll(request["poll"], alive)
        print(json.dumps(answer), flush=True)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _import_everything() -> None:
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401

    import evergrad_cli.main as command_line
    import evergrad_coordinator.__main__  # noqa: F401
    import evergrad_trainer.commands.nodes
    import evergrad_trainer.report.build as report
    import evergrad_trainer.worker.run  # noqa: F401
    from evergrad_trainer.node.run import prepare_process

    command_line.build_whole_parser()
    prepare_process()
    # Do not draw reports: drawing takes ten times as long as these runs, and other tests cover it.
    draw = report.write_report
    report.write_report = lambda directory, **given: (
        draw(directory, **given)
        if given
        else SimpleNamespace(html=directory / "report.html")
    )


def _poll(pid: int, alive: set[int]) -> int | None:
    """Return the exit code of a process, or None if it is still running."""
    found, status = os.waitpid(pid, os.WNOHANG)
    if not found:
        return None
    alive.discard(pid)
    return os.waitstatus_to_exitcode(status)


def _become(task: dict[str, Any]) -> None:
    """Run the task of a forked child, with its output in files, and exit."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, path in enumerate(
        (os.devnull, f"{task['output']}.out", f"{task['output']}.err")
    ):
        os.dup2(os.open(path, os.O_RDONLY if number == 0 else flags, 0o600), number)
    status = 1
    try:
        os.setpgid(0, 0)
        os.chdir(task["cwd"])
        if task.get("resolver"):
            _resolve_with(task["resolver"])
        mains: dict[str, Callable[[dict[str, Any]], int]] = {
            "coordinator": _coordinate,
            "node": _be_node,
            "command": _run_command,
            "function": _call_function,
        }
        status = mains[task["kind"]](task)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - the end of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _resolve_with(configuration: str) -> None:
    """Replace resolv.conf for this process and its children."""
    new_namespace = 0x00020000
    if ctypes.CDLL(None, use_errno=True).unshare(new_namespace) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", configuration, "/etc/resolv.conf"], check=True)


def _coordinate(task: dict[str, Any]) -> int:
    return importlib.import_module("evergrad_coordinator.__main__").main(task["arguments"])  # type: ignore[no-any-return]


def _run_command(task: dict[str, Any]) -> int:
    sys.argv = ["evergrad", *task["arguments"]]
    return importlib.import_module("evergrad_cli.main").main(task["arguments"])  # type: ignore[no-any-return]


def _call_function(task: dict[str, Any]) -> int:
    """Call a function of a test file, and print its result as JSON."""
    sys.modules["elastic_helpers"] = importlib.import_module("elastic_helpers")
    spec = importlib.util.spec_from_file_location("elastic_function", task["file"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    print(json.dumps(getattr(module, task["name"])(**task["params"])))
    return 0


def _be_node(task: dict[str, Any]) -> int:
    """Run a node as ``evergrad node`` does, from the arguments of ``evergrad run``."""
    from evergrad_cli.main import build_whole_parser
    from evergrad_common.contract import ExitCode
    from evergrad_manifest.reading.loader import load_from
    from evergrad_trainer.commands.run_arguments import machine_and_workers
    from evergrad_trainer.commands.session_plan import PlanRequest, plan_session
    from evergrad_trainer.node.fingerprint import fingerprint, fingerprint_of_plan
    from evergrad_trainer.node.run import run_node
    from evergrad_trainer.node.settings import NodeSettings
    from evergrad_trainer.run.directory import RunDirectory
    from evergrad_trainer.run.resume import inspect_directory

    args = build_whole_parser().parse_args(task["arguments"])
    loaded = load_from(args)
    directory = RunDirectory(Path(args.run_directory))
    run_state = inspect_directory(directory, loaded.run, extend=False)
    if run_state.state == "complete":
        return int(ExitCode.DONE)
    machine, num_workers = machine_and_workers(args.workers, loaded.run)
    plan = plan_session(
        PlanRequest(
            loaded,
            directory,
            run_state,
            machine,
            num_workers,
            stop_after_steps=args.stop_after_steps,
        )
    )
    settings = NodeSettings(
        run=plan.run.metadata.name,
        coordinator_host="127.0.0.1",
        recovery=task["settings"].pop("recovery", "in-process"),
        run_directory=directory.path,
        fingerprint=fingerprint(plan.run, plan.base_directory) | fingerprint_of_plan(plan),
        shares_host=True,
        termination_log=Path(f"{task['output']}.last-words"),
        **task["settings"],
    )
    os.environ["EVERGRAD_TRANSPORT"] = task["transport"]
    for name, value in task["constants"].items():
        module, _, constant = name.rpartition(".")
        assert hasattr(importlib.import_module(module), constant), name
        setattr(importlib.import_module(module), constant, value)
    _watch(Path(task["scratch"]), task["faults"])
    return run_node(plan, settings, num_workers=num_workers, start_method="fork")


# ---- in the workers ----------------------------------------------------------------------------------------


def _watch(scratch: Path, faults: list[dict[str, Any]]) -> None:
    """Record the workers' identities and finished steps, and plan the faults. Call it before forking."""
    node_run = importlib.import_module("evergrad_trainer.node.run")
    run_worker = node_run.run_worker
    trace = os.open(scratch / "trace.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def watched_worker(*args: Any, node: int, local_rank: int) -> int:
        _here.node, _here.local_rank = node, local_rank
        return int(run_worker(*args, node=node, local_rank=local_rank))

    node_run.run_worker = watched_worker
    stepper = importlib.import_module("evergrad_trainer.training.step").Stepper
    run_step = stepper.run

    def watched_step(self: Any, step: int, world: Any, flags: Any, **options: Any) -> Any:
        _here.step, _here.rank, _here.generation = step, world.rank, world.generation
        begun = time.monotonic()
        outcome = run_step(self, step, world, flags, **options)
        row = {
            **vars(_here),
            "size": world.size,
            "pid": os.getpid(),
            "begun": begun,
            "ended": time.monotonic(),
        }
        os.write(trace, json.dumps(row).encode() + b"\n")
        return outcome

    stepper.run = watched_step
    heartbeat = importlib.import_module("evergrad_trainer.worker.liveness").WorkerHeartbeat
    beat = heartbeat.beat

    def watched_beat(self: Any, step: int, slot: int) -> None:
        _here.slot = slot
        beat(self, step, slot)

    heartbeat.beat = watched_beat
    for one in faults:
        _plan(one, scratch)


def _plan(fault: dict[str, Any], scratch: Path) -> None:
    module, name = PLACES[fault["place"]]
    owner = importlib.import_module(module)
    *classes, name = name.split(".")
    for one in classes:
        owner = getattr(owner, one)
    original = getattr(owner, name)
    is_after = fault["place"] == "reducing"
    calls = 0

    def happen(*args: Any) -> None:
        nonlocal calls
        if any(
            fault[key] is not None and fault[key] != getattr(_here, key) for key in _SELECTS
        ):
            return
        calls += 1
        if calls >= fault["call"] and _may_happen(fault, scratch):
            _act(fault, scratch, *args)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if fault["place"] == "setup" and args:
            _here.rank, _here.generation = args[0].rank, args[0].generation
        if not is_after:
            happen(*args)
        value = original(*args, **kwargs)
        if is_after:
            happen(*args)
        return value

    setattr(owner, name, wrapper)


def _may_happen(fault: dict[str, Any], scratch: Path) -> bool:
    """Return whether a fault may happen: once in its cluster, even after restarts, unless it is repeated."""
    if fault["is_repeated"]:
        return True
    try:
        os.close(
            os.open(scratch / f"{fault['name']}.happened", os.O_CREAT | os.O_EXCL, 0o600)
        )
    except FileExistsError:
        return False
    return True


def _act(fault: dict[str, Any], scratch: Path, owner: Any = None, *_: Any) -> None:
    match fault["action"]:
        case "flip":
            _flip_bit(owner)
        case "hold":
            _hold(scratch / f"{fault['name']}.open", fault["seconds"])
        case "raise":
            raise ValueError("a user's own mistake")
        case "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "lose":
            raise importlib.import_module("evergrad_trainer.base.errors").PeerLostError(
                "Connection closed by peer"
            )
        case "exit":
            os._exit(0)
        case name:
            number = signal.Signals[name]
            os.kill(os.getpid() if fault["to"] == "self" else os.getppid(), number)
            if number == signal.SIGKILL:
                time.sleep(FOREVER)


def _flip_bit(stepper: Any) -> None:
    """Flip one bit of one weight, to simulate a memory error."""
    weight = next(iter(stepper._parts.model.parameters()))
    weight.detach().view(-1).view(importlib.import_module("torch").int32)[7] ^= 1 << 21


def _hold(gate: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not gate.exists() and time.monotonic() < deadline:
        time.sleep(0.001)


if __name__ == "__main__":
    serve()
