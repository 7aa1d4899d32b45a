"""One run, level-triggered: observe → decide → plan → apply → one status write. Nothing here knows which event came."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from evergrad_coordinator.contract import ExitCode
from evergrad_operator import names
from evergrad_operator.claim_index import claim_of, existing_claim
from evergrad_operator.config import Config
from evergrad_operator.errors import ApiError, LeaseLostError, OperatorError, SpecError
from evergrad_operator.events import derive_events
from evergrad_operator.kube import CLAIM, CONFIG_MAP, KINDS, POD, SECRET, SERVICE, Kind, Raw
from evergrad_operator.metrics import Metrics
from evergrad_operator.mirror import CHILDREN, CLAIMS, PODS, RUNS, Mirror, find_vanished
from evergrad_operator.names import Key
from evergrad_operator.observe import NAME_TAKEN, ApplyFailure, Observation, Progress, observe, owns, parse_progress
from evergrad_operator.plan import Deletion, Plan, plan_children
from evergrad_operator.policies import Decision, decide
from evergrad_operator.progress import Coordinators
from evergrad_operator.recorder import Recorder
from evergrad_operator.status import Outcome, build_status, should_write

log = logging.getLogger(__name__)
RECONCILE_SECONDS: Final = 60.0
CLAIM_SECONDS: Final = 30.0
"""So long an existing claim, which no watch shows, is taken to be as it was seen."""
TOKEN_SECONDS: Final = 30.0
"""Between two POSTs of the Secret of a run whose pods have a host and do not start. It exists, unless somebody deleted it."""
_FIRST_RETRY, _LONGEST_RETRY = 1.0, 60.0
_BY_ITSELF: Final = frozenset(ExitCode)
_TAKEN: Final = 412
"""HTTP's word for: not unless it is as expected."""


