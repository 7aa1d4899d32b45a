"""Reading prepared data: resident memory over 1 GB, cost of a window, and time to find a position.

The training stream reads an epoch of 1 GB of token files in its permuted order, in its own process. A second
process reads the same windows through a memory map. The result is the maximum resident memory minus the
resident memory before the data was opened. The files have just been written, so they come from the page
cache: this measures the reader, not the disk.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from common import Row, print_rows

from evergrad_trainer.data.batch import Stage
from evergrad_trainer.data.mixture import Mixture
from evergrad_trainer.data.prepared import PreparedSource, Shard, TokenSequence
from evergrad_trainer.data.stream import BatchShape, TrainingStream
from evergrad_trainer.data.token_source import TokenSource

SHARD_TOKENS = 8 * 2**20
SEQUENCE_LENGTH = 1024
BATCH = 8
SEEK_POSITION = 10**9


def write_shards(folder: Path, *, gigabytes: float) -> None:
    """Write random ids to files of 16 MiB."""
    rng = np.random.default_rng(0)
    for number in range(round(gigabytes * 1e9 / 2 / SHARD_TOKENS)):
        rng.integers(0, 257, SHARD_TOKENS, dtype=np.uint16).tofile(
            folder / f"train-{number:05d}.tokens"
        )


def find_sequence(folder: Path) -> TokenSequence:
    """Return the sequence that ``write_shards`` wrote."""
    paths = sorted(folder.glob("*.tokens"))
    return TokenSequence(
        "uint16", tuple(Shard(path, 0, path.stat().st_size // 2) for path in paths)
    )


def build_stream(
    folder: Path,
    *,
    sequence_length: int,
    batch: int,
) -> TrainingStream:
    """Return a stream of one source, with one slot per step."""
    source = PreparedSource("docs", folder, "", "", find_sequence(folder))
    items = TokenSource(
        source, source.train, sequence_length=sequence_length, end_of_document=256
    )
    batching = BatchShape(global_batch_size=batch, micro_batch_size=batch)
    return TrainingStream([Stage({"docs": (items, 1.0)})], seed=0, batching=batching)


def resident_megabytes() -> float:
    """Return the current resident memory of this process, in megabytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1000


def read_epoch(
    read: Callable[[int], object],
    steps: int,
    start: float,
) -> dict[str, float]:
    """Call ``read`` for every step. Return the maximum resident memory above ``start``, and the seconds."""
    begun, most = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        read(step)
        if step % 256 == 0 or step == steps:
            most = max(most, resident_megabytes() - start)
    return {
        "megabytes": most,
        "seconds": time.perf_counter() - begun,
        "windows": steps * BATCH,
    }


def run_stream(folder: Path) -> dict[str, float]:
    """Read one epoch with the training stream."""
    start = resident_megabytes()
    stream = build_stream(folder, sequence_length=SEQUENCE_LENGTH, batch=BATCH)
    return read_epoch(
        lambda step: stream.slot(step, 0),
        stream.num_samples // BATCH,
        start,
    )


def run_memory_map(folder: Path) -> dict[str, float]:
    """Copy the same windows in the same order from memory maps."""
    start = resident_megabytes()
    maps = [
        np.memmap(path, dtype=np.uint16, mode="r")
        for path in sorted(folder.glob("*.tokens"))
    ]
    windows = sum(map(len, maps)) // SEQUENCE_LENGTH
    mixture = Mixture([windows], weights=[1.0], seed=0)

    def read(step: int) -> list[object]:
        begins = (
            mixture.locate(position).window * SEQUENCE_LENGTH
            for position in range((step - 1) * BATCH, step * BATCH)
        )
        places = (divmod(begin, SHARD_TOKENS) for begin in begins)
        return [
            maps[shard][first : first + SEQUENCE_LENGTH + 1].astype(np.int64)
            for shard, first in places
        ]

    return read_epoch(read, windows // BATCH, start)


def run_alone(side: str, folder: Path) -> dict[str, float]:
    """Run one side in its own process."""
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    result: dict[str, float] = json.loads(
        subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
    )
    return result


def measure_memory(folder: Path, *, gigabytes: float) -> list[Row]:
    """Measure resident memory and speed of both readers."""
    what = f"reading {gigabytes:g} GB of prepared data in permuted order"
    rows = []
    for side, name, goal in (
        ("stream", "pread (the training stream)", "<= 64"),
        ("map", "memory map", ""),
    ):
        result = run_alone(side, folder)
        note = f"{result['seconds'] / result['windows'] * 1e6:.1f} µs a window of {SEQUENCE_LENGTH} tokens"
        rows.append(
            Row(
                what,
                name,
                result["megabytes"],
                "MB above start",
                goal=goal,
                note=note,
            )
        )
    return rows


def measure_window(folder: Path, *, rounds: int) -> list[Row]:
    """Measure one window of 256 tokens, from position to tensors: locate, hash, read, label."""
    rows = []
    for batch in (4, 32):
        stream = build_stream(folder, sequence_length=256, batch=batch)
        costs = []
        for number in range(rounds):
            begun = time.perf_counter()
            for step in range(500):
                stream.slot(1 + number * 500 + step, 0)
            costs.append((time.perf_counter() - begun) / 500 / batch * 1e6)
        rows.append(
            Row(
                "a window of 256 tokens, from position to tensors",
                f"micro-batch of {batch}",
                statistics.median(costs),
                "µs",
            )
        )
    return rows


def measure_seek(*, rounds: int) -> list[Row]:
    """Measure the time to the sample at position 10^9: build the mixture's tables and look up the
    position."""
    rows = []
    for sizes in ([10**9 + 7], [10**9, 3 * 10**8, 10**7, 10**6]):
        seconds = []
        for _ in range(rounds):
            begun = time.perf_counter()
            mixture = Mixture(
                sizes, weights=[0.6, 0.25, 0.1, 0.05][: len(sizes)], seed=len(seconds)
            )
            mixture.cursor(SEEK_POSITION)
            mixture.locate(SEEK_POSITION)
            seconds.append(time.perf_counter() - begun)
        name = f"{len(sizes)} source{'s' if len(sizes) > 1 else ''}"
        # Use the first round: later rounds find the order of the sources in the process's cache.
        rows.append(
            Row(
                "position found at 10^9 samples",
                name,
                seconds[0],
                "s",
                goal="<= 1",
            )
        )
    return rows


def measure(*, gigabytes: float = 1.0, rounds: int = 5) -> list[Row]:
    """Return all rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_shards(folder, gigabytes=gigabytes)
        rows = measure_memory(folder, gigabytes=gigabytes) + measure_window(
            folder, rounds=rounds
        )
    return rows + measure_seek(rounds=rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--side",
        choices=["stream", "map"],
        help=argparse.SUPPRESS,
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(
            json.dumps(
                (run_stream if options.side == "stream" else run_memory_map)(options.folder)
            )
        )
    else:
        print_rows(measure(gigabytes=options.gigabytes, rounds=options.rounds))
