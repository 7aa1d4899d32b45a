"""The memory that the operator stores in the run's status: counters, and decisions that must not be repeated.
Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final

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
    get_maps,
    get_pairs,
    get_text,
    is_host,
    to_int,
)
from evergrad_operator.core.objects.status_codec import (
    At,
    Kind,
    Layout,
    TextForm,
    decode,
    encode,
    list_of_records,
    one_record,
)
from evergrad_operator.core.objects.status_encoding import pack_counts, unpack_counts
from evergrad_operator.core.objects.status_kinds import (
    ATTEMPTS,
    COUNTERS,
    COUNTERS_TEXT,
    FLAG_TEXT,
    HOST_TIMES,
    HOSTS,
    LOSS,
    MAX_HOSTS,
    NATURAL,
    RANGES,
    RATE,
    TEXT,
    TIME,
    TIME_NUMBER,
    WHOLE_SECONDS,
    integer,
    natural,
    only_read,
)
from evergrad_operator.core.objects.times import (
    LATEST,
    format_duration,
    format_time,
    parse_time,
)
from evergrad_operator.core.observe.evaluation import EvaluationProgress
from evergrad_operator.core.observe.preparation import DataPreparation
from evergrad_operator.core.observe.time_accounting import PodTimeAccount

MAX_ENDS: Final = 10
"""Maximum number of ends of pods in the status: enough to see a pattern, and a small part of its 16 KiB."""
LONGEST_SAVE_MESSAGE: Final = 512
"""Maximum length of the reason of a failed save, in characters: enough for one error with its path."""
_MOST_SHOWN: Final = 2**31 - 1
"""Largest valid number in most fields of a status. Larger numbers are dropped, because every value that is
read here is written again."""
REMEMBERED_SECONDS: Final = 24 * 3600.0
"""Time for which a host is avoided after its last fault. It is long enough for a person to inspect the host,
and short enough that a repaired host, or a new host with the same name, is used again without action."""
_ATTEMPT: Final = natural(MAX_ATTEMPT)
_SHOWN: Final = natural(_MOST_SHOWN)


@dataclass(frozen=True)
class EndRecord:
    """One pod's end, as listed in the status. ``at``: seconds since 1970."""

    pod: Annotated[str, At("pod", TEXT)] = ""
    cause: Annotated[str, At("cause", TEXT)] = ""
    exit_code: Annotated[int | None, At("exitCode", integer(_MOST_SHOWN))] = None
    at: Annotated[float, At("at", TIME)] = 0.0


@dataclass(frozen=True)
class LastFailure:
    """The newest failure and its root cause. ``rank`` and ``step`` are None if they were not reported."""

    cause: Annotated[str, At("cause", TEXT)] = ""
    node: Annotated[int | None, At("node", _SHOWN)] = None
    message: Annotated[str, At("message", TEXT)] = ""
    at: Annotated[float, At("at", TIME)] = 0.0
    rank: Annotated[int | None, At("rank", _SHOWN)] = None
    step: Annotated[int | None, At("step", NATURAL)] = None
    exit_code: Annotated[int | None, At("exitCode", integer(_MOST_SHOWN))] = None


@dataclass(frozen=True)
class RecordedFinish:
    """How the run ended. ``phase``: Complete or Failed. ``at``: seconds since 1970."""

    phase: Phase
    reason: str
    message: str
    at: float


def parse_finish(status: Mapping[str, Any]) -> RecordedFinish | None:
    """Return how the run with this ``status`` ended; None if it has not ended."""
    for condition in get_maps(status, "conditions"):
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


@dataclass(frozen=True)
class FirstStatus:
    """The first status of a coordinator after a failure: its pod's attempt, and its steps of progress."""

    attempt: Annotated[int, At("memory.budget.sinceAttempt", _ATTEMPT)]
    new_steps: Annotated[int, At("memory.budget.sinceSteps", NATURAL)]


