"""The memory that the operator stores in the run's status: counters, and decisions that must not be repeated.
Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from evergrad_common.causes import PodCause
from evergrad_operator.core.objects.names import (
    MAX_ATTEMPT,
    MAX_EPOCH,
    MAX_NODES,
    Condition,
    Phase,
    Reason,
)
from evergrad_operator.core.objects.raw import (
    get_float,
    get_hosts,
    get_int,
    get_map,
    get_maps,
    get_natural,
    get_pairs,
    get_text,
    is_host,
    to_int,
)
from evergrad_operator.core.objects.status_encoding import (
    parse_rate,
    unpack_counts,
    unpack_mapping,
    unpack_ranges,
)
from evergrad_operator.core.objects.times import LATEST, parse_time
from evergrad_operator.core.observe.evaluation import EvaluationProgress, parse_evaluation
from evergrad_operator.core.observe.preparation import DataPreparation, parse_preparation
from evergrad_operator.core.observe.time_accounting import PodTimeAccount, parse_notes

MAX_ENDS: Final = 10
"""Maximum number of ends of pods in the status: enough to see a pattern, and a small part of its 16 KiB."""
MAX_CAUSES: Final = 16
LONGEST_CAUSE: Final = 32
LONGEST_SAVE_MESSAGE: Final = 512
"""Maximum length of the reason of a failed save, in characters: enough for one error with its path."""
_MOST_SHOWN: Final = 2**31 - 1
"""Largest valid number in most fields of a status. Larger numbers are dropped, because every value that is
read here is written again."""
_MOST_VALUE: Final = 1e15
MAX_HOSTS: Final = 8
"""Maximum number of hosts with faults that are stored. A node that avoids more hosts might fit on no host."""
REMEMBERED_SECONDS: Final = 24 * 3600.0
"""Time for which a host is avoided after its last fault. It is long enough for a person to inspect the host,
and short enough that a repaired host, or a new host with the same name, is used again without action."""


@dataclass(frozen=True)
class EndRecord:
    """One pod's end, as listed in the status. ``at``: seconds since 1970."""

    pod: str
    cause: str
    exit_code: int | None
    at: float


@dataclass(frozen=True)
class LastFailure:
    """The newest failure and its root cause. ``rank`` and ``step`` are None if they were not reported."""

    cause: str
    node: int | None
    message: str
    at: float
    rank: int | None = None
    step: int | None = None
    exit_code: int | None = None


@dataclass(frozen=True)
class RecordedFinish:
    """How the run ended. ``phase``: Complete or Failed. ``at``: seconds since 1970."""

    phase: Phase
    reason: str
    message: str
    at: float


@dataclass(frozen=True)
class Budget:
    """Consecutive failures without progress. Times are in seconds since 1970.

    ``step``, ``checkpoint_step``: the newest step and checkpoint before the last failure. ``since``: the
    first status of a coordinator after the failure, as its pod's attempt and its steps of progress; None if
    there is no such status yet, and then no step counts as progress. ``short_lives``: consecutive ends that
    cost no failure, of pods that had just started. ``retry_at``: no replacement is created before this time.
    """

    failures: int = 0
    step: int = -1
    checkpoint_step: int = -1
    at: float = 0.0
    short_lives: int = 0
    retry_at: float = 0.0
    since: tuple[int, int] | None = None


@dataclass(frozen=True)
class HostFaults:
    """Ends of pods that were caused by a host or a transient problem, not by the run.

    Times are in seconds since 1970. ``hosts``: number of faults of each host; the host of the last fault
    comes last.
    ``seen``: time of each host's last fault; a missing host, for example in the status of an older release,
    has the time ``at``. ``nodes``: nodes that have not recovered since their fault; they get no pod before
    ``retry_at``. ``in_a_row``: faults since all nodes were healthy. ``at``: creation time of the youngest pod
    that existed when the last fault was counted.
    """

    hosts: tuple[tuple[str, int], ...] = ()
    nodes: frozenset[int] = frozenset()
    in_a_row: int = 0
    at: float = 0.0
    retry_at: float = 0.0
    seen: tuple[tuple[str, float], ...] = ()

    @property
    def avoided(self) -> tuple[str, ...]:
        """Hosts that new pods should avoid."""
        return tuple(host for host, _ in self.hosts)


