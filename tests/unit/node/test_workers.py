"""A worker by each of the three ways to start one: its output reaches its node, and it does not
outlive it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_state import is_alive

SECONDS = 100.0
NODE = """\
import os, sys, time
from evergrad_trainer.node.workers import WorkerOrder, start_worker

def work(channel, heartbeat):
    print(os.getpid(), os.environ["RANK"], channel.receive(None), flush=True)
    time.sleep(600)
    return 0

if __name__ == "__main__":
    from evergrad_trainer.worker.channel import Ping

    worker = start_worker(work, WorkerOrder(0, 1, sys.argv[1], "both", "0.0"), variables={"RANK": "3"})
    worker.channel.send(Ping())
    with os.fdopen(worker.output) as output:
        print(output.readline(), end="", flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_speaks_with_its_node_and_ends_with_it(method: str, tmp_path: Path) -> None:
    path = tmp_path / "node.py"
    path.write_text(NODE)
    node = subprocess.Popen(
        [sys.executable, str(path), method], stdout=subprocess.PIPE, text=True
    )
    try:
        assert node.stdout is not None
        worker, rank, record = node.stdout.readline().split()
        assert (rank, record) == ("3", "Ping()")
        assert is_alive(int(worker))
    finally:
        node.kill()
        node.communicate()
    deadline = time.monotonic() + SECONDS
    while is_alive(int(worker)):
        if time.monotonic() > deadline:
            os.kill(int(worker), signal.SIGKILL)
            raise AssertionError("the worker has outlived its node")
        time.sleep(0.01)
