"""Finds the root cause of a broken generation, and limits failures without progress. Pure."""

from dataclasses import InitVar, dataclass, field

from evergrad_common.causes import ChangeCause, specify_break
from evergrad_common.contract import SEE_LOGS, UNDISTURBED_SECONDS
from evergrad_coordinator.protocol import Broken, Recovery
from evergrad_coordinator.rules.progress import ProgressCounter
from evergrad_coordinator.rules.state import Key, TrainingState

MAX_FAILURES = 2**31
"""Upper bound of ``limit``. It only bounds the input and is not a limit in practice."""
MAX_REPORTS = 64
"""Maximum number of reports that are kept of one broken generation, for causes and for consequences each."""
LOSSES_PER_FAILURE = 10
"""Number of losses of nodes without progress that count as one failure.

Many nodes may be preempted together without a fault of the run. But if nodes are lost again and again, the
group never makes progress.
"""


@dataclass(frozen=True)
class GenerationFailure:
    """One report of a broken generation. ``at``: time of the break on the coordinator's clock, in seconds."""

    node: str
    at: float
    report: Broken

    @property
    def cause(self) -> ChangeCause:
        """The cause of the break, as shown in status and log."""
        return specify_break(self.report.cause, self.report.trouble)

    @property
    def is_of_host(self) -> bool:
        """Whether it is a temporary problem or a problem of one host, which the node limits itself."""
        return self.report.cause == "environment"

    @property
    def is_consequence(self) -> bool:
        """Whether the failure only followed from the failure of other ranks."""
        return self.report.cause == "peer_lost"


@dataclass(frozen=True)
class Break:
    """The end of a broken generation, as known at the start of the next one.

    ``lost``: members that disconnected and have not reconnected. ``has_left``: whether a member left on
    request.
    """

    generation: int
    at: float
    lost: frozenset[Key] = frozenset()
    has_left: bool = False


@dataclass
class _Away:
    """A break that counted as a loss of nodes. ``before``: the preceding unexplained break."""

    ending: Break
    keys: set[Key]
    before: tuple[int, float] | None


def describe_worker(report: Broken) -> str:
    """Return the worker of a report: ``rank 3``, or a text without a rank if it was in no group yet."""
    return f"rank {report.rank}" if report.rank >= 0 else "a worker without a rank"


def describe_step(step: int) -> str:
    """Return the position of training, such as ``after step 12``. -1 means that no step was reported."""
    return f"after step {step}" if step >= 0 else "before a step was reported"


def find_root_cause(failures: list[GenerationFailure]) -> GenerationFailure | None:
    """Return the earliest failure that is not a consequence, else the earliest, or None."""
    return min(failures, key=lambda one: (one.is_consequence, one.at), default=None)


