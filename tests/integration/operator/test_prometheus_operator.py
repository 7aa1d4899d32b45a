"""Prometheus Operator's own code makes a configuration of the chart's monitors and rules, with which Prometheus
finds and labels the pods of runs, and no others."""

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from prometheus_client import CollectorRegistry, Gauge

from bed import chart, prometheus, toolbox
from bed.prometheus import Configuration
from bed.shell import BedError, wait_until
from evergrad_monitoring.alerts import ALERTS
from evergrad_trainer.observers.metrics_server import MetricsServer

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
KINDS = ("PodMonitor", "ServiceMonitor", "PrometheusRule")
LABELS = {"release": "stack"}
NAMESPACES = ("evergrad-system", "team-a", "team-b", "monitoring")
OF_RUN = {"app.kubernetes.io/managed-by": "evergrad", "evergrad.dev/run": "docs-lm"}


@pytest.fixture(scope="module", autouse=True)
def _tools() -> None:
    """Building takes longer than a test may."""
    if missing := toolbox.missing(("helm", "promconfig", "prometheus")):
        pytest.skip(
            f"{', '.join(missing)}: not built. make test-long builds them, with Go."
        )


def render(**values: Any) -> list[dict[str, Any]]:
    """The chart's monitors and rules."""
    metrics = {"enabled": True, "interval": "1s", "labels": LABELS}
    rendered = chart.render({"metrics": metrics, **values})
    return [one for one in rendered if one["kind"] in KINDS]


def configure(objects: list[dict[str, Any]], **server: Any) -> Configuration:
    """Return the operator's configuration for a Prometheus that selects LABELS."""
    described = prometheus.describe_server(LABELS, interval="1s", **server)
    return prometheus.configure(described, objects, namespaces=NAMESPACES)


def test_prometheus_accepts_the_configuration_generated_from_the_monitors_and_every_rule(
    tmp_path: Path,
) -> None:
    made = configure(render())
    runs = [f"podMonitor/evergrad-system/evergrad-runs/{number}" for number in (0, 1)]
    operator = "serviceMonitor/evergrad-system/evergrad/0"
    assert list(made.jobs) == [operator, *runs] or list(made.jobs) == [*runs, operator]
    assert list(made.rules) == ["evergrad-system-evergrad.yaml"]
    for name in runs:
        (found,) = made.jobs[name]["kubernetes_sd_configs"]
        assert found["role"] == "pod" and "namespaces" not in found
        assert made.jobs[name]["scrape_interval"] == "1s"
    (found,) = made.jobs[operator]["kubernetes_sd_configs"]
    assert found["role"] == "endpointslice"
    assert found["namespaces"]["names"] == ["evergrad-system"]
    assert made.jobs[operator]["metrics_path"] == "/metrics"
    said = prometheus.check(made, tmp_path)
    assert f"{len(ALERTS)} rules found" in said


def test_only_listed_namespaces_are_searched_and_coordinators_only_with_an_open_port() -> (
    None
):
    scope = {"scope": "namespaced", "watchNamespaces": ["team-a", "team-b"]}
    jobs = configure(render(rbac=scope, runs={"metricsFrom": []})).jobs
    (name,) = (one for one in jobs if one.startswith("podMonitor"))
    (found,) = jobs[name]["kubernetes_sd_configs"]
    assert sorted(found["namespaces"]["names"]) == ["team-a", "team-b"]
    kept = [one for one in jobs[name]["relabel_configs"] if one.get("action") == "keep"]
    assert {"metrics"} == {
        one["regex"] for one in kept if "port_name" in str(one["source_labels"])
    }


def test_monitors_that_a_prometheus_does_not_select_by_label_are_not_scraped() -> None:
    other = prometheus.describe_server({"release": "other"}, interval="1s")
    made = prometheus.configure(other, render(), namespaces=NAMESPACES)
    assert made.jobs == {} and made.rules == {}


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("PodMonitor", ("podMetricsEndpoints", "intervall", "1s"), "unknown field"),
        ("PodMonitor", ("podMetricsEndpoints", "scrapeTimeout", "9s"), "scrapeTimeout"),
        (
            "ServiceMonitor",
            ("endpoints", "relabelings", [{"targetLabel": "a b"}]),
            "invalid 'target_label'",
        ),
    ],
)
def test_prometheus_operator_refuses_an_invalid_monitor(
    kind: str, change: tuple[str, str, Any], reason: str
) -> None:
    objects = copy.deepcopy(render())
    endpoints, key, value = change
    (monitor,) = (one for one in objects if one["kind"] == kind)
    monitor["spec"][endpoints][0][key] = value
    with pytest.raises(BedError, match=reason):
        configure(objects)


def test_prometheus_operator_refuses_a_rule_that_is_not_promql() -> None:
    objects = copy.deepcopy(render())
    (rule,) = (one for one in objects if one["kind"] == "PrometheusRule")
    rule["spec"]["groups"][0]["rules"][0]["expr"] = "sum(("
    with pytest.raises(BedError, match="could not parse expression"):
        configure(objects)


# ---- Prometheus with that configuration --------------------------------------------------------------------


