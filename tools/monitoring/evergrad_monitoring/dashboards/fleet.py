"""The dashboard of all runs: which runs exist, which do not progress, and how they spend their time."""

from typing import Final

from grafana_foundation_sdk.builders import table
from grafana_foundation_sdk.builders.dashboard import Dashboard

from evergrad_common.causes import USEFUL
from evergrad_monitoring.dashboards.parts import (
    FLEET,
    RUN,
    begin_dashboard,
    choose,
    number,
    plot,
    rows,
    top,
)
from evergrad_monitoring.names import RUN as LABELS
from evergrad_monitoring.names import metric

_HERE: Final = 'run_namespace=~"$run_namespace"'


def build_fleet() -> Dashboard:
    """Build the dashboard of all runs in the selected namespaces."""
    kept = metric("productive_seconds_total", _HERE)
    lost = metric("lost_seconds_total", _HERE)
    board = begin_dashboard(
        "Evergrad: fleet",
        FLEET,
        "All training runs: phases, restarts, goodput, and runs without progress.",
    )
    namespaces = choose(
        "run_namespace", "Namespace", metric("operator_run_phase"), "run_namespace"
    )
    board = board.with_variable(namespaces.multi(True).include_all(True))
    for title, which, what in (
        ("Running", "Running", "Runs that are training."),
        (
            "Waiting",
            "Pending|Preparing|Starting|Waiting|Restarting",
            "Runs that do not train yet, or are waiting.",
        ),
        ("Failed", "Failed", "Runs that failed, until a day after their end."),
    ):
        selector = f'{_HERE}, phase=~"{which}"'
        count = f"count({metric('operator_run_phase', selector)}) or vector(0)"
        board = board.with_panel(number(title, what, "short", count))
    board = (
        board.with_panel(
            number(
                "Tokens per second",
                "Of all runs together.",
                "short",
                f"sum(rate({metric('tokens_total', _HERE)}[$__rate_interval]))",
            )
        )
        .with_panel(
            number(
                "Goodput",
                "Share of the time of all runs that went into steps that were kept.",
                "percentunit",
                f"sum(increase({kept}[$__range])) / "
                f"(sum(increase({kept}[$__range])) + sum(increase({lost}[$__range])))",
            )
        )
        .with_panel(
            number(
                "Pods replaced",
                "In the selected time range.",
                "short",
                f"sum(increase({metric('operator_run_pods_replaced_total', _HERE)}[$__range])) or vector(0)",
            )
        )
    )
    board = _add_pods(_add_nodes(_add_plots(board)))
    return board.with_panel(_failures()).with_panel(_runs())


def _add_plots(board: Dashboard) -> Dashboard:
    lost = metric("lost_seconds_total", _HERE)
    phase = metric("operator_run_phase", _HERE)
    return (
        board.with_panel(
            plot(
                "Runs by phase",
                "A run is in one phase at a time.",
                "short",
                (f"count by (phase) ({phase})", "{{phase}}"),
                shape="stack",
            )
        )
        .with_panel(
            plot(
                "Lost time by cause",
                "Lost seconds per second. 1 means that one run loses all its time.",
                "short",
                (f"sum by (cause) (rate({lost}[$__rate_interval]))", "{{cause}}"),
                shape="stack",
            )
        )
        .with_panel(
            plot(
                "Pods replaced by reason",
                "Pods that were lost, preempted, crashed or evicted, and replaced, since their runs began.",
                "short",
                (
                    f"sum by (reason) ({metric('operator_run_restarts_total', _HERE)})",
                    "{{reason}}",
                ),
                shape="stack",
            )
        )
        .with_panel(
            plot(
                "Time to the first pod and to the first step",
                "Medians of the runs that were created in the last hour.",
                "s",
                (_median("operator_run_queue_seconds"), "first pod"),
                (_median("operator_run_startup_seconds"), "first step"),
            )
        )
    )


