"""Figures that ``make bench-cluster`` makes of what it reads: counters, events of a watch, seconds of
CPU, quantiles."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS, END_TO_END = ROOT / "tools/benchmarks", ROOT / "tests/e2e"
# Requests to an API server 1.34: requests caused by runs, background requests, and reads.
COUNTED = (
    ("POST", "pods", "", 201, "5"),
    ("POST", "pods", "", 409, "1"),
    ("POST", "pods", "binding", 201, "5"),
    ("PATCH", "pods", "status", 200, "5"),
    ("POST", "events", "", 201, "7"),
    ("POST", "trainingruns", "", 201, "1"),
    ("APPLY", "trainingruns", "status", 200, "3"),
    ("PUT", "endpointslices", "", 200, "2"),
    ("PUT", "leases", "", 200, "1.234e+03"),
    ("PATCH", "nodes", "status", 200, "400"),
    ("POST", "selfsubjectaccessreviews", "", 201, "9"),
    ("LIST", "pods", "", 200, "77"),
)
METRICS = "# TYPE apiserver_request_total counter\n" + "".join(
    f'apiserver_request_total{{code="{code}",component="apiserver",dry_run="",group="",resource="{resource}",'
    f'scope="resource",subresource="{subresource}",verb="{verb}",version="v1"}} {count}\n'
    for verb, resource, subresource, code, count in COUNTED
)
METRICS += (
    'apiserver_request_duration_seconds_bucket{resource="pods",verb="POST",le="0.1"} 5\n'
)


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    sys.path[:0] = [str(BENCHMARKS), str(END_TO_END)]
    try:
        import cluster_evergrad
        import cluster_kubeflow
        import cluster_load
        import cluster_meters
        import cluster_pods
        import cluster_scale

        yield SimpleNamespace(
            load=cluster_load,
            meters=cluster_meters,
            scale=cluster_scale,
            pods=cluster_pods,
            evergrad=cluster_evergrad.Evergrad,
            kubeflow=cluster_kubeflow,
        )
    finally:
        del sys.path[:2]


def test_writes_are_counted_by_writer_and_background_writes_are_excluded(
    bench: SimpleNamespace,
) -> None:
    writes = bench.meters.parse_writes(METRICS)
    assert sum(writes.values()) == 29
    writers = bench.meters.by_writer(writes, bench.evergrad.owns, events=2)
    assert writers == {"operator": 11, "scheduler": 10, "kwok": 5, "client": 1, "kcm": 2}
    assert bench.meters.describe(writes, 1)["POST pods (409)"] == 1
    assert bench.meters.describe(writes, 2)["APPLY trainingruns/status"] == 1.5


def pod(
    name: str, run: str, *, phase: str = "Pending", role: str = "node"
) -> dict[str, Any]:
    labels = {"evergrad.dev/run": run, "evergrad.dev/role": role}
    return {"metadata": {"name": name, "labels": labels}, "status": {"phase": phase}}


def test_a_run_counts_from_its_fourth_pod_separately_from_replacements_and_coordinators(
    bench: SimpleNamespace,
) -> None:
    seen, run_of = bench.load.Seen(), bench.evergrad.run_of
    for number in range(5):
        seen.take("ADDED", pod(f"a-{number}", "a"), run_of, at=number)
        seen.take(
            "MODIFIED", pod(f"a-{number}", "a", phase="Running"), run_of, at=10 + number
        )
    seen.take("ADDED", pod("b-0", "b"), run_of, at=7)
    seen.take("ADDED", pod("a-coordinator", "a", role="coordinator"), run_of, at=0)
    seen.take("DELETED", pod("a-4", "a", phase="Running"), run_of, at=20)
    assert seen.whole(seen.created) == {"a": 3}
    assert seen.whole(seen.running) == {"a": 13}
    assert (seen.extra, seen.others, seen.deleted) == (1, 1, 1)


def test_an_operator_is_steady_after_the_last_second_in_which_it_worked(
    bench: SimpleNamespace,
) -> None:
    times = [1.5, 2.5, 3.5, 4.5, 5.5, 6.5]
    assert bench.scale.find_steady(times, [1.0, 1.9, 2.0, 2.5, 2.55, 2.6]) == 4.5
    assert bench.scale.find_steady(times, [1.0] * 6) == 1.5
    assert bench.scale.find_steady(times, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == float("inf")


def test_quantiles_are_measured_values(bench: SimpleNamespace) -> None:
    values = [float(number) for number in range(1, 101)]
    assert [bench.load.quantile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [
        50,
        95,
        99,
        100,
    ]
    assert bench.load.quantile([3.0, 1.0, 2.0], 0.99) == 3.0


def make_sample(
    side: str, seconds: float, *, writes: float, runs: int = 4
) -> dict[str, Any]:
    return {
        "runs": runs,
        "rate": 10.0,
        "taken": "2026-11-23 22:00",
        "version": "Trainer v2.3.0, JobSet v0.12.0" if side == "kubeflow" else "1a2b3c",
        "created": [seconds] * runs,
        "running": [seconds] * runs,
        "created_seconds": seconds * runs,
        "busy": 0.5,
        "writes": writes,
        "writers": {"operator": writes},
    }


def test_rows_compare_the_sides_with_the_goals_of_the_load(
    bench: SimpleNamespace,
) -> None:
    sides = {
        "evergrad": make_sample("evergrad", 0.2, writes=30),
        "kubeflow": make_sample("kubeflow", 0.3, writes=50),
    }
    found = {
        (name, row.what.partition(": ")[2], row.name): row
        for name in ("100", "200", "500")
        for row in bench.scale.make_rows({name: sides})
    }
    for name in ("100", "200", "500"):
        for share in ("p50", "p95", "p99"):
            assert found[name, "apply → all 4 pods created, kubeflow", share].value == 0.3
        assert found[name, "apply → all 4 pods created, evergrad", "p99"].goal == "<= 0.3"
        assert found[name, "apply → all 4 pods created, evergrad", "p99"].is_reached
        assert found[name, "sustained", "ours / theirs"].value == pytest.approx(1.5)
        assert found[name, "API writes a run", "ours / theirs"].value == pytest.approx(0.6)
    goals = {
        name: (
            found[name, "sustained", "ours / theirs"].goal,
            found[name, "API writes a run", "ours / theirs"].goal,
        )
        for name in ("100", "200", "500")
    }
    assert goals == {"100": ("", "<= 0.7"), "200": (">= 1.5", ""), "500": (">= 1.5", "")}
    note = found["100", "API writes a run", "ours / theirs"].note
    assert note == (
        "1a2b3c, 2026-11-23 22:00; Trainer v2.3.0, JobSet v0.12.0, 2026-11-23 22:00"
    )
    alone = bench.scale.make_rows({"200": {"evergrad": sides["evergrad"]}})
    assert alone and all(row.goal == "" for row in alone)


def test_samples_of_another_kubeflow_release_are_excluded_from_a_ratio(
    bench: SimpleNamespace, tmp_path: Path
) -> None:
    file = tmp_path / "samples.json"
    assert bench.scale.read_samples(file) == {}
    ours = make_sample("evergrad", 0.2, writes=30)
    theirs = make_sample("kubeflow", 0.3, writes=50)
    older = {**theirs, "version": "Trainer v2.2.1, JobSet v0.11.1"}
    samples = {
        "latency": {"kubeflow": {"writes": 50}},
        "100": {"evergrad": ours, "kubeflow": theirs},
        "200": {"evergrad": ours, "kubeflow": older},
    }
    file.write_text(json.dumps(samples), encoding="utf-8")
    assert bench.kubeflow.Kubeflow.version() == theirs["version"]
    assert bench.scale.read_samples(file) == {
        "100": {"evergrad": ours, "kubeflow": theirs},
        "200": {"evergrad": ours},
    }


def test_a_kill_is_measured_to_the_next_step_of_other_pods_and_to_the_replacements(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(step: int, at: float, *, generation: int, world_size: int) -> dict[str, Any]:
        return {
            "step": step,
            "time": at,
            "generation": generation,
            "world_size": world_size,
        }

    rows = [row(step, 90.0 + step, generation=1, world_size=2) for step in range(1, 9)]

    def kill() -> None:
        rows.append(
            row(9, 100.5, generation=1, world_size=2)
        )  # was under way and is written after the signal
        rows.append(row(8, 101.5, generation=2, world_size=1))
        rows.append(row(9, 102.5, generation=2, world_size=1))
        rows.append(row(10, 107.0, generation=3, world_size=2))

    monkeypatch.setattr(bench.pods.time, "time", lambda: 100.0)
    sample = bench.pods.measure_kill(lambda: list(rows), kill)
    assert sample == {"rest": 1.5, "replacement": 7.0, "lost_steps": 2.0, "step": 1.0}


def test_rows_of_pods_compare_evergrad_with_stock_torchrun(bench: SimpleNamespace) -> None:
    ours = {"rest": 1.0, "replacement": 8.0, "lost_steps": 0.0, "step": 0.5}
    theirs = {"rest": 20.0, "replacement": 24.0, "lost_steps": 3.0, "step": 0.5}
    samples = {
        "quickstart": [{"first_step": 31.0}],
        "resume": [{"suspend": 4.0, "pods": 3.0, "resume": 16.0}],
        "recipe": [ours] * 3,
        "stock_default": [theirs],
    }
    found = {
        (row.what.split(" → ")[-1], row.name): row for row in bench.pods.make_rows(samples)
    }
    assert all("taken" not in row.note for row in found.values())
    times = {
        "quickstart": "2026-11-21",
        "recipe": "2026-11-27",
        "stock_default": "2026-11-21",
    }
    late = {row.name: row.note for row in bench.pods.make_rows(samples, times)}
    assert late["median"].endswith("; quickstart taken 2026-11-21")
    assert late["stock default / recipe"] == "stock_default taken 2026-11-21"
    assert "taken" not in late["TrainingRun, recipe"]
    assert found["first step", "median"].is_reached is False
    whole = "a run of 3 pods, suspended and resumed"
    assert found[whole, "suspend → Suspended"].goal == ""
    assert found[whole, "resume → next new step"].value == 16
    assert found[whole, "resume → next new step"].is_reached is False
    assert found["next step of the rest", "TrainingRun, recipe"].is_reached
    assert found["… next step of the rest", "stock default / recipe"].value == 20
    assert found["… replacement trains", "stock default / recipe"].value == 3
    assert found["finished steps trained again", "TrainingRun, recipe"].is_reached
