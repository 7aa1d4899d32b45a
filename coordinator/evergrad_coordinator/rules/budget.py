"""Why a generation broke, and how often that may happen without progress. Pure."""

from dataclasses import InitVar, dataclass, field

from evergrad_common.causes import ChangeCause, specify_break
from evergrad_common.contract import SEE_LOGS, UNDISTURBED_SECONDS
from evergrad_coordinator.protocol import Broken, Recovery
from evergrad_coordinator.rules.progress import ProgressCounter
from evergrad_coordinator.rules.state import Key, TrainingState

MAX_FAILURES = 2**31
"""Most failures that may be allowed: a bound for what is read, and no limit in practice."""
MAX_REPORTS = 64
"""Reports of one broken generation that are kept: so many of causes, and so many of consequences."""
LOSSES_PER_FAILURE = 10
"""Preemptions come in storms and say nothing about the run; but a group that nodes vanish from for ever
trains nothing."""


@dataclass(frozen=True)
class GenerationFailure:
    """One report of a broken generation. ``at``: when it happened, by the coordinator's clock."""

    node: str
    at: float
    report: Broken

    @property
    def cause(self) -> ChangeCause:
        """Why the group broke, for those who read it."""
        return specify_break(self.report.cause, self.report.trouble)

    @property
    def is_of_host(self) -> bool:
        """Whether it is trouble of one host or one moment, which its node bounds by itself."""
        return self.report.cause == "environment"

    @property
    def is_consequence(self) -> bool:
        """Whether it only followed from the failure of others."""
        return self.report.cause == "peer_lost"


@dataclass(frozen=True)
class Break:
    """The end of a generation that broke, as known when the next begins. ``lost``: members that are gone and
    not back.

    ``has_left``: a member was asked to go.
    """

    generation: int
    at: float
    lost: frozenset[Key] = frozenset()
    has_left: bool = False


@dataclass
class _Away:
    """A break that counted as a loss of nodes. ``before``: the unexplained break before it."""

    ending: Break
    keys: set[Key]
    before: tuple[int, float] | None


def describe_worker(report: Broken) -> str:
    """The worker that a report is about: it has no rank before it was in a group."""
    return f"rank {report.rank}" if report.rank >= 0 else "a worker without a rank"


def describe_step(step: int) -> str:
    """Where training was: ``after step 12``; -1 means that no step was reported."""
    return f"after step {step}" if step >= 0 else "before a step was reported"


def find_root_cause(failures: list[GenerationFailure]) -> GenerationFailure | None:
    """The earliest that is no mere consequence; else the earliest."""
    return min(failures, key=lambda one: (one.is_consequence, one.at), default=None)


@dataclass
class FailureBudget:
    """Failures in a row without progress. A broken generation counts once, however many nodes report it.

    =====================================  =================================================================
    a generation broke                     it counts
    =====================================  =================================================================
    a report names a cause of the run      as one failure
    a member was asked to go               for nothing
    a member is gone and not back, or      a tenth: ten in a row without progress are one failure
    its host failed (``environment``)
    all members are here (one may have     for nothing the first time; as one failure when it happens again
    been away, and is back as it was)      without progress: such nodes are slow, or do not reach each other
    =====================================  =================================================================
    """

    limit: int
    recovery: InitVar[Recovery]
    progress: ProgressCounter = field(init=False)
    """What counts as progress is decided there; this budget only compares its number of steps."""
    last: GenerationFailure | None = None
    step: int = -1
    """Newest step when the last failure was counted, for its words."""
    _used: int = 0
    """Failures in a row up to the last one that counted, at which there had been …"""
    _mark: int = 0
    """… so many steps of progress."""
    _reports: list[GenerationFailure] = field(default_factory=list)
    _counted: int = -1
    _counted_at: float = float("-inf")
    _unexplained: tuple[int, float] | None = None
    """Steps of progress, and the time, when the last whole group broke for which no member gave a cause."""
    _told: str = ""
    """Words for the last failure that counted, where no report has them."""
    _away: _Away | None = None
    _losses: int = 0
    """Breaks in a row, without progress, that lost a node."""
    _loss_mark: tuple[int, float] = (-1, float("-inf"))
    """Steps of progress at the first of them, and when the last was."""

    def __post_init__(self, recovery: Recovery) -> None:
        self.progress = ProgressCounter(recovery)

    @property
    def used(self) -> int:
        """Failures in a row without progress."""
        return 0 if self.progress.num_steps > self._mark else self._used

    def report(self, failure: GenerationFailure, training: TrainingState) -> None:
        """Note one report; the first of a generation that is no consequence is counted."""
        # What the group had reached by then is progress since the failure before this one, not since this.
        self.observe(training)
        # Reports of one generation belong together; those of the one before are of no further use.
        generation = failure.report.generation
        if any(one.report.generation != generation for one in self._reports):
            self._reports.clear()
        # A thousand nodes may report one break, and the one that knows its cause may be the last. Therefore
        # consequences have a bound of their own, and take no place from a cause.
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
        """Judge a generation that broke, once all members are out of it and the next is about to begin."""
        before, self._away = self._unexplained, None
        if ending.lost or ending.has_left:
            self._unexplained = None

        # A report has counted it already, or nobody is at fault.
        if ending.has_left or self._counted == ending.generation:
            return
        hosts = {
            one.node
            for one in self._reports
            if one.report.generation == ending.generation and one.is_of_host
        }
        # Nodes that come back, as they were, were not lost: the break is then judged anew.
        if ending.lost and not hosts:
            self._away = _Away(ending, set(ending.lost), before)
        if not ending.lost and not hosts:
            self._judge_unexplained(ending, before, training)
            return

        # A loss, or a host's trouble: some of them in a row are one failure. Progress begins a new row.
        # Scripts that report none have made it if they ran long enough.
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
        """Note that the same process of a node is back.

        If that holds for all that the last break lost, they were silent and not lost.
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
        """Count a break of a whole group that has no cause, unless it is the first at this place."""
        reports = [
            one for one in self._reports if one.report.generation == ending.generation
        ]
        at = min((one.at for one in reports), default=ending.at)
        num_steps = self.progress.num_steps
        self._unexplained = (num_steps, at)
        if before is None or num_steps > before[0]:
            return

        # Scripts that report nothing have made progress if they ran long enough between two breaks.
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
        """Count a break that no node has reported."""
        report = Broken(ending.generation, "peer_lost", step=training.step, message=text)
        self.last = GenerationFailure(node, ending.at, report)
        self._count(self.last, training)
        self._told = text

    def _count(self, failure: GenerationFailure, training: TrainingState) -> None:
        # Scripts may report no progress at all: enough time since the last failure replaces it.
        is_told = max(training.step, training.checkpoint_step, failure.report.step) >= 0
        has_lasted = not is_told and failure.at - self._counted_at >= UNDISTURBED_SECONDS
        self._told = ""
        self._counted, self._counted_at = failure.report.generation, failure.at
        self._used = 1 if has_lasted else self.used + 1
        self._mark = self.progress.num_steps
        self.step = max(self.step, training.step, failure.report.step)

    def observe(self, training: TrainingState, *, is_whole: bool = True) -> None:
        """Take what members have reported: after progress, failures count from 0 again."""
        self.progress.note_training(training, is_whole=is_whole)

    @property
    def is_exhausted(self) -> bool:
        """Whether the run must end."""
        return self.used > self.limit

    def describe(self) -> str:
        """Count and root cause, for the run's message."""
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
