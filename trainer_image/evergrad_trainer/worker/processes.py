"""Beginning and end of every process that a launcher, a node or a supervisor starts."""

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from evergrad_coordinator.contract import ExitCode

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Be killed when the process that started this one ends, however it ends."""
    _ask_for_death_signal()
    # The parent may have ended before the request: then no signal comes.
    if os.getppid() != parent:
        os._exit(int(ExitCode.INTERNAL))


def die_with_client() -> None:
    """The same where a fork server is between: be killed when the process that had it start this one ends, or
    the server."""
    _ask_for_death_signal()
    client = multiprocessing.parent_process()
    if client is not None:
        threading.Thread(
            target=_die_after, args=(client.sentinel,), name="evergrad-client", daemon=True
        ).start()


def _die_after(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _ask_for_death_signal() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Do all that this process is for, and end it with the exit code that ``main`` returns."""
    code = int(ExitCode.INTERNAL)
    try:
        code = main()
    except BaseException:  # noqa: BLE001 - the end of a process: whatever it was is printed and becomes an exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: after a lost peer the interpreter's own end can wait for threads stuck in a dead
        # collective.
        os._exit(code)
