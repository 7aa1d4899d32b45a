"""Converts raw objects of the API server to values of runs, pods and events for the commands.

Pure. A missing field is not an error.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from evergrad_cli.cluster.render.text import parse_short_count, parse_time
from evergrad_common.contract import LABEL_PREFIX, MANAGER
from evergrad_manifest.model.claims import claims_of

LABEL_RUN: Final = f"{LABEL_PREFIX}run"
LABEL_INDEX: Final = f"{LABEL_PREFIX}index"
LABEL_ATTEMPT: Final = f"{LABEL_PREFIX}attempt"
LABEL_ROLE: Final = f"{LABEL_PREFIX}role"
STOPPED: Final = "StoppedOnRequest"
"""Reason of a suspended run that its recipe or its stop file stopped, not spec.suspend."""
NON_FINITE: Final = "NonFinite"
"""Reason of a run that is suspended before a step whose loss or gradient is not finite."""
NODE: Final = "node"
COORDINATOR: Final = "coordinator"
PREPARATION: Final = "preparation"
EVALUATION: Final = "evaluation"
_OWN_CONTAINERS: Final = ("trainer", "coordinator")
"""Names of the containers that the operator builds. Any other container of a pod was injected."""
_NOTHING: Final[Mapping[str, Any]] = {}
_ORDER: Final = {NODE: 0, PREPARATION: 1, EVALUATION: 2, COORDINATOR: 3}


@dataclass(frozen=True)
class RunCondition:
    """One condition of a run. ``since`` in Unix seconds."""

    type: str
    status: str
    reason: str
    message: str
    since: float | None

    @classmethod
    def from_raw(cls, raw: Mapping[str, Any]) -> Self:
        """Return the condition from the run's status."""
        return cls(
            _text(raw, "type"),
            _text(raw, "status"),
            _text(raw, "reason"),
            _text(raw, "message"),
            parse_time(raw.get("lastTransitionTime")),
        )


@dataclass(frozen=True)
class RunFailure:
    """The last reported failure, with its root cause. ``at`` in Unix seconds."""

    cause: str
    node: int | None
    rank: int | None
    step: int | None
    exit_code: int | None
    message: str
    at: float | None

    @classmethod
    def from_raw(cls, raw: Mapping[str, Any]) -> Self:
        """Return the failure from the run's status."""
        return cls(
            cause=_text(raw, "cause"),
            node=_integer(raw.get("node")),
            rank=_integer(raw.get("rank")),
            step=_integer(raw.get("step")),
            exit_code=_integer(raw.get("exitCode")),
            message=_text(raw, "message"),
            at=parse_time(raw.get("at")),
        )


@dataclass(frozen=True)
class Ended:
    """The end of one pod."""

    pod: str
    cause: str
    exit_code: int | None
    at: float | None

    @classmethod
    def from_raw(cls, raw: Mapping[str, Any]) -> Self:
        """Return the end from the run's status."""
        code, at = _integer(raw.get("exitCode")), parse_time(raw.get("at"))
        return cls(_text(raw, "pod"), _text(raw, "cause"), code, at)


