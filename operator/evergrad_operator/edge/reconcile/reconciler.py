"""Reconciles one run, level-triggered: observe → decide → plan → apply → one status write.

A pass does not depend on an event. If a pass is interrupted between two writes, the next pass repeats it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from evergrad_manifest.model.claims import claims_of
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.errors import OperatorError, SpecError
from evergrad_operator.core.objects.kinds import CLAIM, POD, POD_GROUP, Raw
from evergrad_operator.core.objects.names import Key
from evergrad_operator.core.observe.coordinator_status import (
    CoordinatorStatus,
    parse_progress,
)
from evergrad_operator.core.observe.observe import Observation, observe, observe_gone
from evergrad_operator.core.observe.preparation import PreparationReport, find_report
from evergrad_operator.core.observe.spec import SpecCache, is_managed_here
from evergrad_operator.core.observe.time_accounting import Price
from evergrad_operator.core.plan import ObjectPlan, plan_children
from evergrad_operator.core.plan.changes import is_edited
from evergrad_operator.core.policies import Decision, decide
from evergrad_operator.core.status.run_status import ApplyOutcome
from evergrad_operator.edge.api.event_recorder import Recorder
from evergrad_operator.edge.cache.cache import InformerCache
from evergrad_operator.edge.cache.store import uid_of
from evergrad_operator.edge.metrics.operator_metrics import OperatorMetrics
from evergrad_operator.edge.reconcile.apply import (
    TOKEN_SECONDS,
    UNFINISHED_SECONDS,
    Applier,
    ApplyResult,
    ClusterWriter,
    is_pod_work_due,
    list_steps,
)
from evergrad_operator.edge.reconcile.confirmation import Confirmer
from evergrad_operator.edge.reconcile.coordinator_poller import (
    CoordinatorResponse,
    Coordinators,
)
from evergrad_operator.edge.reconcile.gang_api import GangApi
from evergrad_operator.edge.reconcile.poll_schedule import CoordinatorPolling
from evergrad_operator.edge.reconcile.reconcile_context import (
    Hints,
    Pass,
    list_reads,
    step_of_list,
)
from evergrad_operator.edge.reconcile.reconcile_metrics import (
    list_created,
    note_error,
    note_results,
)
from evergrad_operator.edge.reconcile.status_writer import StatusWriter

log = logging.getLogger(__name__)
RECONCILE_SECONDS: Final = 60.0
"""Maximum seconds of one pass. If the requests of a run hang, they must not block a queue worker forever."""
STATUS_SECONDS: Final = 12.0
"""Part of ``RECONCILE_SECONDS`` that is reserved for the status write, which reports refused steps."""
READS_SECONDS: Final = 15.0
"""Maximum seconds of all reads of one pass together.

Even if the coordinator's answer, the events and the steps all take their maximum time, ``STATUS_SECONDS``
remain.
"""
CLAIM_SECONDS: Final = 30.0
"""Maximum age, in seconds, at which a claim without a watch is used without another request.

For example, no watch covers a claim that a user has created.
"""
SILENCE_SECONDS: Final = 15.0
"""Seconds of a coordinator's silence after which the run's pods are listed.

