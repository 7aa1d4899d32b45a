"""Stacks of a process, read from outside, also if its threads are deadlocked."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from evergrad_coordinator.edge.stacks import (
    StackProcess,
    find_processes,
    read_stacks_of,
    show_stacks,
)

DEADLOCK = """
import ctypes, os, sys, threading
from evergrad_coordinator.edge.stacks import register_stacks

register_stacks("rank 3")
if os.fork() == 0:
    register_stacks("helper")

def hold_the_gil():
    print("here", flush=True)
    # A call that keeps the GIL and never returns: no other Python code runs in this process any more.
    ctypes.PyDLL(None).pause()

threading.Thread(target=hold_the_gil).start()
"""


@contextmanager
def running(program: str, *, lines: int) -> Iterator[subprocess.Popen[str]]:
    """A program that has printed this number of lines."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        for _ in range(lines):
            process.stdout.readline()
        yield process
    finally:
        for one in find_processes(process.pid):
            subprocess.run(["kill", "-9", str(one.pid)], check=True)
        process.kill()
        process.communicate()


def test_a_process_with_a_permanently_held_gil_shows_its_stacks() -> None:
    with running(DEADLOCK, lines=2) as process:
        found = {one.label: one for one in find_processes(process.pid)}
        assert set(found) == {"rank 3", "helper"}
        assert found["rank 3"].pid == process.pid
        for one in found.values():
            for _ in range(2):
                text = show_stacks(one)
                assert text.startswith(f"==> {one.label}, ")
                assert "in hold_the_gil" in text, text
                assert "kernel function in which it waits" in text
        assert process.poll() is None, "it goes on"
        both = read_stacks_of(process.pid)
        assert both.count("in hold_the_gil") == 2


def test_a_process_without_a_handler_is_not_ended_by_a_stack_request() -> None:
    program = "print(1, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert find_processes(process.pid) == []
        assert "no Python stacks" in read_stacks_of(process.pid)
        forged = StackProcess(process.pid, 1, "python", "", f"/proc/{process.pid}/fd/0")
        show_stacks(forged)
        assert process.poll() is None
    finally:
        process.communicate(b"\n")
    assert process.returncode == 0
