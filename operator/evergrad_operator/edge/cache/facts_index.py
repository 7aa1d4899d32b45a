"""The facts about all runs that are exported as metrics, updated when runs and pods change. Pure.

A scrape only reads the facts. If it read all statuses, it would block the event loop for a second with 10,000
runs.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from evergrad_operator.core.objects.names import Key, Phase
from evergrad_operator.core.observe.facts import (
    NO_NODES,
    RunFacts,
    find_node_state,
    find_phase,
    is_long_over,
    read_run,
)
from evergrad_operator.core.observe.spec import is_managed_here

Raw = Mapping[str, Any]


class FactsIndex:
    """Facts by run, the number of runs in each phase, and the live pods of nodes by state."""

    def __init__(self) -> None:
        self._facts: dict[Key, RunFacts] = {}
        self._phases: dict[Key, str] = {}
        self._num_in_phase = {phase.value: 0 for phase in Phase}
        self._nodes: dict[Key, dict[str, int]] = {}
        self._recounted: set[Key] = set()
        """Runs whose pods have changed since the last scrape."""
        self.on_defect: Callable[[Key, Exception], None] = lambda key, error: None
        """Called for a run whose facts cannot be read."""

    def update_run(self, key: Key, raw: Raw | None) -> None:
        """Record that the run ``key`` is now ``raw``; None if the run does not exist."""
        before = self._phases.pop(key, None)
        if before is not None:
            self._num_in_phase[before] -= 1
        self._facts.pop(key, None)
        # Skip runs of another controller: they have no phase here, and would seem to wait for this operator.
        if raw is None or not is_managed_here(raw):
            return

        phase = find_phase(raw)
        self._phases[key] = phase
        self._num_in_phase[phase] = self._num_in_phase.get(phase, 0) + 1
        try:
            nodes = dict(self._nodes.get(key, NO_NODES))
            self._facts[key] = read_run(key, raw, nodes)
        except Exception as error:  # noqa: BLE001
            # An unexpected status must hide only this run's metrics, and must not stop its reconciliation.
            self.on_defect(key, error)

    def move_pod(self, key: Key, old: Raw | None, new: Raw | None) -> None:
        """Record that a pod of the run ``key``, which was ``old``, is now ``new``. None means no pod."""
        before = "" if old is None else find_node_state(old)
        after = "" if new is None else find_node_state(new)
        if before == after:
            return
        counts = self._nodes.setdefault(key, {})
        if before:
            counts[before] -= 1
            if not counts[before]:
                del counts[before]
        if after:
            counts[after] = counts.get(after, 0) + 1
        if not counts:
            del self._nodes[key]
        self._recounted.add(key)

    def count_phases(self) -> dict[str, int]:
        """Return the number of runs in each phase, including runs that ended long ago."""
        known = {phase.value for phase in Phase}
        return {
            phase: count
            for phase, count in self._num_in_phase.items()
            if count or phase in known
        }

    def read(self, now: float) -> tuple[RunFacts, ...]:
        """Return the facts of all runs that have not ended long ago. ``now``: seconds since 1970."""
        for key in self._recounted:
            facts = self._facts.get(key)
            if facts is not None:
                nodes = dict(self._nodes.get(key, NO_NODES))
                self._facts[key] = replace(facts, nodes=nodes)
        self._recounted.clear()
        return tuple(
            facts for facts in self._facts.values() if not is_long_over(facts, now)
        )