@dataclass(frozen=True)
class Budget:
    """Consecutive failures without progress. Times are in seconds since 1970.

    ``step``, ``checkpoint_step``: the newest step and checkpoint before the last failure. ``since``: None if
    there is no status after the failure yet, and then no step counts as progress. ``short_lives``:
    consecutive ends that cost no failure, of pods that had just started. ``retry_at``: no replacement is
    created before this time.
    """

    failures: Annotated[int, At("failures.withoutProgress", _ATTEMPT, always=True)] = 0
    step: Annotated[int, At("memory.budget.step", NATURAL)] = -1
    checkpoint_step: Annotated[int, At("failures.checkpointStep", NATURAL)] = -1
    at: Annotated[float, At("memory.budget.at", TIME)] = 0.0
    short_lives: Annotated[int, At("memory.budget.shortLives", _ATTEMPT)] = 0
    retry_at: Annotated[float, At("memory.budget.retryAt", TIME)] = 0.0
    since: FirstStatus | None = None


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

    hosts: Annotated[tuple[tuple[str, int], ...], At("memory.hostFaults.hosts", HOSTS)] = ()
    nodes: Annotated[frozenset[int], At("memory.faultyNodes", RANGES)] = frozenset()
    in_a_row: Annotated[int, At("memory.hostFaults.inARow", _ATTEMPT)] = 0
    at: Annotated[float, At("memory.hostFaults.at", TIME)] = 0.0
    retry_at: Annotated[float, At("memory.hostFaults.retryAt", TIME)] = 0.0
    seen: Annotated[
        tuple[tuple[str, float], ...], At("memory.hostFaults.seen", HOST_TIMES)
    ] = ()

    @property
    def avoided(self) -> tuple[str, ...]:
        """Hosts that new pods should avoid."""
        return tuple(host for host, _ in self.hosts)


def parse_hosts(text: str) -> dict[str, float]:
    """Return the time of each host's last fault, in seconds since 1970.

    ``text``: the value of ``memory.hostFaults`` in a run's status.
    """
    faults = decode(HostFaults, {"memory": {"hostFaults": text}})
    times = dict(faults.seen)
    return {host: times.get(host, faults.at) for host in faults.avoided}


@dataclass(frozen=True)
class RecordedInputError:
    """A node that ended with exit code 64 on a host before any group had formed."""

    node: int
    host: str


def _read_input_errors(raw: Mapping[str, Any], key: str) -> tuple[RecordedInputError, ...]:
    errors = [
        RecordedInputError(node, host)
        for node, host in get_pairs(raw, key)
        if to_int(node, most=MAX_NODES) is not None and is_host(host)
    ]
    return tuple(errors[-MAX_HOSTS:])


_INPUT_ERRORS: Final = Kind(
    _read_input_errors, lambda errors: [[error.node, error.host] for error in errors]
)


