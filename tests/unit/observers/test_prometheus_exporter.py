"""The Prometheus endpoint: its series, its start and end, and that the documentation lists exactly these
series."""

import json
import math
import os
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from patience import PATIENCE
from prometheus_client.parser import text_string_to_metric_families

from evergrad_common.causes import CHANGES, TROUBLES
from evergrad_manifest.errors import ConfigurationError
from evergrad_trainer.base.records import EvaluationRecord, Event, EventType, RunInfo
from evergrad_trainer.node.metrics import NodeMetrics
from evergrad_trainer.observers.goodput import CAUSES
from evergrad_trainer.observers.history import Before
from evergrad_trainer.observers.instruments import PHASES
from evergrad_trainer.observers.prometheus import PrometheusExporter
from evergrad_trainer.observers.relay import Relay, deliver
from evergrad_trainer.worker.liveness import WorkerHeartbeat

INFO = RunInfo(
    "docs-lm",
    3,
    2,
    100,
    40,
    8192,
    32,
    10_000_000,
    "bf16",
    "dataParallel",
    "llama",
    "/runs/docs-lm",
)
DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def exporter() -> Iterator[PrometheusExporter]:
    exporter = PrometheusExporter(
        "docs-lm", port=0, host="127.0.0.1", before=Before(highest_step=42, last_time=95.0)
    )
    yield exporter
    exporter.close()


def _scrape(exporter: PrometheusExporter) -> str:
    with urllib.request.urlopen(
        f"http://127.0.0.1:{exporter.port}/metrics", timeout=PATIENCE
    ) as answer:
        return str(answer.read().decode())


def _samples(exporter: PrometheusExporter) -> Samples:
    samples: Samples = {}
    for family in text_string_to_metric_families(_scrape(exporter)):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "run"}
            samples[sample.name, tuple(sorted(labels.items()))] = sample.value
    return samples


def _train(exporter: PrometheusExporter, synthetic: ModuleType) -> None:
    exporter.run_start(INFO)
    exporter.event(
        Event(
            EventType.START, 101.0, 40, 3, {"process_start_time": 100.0, "resumed_from": 40}
        )
    )
    exporter.event(
        Event(EventType.RESTORED, 103.0, 40, 3, {"checkpoint": "step-40", "seconds": 1.5})
    )
    for step in range(41, 61):
        exporter.step_end(
            synthetic.step_record(step, generation=3, time=105.0 + (step - 41) * 0.5)
        )
    exporter.evaluation_end(EvaluationRecord(60, 3, "heldOut", 2.5, 12.2, 4096, 2.0, 116.5))
    exporter.event(
        Event(
            EventType.SAVE,
            117.0,
            60,
            3,
            {
                "checkpoint": "step-60",
                "seconds": 4.0,
                "blocking_seconds": 0.25,
                "bytes": 1000,
                "kept": 1,
            },
        )
    )


@pytest.mark.capability("G-93")
def test_metrics_of_a_recipe_are_shown_by_their_names(
    exporter: PrometheusExporter, synthetic: ModuleType
) -> None:
    exporter.run_start(INFO)
    exporter.step_end(synthetic.step_record(41, metrics={"kl": 0.5}))
    exporter.step_end(synthetic.step_record(42, metrics={"kl": 0.25, "ce": 2.0}))
    exporter.evaluation_end(
        EvaluationRecord(42, 3, "heldOut", 2.5, 12.2, 4096, 2.0, 116.5, {"accuracy": 0.75})
    )
    samples = _samples(exporter)
    assert samples["evergrad_task_metric", (("metric", "kl"),)] == 0.25
    assert samples["evergrad_task_metric", (("metric", "ce"),)] == 2.0
    assert (
        samples["evergrad_eval_metric", (("dataset", "heldOut"), ("metric", "accuracy"))]
        == 0.75
    )


