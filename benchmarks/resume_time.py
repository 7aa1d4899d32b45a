"""Process start → first new step of a resumed 50M run: ``evergrad run`` against transformers' Trainer, in
turns."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import SMALL, Row, interval_of_median, manifest, print_rows, write_documents

_TRAINER = Path(__file__).with_name("trainer_script.py")


def evergrad_seconds(folder: Path, *options: str, run: str = "bench") -> float:
    """Start ``evergrad run`` for one more step; seconds until that step's row says it is done.

    ``run``: the run directory below ``runs``.
    """
    directory = Path("runs") / run
    before = time.time()
    command = [sys.executable, "-m", "evergrad_cli", "run", "run.yaml"]
    command += ["--stop-after-steps", "1", "--run-directory", str(directory), *options]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != 75:
        raise RuntimeError(
            f"evergrad run ended with {result.returncode}: {result.stderr[-2000:]}"
        )
    rows = folder / directory / "metrics.jsonl"
    return float(json.loads(rows.read_text().splitlines()[-1])["time"]) - before


def trainer_seconds(folder: Path, *, until: int) -> float:
    """The same with the Trainer: seconds until its first step after ``resume_from_checkpoint``."""
    before = time.time()
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    result = subprocess.run(
        [sys.executable, str(_TRAINER), str(until)],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if result.returncode != 0:
        raise RuntimeError(
            f"the Trainer ended with {result.returncode}: {result.stderr[-2000:]}"
        )
    steps = [line for line in result.stdout.splitlines() if line.startswith("step ")]
    return float(steps[0].split()[2]) - before


def measure(*, rounds: int = 5) -> list[Row]:
    """Medians of both and of the ratio."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder / "documents.jsonl")
        (folder / "run.yaml").write_text(
            json.dumps(manifest("bench", parameters="50M", shape=SMALL))
        )
        evergrad_seconds(folder)
        trainer_seconds(folder, until=1)
        own, other = [], []
        for number in range(rounds):
            own.append(evergrad_seconds(folder))
            other.append(trainer_seconds(folder, until=number + 2))
    what = "resume: process start to first new step, 50M Llama"
    ratios = [mine / theirs for mine, theirs in zip(own, other, strict=True)]
    low, high = interval_of_median(ratios)
    note = f"{min(ratios):.2f} to {max(ratios):.2f}, n={rounds}; 95 % interval {low:.2f} to {high:.2f}"
    return [
        Row(what, "evergrad", statistics.median(own), "s"),
        Row(what, "Trainer", statistics.median(other), "s"),
        Row(what, "evergrad / Trainer", statistics.median(ratios), "ratio", "<= 0.6", note),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    print_rows(measure(rounds=parser.parse_args().rounds))
