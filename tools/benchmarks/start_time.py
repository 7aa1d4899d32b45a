"""Process start → first step of a new 10M run: one training process compared with ``--workers 2``, in turns.

Several workers are members of an elastic run: a supervisor, a coordinator and the workers start and connect
before the first step.
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
    """Return medians of both, and the additional time of several workers."""
    found: dict[str, list[float]] = {"1": [], str(_WORKERS): []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder / "documents.jsonl")
        document = manifest("bench", shape=SMALL)
        # One thread per worker: two workers then use as many cores as one process.
        document["spec"]["training"]["runtime"]["threads"] = 1
        (folder / "run.yaml").write_text(json.dumps(document))
        numbers = itertools.count()
        evergrad_seconds(folder, run=f"run-{next(numbers)}")  # prepares the data
        for number in range(rounds):
            # Alternate the order, because the second finds other cache contents.
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