@dataclass
class FailureBudget:
    """Counts consecutive failures without progress. A broken generation counts once.

    =====================================  =================================================================
    situation of a broken generation       how it counts
    =====================================  =================================================================
    a report names a cause of the run      as one failure
    a member left on request               not at all
    a member has not reconnected, or       a tenth: ten in a row without progress are one failure
    its host failed (``environment``)
    all members are connected (one may     not the first time; as one failure if it happens again without
    have been away and has reconnected)    progress, because the nodes are slow or cannot reach each other
    =====================================  =================================================================
    """

    limit: int
    recovery: InitVar[Recovery]
    progress: ProgressCounter = field(init=False)
    """Counts the steps of progress; this budget only compares their number."""
    last: GenerationFailure | None = None
    step: int = -1
    """Newest step when the last failure was counted, for the message."""
    _used: int = 0
    """Consecutive failures up to the last counted failure."""
    _mark: int = 0
    """Steps of progress at the last counted failure."""
    _reports: list[GenerationFailure] = field(default_factory=list)
    _counted: int = -1
    _counted_at: float = float("-inf")
    _unexplained: tuple[int, float] | None = None
    """Steps of progress and time of the last break of a complete group without a reported cause."""
    _told: str = ""
    """Message of the last counted failure if no report contains one."""
    _away: _Away | None = None
    _losses: int = 0
    """Consecutive breaks without progress that lost a node."""
    _loss_mark: tuple[int, float] = (-1, float("-inf"))
    """Steps of progress at the first of these breaks, and time of the last one."""

    def __post_init__(self, recovery: Recovery) -> None:
        self.progress = ProgressCounter(recovery)

    @property
    def used(self) -> int:
        """Consecutive failures without progress."""
        return 0 if self.progress.num_steps > self._mark else self._used

    def report(self, failure: GenerationFailure, training: TrainingState) -> None:
        """Record one report.

        The first report of a generation that names a cause of the run counts as a failure. Reports of
        consequences and of host failures do not count here.
        """
        # The steps so far are progress since the previous failure. Take them before this failure counts.
        self.observe(training)
        # Only reports of the same generation belong together; drop the reports of the previous generation.
        generation = failure.report.generation
        if any(one.report.generation != generation for one in self._reports):
            self._reports.clear()
        # A thousand nodes may report one break, and the report of its cause may arrive last. Therefore
        # consequences have a separate limit and do not displace a cause.
        alike = sum(one.is_consequence == failure.is_consequence for one in self._reports)
        if alike < MAX_REPORTS:
            self._reports.append(failure)
        self.last = find_root_cause(self._reports)
        if (
            not failure.is_consequence
            and not failure.is_of_host
            and self._counted != generation
        ):
            self._count(failure, training)

    def conclude(self, ending: Break, training: TrainingState) -> None:
        """Count a broken generation, after all members have left it and before the next one starts."""
        before, self._away = self._unexplained, None
        if ending.lost or ending.has_left:
            self._unexplained = None

        # A break after a requested leave is not a failure, and a report may have counted the break already.
        if ending.has_left or self._counted == ending.generation:
            return
        hosts = {
            one.node
            for one in self._reports
            if one.report.generation == ending.generation and one.is_of_host
        }
        # If all lost nodes reconnect with the same process, ``note_return`` evaluates the break again.
        if ending.lost and not hosts:
            self._away = _Away(ending, set(ending.lost), before)
        if not ending.lost and not hosts:
            self._judge_unexplained(ending, before, training)
            return

        # Several consecutive losses or host failures are one failure. Progress resets the count. If a script
        # reports no progress, a long enough time without a break counts as progress.
        mark, last_at = self._loss_mark
        is_told = max(training.step, training.checkpoint_step) >= 0
        num_steps = self.progress.num_steps
        if num_steps > mark or (not is_told and ending.at - last_at >= UNDISTURBED_SECONDS):
            self._losses, mark = 0, num_steps
        self._losses, self._loss_mark = self._losses + 1, (mark, ending.at)
        if self._losses % LOSSES_PER_FAILURE == 0:
            last = min(hosts | {name for name, _ in ending.lost})
            text = (
                f"nodes or their hosts were lost {self._losses} times in a row without progress; "
                f"{LOSSES_PER_FAILURE} such "
                f"losses are one failure, {self.limit} allowed. Last: node {last}. Look at why its pods end."
            )
            self._count_silent(ending, last, text, training)

    def note_return(self, key: Key, training: TrainingState) -> None:
        """Record that a node has reconnected with the same process.

        If all nodes that the last break lost have reconnected, they were only silent, and the break counts as
        a break of a complete group.
        """
        away = self._away
        if away is None or key not in away.keys:
            return
        away.keys.discard(key)
        if not away.keys:
            self._away = None
            self._losses = max(0, self._losses - 1)
            self._judge_unexplained(away.ending, away.before, training, silent=key[0])

    def _judge_unexplained(
        self,
        ending: Break,
        before: tuple[int, float] | None,
        training: TrainingState,
        silent: str = "",
    ) -> None:
        """Count a break of a complete group without a cause, unless it is the first without progress."""
        reports = [
            one for one in self._reports if one.report.generation == ending.generation
        ]
        at = min((one.at for one in reports), default=ending.at)
        num_steps = self.progress.num_steps
        self._unexplained = (num_steps, at)
        if before is None or num_steps > before[0]:
            return

        # If a script reports no progress, a long enough time between two breaks counts as progress.
        is_told = (
            max(
                training.step,
                training.checkpoint_step,
                *(one.report.step for one in reports),
                -1,
            )
            >= 0
        )
        if not is_told and at - before[1] >= UNDISTURBED_SECONDS:
            return
        if reports:
            self._count(min(reports, key=lambda one: one.at), training)
            return
        where = f"node {silent}" if silent else "a node"
        text = (
            f"the group broke again without progress although every node is there; {self.limit} "
            "such failures are allowed. Last: "
            f"{where} was silent for a while and came back. Check that the nodes get enough CPU "
            "time and reach the coordinator."
        )
        self._count_silent(ending, silent, text, training)

    def _count_silent(
        self, ending: Break, node: str, text: str, training: TrainingState
    ) -> None:
        """Count a break that no node has reported. ``text``: message for the run's status."""
        report = Broken(ending.generation, "peer_lost", step=training.step, message=text)
        self.last = GenerationFailure(node, ending.at, report)
        self._count(self.last, training)
        self._told = text

    def _count(self, failure: GenerationFailure, training: TrainingState) -> None:
        # If a script reports no progress, a long enough time since the last failure counts as progress.
        is_told = max(training.step, training.checkpoint_step, failure.report.step) >= 0
        has_lasted = not is_told and failure.at - self._counted_at >= UNDISTURBED_SECONDS
        self._told = ""
        self._counted, self._counted_at = failure.report.generation, failure.at
        self._used = 1 if has_lasted else self.used + 1
        self._mark = self.progress.num_steps
        self.step = max(self.step, training.step, failure.report.step)

    def observe(self, training: TrainingState, *, is_whole: bool = True) -> None:
        """Take the reported progress into account. After progress, failures count from 0 again."""
        self.progress.note_training(training, is_whole=is_whole)

    @property
    def is_exhausted(self) -> bool:
        """Whether the run must end."""
        return self.used > self.limit

    def describe(self) -> str:
        """Return the number of failures and the root cause, for the run's message."""
        if self.last is None:
            return ""
        if self._told:
            return self._told
        report = self.last.report
        if self.last.is_consequence:
            where = describe_step(max(self.step, report.step))
            times = "1 failure" if self.used == 1 else f"{self.used} failures"
            said = f": {report.message}" if report.message else ""
            return (
                f"the group broke {where} although no node was lost; {times} without progress, "
                f"{self.limit} allowed. Last: {describe_worker(report)} (node {self.last.node}) lost its "
                f"peers{said}. Check that the nodes reach each other (network policy, firewall, "
                "--address), and that the collective timeout is longer than a step."
            )
        code = (
            "no exit code" if report.exit_code is None else f"exit code {report.exit_code}"
        )
        times = "once" if self.used == 1 else f"{self.used} times"
        return (
            f"workers failed {times} without progress; {self.limit} such failures are allowed. "
            f"Last: {self.last.cause} on {describe_worker(report)} (node {self.last.node}) "
            f"{describe_step(report.step)}, {code}"
            f"{': ' + report.message if report.message else ''}. {SEE_LOGS}"
        )
