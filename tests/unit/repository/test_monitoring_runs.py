"""The chart's alerts on nine hours of a run, as the exporters show it to Prometheus minute by minute.

The clock is a number; what is scraped comes out of the exporters themselves.
"""

import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from bed import chart, toolbox
from prometheus_client import CollectorRegistry

from evergrad_operator.facts import RunFacts
from evergrad_operator.metrics import Facts, FactsCollector, Metrics
from evergrad_trainer.observers.history import Before
from evergrad_trainer.observers.prometheus import PrometheusExporter
from evergrad_trainer.records import EvaluationRecord, Event, EventType, RunInfo

HOURS = 9
MINUTES = HOURS * 60
SAVE_MINUTES, EVALUATION_MINUTES = 30, 4
# Minutes in which a pod of the run is there, and those in which rank 0 is in it.
PODS = {
    "docs-lm-0-0": (3, 180),
    "docs-lm-1-0": (3, 302),
    "docs-lm-0-1": (183, 302),
    "docs-lm-0-2": (361, MINUTES + 1),
    "docs-lm-1-1": (361, MINUTES + 1),
}
LEADS = {"docs-lm-0-0": (3, 180), "docs-lm-1-0": (180, 302), "docs-lm-0-2": (361, MINUTES + 1)}
OPERATORS = {"evergrad-a": (0, 100), "evergrad-b": (102, MINUTES + 1)}
META = {"namespace": "team-a", "pod_label_evergrad_dev_run": "docs-lm"}


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    if toolbox.missing(("helm",)):
        pytest.skip("helm is not built. make chart-lint builds it, with Go.")
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: Debian's package prometheus has it")
    return chart.render({"metrics": {"enabled": True}})


def relabel(endpoint: dict[str, Any]) -> dict[str, str]:
    """The labels that a monitor gives to a target of the run."""
    made = {}
    for rule in endpoint["relabelings"]:
        assert set(rule) == {"sourceLabels", "targetLabel"}
        (source,) = rule["sourceLabels"]
        made[rule["targetLabel"]] = META[source.removeprefix("__meta_kubernetes_")]
    return made


class Scrapes:
    """What Prometheus has scraped, a value a minute."""

    def __init__(self, wanted: set[str]) -> None:
        self._wanted = wanted
        self._values: dict[str, dict[int, float]] = defaultdict(dict)

    def take(self, minute: int, registry: CollectorRegistry, target: dict[str, str]) -> None:
        for family in registry.collect():
            for sample in family.samples:
                if sample.name not in self._wanted:
                    continue
                # Target labels win, and what was served under their names is put aside.
                served = {
                    f"exported_{name}" if name in target else name: value
                    for name, value in sample.labels.items()
                }
                labels = ", ".join(
                    f"{name}={json.dumps(value)}"
                    for name, value in sorted({**served, **target}.items())
                    if value
                )
                self._values[f"{sample.name}{{{labels}}}"][minute] = sample.value

    def render(self) -> list[dict[str, str]]:
        """The series of a test of promtool."""
        rendered = []
        for series, values in self._values.items():
            words = []
            for minute in range(MINUTES + 1):
                if minute in values:
                    words.append(repr(float(values[minute])))
                else:
                    words.append("stale" if minute - 1 in values else "_")
            rendered.append({"series": series, "values": " ".join(words)})
        return rendered


def find_phase(minute: int) -> str:
    for end, phase in (
        (2, "Pending"),
        (5, "Starting"),
        (300, "Running"),
        (303, "Suspending"),
        (360, "Suspended"),
        (365, "Starting"),
        (MINUTES, "Running"),
    ):
        if minute < end:
            return phase
    return "Complete"


