"""Processes that tests look at: which of them can still do something."""

import subprocess
import sys
from pathlib import Path

from bed.process_state import is_alive

# The first thread alone ends, as one does first behind a SIGKILL: exit, and not exit_group.
FIRST_THREAD_ENDS = """
import ctypes, platform, threading, time
threading.Thread(target=lambda: (print("there", flush=True), time.sleep(1000))).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


def test_a_process_is_alive_until_its_last_thread_has_ended() -> None:
    command = [sys.executable, "-c", FIRST_THREAD_ENDS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "there\n"
            stat = Path(f"/proc/{process.pid}/stat")
            while stat.read_text().rpartition(")")[2].split()[0] != "Z":
                pass
            assert is_alive(process.pid)
        finally:
            process.kill()
        # Its output ends with its last thread; it has not been reaped yet.
        assert process.stdout.read() == ""
        while is_alive(process.pid):
            pass
        assert process.returncode is None
    assert not is_alive(process.pid)
