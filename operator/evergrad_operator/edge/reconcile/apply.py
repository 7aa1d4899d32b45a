"""Carries out a plan, step by step, and returns the result of each step.

If a step is refused or gets no answer, the other steps and the write of the status still run. Only
LeaseLostError is raised, because a process without the lease must not write.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from evergrad_manifest.model.claims import DROPPED_UNFINISHED
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.errors import ApiError, LeaseLostError, OperatorError
from evergrad_operator.core.objects.kinds import (
    CLAIM,
    POD,
    POD_GROUP,
    RUN,
    SERVICE,
    Kind,
    Raw,
    kind_of,
)
from evergrad_operator.core.objects.names import Key
from evergrad_operator.core.observe.observe import (
    BOUNDS_NOT_TAKEN,
    NAME_LEAVING,
    NAME_LEFT,
    NAME_TAKEN,
    ApplyFailure,
    Observation,
    is_claim_ours,
    is_left_behind,
    owns,
)
from evergrad_operator.core.plan import Deletion, ObjectPlan
from evergrad_operator.core.plan.claim import build_record_alone
from evergrad_operator.edge.cache.cache import NEW_POD_STATUS, InformerCache
from evergrad_operator.edge.cache.store import CHILDREN, CLAIMS, PODS
from evergrad_operator.edge.reconcile.coordinator_poller import Coordinators
from evergrad_operator.edge.reconcile.reconcile_context import Applied
from evergrad_operator.edge.reconcile.refusals import Refusals, Step

log = logging.getLogger(__name__)
APPLY_SECONDS: Final = 30.0
"""Maximum time, in seconds, of all steps of a plan together. The rest of the pass is for the status.

A single admission webhook may take this long.
"""
PODS_AT_ONCE: Final = 32
"""Maximum number of pods that are created or deleted at the same time, both for one run and for all runs.

It equals the client's default limit of requests in flight. Requests beyond that limit would wait inside the
client, and their timeout would look like an API server that does not answer. The limit also keeps a small run
from waiting behind a thousand pods of another run.
"""
_SHARE_TO_BEGIN: Final = 2 / 3
"""Share of the time of all steps after which no further pod is started.

The rest of the time is for the answers to requests that were sent. The next pass handles the remaining pods.
"""
UNFINISHED_SECONDS: Final = 1.0
"""Seconds until the pass that continues an unfinished pass. Other runs are reconciled in between."""
TOKEN_SECONDS: Final = 30.0
"""Seconds between two POSTs of the token Secret of a run whose pods are scheduled but do not start.

