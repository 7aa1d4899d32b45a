"""Sends the history of a run to the open pages as server-sent events. All pages share one history.

The feed must not slow down the coordinator. The number of pages and the unsent data of each page are bounded.
The pause between two updates grows with the cost of an update, and the pause between two encodings of the
whole history grows with their cost.
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
    RunHistory,
    build_page_status,
    note_event,
    observe,
    rewind,
    take_update,
)

MOST_PAGES = 8
"""Maximum number of open pages. Further requests are answered with 503."""
MOST_UNSENT_BYTES = 1024 * 1024
"""Unsent bytes of a page, in addition to its largest single message, above which the page is dropped.

A page that was just sent the whole history, of any size, therefore has time to read it.
"""
UPDATE_SECONDS = 1.0
"""Minimum seconds between two updates."""
SILENT_SECONDS = 20.0
"""Maximum seconds without data. A page treats a minute of silence as a lost connection."""
_LARGEST_SHARE = 0.005
"""Maximum share of one core for updates. Encodings of the whole history may take the same share again."""
_STILL_HERE = b": nothing new yet\n\n"
"""A comment of the event stream, which the page ignores."""


def pause_after(cost_seconds: float) -> float:
    """Return the seconds until the next update, or the next encoding of the whole history.

    ``cost_seconds``: seconds of CPU time that the last one took. For example, 0.01 results in a pause of 2 s.
    """
    return max(UPDATE_SECONDS, cost_seconds / _LARGEST_SHARE)


def encode_event(update: Mapping[str, Any]) -> bytes:
    """Encode one server-sent event."""
    text = json.dumps(update, allow_nan=False, separators=(",", ":"))
    return f"event: update\ndata: {text}\n\n".encode("ascii")


class LiveFeed:
    """The history of a run and the open pages that receive it.

    ``pass_on``: receives every line of the coordinator's log. ``clock``: returns monotonic seconds.
    """

    def __init__(
        self,
        pass_on: LogLine = lambda *_, **__: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pass_on = pass_on
        self._clock = clock
        self._history = RunHistory(began_at=clock())
        self._began_at_unix = round(time.time(), 1)
        self._group: Group | None = None
        self._heard: deque[tuple[float, str, dict[str, object]]] = deque(maxlen=MOST_EVENTS)
        """Lines of the log since the last reading of the group."""
        self._pages: dict[asyncio.StreamWriter, int] = {}
        """Open pages, each with the size in bytes of its largest single message."""
        self._whole: list[bytes] = []
        """The whole history as one update, and the updates since then; empty if it is too old."""
        self._whole_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """Whether MOST_PAGES pages are open."""
        return len(self._pages) >= MOST_PAGES

    def log(self, event: str, **fields: object) -> None:
        """Pass on a line of the coordinator's log, and keep it for the page if the page shows it."""
        self._pass_on(event, **fields)
        # Only keep the line here, because effects of the rules are being carried out and must not wait.
        if event in SHOWN_EVENTS:
            self._heard.append((self._clock(), event, fields))

    def start(self, group: Group) -> None:
        """Start to read ``group`` and to send updates periodically."""
        self._group = group
        self._tick()

    def update(self) -> None:
        """Read the group once, and send the changes to every page."""
        if self._group is not None:
            while self._heard:
                at, event, fields = self._heard.popleft()
                note_event(self._history, event, fields, now=at)
            observe(self._history, self._group, now=self._clock())
            self._send_update()

    def open(self, writer: asyncio.StreamWriter) -> None:
        """Send a page the whole history, and every update from now on."""
        if self._group is None:
            return
        # Encode the whole history at most once per pause, so that repeatedly opened pages cost no more than
        # one page and do not delay updates. Until the end of the pause, every new page gets the same bytes
        # and the updates since. In this time, the updates take at most as much CPU time as the whole history,
        # and are about as long.
        if not self._whole:
            begin = time.thread_time()
            self._send_update()
            rewind(self._history)
            self._whole = [self._encode_update(self._group)]
            pause = pause_after(time.thread_time() - begin)
            self._whole_until = self._clock() + pause
        self._pages[writer] = sum(map(len, self._whole))
        for data in self._whole:
            writer.write(data)

    def close_page(self, writer: asyncio.StreamWriter) -> None:
        """Stop sending to a page."""
        self._pages.pop(writer, None)

    def close(self) -> None:
        """Send the last state, such as the end of the run, and close all pages."""
        if self._timer:
            self._timer.cancel()
        self.update()
        for writer in list(self._pages):
            self.close_page(writer)
            writer.close()

    def _tick(self, left: float = 0.0) -> None:
        """Send an update. If ``left`` seconds of a long pause remain, send a keep-alive comment instead."""
        begin = time.thread_time()
        # Schedule the next tick even if this update fails. Otherwise no page would receive data any more.
        try:
            if left:
                self._send(_STILL_HERE)
            else:
                self.update()
        finally:
            left = left or pause_after(time.thread_time() - begin)
            wait = min(left, SILENT_SECONDS)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(wait, self._tick, left - wait)

    def _send_update(self) -> None:
        if self._clock() >= self._whole_until:
            self._whole = []
        # Encode the update even without open pages while ``_whole`` is valid: a page that is opened in this
        # time needs it.
        if self._group is not None and (self._pages or self._whole):
            data = self._encode_update(self._group)
            if self._whole:
                self._whole.append(data)
            self._send(data)

    def _send(self, data: bytes) -> None:
        """Send the same data to every page. A page that does not read is dropped; it reconnects by itself."""
        for writer, most in list(self._pages.items()):
            if writer.transport.get_write_buffer_size() > most + MOST_UNSENT_BYTES:
                self.close_page(writer)
                writer.transport.abort()
            else:
                self._pages[writer] = max(most, len(data))
                writer.write(data)

    def _encode_update(self, group: Group) -> bytes:
        now = self._clock()
        update = take_update(self._history, build_page_status(group, now=now), now=now)
        return encode_event({**update, "beganAt": self._began_at_unix})
