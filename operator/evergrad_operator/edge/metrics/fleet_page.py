"""Serves the page of all runs on the pod's own loopback address: only `kubectl port-forward` reaches it
there, for which the API server asks for a right.
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
"""Pages that are open at once; further ones are answered 503."""
_UPDATE_SECONDS: Final = 2.0
"""Between two looks at the runs, which all pages share, while at least one is open."""
_LARGEST_SHARE: Final = 0.005
"""Largest share of one core that those looks may take: with many runs they become rarer."""
_WRITE_SECONDS: Final = 10.0
"""Within which a page has to read what it was sent before."""


class FleetPage:
    """The page of all runs that this operator serves. ``list_runs``: the raw runs as they are known now."""

    def __init__(self, list_runs: Callable[[], Iterable[Raw]]) -> None:
        self._list_runs = list_runs
        self._runner: web.AppRunner | None = None
        self._pages: set[asyncio.Task[object]] = set()
        self._update = b""
        self._next_at = 0.0
        self._began_at = round(time.time(), 1)

    async def listen(self, port: int) -> int:
        """Begin to serve; return the port. 0 where that fails, which is no reason not to look after runs."""
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
        """Stop serving, and end the pages that are open."""
        for page in self._pages:
            page.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    def look(self) -> bytes:
        """Return the newest event, which is made anew when it is due."""
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
        """Send the fleet now, and whenever it has changed."""
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
                # A comment where nothing is new: a page that is gone is noticed by it, and one that is there
                # learns that the connection still stands.
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
