"""Peak resident memory of training a 50M Llama: Evergrad's step compared with a hand-written loop, each in
its own process."""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import SMALL, Row, build_training, make_prepared_data, print_rows

STEPS = 5


def _train(kind: str) -> None:
    """Train a few steps and print the peak resident memory in KiB."""
    from training_speed import evergrad_turn, hand_turn

    from evergrad_trainer.distributed.process_groups import set_threads

    set_threads(2)
    training = build_training(parameters="50M", shape=SMALL)
    with tempfile.TemporaryDirectory() as name:
        opened = make_prepared_data(training, Path(name))
        turn = (
            evergrad_turn(opened, training)
            if kind == "evergrad"
            else hand_turn(opened.data.train, training, compiled=False)
        )
        for _ in range(STEPS):
            turn()
        lines = Path("/proc/self/status").read_text().splitlines()
        print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def _peak_bytes(kind: str) -> float:
    command = [sys.executable, __file__, "--train", kind]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(result.stdout.split()[-1]) * 1024


def measure(*, rounds: int = 3) -> list[Row]:
    """Return the median peaks, and their ratio."""
    peaks: dict[str, list[float]] = {"evergrad": [], "hand loop": []}
    # Use separate processes, because the peak of a process never decreases.
    for _ in range(rounds):
        for kind, values in peaks.items():
            values.append(_peak_bytes(kind))
    what = "peak memory of training, 50M Llama, fp32"
    medians = {kind: statistics.median(values) for kind, values in peaks.items()}
    rows = [Row(what, kind, value / 2**20, "MiB") for kind, value in medians.items()]
    return [
        *rows,
        Row(
            what,
            "evergrad / hand loop",
            medians["evergrad"] / medians["hand loop"],
            "ratio",
            goal="<= 1.05",
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--train",
        choices=("evergrad", "hand loop"),
        help=argparse.SUPPRESS,
    )
    options = parser.parse_args()
    if options.train:
        _train(options.train)
    else:
        print_rows(measure(rounds=options.rounds))