@pytest.mark.capability("G-93")
def test_the_help_text_of_recipe_metrics_has_their_units_and_meanings(
    exporter: PrometheusExporter, synthetic: ModuleType
) -> None:
    metrics = {"kl": {"unit": "nats", "help": "divergence from the teacher"}}
    for generation in (3, 4):
        exporter.run_start(replace(INFO, generation=generation, metrics=metrics))
    exporter.step_end(synthetic.step_record(41, metrics={"kl": 0.5}))
    (family,) = [
        one
        for one in text_string_to_metric_families(_scrape(exporter))
        if one.name == "evergrad_task_metric"
    ]
    assert family.documentation.endswith(
        "last step: kl (nats): divergence from the teacher."
    )
    assert [sample.value for sample in family.samples] == [0.5]


@pytest.mark.capability("C-39")
def test_gauges_show_the_last_values_and_counters_the_sums(
    exporter: PrometheusExporter, synthetic: ModuleType
) -> None:
    _train(exporter, synthetic)
    samples = _samples(exporter)
    last = synthetic.step_record(60)
    assert samples["evergrad_step", ()] == 60
    assert samples["evergrad_max_steps", ()] == 100
    assert samples["evergrad_steps_total", ()] == 20
    assert samples["evergrad_tokens_total", ()] == 20 * 8192
    assert samples["evergrad_samples_total", ()] == 20 * 32
    assert samples["evergrad_grad_norm", ()] == pytest.approx(last.grad_norm)
    assert samples["evergrad_learning_rate", ()] == pytest.approx(1e-3)
    mean = sum(synthetic.step_record(step).loss for step in range(51, 61)) / 10
    assert samples["evergrad_loss", (("dataset", ""), ("split", "train"))] == pytest.approx(
        mean
    )
    assert samples["evergrad_loss", (("dataset", "heldOut"), ("split", "eval"))] == 2.5
    assert (
        samples["evergrad_eval_metric", (("dataset", "heldOut"), ("metric", "perplexity"))]
        == 12.2
    )
    assert samples["evergrad_world_size", ()] == 2
    assert samples["evergrad_step_duration_seconds_count", ()] == 20
    assert samples["evergrad_step_duration_seconds_sum", ()] == pytest.approx(10.0)
    assert samples["evergrad_last_step_timestamp_seconds", ()] == 114.5
    assert samples["evergrad_rank_step_skew_seconds", ()] == 0.004
    assert samples["evergrad_tokens_per_second", ()] > 0


def test_checkpoint_metrics_have_time_size_step_and_the_wait_of_training(
    exporter: PrometheusExporter, synthetic: ModuleType
) -> None:
    _train(exporter, synthetic)
    exporter.event(
        Event(
            EventType.SAVE_FAILED,
            118.0,
            70,
            3,
            {
                "reason": "No space left on device",
                "trouble": "no_space",
                "blocking_seconds": 0.5,
                "failures": 1,
            },
        )
    )
    exporter.event(
        Event(
            EventType.FALLBACK,
            118.0,
            70,
            3,
            {"checkpoint": "step-60", "reason": "hash differs"},
        )
    )
    exporter.event(
        Event(
            EventType.SAVE,
            119.0,
            80,
            3,
            {
                "checkpoint": "step-80",
                "seconds": 2.0,
                "blocking_seconds": 2.0,
                "bytes": 2000,
            },
        )
    )
    samples = _samples(exporter)
    assert (
        samples[
            "evergrad_checkpoint_duration_seconds_count",
            (("mode", "async"), ("op", "save")),
        ]
        == 1
    )
    assert (
        samples[
            "evergrad_checkpoint_duration_seconds_sum", (("mode", "sync"), ("op", "save"))
        ]
        == 2.0
    )
    assert (
        samples[
            "evergrad_checkpoint_duration_seconds_sum", (("mode", "sync"), ("op", "load"))
        ]
        == 1.5
    )
    assert samples["evergrad_checkpoint_blocking_seconds_total", ()] == 2.75
    assert samples["evergrad_checkpoint_size_bytes", ()] == 2000
    assert samples["evergrad_checkpoint_last_step", ()] == 80
    assert samples["evergrad_checkpoint_last_success_timestamp_seconds", ()] == 119.0
    assert (
        samples[
            "evergrad_checkpoint_failures_total", (("op", "save"), ("reason", "no_space"))
        ]
        == 1
    )
    assert (
        samples[
            "evergrad_checkpoint_failures_total", (("op", "load"), ("reason", "invalid"))
        ]
        == 1
    )


