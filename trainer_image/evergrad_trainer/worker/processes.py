"""Beginning and end of every process that a launcher, a node or a supervisor starts."""

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from evergrad_common.contract import ExitCode

_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block the signals that ask for a stop while this process forks; the child calls unblock_stop_signals.

    A child has its parent's handlers until it has replaced them. A signal that was sent before would be lost,
    or would reach the parent, whose event loop reads the numbers of signals from a socket that both have.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_stop_signals() -> None:
    """Take signals from here on, and those that have come since the fork, by this process's own handlers."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


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
    if client is None:
        return

    def die_after_client() -> None:
        # The kernel's signal is bound to the server, which lives on: the client's end is seen by its pipe.
        multiprocessing.connection.wait([client.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die_after_client, name="evergrad-client", daemon=True).start()


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
        # Not sys.exit: after a peer has failed the interpreter's own end can wait for threads stuck in a dead
        # collective.
        os._exit(code)
