"""A node's connection to its coordinator, with a server that sends exactly what the test requires."""

import asyncio
import json
import logging

import pytest
from patience import PATIENCE

from evergrad_common.codec import encode
from evergrad_coordinator.edge.client import CoordinatorClient
from evergrad_coordinator.protocol import End, Hello, Message, Plan, Welcome

HELLO = Hello("r", "0", "i0", "127.0.0.1", 1, "in-process", token="secret")
WELCOME = encode(Welcome(3, 10.0, 3.0))
END = encode(End(0, "complete"))
PLAN = Plan(4, hard=True, is_member=True, reason="node 1 lost")


def run_client(*answers: bytes) -> tuple[list[Message], int]:
    """Run a client until its end. Returns the messages that it delivered, and how often it connected.

    The server answers the first hello with ``answers``, and every later one with the end of the run: a
    client that gave up its first connection ends as well, and the count shows it.
    """
    received: list[Message] = []
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readline()
        writer.write(b"".join(answers) if num_connections == 1 else WELCOME + END)
        # The client closes the connection after it has read the end, or a message that it refuses.
        while await reader.read(65536):
            pass
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = CoordinatorClient(
            "127.0.0.1", port, hello=lambda: HELLO, on_message=received.append
        )
        async with server:
            await asyncio.wait_for(client.run(), PATIENCE)

    asyncio.run(run())
    return received, num_connections


def with_field(message: Message) -> bytes:
    """The line of a message to which a newer coordinator has added a field."""
    return json.dumps({**json.loads(encode(message)), "colour": "red"}).encode() + b"\n"


def test_unknown_messages_and_fields_of_a_newer_coordinator_keep_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="evergrad_coordinator"):
        received, num_connections = run_client(
            WELCOME,
            b'{"type":"pause","seconds":3}\n',
            with_field(PLAN),
            b'{"type":"pause","seconds":4}\n',
            b'{"type":"resume"}\n',
            END,
        )
    assert num_connections == 1
    assert received == [Welcome(3, 10.0, 3.0), PLAN, End(0, "complete")]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'pause'" in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b'{"type":"plan","generation":"4"}\n', id="a known message, mistyped"),
        pytest.param(b'{"type":3}\n', id="a type that is no text"),
        pytest.param(b"220 mail.example.org ESMTP\n", id="no JSON"),
    ],
)
def test_a_malformed_line_of_a_coordinator_ends_the_connection(line: bytes) -> None:
    received, num_connections = run_client(WELCOME, line, END)
    assert num_connections == 2
    assert received == [Welcome(3, 10.0, 3.0), Welcome(3, 10.0, 3.0), End(0, "complete")]


def test_a_server_that_starts_with_an_unknown_message_is_not_a_coordinator() -> None:
    received, num_connections = run_client(b'{"type":"banner"}\n', WELCOME, END)
    assert num_connections == 2
    assert received == [Welcome(3, 10.0, 3.0), End(0, "complete")]