class Run:
    """The run's exporters and the operator's, driven by one clock."""

    def __init__(
        self, synthetic: ModuleType, monitor: dict[str, str], scrapes: Scrapes
    ) -> None:
        self._synthetic = synthetic
        self._monitor = monitor
        self._scrapes = scrapes
        self._exporters: dict[str, PrometheusExporter] = {}
        self._stack = ExitStack()
        self._step = 0
        self._last_step: float | None = None

    def play(self, *, stalls_at: int | None = None) -> None:
        with self._stack:
            for minute in range(MINUTES + 1):
                self._move_pods(minute)
                is_training = find_phase(minute) == "Running"
                if is_training and (stalls_at is None or minute < stalls_at):
                    self._train(minute)
                for pod, exporter in self._exporters.items():
                    self._scrapes.take(minute, exporter.registry, {**self._monitor, "pod": pod})
                self._operate(minute)

    def _move_pods(self, minute: int) -> None:
        for pod, (begin, end) in PODS.items():
            if minute == begin:
                before = Before(highest_step=self._step, last_time=self._last_step)
                exporter = PrometheusExporter(
                    "docs-lm", port=0, host="127.0.0.1", before=before
                )
                self._exporters[pod] = self._stack.enter_context(closing(exporter))
            if minute == end:
                del self._exporters[pod]
        for pod, (begin, _) in LEADS.items():
            if minute == begin:
                self._lead(self._exporters[pod], minute * 60.0, takes_over=begin == 180)

    def _lead(self, exporter: PrometheusExporter, now: float, *, takes_over: bool) -> None:
        info = RunInfo(
            *("docs-lm", 1, 2, 2000, self._step, 8192, 32, 10**7),
            *("bf16", "dataParallel", "llama", "/runs/docs-lm"),
            takes_over=takes_over,
            last_time=self._last_step,
        )
        exporter.run_start(info)
        if takes_over:
            fields: dict[str, Any] = {
                "world_size": 1,
                "from_world_size": 2,
                "cause": "node_left",
            }
            exporter.event(
                Event(EventType.WORLD, now, self._step, 2, {**fields, "paused_seconds": 1.0})
            )
        else:
            began = {"process_start_time": now, "resumed_from": self._step or None}
            exporter.event(Event(EventType.START, now + 30, self._step, 1, began))

    def _train(self, minute: int) -> None:
        """A step in 20 s, a checkpoint every half hour, and four minutes of evaluation every hour."""
        leader = next(
            self._exporters[pod] for pod, (begin, end) in LEADS.items() if begin <= minute < end
        )
        now, of_hour = minute * 60.0, minute % 60
        if not 0 < of_hour <= EVALUATION_MINUTES:
            for time in (now - 40, now - 20, now):
                self._step += 1
                self._last_step = time
                leader.step_end(
                    self._synthetic.step_record(
                        self._step,
                        time=time,
                        step_seconds=20.0,
                        forward_backward_seconds=19.0,
                        data_seconds=0.5,
                        other_seconds=0.41,
                    )
                )
        elif of_hour == EVALUATION_MINUTES:
            seconds = EVALUATION_MINUTES * 60.0
            leader.evaluation_end(
                EvaluationRecord(self._step, 1, "heldOut", 2.5, 12.2, 4096, seconds, now)
            )
        if minute % SAVE_MINUTES == 0:
            saved = {"checkpoint": f"step-{self._step}", "seconds": 10.0, "kept": 3}
            more = {"blocking_seconds": 0.5, "bytes": 10**9}
            leader.event(Event(EventType.SAVE, now, self._step, 1, {**saved, **more}))

    def _operate(self, minute: int) -> None:
        for pod, (begin, end) in OPERATORS.items():
            if not begin <= minute < end:
                continue
            run = RunFacts(
                namespace="team-a",
                name="docs-lm",
                phase=find_phase(minute),
                restarts={"preempted": 1} if minute >= 181 else {},
                created_at=0.0,
                started_at=None if minute < 2 else 120.0 if minute < 360 else 21600.0,
                completed_at=MINUTES * 60.0 if minute >= MINUTES else None,
                progress=self._step / 2000,
                progressed_at=self._last_step,
            )
            metrics = Metrics()
            metrics.leader.set(1)
            metrics.reconciles.labels("success").inc(10 * (minute - begin))
            facts = Facts(0, 0.0, 10 * minute, {"pods": 0.0}, {"pods": 3}, {}, (run,))
            metrics.registry.register(FactsCollector(facts))
            self._scrapes.take(minute, metrics.registry, {"pod": pod, "namespace": "evergrad"})


@pytest.fixture
def judge(
    objects: list[dict[str, Any]], synthetic: ModuleType, tmp_path: Path
) -> Iterator[Any]:
    """A function that plays a run and says which alerts were firing at any minute of it."""
    (rule,) = (one for one in objects if one["kind"] == "PrometheusRule")
    (monitor,) = (one for one in objects if one["kind"] == "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    text = yaml.safe_dump(rule["spec"])
    names = [one["alert"] for group in rule["spec"]["groups"] for one in group["rules"]]
    assert names

    def play(**faults: int) -> set[str]:
        scrapes = Scrapes(set(re.findall(r"\bevergrad_\w+", text)))
        Run(synthetic, relabel(endpoint), scrapes).play(**faults)
        (tmp_path / "rules.yaml").write_text(text)
        tests = []
        for name in names:
            query = (
                f'max_over_time(ALERTS{{alertname="{name}", alertstate="firing"}}[{HOURS}h])'
            )
            tests.append(
                {"expr": f"count({query}) or vector(0)", "eval_time": f"{MINUTES}m"}
                | {"exp_samples": [{"labels": "{}", "value": 0}]}
            )
        test = {"interval": "1m", "input_series": scrapes.render(), "promql_expr_test": tests}
        document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
        (tmp_path / "cases.yaml").write_text(json.dumps(document))
        done = subprocess.run(
            ["promtool", "test", "rules", tmp_path / "cases.yaml"],
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        fired = set(re.findall(r'alertname=\\?"(\w+)\\?"', done.stdout + done.stderr))
        assert (done.returncode == 0) == (not fired), done.stdout + done.stderr
        return fired

    yield play


def test_no_alert_fires_on_a_run_that_loses_a_node_evaluates_and_is_suspended_for_an_hour(
    judge: Any,
) -> None:
    assert judge() == set()


def test_a_run_that_stands_still_from_the_seventh_hour_on_is_told_by_its_alerts_and_no_others(
    judge: Any,
) -> None:
    # Its checkpoint becomes stale later: three intervals are not over yet.
    assert judge(stalls_at=400) == {"TrainingRunStalled", "TrainingRunThroughputDrop"}
