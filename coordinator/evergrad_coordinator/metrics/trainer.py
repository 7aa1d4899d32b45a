"""The metrics of a run and of its nodes: what the trainer's processes export."""

from typing import Final

from evergrad_coordinator.metrics.series import Series

_STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
_CHECKPOINT_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)

TRAINER: Final[tuple[Series, ...]] = (
    Series(
        "info",
        "gauge",
        "Always 1; facts for joins",
        aggregate="none",
        labels=(
            "attempt",
            "model",
            "precision",
            "parallelism",
            "framework_version",
            "image_version",
        ),
        note="`attempt` is the generation.",
    ),
    Series(
        "step",
        "gauge",
        "Last finished optimizer step",
        unit="steps",
        aggregate="max",
    ),
    Series(
        "max_steps",
        "gauge",
        "Optimizer steps the run is to reach",
        unit="steps",
        aggregate="max",
    ),
    Series(
        "steps_total",
        "counter",
        "Optimizer steps this process has finished, repeated ones included",
        unit="steps",
    ),
    Series(
        "tokens_total",
        "counter",
        "Tokens trained on, over all processes of the run together",
        unit="tokens",
    ),
    Series(
        "samples_total",
        "counter",
        "Samples trained on, over all processes of the run together",
        unit="samples",
    ),
    Series(
        "tokens_per_second",
        "gauge",
        "Tokens a second of wall time, over the last minute",
        unit="tokens/s",
        note="`rate(evergrad_tokens_total[5m])` says the same for any window.",
    ),
    Series(
        "flops_per_second",
        "gauge",
        "Floating-point operations of the model a second, of the last step",
        unit="FLOP/s",
        note="Over all processes. Absent where a task makes its model itself.",
    ),
    Series(
        "mfu_ratio",
        "gauge",
        "Share of what the devices can do at best that the last step used",
        unit="ratio",
        note=(
            "Model FLOPs utilisation; evaluations and saves are not counted as time. Absent for "
            "devices that are not known, unless `logging.peakFlops` is set."
        ),
    ),
    Series(
        "loss",
        "gauge",
        "Nats a valid token: mean of the last 10 steps, or last evaluation",
        unit="nats/token",
        labels=("split", "dataset"),
        note='`split="train"` has `dataset=""`; `split="eval"` is of the set named by `dataset`.',
    ),
    Series(
        "eval_metric",
        "gauge",
        "Last value of another evaluation metric",
        labels=("dataset", "metric"),
        note='`metric="perplexity"`, or what the evaluator measures.',
    ),
    Series(
        "task_metric",
        "gauge",
        "What the recipe itself measures, of the last step",
        labels=("metric",),
        note="`pretrain` measures nothing besides its loss.",
    ),
    Series(
        "grad_norm",
        "gauge",
        "Global gradient norm of the last step, before clipping",
    ),
    Series(
        "learning_rate",
        "gauge",
        "Learning rate of the last step",
    ),
    Series(
        "loss_scale",
        "gauge",
        "What the loss of the last step was multiplied by",
        note="With `runtime.precision: fp16-autocast` only.",
    ),
    Series(
        "world_size",
        "gauge",
        "Processes that train together",
        unit="processes",
    ),
    Series(
        "world_changes_total",
        "counter",
        "Times training went on in another world without reading a checkpoint",
        unit="changes",
        labels=("cause",),
        note="By [cause](#causes).",
    ),
    Series(
        "step_duration_seconds",
        "histogram",
        "Wall time of an optimizer step",
        unit="s",
        note="Buckets from 5 ms to 2 min.",
        buckets=_STEP_BUCKETS,
    ),
    Series(
        "step_phase_seconds_total",
        "counter",
        "Wall time since the first step, by its use",
        unit="s",
        labels=("phase",),
        note="`data`, `forward_backward`, `comm_wait`, `optimizer`, `checkpoint`, `eval`, `other`.",
    ),
    Series(
        "rank_step_skew_seconds",
        "gauge",
        "How much longer the slowest rank computed than the median one",
        unit="s",
        note="Of the last step.",
    ),
    Series(
        "last_step_timestamp_seconds",
        "gauge",
        "Unix time of the end of the last step",
        unit="Unix s",
        aggregate="max",
    ),
    Series(
        "nonfinite_total",
        "counter",
        "Steps refused because a loss or a gradient was not finite",
        unit="steps",
        labels=("what",),
        note="`loss` or `grad`.",
    ),
    Series(
        "skipped_steps_total",
        "counter",
        "Steps that made no update",
        unit="steps",
        labels=("why",),
        note=(
            "A `loss` or a gradient (`grad`) was not finite, a gradient in fp16 was too large for the "
            "loss scale (`overflow`), no token carried a loss (`empty`), or `spec.training.skipSteps` "
            "names them (`requested`)."
        ),
    ),
    Series(
        "alerts_total",
        "counter",
        "Times that what a monitor looks for has begun",
        unit="alerts",
        labels=("monitor",),
        note="`collapse`, `divergence`, `plateau` or `early stop`.",
    ),
    Series(
        "checkpoint_duration_seconds",
        "histogram",
        "Wall time of a save or load, background work included",
        unit="s",
        labels=("op", "mode"),
        note='`op` is `save` or `load`. `mode="sync"`: training waited for all of it; else `async`.',
        buckets=_CHECKPOINT_BUCKETS,
    ),
    Series(
        "checkpoint_blocking_seconds_total",
        "counter",
        "Seconds training stood still for saves",
        unit="s",
    ),
    Series(
        "checkpoint_size_bytes",
        "gauge",
        "Size of the last checkpoint",
        unit="bytes",
    ),
    Series(
        "checkpoint_last_success_timestamp_seconds",
        "gauge",
        "Unix time at which the last checkpoint was published",
        unit="Unix s",
        aggregate="max",
    ),
    Series(
        "checkpoint_last_step",
        "gauge",
        "Step of the last checkpoint",
        unit="steps",
        aggregate="max",
    ),
    Series(
        "checkpoint_failures_total",
        "counter",
        "Checkpoint operations that failed",
        unit="operations",
        labels=("op", "reason"),
        note=(
            "Saves by reason (`no_space`, `read_only`, `permission`, `io`, `timeout`, "
            "`fenced`, `invalid`, `peer_lost`, `other`); checkpoints that did not validate "
            'when loading (`op="load"`, `reason="invalid"`).'
        ),
    ),
    Series(
        "productive_seconds_total",
        "counter",
        "Seconds in steps that were not trained before",
        unit="s",
        note="The numerator of goodput.",
    ),
    Series(
        "lost_seconds_total",
        "counter",
        "All other seconds, by cause",
        unit="s",
        labels=("cause",),
        note=(
            "`startup`, `restore`, `recompute`, `checkpoint`, `evaluation`, "
            "`reconfiguration`, `downtime`, `other`."
        ),
    ),
    Series(
        "exit_code",
        "gauge",
        "Exit code of the trainer, once it has ended",
        note="Absent before, and again when others go on.",
    ),
)
"""Metrics of a run, served where rank 0 is."""

