"""Lists a run's objects on the API server before pods are created or deleted.

The informer cache may be out of date, so it is not sufficient for these decisions.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Final

from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.errors import ApiError
from evergrad_operator.core.objects.kinds import (
    CLAIM,
    CONFIG_MAP,
    POD,
    POD_GROUP,
    SERVICE,
    Kind,
)
from evergrad_operator.core.objects.names import Key
from evergrad_operator.core.objects.raw import get_map, get_text
from evergrad_operator.core.observe.observe import AppliedSettings, is_claim_ours, owns
from evergrad_operator.core.observe.profiles import (
    UNREAD_PROFILE,
    NamespaceProfile,
    find_kept,
    resolve,
)
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.plan import ObjectPlan
from evergrad_operator.core.plan.changes import compare_settings
from evergrad_operator.edge.cache.cache import InformerCache, find_vanished
from evergrad_operator.edge.cache.claim_index import existing_claim
from evergrad_operator.edge.cache.namespace_profiles import NamespaceProfiles
from evergrad_operator.edge.cache.store import CHILDREN, CLAIMS, PODS, uid_of
from evergrad_operator.edge.metrics.operator_metrics import OperatorMetrics
from evergrad_operator.edge.reconcile.apply import ClusterWriter, build_failure
from evergrad_operator.edge.reconcile.gang_api import GangApi
from evergrad_operator.edge.reconcile.reconcile_context import (
    STEP_OF_PROFILE,
    Pass,
    step_of_claim,
    step_of_discovery,
    step_of_list,
)
from evergrad_operator.edge.reconcile.reconcile_metrics import note_failure
from evergrad_operator.edge.reconcile.refusals import Step

READ_SECONDS: Final = 15.0
"""Maximum time of each of these reads, in seconds.

