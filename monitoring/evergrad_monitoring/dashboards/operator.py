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
    """Passes, queue, API server and watches of the replica that works."""
    passes = metric("operator_reconcile_total", _JOB)
    failed = metric("operator_reconcile_total", f'{_JOB}, result="error"')
    board = begin_dashboard(
        "Evergrad: operator",
        OPERATOR,
        "The operator: its passes over runs, its queue, and the API server.",
    )
    jobs = choose("job", "Job", metric("operator_leader"), "job")
    board = board.with_variable(jobs.multi(True).include_all(True))
    board = (
        board.with_panel(
            number(
                "Replicas that may write",
                "Exactly one in each namespace with an operator. None: nothing is replaced; runs train on.",
                "short",
                f"sum by (namespace) ({metric('operator_leader', _JOB)})",
                legend="{{namespace}}",
            )
        )
        .with_panel(
            number(
                "Passes that failed",
                "Share of the passes in the time that is shown.",
                "percentunit",
                f"sum(increase({failed}[$__range])) / sum(increase({passes}[$__range]))",
            )
        )
        .with_panel(
            number(
                "Oldest in the queue",
                "How long the oldest run that is due has waited.",
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
                "Passes by result",
                "Passes over one run a second.",
                "reqps",
                (f"sum by (result) (rate({passes}[$__rate_interval]))", "{{result}}"),
                shape="stack",
            )
        )
        .with_panel(
            buckets(
                "Time of a pass",
                "From reading the run to its last write.",
                "s",
                "sum by (le) "
                f"(rate({metric('operator_reconcile_duration_seconds_bucket', _JOB)}[$__rate_interval]))",
            )
        )
        .with_panel(
            plot(
                "Errors by reason",
                "What failed, in the API server's words, or `Defect` for a fault of the operator.",
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
                "Runs that are due and not worked on.",
                "short",
                (f"max({metric('operator_queue_depth', _JOB)})", "runs"),
            )
        )
    )


def _add_outside(board: Dashboard) -> Dashboard:
    """The API server, its watches, and the event loop."""
    return (
        board.with_panel(
            plot(
                "Requests to the API server",
                "By verb and answer.",
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
                "How long a watch has owed a version that the API server has answered.",
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
                "How late it is, 99 of 100 times; everything else waits for it.",
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
    """Memory and processor time of the operator's own process."""
    return board.with_panel(
        plot(
            "Memory",
            "Resident memory of each replica. Above its limit the pod is ended.",
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
