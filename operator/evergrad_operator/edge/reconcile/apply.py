"""Carries out a plan, step by step, and returns the result of each step.

A step that is refused, or not answered, stops neither the other steps nor the status that explains it. Only a
lost lease is raised: nothing may be written any more then.
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
"""Longest time of all steps of a plan together: a pass has time left to write what was not done.

A single webhook may take as long.
"""
PODS_AT_ONCE: Final = 32
"""Pods that are created or deleted at the same time, of one run and of all together: as many as the client
sends requests. More would only wait for their turn, and must not look like requests that the API server has
not answered. A small run does not wait behind a thousand pods of another one."""
_SHARE_TO_BEGIN: Final = 2 / 3
"""Share of the time of all steps after which no further pod is begun: the rest is for the answers to those
that were. Further pods are the work of the next pass."""
UNFINISHED_SECONDS: Final = 1.0
"""Seconds until the pass that continues one whose time was too short: others get their turn."""
TOKEN_SECONDS: Final = 30.0
"""Seconds between two POSTs of the Secret of a run whose pods have a host and do not start.

The Secret exists, unless somebody has deleted it.
"""
_NOT_AS_EXPECTED: Final = 412


class ClusterWriter(Protocol):
    """The part of the API server that reconciling needs; ``Kube`` is one, the tests' fake another.

    All raise ApiError.
    """

    async def get(self, kind: Kind, namespace: str, name: str) -> Raw | None:
        """Get one object; None where there is none."""

    async def list_all(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        selector: str = "",
        name: str = "",
        metadata_only: bool = False,
    ) -> tuple[list[Raw], int]:
        """List objects; return them and the version of the list."""

    async def create(self, body: Raw, *, is_brief: bool = False) -> Raw:
        """Create an object. ``is_brief``: the answer has only its metadata."""

    async def apply(
        self,
        body: Raw,
        *,
        subresource: str = "",
        manager: str = names.FIELD_MANAGER,
        is_brief: bool = False,
    ) -> Raw:
        """Apply the whole intent, server-side."""

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
        """Delete one object; False if it was gone, or is not that one any more."""

    async def serves(self, kind: Kind) -> bool:
        """Return whether there is such a kind."""


@dataclass(frozen=True)
class ApplyResult:
    """The result of one step.

    ``failure``: None if it is done. ``is_tried``: False where an earlier refusal still holds.
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
    """Whether an object is to be deleted, or a pod made, at once; False while a refusal holds."""
    waiting = partial(
        refusals.find_waiting,
        generation=generation,
        now=now,
    )
    if any(waiting(("delete", end.kind, end.name)) is None for end in plan.delete):
        return True
    # Pods are created in this order; a quota that refuses the first of some refuses the others, too.
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
    """One plan under way. Times are of the event loop's clock.

    ``deadline``: of all steps. ``last_begin``: when no further pod is begun.
    """

    key: Key
    seen: Observation
    applied: Applied
    deadline: float
    last_begin: float


_PodStep = Callable[[], Awaitable[ApplyResult]]
"""Creates or deletes one pod."""


