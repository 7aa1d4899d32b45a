"""The webhook's port within its bounds: slow, idle and broken clients, and requests that are too large."""

import asyncio
import json
import logging
import ssl
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest
from aiohttp.http_parser import DeflateBuffer
from webhook_samples import NAMES, Store, make_object, make_webhook, post

from evergrad_operator.core.admission import MAX_VALUES, review
from evergrad_operator.edge.logs import set_up_logging
from evergrad_operator.edge.webhook import request_limits
from evergrad_operator.edge.webhook import server as webhook
from evergrad_operator.edge.webhook.request_limits import MAX_REQUEST_BYTES
from evergrad_operator.edge.webhook.server import Webhook

REVIEW = json.dumps({"request": {"uid": "r", "object": make_object()}}).encode()
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Port:
    """A running webhook, and clients of it that are not an API server."""

    def __init__(self, served: Webhook, authority: bytes) -> None:
        self.served = served
        self.authority = authority
        self._clients: list[Client] = []

    async def post(self, body: bytes = REVIEW) -> tuple[int, Any]:
        return await post(self.served, self.authority, body)

    async def connect(self, *, has_tls: bool = True) -> Client:
        context = ssl.create_default_context(cadata=self.authority.decode())
        client = await asyncio.open_connection(
            "127.0.0.1",
            self.served.port,
            ssl=context if has_tls else None,
            server_hostname=NAMES[0] if has_tls else None,
        )
        self._clients.append(client)
        return client

    async def begin(self, *, size: int, sent: int | bytes = 1, headers: str = "") -> Client:
        """Begin a request of ``size`` bytes, and send ``sent``: bytes, or a number of them."""
        client = await self.connect()
        start = "POST /validate HTTP/1.1\r\nHost: x\r\n"
        head = f"{start}{headers}Content-Length: {size}\r\n\r\n"
        client[1].write(head.encode() + (b" " * sent if isinstance(sent, int) else sent))
        await client[1].drain()
        return client

    def break_off(self) -> None:
        for _, writer in self._clients:
            writer.transport.abort()


@asynccontextmanager
async def serve() -> AsyncIterator[Port]:
    store = Store()
    served = make_webhook(store)
    await served.look()
    port = Port(served, store.trusted)
    try:
        yield port
    finally:
        port.break_off()
        await served.close()