NODE: Final[tuple[Series, ...]] = (
    Series(
        "node_workers",
        "gauge",
        "Workers of this node that can train",
        unit="processes",
        aggregate="sum",
        labels=("node",),
    ),
    Series(
        "node_generation",
        "gauge",
        "Generation this node trained in last",
        aggregate="max",
        labels=("node",),
    ),
    Series(
        "node_worker_starts_total",
        "counter",
        "Worker processes this node has started",
        unit="processes",
        labels=("node",),
        note="More than its workers means that some were replaced: what restarts is the difference.",
    ),
    Series(
        "node_breaks_total",
        "counter",
        "Times a group broke, as this node saw it",
        unit="breaks",
        labels=("node", "cause"),
        note="By [cause](#causes).",
    ),
    Series(
        "device_memory_bytes",
        "gauge",
        "Memory of a worker's device, as of its last step",
        unit="bytes",
        aggregate="sum",
        labels=("node", "local_rank", "kind"),
        note="`allocated` (by tensors), `reserved` (by torch's allocator for them), `peak` (the most of "
        "`allocated`). With CUDA only: absent on a CPU, for scripts, and without a supervisor.",
    ),
    Series(
        "worker_resident_memory_bytes",
        "gauge",
        "Memory of the host that a worker's process holds",
        unit="bytes",
        aggregate="sum",
        labels=("node", "local_rank"),
        note="Pages that workers share count for each; `process_resident_memory_bytes` is the supervisor's.",
    ),
    Series(
        "script_step",
        "gauge",
        "Step of a script, as it reports it",
        unit="steps",
        labels=("node",),
    ),
    Series(
        "script_loss",
        "gauge",
        "Loss of a script, as it reports it",
        labels=("node",),
    ),
    Series(
        "script_tokens_per_second",
        "gauge",
        "Speed of a script, as it reports it",
        unit="tokens/s",
        labels=("node",),
    ),
)
"""Metrics of one node, served by its supervisor."""
