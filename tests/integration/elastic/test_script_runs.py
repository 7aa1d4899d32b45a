"""``evergrad run`` of a script: the same nodes, signals, logs, metrics and exit codes as a typed run has."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE

from bed.process_state import children_of, is_alive

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "examples" / "scripts"
pytestmark = pytest.mark.timeout(5 * PATIENCE)
STEP = re.compile(r"step (\d+)")


class ScriptRun:
    """One ``evergrad run`` of a manifest with ``spec.script``, in a separate process."""

    def __init__(
        self, path: Path, command: list[str], *, nodes: int, **script: Any
    ) -> None:
        manifest = {
            "apiVersion": "evergrad.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "script"},
            "spec": {
                "nodes": {"min": 1, "max": 4},
                "script": {"command": command, **script},
            },
        }
        self.path, self.nodes = path, nodes
        (path / "script.yaml").write_text(json.dumps(manifest), "utf-8")
        self.log = path / "output.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "ScriptRun":
        environment = {
            **os.environ,
            "TRANSFORMERS_OFFLINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "evergrad_cli",
                    "run",
                    "script.yaml",
                    "--nodes",
                    str(self.nodes),
                ],
                cwd=self.path,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    @property
    def output(self) -> str:
        return self.log.read_text("utf-8", errors="replace")

    @property
    def launcher(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    def steps(self) -> list[int]:
        return [
            int(match[1])
            for line in self.output.splitlines()
            if "rank 0]" in line and (match := STEP.search(line))
        ]

    def node(self, index: int) -> int:
        """Process id of a node."""
        for child in children_of(self.launcher.pid):
            with contextlib.suppress(FileNotFoundError):
                if (
                    Path(f"/proc/{child}/comm").read_text().strip()
                    == f"evergrad-node{index}"
                ):
                    return int(child)
        raise AssertionError(f"node {index} is not there; {self.output[-2000:]}")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.launcher.poll() is None, (
                f"ended before {what}: {self.output[-4000:]}"
            )
            assert time.monotonic() < deadline, f"no {what}: {self.output[-4000:]}"
            time.sleep(0.02)

    def wait(self) -> int:
        """Return the launcher's exit code. If a run does not end, the error shows its last output."""
        try:
            return self.launcher.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            events = "\n".join(json.dumps(event) for event in self.events()[-30:])
            processes = subprocess.run(
                ["ps", "-eo", "pid,ppid,stat,wchan:20,etimes,args"],
                capture_output=True,
                text=True,
                check=False,
            ).stdout
            raise AssertionError(
                f"the run did not end in {PATIENCE} s\n{self.output[-6000:]}\n"
                f"coordinator:\n{events}\n{processes}"
            ) from None

    def events(self) -> list[dict[str, Any]]:
        text = (self.path / "runs/script/logs/coordinator.log").read_text("utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def group_sizes(self) -> list[int]:
        """Nodes of each group so far; none before the coordinator has written anything."""
        with contextlib.suppress(FileNotFoundError):
            return [one["nodes"] for one in self.events() if one["event"] == "go"]
        return []

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()  # its nodes, their workers and the coordinator die with it
            self.process.wait()


Make = Callable[..., ScriptRun]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[ScriptRun] = []

    def make_run(command: list[str], *, nodes: int = 2, **script: Any) -> ScriptRun:
        made.append(ScriptRun(tmp_path, command, nodes=nodes, **script))
        return made[-1]

    yield make_run
    for run in made:
        run.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("ddp.py", marks=pytest.mark.long),
        pytest.param("hf_trainer.py", marks=pytest.mark.long),
        pytest.param("accelerate_loop.py", marks=pytest.mark.long),
    ],
)
def test_an_unmodified_script_survives_the_kill_of_a_node(make: Make, name: str) -> None:
    command = [
        str(SCRIPTS / name),
        "--output",
        "out",
        "--steps",
        "60",
        "--save-every",
        "5",
        "--step-seconds",
        "0.1",
    ]
    run = make(command).start()
    run.until(lambda: max(run.steps(), default=0) >= 7, "a step after the first checkpoint")
    os.kill(run.node(0), signal.SIGKILL)
    assert run.wait() == 0, run.output[-4000:]
    steps = run.steps()
    assert set(steps) == set(range(1, 61)), "no step is left out"
    assert steps[-1] == 60
    goes = [event["generation"] for event in run.events() if event["event"] == "go"]
    assert goes == sorted(set(goes)) and len(goes) >= 2
    assert (run.path / "runs/script/complete.json").is_file()
    assert list((run.path / "runs/script/logs").glob("node-*-worker-0.out"))
    assert make(command).start().wait() == 0
    assert "is complete" in run.output


