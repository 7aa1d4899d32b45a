"""GET of /healthz, /readyz and /metrics on one port."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from evergrad_common.addresses import open_listener

Check = Callable[[], str | None]
"""A check: returns what is wrong, or None."""


class HealthServer:
    """Answers 200 with ``ok``, or 503 with what is wrong.

    ``live``: checks that a restart would mend; ``ready``: checks that the operator does its work.
    """

    def __init__(
        self,
        *,
        live: Sequence[Check],
        ready: Sequence[Check],
        metrics: Callable[[], Callable[[], bytes]],
    ) -> None:
        # ``metrics`` gathers what is needed, here on the event loop, and returns what renders it, in a
        # thread.
        self._live, self._ready, self._metrics = live, ready, metrics
        self._runner: web.AppRunner | None = None

    async def listen(self, host: str, port: int) -> int:
        """Begin to serve; return the port. Raises OSError."""
        app = web.Application()
        app.router.add_get("/healthz", _report(self._live))
        # A process that hangs is not ready either.
        app.router.add_get("/readyz", _report((*self._live, *self._ready)))

        async def answer_metrics(_: web.Request) -> web.Response:
            # Rendering thousands of series takes a while; the event loop goes on meanwhile.
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
    """Return a handler that answers 200, or 503 with what is wrong."""

    async def answer(_: web.Request) -> web.Response:
        faults = [fault for check in checks if (fault := check()) is not None]
        text = "\n".join(faults or ["ok"]) + "\n"
        return web.Response(text=text, status=503 if faults else 200)

    return answer
