"""The profiles of namespaces, as this process last read them.

Each version of a ConfigMap is parsed once, in a thread. Every user with write access to a namespace can write
its profile, and one operator reads the profiles of all namespaces. Therefore the cost of a profile is bounded
for any content and any number of runs.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, Protocol

from evergrad_manifest.errors import Problem
from evergrad_manifest.profile import (
    NAMESPACE_PROFILE,
    NAMESPACE_PROFILE_KEY,
    check_profile,
)
from evergrad_manifest.reading.document import parse_document
from evergrad_operator.core.objects.kinds import CONFIG_MAP, Kind, Raw
from evergrad_operator.core.objects.raw import get_map, get_text
from evergrad_operator.core.observe.profiles import NamespaceProfile

LONGEST_TEXT: Final = 16 * 1024
"""Maximum number of bytes of a profile's text, including comments.

The status of a run has room for 4 KiB of its content. A text of 16 KiB takes 0.1 s to parse. A text of 1 MiB,
the maximum of a ConfigMap, takes half a second.
"""
_MOST_KEPT: Final = 1000
"""Maximum number of cached profiles, a few KiB each. The least recently used profile is dropped first."""


class ConfigMapReader(Protocol):
    """The requests to the API server that this module needs. ``Kube`` implements it. Raises ApiError."""

    async def list_all(
        self, kind: Kind, namespace: str | None, *, name: str = ""
    ) -> tuple[Sequence[Raw], int]:
        """Return the objects of a kind, and the version of the list. If ``name`` is given, filter by it."""


class NamespaceProfiles:
    """A cache of profiles by namespace. Each profile belongs to one version of its ConfigMap."""

    def __init__(self, cluster: ConfigMapReader) -> None:
        self._cluster = cluster
        self._kept: OrderedDict[str, tuple[str, str, NamespaceProfile]] = OrderedDict()
        # Parse one text at a time, because several threads would compete with the event loop for CPU time.
        self._lock = asyncio.Lock()

    async def fetch(self, namespace: str) -> NamespaceProfile | None:
        """Return the profile of a namespace, or None. Raises ApiError."""
        found, _ = await self._cluster.list_all(
            CONFIG_MAP, namespace, name=NAMESPACE_PROFILE
        )
        return await self.read(namespace, found[0]) if found else None

    async def read(self, namespace: str, config_map: Raw) -> NamespaceProfile:
        """Return the profile in the ConfigMap, with all its problems."""
        metadata = get_map(config_map, "metadata")
        version = get_text(metadata, "uid"), get_text(metadata, "resourceVersion")
        async with self._lock:
            known = self._kept.get(namespace)
            if known is None or known[:2] != version or not version[1]:
                text = get_map(config_map, "data").get(NAMESPACE_PROFILE_KEY)
                profile = await asyncio.to_thread(parse_profile, text)
                known = (*version, profile)
                self._kept[namespace] = known
            self._kept.move_to_end(namespace)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
            return known[2]


def parse_profile(text: Any) -> NamespaceProfile:
    """Return the profile in the text of a ConfigMap, with all its problems. Pure."""
    if not isinstance(text, str):
        remedy = f"Add the key {NAMESPACE_PROFILE_KEY}, or delete the ConfigMap"
        return _refuse(f"has no text {NAMESPACE_PROFILE_KEY}", "it is the profile", remedy)
    if not text.strip():
        return NamespaceProfile({}, is_checked=True)

    # Check the length first, so that a longer text is not parsed at all.
    size = len(text.encode(errors="replace"))
    if size > LONGEST_TEXT:
        why = f"a profile has at most {LONGEST_TEXT} bytes, with its comments"
        return _refuse(
            f"{NAMESPACE_PROFILE_KEY} has {size} bytes",
            why,
            "Remove some defaults, or move long texts into a ConfigMap that a run mounts",
        )
    document = parse_document(text, label=NAMESPACE_PROFILE_KEY)
    problems = tuple(document.problems) or check_profile(document.value, of_namespace=True)
    return NamespaceProfile(document.value, problems, is_checked=True)


def _refuse(what: str, why: str, remedy: str) -> NamespaceProfile:
    return NamespaceProfile(problems=(Problem("", what, why, remedy),), is_checked=True)
