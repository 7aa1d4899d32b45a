"""An index of hosts that have failed runs lately, over all runs: it is made from their statuses, and again
from the same after a restart of the operator."""

from collections.abc import Mapping
from typing import Any, Final

from evergrad_operator.core.objects.names import Key
from evergrad_operator.core.objects.raw import get_map, get_text
from evergrad_operator.core.observe.memory import MAX_HOSTS, REMEMBERED_SECONDS, parse_hosts

ENOUGH_RUNS: Final = 2
"""Runs that a host has to fail before all others keep away from it: the trouble of one may be its own."""
_GOOD_SECONDS: Final = 1.0
"""Time for which an answer is kept: each pass over any run asks, and a start asks for all runs."""


class HostIndex:
    """Hosts by the runs that they have failed. It has as many entries as the statuses of runs name hosts."""

    def __init__(self) -> None:
        self._texts: dict[Key, str] = {}
        self._failed: dict[str, dict[Key, float]] = {}
        self._found: tuple[float, tuple[str, ...]] | None = None
        """The last answer, and when it was found; None once a status has changed."""

    def update(self, key: Key, raw: Mapping[str, Any] | None) -> None:
        """Note the status of the run ``key``; None for a run that does not exist any more."""
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
            # An index of hosts without runs would grow for as long as the operator lives.
            if not runs:
                self._failed.pop(host, None)
        for host, at in parse_hosts(text).items():
            self._failed.setdefault(host, {})[key] = at

    def find_troubled(self, now: float) -> tuple[str, ...]:
        """Return the hosts that have lately failed several runs, the newest trouble last."""
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