@dataclass(frozen=True)
class RecordedInputError:
    """A node that ended with exit code 64 on a host before any group had formed."""

    node: int
    host: str


@dataclass(frozen=True)
class Coordinator:
    """The newest coordinator pod that was created, and its counters at the last reading.

    ``attempt``: -1 if none was created yet. ``is_recorded``: its end is counted. ``is_queued``: Kueue admits
    no coordinator without a queue. ``restarts``, ``lost_seconds``: counters that start at 0 with each
    coordinator pod.
    """

    attempt: int = -1
    image: str = ""
    is_recorded: bool = False
    is_queued: bool = False
    restarts: Mapping[str, int] = field(default_factory=dict)
    lost_seconds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedTraining:
    """The last known state of the training. Times are in seconds since 1970.

    ``updated_at``: when the step last changed. ``checkpoint_at``: when the newest checkpoint was first
    reported.
    ``failed_saves``: number of consecutive failed saves. ``save_trouble``, ``save_message``: why the last
    save failed.
    """

    generation: int | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    checkpoint_step: int | None = None
    checkpoint_at: float | None = None
    ready: int = 0
    updated_at: float | None = None
    failed_saves: int | None = None
    save_trouble: str = ""
    save_message: str = ""


@dataclass(frozen=True)
class Memory:
    """The part of a run's status on which decisions are based. Times are in seconds since 1970.

    ``attempts``: ``attempts[i]`` is the highest attempt created for node i, -1 if none.
    ``recorded``: nodes for which the end of the newest attempt is counted.
    ``restart``: number of restarts by ``restartNonce`` or by a change of settings.
    ``restart_nonce``, ``settings_hash``: the values that the last restart used.
    ``stop_reason``: why the run stopped on request; empty if it did not.
    ``has_formed``: a group has formed since the run was started, resumed or restarted.
    ``input_errors``: exits with code 64 before a group formed.
    ``given_back``: how many times a run below its minimum has given its pods back since it last trained.
    ``come_again_at``: no pod is created before this time.
    ``gang``: number of the newest group of nodes that a queue admits together, -1 if none. It never
    decreases.
    ``min_nodes`` (of the spec), ``phase``, ``reason``, ``message``: as last shown.
    ``image``: the image that the run requests.
    ``image_id``: the image that the kubelet reported for the first pod of this restart.
    ``image_pin``: the image by digest; empty if later pods use ``image``.
    ``told_changes``: hash of the edited fields that the last event listed.
    ``profile``: names of the profiles with which the run began.
    ``profile_note``: the content of these profiles.
    """

    is_known: bool = False
    image: str = ""
    image_id: str = ""
    image_pin: str = ""
    profile: str = ""
    profile_note: str = ""
    recipe_hash: str = ""
    restart: int = 0
    restart_nonce: str | None = None
    settings_hash: str = ""
    told_changes: str = ""
    start_time: float | None = None
    finishing_since: float | None = None
    finish: RecordedFinish | None = None
    stop_reason: str = ""
    coordinator: Coordinator = field(default_factory=Coordinator)
    attempts: tuple[int, ...] = ()
    recorded: frozenset[int] = frozenset()
    restarts: Mapping[str, int] = field(default_factory=dict)
    lost_seconds: Mapping[str, int] = field(default_factory=dict)
    budget: Budget = Budget()
    faults: HostFaults = HostFaults()
    min_nodes: int | None = None
    given_back: int = 0
    come_again_at: float = 0.0
    input_errors: tuple[RecordedInputError, ...] = ()
    has_formed: bool = False
    last_failure: LastFailure | None = None
    ends: tuple[EndRecord, ...] = ()
    training: RecordedTraining = RecordedTraining()
    preparation: DataPreparation = field(default_factory=DataPreparation)
    evaluation: EvaluationProgress = field(default_factory=EvaluationProgress)
    gang: int = -1
    usage: PodTimeAccount = field(default_factory=PodTimeAccount)
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)

    @property
    def is_complete(self) -> bool:
        """Whether the run has ended with phase Complete."""
        return self.finish is not None and self.finish.phase == Phase.COMPLETE

    @property
    def is_stopped(self) -> bool:
        """Whether the run was stopped on request and waits until a person resumes it."""
        return bool(self.stop_reason)

    def attempt_of(self, index: int) -> int:
        """Return the highest attempt created for a node; -1 if there is none."""
        return self.attempts[index] if index < len(self.attempts) else -1

    def has_recorded(self, index: int, attempt: int) -> bool:
        """Return whether the end of a node's attempt is counted or there is a newer attempt."""
        newest = self.attempt_of(index)
        return attempt < newest or (attempt == newest and index in self.recorded)


