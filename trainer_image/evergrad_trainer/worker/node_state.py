"""The node's end of its state file and socket: what workers of user scripts see of their node, and how they
report where they are.

One way is the record of ``evergrad.node_state``; the other a Unix socket that takes the messages of
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
    """The state file and the socket of one node, in ``directory`` (created, and readable by this user only).

    ``on_report`` is called with each report as the worker sent it, values unchecked: ``step`` and, where
    known, ``rank``, ``generation``, ``total_steps``, ``loss``, ``tokens_per_second``, ``checkpoint_step``.
    ``may_commit`` answers for a generation. Everything runs on the loop that called ``start``.
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

        Raises OSError; ValueError where the path is too long for a socket.
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
        """Remove the file: its workers take that for the end of their group."""
        if self._server is not None:
            server, self._server = self._server, None
            # asyncio loses a connection that it accepted in the same turn of the loop as the close: it then
            # fails to make a transport for it, and leaves the socket open, with a worker at its other end
            # that waits for an answer. One turn each for transport, protocol and the handler's first words.
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
        """Variables for workers that are started now."""
        own = (
            {GENERATION_VARIABLE: str(self._own_generation)} if self._own_generation else {}
        )
        return {DIRECTORY_VARIABLE: str(self._directory), **own}

    def has_guard(self, generation: int) -> bool:
        """Whether a worker of ``generation`` lives that stops in order when it is asked to."""
        return generation in self._guarded.values()

    def has_stopped(self, generation: int) -> bool:
        """Whether a worker of ``generation`` was told to stop, and knows."""
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

        ``contact``: when the coordinator was last heard, in seconds of CLOCK_MONOTONIC.
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
                # Accepted while the socket was being closed.
                return
            if len(self._connections) > _MAX_CONNECTIONS:
                _log.warning(
                    "more than %d connections of workers; one was closed", _MAX_CONNECTIONS
                )
                return
            while line := await reader.readline():
                match CODEC.decode(line):
                    case ScriptReport() as report:
                        # Its values are read by the listener: one that is no number must not cost the others.
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
            # ValueError is a line beyond the limit, or no message: the sender, which may wait for an answer,
            # learns of it by the end of its connection. The loop's end cancels us: nothing is left to do.
            if isinstance(error, ValueError):
                _log.warning("a worker's message was not understood: %s", error)
        finally:
            self._connections.discard(writer)
            self._guarded.pop(writer, None)
            writer.close()