A pod that is deleted during a gap of the watch causes no event.
"""


@dataclass(frozen=True)
class Assessment:
    """A run at one moment: the observation, the decision, and the objects that should exist."""

    seen: Observation
    decision: Decision
    plan: ObjectPlan


class Reconciler:
    """Reconciles runs with their specs. ``clock`` returns seconds since 1970."""

    def __init__(
        self,
        cluster: ClusterWriter,
        *,
        cache: InformerCache,
        coordinators: Coordinators,
        recorder: Recorder,
        config: Config,
        metrics: OperatorMetrics,
    ) -> None:
        self._cache = cache
        self._coordinators = coordinators
        self._config = config
        self._metrics = metrics
        self._hints: dict[Key, Hints] = {}
        self._specs = SpecCache(config.installation)
        self.clock: Callable[[], float] = time.time
        self.token_of: Callable[[str], str] = _refuse_token
        self.on_forget: Callable[[Key], None] = lambda key: None

        # The parts read clock and tokens through this object, because callers set both after construction.
        def now() -> float:
            return self.clock()

        def token_of(uid: str) -> str:
            return self.token_of(uid)

        self.gang_api = GangApi(cluster, config.gang, clock=now)
        self._follower = CoordinatorPolling(coordinators, token_of)
        self._confirmer = Confirmer(
            cluster, cache=cache, gang_api=self.gang_api, metrics=metrics, clock=now
        )
        self._applier = Applier(cluster, cache=cache, coordinators=coordinators, clock=now)
        self.statuses = StatusWriter(
            cluster,
            cache=cache,
            recorder=recorder,
            metrics=metrics,
            clock=now,
            price=Price(
                config.price_gpu_hour, config.price_pod_hour, config.price_currency
            ),
        )

    def forget_hints(self) -> None:
        """Drop all hints, because another operator may have changed objects since they were recorded."""
        self._hints.clear()
        self.gang_api.forget()

    async def reconcile(self, key: Key) -> float | None:
        """Reconcile one run.

        Returns the seconds until its next pass, or None if the next pass waits for an event. Raises an
        exception if the pass fails; the queue then retries the run.
        """
        started = time.perf_counter()
        result = "success"
        try:
            raw = self._cache.run(key)
            known = self._hints.get(key)
            if raw is None or (known is not None and known.uid != uid_of(raw)):
                # The run is gone, and a new run may have its name. Drop refusals and progress, which would
                # otherwise be used for the new run.
                self._hints.pop(key, None)
                self._coordinators.leave(key)
            if raw is None:
                # Drop everything that is kept under this name, or it would stay until the process ends.
                self._specs.forget(key)
                self.on_forget(key)
                return None
            if not is_managed_here(raw):
                # Another controller manages this run, including its status.
                self._specs.forget(key)
                return None
            kept = self._hints.get(key)
            if kept is not None and kept.applied.is_run_deleted:
                # The watch has not reported the deletion yet, or a foreign finalizer delays it.
                return None

            async with asyncio.timeout(RECONCILE_SECONDS):
                delay = await self._reconcile(key, raw)
            result = "success" if delay is None else "requeue"
            return delay
        except Exception as error:
            result = "error"
            note_error(self._metrics, key, error)
            raise
        finally:
            self._metrics.reconciles.labels(result).inc()
            self._metrics.reconcile_seconds.observe(time.perf_counter() - started)

    async def _reconcile(self, key: Key, raw: Raw) -> float | None:
        # Assess the run from the cache. Read the claim first, because no watch shows a claim that a user has
        # created.
        started = asyncio.get_running_loop().time()
        hints = self._hints.setdefault(key, Hints(uid_of(raw)))
        work = Pass(key, raw, hints, reads_until=started + READS_SECONDS)
        await self._confirmer.look_at_claim(work, oldest=CLAIM_SECONDS)
        work = await self._confirmer.fill_in(work, self._config)
        try:
            found = self._assess(work)
        except SpecError as error:
            return await self.statuses.refuse(work, error)
        if found.seen.status.finish is None and not found.seen.run.is_deleting:
            # The warning is about the next edit. A run that is finished or being deleted is not edited again.
            await self.statuses.warn_of_spelling(work, found.seen.run.parsed.outdated)

        # Request the state that no watch shows. If there is any, assess again.
        news = await self._read_unwatched(work, found.seen)
        if news is not None:
            work, found = news, self._assess(news)
        await self.statuses.announce_edit(work, found.seen)

        # List the pods before one is created or deleted, because the cache may be out of date. If they are
        # listed, assess again.
        confirmed = await self._list_pods(work, found)
        if confirmed is not None:
            work, found = confirmed, self._assess(confirmed)

        # Apply the plan. A refused step does not delay the other steps. This pass reports it, and it is
        # retried after its own pause.
        doable = found.plan if confirmed else replace(found.plan, create=(), delete=())
        results = await self._applier.apply(
            key,
            found.seen,
            doable,
            work.hints.applied,
            until=started + RECONCILE_SECONDS - STATUS_SECONDS,
        )
        if work.hints.applied.is_run_deleted:
            return None
        self.gang_api.note(results)
        note_results(
            self._metrics,
            key,
            found.seen,
            plan=doable,
            results=results,
            now=self.clock(),
        )

        # Report the result of this pass in the status.
        found = self._with_refusals(work, found)
        self._follower.follow(key, found.seen)
        return await self._write_status(work, found, results)

    async def _read_unwatched(self, work: Pass, seen: Observation) -> Pass | None:
        """Request the coordinator's answer about ended pods, and the settings that pods use after an edit.

        Returns the pass to continue with, or None if nothing was requested.
        """
        has_asked = await self._follower.ask_about_ends(work, seen)
        if is_edited(seen):
            # Until the ConfigMap is applied again, it contains the settings that the pods use.
            applied = await self._confirmer.fetch_applied(work, seen.run)
            return replace(work, applied=applied)
        return work if has_asked else None

    async def _list_pods(self, work: Pass, found: Assessment) -> Pass | None:
        """List the run's pods on the API server if this pass needs them.

        Returns the pass to continue with, or None if the pods were not listed. A pass without this list
        creates and deletes no pod.
        """
        if not self._is_look_due(work, found):
            return None
        if not await self._confirmer.confirm(work, found.plan):
            return None
        raw = self._cache.run(work.key) or work.raw
        return replace(work, raw=raw, group_kind=self.gang_api.known)

    def _with_refusals(self, work: Pass, found: Assessment) -> Assessment:
        """Return the assessment with the refusals of this pass. Forget refusals of steps that are over."""
        work.refusals.keep(
            {*list_steps(found.plan), *list_reads(work, self.gang_api.group)}
        )
        failures = work.refusals.failures()
        if failures == found.seen.failures:
            return found
        # Update only the refusals. A complete observation would count the pods that this pass has deleted as
        # lost.
        seen = replace(found.seen, failures=failures)
        return replace(found, seen=seen, decision=decide(seen, self._config, self.clock()))

    async def _write_status(
        self, work: Pass, found: Assessment, results: list[ApplyResult]
    ) -> float | None:
        """Write the status once, at the end, so that no client reads the status of an incomplete pass.

        Returns the seconds until the next pass, or None if the next pass waits for an event.
        """
        # Read the time of the next retry before the status is written. A retry that becomes due during the
        # write would otherwise count as waiting for another step, and cause no pass.
        retry_after = work.refusals.seconds_to_next(self.clock())
        token_after = None if found.plan.token is None else TOKEN_SECONDS
        more_after = UNFINISHED_SECONDS if work.hints.applied.is_unfinished else None

        outcome = ApplyOutcome(created=list_created(results))
        write_after = await self.statuses.write(work, found.seen, found.decision, outcome)
        delays = (
            found.decision.requeue_after,
            retry_after,
            token_after,
            more_after,
            write_after,
        )
        return min((delay for delay in delays if delay is not None), default=None)

    # ---- observe, decide, plan: values in, values out ------------------------------------------------------

    def _assess(self, work: Pass) -> Assessment:
        """Return the observation of the run, the decision and the plan.

        Raises SpecError if the spec is invalid.
        """
        key = work.key
        parsed = self._specs.parse(work.raw, work.profile)
        claim_name = claims_of(work.raw).storage

        # Observe what exists.
        answer = self._coordinators.answer(key)
        progress, report = _parse_answer(key, answer)
        observed = observe(
            parsed,
            pods=self._cache.pods(key),
            others=self._cache.others(key),
            children=self._collect_children(work, claim_name),
            progress=progress,
            failures=work.refusals.failures(),
        )

        # Add what is known about these objects from other runs and from earlier passes.
        ended_at = work.hints.note_ends(observed, self._coordinators.clock())
        users = self._cache.claim_index.users_of(key[0], claim_name)
        seen = replace(
            observed,
            claim_users=frozenset(name for _, name in users),
            silence=self._coordinators.silence(key),
            troubled_hosts=self._cache.host_index.find_troubled(self.clock()),
            applied=work.applied,
            report=report,
            group_kind=work.group_kind,
            gone=observe_gone(parsed, self._cache.gone(key)),
            leaving_since=work.hints.note_leaving(observed, self.clock()),
            is_answer_new=answer is not None and answer.at >= ended_at,
        )

        # Decide, and plan the objects that should exist.
        decision = decide(seen, self._config, self.clock())
        token = self.token_of(seen.run.uid)
        plan = plan_children(seen, decision, self._config, token=token)
        return Assessment(seen, decision, plan)

    def _collect_children(self, work: Pass, claim_name: str) -> dict[tuple[str, str], Raw]:
        """Return the run's claim and its other children, by kind and name."""
        children: dict[tuple[str, str], Raw] = {}
        claim = self._cache.claim(work.key[0], claim_name)
        if claim is not None:
            children[CLAIM.kind, claim_name] = claim
        for name, child in self._cache.children(work.key).items():
            metadata = child["metadata"]
            version = work.hints.applied.versions.get(name)
            if version is not None and version != metadata.get("resourceVersion"):
                # Another client has changed the child since our last apply without changing the hash of the
                # applied content. Remove the hash from this copy, so that the child is applied again.
                annotations = dict(metadata.get("annotations") or {})
                annotations.pop(names.ANNOTATION_HASH, None)
                child = {**child, "metadata": {**metadata, "annotations": annotations}}
            children[name] = child
        return children

    def _is_look_due(self, work: Pass, found: Assessment) -> bool:
        """Return whether this pass lists the run's pods on the API server.

        If a pass has no step to try, it lists nothing. For example, the run waits for its quota.
        """
        # A silent coordinator may have been deleted during a gap of the watch. List each time that the
        # silence has doubled, so that a coordinator that is silent for hours causes few lists.
        hints = work.hints
        silence = found.seen.silence
        seconds = silence.seconds if silence is not None else 0.0
        is_silent = seconds >= max(SILENCE_SECONDS, 2.0 * hints.silence_listed)
        if is_silent:
            hints.silence_listed = seconds
        elif seconds < SILENCE_SECONDS:
            hints.silence_listed = 0.0

        # Retry a refused list even if no step needs it any more. Otherwise its refusal would stay in the
        # status forever.
        is_refused = any(
            work.refusals.has(step_of_list(work.key, kind))
            for kind in (POD.kind, POD_GROUP)
        )
        is_work_due = is_pod_work_due(
            found.plan,
            work.refusals,
            generation=found.seen.run.generation,
            now=self.clock(),
        )
        return is_silent or is_refused or is_work_due


def _parse_answer(
    key: Key, answer: CoordinatorResponse | None
) -> tuple[CoordinatorStatus | None, PreparationReport | None]:
    """Return the coordinator's progress or the report of a preparation, whichever the answer contains.

    An invalid answer is logged and gives neither, because it must not stop the pass.
    """
    if answer is None:
        return None, None
    report = find_report(answer.raw, attempt=answer.attempt)
    if report is not None:
        return None, report
    try:
        return parse_progress(answer.raw, attempt=answer.attempt), None
    except OperatorError as error:
        log.warning("%s/%s: %s", *key, error)
        return None, None


def _refuse_token(uid: str) -> str:
    raise OperatorError(
        f"run {uid}: the installation's key has not been read. This is a defect of the operator; "
        "please report it."
    )
