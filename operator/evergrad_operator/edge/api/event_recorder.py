"""Kubernetes events about runs: repeated ones are counted on one object, and a crash loop makes fewer than
fifteen."""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from evergrad_operator.core.objects.errors import ApiError
from evergrad_operator.core.objects.kinds import EVENT, Kind, Raw
from evergrad_operator.core.objects.names import API_VERSION, KIND
from evergrad_operator.core.objects.times import format_time

log = logging.getLogger(__name__)
COMPONENT: Final = "evergrad-operator"
MAX_MESSAGE: Final = 1024
MAX_REMEMBERED: Final = 4096
EVENT_SECONDS: Final = 3.0
"""Longest time for one event: the pass that posts it has a status to write, which says the same."""
_DISTINCT = 2
"""Different messages of one reason that get events of their own. All further ones share one event, which
shows the newest."""


class Poster(Protocol):
    """The part of the API server that events need; ``Kube`` is one. All raise ApiError."""

    async def create(self, body: Raw) -> Raw:
        """Create an object."""

    async def merge(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        patch: Raw,
    ) -> Raw:
        """Send a JSON merge patch."""


@dataclass
class _Posted:
    name: str
    count: int
    message: str
    once: str


class Recorder:
    """Posts events. One that cannot be posted is only logged: no decision depends on events."""

    def __init__(
        self,
        poster: Poster,
        *,
        clock: Callable[[], float] = time.time,
        on_post: Callable[[str], None] = lambda action: None,
    ) -> None:
        self._poster = poster
        self._clock = clock
        self._on_post = on_post
        self._posted: OrderedDict[tuple[str, str, str], _Posted] = OrderedDict()
        self._messages: OrderedDict[tuple[str, str], dict[str, str]] = OrderedDict()
        self._born = f"{clock():.3f}"

    async def record(
        self,
        run: Raw,
        kind: str,
        reason: str,
        message: str,
        *,
        once: str = "",
    ) -> None:
        """Post an event of this ``reason`` about the raw run. ``kind``: Normal or Warning.

        ``once``: a key under which the event is posted only once, whichever process asks. Only an event that
        shares its object with others may be posted again, by a process that has started in between.
        """
        message = message[:MAX_MESSAGE]
        uid = str(run["metadata"].get("uid", ""))
        # Events with one message are counted on one object, and so are all further messages of a reason that
        # has had several: a flood of objects would push others' events out of etcd.
        digest = hashlib.sha256((once or message).encode()).hexdigest()[:16]
        known = self._messages.setdefault((uid, reason), {})
        # The least recently used goes first: a run in a crash loop keeps its place among thousands of others.
        self._messages.move_to_end((uid, reason))
        if digest not in known and len(known) < _DISTINCT:
            # Named by their number: a message of a reason that is forgotten meets the events of before again,
            # so that there are never more than three of them.
            known[digest] = digest if once else str(len(known))
        place = known.get(digest, "others")
        while len(self._messages) > MAX_REMEMBERED:
            self._messages.popitem(last=False)
        slot = uid, reason, place

        # An event is never worth a failed pass: one that cannot be posted is logged.
        posted = self._posted.get(slot)
        if posted is not None:
            self._posted.move_to_end(slot)
        if posted is not None and once and posted.once == once:
            return
        try:
            async with asyncio.timeout(EVENT_SECONDS):
                await self._post(slot, run, kind, message, once)
        except TimeoutError:
            log.warning("the event %s could not be posted: no answer in time", reason)
        except ApiError as error:
            # An event that has expired is created anew. After any other answer it may exist, and its name is
            # taken: it keeps its count.
            if error.status == 404:
                self._posted.pop(slot, None)
            if error.status not in (403, 404):
                log.warning("the event %s could not be posted: %s", reason, error)

    async def _post(
        self,
        slot: tuple[str, str, str],
        run: Raw,
        kind: str,
        message: str,
        once: str,
    ) -> None:
        """Post the event, or count it on the object that its message already has."""
        posted = self._posted.get(slot)
        if posted is None:
            await self._create(slot, run, kind, message, once)
            return
        posted.count += 1
        posted.message = message
        patch = {
            "count": posted.count,
            "message": message,
            "lastTimestamp": format_time(self._clock()),
        }
        namespace = run["metadata"].get("namespace", "")
        await self._poster.merge(EVENT, namespace, posted.name, patch)
        posted.once = once
        self._on_post("counted")

    async def _create(
        self,
        slot: tuple[str, str, str],
        run: Raw,
        kind: str,
        message: str,
        once: str,
    ) -> None:
        metadata = run["metadata"]
        now = format_time(self._clock())
        # Part of the name is when this operator started: it cannot continue the count of an earlier one. An
        # event that is posted once has its key there instead, so that an earlier operator's has this name.
        identity = "\n".join((*slot, once or self._born))
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        name = f"{metadata['name']}.{digest}"
        namespace = metadata.get("namespace", "")
        body = {
            "apiVersion": EVENT.version,
            "kind": EVENT.kind,
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": metadata["name"],
                "namespace": namespace,
                "uid": slot[0],
                "resourceVersion": metadata.get("resourceVersion", ""),
            },
            "type": kind,
            "reason": slot[1],
            "message": message,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "reportingInstance": COMPONENT,
        }
        try:
            await self._poster.create(body)
            self._on_post("created")
        except ApiError as error:
            # An earlier try whose answer was lost has created this very event, or, where it is posted once,
            # an earlier operator has.
            if error.reason != "AlreadyExists":
                raise
            # Or this one has, and has forgotten it among thousands of others: the event shows the newest
            # message, and the count begins again.
            if not once:
                patch = {"message": message, "lastTimestamp": format_time(self._clock())}
                await self._poster.merge(EVENT, namespace, name, patch)
        self._posted[slot] = _Posted(name, 1, message, once)
        while len(self._posted) > MAX_REMEMBERED:
            self._posted.popitem(last=False)