@pytest.mark.timeout(1800)
def test_a_script_that_checks_should_stop_loses_no_step_if_a_node_or_the_run_is_stopped(
    make: Make, tmp_path: Path
) -> None:
    code = (
        (ROOT / "docs/train/elastic-scripts.md")
        .read_text("utf-8")
        .split("```python\n")[1]
        .split("```")[0]
    )
    code = code.replace("STEPS, checkpoint = 300", "STEPS, checkpoint = 10_000_000")
    code = code.replace(
        "first + 1, STEPS + 1):\n",
        "first + 1, STEPS + 1):\n    print('step', step, flush=True)\n",
    )
    (tmp_path / "train.py").write_text(code, "utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = make(["train.py", str(tmp_path / "state.pt")], metrics={"port": port}).start()
    # Node 0 may begin alone if the other node is late.
    run.until(lambda: run.group_sizes()[-1:] == [2], "a group of both nodes")
    first = max(run.steps(), default=0)
    run.until(lambda: max(run.steps(), default=0) >= first + 5, "steps")
    os.kill(run.node(1), signal.SIGTERM)
    run.until(lambda: run.group_sizes()[-1] == 1, "a group of one node")
    last = max(run.steps())
    run.until(lambda: max(run.steps()) > last + 3, "steps of the second group")
    with urllib.request.urlopen(
        f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE
    ) as answer:
        metrics = answer.read().decode()
    assert re.search(r'evergrad_script_step\{node="0",run="script"\} \d', metrics)
    run.launcher.send_signal(signal.SIGINT)
    assert run.wait() == 75, run.output[-4000:]
    steps = run.steps()
    assert steps == list(range(1, steps[-1] + 1)), "no step is trained twice"
    again = make(["train.py", str(tmp_path / "state.pt")], nodes=1).start()
    again.until(lambda: max(again.steps()) > steps[-1], "the next step")
    assert again.steps() == list(range(1, again.steps()[-1] + 1))


REPORTS_ANYTHING = """\
import os, pathlib, time, numpy, torch
from evergrad.elastic import report
nan = float("nan")
odd = [nan, float("inf"), torch.tensor(nan), torch.zeros(3), numpy.float32("nan"), 10**400, 1j, "text", {"a": [nan]}, object()]
for step, value in enumerate(odd, 1):
    report(step, loss=value, total_steps=value, tokens_per_second=value, checkpoint_step=value)
    report(value, loss=value)
report(torch.tensor(50), loss=torch.tensor(2.5), total_steps=100, tokens_per_second=numpy.float64(nan))
while not pathlib.Path("go-on").exists():
    time.sleep(0.05)
"""


def two_free_ports() -> int:
    """Return the first of two consecutive free ports: node 1 uses the port after node 0's.

    The ports are below the range that Linux assigns automatically, because another test would soon get the
    second port.
    """
    while True:
        first = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in (first, first + 1):
                stack.enter_context(socket.socket()).bind(("", port))
            return first


def series(port: int, name: str) -> float | None:
    """A value of node 0's endpoint; None before it is there."""
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(
            f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE
        ) as answer,
    ):
        found = re.search(
            rf'^{name}{{node="0",run="script"}} (\S+)$',
            answer.read().decode(),
            re.MULTILINE,
        )
        return float(found[1]) if found else None
    return None