@dataclass(frozen=True)
class Run:
    """One TrainingRun as commands show it. Texts are empty and numbers are None if the status lacks them."""

    name: str
    namespace: str
    uid: str
    generation: int
    created: float | None
    phase: str
    reason: str
    message: str
    is_observed: bool
    is_current: bool
    """Whether the operator has seen the newest generation."""
    is_deleting: bool
    wants_suspension: bool
    stop_after_step: int | None
    """Step before the horizon at which the recipe stops the run."""
    nodes: str
    step: int | None
    total_steps: int | None
    percent: float | None
    loss: str
    tokens_per_second: str
    eta: str
    eta_seconds: float | None
    updated: float | None
    checkpoint_step: int | None
    checkpoint_at: float | None
    restarts: int
    restarts_by_cause: Mapping[str, int]
    failures_without_progress: int | None
    wanted_nonce: str
    restart_nonce: str
    """The last spec.restartNonce that the operator has handled."""
    image: str
    profile: str
    started: float | None
    completed: float | None
    last_failure: RunFailure | None
    attempts: tuple[Ended, ...]
    conditions: tuple[RunCondition, ...]
    claim: str
    takes_claim: bool
    """Whether the claim is deleted together with the run."""
    folder: str
    """Folder of the claim that is the run directory."""
    managed_by: str
    """Controller that manages the run instead of the operator; empty for the operator."""
    preparation: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    usage: Mapping[str, Any]
    """Progress of a pod that prepares the data, as in the status."""

    def condition(self, kind: str) -> RunCondition | None:
        """Return the condition of this type, or None."""
        return next(
            (condition for condition in self.conditions if condition.type == kind), None
        )

    def is_true(self, kind: str) -> bool:
        """Return whether the condition of this type is true."""
        condition = self.condition(kind)
        return condition is not None and condition.status == "True"

    @property
    def has_failed(self) -> bool:
        """Whether the run has failed and no restart was requested since."""
        # Until the operator has seen the nonce, the status is the status from before the restart.
        return self.is_true("Failed") and self.wanted_nonce == self.restart_nonce

    @property
    def is_over(self) -> bool:
        """Whether the run is complete or has failed. It does not continue unless a user requests it."""
        return self.is_true("Complete") or self.has_failed

    @property
    def has_stopped_by_itself(self) -> bool:
        """Whether the run is stopping, or has stopped, without spec.suspend."""
        # If spec.suspend is set, the reason is the reason of the stop before it. Otherwise, the status must
        # be for the current spec: a run that was just resumed still has the phase Suspended.
        if self.wants_suspension:
            return self.reason in (STOPPED, NON_FINITE)
        return self.is_current and self.phase in ("Suspending", "Suspended")

    @property
    def is_beyond_its_stop(self) -> bool:
        """Whether the run is suspended at ``spec.training.stop.afterStep``. A resume would stop it there
        again."""
        is_reached = (
            self.stop_after_step is not None
            and (self.checkpoint_step or 0) >= self.stop_after_step
        )
        return is_reached and self.reason == STOPPED


def _percent(progress: Mapping[str, Any]) -> float | None:
    step, total = _integer(progress.get("step")), _integer(progress.get("totalSteps"))
    if step is not None and total:
        # The status has whole percents, which do not change for hours in a long run.
        return round(100 * step / total, 1)
    return parse_short_count(progress.get("percent"))


def parse_run(raw: Mapping[str, Any]) -> Run:
    """Return the run of a raw TrainingRun; never raises."""
    metadata, spec, status = (_mapping(raw, key) for key in ("metadata", "spec", "status"))
    name, manager = _text(metadata, "name"), _text(spec, "managedBy")
    progress, nodes = _mapping(status, "progress"), _mapping(status, "nodes")
    restarts, failure = _mapping(status, "restarts"), _mapping(status, "lastFailure")
    storage, stop = _mapping(spec, "storage"), _mapping(_mapping(spec, "training"), "stop")
    step, total = _integer(progress.get("step")), _integer(progress.get("totalSteps"))
    generation = _integer(metadata.get("generation")) or 0
    # A file may have a short number as a text here, for example ``10k``.
    stop_after = parse_short_count(stop.get("afterStep"))

    # Any version of the operator may have written the status. If one run raised an error, a list would hide
    # all others.
    return Run(
        name=name,
        namespace=_text(metadata, "namespace"),
        uid=_text(metadata, "uid"),
        generation=generation,
        created=parse_time(metadata.get("creationTimestamp")),
        phase=_text(status, "phase") or "Pending",
        reason=_text(status, "reason"),
        message=_text(status, "message"),
        # The API server gives each new run a status that contains only observedGeneration.
        is_observed=bool(_text(status, "phase")),
        is_current=(_integer(status.get("observedGeneration")) or 0) >= generation,
        is_deleting=metadata.get("deletionTimestamp") is not None,
        wants_suspension=spec.get("suspend") is True,
        stop_after_step=None if stop_after is None else round(stop_after),
        nodes=_text(nodes, "summary"),
        step=step,
        total_steps=total,
        percent=_percent(progress),
        loss=_text(progress, "loss"),
        tokens_per_second=_text(progress, "tokensPerSecond"),
        eta=_text(progress, "eta"),
        eta_seconds=parse_short_count(progress.get("etaSeconds")),
        updated=parse_time(progress.get("updatedAt")),
        checkpoint_step=_integer(_mapping(status, "checkpoint").get("step")),
        checkpoint_at=parse_time(_mapping(status, "checkpoint").get("savedAt")),
        restarts=_integer(restarts.get("total")) or 0,
        restarts_by_cause=_counts(restarts, "byCause"),
        failures_without_progress=_integer(
            _mapping(status, "failures").get("withoutProgress")
        ),
        wanted_nonce=_text(spec, "restartNonce"),
        restart_nonce=_text(status, "restartNonce"),
        image=_text(status, "image"),
        profile=_text(status, "profile"),
        started=parse_time(status.get("startTime")),
        completed=parse_time(status.get("completionTime")),
        last_failure=RunFailure.from_raw(failure) if failure else None,
        attempts=tuple(map(Ended.from_raw, _mappings(status, "attempts"))),
        conditions=tuple(map(RunCondition.from_raw, _mappings(status, "conditions"))),
        claim=claims_of(raw).storage,
        takes_claim=_takes_claim(raw),
        folder=_text(storage, "path") or name,
        preparation=_mapping(status, "preparation"),
        evaluation=_mapping(status, "evaluation"),
        managed_by="" if manager == MANAGER else manager,
        usage=_mapping(status, "usage"),
    )