def test_the_phases_sum_to_the_wall_time_since_the_first_step(
    exporter: PrometheusExporter, synthetic: ModuleType
) -> None:
    _train(exporter, synthetic)
    exporter.step_end(synthetic.step_record(61, generation=3, time=118.0))
    samples = _samples(exporter)
    phases = {
        phase: samples["evergrad_step_phase_seconds_total", (("phase", phase),)]
        for phase in PHASES
    }
    assert sum(phases.values()) == pytest.approx(118.0 - 104.5)
    assert phases["eval"] == 2.0 and phases["checkpoint"] == 0.25
    assert phases["comm_wait"] == pytest.approx(21 * 0.06)


def test_time_is_either_productive_or_lost_to_a_cause(
    exporter: PrometheusExporter, synthetic: ModuleType
) -> None:
    _train(exporter, synthetic)
    samples = _samples(exporter)
    lost = {
        cause: samples["evergrad_lost_seconds_total", (("cause", cause),)]
        for cause in CAUSES
    }
    assert samples["evergrad_productive_seconds_total", ()] == pytest.approx(18 * 0.5)
    assert lost == pytest.approx(
        {
            "startup": 3.0,
            "restore": 1.5,
            "recompute": 1.0,
            "checkpoint": 0.25,
            "evaluation": 2.0,
            "downtime": 5.0,
            "other": 0.0,
        }
        | {"reconfiguration": 0.0}
    )


def test_a_world_change_is_counted_by_its_cause_and_costs_reconfiguration(
    exporter: PrometheusExporter, synthetic: ModuleType
) -> None:
    _train(exporter, synthetic)
    fields = {
        "world_size": 1,
        "from_world_size": 2,
        "cause": "node_lost",
        "detail": "node 1 lost",
        "paused_seconds": 3.5,
    }
    exporter.event(Event(EventType.WORLD, 118.0, 60, 4, fields))
    assert _samples(exporter)["evergrad_world_size", ()] == 1
    exporter.step_end(synthetic.step_record(61, generation=4, world_size=1, time=119.0))
    samples = _samples(exporter)
    counted = {
        cause: samples["evergrad_world_changes_total", (("cause", cause),)]
        for cause in CHANGES
    }
    assert counted == dict.fromkeys(CHANGES, 0) | {"node_lost": 1}
    # From the end of step 60 at 114.5 to the begin of step 61 at 118.5, less an evaluation of 2 s and a save
    # of 0.25 s.
    assert samples[
        "evergrad_lost_seconds_total", (("cause", "reconfiguration"),)
    ] == pytest.approx(4.0 - 2.25)
    assert samples["evergrad_lost_seconds_total", (("cause", "other"),)] == pytest.approx(
        0.0
    )


def test_no_counter_decreases_if_rank_0_leaves_this_node_and_returns(
    exporter: PrometheusExporter, synthetic: ModuleType
) -> None:
    _train(exporter, synthetic)
    exporter.event(Event(EventType.END, 117.0, 60, 3, {"exit_code": 70}))
    before = _samples(exporter)
    exporter.rank_0_left()
    away = _samples(exporter)
    assert ("evergrad_step", ()) not in away and (
        "evergrad_last_step_timestamp_seconds",
        (),
    ) not in away
    exporter.run_start(
        replace(
            INFO,
            generation=7,
            start_step=90,
            takes_over=True,
            highest_step=90,
            last_time=500.0,
        )
    )
    fields = {
        "world_size": 2,
        "from_world_size": 3,
        "cause": "node_lost",
        "detail": "node 0 lost",
        "paused_seconds": 0.25,
    }
    exporter.event(Event(EventType.WORLD, 501.0, 90, 7, fields))
    exporter.step_end(synthetic.step_record(91, generation=7, time=502.0))
    after = _samples(exporter)
    counters = {
        key
        for key in before
        if key[0].startswith("evergrad_") and key[0].endswith(("_total", "_count", "_sum"))
    }
    assert counters
    for key in counters:
        assert before[key] == away[key] <= after[key], key
    assert after["evergrad_step", ()] == 91
    assert after["evergrad_steps_total", ()] == 21
    # Steps 117 to 500 on the other node are in that node's counters.
    lost = sum(
        after["evergrad_lost_seconds_total", (("cause", cause),)] for cause in CAUSES
    )
    assert lost - sum(
        before["evergrad_lost_seconds_total", (("cause", cause),)] for cause in CAUSES
    ) == pytest.approx(0.75)
    assert ("evergrad_exit_code", ()) not in after
    attempts = [
        dict(labels)["attempt"] for name, labels in after if name == "evergrad_info"
    ]
    assert attempts == ["7"]


