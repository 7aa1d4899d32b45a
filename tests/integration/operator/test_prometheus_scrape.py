"""A real Prometheus scrapes the exporter; promtool finds nothing to complain about; the documented queries
have answers."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from patience import PATIENCE

from evergrad_monitoring.queries import collect_queries
from evergrad_trainer.base.records import EvaluationRecord, Event, EventType, RunInfo
from evergrad_trainer.observers.prometheus import PrometheusExporter

TESTS = Path(__file__).parents[2]
DOCUMENTS = TESTS.parent / "docs"


@pytest.fixture(scope="module")
def synthetic() -> ModuleType:
    """tests/synthetic_run.py."""
    spec = importlib.util.spec_from_file_location(
        "synthetic_run", TESTS / "synthetic_run.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["synthetic_run"] = module
    spec.loader.exec_module(module)
    return module


def _require(binary: str) -> str:
    path = shutil.which(binary)
    if path is None:
        message = f"{binary} is not on PATH; Debian's package 'prometheus' has it"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    exporter = PrometheusExporter("docs-lm", port=0, host="127.0.0.1")
    yield exporter
    exporter.close()


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    port: int

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result vector of an instant query."""
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return list(body["data"]["result"])

    def wait_for(self, expression: str, value: float) -> None:
        """Until the expression has this one value."""
        until = time.monotonic() + PATIENCE
        seen: object = None
        while time.monotonic() < until:
            try:
                seen = self.query(expression)
            except OSError as error:
                seen = error
            if (
                isinstance(seen, list)
                and len(seen) == 1
                and float(seen[0]["value"][1]) == value
            ):
                return
            time.sleep(0.1)
        pytest.fail(
            f"{expression} did not become {value} within {PATIENCE} s, but is {seen}"
        )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def prometheus(tmp_path: Path, exporter: PrometheusExporter) -> Iterator[Prometheus]:
    binary = _require("prometheus")
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [
            {
                "job_name": "trainer",
                "static_configs": [{"targets": [f"127.0.0.1:{exporter.port}"]}],
            }
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    port = _free_port()
    command = [
        binary,
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            yield Prometheus(port)
        finally:
            process.kill()


def _train(exporter: PrometheusExporter, synthetic: ModuleType) -> None:
    now = time.time()
    exporter.run_start(
        RunInfo(
            "docs-lm",
            1,
            2,
            100,
            0,
            8192,
            32,
            10_000_000,
            "bf16",
            "dataParallel",
            "llama",
            "/runs/docs-lm",
        )
    )
    exporter.event(
        Event(
            EventType.START,
            now - 40,
            0,
            1,
            {"process_start_time": now - 42, "resumed_from": None},
        )
    )
    for step in range(1, 61):
        exporter.step_end(synthetic.step_record(step, time=now - 30 + step / 2))
    exporter.evaluation_end(EvaluationRecord(60, 1, "heldOut", 2.5, 12.2, 4096, 0.5, now))
    saved = {
        "checkpoint": "step-60",
        "seconds": 1.0,
        "blocking_seconds": 0.1,
        "bytes": 10**8,
        "kept": 1,
    }
    exporter.event(Event(EventType.SAVE, now, 60, 1, saved))


def test_prometheus_scrapes_the_values_and_answers_the_documented_queries(
    exporter: PrometheusExporter, prometheus: Prometheus, synthetic: ModuleType
) -> None:
    prometheus.wait_for('up{job="trainer"}', 1)
    prometheus.wait_for("evergrad_steps_total", 0)
    _train(exporter, synthetic)
    prometheus.wait_for("evergrad_step", 60)
    (step,) = prometheus.query("evergrad_step")
    assert step["metric"]["run"] == "docs-lm"
    prometheus.wait_for("evergrad_tokens_total", 60 * 8192)
    prometheus.wait_for('evergrad_loss{split="eval"}', 2.5)
    prometheus.wait_for("count(evergrad_info)", 1)
    # The newest value: a scrape may come between two updates.
    prometheus.wait_for("evergrad_checkpoint_last_step", 60)
    queries = [
        query.expression
        for query in collect_queries(DOCUMENTS)
        if query.where.startswith("reference/metrics.md")
    ]
    assert len(queries) >= 5
    for query in queries:
        # A comparison has no result if it is false; without it there is a result.
        assert prometheus.query(query.partition(" > ")[0]), query
    exporter.event(Event(EventType.END, time.time(), 60, 1, {"exit_code": 0}))
    prometheus.wait_for("evergrad_exit_code", 0)


def test_promtool_reports_no_problem(
    exporter: PrometheusExporter, synthetic: ModuleType
) -> None:
    promtool = _require("promtool")
    _train(exporter, synthetic)
    exporter.event(
        Event(
            EventType.RESTORED, time.time(), 0, 1, {"checkpoint": "step-1", "seconds": 1.0}
        )
    )
    exporter.event(Event(EventType.END, time.time(), 60, 1, {"exit_code": 0}))
    with urllib.request.urlopen(
        f"http://127.0.0.1:{exporter.port}/metrics", timeout=PATIENCE
    ) as answer:
        text = answer.read()
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=text,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
