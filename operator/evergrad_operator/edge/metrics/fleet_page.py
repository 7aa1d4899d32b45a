"""Serves the page of all runs on the pod's loopback address.

Only `kubectl port-forward` can reach it there, which needs a permission of the API server.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from aiohttp import web

from evergrad_coordinator.edge.live_feed import encode_event
from evergrad_coordinator.edge.page_files import build_page, is_own_request
from evergrad_operator.core.fleet import build_fleet
from evergrad_operator.core.objects.kinds import Raw

log = logging.getLogger(__name__)
HOST: Final = "127.0.0.1"
MOST_PAGES: Final = 8
"""Maximum number of open pages. Further requests are answered with 503."""
_UPDATE_SECONDS: Final = 2.0
"""Minimum seconds between two updates, which all open pages share."""
_LARGEST_SHARE: Final = 0.005
"""Maximum share of one core for updates. With many runs, the time between two updates grows."""
_WRITE_SECONDS: Final = 10.0
"""Maximum seconds that a page may take to read the data that was sent before."""


class FleetPage:
    """Serves the page of all runs of this operator. ``list_runs`` returns the raw runs of the cache."""

    def __init__(self, list_runs: Callable[[], Iterable[Raw]]) -> None:
        self._list_runs = list_runs
        self._runner: web.AppRunner | None = None
        self._pages: set[asyncio.Task[object]] = set()
        self._update = b""
        self._next_at = 0.0
        self._began_at = round(time.time(), 1)

    async def listen(self, port: int) -> int:
        """Start to serve, and return the port.

        If this fails, log a warning and return 0, because the operator works without the page.
        """
        page = build_page("fleet", needs_token=False)
        headers = {**page.headers, "Cache-Control": "no-store"}

        async def answer_page(_: web.Request) -> web.Response:
            return web.Response(text=page.text, content_type="text/html", headers=headers)

        app = web.Application()
        app.router.add_get("/", answer_page)
        app.router.add_get("/live", self.follow)
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, shutdown_timeout=0.1
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, HOST, port).start()
        except OSError as error:
            log.warning("the page of all runs cannot be served: %s", error)
            return 0
        address: tuple[str, int] = self._runner.addresses[0]
        log.info(
            "serving the page of all runs on port %d, for kubectl port-forward", address[1]
        )
        return address[1]

    async def close(self) -> None:
        """Stop serving, and close the open pages."""
        for page in self._pages:
            page.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    def look(self) -> bytes:
        """Return the newest event. It is built again if the last one is too old."""
        if time.monotonic() >= self._next_at:
            begin = time.thread_time()
            content = {**build_fleet(self._list_runs()), "beganAt": self._began_at}
            self._update = encode_event(content)
            cost_seconds = time.thread_time() - begin
            self._next_at = time.monotonic() + max(
                _UPDATE_SECONDS, cost_seconds / _LARGEST_SHARE
            )
        return self._update

    async def follow(self, request: web.Request) -> web.StreamResponse:
        """Send the state of all runs now and after each change, as server-sent events."""
        if not is_own_request(request.host, request.headers.get("Sec-Fetch-Site", "")):
            return web.Response(text="not for other sites\n", status=403)
        if len(self._pages) >= MOST_PAGES:
            return web.Response(
                text=f"{MOST_PAGES} pages are open; close one\n", status=503
            )
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        task = asyncio.current_task()
        if task is not None:
            self._pages.add(task)
        try:
            await response.prepare(request)
            sent = b""
            while True:
                # Send a comment if there is no change. It detects a closed page, and shows the page that the
                # connection is still open.
                update = self.look()
                data = update if update != sent else b": unchanged\n\n"
                await asyncio.wait_for(response.write(data), _WRITE_SECONDS)
                sent = update
                await asyncio.sleep(_UPDATE_SECONDS)
        except (TimeoutError, OSError):
            return response
        finally:
            if task is not None:
                self._pages.discard(task)
