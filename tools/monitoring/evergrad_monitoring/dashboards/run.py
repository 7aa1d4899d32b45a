"""The dashboard of one run: its health, progress and cost."""

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from evergrad_monitoring.dashboards.parts import (
    OF_RUN,
    RUN,
    begin_dashboard,
    buckets,
    choose,
    mark,
    number,
    plot,
    states,
    top,
)
from evergrad_monitoring.names import metric

_WINDOW: Final = "[$__rate_interval]"
_HELD: Final = 'state=~"starting|running"'
_ALLOCATED: Final = 'kind="allocated"'
_HIDDEN_BEHIND: Final = (
    "Absent if no endpoint of the run is scraped, for example while it waits."
)


def build_run() -> Dashboard:
    """Build the dashboard of one run. The reader selects the namespace and the run, which all metrics have as
    labels."""
    board = begin_dashboard(
        "Evergrad: run",
        RUN,
        "One training run: progress, loss, speed, checkpoints, restarts.",
    )
    phase = metric("operator_run_phase")
    named = metric("operator_run_phase", 'run_namespace="$run_namespace"')
    board = board.with_variable(
        choose("run_namespace", "Namespace", phase, "run_namespace")
    ).with_variable(choose("run", "Run", named, "run"))
    changes = f"sum by (cause) (increase({_of('world_changes_total')}[1m])) > 0"
    pods = f"increase({_of('operator_run_pods_replaced_total')}[1m]) > 0"
    board = board.annotation(mark("World changes", changes, "blue"))
    board = board.annotation(mark("Pods replaced", pods, "red"))
    for add in (
        _add_state,
        _add_learning,
        _add_speed,
        _add_cost,
        _add_saves,
        _add_nodes,
        _add_memory,
        _add_pods_beside,
    ):
        board = add(board)
    return board


def _of(name: str, more: str = "") -> str:
    return metric(name, f"{OF_RUN}, {more}" if more else OF_RUN)


def _add_state(board: Dashboard) -> Dashboard:
    step = f"max({_of('step')})"
    return (
        board.with_panel(
            number(
                "Progress",
                "Share of the run's steps that are done.",
                "percentunit",
                f"max({_of('operator_run_progress_ratio')})",
            )
        )
        .with_panel(number("Step", "Last step that was finished.", "short", step))
        .with_panel(
            number(
                "Since the last step",
                "If it is far longer than a step, the run makes no progress.",
                "s",
                f"time() - max({_of('last_step_timestamp_seconds')})",
            )
        )
        .with_panel(
            number(
                "World",
                "Processes that train together.",
                "short",
                f"max({_of('world_size')})",
            )
        )
        .with_panel(
            number(
                "Age of the checkpoint",
                "Training time that is repeated if all nodes are lost together.",
                "s",
                f"time() - max({_of('checkpoint_last_success_timestamp_seconds')})",
            )
        )
        .with_panel(
            number(
                "Time left",
                "At the speed of the last ten minutes.",
                "s",
                f"(max({_of('max_steps')}) - {step}) / sum(rate({_of('steps_total')}[10m]))",
            )
        )
        .with_panel(
            states(
                "Phase",
                "Phase of the run, as the operator reports it.",
                f"max by (phase) ({_of('operator_run_phase')})",
                "{{phase}}",
            )
        )
    )


def _add_learning(board: Dashboard) -> Dashboard:
    skipped, alerts = (
        f"increase({_of(name)}{_WINDOW})"
        for name in ("skipped_steps_total", "alerts_total")
    )
    rate = (f"max({_of('learning_rate')})", "learning rate")
    return (
        board.with_panel(
            plot(
                "Loss",
                f"Training: mean of the last ten steps. Evaluation: last value of each set. {_HIDDEN_BEHIND}",
                "short",
                (top(f"max by (split, dataset) ({_of('loss')})"), "{{split}} {{dataset}}"),
                shape="any",
            )
        )
        .with_panel(
            plot(
                "Norm of the gradients",
                "Before clipping.",
                "short",
                (f"max({_of('grad_norm')})", "norm"),
            )
        )
        .with_panel(
            plot(
                "Evaluations",
                "All metrics of evaluations except the loss.",
                "short",
                (
                    top(f"max by (dataset, metric) ({_of('eval_metric')})"),
                    "{{dataset}} {{metric}}",
                ),
                shape="any",
            )
        )
        .with_panel(
            plot(
                "Metrics of the recipe",
                "Values of the recipe's own metrics in each step.",
                "short",
                (top(f"max by (metric) ({_of('task_metric')})"), "{{metric}}"),
                shape="any",
            )
        )
        .with_panel(plot("Learning rate", "In the last step.", "short", rate))
        .with_panel(
            plot(
                "Steps without an update, and alerts of monitors",
                "Steps that are not finite, skipped steps, and alerts of monitors.",
                "short",
                (f"sum by (why) ({skipped})", "{{why}}"),
                (f"sum by (monitor) ({alerts})", "{{monitor}}"),
            )
        )
    )


