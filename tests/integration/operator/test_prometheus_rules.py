"""A real Prometheus scrapes nodes, a coordinator and operators with the chart's labels, evaluates its rules and
answers every query of its dashboards."""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from coordinator_processes import Coordinator
from patience import PATIENCE

from bed import chart, toolbox
from bed.prometheus import Client
from evergrad_monitoring.alerts import ALERTS
from evergrad_monitoring.queries import collect_queries
from evergrad_operator.core.observe.facts import RunFacts
from evergrad_operator.core.observe.time_accounting import PodTimeAccount
from evergrad_operator.edge.metrics.operator_metrics import (
    FactsCollector,
    OperatorMetrics,
    RunFactsSource,
)
from evergrad_trainer.base.records import EvaluationRecord, Event, EventType, RunInfo
from evergrad_trainer.node.metrics import NodeMetrics
from evergrad_trainer.node.workers import Worker
from evergrad_trainer.observers.metrics_server import MetricsServer
from evergrad_trainer.observers.prometheus import PrometheusExporter
from evergrad_trainer.worker.liveness import WorkerHeartbeat

RUN = {"run_namespace": "team-a", "run": "docs-lm"}
DOCUMENTS = Path(__file__).parents[3] / "docs"
# Series that do not exist in this small setup: no process or pod is lost during the test.
WITHOUT_DATA = {
    "evergrad-run: World changes",
    "evergrad-run: Pods replaced",
}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Prometheus(Client):
    """A running server."""

    def wait(self, what: str, is_there: Callable[[], object]) -> None:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            try:
                if is_there():
                    return
            except OSError:
                pass
            time.sleep(0.2)
        pytest.fail(f"{what}: not within {PATIENCE} s")


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    if toolbox.missing(("helm",)):
        pytest.skip("helm is not built. make chart-lint builds it, with Go.")
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: Debian's package prometheus has it")
    return chart.render(
        {
            "metrics": {"enabled": True, "interval": "1s"},
            "runs": {"metricsFrom": ["monitoring"]},
        }
    )


