"""Every display of a run shows the same throughput for the same step."""

import json
from pathlib import Path
from types import ModuleType

from evergrad_cli.local.run_files import RunFiles
from evergrad_common.metrics import DERIVED, SHOWN, Throughput
from evergrad_trainer.base.records import RunInfo, record_row
from evergrad_trainer.node.metrics import NodeMetrics
from evergrad_trainer.observers.trackers.rows import values_of

INFO = RunInfo(
    "r", 1, 2, 200, 0, 8192, 32, 10_200_000, "fp32", "dataParallel", "llama", "runs/r"
)


def test_live_page_run_page_and_tracker_show_the_same_throughput_at_every_step(
    synthetic: ModuleType, tmp_path: Path
) -> None:
    records, now = [], 1_770_000_000.0
    for step in range(1, 201):
        # A long evaluation, and a group that is formed again.
        now += 0.5 + 0.01 * (step % 7) + (40.0 if step == 80 else 0.0)
        generation = 1 if step < 150 else 2
        records.append(synthetic.step_record(step, generation=generation, time=now))
    rows = [json.dumps(record_row(one)) for one in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")

    files = RunFiles(tmp_path)
    status = files.look(now)
    track = files.history.steps
    drawn = dict(zip(track.x, track.columns["tokens_per_second"].mean, strict=True))

    node, throughput = NodeMetrics("r", "0"), Throughput()
    for record in records:
        node.tell("step_end", json.loads(json.dumps(record_row(record))))
        assert node.progress is not None
        live = node.progress.tokens_per_second
        assert live == drawn[record.step]
        assert live == values_of(record, INFO, throughput)["train/tokens_per_second"]
    assert status["tokensPerSecond"] == live
    # The evaluation is part of the wall time.
    assert drawn[80] < 0.6 * drawn[79]
    # Both pages show the same values of a step.
    names = {*SHOWN, *(one.name for one in DERIVED)}
    assert set(track.columns) == names
    assert {*node.progress.values, "loss", "tokens_per_second"} == names
