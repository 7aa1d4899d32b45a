"""A worker by each of the three ways to start one: its output reaches its node, and it does not
outlive it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE

from bed.process_state import is_alive

NODE = """\
import os, sys, time
from evergrad_trainer.node.workers import WorkerOrder, start_worker

def work(channel, heartbeat):
    print(os.getpid(), os.environ["RANK"], channel.receive(None), flush=True)
    time.sleep(600)
    return 0

if __name__ == "__main__":
    from evergrad_trainer.worker.channel import WorkerPing

    worker = start_worker(work, WorkerOrder(0, 1, sys.argv[1], "both", "0.0"), variables={"RANK": "3"})
    worker.channel.send(WorkerPing())
    with os.fdopen(worker.output) as output:
        print(output.readline(), end="", flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_communicates_with_its_node_and_ends_with_it(
    method: str, tmp_path: Path
) -> None:
    path = tmp_path / "node.py"
    path.write_text(NODE)
    node = subprocess.Popen(
        [sys.executable, str(path), method], stdout=subprocess.PIPE, text=True
    )
    try:
        assert node.stdout is not None
        worker, rank, record = node.stdout.readline().split()
        assert (rank, record) == ("3", "WorkerPing()")
        assert is_alive(int(worker))
    finally:
        node.kill()
        node.communicate()
    deadline = time.monotonic() + PATIENCE
    while is_alive(int(worker)):
        if time.monotonic() > deadline:
            os.kill(int(worker), signal.SIGKILL)
            raise AssertionError("the worker has outlived its node")
        time.sleep(0.01)


EARLY_SIGNAL = """\
import os, signal

# First of all hooks, also of asyncio's: the child is sent a signal before any of its own code has run.
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))

import asyncio
from evergrad_trainer.node.workers import WorkerOrder, start_worker
from evergrad_trainer.worker.channel import WorkerPing

def work(channel, heartbeat):
    channel.send(WorkerPing())
    return 0

async def main():
    asked = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.append, "the node")
    worker = start_worker(work, WorkerOrder(0, 1, "fork", "nothing", "0.0"), variables={})
    await asyncio.to_thread(worker.channel.receive)
    for _ in range(8):
        await asyncio.sleep(0)
    worker.process.join()
    print(asked, signal.pthread_sigmask(signal.SIG_BLOCK, ()))

asyncio.run(main())
"""


def test_a_signal_to_a_worker_that_was_just_forked_does_not_reach_its_node(
    tmp_path: Path,
) -> None:
    path = tmp_path / "node.py"
    path.write_text(EARLY_SIGNAL)
    ended = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert ended.stdout == "[] set()\n", ended.stderr


WITH_CHILDREN = """\
import asyncio, os, time
from types import SimpleNamespace

from evergrad_trainer.node.processes import WorkerProcesses
from evergrad_trainer.node.tasks import TaskWatch
from evergrad_trainer.node.workers import WorkerOrder, start_worker
from evergrad_trainer.worker.channel import WorkerPing

def work(channel, heartbeat):
    # A process that loads data: it lives on when its parent is killed.
    if os.fork() == 0:
        time.sleep(600)
    channel.send(WorkerPing())
    time.sleep(600)
    return 0

async def main():
    ended = asyncio.get_running_loop().create_future()
    def fail(where, error):
        ended.set_exception(error)
    group = SimpleNamespace(
        hear=lambda worker, record: worker.kill(),
        end=lambda worker, exit_code: ended.set_result(exit_code),
    )
    processes = WorkerProcesses(SimpleNamespace(), TaskWatch(fail))
    worker = start_worker(work, WorkerOrder(0, 1, "fork", "nothing", "0.0"), variables={})
    processes.watch(worker, group)
    print(await asyncio.wait_for(ended, 60))

asyncio.run(main())
"""


def test_the_end_of_a_worker_is_detected_although_its_children_live(tmp_path: Path) -> None:
    path = tmp_path / "node.py"
    path.write_text(WITH_CHILDREN)
    ended = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.stdout == "-9\n", ended.stderr
