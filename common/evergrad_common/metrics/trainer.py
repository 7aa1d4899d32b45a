"""The metrics of a run and of its nodes, which the trainer's processes export."""

from typing import Final

from evergrad_common.metrics.series import Series

_STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
_CHECKPOINT_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)

TRAINER: Final[tuple[Series, ...]] = (
    Series(
        "info",
        "gauge",
        "Always 1; properties of the run, for joins",
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
        "Last optimizer step that was finished",
        unit="steps",
        aggregate="max",
    ),
    Series(
        "max_steps",
        "gauge",
        "Optimizer steps of the whole run",
        unit="steps",
        aggregate="max",
    ),
    Series(
        "steps_total",
        "counter",
        "Optimizer steps that this process has finished, including repeated steps",
        unit="steps",
    ),
    Series(
        "tokens_total",
        "counter",
        "Tokens that all processes of the run have trained on",
        unit="tokens",
    ),
    Series(
        "samples_total",
        "counter",
        "Samples that all processes of the run have trained on",
        unit="samples",
    ),
    Series(
        "tokens_per_second",
        "gauge",
        "Tokens per second of wall time, over the last minute",
        unit="tokens/s",
        note="For another window use, for example, `rate(evergrad_tokens_total[5m])`.",
    ),
    Series(
        "flops_per_second",
        "gauge",
        "Floating-point operations of the model per second, in the last step",
        unit="FLOP/s",
        note="Over all processes. Absent if a task builds its own model.",
    ),
    Series(
        "mfu_ratio",
        "gauge",
        "Share of the devices' peak performance that the last step used",
        unit="ratio",
        note=(
            "Model FLOPs utilisation, without the time of evaluations and saves. Absent if the "
            "peak of the devices is unknown and `logging.peakFlops` is not set."
        ),
    ),
    Series(
        "loss",
        "gauge",
        "Nats per valid token: mean of the last 10 steps, or last evaluation",
        unit="nats/token",
        labels=("split", "dataset"),
        note='`split="train"` has `dataset=""`; `split="eval"` is the set that `dataset` names.',
    ),
    Series(
        "eval_metric",
        "gauge",
        "Last value of another evaluation metric",
        labels=("dataset", "metric"),
        note='`metric="perplexity"`, or another metric of the evaluator.',
    ),
    Series(
        "task_metric",
        "gauge",
        "Value of a recipe's own metric in the last step",
        labels=("metric",),
        note="`pretrain` measures only its loss.",
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
        "Factor of the loss in the last step",
        note="Only with `runtime.precision: fp16-autocast`.",
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
        "Times training continued in another world without reading a checkpoint",
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
        "Wall time since the first step, by phase",
        unit="s",
        labels=("phase",),
        note="`data`, `forward_backward`, `comm_wait`, `optimizer`, `checkpoint`, `eval`, `other`.",
    ),
    Series(
        "rank_step_skew_seconds",
        "gauge",
        "Additional compute time of the slowest rank, compared with the median rank",
        unit="s",
        note="In the last step.",
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
        "Steps without an update because a loss or a gradient was not finite",
        unit="steps",
        labels=("what",),
        note="`loss` or `grad`.",
    ),
    Series(
        "skipped_steps_total",
        "counter",
        "Steps without an update",
        unit="steps",
        labels=("why",),
        note=(
            "`loss` or `grad`: not finite. `overflow`: a gradient in fp16 was too large for the loss scale. "
            "`empty`: no token had a loss. `requested`: `spec.training.skipSteps` lists the step."
        ),
    ),
    Series(
        "alerts_total",
        "counter",
        "Times that a monitor found its condition",
        unit="alerts",
        labels=("monitor",),
        note="`collapse`, `divergence`, `plateau` or `early stop`.",
    ),
    Series(
        "checkpoint_duration_seconds",
        "histogram",
        "Wall time of a save or load, including background work",
        unit="s",
        labels=("op", "mode"),
        note="`op` is `save` or `load`. `mode` is `sync` if training waited for all of it, else `async`.",
        buckets=_CHECKPOINT_BUCKETS,
    ),
    Series(
        "checkpoint_blocking_seconds_total",
        "counter",
        "Seconds for which training paused for saves",
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
            "Saves have a reason (`no_space`, `read_only`, `permission`, `io`, `timeout`, "
            "`fenced`, `invalid`, `peer_lost`, `other`). A checkpoint that was invalid when it was "
            'loaded has `op="load"` and `reason="invalid"`.'
        ),
    ),
    Series(
        "productive_seconds_total",
        "counter",
        "Seconds in steps that were trained for the first time",
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
        note="Absent until then, and again if other processes continue.",
    ),
)
"""Metrics of a run, served by the node with rank 0."""

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
        "Generation in which this node last trained",
        aggregate="max",
        labels=("node",),
    ),
    Series(
        "node_worker_starts_total",
        "counter",
        "Worker processes that this node has started",
        unit="processes",
        labels=("node",),
        note="The difference to `evergrad_node_workers` is the number of restarts.",
    ),
    Series(
        "node_breaks_total",
        "counter",
        "Times a group broke, as this node observed",
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
        note="`allocated` (by tensors), `reserved` (by torch's allocator), `peak` (maximum of "
        "`allocated`). Only with CUDA: absent on a CPU, for scripts, and without a supervisor.",
    ),
    Series(
        "worker_resident_memory_bytes",
        "gauge",
        "Host memory of a worker's process",
        unit="bytes",
        aggregate="sum",
        labels=("node", "local_rank"),
        note="Shared pages count for each worker. `process_resident_memory_bytes` is the supervisor's.",
    ),
    Series(
        "script_step",
        "gauge",
        "Step that a script reports",
        unit="steps",
        labels=("node",),
    ),
    Series(
        "script_loss",
        "gauge",
        "Loss that a script reports",
        labels=("node",),
    ),
    Series(
        "script_tokens_per_second",
        "gauge",
        "Speed that a script reports",
        unit="tokens/s",
        labels=("node",),
    ),
)
"""Metrics of one node, served by its supervisor."""
