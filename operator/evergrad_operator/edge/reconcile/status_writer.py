"""Writes a run's status where it differs, and then the events that the change means."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from evergrad_manifest.errors import Problem
from evergrad_operator.core.decision import Decision
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.errors import ApiError, SpecError
from evergrad_operator.core.objects.kinds import Raw
from evergrad_operator.core.objects.problems import list_problems
from evergrad_operator.core.observe.observe import Observation
from evergrad_operator.core.observe.time_accounting import NO_PRICE, Price
from evergrad_operator.core.status.events import derive_events, describe_edit
from evergrad_operator.core.status.run_status import (
    ApplyOutcome,
    build_refused_status,
    build_status,
    should_write,
)
from evergrad_operator.edge.api.event_recorder import Recorder
from evergrad_operator.edge.cache.cache import InformerCache
from evergrad_operator.edge.cache.store import RUNS
from evergrad_operator.edge.metrics.operator_metrics import OperatorMetrics
from evergrad_operator.edge.reconcile.apply import ClusterWriter
from evergrad_operator.edge.reconcile.reconcile_context import Pass

log = logging.getLogger(__name__)
_RETRY_SECONDS: Final = 5.0
"""Delay of the pass after a conflict: the watch shows the newer run long before."""


class StatusWriter:
    """Writes statuses, one at the end of each pass. ``clock``: epoch seconds."""

    def __init__(
        self,
        cluster: ClusterWriter,
        *,
        cache: InformerCache,
        recorder: Recorder,
        metrics: OperatorMetrics,
        clock: Callable[[], float],
        price: Price = NO_PRICE,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._recorder = recorder
        self._metrics = metrics
        self._clock = clock
        self._price = price
        self.on_missing: Callable[[], None] = lambda: None
        """Called when the API server finds no run where the cache has one."""

    async def write(
        self,
        work: Pass,
        seen: Observation,
        decision: Decision,
        outcome: ApplyOutcome,
    ) -> float | None:
        """Write the status if it differs. Returns the seconds until a write that is not allowed yet."""
        now = self._clock()
        old = work.raw.get("status") or {}
        new = build_status(seen, decision, outcome, now, self._price)
        last = work.hints.progress_written_at
        # Most passes change nothing, and end here.
        write = should_write(old, new, now=now, last_progress_write=last)
        if not write.write:
            return write.after
        retry, is_written = await self._store(work, new)
        if not is_written:
            return retry

        work.hints.progress_written_at = now
        self._cache.drop_gone(work.key, (pod.uid for pod, _ in seen.gone))
        if _step(old) is None and _step(new) is not None:
            self._metrics.startup_seconds.observe(max(0.0, now - seen.run.created_at))

        # Events follow the write: one of a status that was refused would be posted again with the next try.
        for event in derive_events(old, new):
            await self._recorder.record(work.raw, event.type, event.reason, event.message)
        return write.after

    async def announce_edit(self, work: Pass, seen: Observation) -> None:
        """Post the event of an edit, once, before anything is applied.

        An operator that is killed after the ConfigMap is applied could not name the changes any more.
        """
        event = describe_edit(seen)
        if event is not None:
            await self._recorder.record(
                work.raw, event.type, event.reason, event.message, once=event.once
            )

    async def refuse(self, work: Pass, error: SpecError) -> float | None:
        """Report a spec that cannot be read: once as an event, and in the status.

        Nothing is tried again: a corrected spec is a new generation, which causes a pass by itself.
        """
        text = str(error)
        if text not in work.hints.posted:
            work.hints.posted.add(text)
            self._metrics.reconcile_errors.labels("InvalidSpec").inc()
            log.warning("%s/%s: %s", *work.key, text)
            await self._recorder.record(
                work.raw,
                "Warning",
                names.Reason.INVALID_SPEC,
                text,
            )
        status = build_refused_status(work.raw, text, self._clock())
        if status == (work.raw.get("status") or {}):
            return None
        retry, _ = await self._store(work, status)
        return retry

    async def warn_of_spelling(self, work: Pass, outdated: Sequence[Problem]) -> None:
        """Report, once for each process, spellings that only an earlier version accepts: the run goes on."""
        if not outdated:
            return
        # An event holds a kibibyte.
        listed = list_problems(outdated, most=900)
        text = f"The run goes on, but its next edit must correct: {listed}"
        if text not in work.hints.posted:
            work.hints.posted.add(text)
            await self._recorder.record(
                work.raw,
                "Warning",
                names.Reason.OUTDATED_SPEC,
                text,
            )

    async def _store(self, work: Pass, status: Raw) -> tuple[float | None, bool]:
        """Store the status. Returns the seconds until it is tried again, if at all, and whether it is stored.

        Raises ApiError.
        """
        (namespace, name) = work.key
        metadata = work.raw["metadata"]
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {
                "name": name,
                "namespace": namespace,
                "uid": metadata["uid"],
            },
            "status": status,
        }
        try:
            stored = await self._cluster.apply(
                body,
                subresource="status",
                is_brief=True,
            )
        except ApiError as error:
            if error.status == 404:
                # The run is gone, perhaps in a gap of the watch, which then shows no event of it. Only a list
                # proves it: an API server that has just started answers 404 for every custom resource.
                self.on_missing()
                return None, False
            if error.status == 409:
                # Another run has taken the name, or somebody was quicker: the cache is behind.
                return _RETRY_SECONDS, False
            raise
        self._metrics.status_writes.inc()
        # The answer has metadata alone. Where its generation is newer, its spec is not known here yet, and
        # the watch brings both.
        if stored["metadata"].get("generation") == metadata.get("generation"):
            updated = {
                **work.raw,
                "metadata": stored["metadata"],
                "status": status,
            }
            self._cache.see(RUNS, updated)
        return None, True


def _step(status: Raw) -> Any:
    return (status.get("progress") or {}).get("step")
