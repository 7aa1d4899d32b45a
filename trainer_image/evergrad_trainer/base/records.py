"""Records that the training loop passes to its observers: the rows of the run directory's JSONL files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

TOKENS: Final = "tokens"
"""Items over which the loss of a language model is averaged."""
SAMPLES: Final = "samples"
"""Unit of a run whose samples are not text. Each sample counts as one."""


def unit_read(*, tokens_per_step: object, samples_per_step: object) -> str:
    """Return the unit of the column ``tokens``: ``samples`` or ``tokens``.

    A sample of text has at least two tokens. If both arguments are the same number, the samples are not text,
    so the unit is ``samples``.
    """
    return SAMPLES if tokens_per_step == samples_per_step is not None else TOKENS


@dataclass(frozen=True)
class StepRecord:
    """One finished optimizer step.

    If a step is trained again after a kill, it has several rows, and the last row is valid. ``loss`` is in
    nats per valid token, over the whole global batch. ``tokens`` and ``valid_tokens`` are counts of this step
    over all ranks. The phases (``*_seconds``) are wall time on rank 0 and add up to ``step_seconds``;
    ``other_seconds`` is the time outside the named phases. ``time`` is Unix time in seconds at the end of the
    step. ``skipped`` is the reason why the step made no update, one of causes.SKIPS, or null. ``metrics`` are
    further measurements of the recipe, by name, over all ranks. ``loss_scale`` is the factor that multiplied
    the loss, with precision ``fp16-autocast``.
    """

    step: int
    generation: int
    world_size: int
    loss: float
    tokens: int
    valid_tokens: int
    sample_hash: str
    learning_rate: float
    grad_norm: float
    step_seconds: float
    data_seconds: float
    forward_backward_seconds: float
    communication_seconds: float
    optimizer_seconds: float
    other_seconds: float
    rank_skew_seconds: float
    time: float
    skipped: str | None = None
    loss_scale: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation of one named set.

    ``loss`` is in nats per valid token. ``metrics`` are further measurements of the evaluator, by name.
    """

    step: int
    generation: int
    name: str
    loss: float
    perplexity: float
    tokens: int
    seconds: float
    time: float
    metrics: Mapping[str, float] = field(default_factory=dict)


def record_row(record: StepRecord | EvaluationRecord) -> dict[str, Any]:
    """Return the fields of ``record`` in the order of its file.

    ``metrics`` is omitted if it is empty, and ``loss_scale`` is omitted if it is None.
    """
    row = dict(record.__dict__)
    if not row["metrics"]:
        # Rows of recipes without their own metrics keep the format of versions without metrics.
        del row["metrics"]
    if row.get("loss_scale", 0.0) is None:
        del row["loss_scale"]
    return row


@dataclass(frozen=True)
class Event:
    """A transition of the run: one line of ``events.jsonl``.

    ``type`` is one of the EventType names. ``fields`` contains its details as JSON values.
    """

    type: str
    time: float
    step: int
    generation: int
    fields: dict[str, Any] = field(default_factory=dict)