The Secret usually exists. The POST creates it again if a user has deleted it.
"""
_NOT_AS_EXPECTED: Final = 412


class ClusterWriter(Protocol):
    """The requests to the API server that a reconcile needs. ``Kube`` and the fake of the tests implement it.

    All methods raise ApiError if the request fails.
    """

    async def get(self, kind: Kind, namespace: str, name: str) -> Raw | None:
        """Return one object, or None if it does not exist."""

    async def list_all(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        selector: str = "",
        name: str = "",
        metadata_only: bool = False,
    ) -> tuple[list[Raw], int]:
        """Return the objects that match, and the resource version of the list."""

    async def create(self, body: Raw, *, is_brief: bool = False) -> Raw:
        """Create an object and return it. If ``is_brief``, the result has only its metadata."""

    async def apply(
        self,
        body: Raw,
        *,
        subresource: str = "",
        manager: str = names.FIELD_MANAGER,
        is_brief: bool = False,
    ) -> Raw:
        """Apply the complete intent of ``manager`` by server-side apply, and return the object."""

    async def merge(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        patch: Raw,
    ) -> Raw:
        """Apply a JSON merge patch."""

    async def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        grace: int | None = None,
    ) -> bool:
        """Delete one object. Return False if it is gone, or if the preconditions no longer hold."""

    async def serves(self, kind: Kind) -> bool:
        """Return whether the API server serves this kind."""


@dataclass(frozen=True)
class ApplyResult:
    """The result of one step.

    ``failure`` is None if the step succeeded. ``is_tried`` is False if the step was skipped because an
    earlier refusal still holds.
    """

    step: Step
    failure: ApplyFailure | None = None
    is_tried: bool = True


def list_steps(plan: ObjectPlan) -> Iterator[Step]:
    """List all steps of a plan."""
    if plan.claim is not None:
        yield _step_of("apply", plan.claim)
    if plan.token is not None:
        yield _step_of("create", plan.token)
    yield from (_step_of("apply", body) for body in plan.apply)
    yield from (("delete", end.kind, end.name) for end in plan.delete)
    yield from (_step_of("create", body) for body in plan.create)
    if plan.bounds is not None:
        yield _BOUNDS_STEP


def is_pod_work_due(
    plan: ObjectPlan,
    refusals: Refusals,
    *,
    generation: int,
    now: float,
) -> bool:
    """Return whether the plan deletes an object or creates a pod that no earlier refusal holds back."""
    waiting = partial(
        refusals.find_waiting,
        generation=generation,
        now=now,
    )
    if any(waiting(("delete", end.kind, end.name)) is None for end in plan.delete):
        return True
    # The pods of a group are created in this order. A quota that refuses one pod refuses the next ones, too.
    for bodies in _group_pods(plan.create):
        for body in bodies:
            failure = waiting(_step_of("create", body))
            if failure is None:
                return True
            if _concerns_others(failure):
                break
    return False


@dataclass(frozen=True)
class _Work:
    """A plan that is being applied. Times are on the event loop's clock.

    ``deadline``: end of the time of all steps. ``last_begin``: time after which no further pod is started.
    """

    key: Key
    seen: Observation
    applied: Applied
    deadline: float
    last_begin: float


_PodStep = Callable[[], Awaitable[ApplyResult]]
"""Creates or deletes one pod."""


class Applier:
    """Applies plans. ``clock`` returns seconds since 1970."""

    def __init__(
        self,
        cluster: ClusterWriter,
        *,
        cache: InformerCache,
        coordinators: Coordinators,
        clock: Callable[[], float],
    ) -> None:
        self._cluster, self._cache = cluster, cache
        self._coordinators, self._clock = coordinators, clock
        self._pod_slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def apply(
        self,
        key: Key,
        seen: Observation,
        plan: ObjectPlan,
        applied: Applied,
        *,
        until: float = float("inf"),
    ) -> list[ApplyResult]:
        """Apply claim, token and other children, delete, then create pods and Services, then post bounds.

        ``until``: latest time at which the pass has to write its status, on the event loop's clock.

        Returns a result for each step that was started. If the time was too short for some steps,
        ``applied.is_unfinished`` is True.

        Raises LeaseLostError if the lease is lost.
        """
        now = asyncio.get_running_loop().time()
        deadline = min(now + APPLY_SECONDS, until)
        last_begin = now + (deadline - now) * _SHARE_TO_BEGIN
        work = _Work(key, seen, applied, deadline, last_begin)
        applied.is_unfinished = False

        # Apply the claim with the run's record, then create the token's Secret: without it, a pod would be
        # scheduled and then wait.
        claimed = await self._try_claim(work, plan)
        token = await self._try_token(work, plan)

        # The ConfigMap is applied before the pods that mount it. Pods are deleted before new pods are
        # created that need their resources.
        children = [body for body in plan.apply if body["kind"] != SERVICE.kind]
        services = [body for body in plan.apply if body["kind"] == SERVICE.kind]
        put = await _gather(self._put(work, body) for body in children)
        results = [*claimed, *token, *put]
        results += await self._begin_all(
            work, [partial(self._end, work, end) for end in plan.delete]
        )

        # Apply the Services at the same time as the pods, because the API server needs more time to allocate
        # a Service's address than for any other step.
        may_create = _may_create_pods(seen, claim=claimed, token=token, children=put)
        pods = plan.create if may_create else ()
        puts = (self._put(work, body) for body in services)
        # Create the groups of pods concurrently: if one group gets no answer, the others are still created.
        groups = (self._create_some(work, some) for some in _group_pods(pods))
        made = await _gather([*puts, *groups])
        results += made[: len(services)]
        results += [one for group in made[len(services) :] for one in group]

        # Post bounds last: a coordinator that does not answer must not delay the replacement of a lost pod
        # or a deletion.
        if plan.bounds is not None:
            post_bounds = partial(self._coordinators.post_bounds, key, plan.bounds)
            results.append(await self._try(work, _BOUNDS_STEP, post_bounds))
        return results

    # ---- one step ------------------------------------------------------------------------------------------

    async def _try_claim(self, work: _Work, plan: ObjectPlan) -> list[ApplyResult]:
        """Apply the claim if the plan has one. Returns at most one result."""
        if plan.claim is None:
            return []
        put_claim = partial(self._put_claim, plan.claim, plan)
        return [await self._try(work, _step_of("apply", plan.claim), put_claim)]

    async def _try_token(self, work: _Work, plan: ObjectPlan) -> list[ApplyResult]:
        """Create the token's Secret if the plan creates pods or the last try is old.

        Returns at most one result.
        """
        if plan.token is None:
            return []
        now = self._clock()
        if not plan.create and now - work.applied.token_posted_at < TOKEN_SECONDS:
            return []
        work.applied.token_posted_at = now
        create_token = partial(self._create_token, plan.token)
        return [await self._try(work, _step_of("create", plan.token), create_token)]

    async def _create_token(self, token: Mapping[str, Any]) -> None:
        # If the Secret already exists, it belongs to the run, because its name is computed from the token.
        # It is not put into the cache, because no watch and no list covers Secrets.
        try:
            await self._cluster.create(token, is_brief=True)
        except ApiError as error:
            if error.status != 409 or error.reason != "AlreadyExists":
                raise

    async def _try(
        self, work: _Work, step: Step, act: Callable[[], Awaitable[Any]]
    ) -> ApplyResult:
        """Run a step, unless an earlier refusal of it still holds.

        A refusal or a missing answer is recorded and returned as the result's failure. Raises LeaseLostError.
        """
        refusals, generation = work.applied.refusals, work.seen.run.generation
        # Skip a step whose pause after a refusal is not over. With 1,000 runs under a quota, repeated tries
        # would use all requests to the API server.
        held = refusals.find_waiting(
            step,
            generation=generation,
            now=self._clock(),
        )
        if held is not None:
            return ApplyResult(step, held, is_tried=False)
        try:
            async with asyncio.timeout_at(work.deadline):
                await act()
        # Another operator may be writing now, so nothing is recorded and the pass ends.
        except LeaseLostError:
            raise
        except (OperatorError, TimeoutError) as error:
            failure = build_failure(step, error, at=self._clock())
            if step[:2] == ("create", POD.kind) and failure.status == 0:
                work.applied.is_in_doubt = (
                    True  # the pod may exist even though no answer came
                )
            asked = error.retry_after if isinstance(error, ApiError) else None
            refusals.note(
                failure,
                generation=generation,
                at_least=asked or 0.0,
            )
            return ApplyResult(step, failure)
        refusals.clear(step)
        return ApplyResult(step)

    async def _put_claim(self, body: Raw, plan: ObjectPlan) -> None:
        """Remove the records of deleted runs from the claim, then apply it with the run's own record."""
        metadata = body["metadata"]
        stale = plan.stale_records
        if stale.annotations:
            # A merge patch removes a field regardless of its owner. A field manager disappears from the
            # object with its last field.
            annotations: dict[str, str | None] = dict.fromkeys(stale.annotations)
            patch: dict[str, Any] = {"metadata": {"annotations": annotations}}
            if stale.dropped_unfinished is not None:
                # The count is based on the claim as it was read. The resource version makes the API server
                # refuse the patch if the pass of another run has changed the count since.
                annotations[DROPPED_UNFINISHED] = str(stale.dropped_unfinished)
                patch["metadata"]["resourceVersion"] = stale.resource_version
            await self._cluster.merge(
                CLAIM,
                metadata["namespace"],
                metadata["name"],
                patch,
            )
        if names.ANNOTATION_MADE_FOR in metadata.get("annotations", {}):
            # A user may have created a claim with the run's name, which no watch shows. It gets neither our
            # labels nor an owner reference, so that the operator and the garbage collector never delete it.
            place = metadata["namespace"], metadata["name"]
            known = self._cache.claim(*place) or await self._cluster.get(CLAIM, *place)
            if known is not None and not is_claim_ours(known):
                body = build_record_alone(body)
        stored = await self._cluster.apply(
            body, manager=plan.claim_manager or names.FIELD_MANAGER
        )
        self._cache.see(CLAIMS, {**stored, "kind": CLAIM.kind})

    async def _put(self, work: _Work, body: Raw) -> ApplyResult:
        """Apply a child other than a pod if it is known to belong to the run; otherwise create it.

        An object of another owner is never taken over.
        """

        async def put() -> None:
            name = str(body["kind"]), str(body["metadata"]["name"])
            is_ours = name in work.seen.hashes
            if not is_ours:
                try:
                    stored = await self._cluster.create(body, is_brief=True)
                except ApiError as error:
                    own = await self._find_own(work, body, error)
                    # An apply would not keep an object that is being deleted, such as a PodGroup.
                    if "deletionTimestamp" in own["metadata"]:
                        raise ApiError(409, NAME_LEAVING, "it is being deleted") from error
                    is_ours = True
            if is_ours:
                stored = await self._cluster.apply(body, is_brief=True)
            self._cache.see(CHILDREN, {**stored, "kind": name[0]})
            work.applied.versions[name] = str(stored["metadata"].get("resourceVersion", ""))

        return await self._try(work, _step_of("apply", body), put)

    async def _end(self, work: _Work, end: Deletion) -> ApplyResult:
        """Delete one object, and drop it from the cache if no watch would report its deletion."""

        async def delete() -> None:
            kind = kind_of(_body_of(end))
            namespace, uid = work.key[0], end.uid or None
            was_there = await self._cluster.delete(
                kind,
                namespace,
                end.name,
                uid=uid,
                resource_version=end.resource_version or None,
                grace=end.grace_seconds,
            )
            if was_there and kind is RUN:
                work.applied.is_run_deleted = True
                log.info("%s/%s: deleted, as its time to live is over", *work.key)
            child = self._cache.children(work.key).get((end.kind, end.name))
            if child is not None:
                self._cache.forget(CHILDREN, child)
            if not was_there and kind is POD and end.uid:
                # The watch missed the pod's deletion, so drop the pod from the cache here.
                for pod in self._cache.pods(work.key):
                    if pod["metadata"].get("uid") == end.uid:
                        self._cache.forget(PODS, pod)

        return await self._try(work, ("delete", end.kind, end.name), delete)

    # ---- pods ----------------------------------------------------------------------------------------------

    async def _create_some(self, work: _Work, bodies: Sequence[Raw]) -> list[ApplyResult]:
        """Create the pods of one group: the first two one by one, the others concurrently."""
        # If a quota refuses one of the first two pods, no request is sent for the others.
        results: list[ApplyResult] = []
        creations = [partial(self._create, work, body) for body in bodies]
        for number, create in enumerate(creations[:2], start=1):
            results += await self._begin_all(work, [create])
            if len(results) < number:
                return results
            if results[-1].failure is not None and _concerns_others(results[-1].failure):
                return results
        return results + await self._begin_all(work, creations[2:])

    async def _begin_all(self, work: _Work, steps: Sequence[_PodStep]) -> list[ApplyResult]:
        """Run these steps, at most ``PODS_AT_ONCE`` at a time, until ``work.last_begin``.

        A step that was not started has no result. It is not a failure, because no request was sent.
        """
        loop, slots = asyncio.get_running_loop(), self._find_pod_slots()
        left, results = deque(steps), list[ApplyResult]()

        async def work_off() -> None:
            # A timeout only takes effect while the task waits, and a free slot is acquired without a wait.
            # Therefore the loop also compares the time.
            while left and loop.time() < work.last_begin:
                try:
                    async with asyncio.timeout_at(work.last_begin):
                        await slots.acquire()
                except TimeoutError:
                    return
                # Another worker may have taken the last step meanwhile.
                try:
                    if left:
                        results.append(await left.popleft()())
                finally:
                    slots.release()

        await _gather(work_off() for _ in range(min(PODS_AT_ONCE, len(steps))))
        work.applied.is_unfinished |= bool(left)
        return results

    def _find_pod_slots(self) -> asyncio.Semaphore:
        # A semaphore is bound to the event loop in which a task first waited for it.
        loop = asyncio.get_running_loop()
        if self._pod_slots is None or self._pod_slots[0] is not loop:
            self._pod_slots = loop, asyncio.Semaphore(PODS_AT_ONCE)
        return self._pod_slots[1]

    async def _create(self, work: _Work, body: Raw) -> ApplyResult:
        async def create() -> None:
            try:
                stored = await self._cluster.create(body, is_brief=True)
                stored = {
                    **body,
                    "metadata": stored["metadata"],
                    "status": NEW_POD_STATUS,
                }
            # The pod may already exist, because the answer to an earlier request may have been lost.
            except ApiError as error:
                stored = await self._find_own(work, body, error)
            self._cache.see(PODS, stored)

        return await self._try(work, _step_of("create", body), create)

    async def _find_own(self, work: _Work, body: Raw, error: ApiError) -> Raw:
        """Return the run's own object of this name if the creation failed because the object already exists.

        Raises ApiError otherwise: ``error`` itself if it has another cause, or an error that names the owner
        of the name.
        """
        if error.status != 409 or error.reason != "AlreadyExists":
            raise error
        kind, name = kind_of(body), str(body["metadata"]["name"])
        # List by name, because the operator does not have the permission to get single pods.
        found, _ = await self._cluster.list_all(
            kind,
            work.key[0],
            name=name,
            metadata_only=kind is not POD,
        )
        own = next((raw for raw in found if owns(work.seen.run.uid, raw)), None)
        if own is not None:
            return own
        if any(is_left_behind(work.seen.run.name, raw) for raw in found):
            text = f"a {kind.kind} of this name is left by an earlier run of this name"
            raise ApiError(_NOT_AS_EXPECTED, NAME_LEFT, text) from error
        # If an older run of this name owns the object, the garbage collector is about to delete it. A
        # conflict (409) makes the step retry within seconds.
        namesake = names.KIND, work.seen.run.name
        if all(
            any((owner.get("kind"), owner.get("name")) == namesake for owner in owners)
            for owners in (raw["metadata"].get("ownerReferences") or () for raw in found)
        ):
            raise ApiError(
                409,
                NAME_LEAVING,
                f"the {kind.kind} {name} of an older run of this name is being deleted",
            ) from error
        text = f"a {kind.kind} of this name exists and belongs to another owner"
        raise ApiError(_NOT_AS_EXPECTED, NAME_TAKEN, text) from error


