"""An index of hosts on which runs have failed recently.

It is built from the statuses of all runs, so a restarted operator builds the same index.
"""

from collections.abc import Mapping
from typing import Any, Final

from evergrad_operator.core.objects.names import Key
from evergrad_operator.core.objects.raw import get_map, get_text
from evergrad_operator.core.objects.status_kinds import MAX_HOSTS
from evergrad_operator.core.observe.memory import REMEMBERED_SECONDS, parse_hosts

ENOUGH_RUNS: Final = 2
"""Number of runs that must fail on a host before all other runs avoid it.

If only one run fails on a host, the run itself may be the cause.
"""
_GOOD_SECONDS: Final = 1.0
"""Seconds for which a result is cached, because each pass needs it and a start makes a pass for every run."""


class HostIndex:
    """Hosts with the runs that failed on them. The statuses of the runs bound the number of entries."""

    def __init__(self) -> None:
        self._texts: dict[Key, str] = {}
        self._failed: dict[str, dict[Key, float]] = {}
        self._found: tuple[float, tuple[str, ...]] | None = None
        """Time and value of the cached result; None after a status has changed."""

    def update(self, key: Key, raw: Mapping[str, Any] | None) -> None:
        """Record the status of the run ``key``. ``raw`` is None if the run no longer exists."""
        text = get_text(get_map(raw or {}, "status", "memory"), "hostFaults")
        before = self._texts.pop(key, "")
        if text:
            self._texts[key] = text
        if text == before:
            return
        self._found = None
        for host in parse_hosts(before):
            runs = self._failed.get(host, {})
            runs.pop(key, None)
            # Drop hosts without runs, or the index would grow while the operator runs.
            if not runs:
                self._failed.pop(host, None)
        for host, at in parse_hosts(text).items():
            self._failed.setdefault(host, {})[key] = at

    def find_troubled(self, now: float) -> tuple[str, ...]:
        """Return the hosts on which several runs have failed recently, the newest failure last.

        ``now``: seconds since 1970. At most MAX_HOSTS hosts are returned.
        """
        if self._found is not None and 0 <= now - self._found[0] < _GOOD_SECONDS:
            return self._found[1]
        found = []
        for host, runs in self._failed.items():
            recent = [at for at in runs.values() if now - at < REMEMBERED_SECONDS]
            if len(recent) >= ENOUGH_RUNS:
                found.append((max(recent), host))
        hosts = tuple(host for _, host in sorted(found)[-MAX_HOSTS:])
        self._found = now, hosts
        return hosts