class EventType:
    """Names of events.

    A run begins with ``start``, with or without a checkpoint, and ends with ``end`` unless it is killed.
    Meanwhile, another process can become rank 0. The first event of such a process is ``world``.
    """

    START = "start"
    """The first event of each start of a run. fields: run, process_start_time (Unix s), resumed_from (step or
    null), total_steps, world_size, pid."""
    PHASES = "phases"
    """The first step is finished. fields: seconds per start-up phase {imports, data, group, model,
    checkpoint, first_step}."""
    SAVE = "save"
    """A checkpoint is published. fields: checkpoint, seconds, blocking_seconds, bytes, kept, best."""
    SAVE_FAILED = "save_failed"
    """A save failed. fields: reason (text), trouble (one of causes.TROUBLES), failures (number of consecutive
    failures), blocking_seconds."""
    FALLBACK = "fallback"
    """A checkpoint did not validate, so an older one was loaded. fields: checkpoint, reason,
    quarantined_as."""
    RESTORED = "restored"
    """A checkpoint was loaded. fields: checkpoint, seconds."""
    BEGUN_FROM = "begun_from"
    """A new run begins with the state of another run. fields: path, checkpoint, from_step, hash, load,
    seconds."""
    SNAPSHOT = "snapshot"
    """A frozen module received the weights that a trained module has after this step. The checkpoint of this
    step is kept. fields: name, hash."""
    EXTENDED = "extended"
    """The number of steps to train was increased. fields: from_steps, to_steps."""
    CHANGED = "changed"
    """The file differs from the file of the previous start. fields: changes, a list of {path, old, new}."""
    WARNING = "warning"
    """A problem that does not stop the run. fields: message."""
    SKIPPED = "skipped"
    """A step made no update, and training continued. fields: why (causes.SKIPS), message, in_a_row (number of
    consecutive non-finite steps)."""
    NON_FINITE = "non_finite"
    """The run stops after this step, because the next step was not finite. fields: why (loss or grad),
    message, in_a_row."""
    ALERT = "alert"
    """A monitor has raised an alert. fields: monitor, metric, value, threshold, policy, message."""
    WORLD = "world"
    """Training continues in another world, in the same processes, without reading a checkpoint.

    fields: world_size, from_world_size, cause (one of causes.CHANGES), detail (text from the coordinator),
    paused_seconds (since the last step; null before the first step), pid (of rank 0, which may be a different
    process than before).
    """
    STOP = "stop"
    """The run stops at this step boundary. fields: reason (StopReason), saved."""
    COMPLETE = "complete"
    """All steps are finished. fields: total_steps."""
    FAILED = "failed"
    """The run failed with an error. fields: error (class name), message, exit_code."""
    END = "end"
    """The last event of a run, unless the run is killed. fields: exit_code."""


StopReason = Literal[
    "complete",
    "signal",
    "stop_file",
    "stop_after_steps",
    "after_step",
    "observer",
    "non_finite",
    "change",
]
"""Why the loop ended. ``observer`` means that an observer requested it.

``change`` does not end the run, because training continues in another world.
"""

Wish = Literal["stop", "save", "evaluate"]
"""Request of an observer: stop after this step, save this step, or evaluate all sets."""


@dataclass(frozen=True)
class RunInfo:
    """Facts about one process of a run that are known before its first step."""

    name: str
    generation: int
    world_size: int
    total_steps: int
    start_step: int
    """Number of steps that were finished when this process began; 0 for a new run."""
    tokens_per_step: int
    samples_per_step: int
    parameters: int
    precision: str
    parallelism: str
    model: str
    run_directory: str
    metrics_address: str | None = None
    takes_over: bool = False
    """Whether this process continues for another process of the same run that was rank 0 before it. If so,
    the run has not been started again."""
    highest_step: int | None = None
    """The highest step that any earlier process of the run has finished; None if it was not determined."""
    metrics: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Further metrics of the recipe, by name: ``unit`` and ``help`` of each metric, from the catalogue."""
    loss_items: str = TOKENS
    """Items over which the loss is averaged, such as ``pairs``."""
    last_time: float | None = None
    """Unix time in seconds of the last record of the run before this process; None if there is none or it was
    not determined."""
    trainable_parameters: int | None = None
    """Number of parameters that are trained; None if they were not counted."""
    run_id: str = ""
    """Random ID of the run, generated once. It does not change when the run restarts or rank 0 changes."""
    flops_per_step: float | None = None
    """Floating-point operations of the model in one step, over all processes; None if not known."""
    peak_flops: float | None = None
    """Maximum floating-point operations per second of one process's device; None if not known."""

    @property
    def unit_read(self) -> str:
        """Unit of ``tokens_per_step``."""
        return unit_read(
            tokens_per_step=self.tokens_per_step, samples_per_step=self.samples_per_step
        )