_TOGETHER_SECONDS: Final = 30.0
"""Maximum time between the ends of a node's pod and of the coordinator that count as one incident, for
example the drain of a host on which both ran. The pods of such an incident end within seconds."""
_FROM_OUTSIDE: Final = frozenset(
    {PodCause.NODE_LOST, PodCause.PREEMPTED, PodCause.EVICTED, PodCause.DELETED}
)


def count_restart(memory: Memory, end: EndRecord) -> Memory:
    """Return the memory with one more end, counted as a restart.

    The loss of the coordinator counts only if no node's pod was lost in the same incident. Otherwise only the
    node's pod counts.
    """
    near = [one for one in memory.ends if abs(end.at - one.at) <= _TOGETHER_SECONDS]
    coordinators = [one for one in near if one.cause == PodCause.COORDINATOR_LOST]
    nodes = [one for one in near if one.cause in _FROM_OUTSIDE]
    restarts = dict(memory.restarts)

    is_counted = end.cause != PodCause.COORDINATOR_LOST or not nodes
    if is_counted:
        restarts[end.cause] = restarts.get(end.cause, 0) + 1
    # If the coordinator's end was observed and counted first, take that count back.
    lost = restarts.get(PodCause.COORDINATOR_LOST, 0)
    if end.cause in _FROM_OUTSIDE and coordinators and not nodes and lost:
        restarts[PodCause.COORDINATOR_LOST] = lost - 1
        if lost == 1:
            del restarts[PodCause.COORDINATOR_LOST]
    return replace(memory, restarts=restarts, ends=(*memory.ends, end)[-MAX_ENDS:])


def begin_anew(memory: Memory) -> Memory:
    """Return the memory after a pause: time and budget are reset, and faults of hosts are kept."""
    faults = memory.faults
    return replace(
        memory,
        start_time=None,
        budget=Budget(at=memory.budget.at),
        faults=HostFaults(hosts=faults.hosts, at=faults.at, seen=faults.seen),
        given_back=0,
        come_again_at=0.0,
        has_formed=False,
        input_errors=(),
    )


def add_hosts(memory: Memory, hosts: Sequence[str]) -> Memory:
    """Return the memory with hosts that caused failures of other runs. Use it only to plan new pods.

    The run's own hosts take precedence: they come last, and are kept if there are more than ``MAX_HOSTS``
    hosts.
    """
    known = dict(memory.faults.hosts)
    further = [(host, 0) for host in hosts if host not in known]
    if not further:
        return memory
    both = (*further, *memory.faults.hosts)[-MAX_HOSTS:]
    return replace(memory, faults=replace(memory.faults, hosts=both))