def make_pod(
    namespace: str,
    name: str,
    ports: dict[str, int],
    *,
    phase: str = "Running",
    labels: dict[str, str],
) -> dict[str, Any]:
    """A pod as the API server would list it, on this machine."""
    container = {
        "name": "trainer",
        "ports": [
            {"name": key, "containerPort": port, "protocol": "TCP"}
            for key, port in ports.items()
        ],
    }
    return {
        "metadata": {"namespace": namespace, "name": name, "uid": name, "labels": labels},
        "spec": {"nodeName": "n1", "containers": [container]},
        "status": {"phase": phase, "podIP": "127.0.0.1", "hostIP": "127.0.0.1"},
    }


class ApiServer(ThreadingHTTPServer):
    """Lists objects by path, and holds every watch open without news."""

    daemon_threads = True

    def __init__(self, lists: dict[str, tuple[str, str, list[dict[str, Any]]]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lists = lists
        self.is_over = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.is_over.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        version, kind, items = self.server.lists.get(path, ("v1", "PodList", []))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        if "watch=" in query:
            self.end_headers()
            self.server.is_over.wait()
            return
        body = {"apiVersion": version, "kind": kind, "metadata": {"resourceVersion": "1"}}
        text = json.dumps({**body, "items": items}).encode()
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


def serve_gauge(name: str, **labels: str) -> MetricsServer:
    """An endpoint with one series of the value 1."""
    registry = CollectorRegistry()
    gauge = Gauge(name, "Is.", tuple(labels), registry=registry)
    (gauge.labels(*labels.values()) if labels else gauge).set(1)
    return MetricsServer(registry, port=0, host="127.0.0.1")


@pytest.fixture
def endpoints() -> Iterator[dict[str, int]]:
    """Ports by served content."""
    served = {
        "node": serve_gauge("evergrad_step", run="docs-lm"),
        "coordinator": serve_gauge("evergrad_run_generation"),
        "operator": serve_gauge("evergrad_operator_leader"),
        "other": serve_gauge("other"),
    }
    yield {name: one.port for name, one in served.items()}
    for one in served.values():
        one.close()


def test_prometheus_scrapes_live_nodes_coordinators_and_operators_with_run_labels(
    endpoints: dict[str, int], tmp_path: Path
) -> None:
    node = {**OF_RUN, "evergrad.dev/role": "node"}
    other = {"metrics": endpoints["other"]}
    pods = [
        make_pod("team-a", "docs-lm-0-0", {"metrics": endpoints["node"]}, labels=node),
        make_pod("team-b", "docs-lm-0-0", {"metrics": endpoints["node"]}, labels=node),
        make_pod(
            "team-a",
            "docs-lm-coordinator-0",
            {"join": 1, "status": endpoints["coordinator"]},
            labels={**OF_RUN, "evergrad.dev/role": "coordinator"},
        ),
        # A pod that has ended, a pod with another role, and a pod of another owner.
        make_pod("team-a", "docs-lm-1-0", other, phase="Succeeded", labels=node),
        make_pod(
            "team-a", "e", other, labels={**OF_RUN, "evergrad.dev/role": "evaluation"}
        ),
        make_pod("team-a", "web", other, labels={"app": "web"}),
    ]
    (service,) = (one for one in chart.render({}) if one["kind"] == "Service")
    name = service["metadata"]["name"]
    slices = {
        "metadata": {
            "namespace": "evergrad-system",
            "name": f"{name}-x",
            "labels": {"kubernetes.io/service-name": name},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": endpoints["operator"], "protocol": "TCP"}],
        "endpoints": [{"addresses": ["127.0.0.1"], "conditions": {"ready": True}}],
    }
    beside = "/namespaces/evergrad-system"
    lists = {
        "/api/v1/pods": ("v1", "PodList", pods),
        f"/api/v1{beside}/services": ("v1", "ServiceList", [service]),
        f"/apis/discovery.k8s.io/v1{beside}/endpointslices": (
            "discovery.k8s.io/v1",
            "EndpointSliceList",
            [slices],
        ),
    }
    with closing(ApiServer(lists)) as api:
        made = configure(render(), api={"host": f"http://127.0.0.1:{api.server_port}"})
        with prometheus.serve(made, tmp_path) as client:
            wait_until(
                "four targets that are up",
                lambda: len(client.query("up == 1")) == 4,
                seconds=PATIENCE,
                pause=0.5,
            )
            # Rules that were evaluated before the first scrape saw none; the next evaluation sees it.
            wait_until(
                "silence of the alert of a leader's absence",
                lambda: not client.query('ALERTS{alertname="TrainingOperatorDown"}'),
                seconds=PATIENCE,
                pause=0.5,
            )
            found = {
                series: [one["metric"] for one in client.query(series)]
                for series in (
                    "evergrad_step",
                    "evergrad_run_generation",
                    "evergrad_operator_leader",
                    "other",
                )
            }
    assert {one["run_namespace"] for one in found["evergrad_step"]} == {"team-a", "team-b"}
    for one in found["evergrad_step"]:
        assert one["run"] == "docs-lm" and "exported_run" not in one
        assert one["namespace"] == one["run_namespace"] and one["pod"] == "docs-lm-0-0"
        assert one["job"] == "evergrad-system/evergrad-runs"
    (generation,) = found["evergrad_run_generation"]
    assert (generation["run_namespace"], generation["run"]) == ("team-a", "docs-lm")
    (leader,) = found["evergrad_operator_leader"]
    assert leader["job"] == name and "run" not in leader
    assert found["other"] == []
