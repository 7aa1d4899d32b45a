"""The alerts, as rules of Prometheus.

Rules describe symptoms, and each has a runbook: docs/runbooks/NAME.md. A threshold is a value of the chart,
``metrics.rules.thresholds.KEY``; THRESHOLDS has the defaults. Expressions select the series of any release;
the chart limits them to its own release, because several releases can share one Prometheus.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from evergrad_monitoring.names import (
    RUN,
    by_run,
    count_increase,
    in_phase,
    increase,
    metric,
    rate,
)

Severity = Literal["critical", "warning", "info"]
THRESHOLDS: Final[dict[str, float]] = {
    "stalledSeconds": 600,
    "stalledSteps": 10,
    "notStartingSeconds": 1800,
    "restartsPerHour": 5,
    "divergedFactor": 2,
    "checkpointIntervals": 3,
    "checkpointSeconds": 3600,
    "throughputShare": 0.6,
    "dataShare": 0.3,
    "goodputShare": 0.8,
    "goodputSeconds": 10800,
    "failedSeconds": 3600,
    "reconcileErrorShare": 0.1,
    "restartsPerHalfHour": 3,
    # Below 100 s, because /healthz fails after 100 s: the kubelet restarts the process, and both reset to 0.
    "queueAgeSeconds": 60,
    "watchLagSeconds": 60,
}
"""Thresholds by their key in the chart's values, with their defaults; units are in the names."""


@dataclass(frozen=True)
class Alert:
    """One alerting rule. ``holds`` is how long its expression must be true.

    Both name thresholds as ``<key>``; ``summary`` and ``description`` are templates of Prometheus.
    """

    name: str
    severity: Severity
    holds: str
    expression: str
    summary: str
    description: str

    @property
    def thresholds(self) -> tuple[str, ...]:
        """Keys of the thresholds in its expression."""
        return tuple(
            key for key in THRESHOLDS if f"<{key}>" in self.expression + self.holds
        )


_RUNNING: Final = f"and on ({RUN}) {in_phase('Running')} == 1"
_WHO: Final = "{{ $labels.run_namespace }}/{{ $labels.run }}"
_IN_OTHER_PHASE: Final = metric("operator_run_phase", 'phase!="Running"')
_LAST_STEP: Final = by_run("max", metric("last_step_timestamp_seconds"))
_SAVED: Final = by_run("max", metric("checkpoint_last_success_timestamp_seconds"))
# Use totals over all of a run's processes: a rate would need a second step, which may end hours later.
_MEAN_STEP: Final = (
    f"{by_run('sum', metric('step_duration_seconds_sum'))}"
    f" / {by_run('sum', metric('step_duration_seconds_count'))}"
)


def _tokens_per_second(window: str) -> str:
    """Return tokens per second of the steps that ended in ``window``. It is NaN if no step ended."""
    return (
        f"{increase('tokens_total', window)}"
        f" / {increase('step_duration_seconds_sum', window)}"
    )


_LOSS: Final = by_run("max", metric("loss", 'split="train"'))
_WAITS_FOR_DATA: Final = rate("step_phase_seconds_total", "15m", 'phase="data"')
# Ignore saves that failed because a node was lost: the next group saves again.
_OF_THE_SAVE: Final = 'reason!="peer_lost"'
_PASSES_FAILED: Final = metric("operator_reconcile_total", 'result="error"')
_KEPT: Final = increase("productive_seconds_total", "6h")
# Evaluation time is intended, so it is not lost.
_LOST: Final = increase("lost_seconds_total", "6h", 'cause!="evaluation"')
_CREATED: Final = metric("operator_run_created_timestamp_seconds")
_STARTED: Final = metric("operator_run_started_timestamp_seconds")
_PROGRESSED: Final = metric("operator_run_last_progress_timestamp_seconds")
_TRAINING: Final = metric("operator_run_info", 'kind="training"')
# A script may never report a step.
_WITHOUT_STEP: Final = (
    f"{in_phase('Running')} == 1 and on ({RUN}) {_TRAINING} unless on ({RUN}) {_PROGRESSED}"
)
_QUEUED: Final = by_run("max", metric("operator_run_waiting", 'reason="Queued"'))
_BEGUN: Final = by_run("max", _STARTED)