def test_a_second_start_on_one_endpoint_keeps_the_counters(
    exporter: PrometheusExporter, synthetic: ModuleType
) -> None:
    _train(exporter, synthetic)
    exporter.run_start(
        replace(INFO, generation=4, start_step=40, highest_step=60, last_time=117.0)
    )
    exporter.event(
        Event(
            EventType.START, 130.0, 40, 4, {"process_start_time": 127.0, "resumed_from": 40}
        )
    )
    exporter.step_end(synthetic.step_record(41, generation=4, time=131.0))
    samples = _samples(exporter)
    assert samples["evergrad_steps_total", ()] == 21
    assert samples["evergrad_step", ()] == 41
    # The 18 steps after step 42 are lost immediately; the counter of productive seconds waits for new steps.
    assert samples[
        "evergrad_lost_seconds_total", (("cause", "recompute"),)
    ] == pytest.approx(1.0 + 18 * 0.5 + 0.5)
    assert samples[
        "evergrad_lost_seconds_total", (("cause", "downtime"),)
    ] == pytest.approx(5.0 + 10.0)
    assert samples["evergrad_productive_seconds_total", ()] == pytest.approx(18 * 0.5)
    for step in range(42, 62):
        exporter.step_end(synthetic.step_record(step, generation=4, time=90.0 + step))
    samples = _samples(exporter)
    assert samples["evergrad_productive_seconds_total", ()] == pytest.approx(19 * 0.5)
    assert samples[
        "evergrad_lost_seconds_total", (("cause", "recompute"),)
    ] == pytest.approx(1.0 + 18 * 0.5 + 2 * 0.5)


def test_no_counter_decreases_if_the_clock_is_set_back(
    exporter: PrometheusExporter, synthetic: ModuleType
) -> None:
    exporter.event(Event(EventType.START, 100.0, 0, 1, {"process_start_time": 90.0}))
    before = _samples(exporter)
    for step, time in ((43, 95.0), (44, 40.0), (45, 41.0)):
        exporter.step_end(synthetic.step_record(step, time=time))
        after = _samples(exporter)
        for key, value in before.items():
            assert after[key] >= value or "seconds_total" not in key[0], key
        before = after


def test_relayed_events_arrive_with_the_earlier_events_of_the_run(
    exporter: PrometheusExporter, tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=57, ended="killed"))
    sent: list[tuple[str, dict[str, Any]]] = []
    relay = Relay(lambda kind, record: sent.append((kind, json.loads(json.dumps(record)))))
    relay.run_start(replace(INFO, run_directory=str(tmp_path), takes_over=True))
    relay.step_end(synthetic.step_record(58, generation=4, time=run.now))
    for kind, record in sent:
        deliver(exporter, kind, record)
    assert (sent[0][1]["highest_step"], sent[0][1]["last_time"]) == (57, run.now)
    samples = _samples(exporter)
    assert samples["evergrad_step", ()] == 58
    assert samples["evergrad_productive_seconds_total", ()] == 0.5


def test_a_relay_that_cannot_read_the_run_directory_still_relays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    sent: list[tuple[str, dict[str, Any]]] = []
    Relay(lambda kind, record: sent.append((kind, record))).run_start(
        replace(INFO, run_directory=str(tmp_path))
    )
    assert [(kind, record["highest_step"]) for kind, record in sent] == [
        ("run_start", None)
    ]
    assert "metrics.jsonl" in caplog.text


