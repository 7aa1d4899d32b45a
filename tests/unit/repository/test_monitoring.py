"""Alerts and dashboards of the chart: generated, complete, and right as Prometheus reads them."""

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from patience import PATIENCE

from bed import chart, toolbox
from evergrad_common.causes import CHANGES, ENDINGS, SKIPS
from evergrad_common.metrics import COORDINATOR, NODE, OPERATOR, PREFIX, TRAINER
from evergrad_monitoring.alerts import ALERTS, OF_RUNS, THRESHOLDS
from evergrad_monitoring.dashboards import DASHBOARDS
from evergrad_monitoring.generate import render_all
from evergrad_monitoring.names import PROCESS, labels_of, metric, process
from evergrad_monitoring.queries import Query, collect_queries
from evergrad_operator.core.objects.names import Phase

WHO = 'run_namespace="a", run="x"'
OWN = f'namespace="{chart.NAMESPACE}", job="evergrad"'
LEADER, AGE, LAG = (
    f"evergrad_operator_{one}"
    for one in ("leader", "queue_oldest_age_seconds", "watch_lag_seconds")
)
PASSES = "evergrad_operator_reconcile_total"
RUNNING = f'evergrad_operator_run_phase{{{WHO}, phase="Running"}}'
WAITING = f'evergrad_operator_run_phase{{{WHO}, phase="Waiting"}}'
STARTING = f'evergrad_operator_run_phase{{{WHO}, phase="Starting"}}'
CREATED = f"evergrad_operator_run_created_timestamp_seconds{{{WHO}}}"
INFO = "evergrad_operator_run_info"
IMAGE = 'reason="ImagePullFailed"'
STARTED = f"evergrad_operator_run_started_timestamp_seconds{{{WHO}}}"
TOKENS = "evergrad_tokens_total"
STEPS, SECONDS = (
    "evergrad_step_duration_seconds_count",
    "evergrad_step_duration_seconds_sum",
)
PROGRESS = f"evergrad_operator_run_last_progress_timestamp_seconds{{{WHO}}}"
# The series of a run in phases of ten minutes, in promtool's notation: all values are one minute apart.
CASES: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "TrainingRunStalled": (
        "30m",
        {RUNNING: "1x60", STARTED: "0x60", PROGRESS: "0x60"},
        {RUNNING: "1x60", STARTED: "0x60", PROGRESS: "0+60x60"},
    ),
    "TrainingRunNotStarting": (
        "40m",
        {
            STARTING: "1x60",
            CREATED: "0x60",
        },
        # Data were prepared for half an hour.
        {
            f'evergrad_operator_run_phase{{{WHO}, phase="Preparing"}}': "1x30 stale",
            STARTING: "_x31 1x29",
            CREATED: "0x60",
            STARTED: "0x60",
        },
    ),
    "TrainingRunBlocked": (
        "10m",
        {f"evergrad_operator_run_stalled{{{WHO}, {IMAGE}}}": "1x60"},
        # Somebody has acted within three minutes.
        {f"evergrad_operator_run_stalled{{{WHO}, {IMAGE}}}": "1x3 stale"},
    ),
    "TrainingRunRestartStorm": (
        "59m",
        {f"evergrad_operator_run_pods_replaced_total{{{WHO}}}": "0+1x60"},
        {f"evergrad_operator_run_pods_replaced_total{{{WHO}}}": "0x30 1x30"},
    ),
    "TrainingRunLossNonFinite": (
        "20m",
        {f'evergrad_nonfinite_total{{{WHO}, what="loss"}}': "0x15 1x45"},
        # Another process serves on from 0.
        {f'evergrad_nonfinite_total{{{WHO}, what="loss"}}': "5x5 0x55"},
    ),
    "TrainingRunLossDiverging": (
        "59m",
        {RUNNING: "1x60", f'evergrad_loss{{{WHO}, split="train"}}': "2x20 9x40"},
        {RUNNING: "1x60", f'evergrad_loss{{{WHO}, split="train"}}': "9x20 2x40"},
    ),
    "TrainingRunCheckpointStale": (
        "110m",
        {
            RUNNING: "1x120",
            STARTED: "0x120",
            f"evergrad_checkpoint_last_success_timestamp_seconds{{{WHO}}}": "60x10 600x110",
        },
        # One every fifty minutes: an hour without one is not a reason.
        {
            RUNNING: "1x120",
            STARTED: "0x120",
            f"evergrad_checkpoint_last_success_timestamp_seconds{{{WHO}}}": "0x40 2400x80",
        },
    ),
    "TrainingRunCheckpointFailing": (
        "20m",
        {
            f'evergrad_checkpoint_failures_total{{{WHO}, op="save", reason="io"}}': "0x10 1x50"
        },
        {f'evergrad_checkpoint_failures_total{{{WHO}, op="save", reason="io"}}': "1x60"},
    ),
    "TrainingRunThroughputDrop": (
        "300m",
        {
            RUNNING: "1x400",
            f"{TOKENS}{{{WHO}}}": "0+1000x260 260000+100x140",
            f"{SECONDS}{{{WHO}}}": "0+60x400",
        },
        {
            RUNNING: "1x400",
            f"{TOKENS}{{{WHO}}}": "0+1000x260 260000+900x140",
            f"{SECONDS}{{{WHO}}}": "0+60x400",
        },
    ),
    "TrainingRunDataStarved": (
        "50m",
        {
            RUNNING: "1x60",
            f'evergrad_step_phase_seconds_total{{{WHO}, phase="data"}}': "0+30x60",
            f'evergrad_step_phase_seconds_total{{{WHO}, phase="other"}}': "0+30x60",
        },
        {
            RUNNING: "1x60",
            f'evergrad_step_phase_seconds_total{{{WHO}, phase="data"}}': "0+3x60",
            f'evergrad_step_phase_seconds_total{{{WHO}, phase="other"}}': "0+57x60",
        },
    ),
    "TrainingRunGoodputLow": (
        "300m",
        {
            RUNNING: "1x400",
            f"evergrad_productive_seconds_total{{{WHO}}}": "0+30x400",
            f'evergrad_lost_seconds_total{{{WHO}, cause="restore"}}': "0+30x400",
        },
        {
            RUNNING: "1x400",
            f"evergrad_productive_seconds_total{{{WHO}}}": "0+57x400",
            f'evergrad_lost_seconds_total{{{WHO}, cause="restore"}}': "0+3x400",
        },
    ),
    "TrainingRunFailed": (
        "20m",
        {
            f'evergrad_operator_run_phase{{{WHO}, phase="Failed"}}': "1x60",
            f"evergrad_operator_run_completed_timestamp_seconds{{{WHO}}}": "600x60",
        },
        {
            f'evergrad_operator_run_phase{{{WHO}, phase="Complete"}}': "1x60",
            f"evergrad_operator_run_completed_timestamp_seconds{{{WHO}}}": "600x60",
        },
    ),
    "TrainingOperatorDown": (
        "30m",
        # The pod is deleted; a gap alone would be bridged for five minutes.
        {f'{LEADER}{{{OWN}, pod="o"}}': "1x10 stale"},
        {
            f'{LEADER}{{{OWN}, pod="o"}}': "0x60",
            f'{LEADER}{{{OWN}, pod="p"}}': "1x60",
        },
    ),
    "TrainingOperatorRestarts": (
        "30m",
        # The kubelet restarts it every two minutes, and later after a pause.
        {f'process_start_time_seconds{{{OWN}, pod="o"}}': "0x9 600x4 900x4 1200x4 1500x40"},
        {f'process_start_time_seconds{{{OWN}, pod="o"}}': "0x9 600x4 900x50"},
    ),
    "TrainingOperatorReconcileErrors": (
        "30m",
        {
            f'{PASSES}{{{OWN}, result="error"}}': "0+5x60",
            f'{PASSES}{{{OWN}, result="success"}}': "0+5x60",
        },
        {
            f'{PASSES}{{{OWN}, result="error"}}': "0x60",
            f'{PASSES}{{{OWN}, result="success"}}': "0+5x60",
        },
    ),
    # A process that hangs for 100 s is restarted within 30 s, and its age starts again at 0.
    "TrainingOperatorQueueStuck": (
        "17m",
        {f"{AGE}{{{OWN}}}": "0x15 70 120 0x43"},
        {f"{AGE}{{{OWN}}}": "0x15 55 0x44"},
    ),
    "TrainingOperatorWatchStale": (
        "17m",
        {f'{LAG}{{{OWN}, resource="pods"}}': "0x15 70 120 0x43"},
        {f'{LAG}{{{OWN}, resource="pods"}}': "0x15 55 0x44"},
    ),
}
"""By alert: when to look, series with which it fires, and series with which it is silent."""
LAST_STEP = "evergrad_last_step_timestamp_seconds"
SAVED = "evergrad_checkpoint_last_success_timestamp_seconds"
KEPT, LOST = "evergrad_productive_seconds_total", "evergrad_lost_seconds_total"
REPLACED = "evergrad_operator_run_pods_replaced_total"


