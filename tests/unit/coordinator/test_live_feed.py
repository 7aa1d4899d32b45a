"""The page and its events over HTTP: who may read them, the limits, and connections that do not read."""

import asyncio
import base64
import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from patience import PATIENCE
from simulated_cluster import Cluster, make_settings

from evergrad_common.codec import encode
from evergrad_common.metrics.columns import MOST_DECLARED
from evergrad_coordinator.edge import live_feed
from evergrad_coordinator.edge.http import MAX_CONNECTIONS, StatusServer
from evergrad_coordinator.edge.journal import MemoryStore
from evergrad_coordinator.edge.live_feed import MOST_PAGES, LiveFeed, pause_after
from evergrad_coordinator.edge.page_files import build_page, is_own_request
from evergrad_coordinator.edge.server import Server
from evergrad_coordinator.protocol import EvaluationReport, Progress, decode_from_node
from evergrad_coordinator.rules.events import on_message
from evergrad_coordinator.rules.group import new_group
from evergrad_coordinator.rules.history import RunHistory
from evergrad_coordinator.rules.state import MOST_SETS

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclasses.dataclass
class Place:
    """A coordinator's HTTP server in the loop of the test."""

    feed: LiveFeed
    server: Server
    port: int

    async def ask(self, path: str, *headers: str) -> Connection:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        lines = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", *headers, "", ""]
        writer.write("\r\n".join(lines).encode())
        return reader, writer

    async def status(self, path: str, *headers: str) -> int:
        reader, writer = await self.ask(path, *headers)
        line = await asyncio.wait_for(reader.readline(), PATIENCE)
        writer.close()
        return int(line.split()[1])


def serving(
    scenario: Callable[[Place], Awaitable[None]], *, host: str = "127.0.0.1"
) -> None:
    async def run() -> None:
        group = new_group(make_settings(token=TOKEN), generation=0, now=time.monotonic())
        feed, server = LiveFeed(), Server(group, MemoryStore(), log=lambda *_, **__: None)
        status = StatusServer(server, feed)
        place = Place(feed, server, await status.listen(host, 0))
        try:
            await scenario(place)
        finally:
            status.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
                await asyncio.wait([task])

    asyncio.run(run())


async def read_update(reader: asyncio.StreamReader) -> dict[str, Any]:
    line = await asyncio.wait_for(reader.readuntil(b"data: "), PATIENCE)
    text = await asyncio.wait_for(reader.readline(), PATIENCE)
    assert b"event: update" in line
    found: dict[str, Any] = json.loads(text)
    return found


TOKEN = "a-secret-of-this-test"
BEARER = f"Authorization: Bearer {TOKEN}"


def test_a_local_browser_needs_no_token_on_loopback() -> None:
    async def scenario(place: Place) -> None:
        assert await place.status("/") == 200
        assert await place.status("/live") == 200
        # All other requests are served as before.
        assert await place.status("/status") == 401
        # Another site may make a browser send a request: cross-site, or through its own name that resolves to
        # this host.
        assert await place.status("/live", "Sec-Fetch-Site: cross-site") == 401
        reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
        writer.write(b"GET /live HTTP/1.1\r\nHost: evil.example:80\r\n\r\n")
        assert b"401" in await asyncio.wait_for(reader.readline(), PATIENCE)
        writer.close()

    serving(scenario)


