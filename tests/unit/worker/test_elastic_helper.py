"""``evergrad.elastic`` in separate processes, with a node state that this process writes."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patience import PATIENCE

from evergrad.node_state import LEASE_LOST
from evergrad_trainer.worker.node_state import NodeStateServer

GENERATION = 6
STUCK_IN_C = (
    "import ctypes; lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64); "
    "lock(mutex); ctypes.CDLL(None).pthread_mutex_lock(mutex)"
)
"""A main thread that never returns to the interpreter and that no signal wakes, as inside a collective."""


class Node:
    """The node's side: a node state on a loop in a thread, and the reports that it received."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.reports: list[dict[str, object]] = []
        self.permitted = GENERATION
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.node_state = NodeStateServer(
            directory, on_report=self.reports.append, may_commit=self._may_commit
        )
        asyncio.run_coroutine_threadsafe(self.node_state.start(), self._loop).result(
            PATIENCE
        )
        self.announce()

    def announce(
        self,
        *,
        newest: int = GENERATION,
        since_contact: float = 0.0,
        is_draining: bool = False,
    ) -> None:
        self.node_state.announce(
            newest_generation=newest,
            own_generation=GENERATION,
            contact=time.monotonic() - since_contact,
            lease_seconds=600.0,
            is_draining=is_draining,
        )

    def close_state(self) -> None:
        async def close() -> None:
            await self.node_state.close()
            # Connections are closed on the loop, including one that was just accepted: the loop must run
            # until the last is closed.
            for _ in range(20):
                others = asyncio.all_tasks() - {asyncio.current_task()}
                await asyncio.gather(*others, return_exceptions=True)
                await asyncio.sleep(0.002)

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(PATIENCE)

    def close(self) -> None:
        self.close_state()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()

    async def _may_commit(self, generation: int) -> bool:
        return generation == self.permitted


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    one = Node(tmp_path / "state")
    yield one
    one.close()


@pytest.fixture
def start() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts a script after ``from evergrad.elastic import *``; every process ends with the test."""
    processes: list[subprocess.Popen[str]] = []

    def start_one(
        code: str, *, node: Node | None = None, **variables: str
    ) -> "subprocess.Popen[str]":
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("EVERGRAD_")
        }
        environment |= {
            **(node.node_state.environment if node else {}),
            "PYTHONSAFEPATH": "1",
            **variables,
        }
        code = "import os, signal, sys, time\nfrom evergrad.elastic import *\n" + code
        pipes = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, text=True, **pipes
        )
        processes.append(process)
        return process

    yield start_one
    for process in processes:
        process.kill()
        process.communicate()


def wait_for_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end_of(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Exit code and everything printed."""
    output, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, output + errors


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def test_without_evergrad_all_calls_have_harmless_defaults(
    start: Callable[..., "subprocess.Popen[str]"],
) -> None:
    code, output = end_of(
        start("print(report(1, loss=2.0), should_stop(), may_commit(), generation())")
    )
    assert (code, output) == (0, "None False True 0\n")


def test_without_evergrad_a_termination_is_a_request_to_stop_and_kills_no_process(
    start: Callable[..., "subprocess.Popen[str]"],
) -> None:
    script = start(
        "should_stop(); print('up', flush=True)\nwhile not should_stop(): time.sleep(0.01)\nprint('saved')"
    )
    assert wait_for_line(script) == "up"
    script.send_signal(signal.SIGTERM)
    assert end_of(script) == (0, "saved\n")


def test_the_helper_imports_no_torch(start: Callable[..., "subprocess.Popen[str]"]) -> None:
    assert end_of(start("print('torch' in sys.modules)")) == (0, "False\n")


def test_reports_have_rank_and_generation(
    start: Callable[..., "subprocess.Popen[str]"], node: Node
) -> None:
    script = start(
        "report(3, total_steps=9, loss=0.5, tokens_per_second=7.0, checkpoint_step=2); report(4)",
        node=node,
        RANK="0",
    )
    assert end_of(script) == (0, "")
    until(lambda: len(node.reports) == 2)
    common = {"rank": 0, "generation": GENERATION}
    assert node.reports[0] == {
        "step": 3,
        "total_steps": 9,
        "loss": 0.5,
        "tokens_per_second": 7.0,
        "checkpoint_step": 2,
        **common,
    }
    assert node.reports[1] == {"step": 4, **common}


def test_a_report_of_non_finite_values_warns_once_for_each_name_and_raises_nothing(
    start: Callable[..., "subprocess.Popen[str]"], node: Node
) -> None:
    code = (
        "for step, loss in enumerate((float('nan'), 'x', 10**400, [1], object())): report(step, loss=loss)\n"
        "report('five', loss=0.5, tokens_per_second=float('inf')); report(6, loss=0.25)"
    )
    ended, output = end_of(start(code, node=node, RANK="0"))
    assert ended == 0
    lines = output.splitlines()
    assert [line.split(": ")[2] for line in lines] == ["loss", "step", "tokens_per_second"]
    assert (
        lines[0] == "evergrad: report(): loss: nan is not a finite number; it is left out"
    )
    until(lambda: len(node.reports) == 7)
    common = {"rank": 0, "generation": GENERATION}
    assert node.reports[4:] == [
        {"step": 4, **common},
        {"loss": 0.5, **common},
        {"step": 6, "loss": 0.25, **common},
    ]