def stairs(height: int, width: int, count: int) -> str:
    """Return a counter that grows by ``height`` every ``width`` minutes, in promtool's notation."""
    return " ".join(f"{number * height}x{width - 1}" for number in range(count))


SICK: list[tuple[str, str, str, dict[str, str]]] = [
    (
        "TrainingRunNotStarting",
        "it hangs before its first step",
        "40m",
        {
            STARTING: "1x4 stale",
            RUNNING: "_x5 1x60",
            STARTED: "0x60",
            f'{INFO}{{{WHO}, kind="training"}}': "1x60",
        },
    ),
    (
        "TrainingRunStalled",
        "a script has ceased to report",
        "60m",
        {
            RUNNING: "1x60",
            STARTED: "0x60",
            PROGRESS: "0+60x30 1800x30",
            f'{INFO}{{{WHO}, kind="script"}}': "1x60",
        },
    ),
    (
        "TrainingRunStalled",
        "it waited for hosts, and hangs since",
        "59m",
        {
            RUNNING: "1x10 stale _x29 1x19",
            WAITING: "_x11 1x28 stale",
            STARTED: "0x60",
            PROGRESS: "0+60x10 600x50",
        },
    ),
    (
        "TrainingRunNotStarting",
        "no host has room for it",
        "40m",
        {
            WAITING: "1x60",
            f'evergrad_operator_run_waiting{{{WHO}, reason="Unschedulable"}}': "1x60",
            CREATED: "0x60",
            STARTED: "0x60",
        },
    ),
    (
        "TrainingRunNotStarting",
        "its pods fail at their start, and come again after a pause",
        "40m",
        {
            WAITING: "1x9 stale _x9 1x9 stale _x9 1x9",
            STARTING: "_x10 1x9 stale _x9 1x9 stale",
            f'evergrad_operator_run_waiting{{{WHO}, reason="BackingOff"}}': "1x9 stale _x9 1x9 stale _x9 1x9",
            CREATED: "0x60",
            STARTED: "0x60",
        },
    ),
    (
        "TrainingOperatorDown",
        "the operator of another release works",
        "60m",
        {
            f'{LEADER}{{{OWN}, pod="o"}}': "1x10 stale",
            f'{LEADER}{{namespace="other", job="evergrad", pod="p"}}': "1x60",
        },
    ),
    (
        "TrainingRunThroughputDrop",
        "steps of half an hour take an hour now",
        "460m",
        {
            RUNNING: "1x700",
            f"{TOKENS}{{{WHO}}}": f"{stairs(1000, 30, 12)} 12000x59 13000x59 14000x59",
            f"{SECONDS}{{{WHO}}}": f"{stairs(1800, 30, 12)} 21600x59 25200x59 28800x59",
        },
    ),
]
"""Alert, state, time, and scraped series: the alert fires."""
HEALTHY: list[tuple[str, str, str, dict[str, str]]] = [
    (
        "TrainingRunNotStarting",
        "it waits in a queue",
        "100m",
        {
            WAITING: "1x100",
            f'evergrad_operator_run_waiting{{{WHO}, reason="Queued"}}': "1x100",
            CREATED: "0x100",
            STARTED: "0x100",
        },
    ),
    (
        "TrainingRunNotStarting",
        "somebody has suspended it",
        "100m",
        {
            f'evergrad_operator_run_phase{{{WHO}, phase="Suspended"}}': "1x100",
            CREATED: "0x100",
        },
    ),
    (
        "TrainingRunStalled",
        "steps take half an hour, and one has ended",
        "50m",
        {
            RUNNING: "1x60",
            STARTED: "0x60",
            PROGRESS: "_x30 1800x30",
            f"{LAST_STEP}{{{WHO}}}": "_x30 1800x30",
            f"{SECONDS}{{{WHO}}}": "_x30 1800x30",
            f"{STEPS}{{{WHO}}}": "_x30 1x30",
        },
    ),
    (
        "TrainingRunStalled",
        "it was resumed after fifty minutes, and loads its state",
        "59m",
        {RUNNING: "_x50 1x10", STARTED: "0x48 2940x12", PROGRESS: "0x60"},
    ),
    (
        "TrainingRunStalled",
        "it waited for hosts for half an hour, and loads its state",
        "53m",
        {
            RUNNING: "1x10 stale _x29 1x15",
            WAITING: "_x11 1x28 stale",
            STARTED: "0x60",
            PROGRESS: "0+60x10 600x50",
        },
    ),
    (
        "TrainingRunNotStarting",
        "its first step came after twenty minutes",
        "100m",
        {
            STARTING: "1x4 stale",
            RUNNING: "_x5 1x95",
            STARTED: "0x100",
            PROGRESS: "_x20 1200+60x80",
            f'{INFO}{{{WHO}, kind="training"}}': "1x100",
        },
    ),
    (
        "TrainingRunNotStarting",
        "a script trains and reports nothing",
        "100m",
        {
            RUNNING: "1x100",
            STARTED: "0x100",
            f'{INFO}{{{WHO}, kind="script"}}': "1x100",
        },
    ),
    (
        # The operator cannot reach the coordinator, so it does not know any step.
        "TrainingRunStalled",
        "rank 0 has moved to another node, whose steps nobody but Prometheus sees",
        "59m",
        {
            RUNNING: "1x60",
            STARTED: "0x60",
            PROGRESS: "0x60",
            f'{LAST_STEP}{{{WHO}, pod="x-0"}}': "0+60x20 stale",
            f'{SECONDS}{{{WHO}, pod="x-0"}}': "60+60x60",
            f'{STEPS}{{{WHO}, pod="x-0"}}': "1+1x60",
            f'{LAST_STEP}{{{WHO}, pod="x-1"}}': "_x21 1260+60x39",
            f'{SECONDS}{{{WHO}, pod="x-1"}}': "_x21 60+60x39",
            f'{STEPS}{{{WHO}, pod="x-1"}}': "_x21 1+1x39",
        },
    ),
    (
        "TrainingRunStalled",
        "it came to its end",
        "59m",
        {RUNNING: "1x12 stale", STARTED: "0x12 stale", PROGRESS: "0x12 stale"},
    ),
    (
        "TrainingRunRestartStorm",
        "another operator serves what the one before has counted",
        "59m",
        {
            f'{REPLACED}{{{WHO}, pod="o"}}': "7x30 stale",
            f'{REPLACED}{{{WHO}, pod="p"}}': "_x33 7x27",
        },
    ),
    (
        "TrainingRunCheckpointFailing",
        "a node was lost during a save",
        "59m",
        {
            f'evergrad_checkpoint_failures_total{{{WHO}, op="save", reason="peer_lost"}}': "0x10 1x50"
        },
    ),
    (
        "TrainingRunThroughputDrop",
        "rank 0 has moved to another node, and both are scraped",
        "400m",
        {
            RUNNING: "1x400",
            f'{TOKENS}{{{WHO}, pod="x-0"}}': "0+1000x200 200000x200",
            f'{TOKENS}{{{WHO}, pod="x-1"}}': "0x200 0+1000x200",
            f'{SECONDS}{{{WHO}, pod="x-0"}}': "0+60x200 12000x200",
            f'{SECONDS}{{{WHO}, pod="x-1"}}': "0x200 0+60x200",
        },
    ),
    (
        "TrainingRunThroughputDrop",
        "steps take half an hour",
        "640m",
        {
            RUNNING: "1x700",
            f"{TOKENS}{{{WHO}}}": stairs(1000, 30, 23),
            f"{SECONDS}{{{WHO}}}": stairs(1800, 30, 23),
        },
    ),
    (
        "TrainingRunThroughputDrop",
        "an evaluation of an hour is no step",
        "400m",
        {
            RUNNING: "1x400",
            f"{TOKENS}{{{WHO}}}": "0+1000x200 200000x60 200000+1000x140",
            f"{SECONDS}{{{WHO}}}": "0+60x200 12000x60 12000+60x140",
        },
    ),
    (
        "TrainingRunCheckpointStale",
        "it saves every three hours, and has saved once",
        "350m",
        {
            RUNNING: "1x400",
            STARTED: "0x400",
            f"{SAVED}{{{WHO}}}": "_x180 10800x220",
        },
    ),
    (
        "TrainingRunGoodputLow",
        "twenty minutes went into its start, and it is young",
        "100m",
        {
            RUNNING: "1x100",
            f"{KEPT}{{{WHO}}}": "0x20 0+60x80",
            f'{LOST}{{{WHO}, cause="startup"}}': "0 1200x100",
        },
    ),
    (
        "TrainingRunGoodputLow",
        "a quarter of its time is evaluation",
        "390m",
        {
            RUNNING: "1x400",
            f"{KEPT}{{{WHO}}}": "0+45x400",
            f'{LOST}{{{WHO}, cause="evaluation"}}': "0+15x400",
        },
    ),
    (
        "TrainingOperatorDown",
        "its only pod is replaced by another one",
        "30m",
        {
            f'{LEADER}{{{OWN}, pod="o"}}': "1x10 stale",
            f'{LEADER}{{{OWN}, pod="p"}}': "_x13 1x40",
        },
    ),
]
"""Alert, state, end time, and scraped series: the alert never fires."""
UNITS = ("short", "s", "bytes", "percentunit", "reqps")
"""Units that are used, in Grafana's notation."""
VARIABLES = {
    "__rate_interval": "5m",
    "__range": "6h",
    "job": "j",
    "run": "x",
    "run_namespace": "a",
}
"""Values that Grafana would fill in."""


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed: Debian's package prometheus has it")
    return found


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    if toolbox.missing(("helm",)):
        pytest.skip("helm is not built. make chart-lint builds it, with Go.")
    return chart.render({"metrics": {"enabled": True, "labels": {"release": "stack"}}})


