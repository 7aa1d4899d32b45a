"""A real Prometheus, configured by Prometheus Operator's code from the chart's monitors and rules, scrapes
real runs and the operator: every query of every panel, alert and page has a result."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import ENDLESS, RESOURCE, ROOT, Run, Runs, make_manifest, wait_for

from bed import prometheus, toolbox
from evergrad_monitoring.alerts import ALERTS
from evergrad_monitoring.queries import Query, collect_queries

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(3600)]
LABELS = {"release": "stack"}
SETTINGS = ("metrics.enabled=true", "metrics.interval=2s", "metrics.labels.release=stack")
SECTION = {"resources": {"requests": {"cpu": "50m", "memory": "256Mi"}}}
DEVICE = "example.com/gpu"
STEP = 2.0
"""Seconds between two points of a range query: the scrape interval."""
SILENT = {
    "evergrad-run: Memory of the fullest device (A)": "no host has a CUDA device",
    "evergrad-run: Memory of devices by worker (A)": "no host has a CUDA device",
    "evergrad-run: Metrics of the recipe (A)": "pretrain measures nothing besides its loss",
    "evergrad-run: Tokens per second (B)": "no script trains",
    "TrainingRunStalled": "the run makes steps all the time",
    "TrainingRunBlocked": "no run needs a person",
    "TrainingRunRestartStorm": "one pod was replaced",
    "TrainingRunLossNonFinite": "all losses are finite",
    "TrainingRunLossDiverging": "the loss falls",
    "TrainingRunCheckpointStale": "no checkpoint is an hour old",
    "TrainingRunCheckpointFailing": "no save has failed",
    "TrainingRunGoodputLow": "no run is three hours old",
    "TrainingRunFailed": "no run has failed",
    "TrainingOperatorDown": "the operator works",
    "TrainingOperatorRestarts": "the operator's process goes on",
    "TrainingOperatorReconcileErrors": "its passes are well",
    "TrainingOperatorQueueStuck": "no run waits for a minute",
    "TrainingOperatorWatchStale": "no watch is behind for a minute",
    "reference/metrics.md: Stalled": "the run makes steps all the time",
    "reference/operator-metrics.md: A run makes no steps": "the run makes steps all the time",
    "reference/operator-metrics.md: No operator is active": "the operator works",
}
"""Queries that must have no result here, each with the reason. All others must have one."""
EITHER = {
    "evergrad-operator: Errors by reason (A)": "a write may meet another one's, or not",
    "TrainingRunThroughputDrop": "the machine does other things beside the run",
    "TrainingRunDataStarved": "steps of a few milliseconds may wait for their data as long",
    "reference/operator-metrics.md: Slow replacements": "depends on the kubelet's pace",
}
"""Queries that may have a result or not, depending on the machine."""
NEVER_THERE = {
    "evergrad_operator_run_stalled{}": "no run needs a person",
    'evergrad_operator_run_waiting{reason="Queued"}': "no run has a queue",
    'evergrad_operator_run_phase{phase=~"Failed"}': "no run has failed",
    'evergrad_operator_run_phase{phase="Suspended"}': "no run is suspended",
}
"""Series that alerts use and that do not exist in this test."""


@dataclass(frozen=True)
class Watch:
    """Prometheus, and the time of its first scrape of the operator, in seconds since 1970."""

    client: prometheus.Client
    begin: float

    def has_answer(self, expression: str) -> bool:
        """Return whether a query had a result at any time since then."""
        return bool(self.client.query_since(expression, self.begin, step=STEP))

    def are_up(self, count: int) -> bool:
        """Return whether there are this many targets of runs, and all targets are up."""
        targets = self.client.targets()
        of_runs = [one for one in targets if one["scrapePool"].startswith("podMonitor")]
        return len(of_runs) == count and all(one["health"] == "up" for one in targets)


@pytest.fixture(scope="module")
def watch(
    cluster: Any, operator: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watch]:
    """Monitors and rules as stored by the API server, and a Prometheus that uses them."""
    if not cluster.is_bed:
        pytest.skip(
            "Prometheus runs beside the bed: pods of another cluster are out of reach."
        )
    for name in ("promconfig", "prometheus"):
        toolbox.build(name)
    folder: Path = tmp_path_factory.mktemp("prometheus")
    api = cluster.api
    prometheus.install_types(api)
    try:
        operator.upgrade(settings=SETTINGS)
        operator.wait_until_ready()
        access = prometheus.grant_access(api, folder)
        listed = api.get("/api/v1/namespaces")["items"]
        configuration = prometheus.configure(
            prometheus.describe_server(LABELS, interval="2s", api=access),
            prometheus.read_objects(api),
            namespaces=[one["metadata"]["name"] for one in listed],
        )
        assert len(configuration.jobs) == 3 and len(configuration.rules) == 1
        with prometheus.serve(configuration, folder, is_beside_the_bed=True) as client:
            wait_for(
                lambda: client.query("evergrad_operator_leader == 1"),
                "the operator's metrics",
            )
            yield Watch(client, time.time())
    finally:
        # The monitors are removed by the release's default values, before their kinds are deleted.
        operator.upgrade()
        operator.wait_until_ready()
        prometheus.remove_types(api)


def start_watched(runs: Runs, faults: Any) -> Run:
    """Start a run of a team, of two nodes with one simulated device each, that continues to train, evaluates
    between its steps and sets the peak of its devices."""
    for host in ("n1", "n2"):
        faults.set_gpus(host, 1, resource=DEVICE)
    training = {
        "checkpoint": {"every": {"steps": 200}},
        "data": {"heldOut": {"count": 12}},
        "evaluation": {"every": {"steps": 200}},
        "logging": {"peakFlops": 1e12},
    }
    manifest = make_manifest(
        "watched",
        steps=ENDLESS,
        changes={"training": training, "resources": {"limits": {DEVICE: "1"}}},
    )
    manifest["metadata"]["labels"] = {"team": "words"}
    return runs.apply(manifest)


def start_prepared(runs: Runs) -> Run:
    """A short run with separate pods for its data and its checkpoints."""
    training = {"checkpoint": {"every": {"steps": 20}}, "data": {"heldOut": {"count": 12}}}
    sections = {"preparation": SECTION, "evaluation": SECTION}
    return runs.start("prepared", steps=40, nodes={"max": 1}, training=training, **sections)


def fill(query: Query, run: Run) -> str:
    """Return the expression as Grafana would send it for this run."""
    return query.fill(
        {
            "__rate_interval": "30s",
            "__range": "10m",
            "job": ".*",
            "run": run.name,
            "run_namespace": run.runs.namespace,
        }
    )


def wait_until_replaced(watch: Watch, runs: Runs, faults: Any, run: Run) -> None:
    """Kill a node other than that of rank 0, and wait until Prometheus has scraped both states of the change."""
    pods = run.wait_for_pods(0, 1)
    run.wait_for_world(2)
    wait_for(lambda: watch.are_up(3), "two nodes and a coordinator as targets")
    who = f'run_namespace="{runs.namespace}", run="{run.name}"'
    wait_for(
        lambda: watch.client.query(f"sum(evergrad_steps_total{{{who}}}) > 0"),
        "steps of rank 0",
    )
    faults.kill_container(runs.namespace, pods[1]["metadata"]["name"])
    for series in ("world_changes_total", "operator_run_pods_replaced_total"):
        wait_for(
            lambda series=series: watch.client.query(
                f"sum(increase(evergrad_{series}{{{who}}}[1m])) > 0"
            ),
            f"the change in {series}",
        )
    run.wait_for_pods(0, 1)


@pytest.mark.operator_ends
def test_every_query_of_panels_alerts_and_pages_has_a_result_from_real_runs(
    watch: Watch, runs: Runs, faults: Any
) -> None:
    watched, prepared = start_watched(runs, faults), start_prepared(runs)
    prepared.wait_for_phase("Complete", seconds=900)
    wait_until_replaced(watch, runs, faults, watched)
    wait_for(
        lambda: prepared.status().get("evaluation", {}).get("evaluated") == 2,
        "two evaluated checkpoints",
        seconds=900,
    )
    watched.wait_for_step(400)
    # A rate needs two scrapes after the last change.
    seen = f'evergrad_operator_run_evaluation_value{{run="prepared",set="heldOut",run_namespace="{runs.namespace}"}}'
    wait_for(
        lambda: watch.client.query(f"count_over_time({seen}[1m]) >= 2"), "the evaluation"
    )

    queries = collect_queries(ROOT / "docs")
    answered = {
        query.where
        for query in queries
        if any(watch.has_answer(fill(query, run)) for run in (watched, prepared))
    }
    known = {query.where for query in queries}
    assert {*SILENT, *EITHER} <= known, "an exception names a query that is gone"
    assert sorted(known - answered - set(EITHER)) == sorted(SILENT)

    # The series of an alert exist, although there is no problem.
    asked = {
        selector
        for query in queries
        if query.kind == "alert"
        for selector in watch.client.find_selectors(query.expression)
    }
    silent = {selector for selector in asked if not watch.has_answer(selector)}
    assert silent == {selector for selector in asked if selector in NEVER_THERE}
    expect_rules_are_evaluated(watch)
    expect_only_monitoring_is_let_in(watch, runs)
    expect_series_end_with_their_run(watch, runs, (watched, prepared))


def expect_rules_are_evaluated(watch: Watch) -> None:
    """Check that Prometheus has all rules and can evaluate each, and that no unexpected alert fires."""
    groups = watch.client.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {alert.name for alert in ALERTS}
    assert {
        rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"
    } == {}
    alerts = watch.client.get("alerts")["alerts"]
    firing = {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}
    assert firing <= set(EITHER)


def expect_only_monitoring_is_let_in(watch: Watch, runs: Runs) -> None:
    """The policies of the runs open the scraped ports for Prometheus' namespace and no other.

    The bed does not enforce policies, so the policies are compared with the scraped targets.
    """
    for run in ("watched", "prepared"):
        (policy,) = runs.list("networkpolicies", f"evergrad.dev/run={run}")
        opened: dict[int, list[str]] = {}
        for rule in policy["spec"]["ingress"]:
            for peer in rule.get("from", [{}]):
                selector = peer.get("namespaceSelector", {})
                for among in selector.get("matchExpressions", []):
                    for port in rule["ports"]:
                        opened.setdefault(port["port"], []).extend(among["values"])
        scraped = {
            int(one["discoveredLabels"]["__meta_kubernetes_pod_container_port_number"])
            for one in watch.client.targets()
            if one["labels"].get("run") == run
        }
        assert scraped <= set(opened)
        assert all(places == [prometheus.NAMESPACE] for places in opened.values())
        assert all("from" in rule for rule in policy["spec"]["ingress"])


def expect_series_end_with_their_run(
    watch: Watch, runs: Runs, ended: tuple[Run, ...]
) -> None:
    """Within a few scrapes, no series of a deleted run is left."""
    for run in ended:
        every = f'count({{run="{run.name}", run_namespace="{runs.namespace}", __name__=~"evergrad_.+"}})'
        assert watch.client.query(every) != []
        runs.kubectl("delete", RESOURCE, run.name, "--wait=true")
        wait_for(
            lambda every=every: watch.client.query(every) == [],
            f"the end of the series of {run.name}",
        )
    assert watch.client.query("evergrad_operator_leader == 1") != []