class Applier:
    """Applies plans. ``clock``: seconds since 1970."""

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

        ``until``: when the pass has to write its status at the latest, by the event loop's clock. Returns a
        result for each step that was begun; ``applied.is_unfinished`` says whether others had no time.
        """
        now = asyncio.get_running_loop().time()
        deadline = min(now + APPLY_SECONDS, until)
        last_begin = now + (deadline - now) * _SHARE_TO_BEGIN
        work = _Work(key, seen, applied, deadline, last_begin)
        applied.is_unfinished = False

        # The claim carries the record of who uses the volume: without it, no pod may write there.
        results = []
        if plan.claim is not None:
            put_claim = partial(self._put_claim, plan.claim, plan)
            results.append(await self._try(work, _step_of("apply", plan.claim), put_claim))
        has_record = not any(result.failure for result in results)

        # Without its Secret a pod would be given a host and wait there.
        has_token = True
        if plan.token is not None and (
            plan.create or self._clock() - applied.token_posted_at >= TOKEN_SECONDS
        ):
            applied.token_posted_at = self._clock()
            create_token = partial(self._create_token, plan.token)
            results.append(
                await self._try(work, _step_of("create", plan.token), create_token)
            )
            # A quota that is used up refuses also a Secret that exists already, as it most likely does where
            # pods were made before.
            has_token = results[-1].failure is None or seen.status.coordinator.attempt >= 0
        pods = plan.create if has_record and has_token else ()

        # The ConfigMap is applied before the pods that mount it, and pods are deleted before new ones need
        # their room.
        children = [body for body in plan.apply if body["kind"] != SERVICE.kind]
        services = [body for body in plan.apply if body["kind"] == SERVICE.kind]
        results += await _gather(self._put(work, body) for body in children)
        # Pods would read a ConfigMap, or be cut off by a NetworkPolicy, that belongs to somebody else.
        if any(
            one.failure and one.failure.reason in (NAME_LEFT, NAME_TAKEN) for one in results
        ):
            pods = ()
        # Schedulers place pods of a group that does not exist one by one, or never.
        if any(
            one.failure
            and one.step[:2] == ("apply", POD_GROUP)
            and one.step[1:] not in seen.hashes
            for one in results
        ):
            pods = ()
        results += await self._begin_all(
            work, [partial(self._end, work, end) for end in plan.delete]
        )

        # Giving a Service its address takes the API server longer than all else: no pod has to wait for it.
        puts = (self._put(work, body) for body in services)
        # Pods of several groups share the time that is left: where one is not answered, the others are made.
        groups = (self._create_some(work, some) for some in _group_pods(pods))
        made = await _gather([*puts, *groups])
        results += made[: len(services)]
        results += [one for group in made[len(services) :] for one in group]

        # Bounds come last: a coordinator that does not answer must hold up neither a lost pod's replacement
        # nor an end.
        if plan.bounds is not None:
            post_bounds = partial(self._coordinators.post_bounds, key, plan.bounds)
            results.append(await self._try(work, _BOUNDS_STEP, post_bounds))
        return results

    # ---- one step ------------------------------------------------------------------------------------------

    async def _create_token(self, token: Mapping[str, Any]) -> None:
        # A Secret that exists already is the run's own: its name follows from the token. No watch and no list
        # shows it, so that it is not put into the cache.
        try:
            await self._cluster.create(token, is_brief=True)
        except ApiError as error:
            if error.status != 409 or error.reason != "AlreadyExists":
                raise

    async def _try(
        self, work: _Work, step: Step, act: Callable[[], Awaitable[Any]]
    ) -> ApplyResult:
        """Try a step, unless it was refused a moment ago; a refusal, or no answer, is remembered and
        returned."""
        refusals, generation = work.applied.refusals, work.seen.run.generation
        # A step that was refused a moment ago is not tried again: at 1,000 runs under a quota the API server
        # would be asked nothing else.
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
        # Another operator may be at work: nothing is remembered, and the pass ends.
        except LeaseLostError:
            raise
        except (OperatorError, TimeoutError) as error:
            failure = build_failure(step, error, at=self._clock())
            if step[:2] == ("create", POD.kind) and failure.status == 0:
                work.applied.is_in_doubt = True  # it may have been made all the same
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
        """Apply the claim with the run's record, after records of runs that are gone are off it."""
        metadata = body["metadata"]
        stale = plan.stale_records
        if stale.annotations:
            # A merge patch takes a field from whoever owns it, and with its last field its manager goes from
            # the object.
            annotations: dict[str, str | None] = dict.fromkeys(stale.annotations)
            patch: dict[str, Any] = {"metadata": {"annotations": annotations}}
            if stale.dropped_unfinished is not None:
                # Counted on the claim as it was seen: another run's pass may have counted meanwhile.
                annotations[DROPPED_UNFINISHED] = str(stale.dropped_unfinished)
                patch["metadata"]["resourceVersion"] = stale.resource_version
            await self._cluster.merge(
                CLAIM,
                metadata["namespace"],
                metadata["name"],
                patch,
            )
        if names.ANNOTATION_MADE_FOR in metadata.get("annotations", {}):
            # No watch shows a claim that somebody else has made under the run's name. It is used as it is: it
            # gets neither our labels nor an owner, so that nothing of ours ever deletes it.
            place = metadata["namespace"], metadata["name"]
            known = self._cache.claim(*place) or await self._cluster.get(CLAIM, *place)
            if known is not None and not is_claim_ours(known):
                body = build_record_alone(body)
        stored = await self._cluster.apply(
            body, manager=plan.claim_manager or names.FIELD_MANAGER
        )
        self._cache.see(CLAIMS, {**stored, "kind": CLAIM.kind})

    async def _put(self, work: _Work, body: Raw) -> ApplyResult:
        """Apply a child that is no pod, where it is known to be the run's, else create it: an object of
        somebody else is never taken over."""

        async def put() -> None:
            name = str(body["kind"]), str(body["metadata"]["name"])
            is_ours = name in work.seen.hashes
            if not is_ours:
                try:
                    stored = await self._cluster.create(body, is_brief=True)
                except ApiError as error:
                    own = await self._find_own(work, body, error)
                    # Applied now, it would go all the same, as a PodGroup that was just deleted does.
                    if "deletionTimestamp" in own["metadata"]:
                        raise ApiError(409, NAME_LEAVING, "it is about to go") from error
                    is_ours = True
            if is_ours:
                stored = await self._cluster.apply(body, is_brief=True)
            self._cache.see(CHILDREN, {**stored, "kind": name[0]})
            work.applied.versions[name] = str(stored["metadata"].get("resourceVersion", ""))

        return await self._try(work, _step_of("apply", body), put)

    async def _end(self, work: _Work, end: Deletion) -> ApplyResult:
        """Delete one object, and forget what no watch would show to be gone."""

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
                # Its end came in a gap of the watch.
                for pod in self._cache.pods(work.key):
                    if pod["metadata"].get("uid") == end.uid:
                        self._cache.forget(PODS, pod)

        return await self._try(work, ("delete", end.kind, end.name), delete)

    # ---- pods ----------------------------------------------------------------------------------------------

    async def _create_some(self, work: _Work, bodies: Sequence[Raw]) -> list[ApplyResult]:
        """Create pods of which one needs the other: the first two alone, the others together."""
        # A quota that refuses one is not asked about each.
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
        """Do these steps, ``PODS_AT_ONCE`` at a time, as many as can be begun in the work's time.

        A step that was not begun has no result. It has not failed: no request was sent.
        """
        loop, slots = asyncio.get_running_loop(), self._find_pod_slots()
        left, results = deque(steps), list[ApplyResult]()

        async def work_off() -> None:
            # A free slot is taken without a pause, in which alone a timeout ends: the time is compared, too.
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
        # A semaphore belongs to the event loop in which it was first waited for.
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
            # The answer to an earlier try may have been lost: then the pod exists already.
            except ApiError as error:
                stored = await self._find_own(work, body, error)
            self._cache.see(PODS, stored)

        return await self._try(work, _step_of("create", body), create)

    async def _find_own(self, work: _Work, body: Raw, error: ApiError) -> Raw:
        """Return the run's own object of this name, if its creation was refused because of that one.

        Raises ApiError otherwise.
        """
        if error.status != 409 or error.reason != "AlreadyExists":
            raise error
        kind, name = kind_of(body), str(body["metadata"]["name"])
        # A list by name, since the operator has no right to get single pods.
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
        # An older run of this name is about to be collected with all that it owns: that is worth waiting for.
        namesake = names.KIND, work.seen.run.name
        if all(
            any((owner.get("kind"), owner.get("name")) == namesake for owner in owners)
            for owners in (raw["metadata"].get("ownerReferences") or () for raw in found)
        ):
            raise ApiError(
                409,
                NAME_LEAVING,
                f"the {kind.kind} {name} of an older run of this name is about to go",
            ) from error
        text = f"a {kind.kind} of this name exists and belongs to somebody else"
        raise ApiError(_NOT_AS_EXPECTED, NAME_TAKEN, text) from error


