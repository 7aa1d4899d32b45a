"""kopf's part: it watches and delivers events; every handler only passes them on. kopf decides nothing and
writes nothing."""

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
"""Takes in one object: resource, the object, and the event's type. The type is None for an object of a list,
which never shows what is gone."""


class Pauses:
    """Seconds between the tries of one request: ``first``, then ``longest`` for ever."""

    def __init__(self, first: Sequence[float], longest: float) -> None:
        self._first = tuple(first)
        self._longest = longest

    def __iter__(self) -> Iterator[float]:
        """Yield the pauses of one request."""
        return itertools.chain(self._first, itertools.repeat(self._longest))


OUTAGE_PAUSES: Final = Pauses((1.0, 1.0, 2.0, 3.0), 5.0)
"""A watch is back 5 s after the API server: a longer pause would add to each outage, and a shorter one to the
log, where kopf reports each try."""


class NoDiffBase(AnnotationsDiffBaseStorage):
    """Keeps no copy of objects, and saves making one at every event: no handler asks what changed."""

    def build(self, *, body: Any, extra_fields: Iterable[Any] | None = None) -> Any:
        """Return nothing."""
        return {}

    def fetch(self, *, body: Any) -> Any:
        """Return nothing."""
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        """Store nothing."""


def check_kopf(version: str) -> None:
    """Raise SettingsError unless kopf is of a version whose dead watches end the process."""
    parts = version.split(".")[:3]
    numbers = tuple(int(part) for part in parts if part.isdecimal())
    if not OLDEST <= numbers < NEWEST:
        raise SettingsError(
            f"kopf {version} is installed, but kopf>=1.45.2,<2 is needed. "
            "Install tools/requirements/operator.txt."
        )


def build_settings(namespaces: Collection[str]) -> OperatorSettings:
    """Build kopf's settings, where they differ from its defaults."""
    settings = OperatorSettings()
    # No scan of CRDs and namespaces: it needs rights that a namespaced operator lacks, and retries 403s for a
    # minute.
    settings.scanning.disabled = True
    # Events are posted by the recorder, which counts what repeats.
    settings.posting.enabled = False
    # The Lease decides who works, and fences writes, which peering does not.
    settings.peering.standalone = True
    settings.watching.chunk_size = 500
    for resource in (PODS, CLAIMS):
        settings.watching.label_selectors["", "v1", resource] = LABEL_RUN
    # queueing.worker_limit stays unset: an idle worker keeps its place for idle_timeout, so that a limit is
    # one of throughput.
    settings.queueing.idle_timeout = 1.0
    settings.queueing.exit_timeout = 1.0
    settings.process.ultimate_exiting_timeout = 15.0
    settings.networking.enforce_retry_after = True
    settings.networking.request_timeout = 60.0
    # kopf gives up after 54 seconds of an outage otherwise, and an answer of 500 then ends its watch.
    settings.networking.error_backoffs = OUTAGE_PAUSES
    # Nothing below is ever written to an object: no handler needs a finalizer or keeps progress. The names
    # are set so that a defect would show as ours.
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
    """Build all handlers. ``on_start`` and ``on_stop``: coroutine functions, called around all watching."""
    registry = OperatorRegistry()
    group, version = API_VERSION.split("/")

    def watch(resource: str) -> Callable[..., Any]:
        async def take(event: Any, **_: Any) -> None:
            sink(resource, event["object"], event["type"])

        return take

    # Raw events only: kopf's other handlers write annotations and finalizers to the user's objects.
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
