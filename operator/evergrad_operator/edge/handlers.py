"""Configures kopf, which watches objects and delivers events. The handlers only pass the events on.

kopf makes no decision and writes nothing.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final

import kopf
from kopf import (
    AnnotationsDiffBaseStorage,
    AnnotationsProgressStorage,
    ConnectionInfo,
    OperatorRegistry,
    OperatorSettings,
)

from evergrad_common.contract import API_GROUP, API_VERSION
from evergrad_operator.core.objects.errors import SettingsError
from evergrad_operator.core.objects.kinds import Raw
from evergrad_operator.core.objects.names import LABEL_RUN
from evergrad_operator.edge.api.connection import Connection
from evergrad_operator.edge.cache.store import CLAIMS, PODS, RUNS

OLDEST: Final = (1, 45, 2)
NEWEST: Final = (2,)
Sink = Callable[[str, Raw, str | None], None]
"""Receives one object: resource, object, and type of the event.

The type is None for an object of a list. A list never reports deleted objects.
"""


class Pauses:
    """Seconds between the tries of one request: the values of ``first``, then always ``longest``."""

    def __init__(self, first: Sequence[float], longest: float) -> None:
        self._first = tuple(first)
        self._longest = longest

    def __iter__(self) -> Iterator[float]:
        """Yield the pauses of one request."""
        return itertools.chain(self._first, itertools.repeat(self._longest))


OUTAGE_PAUSES: Final = Pauses((1.0, 1.0, 2.0, 3.0), 5.0)
"""Pauses of kopf's requests during an outage. A watch is back at most 5 s after the API server.

A longer pause would extend each outage. A shorter one would add lines to the log, where kopf reports each
try.
"""


class NoDiffBase(AnnotationsDiffBaseStorage):
    """Stores no copy of objects. No handler needs the difference, so no copy is made at each event."""

    def build(self, *, body: Any, extra_fields: Iterable[Any] | None = None) -> Any:
        """Return nothing."""
        return {}

    def fetch(self, *, body: Any) -> Any:
        """Return nothing."""
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        """Store nothing."""


def check_kopf(version: str) -> None:
    """Raise SettingsError unless this version of kopf ends the process if a watch has failed."""
    parts = version.split(".")[:3]
    numbers = tuple(int(part) for part in parts if part.isdecimal())
    if not OLDEST <= numbers < NEWEST:
        raise SettingsError(
            f"kopf {version} is installed, but kopf>=1.45.2,<2 is needed. "
            "Install tools/requirements/operator.txt."
        )


def build_settings(namespaces: Collection[str]) -> OperatorSettings:
    """Build kopf's settings that differ from its defaults."""
    settings = OperatorSettings()
    # Do not scan CRDs and namespaces: a namespaced operator lacks the permissions, and kopf retries after 403
    # for a minute.
    settings.scanning.disabled = True
    # The recorder posts the events, because it counts repeated events.
    settings.posting.enabled = False
    # The Lease selects the leader and fences writes. kopf's peering does not fence writes.
    settings.peering.standalone = True
    settings.watching.chunk_size = 500
    for resource in (PODS, CLAIMS):
        settings.watching.label_selectors["", "v1", resource] = LABEL_RUN
    # Leave queueing.worker_limit unset: an idle worker occupies its place for idle_timeout, so a limit would
    # reduce the throughput.
    settings.queueing.idle_timeout = 1.0
    settings.queueing.exit_timeout = 1.0
    settings.process.ultimate_exiting_timeout = 15.0
    settings.networking.enforce_retry_after = True
    settings.networking.request_timeout = 60.0
    # With the defaults, kopf gives up after 54 s of an outage, and an answer of 500 then ends its watch.
    settings.networking.error_backoffs = OUTAGE_PAUSES
    # None of these is ever written to an object, because no handler needs a finalizer or progress. The names
    # identify this operator if a defect writes them nevertheless.
    settings.persistence.finalizer = f"{API_GROUP}/finalizer"
    settings.persistence.progress_storage = AnnotationsProgressStorage(prefix=API_GROUP)
    settings.persistence.diffbase_storage = NoDiffBase(prefix=API_GROUP)
    settings.execution.max_workers = 1
    return settings


def build_registry(
    sink: Sink,
    connection: Connection,
    *,
    on_start: Callable[[], Any],
    on_stop: Callable[[], Any],
) -> OperatorRegistry:
    """Build the registry with all handlers.

    ``on_start`` and ``on_stop`` are coroutine functions. kopf calls them before its watches start and when it
    stops.
    """
    registry = OperatorRegistry()
    group, version = API_VERSION.split("/")

    def watch(resource: str) -> Callable[..., Any]:
        async def take(event: Any, **_: Any) -> None:
            sink(resource, event["object"], event["type"])

        return take

    # Use only raw events, because kopf's other handlers write annotations and finalizers to users' objects.
    watched = (
        (group, version, RUNS),
        ("", "v1", PODS),
        ("", "v1", CLAIMS),
    )
    for resource in watched:
        plural = resource[2]
        kopf.on.event(*resource, id=plural, registry=registry)(watch(plural))

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> ConnectionInfo:
        return ConnectionInfo(**await connection.describe())

    @kopf.on.startup(registry=registry)
    async def start(**_: Any) -> None:
        await on_start()

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        await on_stop()

    return registry


def describe_kopf() -> str:
    """Return kopf's version."""
    from importlib import metadata

    return metadata.version("kopf")
