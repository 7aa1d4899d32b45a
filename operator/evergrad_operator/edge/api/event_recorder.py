"""Posts Kubernetes events about runs.

Repeated events are counted on one object, so that a crash loop creates fewer than fifteen objects.
"""

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
"""Maximum seconds for one event, because its pass still has to write the status, which contains the same."""
_DISTINCT = 2
"""Number of different messages of one reason that get separate events.

All further messages share one event, which shows the newest message.
"""


class Poster(Protocol):
    """The requests to the API server that events need. ``Kube`` implements it. All raise ApiError."""

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
    """Posts events. An event that cannot be posted is only logged, because no decision depends on events."""

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

        ``once``: a key. An event with a key is posted only once, even after a restart of the operator. The
        exception is an event that shares its object with others: after a restart it may be posted again.
        """
        message = message[:MAX_MESSAGE]
        uid = str(run["metadata"].get("uid", ""))
        # Count events with the same message on one object, and all messages of a reason beyond _DISTINCT on
        # another one. A large number of objects would displace other events in etcd.
        digest = hashlib.sha256((once or message).encode()).hexdigest()[:16]
        known = self._messages.setdefault((uid, reason), {})
        # Drop the least recently used first, so that a run in a crash loop keeps its entry among thousands.
        self._messages.move_to_end((uid, reason))
        if digest not in known and len(known) < _DISTINCT:
            # Name the messages by their number. If the entry of a reason was dropped, new messages reuse the
            # earlier events, so that a reason never has more than three events.
            known[digest] = digest if once else str(len(known))
        place = known.get(digest, "others")
        while len(self._messages) > MAX_REMEMBERED:
            self._messages.popitem(last=False)
        slot = uid, reason, place

        # A failure to post an event must not fail the pass, so it is only logged.
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
            # If the event has expired, create it again next time. After any other error the event may exist,
            # so keep its name and count.
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
        """Create the event, or increase the count of the existing event of its message."""
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
        # The name depends on the start time of this operator, because it cannot continue the count of an
        # earlier operator. The name of an event that is posted once depends on its key instead, so that the
        # event of an earlier operator has the same name.
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
            # This event was created by an earlier request whose answer was lost, or, if it is posted once, by
            # an earlier operator.
            if error.reason != "AlreadyExists":
                raise
            # Or this operator has created it and has dropped its entry since. Update the event to the newest
            # message; its count starts again.
            if not once:
                patch = {"message": message, "lastTimestamp": format_time(self._clock())}
                await self._poster.merge(EVENT, namespace, name, patch)
        self._posted[slot] = _Posted(name, 1, message, once)
        while len(self._posted) > MAX_REMEMBERED:
            self._posted.popitem(last=False)