@dataclass(frozen=True)
class Coordinator:
    """The newest coordinator pod that was created, and its counters at the last reading.

    ``attempt``: -1 if none was created yet. ``is_recorded``: its end is counted. ``is_queued``: Kueue admits
    no coordinator without a queue. ``restarts``, ``lost_seconds``: counters that start at 0 with each
    coordinator pod.
    """

    attempt: Annotated[int, At("coordinator.attempt", natural(MAX_EPOCH))] = -1
    image: Annotated[str, At("memory.coordinatorImage", TEXT)] = ""
    is_recorded: Annotated[bool, At("memory.coordinatorEnded", FLAG_TEXT)] = False
    is_queued: Annotated[bool, At("memory.coordinatorQueued", FLAG_TEXT)] = False
    restarts: Annotated[
        Mapping[str, int], At("memory.coordinatorRestarts", COUNTERS_TEXT)
    ] = field(default_factory=dict)
    lost_seconds: Annotated[
        Mapping[str, int], At("memory.coordinatorLostSeconds", COUNTERS_TEXT)
    ] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordedTraining:
    """The last known state of the training. Times are in seconds since 1970.

    ``updated_at``: when the step last changed. ``checkpoint_at``: when the newest checkpoint was first
    reported.
    ``failed_saves``: number of consecutive failed saves. ``save_trouble``, ``save_message``: why the last
    save failed.
    """

    LAYOUT: ClassVar[Layout] = Layout(
        derived={
            "progress.summary": "summary",
            "progress.percent": "percent",
            "progress.eta": "eta",
        }
    )
    generation: Annotated[int | None, At("progress.generation", NATURAL)] = None
    step: Annotated[int | None, At("progress.step", NATURAL)] = None
    total_steps: Annotated[int | None, At("progress.totalSteps", NATURAL)] = None
    loss: Annotated[float | None, At("progress.loss", LOSS)] = None
    tokens_per_second: Annotated[float | None, At("progress.tokensPerSecond", RATE)] = None
    eta_seconds: Annotated[float | None, At("progress.etaSeconds", WHOLE_SECONDS)] = None
    checkpoint_step: Annotated[int | None, At("checkpoint.step", NATURAL)] = None
    checkpoint_at: Annotated[float | None, At("checkpoint.savedAt", TIME)] = None
    ready: Annotated[int, At("nodes.ready", natural(MAX_NODES), always=True)] = 0
    updated_at: Annotated[float | None, At("progress.updatedAt", TIME)] = None
    failed_saves: Annotated[int | None, At("checkpoint.failedSaves", _SHOWN)] = None
    save_trouble: Annotated[str, At("checkpoint.trouble", TEXT)] = ""
    save_message: Annotated[str, At("checkpoint.message", TEXT)] = ""

    @property
    def summary(self) -> str | None:
        """The step, and the number of steps if it is known: ``1200/20000``."""
        if self.step is None:
            return None
        return f"{self.step}/{self.total_steps}" if self.total_steps else str(self.step)

    @property
    def percent(self) -> int | None:
        """Completed share of the steps. At most 100, because an edit may set a horizon that has passed."""
        if self.step is None or not self.total_steps:
            return None
        return min(100, 100 * self.step // self.total_steps)

    @property
    def eta(self) -> str | None:
        """The time to the end of the run, such as ``5h12m``."""
        return None if self.eta_seconds is None else format_duration(self.eta_seconds)


def _read_pause(text: str, texts: Mapping[str, Any]) -> dict[str, int]:
    counts = unpack_counts(text, most=LATEST) or (0,)
    return {"count": max(0, counts[0]), "until": max(0, counts[-1])}


def _write_pause(pause: Mapping[str, Any], texts: Mapping[str, Any]) -> str:
    if "count" not in pause:
        return ""
    return pack_counts((pause["count"], int(pause.get("until", 0))))


def _read_gang(raw: Mapping[str, Any], key: str) -> int | None:
    # Older releases wrote the group's size before its number.
    counts = unpack_counts(get_text(raw, key), most=MAX_ATTEMPT)
    return counts[-1] if counts else None


def _read_stop_reason(raw: Mapping[str, Any], key: str) -> str | None:
    # Older releases stored only that the run had stopped, which was always on request.
    text = get_text(raw, key)
    reason = Reason.STOPPED.value if text == "true" else text
    return reason if reason in (Reason.STOPPED, Reason.NON_FINITE) else None


_FINISH: Final = Kind(
    read=lambda status, _: parse_finish(status),
    write=lambda finish: format_time(finish.at) if int(finish.at) else None,
)
_CONDITIONS: Final = Kind(lambda raw, key: tuple(get_maps(raw, key)))
_IS_KNOWN: Final = Kind(lambda raw, key: bool(get_maps(raw, key)))


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

    LAYOUT: ClassVar[Layout] = Layout(
        derived={"restarts.total": "num_restarts"},
        texts={"givenBack": TextForm(_read_pause, _write_pause)},
    )
    is_known: Annotated[bool, At("conditions", only_read(_IS_KNOWN))] = False
    image: Annotated[str, At("image", TEXT)] = ""
    image_id: Annotated[str, At("memory.imageID", TEXT)] = ""
    image_pin: Annotated[str, At("memory.imagePin", TEXT)] = ""
    profile: Annotated[str, At("profile", TEXT)] = ""
    profile_note: Annotated[str, At("memory.profile", TEXT)] = ""
    recipe_hash: Annotated[str, At("recipeHash", TEXT)] = ""
    restart: Annotated[int, At("attempt", _ATTEMPT, always=True)] = 0
    restart_nonce: Annotated[str | None, At("restartNonce", TEXT)] = None
    settings_hash: Annotated[str, At("memory.settings", TEXT)] = ""
    told_changes: Annotated[str, At("memory.toldChanges", TEXT)] = ""
    start_time: Annotated[float | None, At("startTime", TIME)] = None
    finishing_since: Annotated[float | None, At("memory.finishingTime", TIME)] = None
    finish: Annotated[RecordedFinish | None, At("completionTime", _FINISH)] = None
    stop_reason: Annotated[str, At("memory.stopped", Kind(_read_stop_reason))] = ""
    coordinator: Coordinator = field(default_factory=Coordinator)
    attempts: Annotated[tuple[int, ...], At("memory.attempts", ATTEMPTS)] = ()
    recorded: Annotated[frozenset[int], At("memory.ended", RANGES)] = frozenset()
    restarts: Annotated[Mapping[str, int], At("restarts.byCause", COUNTERS)] = field(
        default_factory=dict
    )
    lost_seconds: Annotated[Mapping[str, int], At("lostSeconds", COUNTERS)] = field(
        default_factory=dict
    )
    budget: Budget = Budget()
    faults: HostFaults = HostFaults()
    min_nodes: Annotated[int | None, At("nodes.min", only_read(natural(MAX_NODES)))] = None
    given_back: Annotated[int, At("memory.givenBack.count", natural(LATEST))] = 0
    come_again_at: Annotated[float, At("memory.givenBack.until", TIME_NUMBER)] = 0.0
    input_errors: Annotated[
        tuple[RecordedInputError, ...], At("memory.inputErrors.said", _INPUT_ERRORS)
    ] = ()
    has_formed: Annotated[bool, At("memory.formed", FLAG_TEXT)] = False
    last_failure: Annotated[
        LastFailure | None, At("lastFailure", one_record(LastFailure))
    ] = None
    ends: Annotated[
        tuple[EndRecord, ...],
        At("attempts", list_of_records(EndRecord, most=MAX_ENDS)),
    ] = ()
    training: RecordedTraining = RecordedTraining()
    preparation: DataPreparation = field(default_factory=DataPreparation)
    evaluation: EvaluationProgress = field(default_factory=EvaluationProgress)
    gang: Annotated[int, At("memory.gang", Kind(_read_gang, str))] = -1
    usage: PodTimeAccount = field(default_factory=PodTimeAccount)
    phase: Annotated[str, At("phase", only_read(TEXT))] = ""
    reason: Annotated[str, At("reason", only_read(TEXT))] = ""
    message: Annotated[str, At("message", only_read(TEXT))] = ""
    conditions: Annotated[
        tuple[Mapping[str, Any], ...], At("conditions", only_read(_CONDITIONS))
    ] = field(default=(), repr=False)

    @property
    def num_restarts(self) -> int:
        """Number of replaced pods and restarted workers, for all causes."""
        return sum(self.restarts.values())

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
    memory = decode(Memory, status)
    # Older releases did not store this. The phase Running shows that a group has formed.
    if memory.phase == Phase.RUNNING and not memory.has_formed:
        memory = replace(memory, has_formed=True)
    return memory


def build_memory(memory: Memory) -> dict[str, Any]:
    """Build the parts of the status that ``parse_memory`` reads, except the phase and the conditions.

    Texts under ``memory`` are only for the operator. All other fields are shown to users.
    """
    return encode(memory)