@pytest.fixture(scope="module")
def rules(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (rule,) = (one for one in objects if one["kind"] == "PrometheusRule")
    groups: dict[str, Any] = rule["spec"]
    return groups


def check(promtool: str, *arguments: str | Path) -> str:
    done = subprocess.run(
        [promtool, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for uid, text in DASHBOARDS.items():
        for panel in json.loads(text)["panels"]:
            yield uid, panel


@pytest.fixture(scope="module")
def queries(root: Path) -> tuple[Query, ...]:
    return collect_queries(root / "docs")


def test_the_chart_files_and_the_page_are_up_to_date(root: Path) -> None:
    for path, text in render_all().items():
        assert path.read_text("utf-8") == text, (
            f"{path.relative_to(root)}: run make generate"
        )


def test_an_unknown_metric_cannot_be_used() -> None:
    assert (
        metric("step_duration_seconds_bucket", 'le="1"')
        == 'evergrad_step_duration_seconds_bucket{le="1"}'
    )
    for name in ("no_such_metric", "step_count", "step_duration_seconds"):
        with pytest.raises(KeyError):
            metric(name)
    with pytest.raises(KeyError):
        process("process_open_fds", 'job="x"')
    for selector in ("", 'node="0"'):
        with pytest.raises(ValueError, match="matcher"):
            process(PROCESS[0], selector)


def test_each_alert_has_a_page_and_each_page_an_alert(root: Path) -> None:
    pages = {path.stem for path in (root / "docs/runbooks").glob("*.md")} - {"README"}
    assert pages == {alert.name for alert in ALERTS} == set(CASES)
    parts = ("Meaning", "Urgency", "Diagnosis", "Mitigation", "Verification")
    for alert in ALERTS:
        text = (root / f"docs/runbooks/{alert.name}.md").read_text("utf-8")
        assert all(f"\n## {part}\n" in text for part in parts), alert.name
        assert f"\n## Urgency\n\nSeverity `{alert.severity}`:" in text, alert.name


def test_the_default_thresholds_match_the_chart(root: Path) -> None:
    values = yaml.safe_load((root / "charts/evergrad/values.yaml").read_text("utf-8"))
    assert values["metrics"]["rules"]["thresholds"] == THRESHOLDS
    assert {key for alert in ALERTS for key in alert.thresholds} == set(THRESHOLDS)


def test_prometheus_accepts_all_rules_and_queries(
    promtool: str, rules: dict[str, Any], queries: tuple[Query, ...], tmp_path: Path
) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    assert f"{len(ALERTS)} rules found" in check(
        promtool, "check", "rules", tmp_path / "rules.yaml"
    )
    records = [
        {"record": f"query_{number}", "expr": query.fill(VARIABLES)}
        for number, query in enumerate(queries)
    ]
    (tmp_path / "queries.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "queries", "rules": records}]})
    )
    assert f"{len(queries)} rules found" in check(
        promtool, "check", "rules", tmp_path / "queries.yaml"
    )


def check_rules(
    promtool: str,
    folder: Path,
    rules: dict[str, Any],
    tests: list[tuple[str, dict[str, Any]]],
) -> None:
    """Run the tests, each only with the given rule: all rules in all tests would take minutes."""
    by_name = {one["alert"]: one for group in rules["groups"] for one in group["rules"]}
    files = []
    for name in dict.fromkeys(name for name, _ in tests):
        group = {"name": name, "rules": [by_name[name]]}
        (folder / f"{name}.rules.yaml").write_text(yaml.safe_dump({"groups": [group]}))
        document = {
            "rule_files": [f"{name}.rules.yaml"],
            "evaluation_interval": "1m",
            "tests": [test for of, test in tests if of == name],
        }
        files.append(folder / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump(document, sort_keys=False))
    assert check(promtool, "test", "rules", *files).count("SUCCESS") == len(files)


def case(
    name: str,
    series: dict[str, str],
    at: str,
    query: str,
    *samples: dict[str, Any],
    interval: str = "1m",
) -> dict[str, Any]:
    """One test as promtool has it: the answer to a query after so much of the series."""
    return {
        "name": name,
        "interval": interval,
        "input_series": [
            {"series": one, "values": values} for one, values in series.items()
        ],
        "promql_expr_test": [
            {"expr": query, "eval_time": at, "exp_samples": list(samples)}
        ],
    }


def test_each_alert_fires_for_its_run_and_no_other(
    promtool: str, rules: dict[str, Any], tmp_path: Path
) -> None:
    tests = []
    for alert in ALERTS:
        at, fires, silent = CASES[alert.name]
        query = f'ALERTS{{alertname="{alert.name}", alertstate="firing"}}'
        whose = WHO if alert in OF_RUNS else f'namespace="{chart.NAMESPACE}"'
        whose += {
            "TrainingOperatorRestarts": ', pod="o"',
            "TrainingOperatorWatchStale": ', resource="pods"',
            "TrainingRunBlocked": f", {IMAGE}",
        }.get(alert.name, "")
        labels = f'{query[:-1]}, severity="{alert.severity}", {whose}}}'
        found = {"labels": labels, "value": 1}
        tests += [
            (alert.name, case("fires", fires, at, query, found)),
            (alert.name, case("is silent", silent, at, query)),
        ]
    check_rules(promtool, tmp_path, rules, tests)


def test_no_alert_fires_in_healthy_states_that_resemble_failures(
    promtool: str, rules: dict[str, Any], tmp_path: Path
) -> None:
    tests = []
    for name, how, at, series in HEALTHY:
        firing = f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)'
        query = f"max_over_time(({firing})[{at}:1m])"
        tests.append((name, case(how, series, at, query, {"labels": "{}", "value": 0})))
    check_rules(promtool, tmp_path, rules, tests)


def test_an_alert_fires_for_each_kind_of_failure(
    promtool: str, rules: dict[str, Any], tmp_path: Path
) -> None:
    tests = []
    for name, how, at, series in SICK:
        query = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
        tests.append((name, case(how, series, at, query, {"labels": "{}", "value": 1})))
    check_rules(promtool, tmp_path, rules, tests)


def test_the_rules_of_a_release_cover_the_namespaces_that_it_serves(
    promtool: str, tmp_path: Path
) -> None:
    if toolbox.missing(("helm",)):
        pytest.skip("helm is not built. make chart-lint builds it, with Go.")
    rbac = {"scope": "namespaced", "watchNamespaces": ["a", "b"]}
    rendered = chart.render({"metrics": {"enabled": True}, "rbac": rbac})
    (rule,) = (one for one in rendered if one["kind"] == "PrometheusRule")
    for one in rule["spec"]["groups"][0]["rules"]:
        names = re.findall(r"\bevergrad_\w+", one["expr"])
        assert one["expr"].count('run_namespace=~"a|b"') == len(names), one["alert"]
    name = "TrainingRunFailed"
    _, series, _ = CASES[name]
    query = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
    of_another = {key.replace('"a"', '"ab"'): value for key, value in series.items()}
    tests = [
        (name, case("its own", series, "20m", query, {"labels": "{}", "value": 1})),
        (name, case("of another release", of_another, "20m", query)),
    ]
    check_rules(promtool, tmp_path, rule["spec"], tests)


def test_more_than_five_replacements_means_at_least_six_despite_extrapolation(
    promtool: str, rules: dict[str, Any], tmp_path: Path
) -> None:
    # The samples are not at the ends of the window, so the increase is extrapolated, for example to 5.06 for
    # 5.
    name = "TrainingRunRestartStorm"
    query = f'ALERTS{{alertname="{name}", alertstate="firing"}}'
    series = f"{REPLACED}{{{WHO}}}"
    five, six = "7x20 8x10 9x10 10x10 11x10 12x200", "7x20 8x10 9x10 10x10 11x10 13x200"
    found = {"labels": f'{query[:-1]}, severity="warning", {WHO}}}', "value": 1}
    tests = [
        (name, case("five", {series: five}, "61m", query, interval="40s")),
        (name, case("six", {series: six}, "61m", query, found, interval="40s")),
    ]
    check_rules(promtool, tmp_path, rules, tests)


def test_the_cost_of_teams_matches_the_example_of_the_page(
    promtool: str, queries: tuple[Query, ...], tmp_path: Path
) -> None:
    by_comment = {query.where.partition(": ")[2]: query.expression for query in queries}
    (cost,) = (
        text for name, text in by_comment.items() if name.startswith("cost of each team")
    )
    hours = by_comment["accelerator-hours of each team in a week"]
    labels = 'run_namespace="a", run="x"'
    pods, gpus = (f"evergrad_operator_run_{one}_seconds_total" for one in ("pod", "gpu"))
    # A minute between two values: so many seconds for the two pods of one run, and for the pod of the other.
    two, one = 2 * 60, 60
    series = {
        f'evergrad_operator_run_labels{{{labels}, label_team="words", pod="o"}}': "1x360 stale",
        f'evergrad_operator_run_labels{{{labels}, label_team="words", pod="p"}}': "_x360 1x2000 stale",
        f'{pods}{{{labels}, cause="queue", pod="o"}}': f"0+{two}x60 {60 * two}x300 stale",
        f'{pods}{{{labels}, cause="queue", pod="p"}}': f"_x360 {60 * two}x2000 stale",
        # Half of it is waste, which costs as much. The operator is replaced on the way, and counts on.
        f'{pods}{{{labels}, cause="training", pod="o"}}': f"0x59 0+{two}x300 stale",
        f'{pods}{{{labels}, cause="recovery", pod="p"}}': f"_x360 0+{two}x300 {300 * two}x1700 stale",
        f'{gpus}{{{labels}, cause="training", pod="o"}}': f"0x59 0+{4 * two}x300 stale",
        f'{gpus}{{{labels}, cause="recovery", pod="p"}}': f"_x360 0+{4 * two}x300 {1200 * two}x1700 stale",
    }
    # Of the same name in another namespace, without an accelerator.
    other = 'run_namespace="b", run="x"'
    series[f'evergrad_operator_run_labels{{{other}, label_team="vision", pod="o"}}'] = (
        "1x2000 stale"
    )
    series[f'{pods}{{{other}, cause="training", pod="o"}}'] = (
        f"0+{one}x1200 {1200 * one}x800 stale"
    )

    def sample(team: str, value: float) -> dict[str, Any]:
        return {"labels": f'{{label_team="{team}"}}', "value": value}

    test = case(
        "teams",
        series,
        # Two days after both series have gone.
        "96h",
        f"round({cost})",
        sample("words", 202),
        sample("vision", 2),
    )
    test["promql_expr_test"].append(
        {
            "expr": f"round({hours})",
            "eval_time": "96h",
            "exp_samples": [sample("words", 80)],
        }
    )
    document = {"rule_files": [], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "teams.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    assert "SUCCESS" in check(promtool, "test", "rules", tmp_path / "teams.yaml")


def test_a_disabled_alert_is_not_rendered_and_a_threshold_is_a_value() -> None:
    if toolbox.missing(("helm",)):
        pytest.skip("helm is not built. make chart-lint builds it, with Go.")
    chosen = {"disabled": ["TrainingRunFailed"], "thresholds": {"stalledSeconds": 77}}
    rendered = chart.render({"metrics": {"enabled": True, "rules": chosen}})
    (rule,) = (one for one in rendered if one["kind"] == "PrometheusRule")
    by_name = {
        one["alert"]: one for group in rule["spec"]["groups"] for one in group["rules"]
    }
    assert set(by_name) == {alert.name for alert in ALERTS} - {"TrainingRunFailed"}
    assert "> 77\n" in by_name["TrainingRunStalled"]["expr"]
    assert by_name["TrainingRunNotStarting"]["for"] == "1800s"


def test_without_metrics_no_object_of_prometheus_operator_is_rendered() -> None:
    if toolbox.missing(("helm",)):
        pytest.skip("helm is not built. make chart-lint builds it, with Go.")
    kinds = {one["kind"] for one in chart.render({})}
    assert not kinds & {"PodMonitor", "ServiceMonitor", "PrometheusRule"}


def test_monitors_select_the_objects_that_the_operator_creates(
    objects: list[dict[str, Any]],
) -> None:
    (pods,) = (one for one in objects if one["kind"] == "PodMonitor")
    (service,) = (one for one in objects if one["kind"] == "ServiceMonitor")
    assert pods["metadata"]["labels"]["release"] == "stack"
    assert service["metadata"]["labels"]["release"] == "stack"
    selector = pods["spec"]["selector"]
    assert selector["matchLabels"] == {"app.kubernetes.io/managed-by": "evergrad"}
    # If the policies of runs block their coordinators, a target for them would be down forever.
    for runs, served in (
        ({}, ["metrics", "status"]),
        ({"metricsFrom": []}, ["metrics"]),
        ({"metricsFrom": [], "networkPolicies": False}, ["metrics", "status"]),
    ):
        rendered = chart.render({"metrics": {"enabled": True}, "runs": runs})
        (monitor,) = (one for one in rendered if one["kind"] == "PodMonitor")
        assert [one["port"] for one in monitor["spec"]["podMetricsEndpoints"]] == served
    (found,) = (one for one in objects if one["kind"] == "Service")
    wanted = service["spec"]["selector"]["matchLabels"].items()
    assert wanted <= found["metadata"]["labels"].items()
    assert service["spec"]["endpoints"][0]["port"] in {
        one["name"] for one in found["spec"]["ports"]
    }


def test_each_dashboard_is_a_config_map_that_the_sidecar_finds(
    objects: list[dict[str, Any]],
) -> None:
    found = {
        key: value
        for one in objects
        if one["kind"] == "ConfigMap"
        and one["metadata"].get("labels", {}).get("grafana_dashboard") == "1"
        for key, value in one["data"].items()
    }
    assert {f"{uid}.json": json.loads(text) for uid, text in DASHBOARDS.items()} == {
        key: json.loads(value) for key, value in found.items()
    }


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_dashboards_satisfy_the_grafana_linter(uid: str) -> None:
    board = json.loads(DASHBOARDS[uid])
    assert board["uid"] == uid and len(uid) <= 40
    assert board["editable"] is False
    assert "id" not in board and "__inputs" not in board
    sources = [one for one in board["templating"]["list"] if one["type"] == "datasource"]
    assert [one["name"] for one in sources] == ["datasource"]
    for one in board["templating"]["list"]:
        if one["type"] == "query":
            assert one["refresh"] == 2, f"{one['name']}: reload when the time range changes"
            assert one["datasource"]["uid"] == "${datasource}"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    names = [panel["title"] for panel in board["panels"]]
    assert len(set(names)) == len(names)


def test_panels_satisfy_the_grafana_linter() -> None:
    for uid, panel in panels():
        where = f"{uid}: {panel['title']}"
        assert panel["title"] and panel["description"].endswith("."), where
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, where
        assert panel["targets"] and panel["fieldConfig"]["defaults"]["unit"] in UNITS, where
        references = [target["refId"] for target in panel["targets"]]
        assert all(references) and len(set(references)) == len(references), where
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}", where


def test_counters_are_queried_under_a_rate_with_a_common_window(
    queries: tuple[Query, ...],
) -> None:
    for query in queries:
        if query.kind not in ("panel", "annotation"):
            continue
        # Only what the operator reads off a status is shown as a total.
        bare = re.sub(r"(rate|increase)\([^()]*\)", "", query.expression)
        totals = re.findall(r"(?:evergrad|process)_\w+_total\b", bare)
        of_statuses = {
            f"evergrad_operator_run_{x}_total" for x in ("restarts", "pods_replaced")
        }
        assert set(totals) <= of_statuses, query.where
        windows = set(re.findall(r"\[([^\]]+)\]", query.expression))
        assert windows <= {"$__rate_interval", "$__range", "1h", "10m", "1m"}, query.where


def test_a_metric_is_queried_by_labels_that_it_has() -> None:
    assert (
        metric("loss", 'split="train", run="x"') == 'evergrad_loss{split="train", run="x"}'
    )
    assert "le" in labels_of("step_duration_seconds_bucket")
    assert "le" not in labels_of("step_duration_seconds_sum")
    for selector in ('cause="x"', "split", 'split="train",dataset=""'):
        with pytest.raises(ValueError, match="matcher"):
            metric("loss", selector)


def test_every_query_uses_existing_metrics_and_labels(
    queries: tuple[Query, ...],
) -> None:
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    known = {
        f"{one.exported}{suffix}": labels_of(f"{one.name}{suffix}")
        for one in (*TRAINER, *NODE, *COORDINATOR, *OPERATOR)
        for suffix in suffixes.get(one.kind, ("",))
    }
    known |= dict.fromkeys(PROCESS, labels_of("step") - {"run"})
    kinds = {query.kind for query in queries}
    assert kinds == {"panel", "annotation", "variable", "alert", "page"}
    for query in queries:
        text = query.fill(VARIABLES)
        names = set(re.findall(r"\b(?:evergrad|process)_\w+", text))
        assert names and names <= set(known), f"{query.where}: {names - set(known)}"
        for name, selector in re.findall(r"\b((?:evergrad|process)_\w+)\{([^}]*)\}", text):
            matched = set(re.findall(r"(\w+)\s*(?:=|!)", selector))
            assert matched <= known[name], f"{query.where}: {matched - known[name]}"
        grouped = re.findall(r"\b(?:by|on|ignoring|without) \(([^)]*)\)", text)
        labels = {label for group in grouped for label in group.split(", ")}
        there = frozenset().union(*(known[name] for name in names))
        if "evergrad_operator_run_labels" in names:
            # The labels of a run that the chart's values name.
            there |= {label for label in labels if label.startswith("label_")}
        assert labels <= there, f"{query.where}: {labels - there}"


def test_all_promql_on_the_pages_is_in_blocks_that_are_collected(
    root: Path, queries: tuple[Query, ...]
) -> None:
    collected = {query.expression for query in queries}
    for page in sorted((root / "docs").rglob("*.md")):
        text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.M)
        inline = set(re.findall(r"`([^`\n]*\w\([^`\n]*evergrad_[a-z_]+[^`\n]*)`", text))
        assert inline <= collected, page


def test_no_dashboard_query_contains_a_fixed_namespace_or_run(
    queries: tuple[Query, ...],
) -> None:
    for query in queries:
        if query.kind != "page":
            values = re.findall(
                r'\b(?:run_namespace|namespace|run|job)=~?"([^"]*)"', query.expression
            )
            assert {value[:1] for value in values} <= {"$"}, query.where


def test_a_variable_without_a_value_and_a_query_without_a_comment_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="a variable has no value"):
        Query("panel", "here", "rate(x[$__rate_interval])").fill({"run": "a"})
    filled = Query("panel", "here", 'x{run="$run", run_namespace="$run_namespace"}')
    assert (
        filled.fill({"run": "a", "run_namespace": "b"}) == 'x{run="a", run_namespace="b"}'
    )
    (tmp_path / "page.md").write_text("```promql\nup\n```\n")
    with pytest.raises(ValueError, match="no comment"):
        collect_queries(tmp_path)