def _add_speed(board: Dashboard) -> Dashboard:
    phases = f"sum by (phase) (rate({_of('step_phase_seconds_total')}{_WINDOW}))"
    durations = f"sum by (le) (rate({_of('step_duration_seconds_bucket')}{_WINDOW}))"
    return (
        board.with_panel(
            plot(
                "Tokens per second",
                "Of all processes together, or as a script reports it.",
                "short",
                (f"sum(rate({_of('tokens_total')}{_WINDOW}))", "tokens/s"),
                (f"max({_of('script_tokens_per_second')})", "tokens/s, of a script"),
            )
        )
        .with_panel(
            plot(
                "Use of the devices",
                "Model FLOPs utilisation. Absent if the peak of the devices is unknown.",
                "percentunit",
                (f"max({_of('mfu_ratio')})", "utilisation"),
                shape="share",
            )
        )
        .with_panel(
            buckets("Time of a step", "Wall time of optimizer steps.", "s", durations)
        )
        .with_panel(
            plot(
                "Time of a step, middle and slow",
                "Median and 95th percentile of the time of a step.",
                "s",
                (f"histogram_quantile(0.5, {durations})", "p50"),
                (f"histogram_quantile(0.95, {durations})", "p95"),
            )
        )
        .with_panel(
            plot(
                "Where time goes",
                "Seconds per second, by phase. `comm_wait` is time waiting for other processes.",
                "short",
                (phases, "{{phase}}"),
                shape="stack",
            )
        )
        .with_panel(
            plot(
                "Slowest rank behind the median",
                "A value that stays large means that one host is slower than the others.",
                "s",
                (f"max({_of('rank_step_skew_seconds')})", "skew"),
            )
        )
    )


def _add_cost(board: Dashboard) -> Dashboard:
    kept, lost = _of("productive_seconds_total"), _of("lost_seconds_total")
    return (
        board.with_panel(
            plot(
                "Goodput",
                "Share of the last hour that went into steps that were kept.",
                "percentunit",
                (
                    f"sum(increase({kept}[1h])) / (sum(increase({kept}[1h])) + sum(increase({lost}[1h])))",
                    "goodput",
                ),
                shape="share",
            )
        )
        .with_panel(
            plot(
                "Lost time by cause",
                "Lost seconds per second.",
                "short",
                (f"sum by (cause) (rate({lost}{_WINDOW}))", "{{cause}}"),
                shape="stack",
            )
        )
        .with_panel(
            plot(
                "World over time",
                "Processes that train together, and nodes that are ready.",
                "short",
                (f"max({_of('world_size')})", "processes"),
                (f"max({_of('run_nodes_ready')})", "nodes that are ready"),
            )
        )
        .with_panel(
            plot(
                "Changes of the world, and pods replaced",
                "Changes by cause; a change costs no finished step. Pods are counted since the run began.",
                "short",
                (
                    top(
                        f"sum by (cause) (increase({_of('world_changes_total')}{_WINDOW}))"
                    ),
                    "{{cause}}",
                ),
                (
                    f"sum by (reason) ({_of('operator_run_restarts_total')})",
                    "pods: {{reason}}",
                ),
            )
        )
    )


