"""Serves GET of /healthz, /readyz and /metrics on one port."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from evergrad_common.addresses import open_listener

Check = Callable[[], str | None]
"""A health check. It returns a description of the problem, or None."""


class HealthServer:
    """Serves the health checks with 200 and ``ok``, or 503 and the problems, and serves the metrics.

    ``live``: checks for problems that a restart would fix. ``ready``: checks whether the operator works.
    ``metrics``: collects the data in the event loop, and returns the function that renders it in a thread.
    """

    def __init__(
        self,
        *,
        live: Sequence[Check],
        ready: Sequence[Check],
        metrics: Callable[[], Callable[[], bytes]],
    ) -> None:
        self._live, self._ready, self._metrics = live, ready, metrics
        self._runner: web.AppRunner | None = None

    async def listen(self, host: str, port: int) -> int:
        """Start to serve, and return the port. Raises OSError if the address cannot be bound."""
        app = web.Application()
        app.router.add_get("/healthz", _report(self._live))
        # A process that is not live is not ready either.
        app.router.add_get("/readyz", _report((*self._live, *self._ready)))

        async def answer_metrics(_: web.Request) -> web.Response:
            # Render in a thread, because thousands of series would block the event loop.
            body = await asyncio.to_thread(self._metrics())
            return web.Response(
                body=body,
                content_type="text/plain",
                charset="utf-8",
                headers={"Cache-Control": "no-store"},
            )

        app.router.add_get("/metrics", answer_metrics)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        await web.SockSite(self._runner, open_listener(host, port)).start()
        address: tuple[str, int] = self._runner.addresses[0]
        return address[1]

    async def close(self) -> None:
        """Stop serving."""
        if self._runner is not None:
            await self._runner.cleanup()


def _report(checks: Sequence[Check]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that answers 200, or 503 with the problems."""

    async def answer(_: web.Request) -> web.Response:
        faults = [fault for check in checks if (fault := check()) is not None]
        text = "\n".join(faults or ["ok"]) + "\n"
        return web.Response(text=text, status=503 if faults else 200)

    return answer