def test_gaps_are_not_joined_and_annotations_mark_replaced_processes_and_pods() -> None:
    for uid, panel in panels():
        if panel["type"] == "timeseries":
            assert panel["fieldConfig"]["defaults"]["custom"]["spanNulls"] is False, uid
    marks = json.loads(DASHBOARDS["evergrad-run"])["annotations"]["list"]
    assert [one["name"] for one in marks] == ["World changes", "Pods replaced"]
    for mark in marks:
        assert mark["enable"] is True
        assert mark["datasource"]["uid"] == "${datasource}"


LEGENDS = {
    "cause": len(CHANGES),
    "reason": len(ENDINGS),
    "phase": len(Phase),
    "state": 4,
    "kind": 3,
    "why": len(SKIPS),
    "monitor": 4,
    "result": 3,
    "work": 5,
    "resource": 12,
    "verb": 6,
}
"""Labels whose values our own code bounds, with how many there are at most."""


def bound_of(expression: str, legend: str) -> float:
    """Return the largest number of series in a query's legend; infinite if it is not bounded."""
    if found := re.match(r"topk\((\d+), ", expression):
        return int(found[1])
    labels = re.findall(r"\{\{(\w+)\}\}", legend)
    return math.prod(LEGENDS.get(label, math.inf) for label in labels)


