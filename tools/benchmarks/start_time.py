"""Process start → first step of a fresh 10M run: one process that trains, beside ``--workers 2``, in turns.

Several workers are members of an elastic run: a supervisor, a coordinator and the workers themselves start,
and meet, before the first step.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path

from common import SMALL, Row, interval_of_median, manifest, print_rows, write_documents
from resume_time import evergrad_seconds

_WORKERS = 2


def measure(*, rounds: int = 5) -> list[Row]:
    """Medians of both, and of what several workers cost."""
    found: dict[str, list[float]] = {"1": [], str(_WORKERS): []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder / "documents.jsonl")
        document = manifest("bench", shape=SMALL)
        # One thread a worker: two workers have as many cores as one process may use.
        document["spec"]["training"]["runtime"]["threads"] = 1
        (folder / "run.yaml").write_text(json.dumps(document))
        numbers = itertools.count()
        evergrad_seconds(folder, run=f"run-{next(numbers)}")  # prepares the data
        for number in range(rounds):
            # The one that comes second finds other caches: the two change places.
            for workers, seconds in list(found.items())[:: -1 if number % 2 else 1]:
                run = f"run-{next(numbers)}"
                seconds.append(
                    evergrad_seconds(
                        folder,
                        "--workers",
                        workers,
                        run=run,
                    )
                )

    what = "start: process start to first step, 10M Llama"
    rows = [
        Row(what, f"--workers {workers}", statistics.median(seconds), "s")
        for workers, seconds in found.items()
    ]
    more = [several - one for one, several in zip(*found.values(), strict=True)]
    low, high = interval_of_median(more)
    note = f"n={rounds}; 95 % interval {low:.2f} to {high:.2f}"
    rows.append(
        Row(
            what,
            f"more for --workers {_WORKERS}",
            statistics.median(more),
            "s",
            note=note,
        )
    )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    print_rows(measure(rounds=parser.parse_args().rounds))