def _takes_claim(raw: Mapping[str, Any]) -> bool:
    """Return whether the claim of ``raw`` is deleted together with the run, as the operator reports it."""
    spec, status = _mapping(raw, "spec"), _mapping(raw, "status")
    goes = _mapping(status, "volume").get("goesWithRun")
    # Only the operator can decide whether other runs use the claim. If an older version has not reported it,
    # or the operator has not seen the newest spec yet, assume the worse case from the file.
    asks = _mapping(spec, "storage").get("whenDeleted") == "Delete"
    is_current = (_integer(status.get("observedGeneration")) or 0) >= (
        _integer(_mapping(raw, "metadata").get("generation")) or 0
    )
    if not isinstance(goes, bool):
        return asks
    return goes if is_current else goes or asks


def _counts(raw: Mapping[str, Any], key: str) -> dict[str, int]:
    found = ((str(name), _integer(value)) for name, value in _mapping(raw, key).items())
    return {name: number for name, number in found if number}


def row_of(run: Run, *, now: float) -> dict[str, Any]:
    """Return one run in the form of ``--json`` documents.

    Numbers are numbers, or null if unknown. Times are Unix seconds.
    """
    return {
        "name": run.name,
        "namespace": run.namespace,
        "phase": run.phase,
        "reason": run.reason or None,
        "message": run.message or None,
        "nodes": run.nodes or None,
        "step": run.step,
        "totalSteps": run.total_steps,
        "percent": run.percent,
        "loss": parse_short_count(run.loss or None),
        "tokensPerSecond": parse_short_count(run.tokens_per_second or None),
        "etaSeconds": run.eta_seconds,
        "checkpointStep": run.checkpoint_step,
        "restarts": run.restarts,
        "created": run.created,
        "ageSeconds": None if run.created is None else round(max(0.0, now - run.created)),
    }


@dataclass(frozen=True)
class Pod:
    """One pod of a run. ``index`` is None except for nodes. Times are Unix seconds."""

    name: str
    role: str
    index: int | None
    attempt: int
    phase: str
    """The text of ``kubectl get pods``, for example Running, Pending, ImagePullBackOff, OOMKilled, Completed
    or Terminating."""
    is_ready: bool
    is_over: bool
    has_started: bool
    restarts: int
    node: str
    container: str
    message: str
    created: float | None


def parse_pods(raw: Iterable[Mapping[str, Any]]) -> list[Pod]:
    """Return the pods of one run: nodes by index with the newest attempt first, then pods that prepare data,
    then coordinators."""
    pods = [_parse_pod(item) for item in raw]
    return sorted(
        pods,
        key=lambda pod: (
            _ORDER.get(pod.role, 0),
            pod.index if pod.index is not None else -1,
            -pod.attempt,
        ),
    )


def newest_of_each(pods: Sequence[Pod]) -> list[Pod]:
    """Return the newest attempt of each index, and of the coordinator."""
    found: dict[tuple[str, int | None], Pod] = {}
    for pod in pods:
        key = (pod.role, pod.index)
        # Compare the attempt's label and not the age, because clocks of nodes differ.
        if key not in found or pod.attempt > found[key].attempt:
            found[key] = pod
    return list(found.values())