def _add_saves(board: Dashboard) -> Dashboard:
    saves = _of("checkpoint_duration_seconds_bucket", 'op="save"') + _WINDOW
    return board.with_panel(
        plot(
            "Checkpoints: time",
            "95th percentile of the time of a save, and time for which training paused for saves.",
            "s",
            (f"histogram_quantile(0.95, sum by (le) (rate({saves})))", "save, p95"),
            (
                f"sum(increase({_of('checkpoint_blocking_seconds_total')}{_WINDOW}))",
                "training stood still",
            ),
        )
    ).with_panel(
        plot(
            "Checkpoints: size",
            "Of the last checkpoint.",
            "bytes",
            (f"max({_of('checkpoint_size_bytes')})", "size"),
        )
    )


def _add_nodes(board: Dashboard) -> Dashboard:
    """Add panels about the nodes that the run requests, holds and waits for."""
    return board.with_panel(
        plot(
            "Nodes by state",
            "Pods of the run's nodes: not admitted by a queue, without a host, starting, running.",
            "short",
            (f"sum by (state) ({_of('operator_run_nodes')})", "{{state}}"),
            shape="stack",
        )
    ).with_panel(
        plot(
            "Nodes requested, and nodes held",
            "Maximum number of nodes, and pods that have a host. The run waits for the difference.",
            "short",
            (f"max({_of('operator_run_nodes_max')})", "most"),
            (f"sum({_of('operator_run_nodes', _HELD)})", "held"),
        )
    )


def _add_memory(board: Dashboard) -> Dashboard:
    """Add panels about the memory of devices and hosts."""
    device = _of("device_memory_bytes")
    return (
        board.with_panel(
            plot(
                "Memory of the fullest device",
                "Memory of tensors (current and peak), and of torch's allocator. Absent on a CPU.",
                "bytes",
                (f"max by (kind) ({device})", "{{kind}}"),
            )
        )
        .with_panel(
            plot(
                "Memory of devices by worker",
                "Memory of tensors; the ten workers with the most. Absent on a CPU.",
                "bytes",
                (
                    top(
                        f"max by (node, local_rank) ({_of('device_memory_bytes', _ALLOCATED)})"
                    ),
                    "node {{node}}, worker {{local_rank}}",
                ),
            )
        )
        .with_panel(
            plot(
                "Resident memory by worker",
                "Host memory; the ten workers with the most. Shared pages count for each worker.",
                "bytes",
                (
                    top(
                        f"max by (node, local_rank) ({_of('worker_resident_memory_bytes')})"
                    ),
                    "node {{node}}, worker {{local_rank}}",
                ),
            )
        )
        .with_panel(
            plot(
                "Attempts",
                "Pods that were replaced since the run began, and worker processes that nodes started.",
                "short",
                (f"max({_of('operator_run_pods_replaced_total')})", "pods replaced"),
                (
                    f"sum(increase({_of('node_worker_starts_total')}{_WINDOW}))",
                    "worker processes started",
                ),
            )
        )
    )


def _add_pods_beside(board: Dashboard) -> Dashboard:
    """Add panels about the pods that prepare data and evaluate checkpoints."""
    return (
        board.with_panel(
            plot(
                "Preparation of the data",
                "Share of the current stage that is done: scan, tokenize, split, or wait for another run.",
                "percentunit",
                (f"max by (work) ({_of('operator_run_preparation_ratio')})", "{{work}}"),
                shape="share",
            )
        )
        .with_panel(
            plot(
                "Tokens prepared",
                "Tokens produced so far; the total when preparation is done.",
                "short",
                (f"max({_of('operator_run_preparation_tokens')})", "tokens"),
            )
        )
        .with_panel(
            plot(
                "Evaluations in pods",
                "Results of the newest checkpoint that a pod has evaluated, by set and metric.",
                "short",
                (
                    top(f"max by (set, metric) ({_of('operator_run_evaluation_value')})"),
                    "{{set}} {{metric}}",
                ),
                shape="any",
            )
        )
        .with_panel(
            plot(
                "Checkpoints and their evaluation in pods",
                "Steps of the newest checkpoint and the newest evaluated one. Far apart: evaluation is slow.",
                "short",
                (f"max({_of('checkpoint_last_step')})", "newest checkpoint"),
                (f"max({_of('operator_run_evaluation_step')})", "evaluated"),
            )
        )
        .with_panel(
            plot(
                "Checkpoints that wait for a pod",
                "Retention keeps waiting checkpoints, up to `evaluation.keepWaiting`.",
                "short",
                (f"max({_of('operator_run_evaluations_waiting')})", "checkpoints"),
            )
        )
    )
