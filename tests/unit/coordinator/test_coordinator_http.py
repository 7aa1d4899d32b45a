"""The coordinator's HTTP server, with requests of unknown clients."""

import asyncio
import time
from typing import Any

import pytest
from patience import PATIENCE
from simulated_cluster import make_settings

from evergrad_coordinator.edge.http import StatusServer
from evergrad_coordinator.edge.journal import MemoryStore
from evergrad_coordinator.edge.server import Server
from evergrad_coordinator.rules.group import new_group


def ask(request: bytes) -> tuple[bytes, int]:
    """Send one request. Returns the response, and the number of internal errors that the coordinator has
    counted."""

    async def run() -> tuple[bytes, int]:
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, error: errors.append(error)
        )
        group = new_group(make_settings(), generation=0, now=time.monotonic())
        status = StatusServer(Server(group, MemoryStore(), log=lambda *_, **__: None))
        port = await status.listen("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        try:
            answer = await asyncio.wait_for(reader.read(), PATIENCE)
        except ConnectionError:
            answer = b""
        writer.close()
        status.close()
        # The task of a connection ends after its response was read.
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait_for(task, PATIENCE)
        return answer, len(errors)

    return asyncio.run(run())


def test_an_open_endpoint_is_answered_without_the_token() -> None:
    answer, num_errors = ask(b"GET /healthz HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert num_errors == 0


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(b"9" * 5000, id="more digits than Python reads"),
        pytest.param(b"999999999", id="too long"),
        pytest.param(b"-1", id="negative"),
        pytest.param(b"\xb2", id="a digit that is no number"),
    ],
)
def test_an_invalid_content_length_ends_only_its_connection(
    length: bytes,
) -> None:
    request = b"POST /bounds HTTP/1.1\r\nContent-Length: " + length + b"\r\n\r\n"
    assert ask(request) == (b"", 0)
