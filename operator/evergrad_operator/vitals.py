"""The operator's health: whether work stands still, whether it is ready, and the facts that are exported."""

import asyncio
import time
from typing import Final

from evergrad_operator.cache import InformerCache
from evergrad_operator.facts import count_phases, read_runs
from evergrad_operator.lease import LeaseGate
from evergrad_operator.metrics import Facts, Metrics
from evergrad_operator.names import Key
from evergrad_operator.queue import WorkQueue
from evergrad_operator.spec import is_managed_here
from evergrad_operator.transport import Gate

STALLED_SECONDS: Final = 100.0
"""Time without any progress after which /healthz fails: longer than a pass may take."""
_LAG_SECONDS: Final = 0.25


class Vitals:
    """Reads the state of the operator's parts, and changes none."""

    def __init__(
        self,
        *,
        queue: WorkQueue[Key],
        cache: InformerCache,
        gate: Gate,
    ) -> None:
        self._queue = queue
        self._cache = cache
        self._gate = gate
        self.is_standing_by = False
        """Whether another process holds the lease."""
        self.is_synced = False
        """Whether the watches have begun."""

    def find_stall(self) -> str | None:
        """Describe, for /healthz, the work that stands still until a restart; None if all is well."""
        # Work and watches are judged by the longest wait: one run that hangs is enough.
        state = self._queue.observe()
        if max(state.longest_work, state.oldest_age) > STALLED_SECONDS:
            return (
                f"work stands still: {state.longest_work:.0f} s on one run, {state.oldest_age:.0f} s "
                "waiting for a turn"
            )

        # Before the watches have begun, nothing owes the versions of the first list.
        lags = self._cache.expectations.lag().items() if self.is_synced else ()
        late = [(resource, lag) for resource, lag in lags if lag > STALLED_SECONDS]
        if late:
            behind = ", ".join(f"{resource} by {lag:.0f} s" for resource, lag in late)
            return f"a watch is behind: {behind}"

        # Without its lease the process can write nothing, and should have ended by itself.
        has_lease = isinstance(self._gate, LeaseGate)
        if self.is_synced and has_lease and self._gate.remaining() <= 0:
            return "the lease is lost"
        return None

    def find_unready(self) -> str | None:
        """Describe, for /readyz, why the process is not ready; None if it is, also while it stands by."""
        if self.is_synced or self.is_standing_by:
            return None
        return "not in step with the API server yet"

    async def measure_lag(self, metrics: Metrics) -> None:
        """Measure, for ever, how late the event loop is: everything else waits for it."""
        while True:
            started = time.monotonic()
            await asyncio.sleep(_LAG_SECONDS)
            passed = time.monotonic() - started
            metrics.loop_lag.observe(max(0.0, passed - _LAG_SECONDS))

    def read_facts(self) -> Facts:
        """Return the facts about the operator's insides at this moment."""
        state = self._queue.observe()
        # Runs of another controller have no phase, and would seem to wait for this one.
        everything = self._cache.runs()
        runs = {key: raw for key, raw in everything.items() if is_managed_here(raw)}
        return Facts(
            queue_depth=state.depth,
            queue_oldest_age=state.oldest_age,
            queue_adds=state.added,
            watch_lag=self._cache.expectations.lag(),
            objects=self._cache.store.count(),
            phases=count_phases(runs.values()),
            runs=read_runs(runs, now=time.time(), pods_of=self._cache.pods),
        )