_BOUNDS_STEP: Final = ("post", "Coordinator", "bounds")


def build_failure(
    step: Step, error: OperatorError | TimeoutError, *, at: float
) -> ApplyFailure:
    """Build the failure of a step that was refused, or not answered, for the policies."""
    verb, kind, name = step
    # An error that is not the API server's comes from the coordinator, to which only bounds are posted.
    status, reason, message = 0, BOUNDS_NOT_TAKEN, str(error)
    if isinstance(error, ApiError):
        status, reason, message = error.status, error.reason, error.message
    elif isinstance(error, TimeoutError):
        reason, message = "Timeout", "no answer in time"
    return ApplyFailure(kind, name, status, reason, message, at=at, verb=verb)


_TRAINING: Final = (names.ROLE_COORDINATOR, names.ROLE_NODE)


def _group_pods(bodies: Iterable[Raw]) -> list[list[Raw]]:
    """Group pods by whether a refusal of one holds for the next, in their order.

    No node trains without the coordinator. A pod beside them has resources of its own, and is made in every
    phase: its refusal must not keep the run from training, nor theirs keep it from being evaluated.
    """
    groups: dict[str, list[Raw]] = {}
    for body in bodies:
        role = str(body["metadata"]["labels"][names.LABEL_ROLE])
        groups.setdefault("" if role in _TRAINING else role, []).append(body)
    return list(groups.values())


def _concerns_others(failure: ApplyFailure) -> bool:
    """Whether the refusal of one pod is one of the others of its group, too, as a quota's or a webhook's:
    only a name is a pod's own."""
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
    """Await all of it, whatever fails; an exception, a lost lease or a defect, is raised when all is done."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
