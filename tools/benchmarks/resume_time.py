"""Process start → first new step of a resumed 50M run: ``evergrad run`` compared with transformers' Trainer,
in turns."""

import argparse
import functools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import SMALL, Row, interval_of_median, manifest, print_rows, write_documents

_TRAINER = Path(__file__).with_name("trainer_script.py")


def evergrad_seconds(folder: Path, *options: str, run: str = "bench") -> float:
    """Start ``evergrad run`` for one more step; return the seconds until that step is recorded.

    ``run``: the run directory below ``runs``.
    """
    directory = Path("runs") / run
    before = time.time()
    command = [sys.executable, "-m", "evergrad_cli", "run", "run.yaml"]
    command += ["--stop-after-steps", "1", "--run-directory", str(directory), *options]
    result = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False
    )
    if result.returncode != 75:
        raise RuntimeError(
            f"evergrad run ended with {result.returncode}: {result.stderr[-2000:]}"
        )
    rows = folder / directory / "metrics.jsonl"
    return float(json.loads(rows.read_text().splitlines()[-1])["time"]) - before


def trainer_seconds(folder: Path, *, until: int) -> float:
    """Return the same for the Trainer: seconds until its first step after ``resume_from_checkpoint``."""
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


def with_processor_time(start: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds that ``start`` measures, and the processor seconds of its processes.

    Other load on the machine affects the second value much less than the first.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = start()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure(*, rounds: int = 5) -> list[Row]:
    """Return medians of both, and of the ratios."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder / "documents.jsonl")
        (folder / "run.yaml").write_text(
            json.dumps(manifest("bench", parameters="50M", shape=SMALL))
        )
        evergrad_seconds(folder)
        trainer_seconds(folder, until=1)
        own: list[tuple[float, float]] = []
        other: list[tuple[float, float]] = []
        for number in range(rounds):
            start = functools.partial(trainer_seconds, folder, until=number + 2)
            own.append(with_processor_time(functools.partial(evergrad_seconds, folder)))
            other.append(with_processor_time(start))
    turns = list(zip(own, other, strict=True))
    first_step = [(mine[0], theirs[0]) for mine, theirs in turns]
    processor = [(mine[1], theirs[1]) for mine, theirs in turns]
    return [
        *_compare("process start to first new step", first_step, goal="<= 0.6"),
        *_compare("processor time to the end of its save", processor),
    ]


def _compare(what: str, pairs: list[tuple[float, float]], *, goal: str = "") -> list[Row]:
    """Return medians of both sides in the same turns, and of their ratios."""
    ratios = [mine / theirs for mine, theirs in pairs]
    low, high = interval_of_median(ratios)
    note = (
        f"{min(ratios):.2f} to {max(ratios):.2f}, n={len(pairs)}; "
        f"95 % interval {low:.2f} to {high:.2f}"
    )
    what = f"resume: {what}, 50M Llama"
    return [
        Row(what, "evergrad", statistics.median(mine for mine, _ in pairs), "s"),
        Row(what, "Trainer", statistics.median(theirs for _, theirs in pairs), "s"),
        Row(what, "evergrad / Trainer", statistics.median(ratios), "ratio", goal, note),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    print_rows(measure(rounds=parser.parse_args().rounds))