def test_counters_are_zero_before_the_first_step(exporter: PrometheusExporter) -> None:
    samples = _samples(exporter)
    assert samples["evergrad_steps_total", ()] == 0
    assert samples["evergrad_nonfinite_total", (("what", "loss"),)] == 0
    for cause in CHANGES:
        assert samples["evergrad_world_changes_total", (("cause", cause),)] == 0
    for reason in TROUBLES:
        assert (
            samples[
                "evergrad_checkpoint_failures_total", (("op", "save"), ("reason", reason))
            ]
            == 0
        )
    assert ("evergrad_loss", (("dataset", ""), ("split", "train"))) not in samples
    assert ("evergrad_exit_code", ()) not in samples


@pytest.mark.capability("G-87")
@pytest.mark.parametrize("what", ["loss", "grad"])
def test_a_non_finite_step_is_counted_by_the_non_finite_quantity(
    exporter: PrometheusExporter, what: str
) -> None:
    exporter.event(
        Event(EventType.SKIPPED, 1.0, 5, 3, {"why": what, "message": "x", "in_a_row": 1})
    )
    exporter.event(
        Event(EventType.NON_FINITE, 1.0, 5, 3, {"why": what, "message": "x", "in_a_row": 2})
    )
    exporter.event(
        Event(
            EventType.SKIPPED,
            1.0,
            7,
            3,
            {"why": "requested", "message": "x", "in_a_row": 0},
        )
    )
    samples = _samples(exporter)
    assert samples["evergrad_nonfinite_total", (("what", what),)] == 2
    assert (
        sum(
            samples["evergrad_nonfinite_total", (("what", one),)]
            for one in ("loss", "grad")
        )
        == 2
    )
    assert samples["evergrad_skipped_steps_total", (("why", what),)] == 1
    assert samples["evergrad_skipped_steps_total", (("why", "requested"),)] == 1


def test_a_step_without_an_update_leaves_loss_and_norm_unchanged(
    exporter: PrometheusExporter, synthetic: ModuleType
) -> None:
    exporter.run_start(INFO)
    exporter.step_end(synthetic.step_record(1, loss=2.5, grad_norm=0.5))
    exporter.step_end(
        synthetic.step_record(
            2, loss=math.nan, grad_norm=math.nan, tokens=0, skipped="loss"
        )
    )
    samples = _samples(exporter)
    assert samples["evergrad_loss", (("dataset", ""), ("split", "train"))] == 2.5
    assert samples["evergrad_grad_norm", ()] == 0.5
    assert samples["evergrad_step", ()] == 2


def test_the_info_metric_has_the_labels_that_joins_need(
    exporter: PrometheusExporter,
) -> None:
    exporter.run_start(INFO)
    text = _scrape(exporter)
    (line,) = [line for line in text.splitlines() if line.startswith("evergrad_info{")]
    assert re.search(r'attempt="3".*framework_version="torch [\d.]+', line)
    for part in (
        'run="docs-lm"',
        'model="llama"',
        'precision="bf16"',
        'parallelism="dataParallel"',
        'image_version="',
    ):
        assert part in line


def test_special_characters_in_names_of_a_run_are_escaped() -> None:
    exporter = PrometheusExporter('a"b\\c\nd', port=0, host="127.0.0.1")
    try:
        families = list(text_string_to_metric_families(_scrape(exporter)))
        runs = {
            sample.labels["run"]
            for family in families
            for sample in family.samples
            if "run" in sample.labels
        }
        assert runs == {'a"b\\c\nd'}
    finally:
        exporter.close()


def test_process_and_python_metrics_are_exported_and_creation_times_are_not(
    exporter: PrometheusExporter,
) -> None:
    text = _scrape(exporter)
    assert "process_resident_memory_bytes" in text
    assert "python_info" in text
    assert "_created" not in text