def find(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = (one for one in objects if one["kind"] == kind)
    return found


def build_job(
    name: str, endpoint: dict[str, Any], targets: list[tuple[int, dict[str, str]]]
) -> dict[str, Any]:
    """Return Prometheus Operator's configuration of a monitor's endpoint; discovery is replaced by its
    result."""
    rules = [
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
    ]
    rules += [
        {"source_labels": one["sourceLabels"], "target_label": one["targetLabel"]}
        for one in endpoint.get("relabelings", [])
    ]
    statics = [
        {
            "targets": [f"127.0.0.1:{port}"],
            "labels": {f"__meta_kubernetes_{key}": value for key, value in labels.items()},
        }
        for port, labels in targets
    ]
    return {
        "job_name": name,
        "scrape_interval": endpoint["interval"],
        "scrape_timeout": "1s",
        "honor_labels": endpoint.get("honorLabels", False),
        "static_configs": statics,
        "relabel_configs": rules,
    }


def meta(namespace: str, pod: str, run: str = "docs-lm") -> dict[str, str]:
    return {"namespace": namespace, "pod_name": pod, "pod_label_evergrad_dev_run": run}


class World:
    """Two nodes, the coordinator and the operator of a run; a node of another run of the same name; a
    standby."""

    def __init__(self, folder: Path, stack: ExitStack, synthetic: ModuleType) -> None:
        self._synthetic = synthetic
        self.exporters = [
            stack.enter_context(
                closing(PrometheusExporter("docs-lm", port=0, host="127.0.0.1"))
            )
            for _ in range(3)
        ]
        self.nodes = [
            NodeMetrics("docs-lm", str(index), exporter)
            for index, exporter in zip((0, 1, 0), self.exporters, strict=True)
        ]
        for node in self.nodes:
            # A worker with a device, which this machine lacks.
            heartbeat = WorkerHeartbeat()
            heartbeat.hold((10**9, 2 * 10**9, 3 * 10**9))
            place = {"local_rank": 0, "state": "inside", "pid": os.getpid()}
            node.worker_started(cast(Worker, SimpleNamespace(heartbeat=heartbeat, **place)))
            node.show_memory()
        self.coordinator = Coordinator(folder, run="docs-lm")
        stack.callback(self.coordinator.end)
        self.coordinator.wait_until_listening()
        self.operators = [OperatorMetrics(), OperatorMetrics()]
        self.servers = [
            stack.enter_context(
                closing(MetricsServer(one.registry, port=0, host="127.0.0.1"))
            )
            for one in self.operators
        ]
        self.collector = FactsCollector(self.facts(), labels=("team",))
        self.operators[0].registry.register(self.collector)

    def jobs(self, objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
        pods = find(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
        (service,) = find(objects, "ServiceMonitor")["spec"]["endpoints"]
        places = (
            ("team-a", "docs-lm-0-0"),
            ("team-a", "docs-lm-1-0"),
            ("team-b", "docs-lm-0-0"),
        )
        endpoints = {one["port"]: one for one in pods}
        status = self.coordinator.address["statusPort"]
        return [
            build_job(
                "runs/metrics",
                endpoints["metrics"],
                [
                    (exporter.port, meta(*place))
                    for exporter, place in zip(self.exporters, places, strict=True)
                ],
            ),
            build_job(
                "runs/status",
                endpoints["status"],
                [(status, meta("team-a", "docs-lm-coordinator-0"))],
            ),
            build_job(
                "evergrad",
                service,
                [
                    (server.port, meta(chart.NAMESPACE, f"evergrad-{number}", ""))
                    for number, server in enumerate(self.servers)
                ],
            ),
        ]

    def facts(self, *, has_failed: bool = False) -> RunFactsSource:
        now = time.time()
        runs = [
            RunFacts(
                namespace=namespace,
                name="docs-lm",
                phase="Failed" if has_failed and namespace == "team-a" else "Running",
                restarts={"node_lost": 1},
                created_at=now - 100,
                started_at=now - 90,
                completed_at=now if has_failed and namespace == "team-a" else None,
                progress=0.6,
                progressed_at=now,
                evaluated_step=60,
                evaluated={("heldOut", "loss"): 2.5},
                waiting=1,
                replaced=1,
                nodes={"running": 2, "queued": 1},
                nodes_max=3,
                work="done",
                prepared=1.0,
                prepared_tokens=1000,
                usage=PodTimeAccount(
                    at=1,
                    pods={"training": 9000, "startup": 2000},
                    accelerators={"training": 18_000, "startup": 4000},
                ),
                labels={"team": "lm"},
            )
            for namespace in ("team-a", "team-b")
        ]
        lag = {"pods": 0.0}
        return RunFactsSource(1, 0.5, 3, lag, {"pods": 3}, {"Running": 2}, tuple(runs))

    def train(self, first: int, last: int) -> None:
        now = time.time()
        for exporter, node in (
            (self.exporters[0], self.nodes[0]),
            (self.exporters[2], None),
        ):
            if first == 1:
                self._begin(exporter, now)
            for step in range(first, last + 1):
                record = self._synthetic.step_record(
                    step, time=now - (last - step) / 2, metrics={"kl": 0.1}
                )
                exporter.step_end(record)
            evaluated = EvaluationRecord(last, 1, "heldOut", 2.5, 12.2, 4096, 0.5, now)
            exporter.evaluation_end(evaluated)
            saved = {"checkpoint": f"step-{last}", "seconds": 1.0, "blocking_seconds": 0.1}
            exporter.event(
                Event(EventType.SAVE, now, last, 1, {**saved, "bytes": 10**8, "kept": 1})
            )
            if node is not None:
                node.report({"step": last, "loss": 2.0, "tokens_per_second": 5.0})
        self._work()

    def _begin(self, exporter: PrometheusExporter, now: float) -> None:
        info = RunInfo(
            *("docs-lm", 1, 2, 200, 0, 8192, 32, 10**7),
            *("bf16", "dataParallel", "llama", "/runs/docs-lm"),
            flops_per_step=1e12,
            peak_flops=1e13,
        )
        exporter.run_start(info)
        began = {"process_start_time": now - 42, "resumed_from": None}
        exporter.event(Event(EventType.START, now - 40, 0, 1, began))

    def _work(self) -> None:
        """The operator's passes."""
        operator = self.operators[0]
        operator.leader.set(1)
        self.operators[1].leader.set(0)
        operator.reconciles.labels("success").inc(9)
        operator.reconciles.labels("error").inc(1)
        operator.reconcile_errors.labels("Conflict").inc()
        operator.reconcile_seconds.observe(0.01)
        operator.loop_lag.observe(0.001)
        operator.observe_request("GET", "pods", "200", 0.01)
        for histogram in (
            operator.queue_seconds,
            operator.startup_seconds,
            operator.recovery_seconds,
        ):
            histogram.observe(3.0)

    def fail(self) -> None:
        now = time.time()
        failed = {"reason": "disk", "trouble": "no_space", "failures": 1}
        self.exporters[0].event(Event(EventType.SAVE_FAILED, now, 60, 1, failed))
        refused = {"why": "loss", "message": "not finite", "in_a_row": 1}
        self.exporters[0].event(Event(EventType.SKIPPED, now, 60, 1, refused))
        self.collector.facts = self.facts(has_failed=True)


@pytest.fixture(scope="module")
def watched(
    objects: list[dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Prometheus, World]]:
    """Prometheus with the chart's rules, and the series that it scrapes."""
    import synthetic_run

    folder = tmp_path_factory.mktemp("prometheus")
    with ExitStack() as stack:
        world = World(folder, stack, synthetic_run)
        (folder / "rules.yaml").write_text(
            yaml.safe_dump(find(objects, "PrometheusRule")["spec"])
        )
        config = {
            "global": {"evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": world.jobs(objects),
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        port = _free_port()
        command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ]
        log = stack.enter_context((folder / "log").open("wb"))
        process = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
        stack.callback(process.kill)
        prometheus = Prometheus(port)
        prometheus.wait("six targets", lambda: len(prometheus.query("up == 1")) == 6)
        # A rate needs two scrapes with something between them.
        for first, last in ((1, 30), (31, 60)):
            world.train(first, last)
            saved = f"evergrad_checkpoint_last_step == {last}"
            prometheus.wait(
                "the steps", lambda saved=saved: len(prometheus.query(saved)) == 2
            )
        prometheus.wait(
            "the operator's passes",
            lambda: prometheus.query(
                'evergrad_operator_reconcile_total{result="error"} == 2'
            ),
        )
        yield prometheus, world


def test_every_family_of_a_run_has_the_same_two_labels_from_any_source(
    watched: tuple[Prometheus, World],
) -> None:
    prometheus, _ = watched
    for series in (
        "evergrad_step",
        "evergrad_node_workers",
        "evergrad_run_generation",
        "evergrad_operator_run_created_timestamp_seconds",
    ):
        found = [one["metric"] for one in prometheus.query(series)]
        assert any(RUN.items() <= one.items() for one in found), found
        assert all(one["run"] == "docs-lm" for one in found)
        assert {one["run_namespace"] for one in found} <= {"team-a", "team-b"}
    # Nothing that is served gets in the way of what its target is called.
    assert prometheus.query('{__name__=~"evergrad_.+", exported_run!=""}') == []
    assert prometheus.query('{__name__=~"evergrad_.+", exported_run_namespace!=""}') == []
    without = (
        '{__name__=~"evergrad_.+", __name__!~"evergrad_operator_.+", run_namespace=""}'
    )
    assert prometheus.query(without) == []


def test_every_query_of_a_dashboard_has_a_result(
    watched: tuple[Prometheus, World],
) -> None:
    prometheus, _ = watched
    values = {"__rate_interval": "10s", "__range": "1m", "job": ".*"}
    values |= {"run_namespace": "team-a", "run": "docs-lm"}
    queries = [
        query
        for query in collect_queries(DOCUMENTS)
        if query.kind in ("panel", "annotation", "variable")
    ]

    def silent() -> set[str]:
        return {
            query.where for query in queries if not prometheus.query(query.fill(values))
        }

    # A rate needs two scrapes within its interval, which a busy machine may be too slow for at times.
    prometheus.wait("answers to all queries", lambda: silent() <= WITHOUT_DATA)
    assert silent() >= WITHOUT_DATA


def test_every_rule_is_evaluated_and_alerts_have_the_name_of_their_run_only(
    watched: tuple[Prometheus, World],
) -> None:
    prometheus, world = watched
    expected = {
        "TrainingRunFailed",
        "TrainingRunLossNonFinite",
        "TrainingRunCheckpointFailing",
    }
    assert prometheus.query('ALERTS{alertstate="firing"}') == []
    world.fail()

    def firing() -> list[dict[str, Any]]:
        alerts: list[dict[str, Any]] = prometheus.get("alerts")["alerts"]
        return [one for one in alerts if one["state"] == "firing"]

    prometheus.wait("the alerts", lambda: len(firing()) >= len(expected))
    by_name = {one["labels"]["alertname"]: one for one in firing()}
    assert set(by_name) == expected
    for name, alert in by_name.items():
        (of_catalogue,) = (one for one in ALERTS if one.name == name)
        labels = {"alertname": name, "severity": of_catalogue.severity}
        assert alert["labels"] == {**labels, **RUN}
        assert "team-a/docs-lm" in alert["annotations"]["summary"]
        assert "{{" not in alert["annotations"]["description"]
        assert alert["annotations"]["runbook_url"].endswith(f"/{name}.md")
    groups = prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {one.name for one in ALERTS}
    assert [rule["lastError"] for rule in rules if rule["health"] != "ok"] == []