_BOUNDS_STEP: Final = ("post", "Coordinator", "bounds")


def build_failure(
    step: Step, error: OperatorError | TimeoutError, *, at: float
) -> ApplyFailure:
    """Build the ApplyFailure of a step that was refused or got no answer. ``at``: seconds since 1970."""
    verb, kind, name = step
    # Any other error comes from the coordinator, which receives only bounds.
    status, reason, message = 0, BOUNDS_NOT_TAKEN, str(error)
    if isinstance(error, ApiError):
        status, reason, message = error.status, error.reason, error.message
    elif isinstance(error, TimeoutError):
        reason, message = "Timeout", "no answer in time"
    return ApplyFailure(kind, name, status, reason, message, at=at, verb=verb)


_TRAINING: Final = (names.ROLE_COORDINATOR, names.ROLE_NODE)


def _group_pods(bodies: Iterable[Raw]) -> list[list[Raw]]:
    """Group pods by role, in their order. A refusal of one pod in a group usually applies to the next one.

    The coordinator and the nodes form one group, because no node trains without the coordinator. Pods of
    other roles, such as evaluations, have resources of their own and are created in every phase. A refused
    evaluation must not stop the training, and a refused node must not stop an evaluation.
    """
    groups: dict[str, list[Raw]] = {}
    for body in bodies:
        role = str(body["metadata"]["labels"][names.LABEL_ROLE])
        groups.setdefault("" if role in _TRAINING else role, []).append(body)
    return list(groups.values())