def _over_six_hours(aggregate: str, function: str, name: str, selector: str = "") -> str:
    """Return a function over the last six hours of each pod's series, aggregated to one value per run."""
    return by_run(aggregate, f"{function}({metric(name, selector)}[6h])")


_SAVE_TIME: Final = "checkpoint_last_success_timestamp_seconds"
_INTERVAL: Final = (
    # The mean of six hours, or the time from the start to the last save if there was no second save.
    f"({_over_six_hours('max', 'max_over_time', _SAVE_TIME)}"
    f" - {_over_six_hours('min', 'min_over_time', _SAVE_TIME)})"
    f" / ({_over_six_hours('sum', 'changes', _SAVE_TIME)} > 0)"
    f" or {_SAVED} - {_BEGUN}"
)
_SUSPENDED: Final = _over_six_hours(
    "max", "max_over_time", "operator_run_phase", 'phase="Suspended"'
)
_LEAST_LOSS: Final = _over_six_hours("min", "min_over_time", "loss", 'split="train"')


def _lines(*lines: str) -> str:
    return "\n".join(lines)


OF_RUNS: Final[tuple[Alert, ...]] = (
    Alert(
        "TrainingRunStalled",
        "critical",
        "5m",
        _lines(
            f"time() - max by ({RUN}) ({_PROGRESSED}) > <stalledSeconds>",
            _RUNNING,
            # Right after a resume, the last step is older than the limit because of the suspension.
            f"and on ({RUN}) time() - {_BEGUN} > <stalledSeconds>",
            # The same applies to a run that has waited for hosts and is loading its state.
            f"unless on ({RUN}) max_over_time({_IN_OTHER_PHASE}[<stalledSeconds>s])",
            # A run with long steps is not stalled yet. If the duration of its steps is not known, this line
            # removes nothing.
            f"unless on ({RUN}) (time() - {_LAST_STEP} < <stalledSteps> * ({_MEAN_STEP}))",
        ),
        f"Run {_WHO} makes no progress",
        f"{_WHO} is Running, but its last step ended {{{{ $value | humanizeDuration }}}} ago.",
    ),
    Alert(
        "TrainingRunNotStarting",
        "warning",
        # Data may have been prepared for hours before, and a run may have trained before it restarts.
        "<notStartingSeconds>s",
        _lines(
            # For the message: a resumed run counts from when it was resumed.
            f"time() - max by ({RUN}) ({_STARTED} or {_CREATED})",
            # Combine the phases, because a run that fails at each start alternates between them.
            f"and on ({RUN}) ({in_phase('Pending', 'Starting', 'Restarting', 'Waiting')} == 1",
            f"or {_WITHOUT_STEP})",
            f"unless on ({RUN}) {_QUEUED}",
        ),
        f"Run {_WHO} does not start",
        f"{_WHO} does not train; it was started {{{{ $value | humanizeDuration }}}} ago.",
    ),
    Alert(
        "TrainingRunBlocked",
        "warning",
        # A claim or a Secret may be created shortly after the run.
        "5m",
        f"max by ({RUN}, reason) ({metric('operator_run_stalled')})",
        f"Run {_WHO} needs an action",
        f"{_WHO} cannot continue by itself: {{{{ $labels.reason }}}}. Its status gives the remedy.",
    ),
    Alert(
        "TrainingRunRestartStorm",
        "warning",
        "0m",
        f"{count_increase('operator_run_pods_replaced_total', '1h')} > <restartsPerHour>",
        f"Pods of run {_WHO} are replaced again and again",
        f"{{{{ $value | humanize }}}} pods of {_WHO} were replaced in the last hour.",
    ),
    Alert(
        "TrainingRunLossNonFinite",
        "warning",
        "0m",
        f"{count_increase('nonfinite_total', '10m')} > 0",
        f"The loss or a gradient of run {_WHO} is not finite",
        f"{{{{ $value | humanize }}}} steps of {_WHO} were not finite in the last 10 minutes.",
    ),
    Alert(
        "TrainingRunLossDiverging",
        "info",
        "15m",
        _lines(
            f"{_LOSS} > <divergedFactor> * {_LEAST_LOSS}",
            # A multiple of the loss is not meaningful if the loss may be negative.
            f"and on ({RUN}) {_LEAST_LOSS} > 0",
            _RUNNING,
        ),
        f"The loss of run {_WHO} grows",
        f"The training loss of {_WHO} is {{{{ $value | humanize }}}}, far above its lowest in six hours.",
    ),
    Alert(
        "TrainingRunCheckpointStale",
        "warning",
        "10m",
        _lines(
            f"time() - {_SAVED} > <checkpointSeconds>",
            _RUNNING,
            f"unless on ({RUN}) (time() - {_SAVED} < <checkpointIntervals> * ({_INTERVAL}))",
        ),
        f"Run {_WHO} saves no checkpoint",
        f"The last checkpoint of {_WHO} is {{{{ $value | humanizeDuration }}}} old; later steps can be lost.",
    ),
    Alert(
        "TrainingRunCheckpointFailing",
        "warning",
        "0m",
        f"{count_increase('checkpoint_failures_total', '30m', _OF_THE_SAVE)} > 0",
        f"Checkpoints of run {_WHO} fail",
        f"{{{{ $value | humanize }}}} saves or loads of {_WHO} failed in the last half hour.",
    ),
    Alert(
        "TrainingRunThroughputDrop",
        "info",
        "15m",
        _lines(
            # If a step takes longer than the window, use the previous step until the next step ends.
            f"last_over_time(({_tokens_per_second('10m')} > 0)[1h:5m])"
            f" < <throughputShare> * ({_tokens_per_second('6h')})",
            _RUNNING,
        ),
        f"Run {_WHO} has slowed down",
        f"{_WHO} trains {{{{ $value | humanize }}}} tokens per second, far fewer than in the last six hours.",
    ),
    Alert(
        "TrainingRunDataStarved",
        "info",
        "15m",
        _lines(
            f"{_WAITS_FOR_DATA} / {rate('step_phase_seconds_total', '15m')} > <dataShare>",
            _RUNNING,
        ),
        f"Run {_WHO} waits for data",
        f"{_WHO} spends {{{{ $value | humanizePercentage }}}} of its time waiting for data.",
    ),
    Alert(
        "TrainingRunGoodputLow",
        "info",
        "30m",
        _lines(
            f"{_KEPT} / ({_KEPT} + {_LOST}) < <goodputShare>",
            # Ignore new runs, because start-up is most of their time.
            f"and on ({RUN}) {_KEPT} + {_LOST} > <goodputSeconds>",
            # The trainer counts time in which the run was suspended as downtime.
            f"unless on ({RUN}) {_SUSPENDED}",
            _RUNNING,
        ),
        f"Run {_WHO} loses much of its time",
        f"Only {{{{ $value | humanizePercentage }}}} of six hours of {_WHO} went into steps that were kept.",
    ),
    Alert(
        "TrainingRunFailed",
        "info",
        "0m",
        _lines(
            f"time() - max by ({RUN}) ({metric('operator_run_completed_timestamp_seconds')})"
            " < <failedSeconds>",
            f"and on ({RUN}) {in_phase('Failed')} == 1",
        ),
        f"Run {_WHO} has failed",
        f"{_WHO} failed {{{{ $value | humanizeDuration }}}} ago. Its status gives the reason.",
    ),
)
OF_OPERATOR: Final[tuple[Alert, ...]] = (
    Alert(
        "TrainingOperatorDown",
        "critical",
        "5m",
        f"absent({metric('operator_leader')} == 1)",
        "No operator is active",
        "No replica of the operator holds the Lease. Runs continue to train, but lost pods are not replaced.",
    ),
    Alert(
        "TrainingOperatorRestarts",
        "warning",
        "0m",
        "max by (pod) (changes(process_start_time_seconds[30m])) > <restartsPerHalfHour>",
        "The operator restarts again and again",
        "The process in pod {{ $labels.pod }} was restarted {{ $value }} times in the last 30 minutes.",
    ),
    Alert(
        "TrainingOperatorReconcileErrors",
        "warning",
        "10m",
        f"sum(rate({_PASSES_FAILED}[10m]))"
        f" / sum(rate({metric('operator_reconcile_total')}[10m])) > <reconcileErrorShare>",
        "Reconciles of the operator fail",
        "{{ $value | humanizePercentage }} of the operator's reconciles failed in the last 10 minutes.",
    ),
    Alert(
        "TrainingOperatorQueueStuck",
        "warning",
        "30s",
        f"max({metric('operator_queue_oldest_age_seconds')}) > <queueAgeSeconds>",
        "Runs wait for the operator",
        "The oldest run in the operator's queue has waited for {{ $value | humanizeDuration }}.",
    ),
    Alert(
        "TrainingOperatorWatchStale",
        "warning",
        "30s",
        f"max by (resource) ({metric('operator_watch_lag_seconds')}) > <watchLagSeconds>",
        "The operator does not receive changes",
        "The watch of {{ $labels.resource }} has been behind for {{ $value | humanizeDuration }}.",
    ),
)
ALERTS: Final = (*OF_RUNS, *OF_OPERATOR)
_SELECTORS: Final = """\
{{- $operator := printf "namespace=%q, job=%q" .Release.Namespace (include "evergrad.fullname" .) }}
{{- $runs := `run_namespace!=""` }}
{{- if eq .Values.rbac.scope "namespaced" }}
{{- $runs = include "evergrad.namespaces" . | fromJsonArray | join "|" | printf "run_namespace=~%q" }}
{{- end }}"""
"""Label matchers of the series of the release's operator, and of the series of its runs."""
_SERIES: Final = re.compile(r"\b((?:evergrad|process)_\w+)(?:\{([^}]*)\})?")