def test_on_other_addresses_the_page_is_open_and_reveals_nothing_of_the_run() -> None:
    async def scenario(place: Place) -> None:
        place.server.group.log("go", nodes=3)
        reader, writer = await place.ask("/")
        answer = (await asyncio.wait_for(reader.read(), PATIENCE)).decode()
        writer.close()
        assert answer.startswith("HTTP/1.1 200 OK")
        assert 'data-token="needed"' in answer
        assert TOKEN not in answer
        assert await place.status("/live") == 401
        assert await place.status("/live", "Authorization: Bearer wrong") == 401
        assert await place.status(f"/live?token={TOKEN}") == 401
        assert await place.status("/live", BEARER) == 200

    serving(scenario, host="0.0.0.0")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_the_page_is_read_only(method: str) -> None:
    async def scenario(place: Place) -> None:
        for path in ("/", "/live"):
            reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
            writer.write(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert b"405" in await asyncio.wait_for(reader.readline(), PATIENCE)
            writer.close()

    serving(scenario)


def test_a_page_gets_the_whole_history_and_then_updates() -> None:
    async def scenario(place: Place) -> None:
        place.feed.log("gone", node="3", why="silence")
        place.feed.log("rejected", peer="x")
        place.feed.update()
        reader, writer = await place.ask("/live")
        first = await read_update(reader)
        assert first["status"]["run"] == place.server.group.settings.run
        assert [text for _, _, text in first["events"]] == ["node 3 is gone: silence"]
        place.feed.log("empty")
        second = await read_update(reader)
        while "events" not in second:
            second = await read_update(reader)
        assert [text for _, _, text in second["events"]] == ["all nodes have left"]
        assert "run" not in second.get("status", {})
        writer.close()

    serving(scenario)


def test_an_error_in_one_update_closes_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    take_update, left = live_feed.take_update, [1]

    def take(*arguments: Any, **options: Any) -> Any:
        if left:
            left.pop()
            raise RuntimeError("a defect that one update meets")
        return take_update(*arguments, **options)

    async def scenario(place: Place) -> None:
        reader, writer = await place.ask("/live")
        await read_update(reader)
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        monkeypatch.setattr(live_feed, "take_update", take)
        while left:
            await asyncio.sleep(0.01)
        place.feed.log("empty")
        while "events" not in await read_update(reader):
            pass
        writer.close()

    serving(scenario)


def test_the_last_update_has_the_end_of_the_run() -> None:
    async def scenario(place: Place) -> None:
        reader, writer = await place.ask("/live")
        await read_update(reader)
        place.feed.log("finished", reason="Complete")
        place.feed.close()
        rest = await asyncio.wait_for(reader.read(), PATIENCE)
        assert b"the run has ended: Complete" in rest
        writer.close()

    serving(scenario)


def test_pages_beyond_the_bound_are_refused_without_displacing_others() -> None:
    async def scenario(place: Place) -> None:
        pages = [await place.ask("/live") for _ in range(MOST_PAGES)]
        for reader, _ in pages:
            await read_update(reader)
        assert await place.status("/live") == 503
        # Requests that are answered immediately use other slots.
        for _ in range(2 * MAX_CONNECTIONS):
            assert await place.status("/healthz") == 200
        await read_update(pages[0][0])
        # A page that closes frees its slot.
        for _, writer in pages:
            writer.close()
        while place.feed.is_full:
            await asyncio.sleep(0.01)
        assert await place.status("/live") == 200

    serving(scenario)


def test_a_page_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "MOST_UNSENT_BYTES", 100_000)

    async def scenario(place: Place) -> None:
        _, writer = await place.ask("/live")
        while not place.feed._pages:
            await asyncio.sleep(0.01)
        # The system's own buffers take some megabytes first; the test ends by its time limit if nothing does.
        while place.feed._pages:
            for number in range(200):
                place.feed.log("gone", node=str(number), why="x" * 300)
            place.feed.update()
            await asyncio.sleep(0)
        assert await place.status("/healthz") == 200
        writer.close()

    serving(scenario)


def test_pages_that_are_reopened_repeatedly_share_one_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_feed, "UPDATE_SECONDS", 3600.0)
    rewound: list[object] = []
    rewind = live_feed.rewind
    monkeypatch.setattr(
        live_feed, "rewind", lambda history: (rewound.append(1), rewind(history))
    )

    async def scenario(place: Place) -> None:
        for _ in range(20):
            reader, writer = await place.ask("/live")
            assert "run" in (await read_update(reader))["status"]
            writer.close()
            while place.feed._pages:
                await asyncio.sleep(0.001)

    serving(scenario)
    assert len(rewound) == 1


def test_an_expensive_snapshot_delays_no_update_and_is_shared_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reload of the page of a long run made it hang for minutes."""
    spent, rewound, rewind = [0.0], list[object](), live_feed.rewind

    def rewind_slowly(history: RunHistory) -> None:
        rewound.append(1)
        spent[0] += 10.0
        rewind(history)

    clocks = {"monotonic": time.monotonic, "time": time.time}
    monkeypatch.setattr(
        live_feed, "time", SimpleNamespace(thread_time=lambda: spent[0], **clocks)
    )
    monkeypatch.setattr(live_feed, "rewind", rewind_slowly)
    monkeypatch.setattr(live_feed, "UPDATE_SECONDS", 0.01)

    async def scenario(place: Place) -> None:
        first, writer = await place.ask("/live")
        assert "run" in (await read_update(first))["status"]
        place.feed.log("gone", node="3", why="silence")
        while "events" not in await read_update(first):
            pass
        # No page is open for a while.
        writer.close()
        while place.feed._pages:
            await asyncio.sleep(0.001)
        place.feed.log("empty")
        place.feed.update()
        # The next page gets what the first one got, and all later updates.
        second, writer = await place.ask("/live")
        assert "run" in (await read_update(second))["status"]
        texts: list[str] = []
        while len(texts) < 2:
            texts += [one[2] for one in (await read_update(second)).get("events", [])]
        assert texts == ["node 3 is gone: silence", "all nodes have left"]
        assert len(rewound) == 1
        writer.close()

    serving(scenario)


def test_the_shared_snapshot_is_rebuilt_after_its_pause() -> None:
    now = 0.0
    feed = LiveFeed(clock=lambda: now)
    feed._group = new_group(make_settings(token=TOKEN), generation=0, now=now)
    for _ in range(2):
        feed.open(OpenPage())  # type: ignore[arg-type]
        feed.update()
    assert len(feed._whole) == 3
    now = feed._whole_until
    feed.update()
    assert feed._whole == []
    feed.open(OpenPage())  # type: ignore[arg-type]
    assert len(feed._whole) == 1


def test_a_page_gets_a_keepalive_during_a_long_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lost connection is noticed only after a minute of silence."""
    monkeypatch.setattr(live_feed, "UPDATE_SECONDS", 3600.0)
    monkeypatch.setattr(live_feed, "SILENT_SECONDS", 0.01)

    async def scenario(place: Place) -> None:
        reader, writer = await place.ask("/live")
        await read_update(reader)
        for _ in range(3):
            line = await asyncio.wait_for(reader.readuntil(b"new yet\n\n"), PATIENCE)
            assert line.strip() == b": nothing new yet"
        writer.close()

    serving(scenario)


