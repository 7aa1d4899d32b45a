"""The dashboard of the operator itself."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from evergrad_monitoring.dashboards.parts import (
    OPERATOR,
    begin_dashboard,
    buckets,
    choose,
    number,
    plot,
    top,
)
from evergrad_monitoring.names import metric, process

_JOB = 'job=~"$job"'


def build_operator() -> Dashboard:
    """Build the dashboard with passes, queue, API server and watches of the active replica."""
    passes = metric("operator_reconcile_total", _JOB)
    failed = metric("operator_reconcile_total", f'{_JOB}, result="error"')
    board = begin_dashboard(
        "Evergrad: operator",
        OPERATOR,
        "The operator: its reconciles of runs, its queue, and the API server.",
    )
    jobs = choose("job", "Job", metric("operator_leader"), "job")
    board = board.with_variable(jobs.multi(True).include_all(True))
    board = (
        board.with_panel(
            number(
                "Replicas that hold the Lease",
                "One in each namespace with an operator. With 0, lost pods are not replaced.",
                "short",
                f"sum by (namespace) ({metric('operator_leader', _JOB)})",
                legend="{{namespace}}",
            )
        )
        .with_panel(
            number(
                "Reconciles that failed",
                "Share of the reconciles in the selected time range.",
                "percentunit",
                f"sum(increase({failed}[$__range])) / sum(increase({passes}[$__range]))",
            )
        )
        .with_panel(
            number(
                "Oldest in the queue",
                "Waiting time of the oldest run that is due.",
                "s",
                f"max({metric('operator_queue_oldest_age_seconds', _JOB)})",
            )
        )
        .with_panel(
            number(
                "Slow replacements",
                "99 of 100 pods were replaced within this time of the last hour.",
                "s",
                "histogram_quantile(0.99, sum by (le) "
                f"(rate({metric('operator_pod_replacement_seconds_bucket', _JOB)}[1h])))",
            )
        )
    )
    return _add_process(_add_outside(_add_passes(board)))


def _add_passes(board: Dashboard) -> Dashboard:
    passes = metric("operator_reconcile_total", _JOB)
    return (
        board.with_panel(
            plot(
                "Reconciles by result",
                "Reconciles per second.",
                "reqps",
                (f"sum by (result) (rate({passes}[$__rate_interval]))", "{{result}}"),
                shape="stack",
            )
        )
        .with_panel(
            buckets(
                "Duration of a reconcile",
                "From reading the run to its last write.",
                "s",
                "sum by (le) "
                f"(rate({metric('operator_reconcile_duration_seconds_bucket', _JOB)}[$__rate_interval]))",
            )
        )
        .with_panel(
            plot(
                "Errors by reason",
                "Errors by the API server's reason, or `Defect` for a bug in the operator.",
                "short",
                (
                    top(
                        "sum by (reason) "
                        f"(rate({metric('operator_reconcile_errors_total', _JOB)}[$__rate_interval]))"
                    ),
                    "{{reason}}",
                ),
            )
        )
        .with_panel(
            plot(
                "Queue",
                "Runs that are due and wait for a reconcile.",
                "short",
                (f"max({metric('operator_queue_depth', _JOB)})", "runs"),
            )
        )
    )


def _add_outside(board: Dashboard) -> Dashboard:
    """Add panels about the API server, its watches, and the event loop."""
    return (
        board.with_panel(
            plot(
                "Requests to the API server",
                "By verb and HTTP status.",
                "reqps",
                (
                    top(
                        "sum by (verb, code) "
                        f"(rate({metric('operator_api_requests_total', _JOB)}[$__rate_interval]))"
                    ),
                    "{{verb}} {{code}}",
                ),
            )
        )
        .with_panel(
            plot(
                "Time of a request",
                "99 of 100 requests, by verb.",
                "s",
                (
                    (
                        "histogram_quantile(0.99, sum by (le, verb) (rate("
                        f"{metric('operator_api_request_duration_seconds_bucket', _JOB)}[$__rate_interval])))"
                    ),
                    "{{verb}}",
                ),
            )
        )
        .with_panel(
            plot(
                "Watches that are behind",
                "Time for which a watch has missed a version that the API server returned.",
                "s",
                (
                    f"max by (resource) ({metric('operator_watch_lag_seconds', _JOB)})",
                    "{{resource}}",
                ),
            )
        )
        .with_panel(
            plot(
                "Event loop",
                "Delay of the event loop, 99th percentile. All other work waits for it.",
                "s",
                (
                    (
                        "histogram_quantile(0.99, sum by (le) (rate("
                        f"{metric('operator_event_loop_lag_seconds_bucket', _JOB)}[$__rate_interval])))"
                    ),
                    "lag",
                ),
            )
        )
    )


def _add_process(board: Dashboard) -> Dashboard:
    """Add panels about memory and processor time of the operator's process."""
    return board.with_panel(
        plot(
            "Memory",
            "Resident memory of each replica. Above its limit the container is killed.",
            "bytes",
            (
                top(f"max by (pod) ({process('process_resident_memory_bytes', _JOB)})"),
                "{{pod}}",
            ),
        )
    ).with_panel(
        plot(
            "Processor",
            "Cores that each replica uses.",
            "short",
            (
                top(
                    "sum by (pod) "
                    f"(rate({process('process_cpu_seconds_total', _JOB)}[$__rate_interval]))"
                ),
                "{{pod}}",
            ),
        )
    )
