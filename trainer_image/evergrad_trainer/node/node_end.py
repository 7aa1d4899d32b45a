"""Decides how a node ends: its exit code, and the cause that it writes for Kubernetes."""

import asyncio
import socket
import sys

from evergrad_common.contract import ErrorKind, ExitCode
from evergrad_coordinator.protocol import Broken, End
from evergrad_manifest.errors import EvergradError
from evergrad_trainer.base.host_errors import is_host_trouble, trouble_of
from evergrad_trainer.node.failures import kind_of, write_termination_message
from evergrad_trainer.node.settings import NodeSettings


class NodeEnd:
    """The exit code and the cause with which this node ends.

    The first exit code and the newest cause count.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self.exit_code: int | None = None
        self.is_hurried = False
        """Whether to kill the workers and exit without waiting, because no time is left or the supervisor
        cannot control them any more."""
        self.over = asyncio.Event()
        self.cause = ""
        self._kind = ErrorKind.INTERNAL
        self._trouble = ""

    def note(self, kind: ErrorKind, text: str, trouble: str = "") -> None:
        """Record the reason that this node reports when it ends.

        ``trouble`` is an item of ``causes.TROUBLES`` if a volume is the reason, and empty otherwise.
        """
        self._kind, self.cause, self._trouble = kind, text, trouble

    def note_error(self, where: str, error: BaseException) -> None:
        """Record an error of the supervisor itself, unless the node already ends for another reason."""
        if self.exit_code is None:
            is_known = isinstance(error, EvergradError)
            kind = ErrorKind.ENVIRONMENT if is_host_trouble(error) else ErrorKind.INTERNAL
            text = str(error) if is_known else f"{type(error).__name__}: {error}"
            where = f"node {self._settings.node}: the supervisor's {where} failed"
            kind = error.kind if isinstance(error, EvergradError) else kind
            is_of_host = kind is ErrorKind.ENVIRONMENT
            self.note(kind, f"{where}: {text}", trouble_of(error) if is_of_host else "")

    def note_broken(self, message: Broken) -> str:
        """Record why a group of this node broke, and return a text for the log."""
        # A worker that was in no group yet has no rank.
        rank = f"rank {message.rank}" if message.rank >= 0 else ""
        where = ", ".join(filter(None, (f"node {self._settings.node}", rank)))
        self.note(kind_of(message), f"{where}: {message.message}", message.trouble)
        who = f"{rank or 'a worker'} " if message.exit_code is not None else ""
        return f"{who}{message.message}"

    def note_host(self, kind: ErrorKind, text: str, trouble: str = "") -> None:
        """Record a problem that may not occur on another host."""
        where = f"node {self._settings.node} on host {socket.gethostname()}"
        self.note(kind, f"{where}{text}", trouble)

    def note_outcome(self, message: End) -> None:
        """Record the outcome of the run if it failed; such a failure is not a problem of this host."""
        # A node keeps its own cause if it has one: the coordinator's message describes the whole run.
        if message.message and message.exit_code != ExitCode.DONE:
            is_input = message.exit_code == ExitCode.USER_ERROR
            kind = ErrorKind.INPUT if is_input else ErrorKind.INTERNAL
            self.note(kind, self.cause or message.message, self._trouble)
            print(message.message, file=sys.stderr, flush=True)

    def write(self) -> int:
        """Write the cause to the termination log that Kubernetes reads, and return the exit code."""
        code = int(ExitCode.INTERNAL) if self.exit_code is None else self.exit_code
        if code not in (ExitCode.DONE, ExitCode.STOPPED_SAVED):
            write_termination_message(
                self._settings.termination_log, self._kind, self.cause, self._trouble
            )
        return code
