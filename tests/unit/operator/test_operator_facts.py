"""Facts about runs that are exported as metrics, read off statuses and pods."""

from typing import Any

import pytest
from fake_kubernetes.simulation import make_trained
from prometheus_client import CollectorRegistry, generate_latest

from evergrad_operator.core.observe.facts import (
    count_nodes,
    count_phases,
    read_run,
    read_runs,
)
from evergrad_operator.core.observe.spec import is_managed_here
from evergrad_operator.edge.metrics.operator_metrics import FactsCollector, RunFactsSource

KEY = ("ns", "run")
WHO = 'run="run",run_namespace="ns"'
GATE = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}


def make_pod(spec: dict[str, Any], phase: str, role: str = "node", **more: Any) -> Any:
    metadata = {"labels": {"evergrad.dev/role": role}, **more}
    return {"metadata": metadata, "spec": spec, "status": {"phase": phase}}


PODS = [
    make_pod(GATE, "Pending"),
    make_pod(GATE, "Pending"),
    make_pod({}, "Pending"),
    make_pod({"schedulingGates": [{"name": "other"}]}, "Pending"),
    make_pod({"nodeName": "n1"}, "Pending"),
    make_pod({"nodeName": "n1"}, "Running"),
    # None of these is a live node.
    make_pod({"nodeName": "n1"}, "Running", "coordinator"),
    make_pod({"nodeName": "n1"}, "Running", "evaluation"),
    make_pod({"nodeName": "n1"}, "Succeeded"),
    make_pod({"nodeName": "n1"}, "Failed"),
    make_pod({"nodeName": "n1"}, "Running", deletionTimestamp="2026-01-01T00:00:00Z"),
]


def scrape(status: dict[str, Any], pods: list[Any]) -> str:
    raw = {"metadata": {}, "status": {"phase": "Running", **status}}
    runs = read_runs({KEY: raw}, now=0.0, pods_of=lambda key: pods if key == KEY else [])
    registry = CollectorRegistry()
    registry.register(FactsCollector(RunFactsSource(0, 0.0, 0, {}, {}, {}, runs)))
    return generate_latest(registry).decode()


def test_each_live_pod_of_a_node_counts_in_one_state() -> None:
    counts = {"queued": 2, "unscheduled": 2, "starting": 1, "running": 1}
    assert count_nodes(PODS) == counts
    text = scrape({"nodes": {"max": 8}}, PODS)
    for state, count in counts.items():
        assert f'evergrad_operator_run_nodes{{{WHO},state="{state}"}} {count}.0' in text
    assert f"evergrad_operator_run_nodes_max{{{WHO}}} 8.0" in text
    assert "evergrad_operator_run_nodes{" not in scrape({}, [])


def test_replaced_pods_are_counted_from_zero() -> None:
    name = f"evergrad_operator_run_pods_replaced_total{{{WHO}}}"
    assert f"{name} 0.0" in scrape({}, [])
    assert f"{name} 3.0" in scrape(
        {"restarts": {"total": 3, "byCause": {"NodeLost": 3}}}, []
    )


@pytest.mark.parametrize(
    ("preparation", "share"),
    [
        ({"work": "tokenize", "bytesDone": 25, "bytesTotal": 100}, 0.25),
        ({"work": "tokenize", "bytesDone": 250, "bytesTotal": 100}, 1.0),
        ({"work": "wait"}, 0.0),
        ({"work": "done"}, 1.0),
    ],
)
def test_the_completed_share_of_the_preparation_is_between_0_and_1(
    preparation: dict[str, Any], share: float
) -> None:
    text = scrape({"preparation": {**preparation, "tokens": 7}}, [])
    work = preparation["work"]
    assert f'evergrad_operator_run_preparation_ratio{{{WHO},work="{work}"}} {share}' in text
    assert f"evergrad_operator_run_preparation_tokens{{{WHO}}} 7.0" in text


def test_a_run_without_preparation_exports_no_preparation_series() -> None:
    assert "run_preparation_ratio{" not in scrape({}, [])
    assert "run_preparation_tokens{" not in scrape({}, [])


def stalled(reason: str, status: str = "True") -> dict[str, Any]:
    condition = {"type": "Stalled", "status": status, "reason": reason}
    return {"conditions": [{"type": "Ready", "status": "False"}, condition]}