def render_rules() -> str:
    """Return the groups of the chart's PrometheusRule, as a Helm template."""
    return "\n".join(_render()) + "\n"


def _render() -> Iterator[str]:
    yield "# Generated by `make generate` from tools/monitoring/evergrad_monitoring/alerts.py."
    yield _SELECTORS
    for name, alerts in (("runs", OF_RUNS), ("operator", OF_OPERATOR)):
        # Without the namespace, several operators would share the same alert.
        whose = (
            ", namespace: {{ .Release.Namespace | quote }}" if name == "operator" else ""
        )
        yield f"- name: evergrad.{name}"
        yield "  rules:"
        for alert in alerts:
            yield f'    {{{{- if not (has "{alert.name}" .Values.metrics.rules.disabled) }}}}'
            yield f"    - alert: {alert.name}"
            yield "      expr: |"
            yield from (
                f"        {_for_helm(_select(line, f'${name}'))}"
                for line in alert.expression.splitlines()
            )
            if alert.holds != "0m":
                yield f"      for: {_for_helm(alert.holds)}"
            yield f"      labels: {{severity: {alert.severity}{whose}}}"
            yield "      annotations:"
            yield f"        summary: {_quote(alert.summary)}"
            yield f"        description: {_quote(alert.description)}"
            yield f"        runbook_url: {{{{ .Values.metrics.rules.runbooks }}}}/{alert.name}.md"
            yield "    {{- end }}"


def _select(line: str, variable: str) -> str:
    """Add a variable's matchers to each series of a line."""

    def add(found: re.Match[str]) -> str:
        before = f"{found[2]}, {{{{ {variable}" if found[2] else f" {{{{- {variable}"
        after = " }}" if found[2] else " -}} "
        return f"{found[1]}{{{before}{after}}}"

    return _SERIES.sub(add, line)


def _for_helm(line: str) -> str:
    for key in THRESHOLDS:
        value = f".Values.metrics.rules.thresholds.{key}"
        # Helm would print a large number with an exponent, which is not a valid duration.
        line = line.replace(f"<{key}>s", f"{{{{ int64 {value} }}}}s")
        line = line.replace(f"<{key}>", f"{{{{ {value} }}}}")
    return line


def _quote(text: str) -> str:
    """Return a YAML string in which Helm does not expand the Prometheus templates."""
    inner = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + inner.replace("{{", "{{`{{").replace("}}", "}}`}}") + '"'