class Cluster(Protocol):
    """What reconciling needs of the API server; ``Kube`` is one, the tests' fake another. All raise ApiError."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Raw | None:
        """The object, or None."""

    async def list_all(
        self, kind: Kind, namespace: str | None, *, selector: str = "", name: str = "", metadata_only: bool = False
    ) -> tuple[list[Raw], int]:
        """Objects, and the version of the list."""

    async def create(self, body: Raw, *, is_brief: bool = False) -> Raw:
        """A new object; ``is_brief``: only its metadata are answered."""

    async def apply(self, body: Raw, *, subresource: str = "", manager: str = names.FIELD_MANAGER, is_brief: bool = False) -> Raw:
        """The whole intent, by server-side apply."""

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None = None, grace: int | None = None) -> bool:
        """End one object; False if it was gone."""


@dataclass
class Refusal:
    """What the API server refused, how often in a row, at which generation of the run, and when it is asked again."""

    failure: ApplyFailure
    count: int
    generation: int
    retry_at: float


@dataclass
class Memory:
    """What is remembered of a run between two reconciles. All of it may be lost: it only saves writes and tries."""

    refusals: dict[tuple[str, str], Refusal] = field(default_factory=dict)
    progress_written_at: float | None = None
    applied: dict[tuple[str, str], str] = field(default_factory=dict)
    """Resource versions that our own applies led to: another one means that somebody has touched the object."""
    told: set[str] = field(default_factory=set)
    token_posted_at: float = float("-inf")
    is_in_doubt: bool = False
    """A pod was there that the mirror did not have."""
    ends: frozenset[str] = frozenset()
    """Pods, by uid, that ended by themselves before the coordinator was last asked."""


class Reconciler:
    """Makes of each run what it asks for. ``clock``: epoch seconds."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        mirror: Mirror,
        coordinators: Coordinators,
        recorder: Recorder,
        config: Config,
        metrics: Metrics,
    ) -> None:
        self._cluster, self._mirror, self._coordinators = cluster, mirror, coordinators
        self.token_of: Callable[[str], str] = _refuse_token
        self._recorder, self._config, self._metrics = recorder, config, metrics
        self._memories: dict[Key, Memory] = {}
        self._claims_seen_at: dict[Key, float] = {}
        self.clock: Callable[[], float] = time.time
        self.on_forget: Callable[[Key], None] = lambda key: None

    async def reconcile(self, key: Key) -> float | None:
        """Work on one run; seconds until it has to be looked at again. Raises for what a later try may mend."""
        started = time.perf_counter()
        result = "success"
        try:
            async with asyncio.timeout(RECONCILE_SECONDS):
                delay = await self._reconcile(key)
            result = "success" if delay is None else "requeue"
            return delay
        except Exception as error:
            result = "error"
            self._metrics.reconcile_errors.labels(_error_reason(error)).inc()
            if isinstance(error, OperatorError | TimeoutError):
                log.warning("%s/%s: %s", *key, str(error) or "took too long")
            else:
                log.exception("%s/%s: a defect of the operator; please report it", *key)
            raise
        finally:
            self._metrics.reconciles.labels(result).inc()
            self._metrics.reconcile_seconds.observe(time.perf_counter() - started)

    async def _reconcile(self, key: Key) -> float | None:
        raw = self._mirror.run(key)
        if raw is None:
            self._forget(key)
            return None
        memory = self._memories.setdefault(key, Memory())
        await self._look_at_claim(key, raw, oldest=CLAIM_SECONDS)
        try:
            seen, decision, plan = self._think(key, raw, memory)
        except SpecError as error:
            await self._refuse_spec(raw, memory, error)
            return None
        if await self._hear_verdict(key, seen, memory):
            seen, decision, plan = self._think(key, raw, memory)
        if decision.needs_listing or plan.create or plan.delete:
            # The mirror is a hint. Before anything is created or ended, what there is, is what the API server says.
            # Of a run that nothing was done for yet there are none; if there is one all the same, its name is taken.
            if raw.get("status") or self._mirror.pods(key) or memory.is_in_doubt:
                await self._confirm_pods(key)
                if plan.create:
                    await self._confirm_children(key)
                memory.is_in_doubt = False
            await self._look_at_claim(key, raw, oldest=0.0)
            raw = self._mirror.run(key) or raw
            seen, decision, plan = self._think(key, raw, memory)
        outcome = await self._apply(key, seen, plan, memory)
        if outcome.failures:
            seen, decision, _ = self._think(key, raw, memory)
        self._follow(key, seen)
        delays = [decision.requeue_after, *self._retries(memory), TOKEN_SECONDS if plan.token is not None else None]
        delays.append(await self._write_status(key, raw, seen, decision, outcome))
        return min((delay for delay in delays if delay is not None), default=None)

    # ---- thinking: values in, values out ------------------------------------------------------------------------------

    def _think(self, key: Key, raw: Raw, memory: Memory) -> tuple[Observation, Decision, Plan]:
        """What is seen now, and what follows from it."""
        seen = observe(
            raw,
            pods=self._mirror.pods(key),
            others=self._mirror.others(key),
            children=self._children(key, raw, memory),
            progress=self._progress(key),
            failures=tuple(refusal.failure for refusal in memory.refusals.values()),
        )
        decision = decide(seen, self._config, self.clock())
        return seen, decision, plan_children(seen, decision, self._config, token=self.token_of(seen.run.uid))

    def _children(self, key: Key, raw: Raw, memory: Memory) -> Mapping[tuple[str, str], Raw]:
        """The run's claim and other children; one that somebody else has changed since loses the mark that spares it."""
        found: dict[tuple[str, str], Raw] = {}
        claim = self._mirror.claim(key[0], claim_of(raw))
        if claim is not None:
            found[CLAIM.kind, claim_of(raw)] = claim
        for name, child in self._mirror.children(key).items():
            metadata = child["metadata"]
            version = memory.applied.get(name)
            if version is not None and version != metadata.get("resourceVersion"):
                annotations = {k: v for k, v in (metadata.get("annotations") or {}).items() if k != names.ANNOTATION_HASH}
                child = {**child, "metadata": {**metadata, "annotations": annotations}}
            found[name] = child
        return found

    def _progress(self, key: Key) -> Progress | None:
        answer = self._coordinators.answer(key)
        if answer is None:
            return None
        try:
            return parse_progress(answer.raw, attempt=answer.attempt)
        except OperatorError as error:
            log.warning("%s/%s: %s", *key, error)
            return None

    def _follow(self, key: Key, seen: Observation) -> None:
        running = [pod for pod in seen.coordinators if pod.ip and pod.is_running and pod.is_live]
        if running:
            newest = max(running, key=lambda pod: pod.attempt)
            self._coordinators.follow(key, newest.ip, newest.attempt, token=self.token_of(seen.run.uid))
        else:
            self._coordinators.leave(key)

    async def _hear_verdict(self, key: Key, seen: Observation, memory: Memory) -> bool:
        """Whether the coordinator was asked anew: when nodes end by themselves, it knows the cause and the last step."""
        ends = frozenset(pod.uid for pod in seen.nodes if pod.end is not None and pod.end.exit_code in _BY_ITSELF)
        is_new = not ends <= memory.ends
        memory.ends = ends
        if is_new:
            self._follow(key, seen)
            await self._coordinators.ask(key)
        return is_new

    # ---- looking again ------------------------------------------------------------------------------------------------

    async def _confirm_pods(self, key: Key) -> None:
        pods, version = await self._cluster.list_all(POD, key[0], selector=f"{names.LABEL_RUN}={key[1]}")
        for pod in pods:
            self._mirror.see(PODS, pod)
        for pod in find_vanished(self._mirror.pods(key), pods, version=version):
            self._mirror.forget_pod(key, pod["metadata"]["name"], pod["metadata"]["uid"])

    async def _confirm_children(self, key: Key) -> None:
        """New pods need the ConfigMap and the Service; no watch shows that somebody has deleted one."""
        for kind in (CONFIG_MAP, SERVICE):
            known = [child for (of, _), child in self._mirror.children(key).items() if of == kind.kind]
            if not known:
                continue
            found, version = await self._cluster.list_all(
                kind, key[0], selector=f"{names.LABEL_RUN}={key[1]}", metadata_only=True
            )
            for child in find_vanished(known, found, version=version):
                self._mirror.forget_child(key, kind.kind, child["metadata"]["name"], child["metadata"]["uid"])

    async def _look_at_claim(self, key: Key, raw: Raw, *, oldest: float) -> None:
        """Fetch the existing claim that the run names, for all runs that name it: no watch shows it."""
        name = existing_claim(raw)
        if name is None or self.clock() - self._claims_seen_at.get((key[0], name), float("-inf")) < oldest:
            return
        claim = await self._cluster.get(CLAIM, key[0], name)
        self._claims_seen_at[key[0], name] = self.clock()
        if claim is None:
            self._mirror.forget_claim(key[0], name)
        else:
            self._mirror.see(CLAIMS, claim)

    # ---- doing --------------------------------------------------------------------------------------------------------

    async def _apply(self, key: Key, seen: Observation, plan: Plan, memory: Memory) -> Outcome:
        """Claim, token, other children, bounds, ends, new pods, Services, in this order. What is refused is kept and told."""
        done = _Doing(seen.run.generation)
        if plan.claim is not None:
            manager = plan.claim_manager or names.FIELD_MANAGER
            await self._try(memory, done, plan.claim, lambda body: self._cluster.apply(body, manager=manager))
        has_token = await self._post_token(seen, memory, done, plan)
        children, services = _split(plan.apply, SERVICE.kind)
        put = partial(self._put, seen)
        await _all(self._try(memory, done, body, put) for body in children)
        if plan.bounds is not None:
            await self._coordinators.post_bounds(key, plan.bounds)
        await _all(self._end(key, end) for end in plan.delete)
        # Giving a Service its address takes the API server longer than all else, and no pod has to wait for it.
        later = [self._try(memory, done, body, put) for body in services]
        # Without its Secret a pod would be given a host and wait there.
        await _all([*later, self._create_all(seen, memory, done, plan.create if has_token else ())])
        return Outcome(created=tuple(done.created), failures=tuple(done.failures))

    async def _post_token(self, seen: Observation, memory: Memory, done: "_Doing", plan: Plan) -> bool:
        """Have the run's Secret, which no right allows to look at; whether pods that mount it may be made."""
        is_due = bool(plan.create) or self.clock() - memory.token_posted_at >= TOKEN_SECONDS
        if plan.token is None or not is_due:
            return True
        memory.token_posted_at = self.clock()
        # A quota that is used up refuses also what exists already; where pods were made before, it does exist, most likely.
        return await self._try(memory, done, plan.token, self._create_once) or seen.status.coordinator.attempt >= 0

    async def _create_once(self, body: Raw) -> Raw:
        """Create it; that it exists already is as well."""
        try:
            return await self._cluster.create(body, is_brief=True)
        except ApiError as error:
            if error.status == 409 and error.reason == "AlreadyExists":
                return body
            raise

    async def _put(self, seen: Observation, body: Raw) -> Raw:
        """A child that is no pod: applied where it is known to be the run's, else created, so that nobody else loses one."""
        name, namespace = str(body["metadata"]["name"]), seen.run.namespace
        if (body["kind"], name) in seen.hashes:
            return await self._cluster.apply(body, is_brief=True)
        try:
            return await self._cluster.create(body, is_brief=True)
        except ApiError as error:
            if error.status != 409:
                raise
            found, _ = await self._cluster.list_all(KINDS[body["kind"]], namespace, name=name, metadata_only=True)
            if any(owns(seen.run.uid, raw) for raw in found):
                return await self._cluster.apply(body, is_brief=True)
            if all(_is_of_a_namesake(raw, seen.run.name) for raw in found):
                raise  # it is about to go with its own run
            text = f"a {body['kind']} of this name exists and belongs to somebody else"
            raise ApiError(_TAKEN, NAME_TAKEN, text) from error

    async def _end(self, key: Key, end: Deletion) -> None:
        kind = KINDS[end.kind]
        was_there = await self._cluster.delete(kind, key[0], end.name, uid=end.uid or None, grace=end.grace_seconds)
        if not was_there and kind is POD and end.uid:
            self._mirror.forget_pod(key, end.name, end.uid)

    async def _create_all(self, seen: Observation, memory: Memory, done: "_Doing", bodies: Sequence[Raw]) -> None:
        # The coordinator and one node alone, the others together: a quota that refuses one is not asked about each.
        for body in bodies[:2]:
            await self._create(seen, memory, done, body)
        await _all(self._create(seen, memory, done, body) for body in bodies[2:])

    async def _create(self, seen: Observation, memory: Memory, done: "_Doing", body: Raw) -> None:
        if not done.is_pod_refused and await self._try(memory, done, body, partial(self._cluster.create, is_brief=True)):
            self._count_pod(seen, body)
            done.created.append(str(body["metadata"]["name"]))

    async def _try(self, memory: Memory, done: "_Doing", body: Raw, act: Callable[[Raw], Any]) -> bool:
        name = str(body["kind"]), str(body["metadata"]["name"])
        refusal = memory.refusals.get(name)
        if refusal is not None and refusal.generation == done.generation and self.clock() < refusal.retry_at:
            done.add(refusal.failure)
            return False
        try:
            stored: Raw = await act(body)
        except ApiError as error:
            if error.status == 409 and name[0] == POD.kind:
                # Somebody has created it: what it is shows in the next look.
                memory.is_in_doubt = True
                raise
            if not 400 <= error.status < 500 or error.status in (401, 404, 409, 429) or "NamespaceTerminating" in error.causes:
                raise
            failure = ApplyFailure(name[0], name[1], error.status, error.reason, error.message, at=self.clock())
            count = refusal.count + 1 if refusal is not None else 1
            wait = min(_LONGEST_RETRY, _FIRST_RETRY * 2.0 ** min(count - 1, 10))
            memory.refusals[name] = Refusal(failure, count, done.generation, self.clock() + wait)
            done.add(failure)
            return False
        memory.refusals.pop(name, None)
        if name[0] == SECRET.kind:
            return True  # no watch and no list shows it, so that nothing is remembered of it
        resource = {POD.kind: PODS, CLAIM.kind: CLAIMS}.get(name[0], CHILDREN)
        if resource == PODS:
            stored = {**body, "metadata": stored["metadata"], "status": {"phase": "Pending"}}
        self._mirror.see(resource, {**stored, "kind": name[0]})
        if resource == CHILDREN:
            memory.applied[name] = str(stored["metadata"].get("resourceVersion", ""))
        return True

    def _count_pod(self, seen: Observation, body: Raw) -> None:
        labels = body["metadata"].get("labels") or {}
        if labels.get(names.LABEL_ROLE) != names.ROLE_NODE:
            return
        index = int(labels[names.LABEL_INDEX])
        ends = [pod.end.at for pod in seen.nodes if pod.index == index and pod.end is not None and pod.end.at is not None]
        if ends:
            self._metrics.recovery_seconds.observe(max(0.0, self.clock() - max(ends)))
        elif not seen.nodes and index == 0 and labels.get(names.LABEL_ATTEMPT) == "0":
            self._metrics.queue_seconds.observe(max(0.0, self.clock() - seen.run.created_at))

    async def _write_status(self, key: Key, raw: Raw, seen: Observation, decision: Decision, outcome: Outcome) -> float | None:
        """Write the status if it differs; seconds after which it may be written where it must not be yet."""
        memory, now = self._memories[key], self.clock()
        old: Raw = raw.get("status") or {}
        new = build_status(seen, decision, outcome, now)
        write = should_write(old, new, now=now, last_progress_write=memory.progress_written_at)
        if not write.write:
            return write.after
        metadata = {"name": key[1], "namespace": key[0], "uid": raw["metadata"]["uid"]}
        body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "status": new}
        try:
            stored = await self._cluster.apply(body, subresource="status", is_brief=True)
        except ApiError as error:
            if error.status in (404, 409):
                return None  # gone, or another of the same name: its own event comes
            raise
        memory.progress_written_at = now
        self._metrics.status_writes.inc()
        metadata = stored["metadata"]
        # Of another generation the spec is not known yet: the watch brings it.
        if metadata.get("generation") == raw["metadata"].get("generation"):
            self._mirror.see(RUNS, {**raw, "metadata": metadata, "status": new})
        if _step(old) is None and _step(new) is not None:
            self._metrics.startup_seconds.observe(max(0.0, now - seen.run.created_at))
        for event in derive_events(old, new, seen):
            await self._recorder.record(raw, event.type, event.reason, event.message)
        return write.after

    def _retries(self, memory: Memory) -> Sequence[float]:
        return [max(0.0, refusal.retry_at - self.clock()) for refusal in memory.refusals.values()]

    async def _refuse_spec(self, raw: Raw, memory: Memory, error: SpecError) -> None:
        """Tell once of what cannot be read. A new generation comes with its own event."""
        text = str(error)
        if text not in memory.told:
            memory.told.add(text)
            self._metrics.reconcile_errors.labels("InvalidSpec").inc()
            log.warning("%s/%s: %s", raw["metadata"].get("namespace"), raw["metadata"]["name"], text)
            await self._recorder.record(raw, "Warning", names.Reason.INVALID_SPEC, text)

    def _forget(self, key: Key) -> None:
        self._memories.pop(key, None)
        self._coordinators.leave(key)
        self.on_forget(key)