All reads of a pass also share ``Pass.reads_until``, so that the pass has time left to write its status.
"""


@contextlib.asynccontextmanager
async def _time_for(work: Pass) -> AsyncIterator[None]:
    """Bound the time of one read.

    Raises TimeoutError if the read takes too long, or immediately if earlier reads have used up the pass's
    time.
    """
    now = asyncio.get_running_loop().time()
    if now >= work.reads_until:
        raise TimeoutError
    async with asyncio.timeout_at(min(now + READ_SECONDS, work.reads_until)):
        yield


class Confirmer:
    """Updates the cache for one run from the API server. ``clock`` returns seconds since 1970."""

    def __init__(
        self,
        cluster: ClusterWriter,
        *,
        cache: InformerCache,
        gang_api: GangApi,
        metrics: OperatorMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._profiles = NamespaceProfiles(cluster)
        self._gang_api = gang_api
        self._cluster, self._cache, self._metrics, self._clock = (
            cluster,
            cache,
            metrics,
            clock,
        )

    async def confirm(self, work: Pass, plan: ObjectPlan) -> bool:
        """List the objects that the plan depends on.

        Returns whether all reads succeeded, so that pods may be created and deleted now.
        """
        key, applied = work.key, work.hints.applied
        selector = f"{names.LABEL_RUN}={key[1]}"

        async def look() -> None:
            pods, version = await self._cluster.list_all(POD, key[0], selector=selector)
            # Add listed pods before dropping missing ones, because a pod may have been created again.
            for pod in pods:
                self._cache.see(PODS, pod)
            listed = {uid_of(pod) for pod in pods}
            for pod in find_vanished(self._cache.pods(key), listed, version=version):
                self._cache.forget(PODS, pod)
            # New pods need the ConfigMap and the Service, and no watch reports their deletion.
            for kind in (CONFIG_MAP, SERVICE) if plan.create else ():
                await self._look_at_children(key, kind)

        async def look_at_group() -> None:
            group = work.group_kind
            if group is None:
                return
            try:
                await self._look_at_children(key, group)
            except ApiError as error:
                if error.status != 404:
                    raise
                # The API server no longer serves this version. It may serve another version of the kind.
                self._gang_api.forget()
                other = await self._gang_api.find()
                if other is not None and other != group:
                    await self._look_at_children(key, other)

        # Skip the list for a new run without a status, without known pods and without an unanswered creation.
        # If one of its pods exists nevertheless, its creation is refused, and the next pass lists the pods.
        has_status = bool(get_map(work.raw, "status").get("conditions"))
        if has_status or self._cache.pods(key) or applied.is_in_doubt:
            if not await self._read(work, step_of_list(key), look):
                return False
            group_step = step_of_list(key, POD_GROUP)
            is_group_due = plan.create or work.refusals.has(group_step)
            if is_group_due and not await self._read(work, group_step, look_at_group):
                return False
            applied.is_in_doubt = False
        return await self.look_at_claim(work, oldest=0.0)

    async def _look_at_children(self, key: Key, kind: Kind) -> None:
        """Drop the run's cached objects of this kind that the API server no longer has. Raises ApiError."""
        children = self._cache.children(key).items()
        known = [child for (of, _), child in children if of == kind.kind]
        if not known:
            return
        found, version = await self._cluster.list_all(
            kind,
            key[0],
            selector=f"{names.LABEL_RUN}={key[1]}",
            metadata_only=True,
        )
        listed = {uid_of(child) for child in found}
        for child in find_vanished(known, listed, version=version):
            self._cache.forget(CHILDREN, child)

    async def fetch_applied(self, work: Pass, run: ParsedRun) -> AppliedSettings | None:
        """Return the settings that the run's pods read from its ConfigMap, or None.

        Raises ApiError or TimeoutError if the ConfigMap cannot be read. The pass then ends, because an edit
        of the run cannot be assessed without these settings.
        """
        namespace, name = work.key
        async with _time_for(work):
            found, _ = await self._cluster.list_all(
                CONFIG_MAP,
                namespace,
                name=names.config_name(name),
            )
        data = (get_map(raw, "data") for raw in found if owns(run.uid, raw))
        manifest = next((get_text(one, names.CONFIG_FILE) for one in data), None)
        return None if manifest is None else compare_settings(manifest, run)

    async def fill_in(self, work: Pass, config: Config) -> Pass:
        """Return the pass with its PodGroup kind and its profile.

        If discovery is refused, the PodGroup kind is the last known kind. If the namespace's profile cannot
        be read, the profile is ``UNREAD_PROFILE``, with which no run starts.
        """

        async def find_group() -> None:
            await self._gang_api.find()

        if self._gang_api.group:
            await self._read(work, step_of_discovery(self._gang_api.group), find_group)
        work = replace(work, group_kind=self._gang_api.known)

        # A run keeps the profile that it started with. A run that has not started uses the current profile.
        kept = find_kept(work.raw, config.profiles)
        if kept is not None:
            work.refusals.clear(STEP_OF_PROFILE)
            return replace(work, profile=kept)
        own: NamespaceProfile | None = None

        async def fetch_own() -> None:
            nonlocal own
            own = await self._profiles.fetch(work.key[0])

        is_read = await self._read(work, STEP_OF_PROFILE, fetch_own)
        if not is_read:
            return replace(work, profile=UNREAD_PROFILE)
        profile = resolve(work.raw, config.profiles, own, config.installation)
        return replace(work, profile=profile)

    async def look_at_claim(self, work: Pass, *, oldest: float) -> bool:
        """Fetch the existing claim that the run names, if the last fetch is ``oldest`` seconds old or older.

        No watch shows such a claim. All runs that name it share the fetched object. Returns False if the API
        server did not answer.
        """
        namespace, name = work.key[0], existing_claim(work.raw)
        if name is None:
            # A user may have created a claim with the run's name. No watch shows this claim either.
            own = self._cache.claim(*work.key)
            if own is None or is_claim_ours(own):
                return True
            name = work.key[1]
        step = step_of_claim(name)
        age = self._clock() - self._cache.claim_index.fetched_at(namespace, name)
        if age < oldest and not work.refusals.has(step):
            return True

        async def look() -> None:
            claim = await self._cluster.get(CLAIM, namespace, name)
            self._cache.claim_index.note_fetched(namespace, name, self._clock())
            if claim is not None:
                self._cache.see(CLAIMS, claim)
            elif (known := self._cache.claim(namespace, name)) is not None:
                self._cache.forget(CLAIMS, known)

        return await self._read(work, step, look)

    async def _read(
        self, work: Pass, step: Step, look: Callable[[], Awaitable[None]]
    ) -> bool:
        """Run a read and return whether the API server answered.

        A refusal is recorded like the refusal of a write. The status reports it, and the step is retried
        after a pause.
        """
        refusals, generation = work.refusals, work.generation
        # While an earlier refusal holds, send no request. Requests in each pass would only load the server.
        held = refusals.find_waiting(
            step,
            generation=generation,
            now=self._clock(),
        )
        if held is not None:
            return False
        try:
            async with _time_for(work):
                await look()
        except (ApiError, TimeoutError) as error:
            failure = build_failure(step, error, at=self._clock())
            refusals.note(failure, generation=generation)
            note_failure(self._metrics, work.key, failure)
            return False
        refusals.clear(step)
        return True
