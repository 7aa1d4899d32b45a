"""Extracts the facts about raw runs that are exported as metrics. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from evergrad_operator.core.objects.names import (
    LABEL_ROLE,
    QUEUE_GATE,
    ROLE_NODE,
    Condition,
    Key,
    Phase,
    Reason,
)
from evergrad_operator.core.objects.raw import get_map, get_maps, get_natural, get_text
from evergrad_operator.core.objects.status_codec import decode
from evergrad_operator.core.objects.times import parse_time
from evergrad_operator.core.observe.evaluation import EvaluationProgress
from evergrad_operator.core.observe.preparation import DataPreparation
from evergrad_operator.core.observe.time_accounting import PodTimeAccount

FINISHED_SECONDS: Final = 86400.0
"""Time in seconds for which a run is still exported after its end."""
_REASONS: Final = frozenset(reason.value for reason in Reason)
NO_NODES: Final[Mapping[str, int]] = MappingProxyType({})
_OTHER_REASON: Final = "Other"
"""Label value for all reasons that the operator does not define, because the number of label values must be
limited."""


@dataclass(frozen=True)
class RunFacts:
    """Facts about one run. Times are in seconds since 1970; None if the event has not happened."""

    namespace: str
    name: str
    phase: str
    restarts: Mapping[str, int]
    created_at: float | None
    started_at: float | None
    completed_at: float | None
    progress: float | None
    """Share of completed steps, 0 to 1."""
    progressed_at: float | None
    evaluated_step: int | None = None
    """Newest checkpoint that a pod has evaluated."""
    evaluated: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Results of this checkpoint by set and metric."""
    waiting: int | None = None
    """Number of checkpoints that wait for a pod; None if the run requests no evaluation."""
    replaced: int = 0
    """Number of replaced pods, for all causes."""
    nodes: Mapping[str, int] = field(default_factory=dict)
    """Number of live pods of nodes by state: queued, unscheduled, starting or running."""
    nodes_max: int | None = None
    """Maximum number of nodes."""
    work: str = ""
    """Current work of the data preparation (may be empty)."""
    prepared: float = 0.0
    """Completed share of this work, 0 to 1."""
    prepared_tokens: int = 0
    usage: PodTimeAccount = field(default_factory=PodTimeAccount)
    """Time of the run's pods by use."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """All labels of the run."""
    kind: Literal["training", "script"] = "training"
    """The kind of run: a typed recipe or a script."""
    waiting_reason: str = ""
    """Why the run waits; empty in another phase."""
    stalled_reason: str = ""
    """Why a person has to act; empty if no person is needed, and for a run that is over."""
    uid: str = ""
    """The run's uid, because a later run may have the same name."""