@dataclass
class _Doing:
    generation: int
    created: list[str] = field(default_factory=list)
    failures: list[ApplyFailure] = field(default_factory=list)
    is_pod_refused: bool = False

    def add(self, failure: ApplyFailure) -> None:
        self.failures.append(failure)
        self.is_pod_refused |= failure.kind == POD.kind


async def _all(work: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """All of it, whatever fails; then the first failure is raised."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _is_of_a_namesake(raw: Raw, name: str) -> bool:
    owners = raw["metadata"].get("ownerReferences") or ()
    return any((owner.get("kind"), owner.get("name")) == (names.KIND, name) for owner in owners)


def _split(bodies: Iterable[Raw], kind: str) -> tuple[list[Raw], list[Raw]]:
    """Those of other kinds, those of this one."""
    found: tuple[list[Raw], list[Raw]] = [], []
    for body in bodies:
        found[body["kind"] == kind].append(body)
    return found


def _refuse_token(uid: str) -> str:
    raise OperatorError(
        f"run {uid}: the installation's key has not been read. This is a defect of the operator; please report it."
    )


def _step(status: Raw) -> Any:
    return (status.get("progress") or {}).get("step")


def _error_reason(error: Exception) -> str:
    """Few values: it is a label."""
    if isinstance(error, ApiError):
        return error.reason if error.status else "Unreachable"
    if isinstance(error, LeaseLostError):
        return "LeaseLost"
    if isinstance(error, TimeoutError):
        return "Timeout"
    return "OperatorError" if isinstance(error, OperatorError) else "Defect"