def _add_nodes(board: Dashboard) -> Dashboard:
    preparing = metric("operator_run_phase", f'{_HERE}, phase="Preparing"')
    return board.with_panel(
        plot(
            "Nodes by state",
            "Pods of the nodes of all runs: not admitted by a queue, without a host, starting, running.",
            "short",
            (f"sum by (state) ({metric('operator_run_nodes', _HERE)})", "{{state}}"),
            shape="stack",
        )
    ).with_panel(
        plot(
            "Work in pods other than nodes",
            "Runs whose data are being prepared, and checkpoints that wait for a pod to evaluate them.",
            "short",
            (f"count({preparing}) or vector(0)", "runs that prepare"),
            (
                f"sum({metric('operator_run_evaluations_waiting', _HERE)}) or vector(0)",
                "checkpoints that wait",
            ),
        )
    )


def _add_pods(board: Dashboard) -> Dashboard:
    pods = metric("operator_run_pod_seconds_total", _HERE)
    useful = "|".join(sorted(USEFUL))
    wasted = metric("operator_run_gpu_seconds_total", f'{_HERE}, cause!~"{useful}"')
    teams = f"max by ({LABELS}, label_team) ({metric('operator_run_labels', _HERE)})"
    by_team = (
        f"sum by (label_team) (sum by ({LABELS}) (rate({wasted}[$__rate_interval])) "
        f"* on ({LABELS}) group_left (label_team) {teams})"
    )
    gpus = metric("operator_run_gpu_seconds_total", _HERE)
    board = board.with_panel(
        number(
            "GPU-hours",
            "Of all accelerators whose pod had a host, in the selected time range.",
            "short",
            f"sum(increase({gpus}[$__range])) / 3600 or vector(0)",
            span=24,
        )
    )
    return board.with_panel(
        plot(
            "Time of pods by use",
            "Pod-seconds per second. Training, evaluation and saving are useful; all other uses are waste.",
            "short",
            (f"sum by (cause) (rate({pods}[$__rate_interval]))", "{{cause}}"),
            shape="stack",
        )
    ).with_panel(
        plot(
            "Wasted accelerators by team",
            "Accelerators that have a host and do nothing useful, by the label `team` of their runs.",
            "short",
            (top(by_team), "{{label_team}}"),
            shape="stack",
        )
    )


def _median(name: str) -> str:
    return f"histogram_quantile(0.5, sum by (le) (rate({metric(f'{name}_bucket')}[1h])))"


def _failures() -> table.Panel:
    """Return a table of the reasons why pods ended, over all runs."""
    ended = metric("operator_run_restarts_total", _HERE)
    return rows(
        "Failures by reason",
        "Reasons for which pods were replaced: pods and runs since the runs began, and pods in the range.",
        {
            "Pods": f"sum by (reason) ({ended})",
            "Runs": f"count by (reason) ({ended} > 0)",
            "In the selected time range": f"sum by (reason) (increase({ended}[$__range]))",
        },
    )


def _runs() -> table.Panel:
    """Return a table of all runs, with the longest time without progress first."""
    progress = metric("operator_run_last_progress_timestamp_seconds", _HERE)
    running = metric("operator_run_nodes", f'{_HERE}, state="running"')
    replaced = metric("operator_run_pods_replaced_total", _HERE)
    return rows(
        "Runs",
        "Runs that are unfinished or ended within a day. A click on a name opens its dashboard.",
        {
            "Progress": f"max by ({LABELS}) ({metric('operator_run_progress_ratio', _HERE)})",
            "Seconds since the last step": f"time() - max by ({LABELS}) ({progress})",
            "Running nodes": f"sum by ({LABELS}) ({running})",
            "Maximum nodes": f"max by ({LABELS}) ({metric('operator_run_nodes_max', _HERE)})",
            "Pods replaced": f"max by ({LABELS}) ({replaced})",
            "Phase": f"max by ({LABELS}, phase) ({metric('operator_run_phase', _HERE)})",
        },
        states="Phase",
        links={
            "run": f"/d/{RUN}?var-run_namespace=${{__data.fields.run_namespace}}&var-run=${{__value.raw}}"
        },
    )
