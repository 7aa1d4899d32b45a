"""Sends the course of a run to the pages that are open: server-sent events, from one history for all.

The coordinator comes first. Pages are few, each has a bounded amount of unsent data, and the pause between
two updates grows with what an update costs, and that between two openings with what an opening costs.
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
"""Pages that are open at once; further ones are answered 503."""
MOST_UNSENT_BYTES = 1024 * 1024
"""Unsent data of one page, beyond the most that it was sent at once, at which it is dropped: a page that was
just sent a whole history, however large, is given the time to read it."""
UPDATE_SECONDS = 1.0
"""Shortest time between two updates."""
SILENT_SECONDS = 20.0
"""Longest time in which a page is sent nothing: it takes a minute of silence for a lost connection."""
_LARGEST_SHARE = 0.005
"""Largest share of one core that updates may take, and openings beside them: each half of what the page may
cost."""
_STILL_HERE = b": nothing new yet\n\n"
"""A comment, which a page passes over."""


def pause_after(cost_seconds: float) -> float:
    """Seconds until the next update or encoding of all there is, after one that took ``cost_seconds`` of a
    core."""
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
        self._history = RunHistory(began_at=clock())
        self._began_at_unix = round(time.time(), 1)
        self._group: Group | None = None
        self._heard: deque[tuple[float, str, dict[str, object]]] = deque(maxlen=MOST_EVENTS)
        """Lines of the log since the group was read."""
        self._pages: dict[asyncio.StreamWriter, int] = {}
        """Open pages, each with the most bytes that it was sent at once."""
        self._whole: list[bytes] = []
        """All there was as one update, and the updates since; empty where that is too old."""
        self._whole_until = 0.0
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
        # Pages that are opened again and again cost no more than one each pause, and hold up no update: until
        # its end all get the same bytes, with the updates since. These took as much of a core as all there
        # was at most, and are about as long.
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

    def _tick(self, left: float = 0.0) -> None:
        """Send an update; or, where ``left`` seconds of a long pause remain, a sign of life."""
        begin = time.thread_time()
        # Whatever one update has met, there is another one: without it every page would stand still.
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
        # A page that is opened before then needs what comes now, also where all others are closed.
        if self._group is not None and (self._pages or self._whole):
            data = self._encode_update(self._group)
            if self._whole:
                self._whole.append(data)
            self._send(data)

    def _send(self, data: bytes) -> None:
        """Send every page the same; one that does not read is dropped, and comes back by itself."""
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
