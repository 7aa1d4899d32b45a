"""Writes a run's status if it has changed, and then posts the events of the change."""

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
"""Seconds until the pass after a conflict. By then, the watch has shown the newer run."""


class StatusWriter:
    """Writes the status at the end of each pass. ``clock`` returns seconds since 1970."""

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
        """Called when the API server does not find a run that is in the cache."""

    async def write(
        self,
        work: Pass,
        seen: Observation,
        decision: Decision,
        outcome: ApplyOutcome,
    ) -> float | None:
        """Write the status if it has changed, and post the events of the change.

        Returns the seconds until the next write if a write is pending, otherwise None. Raises ApiError.
        """
        now = self._clock()
        old = work.raw.get("status") or {}
        new = build_status(seen, decision, outcome, now, self._price)
        last = work.hints.progress_written_at
        # Most passes change nothing and return here.
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

        # Post events after the write. If the write were refused, the retry would post the same events again.
        for event in derive_events(old, new):
            await self._recorder.record(work.raw, event.type, event.reason, event.message)
        return write.after

    async def announce_edit(self, work: Pass, seen: Observation) -> None:
        """Post the event of an edit once, before any object is applied.

        After the ConfigMap is applied, a restarted operator could no longer determine the changes.
        """
        event = describe_edit(seen)
        if event is not None:
            await self._recorder.record(
                work.raw, event.type, event.reason, event.message, once=event.once
            )

    async def refuse(self, work: Pass, error: SpecError) -> float | None:
        """Report an invalid spec, once as an event and in the status.

        There is no retry, because a corrected spec has a new generation, which causes a pass. Returns the
        seconds until the status write is retried, or None.
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
        """Post an event, once per process, for spellings that only an earlier version accepts.

        The run continues.
        """
        if not outdated:
            return
        # The message of an event has at most 1 KiB.
        listed = list_problems(outdated, most=900)
        text = f"The run continues, but its next edit must correct: {listed}"
        if text not in work.hints.posted:
            work.hints.posted.add(text)
            await self._recorder.record(
                work.raw,
                "Warning",
                names.Reason.OUTDATED_SPEC,
                text,
            )

    async def _store(self, work: Pass, status: Raw) -> tuple[float | None, bool]:
        """Store the status.

        Returns the seconds until the retry, or None if there is none, and whether the status is stored.
        Raises ApiError for any refusal except 404 and 409.
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
                # The run may have been deleted during a gap of the watch, which then reports no event. Only a
                # list proves it, because an API server that has just started returns 404 for every custom
                # resource.
                self.on_missing()
                return None, False
            if error.status == 409:
                # The cache is out of date: another run has this name, or another client has written first.
                return _RETRY_SECONDS, False
            raise
        self._metrics.status_writes.inc()
        # The answer contains only metadata. If its generation is newer, the new spec is not in the cache yet,
        # and the watch will deliver both.
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