def test_a_slow_page_has_time_to_read_the_whole_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_feed, "MOST_UNSENT_BYTES", 1000)
    feed, page = LiveFeed(), StuckPage()
    feed._group = new_group(make_settings(token=TOKEN), generation=0, now=0.0)
    feed.open(page)  # type: ignore[arg-type]
    all_there_is = page.num_bytes
    assert all_there_is > 1000
    while feed._pages:
        feed.update()
        assert page.num_bytes < all_there_is + 3000
    assert page.num_bytes > all_there_is + 1000 and page.is_aborted


@pytest.mark.parametrize("cost_seconds", [0.0, 0.001, 0.004, 0.02, 0.3])
def test_updates_use_at_most_half_a_percent_of_a_core(cost_seconds: float) -> None:
    pause = pause_after(cost_seconds)
    assert pause >= live_feed.UPDATE_SECONDS
    assert cost_seconds / pause <= 0.005 + 1e-12


def results(second: int) -> dict[str, float]:
    """As many values of a set as a node reports."""
    return {f"result_{number}": 1 / (second + number) for number in range(8)}


class OpenPage:
    """The connection of a page that reads immediately. It counts the received bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.transport = self

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)


class StuckPage(OpenPage):
    """The connection of a page that reads nothing."""

    is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.num_bytes

    def abort(self) -> None:
        self.is_aborted = True


@pytest.mark.long
@pytest.mark.parametrize("num_metrics", [3, MOST_DECLARED])
def test_eight_hours_at_ten_steps_a_second_use_less_than_a_percent_of_a_core(
    num_metrics: int,
) -> None:
    """For each second of 28,800: a report of rank 0, a reading of the group, and the update of an open page.

    Processor time, and readings without the limit that makes them rarer on a slow machine.
    """
    cluster = Cluster(make_settings(expect=2, max_nodes=2))
    for name in range(2):
        cluster.start(name)
    cluster.run_until_running()
    group, peer = cluster.group, cluster.nodes[0].peer
    assert peer is not None
    began_at, seconds = cluster.now, 8 * 3600
    second, page = 0, OpenPage()
    feed = LiveFeed(clock=lambda: began_at + second)
    feed._group = group
    feed.open(page)  # type: ignore[arg-type]

    spent = 0.0
    for second in range(1, seconds + 1):
        report = Progress(
            group.generation, 10 * second, total_steps=10 * seconds, loss=12.345678 / second,
            tokens_per_second=54321.987, eta_seconds=float(seconds - second),
            checkpoint_step=10 * (second - second % 60) or -1,
            values={f"metric_{number}": 1 / (second + number) for number in range(num_metrics)},
            evaluations={
                f"set_{number}": EvaluationReport(10 * (second - second % 120), results(second))
                for number in range(MOST_SETS)
            },
            evaluation_seconds=second / 20, saving_seconds=second / 40,
        )  # fmt: skip
        line = encode(report)
        begin = time.thread_time()
        on_message(group, peer, decode_from_node(line), now=began_at + second)
        if second % 600 == 0:
            # Another page is opened, too.
            feed.open(OpenPage())  # type: ignore[arg-type]
            feed._pages.popitem()
        feed.update()
        spent += time.thread_time() - begin

    assert group.training.step == 10 * seconds
    assert feed._history.steps.x[-1] == 10 * seconds
    # One page has followed all the time.
    assert page.num_bytes > 100 * seconds
    bound = seconds / 100
    print(
        f"{num_metrics} metrics: {spent:.1f} s of a core in 8 hours, {100 * spent / seconds:.3f}%; "
        f"{bound / spent:.1f} times below the bound of {bound:.0f} s"
    )
    assert spent < bound


@pytest.mark.parametrize(
    ("host", "site", "expected"),
    [
        ("127.0.0.1:80", "", True),
        ("localhost", "same-origin", True),
        ("[::1]:8080", "none", True),
        ("[::1]", "", True),
        ("evil.example:80", "", False),
        ("127.0.0.1.evil.example", "", False),
        ("", "", False),
        ("localhost:80", "cross-site", False),
        ("localhost:80", "same-site", False),
    ],
)
def test_cross_site_requests_are_detected(host: str, site: str, expected: bool) -> None:
    assert is_own_request(host, site) is expected


@pytest.mark.parametrize("name", ["run", "fleet"])
def test_the_page_is_one_file_and_only_its_own_scripts_and_styles_may_run(
    name: str,
) -> None:
    page = build_page(name, needs_token=True)
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for tag in ("script", "style"):
        for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy
    # Nothing is loaded from other hosts: the only addresses are in comments.
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!data:)", page.text)
    assert not re.search(r"\bstyle=", page.text)
    assert len(page.text) < 150_000
