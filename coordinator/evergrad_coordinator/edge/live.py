"""Sends the course of a run to the pages that are open: server-sent events, from one history for all.

The coordinator comes first. Pages are few, each has a bounded amount of unsent data, and the pause between
two updates grows with what an update costs.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from evergrad_coordinator.edge.bounded_log import LogLine
from evergrad_coordinator.rules.group import Group
from evergrad_coordinator.rules.history import (
    MOST_EVENTS,
    SHOWN_EVENTS,
    History,
    build_page_status,
    note_event,
    observe,
    rewind,
    take_update,
)

MOST_PAGES = 8
"""Pages that are open at once; further ones are answered 503."""
MOST_UNSENT_BYTES = 1024 * 1024
"""Unsent data of one page at which it is dropped, above what any whole history takes."""
UPDATE_SECONDS = 1.0
"""Shortest time between two updates."""
_LARGEST_SHARE = 0.005
"""Largest share of one core that updates may take: half of what the page may cost."""


def pause_after(cost_seconds: float) -> float:
    """Seconds until the next update, after one that took ``cost_seconds`` of a core."""
    return max(UPDATE_SECONDS, cost_seconds / _LARGEST_SHARE)


def encode_event(update: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    text = json.dumps(update, allow_nan=False, separators=(",", ":"))
    return f"event: update\ndata: {text}\n\n".encode("ascii")


class LiveFeed:
    """One history, and the pages that follow it.

    ``pass_on``: gets every line of the coordinator's log. ``clock``: monotonic seconds.
    """

    def __init__(
        self,
        pass_on: LogLine = lambda *_, **__: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pass_on = pass_on
        self._clock = clock
        self._history = History(began_at=clock())
        self._began_at_unix = round(time.time(), 1)
        self._group: Group | None = None
        self._heard: deque[tuple[float, str, dict[str, object]]] = deque(maxlen=MOST_EVENTS)
        """Lines of the log since the group was read."""
        self._pages: dict[asyncio.StreamWriter, None] = {}
        self._whole: bytes = b""
        """All that has been sent so far as one update; empty where more has been sent since."""
        self._cost_seconds = 0.0
        """Time on a core since the pause began."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """Whether as many pages are open as may be."""
        return len(self._pages) >= MOST_PAGES

    def log(self, event: str, **fields: object) -> None:
        """Pass a line of the coordinator's log on, and note it for the page, bounded as the log is."""
        self._pass_on(event, **fields)
        # Only kept here, since the rules' effects are being carried out: the page is never in their way.
        if event in SHOWN_EVENTS:
            self._heard.append((self._clock(), event, fields))

    def start(self, group: Group) -> None:
        """Read ``group`` from now on, once between two pauses."""
        self._group = group
        self._tick()

    def update(self) -> None:
        """Read the group once, and send what is new to every page."""
        if self._group is not None:
            while self._heard:
                at, event, fields = self._heard.popleft()
                note_event(self._history, event, fields, now=at)
            observe(self._history, self._group, now=self._clock())
            self._send_update()

    def open(self, writer: asyncio.StreamWriter) -> None:
        """Send a page all there is, and every update from now on."""
        if self._group is None:
            return
        # One that is opened within the same pause gets the same bytes: opening pages again and again costs
        # no more than one each pause.
        if not self._whole:
            begin = time.thread_time()
            self._send_update()
            rewind(self._history)
            self._whole = self._encode_update(self._group)
            self._cost_seconds += time.thread_time() - begin
        self._pages[writer] = None
        writer.write(self._whole)

    def close_page(self, writer: asyncio.StreamWriter) -> None:
        """Send a page nothing more."""
        self._pages.pop(writer, None)

    def close(self) -> None:
        """Send the last state, such as the end of the run, and end all pages."""
        if self._timer:
            self._timer.cancel()
        self.update()
        for writer in list(self._pages):
            self.close_page(writer)
            writer.close()

    def _tick(self) -> None:
        begin = time.thread_time()
        self.update()
        cost = self._cost_seconds + time.thread_time() - begin
        self._cost_seconds = 0.0
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(pause_after(cost), self._tick)

    def _send_update(self) -> None:
        """Send what is new to every page; one that does not read is dropped, and comes back by itself."""
        if not self._pages or self._group is None:
            self._whole = b""
            return
        data = self._encode_update(self._group)
        self._whole = b""
        for writer in list(self._pages):
            if writer.transport.get_write_buffer_size() > MOST_UNSENT_BYTES:
                self.close_page(writer)
                writer.transport.abort()
            else:
                writer.write(data)

    def _encode_update(self, group: Group) -> bytes:
        now = self._clock()
        update = take_update(self._history, build_page_status(group, now=now), now=now)
        return encode_event({**update, "beganAt": self._began_at_unix})