def parse_memory(status: Mapping[str, Any]) -> Memory:
    """Return the memory in a run's ``status``. Values that are missing or not valid count as unknown."""
    # Texts under ``memory`` are only for the operator. All other fields are shown to users and read back
    # here.
    conditions = tuple(get_maps(status, "conditions"))
    notes = get_map(status, "memory")
    gang = unpack_counts(get_text(notes, "gang"), most=MAX_ATTEMPT) or (-1,)
    given_back = unpack_counts(get_text(notes, "givenBack"), most=LATEST) or (0,)
    # Older releases stored only that the run had stopped, which was always on request.
    stopped = get_text(notes, "stopped")
    stop_reason = Reason.STOPPED.value if stopped == "true" else stopped
    if stop_reason not in (Reason.STOPPED, Reason.NON_FINITE):
        stop_reason = ""
    preparation, evaluation = (
        (get_map(status, name), get_text(notes, name))
        for name in ("preparation", "evaluation")
    )
    return Memory(
        is_known=bool(conditions),
        image=get_text(status, "image"),
        image_id=get_text(notes, "imageID"),
        image_pin=get_text(notes, "imagePin"),
        profile=get_text(status, "profile"),
        profile_note=get_text(notes, "profile"),
        recipe_hash=get_text(status, "recipeHash"),
        restart=get_natural(status, "attempt", most=MAX_ATTEMPT) or 0,
        restart_nonce=get_text(status, "restartNonce") or None,
        settings_hash=get_text(notes, "settings"),
        told_changes=get_text(notes, "toldChanges"),
        start_time=parse_time(status.get("startTime")),
        finishing_since=parse_time(notes.get("finishingTime")),
        finish=_parse_finish(status, conditions),
        stop_reason=stop_reason,
        coordinator=_parse_coordinator(get_map(status, "coordinator"), notes),
        attempts=unpack_counts(get_text(notes, "attempts"), most=MAX_ATTEMPT),
        recorded=frozenset(unpack_ranges(get_text(notes, "ended"))),
        restarts=_parse_counters(get_map(status, "restarts", "byCause")),
        lost_seconds=_parse_counters(get_map(status, "lostSeconds")),
        budget=_parse_budget(
            get_map(status, "failures"), unpack_mapping(get_text(notes, "budget"))
        ),
        faults=_parse_faults(
            unpack_mapping(get_text(notes, "hostFaults")), get_text(notes, "faultyNodes")
        ),
        min_nodes=get_natural(get_map(status, "nodes"), "min", most=MAX_NODES),
        given_back=max(0, given_back[0]),
        come_again_at=float(max(0, given_back[-1])),
        input_errors=_parse_input_errors(unpack_mapping(get_text(notes, "inputErrors"))),
        # Older releases did not store this. The phase Running shows that a group has formed.
        has_formed=notes.get("formed") == "true" or status.get("phase") == Phase.RUNNING,
        last_failure=_parse_failure(get_map(status, "lastFailure")),
        ends=tuple(map(_parse_end, get_maps(status, "attempts")[-MAX_ENDS:])),
        training=_parse_training(status),
        preparation=parse_preparation(*preparation),
        evaluation=parse_evaluation(*evaluation),
        usage=parse_notes(notes),
        gang=gang[-1],  # older releases wrote the group's size before its number
        phase=get_text(status, "phase"),
        reason=get_text(status, "reason"),
        message=get_text(status, "message"),
        conditions=conditions,
    )


def _parse_end(raw: Mapping[str, Any]) -> EndRecord:
    at = parse_time(raw.get("at")) or 0.0
    return EndRecord(
        pod=get_text(raw, "pod"),
        cause=get_text(raw, "cause"),
        exit_code=get_int(raw, "exitCode", most=_MOST_SHOWN),
        at=at,
    )


def _parse_finish(
    status: Mapping[str, Any], conditions: Iterable[Mapping[str, Any]]
) -> RecordedFinish | None:
    for condition in conditions:
        kind = condition.get("type")
        is_final = kind in (Condition.COMPLETE, Condition.FAILED)
        if not is_final or condition.get("status") != "True":
            continue
        # A status written by an earlier release or a person may lack the completion time.
        moved_at = parse_time(condition.get("lastTransitionTime"))
        at = parse_time(status.get("completionTime")) or moved_at
        return RecordedFinish(
            phase=Phase.COMPLETE if kind == Condition.COMPLETE else Phase.FAILED,
            reason=get_text(condition, "reason"),
            message=get_text(condition, "message"),
            at=at or 0.0,
        )
    return None


def _parse_coordinator(raw: Mapping[str, Any], notes: Mapping[str, Any]) -> Coordinator:
    attempt = get_natural(raw, "attempt", most=MAX_EPOCH)
    return Coordinator(
        attempt=-1 if attempt is None else attempt,
        image=get_text(notes, "coordinatorImage"),
        is_recorded=notes.get("coordinatorEnded") == "true",
        is_queued=notes.get("coordinatorQueued") == "true",
        restarts=_parse_counters(unpack_mapping(get_text(notes, "coordinatorRestarts"))),
        lost_seconds=_parse_counters(
            unpack_mapping(get_text(notes, "coordinatorLostSeconds"))
        ),
    )


