"""Records that the loop gives its observers: the rows of the run directory's JSONL files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

TOKENS: Final = "tokens"
"""Items over which the loss of a language model is a mean."""
SAMPLES: Final = "samples"
"""Unit of what a run reads where its samples are no text: each counts as one."""


def unit_read(*, tokens_per_step: object, samples_per_step: object) -> str:
    """Name what the column ``tokens`` counts. A sample of text has two tokens at least."""
    return SAMPLES if tokens_per_step == samples_per_step is not None else TOKENS


@dataclass(frozen=True)
class StepRecord:
    """One finished optimizer step. A step trained again after a kill appears again; its last row counts.

    ``loss`` is in nats per valid token, over the whole global batch. ``tokens`` and ``valid_tokens`` are this
    step's, over all ranks. The ``*_seconds`` are rank 0's wall time; their sum is ``step_seconds`` and
    ``other_seconds`` is what no phase claims. ``time`` is Unix time in seconds at the end of the step.
    ``skipped``: why the step made no update, one of causes.SKIPS; null for all others. ``metrics``: what the
    recipe measures besides, by name, over all ranks. ``loss_scale``: what the loss was multiplied by, with
    precision ``fp16-autocast``.
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

    ``loss`` is in nats per valid token; ``metrics``: what the evaluator measures besides.
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
    """Return the record as a line of its file: its fields in their order; ``metrics`` is left out where
    it is empty, and ``loss_scale`` where there is none."""
    row = dict(record.__dict__)
    if not row["metrics"]:
        # Rows of a recipe without metrics of its own are what they were before there were any.
        del row["metrics"]
    if row.get("loss_scale", 0.0) is None:
        del row["loss_scale"]
    return row


@dataclass(frozen=True)
class Event:
    """A transition of the run, one line of ``events.jsonl``.

    ``type`` is one of the EventType names; ``fields`` hold its details (JSON values only).
    """

    type: str
    time: float
    step: int
    generation: int
    fields: dict[str, Any] = field(default_factory=dict)


class EventType:
    """Names of events. A run begins with ``start``, from a checkpoint or from nothing, and ends with ``end``
    unless it is killed.

    Between the two, rank 0 may be several processes after each other: each new one begins with ``world``.
    """

    START = "start"
    """fields: run, process_start_time (Unix s), resumed_from (step or null), total_steps, world_size, pid."""
    PHASES = "phases"
    """After the first step. fields: seconds per start-up phase {imports, data, group, model, checkpoint,
    first_step}."""
    SAVE = "save"
    """A checkpoint is published. fields: checkpoint, seconds, blocking_seconds, bytes, kept, best."""
    SAVE_FAILED = "save_failed"
    """fields: reason (in words), trouble (one of causes.TROUBLES), failures (in a row), blocking_seconds."""
    FALLBACK = "fallback"
    """A checkpoint did not validate. fields: checkpoint, reason, quarantined_as."""
    RESTORED = "restored"
    """fields: checkpoint, seconds."""
    BEGUN_FROM = "begun_from"
    """A fresh run begins with the state of another. fields: path, checkpoint, from_step, hash, load,
    seconds."""
    SNAPSHOT = "snapshot"
    """A frozen module got its weights, those of a trained one after this step, whose checkpoint is kept.
    fields: name, hash."""
    EXTENDED = "extended"
    """The horizon grew. fields: from_steps, to_steps."""
    CHANGED = "changed"
    """The file differs from the one of the start before. fields: changes, a list of {path, old, new}."""
    WARNING = "warning"
    """fields: message."""
    SKIPPED = "skipped"
    """A step made no update, and training went on. fields: why (causes.SKIPS), message, in_a_row (of those
    not finite)."""
    NON_FINITE = "non_finite"
    """The run stops before this step's successor, which was not finite. fields: why (loss or grad), message,
    in_a_row."""
    ALERT = "alert"
    """An alarm of a monitor has begun. fields: monitor, metric, value, threshold, policy, message."""
    WORLD = "world"
    """Training goes on in another world, in the same processes, without reading a checkpoint.

    fields: world_size, from_world_size, cause (one of causes.CHANGES), detail (the coordinator's words),
    paused_seconds (since the last step; null before the first), pid (of rank 0, which may be another process
    than before).
    """
    STOP = "stop"
    """The run leaves at this boundary. fields: reason (StopReason), saved."""
    COMPLETE = "complete"
    """fields: total_steps."""
    FAILED = "failed"
    """fields: error (class name), message, exit_code."""
    END = "end"
    """fields: exit_code."""


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
"""Why the loop ended; ``observer``: one asked for it.

``change`` is no end of the run: it goes on in another world.
"""

Wish = Literal["stop", "save", "evaluate"]
"""Wish of an observer: leave after this step, save it, or evaluate all sets."""


@dataclass(frozen=True)
class RunInfo:
    """Facts that hold for one process of a run, known before its first step."""

    name: str
    generation: int
    world_size: int
    total_steps: int
    start_step: int
    """Finished steps when this process began; 0 for a fresh run."""
    tokens_per_step: int
    samples_per_step: int
    parameters: int
    precision: str
    parallelism: str
    model: str
    run_directory: str
    metrics_address: str | None = None
    takes_over: bool = False
    """This process goes on where another one of the same run was rank 0 before: nothing has started."""
    highest_step: int | None = None
    """The highest step any process of the run has finished before; None where nobody has looked."""
    metrics: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Metrics of the recipe besides the loss: ``unit`` and ``help`` of each, from the catalogue."""
    loss_items: str = TOKENS
    """Items over which the loss is a mean, such as ``pairs``."""
    last_time: float | None = None
    """Unix seconds of the last sign of the run before this process; None where nobody has looked, or there is
    none."""
    trainable_parameters: int | None = None
    """Those that are trained; None where it was not counted."""
    run_id: str = ""
    """Drawn once: the same through every restart and change of rank 0."""
    flops_per_step: float | None = None
    """Floating-point operations of the model in one step of all processes; None where they are not known."""
    peak_flops: float | None = None
    """The most that the device of one process can do a second; None where it is not known."""

    @property
    def unit_read(self) -> str:
        """Unit of ``tokens_per_step``."""
        return unit_read(
            tokens_per_step=self.tokens_per_step, samples_per_step=self.samples_per_step
        )
