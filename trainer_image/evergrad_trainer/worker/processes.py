"""Start and end of the processes that a launcher, a node or a supervisor starts."""

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
    """Block the stop signals while this process forks. The child then calls ``unblock_stop_signals``.

    Until the child replaces its parent's handlers, a signal would be lost, or would reach the parent: the
    parent's event loop reads signal numbers from a socket that both processes share.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_stop_signals() -> None:
    """Handle stop signals with this process's own handlers, including signals that arrived since the fork."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends for any reason."""
    _ask_for_death_signal()
    # If the parent ended before the request, no signal arrives.
    if os.getppid() != parent:
        os._exit(int(ExitCode.INTERNAL))


def die_with_client() -> None:
    """End this process with the process that requested it from a fork server, or with the fork server."""
    _ask_for_death_signal()
    client = multiprocessing.parent_process()
    if client is None:
        return

    def die_after_client() -> None:
        # The kernel's signal depends on the fork server, which continues to run. A pipe shows the client's
        # end.
        multiprocessing.connection.wait([client.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die_after_client, name="evergrad-client", daemon=True).start()


def _ask_for_death_signal() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run ``main``, and end the process with the exit code that it returns."""
    code = int(ExitCode.INTERNAL)
    try:
        code = main()
    except BaseException:  # noqa: BLE001 - the end of a process: whatever it was is printed and becomes an exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Do not use sys.exit: after a peer has failed, the interpreter's shutdown can wait for threads that
        # are stuck in a dead collective.
        os._exit(code)