def hold_checks(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Pause checks. The first event is set after a check has started; set the second event to continue."""
    begun, goes_on = threading.Event(), threading.Event()

    def wait(*arguments: Any) -> dict[str, Any]:
        begun.set()
        assert goes_on.wait(30)
        return review(*arguments)

    monkeypatch.setattr(webhook, "review", wait)
    return begun, goes_on


@contextmanager
def watch_inflation() -> Iterator[list[int]]:
    """Collect the sizes of the data that aiohttp inflates."""
    sizes: list[int] = []
    feed_data = DeflateBuffer.feed_data

    def feed(self: Any, chunk: bytes, size: int) -> bool:
        sizes.append(size)
        return feed_data(self, chunk, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeflateBuffer, "feed_data", feed)
        yield sizes


def make_request(body: bytes, path: str = "/validate") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def read_rest(client: Client) -> str:
    """Return the data until the server closes the connection."""
    return (await client[0].read()).decode()


async def read_status(client: Client) -> int:
    line = await client[0].readline()
    return int(line.split()[1])


def test_requests_that_never_complete_are_closed_oldest_first_for_the_api_server() -> None:
    async def run() -> None:
        async with serve() as port:
            size = request_limits.MAX_REQUEST_BYTES
            slow = [await port.begin(size=size) for _ in range(6)]
            assert await read_status(slow[0]) == 503
            assert (await port.post())[0] == 200
            assert await read_status(slow[1]) == 503
            # The other requests have free slots, and can still end.
            for reader, writer in slow[2:]:
                writer.write(b" " * (size - 1))
                assert await read_status((reader, writer)) == 400

    asyncio.run(run())


def test_a_body_that_arrives_too_slowly_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_limits, "_READ_SECONDS", 0.05)

    async def run() -> None:
        async with serve() as port:
            assert await read_status(await port.begin(size=1000)) == 503

    asyncio.run(run())


def test_a_body_above_the_size_limit_is_refused_before_it_is_read() -> None:
    async def run() -> None:
        async with serve() as port:
            client = await port.begin(size=request_limits.MAX_REQUEST_BYTES + 1, sent=0)
            assert await read_status(client) == 413

    asyncio.run(run())


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "unknown"])
def test_a_compressed_body_is_refused_and_never_inflated(encoding: str) -> None:
    async def run() -> None:
        async with serve() as port:
            # The end of the body is missing, so that the received part is held.
            packer = zlib.compressobj(wbits=31)
            packed = packer.compress(b" " * MAX_REQUEST_BYTES)
            packed += packer.flush(zlib.Z_SYNC_FLUSH)
            client = await port.begin(
                size=len(packed) + 1,
                sent=packed,
                headers=f"Content-Encoding: {encoding}\r\n",
            )
            assert await read_status(client) == 415
            await client[0].readuntil(b"without Content-Encoding")
            # The API server may name the identity encoding.
            client = await port.begin(
                size=len(REVIEW), sent=REVIEW, headers="Content-Encoding: Identity\r\n"
            )
            assert await read_status(client) == 200

    with watch_inflation() as inflated:
        asyncio.run(run())
    assert inflated == []


def test_pipelined_requests_are_not_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, goes_on = hold_checks(monkeypatch)

    async def run() -> None:
        async with serve() as port:
            client = await port.begin(size=len(REVIEW), sent=REVIEW)
            assert await asyncio.to_thread(begun.wait, 30)
            client[1].write(make_request(REVIEW) * 5)
            await client[1].drain()
            await asyncio.sleep(0.2)
            goes_on.set()
            assert await read_status(client) == 200
            text = await read_rest(client)
            assert "Connection: close" in text and text.count("HTTP/1.1") == 0

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/validate", "/other"])
def test_each_connection_gets_one_response(path: str) -> None:
    # A client that never reads its responses would otherwise leave its further requests to the server.
    async def run() -> None:
        async with serve() as port:
            client = await port.connect()
            client[1].write(make_request(b"{}", path) * 3)
            answer = await read_rest(client)
            assert answer.count("HTTP/1.1") == 1 and "Connection: close" in answer

    asyncio.run(run())


@pytest.mark.parametrize("has_tls", [True, False])
def test_idle_connections_are_closed_for_the_api_server(
    monkeypatch: pytest.MonkeyPatch, has_tls: bool
) -> None:
    monkeypatch.setattr(request_limits, "MAX_CONNECTIONS", 3)

    async def run() -> None:
        async with serve() as port:
            idle = [await port.connect(has_tls=has_tls) for _ in range(5)]
            assert (await port.post())[0] == 200
            for reader, _ in idle[:3]:
                # A connection that is reset is closed, too.
                with suppress(ConnectionResetError):
                    assert await reader.read() == b""
            assert not idle[4][0].at_eof()

    asyncio.run(run())


def test_a_connection_whose_request_is_being_checked_is_not_closed_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_limits, "MAX_CONNECTIONS", 1)
    begun, goes_on = hold_checks(monkeypatch)

    async def run() -> None:
        async with serve() as port:
            first = asyncio.create_task(port.post())
            await asyncio.to_thread(begun.wait, 30)
            second = asyncio.create_task(port.post())
            await asyncio.sleep(0.1)
            goes_on.set()
            assert [(await one)[0] for one in (first, second)] == [200, 200]

    asyncio.run(run())


def test_a_request_is_refused_if_the_requests_being_checked_leave_no_capacity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_limits, "_BODY_ROOM", len(REVIEW) + 10)
    begun, goes_on = hold_checks(monkeypatch)

    async def run() -> None:
        async with serve() as port:
            first = asyncio.create_task(port.post())
            await asyncio.to_thread(begun.wait, 30)
            assert await port.post() == (503, "too many requests are being checked\n")
            goes_on.set()
            assert (await first)[0] == 200
            # Its slot is free again.
            assert (await port.post())[0] == 200

    asyncio.run(run())


def test_a_client_that_disconnects_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serve() as port:
            await port.begin(size=100_000, sent=50_000)
            await port.connect(has_tls=False)
            assert (await port.post())[0] == 200
            port.break_off()
            assert (await port.post())[0] == 200
            await asyncio.sleep(0.1)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert caplog.text == ""


@contextmanager
def logging_as_the_operator_does() -> Iterator[None]:
    root, server = logging.getLogger(), logging.getLogger("aiohttp.server")
    before = (root.handlers[:], root.level, server.filters[:])
    # The handlers of pytest are removed: they would show records that the operator's filter drops.
    root.handlers = []
    try:
        set_up_logging("info", "text")
        yield
    finally:
        root.handlers, _, server.filters = before
        root.setLevel(before[1])


@pytest.mark.parametrize(
    ("request_bytes", "named"),
    [
        (b"POST /validate HTTP/1.1\r\nx: " + b"y" * 20_000 + b"\r\n\r\n", "8190"),
        (b"POST /validate HTTP/1.1\r\nHost: x\r\nno header\r\n\r\n", "Invalid header"),
        (b"POST /validate HTTP/1.1\r\nContent-Length: -1\r\n\r\n", "Content-Length"),
    ],
    ids=["long-line", "no-header", "negative-length"],
)
def test_a_request_that_is_not_http_is_answered_and_not_logged(
    request_bytes: bytes, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> str:
        async with serve() as port:
            client = await port.connect()
            client[1].write(request_bytes)
            return await read_rest(client)

    with logging_as_the_operator_does():
        answer = asyncio.run(run())
        logging.getLogger("aiohttp.server").error("anything else")
    assert "400 Bad Request" in answer.splitlines()[0]
    assert named in answer
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    assert "anything else" in printed


@pytest.mark.parametrize("section", ["object", "oldObject"])
def test_more_values_than_the_limit_are_denied_with_a_message(section: str) -> None:
    async def run() -> None:
        async with serve() as port:
            request: dict[str, Any] = {"uid": "r-3", "object": make_object()}
            request[section] = {"spec": {"training": {"x": [{}] * MAX_VALUES}}}
            status, answer = await port.post(json.dumps({"request": request}).encode())
            response = answer["response"]
            assert (status, response["uid"], response["allowed"]) == (200, "r-3", False)
            assert response["status"]["message"].startswith("spec: has more than 40000")
            # Such an object can still be deleted.
            gone = {"deletionTimestamp": "2030-01-01T00:00:00Z"}
            request[section] = {"metadata": gone, "spec": {"x": [1] * MAX_VALUES}}
            request["object"] = {**request["object"], "metadata": gone}
            _, answer = await port.post(json.dumps({"request": request}).encode())
            assert answer["response"] == {"uid": "r-3", "allowed": True}

    asyncio.run(run())