def count_phases(runs: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of runs in each phase, including runs that ended long ago."""
    counts = {phase.value: 0 for phase in Phase}
    for raw in runs:
        phase = find_phase(raw)
        counts[phase] = counts.get(phase, 0) + 1
    return counts


def count_nodes(pods: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of live pods of nodes in each state that occurs."""
    counts: dict[str, int] = {}
    for raw in pods:
        state = find_node_state(raw)
        if state:
            counts[state] = counts.get(state, 0) + 1
    return counts


def find_node_state(raw: Mapping[str, Any]) -> str:
    """Return the state of a live pod of a node; empty for any other pod."""
    # Read only these fields, because this runs for each event of a pod. A full parse takes ten times as long.
    metadata, spec = get_map(raw, "metadata"), get_map(raw, "spec")
    phase = get_text(get_map(raw, "status"), "phase")
    is_node = get_map(metadata, "labels").get(LABEL_ROLE) == ROLE_NODE
    if not is_node or "deletionTimestamp" in metadata or phase in ("Succeeded", "Failed"):
        return ""
    if get_text(spec, "nodeName"):
        return "running" if phase == "Running" else "starting"
    gates = get_maps(spec, "schedulingGates")
    is_queued = any(gate.get("name") == QUEUE_GATE for gate in gates)
    return "queued" if is_queued else "unscheduled"


def read_runs(
    runs: Mapping[Key, Mapping[str, Any]],
    *,
    now: float,
    pods_of: Callable[[Key], Sequence[Mapping[str, Any]]] = lambda key: (),
) -> tuple[RunFacts, ...]:
    """Return the facts of all runs that are still exported. ``now``: seconds since 1970."""
    facts = (read_run(key, raw, count_nodes(pods_of(key))) for key, raw in runs.items())
    return tuple(one for one in facts if not is_long_over(one, now))


def is_long_over(facts: RunFacts, now: float) -> bool:
    """Return whether a run is no longer exported. ``now``: seconds since 1970."""
    # Without this limit, 1,000 finished runs would export 10,000 series forever.
    at = facts.completed_at
    return at is not None and now - at >= FINISHED_SECONDS


def read_run(
    key: Key, raw: Mapping[str, Any], nodes: Mapping[str, int] = NO_NODES
) -> RunFacts:
    """Return the facts of one run. ``nodes``: number of live pods of its nodes by state."""
    namespace, name = key
    status = get_map(raw, "status")
    phase = find_phase(raw)
    is_over = phase in (Phase.COMPLETE.value, Phase.FAILED.value)

    # Check all values, because any client with access to the status can write them.
    progress = get_map(status, "progress")
    step, total = (get_natural(progress, key) for key in ("step", "totalSteps"))
    share = step / total if step is not None and total else None
    shown = get_map(status, "evaluation")
    # Skip the texts that are only for the operator, because this runs for every run at each scrape.
    evaluation = decode(EvaluationProgress, {"evaluation": shown})
    preparation = decode(DataPreparation, {"preparation": status.get("preparation")})
    usage = get_text(get_map(status, "memory"), "usage")
    return RunFacts(
        namespace=namespace,
        name=name,
        phase=phase,
        restarts=_count_restarts(status),
        created_at=parse_time(get_map(raw, "metadata").get("creationTimestamp")),
        started_at=parse_time(status.get("startTime")),
        completed_at=parse_time(status.get("completionTime")) if is_over else None,
        progress=share,
        progressed_at=parse_time(progress.get("updatedAt")),
        evaluated_step=evaluation.step,
        evaluated=evaluation.numbers,
        waiting=get_natural(shown, "waiting"),
        replaced=get_natural(get_map(status, "restarts"), "total") or 0,
        nodes=nodes,
        nodes_max=get_natural(get_map(status, "nodes"), "max"),
        work=preparation.work,
        prepared=preparation.share,
        prepared_tokens=preparation.tokens,
        usage=decode(PodTimeAccount, {"memory": {"usage": usage}}),
        labels={
            str(label): str(value)
            for label, value in get_map(raw, "metadata", "labels").items()
        },
        kind="script" if "script" in get_map(raw, "spec") else "training",
        waiting_reason=_bound_reason(status) if phase == Phase.WAITING else "",
        stalled_reason="" if is_over else _find_stalled_reason(status),
        uid=get_text(get_map(raw, "metadata"), "uid"),
    )


def _count_restarts(status: Mapping[str, Any]) -> dict[str, int]:
    restarts = get_map(status, "restarts", "byCause")
    return {
        str(cause): count
        for cause in restarts
        if (count := get_natural(restarts, cause)) is not None
    }


def _find_stalled_reason(status: Mapping[str, Any]) -> str:
    for condition in get_maps(status, "conditions"):
        if (condition.get("type"), condition.get("status")) == (Condition.STALLED, "True"):
            return _bound_reason(condition)
    return ""


def _bound_reason(holder: Mapping[str, Any]) -> str:
    reason = get_text(holder, "reason")
    return reason if reason in _REASONS else _OTHER_REASON


def find_phase(raw: Mapping[str, Any]) -> str:
    """Return the phase in a run's status; Pending if there is none."""
    return get_text(get_map(raw, "status"), "phase") or Phase.PENDING.value