def test_a_run_that_needs_a_person_exports_its_reason() -> None:
    waits = {"phase": "Waiting", "reason": "ImagePullFailed"}
    text = scrape({**waits, **stalled("ImagePullFailed")}, [])
    sample = f'{{reason="ImagePullFailed",{WHO}}} 1.0'
    assert f"evergrad_operator_run_stalled{sample}" in text
    assert f"evergrad_operator_run_waiting{sample}" in text
    # A group that continues to train with an unreadable spec needs a person, too.
    text = scrape(stalled("InvalidSpec"), [])
    assert f'evergrad_operator_run_stalled{{reason="InvalidSpec",{WHO}}} 1.0' in text
    assert "evergrad_operator_run_waiting{" not in text


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"phase": "Waiting", "reason": "Queued", **stalled("NothingInTheWay", "False")},
        # This has a separate alert.
        {"phase": "Failed", **stalled("UserError")},
        {"phase": "Complete", **stalled("UserError")},
        {"conditions": ["Stalled", {"type": "Stalled"}, None]},
    ],
)
def test_a_run_that_needs_no_person_exports_no_reason(status: dict[str, Any]) -> None:
    assert "evergrad_operator_run_stalled{" not in scrape(status, [])


@pytest.mark.parametrize("kind", ["training", "script"])
def test_run_info_has_the_kind_which_decides_whether_steps_are_always_reported(
    kind: str,
) -> None:
    raw = {"metadata": {}, "spec": {kind: {}}, "status": {"phase": "Running"}}
    registry = CollectorRegistry()
    runs = read_runs({KEY: raw}, now=0.0)
    registry.register(FactsCollector(RunFactsSource(0, 0.0, 0, {}, {}, {}, runs)))
    sample = f'evergrad_operator_run_info{{kind="{kind}",{WHO}}} 1.0'
    assert sample in generate_latest(registry).decode()


def test_unknown_reasons_are_exported_under_one_value() -> None:
    status = {"phase": "Waiting", "reason": "x" * 300, **stalled("no word of ours")}
    text = scrape(status, [])
    assert f'evergrad_operator_run_stalled{{reason="Other",{WHO}}} 1.0' in text
    assert f'evergrad_operator_run_waiting{{reason="Other",{WHO}}} 1.0' in text


def test_a_scrape_parses_no_status_and_shows_the_same_as_parsing_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = make_trained()
    for number in range(5):
        simulation.create_run(f"more{number}")
        simulation.settle(("ns", f"more{number}"))
    simulation.start_pods()
    simulation.end_pod("run-1-0", 137)
    simulation.store.remove("pods", "ns", "more0-0-0")
    simulation.store.remove("trainingruns", "ns", "more1")
    simulation.store.change(
        "trainingruns", "ns", "more2", {"status": {"phase": "Complete"}}
    )
    simulation.store.change(
        "trainingruns",
        "ns",
        "more3",
        {"status": {"phase": "Failed", "completionTime": "2020-01-01T00:00:00Z"}},
    )
    simulation.store.change(
        "trainingruns", "ns", "more4", {"spec": {"managedBy": "example.org/another"}}
    )

    cache = simulation.cache
    managed = {key: raw for key, raw in cache.runs().items() if is_managed_here(raw)}
    expected = read_runs(managed, now=simulation.now, pods_of=cache.pods)
    phases = count_phases(managed.values())
    monkeypatch.setattr(
        "evergrad_operator.edge.cache.facts_index.read_run", lambda *_: pytest.fail()
    )
    index = cache.store.facts
    found = index.read(simulation.now)
    assert sorted(found, key=lambda one: one.name) == sorted(
        expected, key=lambda one: one.name
    )
    assert {one.name: dict(one.nodes) for one in found}["more0"] == {"running": 1}
    assert index.count_phases() == phases


def test_an_unreadable_status_hides_its_own_series_but_not_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    simulation = make_trained()
    known = read_run

    def fail(key: Any, raw: Any, nodes: Any) -> Any:
        if raw["status"].get("phase") == "odd":
            raise ValueError("odd")
        return known(key, raw, nodes)

    monkeypatch.setattr("evergrad_operator.edge.cache.facts_index.read_run", fail)
    simulation.store.change("trainingruns", *KEY, {"status": {"phase": "odd"}})
    kept = simulation.cache.run(KEY)
    assert kept is not None and kept["status"]["phase"] == "odd"
    assert simulation.cache.store.facts.read(simulation.now) == ()
    assert "ns/run: its metrics cannot be read" in caplog.text
    simulation.store.change("trainingruns", *KEY, {"status": {"phase": "Running"}})
    assert len(simulation.cache.store.facts.read(simulation.now)) == 1