def test_device_memory_is_exported_per_worker_and_omitted_without_devices(
    exporter: PrometheusExporter,
) -> None:
    metrics = NodeMetrics("docs-lm", "0", exporter)
    heartbeats = [WorkerHeartbeat(), WorkerHeartbeat()]
    workers = [
        SimpleNamespace(
            local_rank=place, heartbeat=heartbeat, state="inside", pid=os.getpid()
        )
        for place, heartbeat in enumerate(heartbeats)
    ]
    for worker in workers:
        metrics.worker_started(worker)  # type: ignore[arg-type]

    def shown() -> dict[tuple[str, str], float]:
        metrics.show_memory()
        return {
            (dict(labels)["local_rank"], dict(labels)["kind"]): value
            for (name, labels), value in _samples(exporter).items()
            if name == "evergrad_device_memory_bytes"
        }

    # As on a CPU: no series, and not 0.
    assert shown() == {}
    heartbeats[1].hold((10, 30, 20))
    of_second = {("1", "allocated"): 10, ("1", "reserved"): 30, ("1", "peak"): 20}
    assert shown() == of_second
    heartbeats[0].hold((1, 3, 2))
    assert len(shown()) == 6
    # The process has ended, and its memory is free; its successor has not trained yet.
    workers[0].state = "ended"
    assert shown() == of_second
    resident = "evergrad_worker_resident_memory_bytes"
    (size,) = [value for (name, _), value in _samples(exporter).items() if name == resident]
    assert size > 2**20
    # Above the most that a kernel gives.
    gone = 2**22 + 1
    following = SimpleNamespace(
        local_rank=1, heartbeat=WorkerHeartbeat(), state="starting", pid=gone
    )
    metrics.worker_started(following)  # type: ignore[arg-type]
    assert shown() == {}
    assert not [name for name, _ in _samples(exporter) if name == resident]


def test_a_port_in_use_is_refused_with_the_field_that_set_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigurationError,
            match=(
                rf"spec\.training\.metrics\.port: port {port} cannot be listened on; "
                r"address already in use"
            ),
        ):
            PrometheusExporter("docs-lm", port=port, host="127.0.0.1")


def test_the_endpoint_stays_open_for_the_linger_time_and_shows_the_exit_code() -> None:
    exporter = PrometheusExporter(
        "docs-lm",
        port=0,
        host="127.0.0.1",
        linger_seconds=30.0,
        should_stop=(stop := threading.Event()).is_set,
    )
    exporter.event(Event(EventType.END, 1.0, 5, 3, {"exit_code": 75}))
    closing = threading.Thread(target=exporter.close)
    closing.start()
    assert _samples(exporter)["evergrad_exit_code", ()] == 75
    assert closing.is_alive()
    stop.set()
    closing.join(timeout=PATIENCE)
    assert not closing.is_alive()
    with pytest.raises(OSError, match="refused"):
        _scrape(exporter)


def test_closing_twice_has_no_effect() -> None:
    exporter = PrometheusExporter("docs-lm", port=0, host="127.0.0.1")
    exporter.close()
    exporter.close()
    with pytest.raises(OSError, match="refused"):
        _scrape(exporter)


def test_a_failed_save_is_counted_by_its_trouble_and_never_by_its_text(
    exporter: PrometheusExporter,
) -> None:
    exporter.run_start(INFO)
    for fields in (
        {"reason": "rank 0: [Errno 28] No space left on device", "trouble": "no_space"},
        {"reason": "rank 0: no space left", "trouble": "whatever"},
        {"reason": "a row of an older version: no space left"},
    ):
        exporter.event(Event(EventType.SAVE_FAILED, 101.0, 40, 3, fields))
    samples = _samples(exporter)
    counted = {
        trouble: samples[
            "evergrad_checkpoint_failures_total", (("op", "save"), ("reason", trouble))
        ]
        for trouble in TROUBLES
    }
    assert counted == dict.fromkeys(TROUBLES, 0) | {"no_space": 1, "other": 2}


def test_the_documentation_lists_exactly_the_exported_metrics(
    exporter: PrometheusExporter,
) -> None:
    """And those the node's supervisor adds to the same endpoint."""
    rows = re.findall(
        r"^\| `(evergrad_\w+)` \| (\w+) \|[^|]*\|[^|]*\|([^|]*)\|",
        DOCUMENT.read_text("utf-8"),
        re.MULTILINE,
    )
    documented = {
        name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows
    }
    exported = {}
    NodeMetrics("docs-lm", "0", exporter)
    for family in exporter.registry.collect():
        if family.name.startswith("evergrad_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            collector = exporter.registry._names_to_collectors[name]
            exported[name] = (
                family.type,
                tuple(label for label in collector._labelnames if label != "run"),
            )
    assert documented == exported