@pytest.mark.timeout(1800)
def test_a_script_may_report_anything_and_only_invalid_values_are_lost(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(REPORTS_ANYTHING, "utf-8")
    port = two_free_ports()
    run = make(["train.py"], metrics={"port": port}).start()
    run.until(lambda: series(port, "evergrad_script_step") == 50, "the last report")
    assert series(port, "evergrad_script_loss") == 2.5
    (tmp_path / "go-on").touch()
    assert run.wait() == 0, run.output[-4000:]
    assert sum(event["event"] == "go" for event in run.events()) == 1, "no node was lost"
    assert len([event for event in run.events() if event["event"] == "hello"]) == 2, (
        "and none came again"
    )
    assert run.output.count("report(): loss: nan is not a finite number") == 2, (
        "one warning a worker"
    )
    assert "Traceback" not in run.output


@pytest.mark.timeout(1800)
def test_a_port_in_use_is_a_user_error_and_named(make: Make, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("", "utf-8")
    with contextlib.ExitStack() as stack:
        port = two_free_ports()
        for taken in (port, port + 1):
            stack.enter_context(socket.create_server(("127.0.0.1", taken)))
        run = make(["train.py"], metrics={"port": port}).start()
        assert run.wait() == 64
    for node, taken in enumerate((port, port + 1)):
        assert (
            f"error: node {node}: spec.script.metrics.port: port {taken} cannot be listened on"
            in run.output
        )
    assert "Traceback" not in run.output


WAITS_UNDER_GUARD = """\
import os, pathlib, time
from evergrad.elastic import should_stop
should_stop()
pathlib.Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
while not pathlib.Path("go-on").exists():
    time.sleep(0.05)
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_lost_lease_is_not_a_request_to_stop(make: Make, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITS_UNDER_GUARD, "utf-8")
    run = make(["train.py"]).start()
    run.until(
        lambda: all((tmp_path / f"pid-{rank}").exists() for rank in (0, 1)), "two workers"
    )
    workers = [int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)]
    coordinator = next(
        child
        for child in children_of(run.launcher.pid)
        if b"evergrad_coordinator" in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    os.kill(coordinator, signal.SIGSTOP)
    try:
        run.until(lambda: not any(map(is_alive, workers)), "end of workers without a lease")
    finally:
        os.kill(coordinator, signal.SIGCONT)
    run.until(
        lambda: sum(event["event"] == "go" for event in run.events()) == 2, "a second group"
    )
    (tmp_path / "go-on").touch()
    assert run.wait() == 0, run.output[-4000:]


STAYS = """\
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path("up-" + os.environ["RANK"]).touch()
while True:
    time.sleep(0.1)
"""


def test_sigterm_ends_a_run_whose_script_and_node_do_not_react(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(STAYS, "utf-8")
    run = make(["train.py"], gracePeriodSeconds=1).start()
    run.until(
        lambda: all((tmp_path / f"up-{rank}").exists() for rank in (0, 1)), "two workers"
    )
    processes = [run.node(index) for index in (0, 1)]
    processes += [worker for node in processes for worker in children_of(node)]
    os.kill(run.node(1), signal.SIGSTOP)
    run.launcher.send_signal(signal.SIGTERM)
    assert run.wait() in (75, 76), run.output[-4000:]
    assert not any(map(is_alive, processes))


def test_a_second_signal_ends_a_run_at_once(make: Make, tmp_path: Path) -> None:
    # With a guard its node waits for it, an hour if need be.
    (tmp_path / "train.py").write_text(
        "from evergrad.elastic import should_stop\nshould_stop()\n" + STAYS, "utf-8"
    )
    run = make(["train.py"], gracePeriodSeconds=3600).start()
    run.until(
        lambda: all((tmp_path / f"up-{rank}").exists() for rank in (0, 1)), "two workers"
    )
    processes = [run.node(index) for index in (0, 1)]
    processes += [worker for node in processes for worker in children_of(node)]
    run.launcher.send_signal(signal.SIGTERM)
    run.until(lambda: run.output.count("was asked to leave") == 2, "nodes that were asked")
    # Unlike another SIGTERM it counts however soon it follows.
    run.launcher.send_signal(signal.SIGINT)
    assert run.wait() == 76, run.output[-4000:]
    assert "interrupted twice" in run.output
    assert not any(map(is_alive, processes))


@pytest.mark.timeout(1800)
def test_a_script_that_fails_ends_the_run_with_its_root_cause(
    make: Make, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n    raise ValueError('these labels do not fit')\n"
        "dist.barrier()\n",
        "utf-8",
    )
    run = make(["train.py"]).start()
    assert run.wait() == 70
    said = next(event for event in run.events() if event["event"] == "finished")["message"]
    assert "ValueError: these labels do not fit" in said
    assert "rank 1" in said
    assert "Connection closed" not in said
    assert "train.py" in said, "the last frames"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_three_nodes_whose_workers_fail_repeatedly_use_up_the_budget_on_a_busy_machine(
    make: Make,
) -> None:
    # All cores are busy, so the nodes are slow to import, fork and answer; the failures count nevertheless.
    hogs = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        run = make(["/bin/sh", "-c", "sleep 4; exit 1"], nodes=3).start()
        assert run.launcher.wait(4 * PATIENCE) == 70, run.output[-4000:]
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    said = next(event for event in run.events() if event["event"] == "finished")
    assert said["reason"] == "FailuresWithoutProgress"
    assert "exit code 1" in said["message"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_connection_error_of_the_script_is_its_own_failure_and_not_a_lost_peer(
    make: Make, tmp_path: Path, nodes: int
) -> None:
    (tmp_path / "train.py").write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "raise ConnectionResetError(104, 'Connection reset by peer')\n",
        "utf-8",
    )
    run = make(["train.py"], nodes=nodes).start()
    assert run.wait() == 70
    assert (
        "ConnectionResetError"
        in next(event for event in run.events() if event["event"] == "finished")["message"]
    )
    assert {event["cause"] for event in run.events() if event["event"] == "broken"} == {
        "user_error"
    }
    assert (
        "[node 0] rank 0 ConnectionResetError: [Errno 104] Connection reset by peer"
        in run.output
    )


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_an_executable_gets_the_torchrun_variables_and_its_leftover_processes_are_ended(
    make: Make, tmp_path: Path
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        '#!/bin/sh\necho "worker $RANK of $WORLD_SIZE with $KEY"\nsetsid sleep 1000 & echo $! > '
        '"left-$RANK"\nsleep 0.5\n',
        "utf-8",
    )
    script.chmod(0o755)
    run = make(["./train.sh"], env={"KEY": "value"}).start()
    assert run.wait() == 0, run.output[-3000:]
    assert (
        "worker 0 of 2 with value" in run.output
        and "worker 1 of 2 with value" in run.output
    )
    for rank in (0, 1):
        left = int((tmp_path / f"left-{rank}").read_text())
        deadline = time.monotonic() + PATIENCE
        while is_alive(left) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_alive(left), "an orphan"


def test_a_missing_script_is_a_user_error(make: Make) -> None:
    run = make(["nowhere.py"]).start()
    assert run.wait() == 64
    assert "nowhere.py" in run.output


WRAPPED = """
import sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    if dist.get_rank() == 1:
        while not Path("then").exists():
            time.sleep(0.01)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        return
    inside, is_left = threading.Event(), threading.Event()

    def hold(future):
        inside.set()
        is_left.wait()

    # gloo's thread stays in this callback, and needs the GIL to leave it and to free the collective.
    dist.all_reduce(torch.ones(1), async_op=True).get_future().then(hold)
    Path("then").touch()
    inside.wait()
    dist.destroy_process_group()
    print("trained", flush=True)
    # No other thread gets the GIL before the model is freed: its destructor, if it destroys the group, joins
    # gloo's thread with the GIL held.
    sys.setswitchinterval(1000)
    is_left.set()
    del model

main()
print("returned", flush=True)
"""


def test_a_script_ends_although_its_model_outlives_the_destroyed_process_group(
    make: Make,
) -> None:
    run = make(["wrapped.py"], nodes=2)
    (run.path / "wrapped.py").write_text(WRAPPED)
    run.start()
    run.until(lambda: "trained" in run.output, "end of the training")
    assert run.wait() == 0
    assert "returned" in run.output


STRAGGLER = """
import os, time
from pathlib import Path

def wait_for_nothing():
    time.sleep(1e6)

if os.environ["RANK"] == "1" and not Path("hung").exists():
    Path("hung").touch()
    wait_for_nothing()
"""


def test_a_worker_that_hangs_after_another_has_ended_is_reported_by_name_and_killed(
    make: Make,
) -> None:
    run = make(["straggler.py"], nodes=2, finishGracePeriodSeconds=3600)
    (run.path / "straggler.py").write_text(STRAGGLER)
    run.start()
    log = run.path / "runs/script/logs/coordinator.log"
    run.until(lambda: log.exists() and '"finishing"' in log.read_text(), "end of rank 0")
    command = [sys.executable, "-m", "evergrad_cli", "stacks", "runs/script"]
    shown = subprocess.run(
        command, cwd=run.path, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    worker = shown.stdout.split("==> rank 1, ")[1].split("==> ")[0]
    assert "in wait_for_nothing" in worker and "kernel function in which it waits" in worker
    assert "==> node 0, evergrad-node0" in shown.stdout
    run.launcher.terminate()
    assert run.wait() == 75


def test_a_worker_that_hangs_for_longer_than_its_grace_is_killed_with_its_stacks_in_the_log(
    make: Make,
) -> None:
    run = make(["straggler.py"], nodes=2, finishGracePeriodSeconds=1)
    (run.path / "straggler.py").write_text(STRAGGLER)
    run.start()
    # The second attempt of rank 1, alone, ends well.
    assert run.wait() == 0
    assert "stood still for 1 s" in run.output
    assert "in wait_for_nothing" in run.output
    (broken,) = [one for one in run.events() if one["event"] == "broken"]
    assert (broken["rank"], broken["cause"]) == (1, "stuck")


LATE = """
import atexit
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
atexit.register(lambda: (folder / f"handler-{rank}").touch())


def finish_later():
    time.sleep(1)
    (folder / f"thread-{rank}").touch()


threading.Thread(target=finish_later).start()
ThreadPoolExecutor().submit(lambda: (time.sleep(1), (folder / f"pool-{rank}").touch()))
temporary = tempfile.TemporaryDirectory(dir=folder, prefix="temporary-")
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_threads_and_exit_handlers_of_a_script_are_waited_for_as_by_python(
    make: Make, tmp_path: Path, code: int
) -> None:
    """A save in the background, or a tracker, ends in one of them."""
    folder = tmp_path / "late"
    folder.mkdir()
    (tmp_path / "late.py").write_text(LATE)
    command = [str(tmp_path / "late.py"), str(folder), *([str(code)] if code else [])]
    run = make(command, nodes=2, env={"OMP_NUM_THREADS": "1"}).start()
    assert (run.wait() == 0) == (code == 0)
    left = {one.name for one in folder.iterdir()}
    wanted = {
        rank: {f"{what}-{rank}" for what in ("handler", "thread", "pool")} for rank in "01"
    }
    if code == 0:
        assert left == wanted["0"] | wanted["1"]
    else:
        # The rank that failed first came to its end; the other one may have been ended anywhere before.
        assert any(names <= left for names in wanted.values()), left
