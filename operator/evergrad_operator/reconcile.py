"""One run, level-triggered: observe → decide → plan → apply → one status write.

Nothing here knows which event came.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from evergrad_coordinator.contract import ExitCode
from evergrad_operator import names
from evergrad_operator.apply import (
    TOKEN_SECONDS,
    Applied,
    Applier,
    Cluster,
    Result,
    describe_failure,
    is_pod_work_due,
    list_steps,
)
from evergrad_operator.claim_index import claim_of, existing_claim
from evergrad_operator.config import Config
from evergrad_operator.errors import ApiError, LeaseLostError, OperatorError, SpecError
from evergrad_operator.events import derive_events
from evergrad_operator.kube import CLAIM, CONFIG_MAP, POD, SERVICE, Raw
from evergrad_operator.metrics import Metrics
from evergrad_operator.mirror import CLAIMS, PODS, RUNS, Mirror, find_vanished
from evergrad_operator.names import Key
from evergrad_operator.observe import (
    ApplyFailure,
    Observation,
    Progress,
    observe,
    parse_progress,
)
from evergrad_operator.plan import Plan, plan_children
from evergrad_operator.policies import Decision, decide
from evergrad_operator.progress import Coordinators
from evergrad_operator.recorder import Recorder
from evergrad_operator.refusals import Step
from evergrad_operator.spec import SpecCache
from evergrad_operator.status import Outcome, build_refused_status, build_status, should_write

log = logging.getLogger(__name__)
RECONCILE_SECONDS: Final = 60.0
CLAIM_SECONDS: Final = 30.0
"""So long an existing claim, which no watch shows, is taken to be as it was seen."""
SILENCE_SECONDS: Final = 15.0
"""A coordinator that has been silent for so long is looked for: what vanishes in a gap of a watch is told by
nobody."""
READ_SECONDS: Final = 15.0
"""For what is looked at before pods are made: a pass has time left to write why it could not."""
_STATUS_RETRY_SECONDS: Final = 5.0
_BY_ITSELF: Final = frozenset(ExitCode)
_NEW_POD: Final = ("create", POD.kind)


@dataclass
class Memory:
    """What is remembered of a run between two reconciles.

    All of it may be lost: it only saves writes and tries.
    """

    applied: Applied = field(default_factory=Applied)
    progress_written_at: float | None = None
    told: set[str] = field(default_factory=set)
    silence_listed: float = 0.0
    """Seconds that the coordinator had been silent when the run's pods were listed for it."""
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
        self._specs = SpecCache()
        self._claims_seen_at: dict[Key, float] = {}
        self.clock: Callable[[], float] = time.time
        self.on_forget: Callable[[Key], None] = lambda key: None
        self.on_missing: Callable[[], None] = lambda: None
        """Is told when a run that is known seems not to exist."""
        self._applier = Applier(
            cluster, mirror=mirror, coordinators=coordinators, clock=self._now
        )

    async def reconcile(self, key: Key) -> float | None:
        """Work on one run; seconds until it has to be looked at again.

        Raises for what a later try may mend.
        """
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
        await self._look_at_claim(key, raw, memory, oldest=CLAIM_SECONDS)
        try:
            seen, decision, plan = self._think(key, raw, memory)
        except SpecError as error:
            return await self._refuse_spec(key, raw, memory, error)
        if await self._hear_verdict(key, seen, memory):
            seen, decision, plan = self._think(key, raw, memory)

        # The mirror is a hint. Before anything is created or ended, what there is, is what the API server
        # says. A pass in which nothing is tried, such as one of a run that waits for its quota, asks for
        # nothing.
        is_due = is_pod_work_due(
            plan, memory.applied.refusals, generation=seen.run.generation, now=self.clock()
        )
        is_due |= _is_silence_to_be_looked_into(seen, memory)
        # A list that was refused is tried again also where nothing asks for it any more, or its refusal would
        # stand for ever.
        is_due |= memory.applied.refusals.has(_step_of_list(key))
        is_confirmed = await self._confirm(key, raw, memory, plan) if is_due else False
        if is_confirmed:
            raw = self._mirror.run(key) or raw
            seen, decision, plan = self._think(key, raw, memory)

        # What is refused is told in this same pass, and tried again after a pause of its own; the rest goes
        # on.
        steps = frozenset(list_steps(plan))
        doable = plan if is_confirmed else replace(plan, create=(), delete=())
        results = await self._applier.apply(key, seen, doable, memory.applied)
        self._note_results(key, seen, doable, results)
        memory.applied.refusals.keep(steps)
        if memory.applied.refusals.failures() != seen.failures:
            # Only what was refused is new: pods that this pass has ended would look like lost ones.
            seen = replace(seen, failures=memory.applied.refusals.failures())
            decision = decide(seen, self._config, self.clock())
        self._follow(key, seen)
        created = tuple(
            result.step[2]
            for result in results
            if result.step[:2] == _NEW_POD and result.failure is None
        )
        delays = [decision.requeue_after, memory.applied.refusals.seconds_to_next(self.clock())]
        delays.append(None if plan.token is None else TOKEN_SECONDS)
        delays.append(
            await self._write_status(key, raw, seen, decision, Outcome(created=created))
        )
        return min((delay for delay in delays if delay is not None), default=None)

    # ---- thinking: values in, values out -------------------------------------------------------------------

    def _think(self, key: Key, raw: Raw, memory: Memory) -> tuple[Observation, Decision, Plan]:
        """What is seen now, and what follows from it."""
        observed = observe(
            self._specs.parse(raw),
            pods=self._mirror.pods(key),
            others=self._mirror.others(key),
            children=self._children(key, raw, memory),
            progress=self._progress(key),
            failures=memory.applied.refusals.failures(),
        )
        users = self._mirror.claim_users(key[0], claim_of(raw))
        seen = replace(observed, claim_users=users, silence=self._coordinators.silence(key))
        decision = decide(seen, self._config, self.clock())
        return (
            seen,
            decision,
            plan_children(seen, decision, self._config, token=self.token_of(seen.run.uid)),
        )

    def _children(self, key: Key, raw: Raw, memory: Memory) -> Mapping[tuple[str, str], Raw]:
        """The run's claim and other children; one that somebody else has changed since loses the mark that
        spares it."""
        found: dict[tuple[str, str], Raw] = {}
        claim = self._mirror.claim(key[0], claim_of(raw))
        if claim is not None:
            found[CLAIM.kind, claim_of(raw)] = claim
        for name, child in self._mirror.children(key).items():
            metadata = child["metadata"]
            version = memory.applied.versions.get(name)
            if version is not None and version != metadata.get("resourceVersion"):
                annotations = {
                    k: v
                    for k, v in (metadata.get("annotations") or {}).items()
                    if k != names.ANNOTATION_HASH
                }
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
        running = [
            pod for pod in seen.coordinators if pod.ip and pod.is_running and pod.is_live
        ]
        if running:
            newest = max(running, key=lambda pod: pod.attempt)
            self._coordinators.follow(
                key, newest.ip, newest.attempt, token=self.token_of(seen.run.uid)
            )
        else:
            self._coordinators.leave(key)

    async def _hear_verdict(self, key: Key, seen: Observation, memory: Memory) -> bool:
        """Whether the coordinator was asked anew: when nodes end by themselves, it knows the cause and the
        last step."""
        ends = frozenset(
            pod.uid
            for pod in seen.nodes
            if pod.end is not None and pod.end.exit_code in _BY_ITSELF
        )
        is_new = not ends <= memory.ends
        memory.ends = ends
        if is_new:
            self._follow(key, seen)
            await self._coordinators.ask(key)
        return is_new

    # ---- looking again -------------------------------------------------------------------------------------

    async def _read(
        self,
        key: Key,
        raw: Raw,
        memory: Memory,
        step: Step,
        look: Callable[[], Awaitable[None]],
    ) -> bool:
        """Whether the API server let itself be asked.

        If not, that is told like a refused write, and asked again later.
        """
        refusals, generation = (
            memory.applied.refusals,
            int(raw["metadata"].get("generation") or 0),
        )
        if refusals.find_waiting(step, generation=generation, now=self.clock()) is not None:
            return False
        try:
            async with asyncio.timeout(READ_SECONDS):
                await look()
        except (ApiError, TimeoutError) as error:
            failure = describe_failure(step, error, at=self.clock())
            refusals.note(failure, generation=generation)
            self._note_failure(key, failure)
            return False
        refusals.clear(step)
        return True

    async def _confirm(self, key: Key, raw: Raw, memory: Memory, plan: Plan) -> bool:
        """Whether what there is was asked for, so that pods may be made and ended."""

        async def look() -> None:
            await self._confirm_pods(key)
            if plan.create:
                await self._confirm_children(key)

        # A run that nothing was done for yet has no pods; if there is one all the same, its name is taken.
        if raw.get("status") or self._mirror.pods(key) or memory.applied.is_in_doubt:
            if not await self._read(key, raw, memory, _step_of_list(key), look):
                return False
            memory.applied.is_in_doubt = False
        return await self._look_at_claim(key, raw, memory, oldest=0.0)

    async def _confirm_pods(self, key: Key) -> None:
        pods, version = await self._cluster.list_all(
            POD, key[0], selector=f"{names.LABEL_RUN}={key[1]}"
        )
        for pod in pods:
            self._mirror.see(PODS, pod)
        for pod in find_vanished(self._mirror.pods(key), pods, version=version):
            self._mirror.forget_pod(key, pod["metadata"]["name"], pod["metadata"]["uid"])

    async def _confirm_children(self, key: Key) -> None:
        """New pods need the ConfigMap and the Service; no watch shows that somebody has deleted one."""
        for kind in (CONFIG_MAP, SERVICE):
            known = [
                child
                for (of, _), child in self._mirror.children(key).items()
                if of == kind.kind
            ]
            if not known:
                continue
            found, version = await self._cluster.list_all(
                kind, key[0], selector=f"{names.LABEL_RUN}={key[1]}", metadata_only=True
            )
            for child in find_vanished(known, found, version=version):
                self._mirror.forget_child(
                    key, kind.kind, child["metadata"]["name"], child["metadata"]["uid"]
                )

    async def _look_at_claim(
        self, key: Key, raw: Raw, memory: Memory, *, oldest: float
    ) -> bool:
        """Fetch the existing claim that the run names, for all runs that name it: no watch shows it.

        False if that failed.
        """
        name = existing_claim(raw)
        if name is None:
            return True
        step = "get", CLAIM.kind, name
        age = self.clock() - self._claims_seen_at.get((key[0], name), float("-inf"))
        if age < oldest and not memory.applied.refusals.has(step):
            return True

        async def look() -> None:
            claim = await self._cluster.get(CLAIM, key[0], name)
            self._claims_seen_at[key[0], name] = self.clock()
            if claim is None:
                self._mirror.forget_claim(key[0], name)
            else:
                self._mirror.see(CLAIMS, claim)

        return await self._read(key, raw, memory, step, look)

    # ---- what came of it -----------------------------------------------------------------------------------

    def _note_results(
        self, key: Key, seen: Observation, plan: Plan, results: Sequence[Result]
    ) -> None:
        pods = {str(body["metadata"]["name"]): body for body in plan.create}
        for result in results:
            if result.is_tried and result.failure is not None:
                self._note_failure(key, result.failure)
            elif result.failure is None and result.step[:2] == _NEW_POD:
                self._count_pod(seen, pods[result.step[2]])

    def _note_failure(self, key: Key, failure: ApplyFailure) -> None:
        self._metrics.reconcile_errors.labels(failure.reason or "Unreachable").inc()
        what = f"{failure.verb} {failure.kind} {failure.name}"
        log.warning(
            "%s/%s: %s: %s %s: %s",
            *key,
            what,
            failure.status or "no answer",
            failure.reason,
            failure.message,
        )

    def _count_pod(self, seen: Observation, body: Raw) -> None:
        labels = body["metadata"].get("labels") or {}
        if labels.get(names.LABEL_ROLE) != names.ROLE_NODE:
            return
        index = int(labels[names.LABEL_INDEX])
        ends = [
            pod.end.at
            for pod in seen.nodes
            if pod.index == index and pod.end is not None and pod.end.at is not None
        ]
        if ends:
            self._metrics.recovery_seconds.observe(max(0.0, self.clock() - max(ends)))
        elif not seen.nodes and index == 0 and labels.get(names.LABEL_ATTEMPT) == "0":
            self._metrics.queue_seconds.observe(max(0.0, self.clock() - seen.run.created_at))

    async def _write_status(
        self, key: Key, raw: Raw, seen: Observation, decision: Decision, outcome: Outcome
    ) -> float | None:
        """Write the status if it differs; seconds after which it may be written where it must not be yet."""
        memory, now = self._memories[key], self.clock()
        old: Raw = raw.get("status") or {}
        new = build_status(seen, decision, outcome, now)
        write = should_write(old, new, now=now, last_progress_write=memory.progress_written_at)
        if not write.write:
            return write.after
        retry, is_written = await self._store_status(key, raw, new)
        if not is_written:
            return retry
        memory.progress_written_at = now
        if _step(old) is None and _step(new) is not None:
            self._metrics.startup_seconds.observe(max(0.0, now - seen.run.created_at))
        for event in derive_events(old, new, seen):
            await self._recorder.record(raw, event.type, event.reason, event.message)
        return write.after

    async def _store_status(self, key: Key, raw: Raw, status: Raw) -> tuple[float | None, bool]:
        """Seconds after which it is to be tried again, if at all, and whether it is stored.

        Raises ApiError.
        """
        metadata = {"name": key[1], "namespace": key[0], "uid": raw["metadata"]["uid"]}
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": metadata,
            "status": status,
        }
        try:
            stored = await self._cluster.apply(body, subresource="status", is_brief=True)
        except ApiError as error:
            if error.status == 404:
                # Gone, perhaps in a gap of the watch: then no event comes of it. A list tells, which this
                # answer does not: an API server that has just started knows no custom resources for a moment.
                self.on_missing()
                return None, False
            if error.status == 409:
                return (
                    _STATUS_RETRY_SECONDS,
                    False,
                )  # another of the same name, or somebody was quicker
            raise
        self._metrics.status_writes.inc()
        # The spec of another generation is not known yet: the watch brings it.
        if stored["metadata"].get("generation") == raw["metadata"].get("generation"):
            self._mirror.see(RUNS, {**raw, "metadata": stored["metadata"], "status": status})
        return None, True

    async def _refuse_spec(
        self, key: Key, raw: Raw, memory: Memory, error: SpecError
    ) -> float | None:
        """Tell of what cannot be read: once as an event, and in the status.

        A new generation comes with its own event.
        """
        text = str(error)
        if text not in memory.told:
            memory.told.add(text)
            self._metrics.reconcile_errors.labels("InvalidSpec").inc()
            log.warning("%s/%s: %s", *key, text)
            await self._recorder.record(raw, "Warning", names.Reason.INVALID_SPEC, text)
        status = build_refused_status(raw, text, self.clock())
        if status == (raw.get("status") or {}):
            return None
        retry, _ = await self._store_status(key, raw, status)
        return retry

    def _now(self) -> float:
        return self.clock()

    def _forget(self, key: Key) -> None:
        self._memories.pop(key, None)
        self._specs.forget(key)
        self._coordinators.leave(key)
        self.on_forget(key)


def _refuse_token(uid: str) -> str:
    raise OperatorError(
        f"run {uid}: the installation's key has not been read. This is a defect of the operator; "
        "please report it."
    )


def _is_silence_to_be_looked_into(seen: Observation, memory: Memory) -> bool:
    """Whether pods are listed because the coordinator is silent: it may be gone, and its watch had a gap.

    Again at the double.
    """
    seconds = seen.silence.seconds if seen.silence is not None else 0.0
    if seconds < SILENCE_SECONDS:
        memory.silence_listed = 0.0
        return False
    is_due = seconds >= 2.0 * memory.silence_listed
    memory.silence_listed = seconds if is_due else memory.silence_listed
    return is_due


def _step_of_list(key: Key) -> Step:
    return "list", POD.kind, key[1]


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