def _may_create_pods(
    seen: Observation,
    *,
    claim: Sequence[ApplyResult],
    token: Sequence[ApplyResult],
    children: Sequence[ApplyResult],
) -> bool:
    """Return whether pods may be created after these results of the claim, the token and other children."""
    # The claim has the record of the runs that use the volume. Without this record, no pod may write to the
    # volume.
    if any(one.failure for one in claim):
        return False
    # A used-up quota also refuses a Secret that already exists. If the run had pods before, the Secret very
    # likely exists.
    if any(one.failure for one in token) and seen.status.coordinator.attempt < 0:
        return False
    # If a child's name is taken by another owner, the pods would read a foreign ConfigMap, or a foreign
    # NetworkPolicy would isolate them.
    failed = [one for one in children if one.failure]
    if any(one.failure and one.failure.reason in (NAME_LEFT, NAME_TAKEN) for one in failed):
        return False
    # If the PodGroup does not exist, schedulers would place the pods one by one, or never.
    return not any(
        one.step[:2] == ("apply", POD_GROUP) and one.step[1:] not in seen.hashes
        for one in failed
    )


def _concerns_others(failure: ApplyFailure) -> bool:
    """Return whether the refusal of one pod also applies to the other pods of its group.

    For example, the refusal of a quota or a webhook does. A refusal because of the pod's name does not.
    """
    return failure.reason not in (NAME_TAKEN, NAME_LEFT, NAME_LEAVING)


def _body_of(end: Deletion) -> Raw:
    return {
        "kind": end.kind,
        "apiVersion": end.version,
        "metadata": {"name": end.name},
    }


def _step_of(verb: str, body: Raw) -> Step:
    return verb, str(body["kind"]), str(body["metadata"]["name"])


async def _gather(work: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await all of ``work`` and return the results. Raises the first exception after everything has ended.

    Such an exception is LeaseLostError or a defect.
    """
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