def test_a_report_does_not_wait_for_a_node_that_accepts_no_connection(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir()
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as waiting:
        listener.bind(str(tmp_path / "state/socket"))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                one = waiting.enter_context(socket.socket(socket.AF_UNIX))
                one.setblocking(False)
                one.connect(str(tmp_path / "state/socket"))
        script = start(
            "report(1); report(2); print('on')",
            EVERGRAD_NODE_STATE=str(tmp_path / "state"),
            EVERGRAD_GENERATION="1",
        )
        assert end_of(script) == (0, "on\n")


def test_reports_to_a_node_that_has_exited_are_dropped(
    start: Callable[..., "subprocess.Popen[str]"], node: Node
) -> None:
    script = start(
        "report(1); print('up', flush=True); sys.stdin.read(1); report(2); report(3); print('on')",
        node=node,
    )
    assert wait_for_line(script) == "up"
    node.close_state()
    assert end_of(script) == (0, "on\n")


def test_commits_are_granted_for_the_permitted_generation(
    start: Callable[..., "subprocess.Popen[str]"], node: Node
) -> None:
    assert end_of(start("print(may_commit())", node=node)) == (0, "True\n")
    node.permitted = GENERATION + 1
    assert end_of(start("print(may_commit())", node=node)) == (0, "False\n")


def test_no_commit_is_granted_with_a_lost_lease_or_without_a_node(
    start: Callable[..., "subprocess.Popen[str]"], node: Node
) -> None:
    node.announce(since_contact=601.0)
    assert end_of(start("print(may_commit())", node=node)) == (0, "False\n")
    variables = node.node_state.environment
    node.close_state()
    assert end_of(start("print(may_commit())", **variables)) == (0, "False\n")


def test_a_drain_is_a_request_to_stop(
    start: Callable[..., "subprocess.Popen[str]"], node: Node
) -> None:
    script = start(
        "print(should_stop(), flush=True)\nwhile not should_stop(): time.sleep(0.01)\nsys.exit(75)",
        node=node,
    )
    assert wait_for_line(script) == "False"
    until(lambda: node.node_state.has_guard(GENERATION))
    assert not node.node_state.has_stopped(GENERATION)
    node.announce(newest=GENERATION + 1, is_draining=True)
    assert end_of(script)[0] == 75
    until(lambda: node.node_state.has_stopped(GENERATION))


def test_a_worker_stuck_in_a_dead_collective_exits_when_requested(
    start: Callable[..., "subprocess.Popen[str]"], node: Node
) -> None:
    script = start(f"should_stop(); print('up', flush=True); {STUCK_IN_C}", node=node)
    assert wait_for_line(script) == "up"
    node.announce(newest=GENERATION + 1)
    script.send_signal(signal.SIGTERM)
    code, output = end_of(script)
    assert code == 143
    assert "the group is gone" in output


def test_a_newer_group_or_a_drain_alone_kills_no_worker(
    start: Callable[..., "subprocess.Popen[str]"], node: Node
) -> None:
    script = start(
        "should_stop(); print('up', flush=True); sys.stdin.read(1); time.sleep(0.5); print('on')",
        node=node,
    )
    assert wait_for_line(script) == "up"
    node.announce(newest=GENERATION + 1)
    time.sleep(0.3)
    node.announce(newest=GENERATION + 1, is_draining=True)
    script.send_signal(signal.SIGTERM)
    assert end_of(script) == (0, "on\n")


def test_a_worker_that_does_not_reach_its_boundary_exits_at_the_deadline(
    start: Callable[..., "subprocess.Popen[str]"], node: Node
) -> None:
    script = start(
        f"should_stop(); print('up', flush=True); {STUCK_IN_C}",
        node=node,
        EVERGRAD_STOP_SECONDS="0.3",
    )
    assert wait_for_line(script) == "up"
    script.send_signal(signal.SIGTERM)
    code, output = end_of(script)
    assert code == 143
    assert "asked to stop 0.3 s ago" in output


def test_a_worker_whose_node_has_exited_exits_when_requested(
    start: Callable[..., "subprocess.Popen[str]"], node: Node
) -> None:
    script = start(f"should_stop(); print('up', flush=True); {STUCK_IN_C}", node=node)
    assert wait_for_line(script) == "up"
    node.close_state()
    script.send_signal(signal.SIGTERM)
    assert end_of(script)[0] == 143


def test_a_worker_does_not_continue_with_a_lost_lease(
    start: Callable[..., "subprocess.Popen[str]"], node: Node
) -> None:
    script = start(f"should_stop(); print('up', flush=True); {STUCK_IN_C}", node=node)
    assert wait_for_line(script) == "up"
    node.announce(since_contact=601.0)
    code, output = end_of(script)
    assert code == LEASE_LOST != 75, "75 is the word of a run that stops as it was asked to"
    assert "lease" in output


def test_a_child_of_a_guarded_worker_is_killed_by_a_termination(
    start: Callable[..., "subprocess.Popen[str]"], node: Node
) -> None:
    code = (
        "should_stop(); ends = os.pipe(); child = os.fork()\n"
        "if child == 0: os.write(ends[1], b'!'); time.sleep(60); os._exit(1)\n"
        "os.read(ends[0], 1); os.kill(child, signal.SIGTERM)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), should_stop())"
    )
    assert end_of(start(code, node=node)) == (0, "-15 False\n")


def test_a_previously_installed_handler_is_still_called(
    start: Callable[..., "subprocess.Popen[str]"],
) -> None:
    code = (
        "signal.signal(signal.SIGTERM, lambda *_: print('mine')); should_stop(); "
        "os.kill(os.getpid(), signal.SIGTERM); print(should_stop())"
    )
    assert end_of(start(code)) == (0, "mine\nTrue\n")


def test_outside_the_main_thread_the_signal_handler_is_unchanged(
    start: Callable[..., "subprocess.Popen[str]"],
) -> None:
    code = (
        "import threading; t = threading.Thread(target=should_stop); t.start(); t.join(); "
        "print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    )
    code, output = end_of(start(code))
    assert code == 0
    assert "True\n" in output
    assert "outside the main thread" in output
