"""How a node's part in the run ends: its exit code, and the cause that it leaves for Kubernetes."""

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
    """How this node's part in the run ends: the first exit code counts, and the newest cause."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self.exit_code: int | None = None
        self.is_hurried = False
        """Whether workers are killed, and nothing lingers, since there is no time or nobody who could look
        after them."""
        self.over = asyncio.Event()
        self.cause = ""
        self._kind = ErrorKind.INTERNAL
        self._trouble = ""

    def note(self, kind: ErrorKind, text: str, trouble: str = "") -> None:
        """Remember what the trouble is: the reason that this node gives when it ends. ``trouble``: one of
        causes.TROUBLES, of a volume."""
        self._kind, self.cause, self._trouble = kind, text, trouble

    def note_error(self, where: str, error: BaseException) -> None:
        """Remember an error of the supervisor itself, unless the node ends for another reason already."""
        if self.exit_code is None:
            is_known = isinstance(error, EvergradError)
            kind = ErrorKind.ENVIRONMENT if is_host_trouble(error) else ErrorKind.INTERNAL
            text = str(error) if is_known else f"{type(error).__name__}: {error}"
            where = f"node {self._settings.node}: the supervisor's {where} failed"
            kind = error.kind if isinstance(error, EvergradError) else kind
            is_of_host = kind is ErrorKind.ENVIRONMENT
            self.note(kind, f"{where}: {text}", trouble_of(error) if is_of_host else "")

    def note_broken(self, message: Broken) -> str:
        """Remember what broke a group of this node; returns words for the log."""
        # A worker that was in no group yet has no rank.
        rank = f"rank {message.rank}" if message.rank >= 0 else ""
        where = ", ".join(filter(None, (f"node {self._settings.node}", rank)))
        self.note(kind_of(message), f"{where}: {message.message}", message.trouble)
        who = f"{rank or 'a worker'} " if message.exit_code is not None else ""
        return f"{who}{message.message}"

    def note_host(self, kind: ErrorKind, text: str, trouble: str = "") -> None:
        """Remember trouble that another host may not have."""
        where = f"node {self._settings.node} on host {socket.gethostname()}"
        self.note(kind, f"{where}{text}", trouble)

    def note_outcome(self, message: End) -> None:
        """Remember the outcome of the run where it is not a good one: it is no trouble of this host."""
        # A node that has a cause of its own keeps it: the coordinator's words are about the whole run.
        if message.message and message.exit_code != ExitCode.DONE:
            is_input = message.exit_code == ExitCode.USER_ERROR
            kind = ErrorKind.INPUT if is_input else ErrorKind.INTERNAL
            self.note(kind, self.cause or message.message, self._trouble)
            print(message.message, file=sys.stderr, flush=True)

    def write(self) -> int:
        """Leave the cause where Kubernetes looks for it; the exit code."""
        code = int(ExitCode.INTERNAL) if self.exit_code is None else self.exit_code
        if code not in (ExitCode.DONE, ExitCode.STOPPED_SAVED):
            write_termination_message(
                self._settings.termination_log, self._kind, self.cause, self._trouble
            )
        return code