def test_no_panel_legend_has_more_than_twenty_series() -> None:
    for uid, panel in panels():
        if panel["type"] not in ("timeseries", "state-timeline"):
            continue
        bounds = {
            target["refId"]: bound_of(target["expr"], target["legendFormat"])
            for target in panel["targets"]
        }
        assert sum(bounds.values()) <= 20, f"{uid}: {panel['title']}: {bounds}"


def test_a_query_without_a_bound_is_detected() -> None:
    assert bound_of("max(x)", "x") == 1
    assert bound_of("sum by (cause) (x)", "{{cause}}") == len(CHANGES)
    assert bound_of("sum by (dataset) (x)", "{{dataset}}") == math.inf
    assert bound_of("topk(10, sum by (dataset) (x))", "{{dataset}}") == 10


def test_every_dashboard_query_selects_by_installation_and_run(
    queries: tuple[Query, ...],
) -> None:
    """Two installations, or two runs of one name, would be added up otherwise."""
    matchers = {
        "evergrad-fleet": ('run_namespace=~"$run_namespace"',),
        "evergrad-run": ('run_namespace="$run_namespace"', 'run="$run"'),
        "evergrad-operator": ('job=~"$job"',),
    }
    operators = {"operator_run_queue_seconds", "operator_run_startup_seconds"}
    of_no_run = {f"{PREFIX}{name}_bucket" for name in operators}
    for query in queries:
        if query.kind not in ("panel", "annotation"):
            continue
        wanted = matchers[query.where.partition(":")[0]]
        found = re.findall(r"\b((?:evergrad|process)_\w+)(\{[^}]*\})?", query.expression)
        for name, selector in found:
            if name not in of_no_run:
                assert all(one in selector for one in wanted), f"{query.where}: {name}"
