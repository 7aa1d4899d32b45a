"""The accounts of one process while it runs, as totals that only grow: what the Prometheus counters show."""

from evergrad_trainer.observers.accounting import CAUSES
from evergrad_trainer.observers.events import seconds_of
from evergrad_trainer.records import EvaluationRecord, Event, EventType, StepRecord

PHASES = ("data", "forward_backward", "comm_wait", "optimizer", "checkpoint", "eval", "other")
"""Where the time of one process goes from its first step on, in the words of the Prometheus metrics."""


class LiveAccounting:
    """The same accounts as they grow, for counters: nothing ever decreases.

    It cannot know which steps a later process will repeat, so it counts a repeated step as ``recompute`` when
    it is trained again, not when it was trained first; over all processes of a run the totals differ from
    ``account`` by no more than that. A save is reported after the pause it caused; until the next pause its
    blocking seconds count as ``other`` too.
    """

    def __init__(self, *, highest_step: int = 0, last_time: float | None = None) -> None:
        """``highest_step`` and ``last_time`` (Unix s): what earlier processes of the run have left, see
        history.read_before."""
        self.productive = 0.0
        self.lost = dict.fromkeys(CAUSES, 0.0)
        self.phases = dict.fromkeys(PHASES, 0.0)
        self._highest_step = highest_step
        self._last_time = last_time
        self._since: float | None = None
        """Up to here all time is accounted for; None where nothing was heard yet, or others have accounted
        for it."""
        self._pausing = "startup"
        """What the time since then is lost to, if nothing claims it."""
        self._claimed = 0.0

    def begin(
        self, *, highest_step: int | None, last_time: float | None, takes_over: bool
    ) -> None:
        """A process becomes rank 0. What others did since the last one here is in their accounts, not in
        these.

        ``highest_step`` and ``last_time``: as at the beginning; None where nobody has looked.
        """
        self._highest_step = max(self._highest_step, highest_step or 0)
        self._last_time = self._last_time if last_time is None else last_time
        if takes_over:
            self._since, self._pausing, self._claimed = None, "reconfiguration", 0.0

    def event(self, event: Event) -> None:
        """Count what an event tells."""
        if event.type == EventType.START:
            self._start(event)
        elif event.type == EventType.WORLD:
            self._change_world(event)
        elif event.type == EventType.RESTORED:
            self._claim("restore", None, seconds_of(event, "seconds"))
        elif event.type in (EventType.SAVE, EventType.SAVE_FAILED):
            self._claim("checkpoint", "checkpoint", seconds_of(event, "blocking_seconds"))
        self._last_time = event.time

    def evaluation(self, record: EvaluationRecord) -> None:
        """Count an evaluation."""
        if record.seconds > 0:
            self._claim("evaluation", "eval", record.seconds)
        self._last_time = record.time

    def step(self, record: StepRecord) -> None:
        """Count a finished step and the pause before it."""
        if record.step > self._highest_step:
            self.productive += record.step_seconds
        else:
            self.lost["recompute"] += record.step_seconds
        self._highest_step = max(self._highest_step, record.step)
        self.phases["data"] += record.data_seconds
        self.phases["forward_backward"] += record.forward_backward_seconds
        self.phases["comm_wait"] += record.communication_seconds
        self.phases["optimizer"] += record.optimizer_seconds
        self.phases["other"] += record.other_seconds
        self._pause(record.time - record.step_seconds)
        self._since, self._pausing, self._last_time = record.time, "other", record.time

    def _start(self, event: Event) -> None:
        claimed = event.fields.get("process_start_time")
        begin = (
            min(float(claimed), event.time) if isinstance(claimed, int | float) else event.time
        )
        if self._last_time is not None:
            if begin < self._last_time <= event.time:
                # A node outlives its workers: the start of the node is not the start of this part of the run.
                begin = self._last_time
            self.lost["downtime"] += max(0.0, begin - self._last_time)
        self._since, self._pausing, self._claimed = begin, "startup", 0.0

    def _change_world(self, event: Event) -> None:
        """Training stood still since the last step (or before the first one, since the last sign)."""
        if self._since is None:
            self._since = event.time - seconds_of(event, "paused_seconds")
        elif self._pausing == "startup" and self._last_time is not None:
            self._pause(self._last_time)
            self._since = max(self._since, self._last_time)
        self._pausing = "reconfiguration"
        self._pause(event.time)
        self._since = event.time

    def _claim(self, cause: str, phase: str | None, seconds: float) -> None:
        self.lost[cause] += seconds
        if phase is not None:
            self.phases[phase] += seconds
        self._claimed += seconds

    def _pause(self, until: float) -> None:
        """The time since the last step, less what saves and evaluations have claimed of it (or still owe)."""
        pause = max(0.0, until - self._since) if self._since is not None else 0.0
        paid = min(self._claimed, pause)
        self._claimed -= paid
        self.lost[self._pausing] += pause - paid
        if self._pausing == "startup":
            self._claimed = 0.0
        else:
            self.phases["other"] += pause - paid
