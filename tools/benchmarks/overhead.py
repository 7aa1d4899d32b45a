"""The cost of data and metrics as shares of a step: in a real ``evergrad run`` of the 10M model, and of its
observers alone."""

import argparse
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import Row, build_training, manifest, print_rows, write_documents

from evergrad_trainer.base.records import RunInfo, StepRecord
from evergrad_trainer.observers.build import Surroundings, build_observers
from evergrad_trainer.run.directory import RunDirectory


def run_rows(folder: Path, *, steps: int) -> list[dict[str, float]]:
    """Return the metrics of ``evergrad run``, without its first two steps."""
    write_documents(folder / "documents.jsonl")
    (folder / "run.yaml").write_text(json.dumps(manifest("bench")))
    command = [
        sys.executable,
        "-m",
        "evergrad_cli",
        "run",
        "run.yaml",
        "--stop-after-steps",
        str(steps + 2),
    ]
    subprocess.run(command, cwd=folder, capture_output=True, check=False)
    return [
        json.loads(line)
        for line in (folder / "runs/bench/metrics.jsonl").read_text().splitlines()
    ][2:]


def observer_seconds(
    folder: Path,
    row: dict[str, float],
    *,
    records: int,
) -> float:
    """Return the seconds per step of all observers of ``evergrad run`` with a Prometheus endpoint, over many
    records."""
    directory = RunDirectory(folder / "observed")
    directory.create()
    training = build_training()
    training = training.model_copy(
        update={"metrics": training.metrics.model_copy(update={"port": 0})}
    )
    around = Surroundings(
        directory,
        run="bench",
        training=training,
        base_directory=folder,
        stream=io.StringIO(),
        should_stop=lambda: False,
        relay=None,
    )
    observers = build_observers(around).observers
    observers.run_start(
        RunInfo(
            name="bench",
            generation=1,
            world_size=1,
            total_steps=records,
            start_step=0,
            tokens_per_step=2048,
            samples_per_step=8,
            parameters=10_000_000,
            precision="fp32",
            parallelism="dataParallel",
            model="llama",
            run_directory=str(directory.path),
        )
    )
    begun = time.perf_counter()
    for step in range(1, records + 1):
        observers.step_end(StepRecord(**{**row, "step": step, "time": time.time()}))  # type: ignore[arg-type]
    seconds = (time.perf_counter() - begun) / records
    observers.close()
    return seconds


def measure(*, steps: int = 20, records: int = 5000) -> list[Row]:
    """Return shares of the median step."""
    with tempfile.TemporaryDirectory() as name:
        rows = run_rows(Path(name), steps=steps)
        metrics = observer_seconds(Path(name), rows[-1], records=records)
    step = statistics.median(row["step_seconds"] for row in rows)
    data = sum(row["data_seconds"] for row in rows) / sum(
        row["step_seconds"] for row in rows
    )
    what = "overhead, 10M Llama, fp32"
    return [
        Row(what, "step", step, "s"),
        Row(what, "data wait / step", data, "ratio", goal="<= 0.01"),
        Row(
            what,
            "metrics / step",
            metrics / step,
            "ratio",
            goal="<= 0.005",
            note=f"{metrics * 1e6:.0f} us a step",
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    print_rows(measure(steps=parser.parse_args().steps))
