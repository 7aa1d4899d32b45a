"""The node's end of its state file and socket, through which workers of user scripts observe their node and
report their progress.

The state file contains the record of ``evergrad.node_state``. The Unix socket accepts the messages of
``evergrad.node_messages``.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from evergrad.node_messages import (
    CODEC,
    MAX_LINE_BYTES,
    CommitAnswer,
    CommitRequest,
    Guard,
    ScriptReport,
    Stopping,
)
from evergrad.node_state import (
    DIRECTORY_VARIABLE,
    GENERATION_VARIABLE,
    RECORD_NAME,
    SOCKET_NAME,
    NodeState,
    encode_node_state,
)

_log = logging.getLogger(__name__)
_MAX_SOCKET_PATH = 107
"""Longest path of a Unix socket on Linux."""
_MAX_CONNECTIONS = 256


class NodeStateServer:
    """The state file and the socket of one node, in ``directory``, which is created with access for this user
    only.

    ``on_report`` is called with each report as the worker sent it, with unchecked values: ``step`` and, if
    known, ``rank``, ``generation``, ``total_steps``, ``loss``, ``tokens_per_second`` and ``checkpoint_step``.
    ``may_commit`` returns whether a generation may commit. Everything runs on the loop that called ``start``.
    """

    def __init__(
        self,
        directory: Path,
        *,
        on_report: Callable[[dict[str, object]], None],
        may_commit: Callable[[int], Awaitable[bool]],
    ) -> None:
        self._directory = directory
        self._on_report = on_report
        self._may_commit = may_commit
        self._own_generation = 0
        self._server: asyncio.Server | None = None
        self._record = -1
        self._guarded: dict[asyncio.StreamWriter, int] = {}
        self._stopped_generation = 0
        self._connections: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Create the record and the socket.

        Raises OSError, or ValueError if the path is too long for a socket.
        """
        path = self._directory / SOCKET_NAME
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            raise ValueError(
                f"{path}: longer than {_MAX_SOCKET_PATH} bytes, a Unix socket's limit. Choose a "
                "shorter TMPDIR."
            )
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._record = os.open(
            self._directory / RECORD_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        self.announce(newest_generation=0, own_generation=0, contact=0.0, is_draining=False)
        self._server = await asyncio.start_unix_server(
            self._serve, path, limit=MAX_LINE_BYTES
        )

    async def close(self) -> None:
        """Close the connections and remove the files. Workers treat this as the end of their group."""
        if self._server is not None:
            server, self._server = self._server, None
            # asyncio mishandles a connection that it accepts in the same loop iteration as the close: it
            # fails to create a transport, and leaves the socket open while a worker waits for a reply. Allow
            # one iteration each for transport, protocol and the handler's start.
            loop = asyncio.get_running_loop()
            for listener in server.sockets:
                loop.remove_reader(listener.fileno())
            for _ in range(3):
                await asyncio.sleep(0)
            server.close()
        for writer in tuple(self._connections):
            writer.close()
        if self._record >= 0:
            os.close(self._record)
            self._record = -1
        for name in (RECORD_NAME, SOCKET_NAME):
            (self._directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._directory.rmdir()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for workers that are started now."""
        own = (
            {GENERATION_VARIABLE: str(self._own_generation)} if self._own_generation else {}
        )
        return {DIRECTORY_VARIABLE: str(self._directory), **own}

    def has_guard(self, generation: int) -> bool:
        """Return whether a running worker of ``generation`` stops in order when it is requested to."""
        return generation in self._guarded.values()

    def has_stopped(self, generation: int) -> bool:
        """Return whether a worker of ``generation`` has reported that it was requested to stop."""
        return self._stopped_generation == generation

    def announce(
        self,
        *,
        newest_generation: int,
        own_generation: int,
        contact: float,
        is_draining: bool,
        lease_seconds: float = 10.0,
    ) -> None:
        """Write the record.

        ``contact``: time of the last contact with the coordinator, in seconds of CLOCK_MONOTONIC.
        """
        self._own_generation = own_generation
        if self._record >= 0:
            state = NodeState(
                newest_generation, own_generation, contact, lease_seconds, is_draining
            )
            os.pwrite(self._record, encode_node_state(state), 0)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._connections.add(writer)
        try:
            if self._server is None:
                # The connection was accepted while the socket was being closed.
                return
            if len(self._connections) > _MAX_CONNECTIONS:
                _log.warning(
                    "more than %d connections of workers; one was closed", _MAX_CONNECTIONS
                )
                return
            while line := await reader.readline():
                match CODEC.decode(line):
                    case ScriptReport() as report:
                        # Do not check values here: the listener reads each value separately, so an invalid
                        # value does not lose the others.
                        self._on_report(report.values)
                    case Guard() as guard:
                        self._guarded[writer] = guard.generation
                    case Stopping() as stopping:
                        self._stopped_generation = max(
                            self._stopped_generation, stopping.generation
                        )
                    case CommitRequest() as request:
                        granted = await self._may_commit(request.generation)
                        writer.write(CODEC.encode(CommitAnswer(granted)))
                        await writer.drain()
                    case CommitAnswer():
                        raise ValueError("only a node sends an answer")
        except (OSError, ValueError, asyncio.CancelledError) as error:
            # ValueError: the line is too long or is not a message. The connection is closed, so that a sender
            # that waits for a reply notices. CancelledError: the loop ends.
            if isinstance(error, ValueError):
                _log.warning("a worker's message was not understood: %s", error)
        finally:
            self._connections.discard(writer)
            self._guarded.pop(writer, None)
            writer.close()