def _parse_pod(raw: Mapping[str, Any]) -> Pod:
    metadata, spec, status = (_mapping(raw, key) for key in ("metadata", "spec", "status"))
    labels = _mapping(metadata, "labels")

    # Find our container among injected containers, such as a service mesh, which may run longer than ours.
    containers = _mappings(status, "containerStatuses")
    own = next(
        (item for item in containers if item.get("name") in _OWN_CONTAINERS), _NOTHING
    )
    state = _mapping(own, "state")
    terminated, waiting = _mapping(state, "terminated"), _mapping(state, "waiting")
    conditions = _mappings(status, "conditions")
    ready = next((item for item in conditions if item.get("type") == "Ready"), _NOTHING)
    unscheduled = next(
        (
            c
            for c in conditions
            if c.get("type") == "PodScheduled" and c.get("status") == "False"
        ),
        _NOTHING,
    )
    message = (
        _text(waiting, "message")
        or _text(status, "message")
        or _text(unscheduled, "message")
    )
    names = [_text(item, "name") for item in _mappings(spec, "containers")]

    # Use one word, as kubectl does: the container's reason is newer and more specific than the pod's phase.
    reason = (
        _text(terminated, "reason") or _text(waiting, "reason") or _text(status, "reason")
    )
    phase = reason or _text(status, "phase") or "Unknown"
    code = _integer(terminated.get("exitCode"))
    if reason == "Error" and code is not None:
        phase = f"Error ({code})"
    if metadata.get("deletionTimestamp") is not None:
        phase = "Terminating"
    return Pod(
        name=_text(metadata, "name"),
        role=str(labels.get(LABEL_ROLE) or NODE),
        index=_integer(labels.get(LABEL_INDEX)),
        attempt=_integer(labels.get(LABEL_ATTEMPT)) or 0,
        phase=phase,
        is_ready=ready.get("status") == "True",
        is_over=_text(status, "phase") in ("Succeeded", "Failed"),
        has_started=bool(
            terminated or _mapping(state, "running") or _mapping(own, "lastState")
        ),
        restarts=_integer(own.get("restartCount")) or 0,
        node=_text(spec, "nodeName"),
        container=next((name for name in names if name in _OWN_CONTAINERS), ""),
        message=message,
        created=parse_time(metadata.get("creationTimestamp")),
    )


def pod_row(pod: Pod) -> dict[str, Any]:
    """Return one pod in the form of ``--json`` documents."""
    keys = ("name", "role", "index", "attempt", "phase", "node", "restarts", "created")
    shown = {key: value for key, value in asdict(pod).items() if key in keys}
    return {
        **shown,
        "ready": pod.is_ready,
        "message": pod.message or None,
        "node": pod.node or None,
    }


@dataclass(frozen=True)
class RunEvent:
    """One event of a run or of its pods. ``at`` in Unix seconds: the last time it occurred."""

    type: str
    reason: str
    message: str
    object: str
    count: int
    at: float | None

    @classmethod
    def from_raw(cls, raw: Mapping[str, Any]) -> Self:
        """Return the event from a raw Event, in either of its two API versions."""
        involved, series = _mapping(raw, "involvedObject"), _mapping(raw, "series")
        # Read the newest time first: for events that repeat, the last occurrence counts.
        times = (
            series.get("lastObservedTime"),
            raw.get("lastTimestamp"),
            raw.get("eventTime"),
            raw.get("firstTimestamp"),
        )
        return cls(
            type=_text(raw, "type") or "Normal",
            reason=_text(raw, "reason"),
            message=_text(raw, "message"),
            object=f"{_text(involved, 'kind').lower()}/{_text(involved, 'name')}",
            count=_integer(series.get("count")) or _integer(raw.get("count")) or 1,
            at=next((time for time in map(parse_time, times) if time is not None), None),
        )


def parse_events(raw: Iterable[Mapping[str, Any]]) -> list[RunEvent]:
    """Return the events, the oldest first."""
    return sorted(map(RunEvent.from_raw, raw), key=lambda event: event.at or 0.0)


def _mapping(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key)
    return value if isinstance(value, Mapping) else _NOTHING


def _mappings(raw: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    value = raw.get(key)
    return (
        [item for item in value if isinstance(item, Mapping)]
        if isinstance(value, list)
        else []
    )


def _text(raw: Mapping[str, Any], key: str) -> str:
    value = raw.get(key)
    return "" if value is None or isinstance(value, Mapping | list) else str(value)


def _integer(value: Any) -> int | None:
    # Exclude true, which is an integer in Python.
    try:
        return None if value is None or isinstance(value, bool) else int(value)
    except (TypeError, ValueError):
        return None
