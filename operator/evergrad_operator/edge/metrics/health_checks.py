"""Checks the operator's health, and collects the facts for its metrics."""

import asyncio
import time
from typing import Final

from evergrad_operator.core.objects.names import Key
from evergrad_operator.edge.api.lease import LeaseGate
from evergrad_operator.edge.api.transport import Gate
from evergrad_operator.edge.cache.cache import InformerCache
from evergrad_operator.edge.cache.queue import WorkQueue
from evergrad_operator.edge.metrics.operator_metrics import OperatorMetrics, RunFactsSource

STALLED_SECONDS: Final = 100.0
"""Seconds without progress after which /healthz fails. It is longer than the maximum of a pass, 60 s."""
_LAG_SECONDS: Final = 0.25


class Vitals:
    """Reads the state of the operator's parts without changing it."""

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
        """Whether the watches have started."""

    def find_stall(self) -> str | None:
        """Return, for /healthz, a description of work that stays stalled until a restart, or None."""
        # Without the lease, the process waits. This is not a stall, because a restart would not help.
        if isinstance(self._gate, LeaseGate) and self._gate.remaining() <= 0:
            return None

        # Do not check the number of waiting keys, because all runs are due together after a start.
        state = self._queue.observe()
        if state.stalled > STALLED_SECONDS:
            return (
                f"work is stalled: for {state.stalled:.0f} s no pass has finished, and {state.depth} runs "
                "wait for one"
            )
        # A pass has a shorter time limit. If it exceeds this limit, its run would never be reconciled again.
        if state.longest_work > STALLED_SECONDS:
            return f"work is stalled: {state.longest_work:.0f} s on one run, longer than a pass may take"

        # Before the watches have started, no watch can show the versions of the first list.
        lags = self._cache.expectations.lag().items() if self.is_synced else ()
        late = [(resource, lag) for resource, lag in lags if lag > STALLED_SECONDS]
        if late:
            behind = ", ".join(f"{resource} by {lag:.0f} s" for resource, lag in late)
            return f"a watch is behind: {behind}"
        return None

    def find_unready(self) -> str | None:
        """Return, for /readyz, why the process is not ready; None if it is ready. A standby is ready."""
        if self.is_synced or self.is_standing_by:
            return None
        return "not in step with the API server yet"

    async def measure_lag(self, metrics: OperatorMetrics) -> None:
        """Measure the delay of the event loop periodically. Never returns."""
        while True:
            started = time.monotonic()
            await asyncio.sleep(_LAG_SECONDS)
            passed = time.monotonic() - started
            metrics.loop_lag.observe(max(0.0, passed - _LAG_SECONDS))

    def read_facts(self) -> RunFactsSource:
        """Return the current facts about the operator's queue, cache and runs."""
        state = self._queue.observe()
        # If another replica holds the lease, it exports the series of runs. Both together would count each
        # run twice.
        is_led_elsewhere = isinstance(self._gate, LeaseGate) and self._gate.has_other_holder
        index = self._cache.store.facts
        return RunFactsSource(
            queue_depth=state.depth,
            queue_oldest_age=state.oldest_age,
            queue_adds=state.added,
            watch_lag=self._cache.expectations.lag(),
            objects=self._cache.store.count(),
            phases={} if is_led_elsewhere else index.count_phases(),
            runs=() if is_led_elsewhere else index.read(time.time()),
        )