def _parse_budget(shown: Mapping[str, Any], raw: Mapping[str, Any]) -> Budget:
    step = get_natural(raw, "step")
    checkpoint = get_natural(shown, "checkpointStep")
    return Budget(
        failures=get_natural(shown, "withoutProgress", most=MAX_ATTEMPT) or 0,
        step=-1 if step is None else step,
        checkpoint_step=-1 if checkpoint is None else checkpoint,
        at=parse_time(raw.get("at")) or 0.0,
        short_lives=get_natural(raw, "shortLives", most=MAX_ATTEMPT) or 0,
        retry_at=parse_time(raw.get("retryAt")) or 0.0,
        since=_parse_since(raw),
    )


def _parse_since(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    attempt = get_natural(raw, "sinceAttempt", most=MAX_ATTEMPT)
    new_steps = get_natural(raw, "sinceSteps")
    return None if attempt is None or new_steps is None else (attempt, new_steps)


def parse_hosts(text: str) -> dict[str, float]:
    """Return the time of each host's last fault, in seconds since 1970.

    ``text``: the value of ``memory.hostFaults`` in a run's status.
    """
    faults = _parse_faults(unpack_mapping(text), "")
    times = dict(faults.seen)
    return {host: times.get(host, faults.at) for host in faults.avoided}


def _parse_faults(raw: Mapping[str, Any], nodes: str) -> HostFaults:
    # The newest faults come last; keep them.
    hosts = dict(get_hosts(raw, "hosts", most=MAX_ATTEMPT)[-MAX_HOSTS:])
    seen = dict(get_hosts(raw, "seen", most=LATEST))
    return HostFaults(
        seen=tuple((host, float(at)) for host, at in seen.items() if host in hosts),
        hosts=tuple(hosts.items()),
        nodes=frozenset(unpack_ranges(nodes)),
        in_a_row=get_natural(raw, "inARow", most=MAX_ATTEMPT) or 0,
        at=parse_time(raw.get("at")) or 0.0,
        retry_at=parse_time(raw.get("retryAt")) or 0.0,
    )


def _parse_input_errors(raw: Mapping[str, Any]) -> tuple[RecordedInputError, ...]:
    errors = [
        RecordedInputError(node, host)
        for node, host in get_pairs(raw, "said")
        if to_int(node, most=MAX_NODES) is not None and is_host(host)
    ]
    return tuple(errors[-MAX_HOSTS:])


def _parse_failure(raw: Mapping[str, Any]) -> LastFailure | None:
    if not raw:
        return None
    return LastFailure(
        cause=get_text(raw, "cause"),
        node=get_natural(raw, "node", most=_MOST_SHOWN),
        message=get_text(raw, "message"),
        at=parse_time(raw.get("at")) or 0.0,
        rank=get_natural(raw, "rank", most=_MOST_SHOWN),
        step=get_natural(raw, "step"),
        exit_code=get_int(raw, "exitCode", most=_MOST_SHOWN),
    )


def _parse_training(status: Mapping[str, Any]) -> RecordedTraining:
    raw, checkpoint = get_map(status, "progress"), get_map(status, "checkpoint")
    return RecordedTraining(
        generation=get_natural(raw, "generation"),
        step=get_natural(raw, "step"),
        total_steps=get_natural(raw, "totalSteps"),
        loss=get_float(raw, "loss", least=-_MOST_VALUE, most=_MOST_VALUE),
        tokens_per_second=parse_rate(get_text(raw, "tokensPerSecond")),
        eta_seconds=get_float(raw, "etaSeconds", least=0, most=_MOST_VALUE),
        checkpoint_step=get_natural(checkpoint, "step"),
        checkpoint_at=parse_time(checkpoint.get("savedAt")),
        failed_saves=get_natural(checkpoint, "failedSaves", most=_MOST_SHOWN),
        save_trouble=get_text(checkpoint, "trouble"),
        save_message=get_text(checkpoint, "message"),
        ready=get_natural(get_map(status, "nodes"), "ready", most=MAX_NODES) or 0,
        updated_at=parse_time(raw.get("updatedAt")),
    )


def _parse_counters(raw: Mapping[str, Any]) -> dict[str, int]:
    # Limit the number and size of the counters, because every value that is read here is written again.
    found: dict[str, int] = {}
    for key in raw:
        value = get_natural(raw, key, most=MAX_ATTEMPT)
        if value is not None and len(found) < MAX_CAUSES:
            found[str(key)[:LONGEST_CAUSE]] = value
    return found
