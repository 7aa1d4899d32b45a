"""Preparation of a mixture (JSON Lines and Parquet) with a Hugging Face tokenizer file in two processes:
Evergrad compared with ``datasets.map``.

Each turn is a separate process with empty caches. Both sides read the same files, encode each text with the
same tokenizer and write the token ids to the disk; Evergrad also checks and hashes its input, so that a run
can identify its data. The result is the wall time from opening the first file to writing the last. Earlier
imports do not count.
"""

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from common import Row, interval_of_median, print_rows
from prepare import train_bpe, write_varied_documents

from evergrad_manifest.training import Training
from evergrad_trainer.data.prepare import prepare

WORKERS = 2
EVERGRAD, DATASETS = "evergrad prepare", "datasets.map"


def write_sources(folder: Path, *, megabytes: float) -> None:
    """Write half of the text as JSON Lines, half as Parquet, and the tokenizer."""
    write_varied_documents(folder / "documents.jsonl", megabytes=megabytes / 2)
    with (folder / "documents.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    # Use different texts in both files: equal texts would be one content under two names.
    columns = {
        "id": [row["id"] for row in rows],
        "text": [row["text"][::-1] for row in rows],
    }
    pq.write_table(pa.table(columns), folder / "documents.parquet", row_group_size=1000)
    train_bpe(folder / "tokenizer")


def prepare_with_evergrad(folder: Path, output: Path) -> int:
    """Run a whole ``prepare`` of both sources; return the number of tokens."""
    sources = [
        {
            "name": kind,
            "type": kind,
            "path": str(folder / f"documents.{kind}"),
            "weight": 0.5,
        }
        for kind in ("jsonl", "parquet")
    ]
    training = Training.model_validate(
        {
            "model": {"config": {"model_type": "llama"}},
            "tokenizer": {"type": "transformers", "path": str(folder / "tokenizer")},
            "data": {"sources": sources, "sequenceLength": 256},
            "batching": {"globalBatchSize": 8, "microBatchSize": 4},
            "optimizer": {"learningRate": 1e-3},
            "horizon": {"steps": 100},
        }
    )
    prepared = prepare(
        training, base_directory=folder, prepared_directory=output, workers=WORKERS
    )
    return sum(source.train.tokens for source in prepared.sources)


def prepare_with_datasets(folder: Path, output: Path) -> int:
    """Do the same with ``datasets``: load, map in batches, save. Returns the number of tokens."""
    datasets, transformers = map(importlib.import_module, ("datasets", "transformers"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    end = tokenizer.eos_token_id

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        ids = tokenizer(batch["text"], add_special_tokens=False)["input_ids"]
        return {"input_ids": [[*one, end] for one in ids]}

    num_tokens = 0
    for kind, builder in (("jsonl", "json"), ("parquet", "parquet")):
        loaded = datasets.load_dataset(
            builder,
            data_files=str(folder / f"documents.{kind}"),
            split="train",
            cache_dir=str(output / "cache"),
        )
        mapped = loaded.map(
            encode, batched=True, num_proc=WORKERS, remove_columns=loaded.column_names
        )
        mapped.save_to_disk(output / kind)
        num_tokens += pc.sum(pc.list_value_length(mapped.data["input_ids"])).as_py()
    return num_tokens


SIDES = {EVERGRAD: prepare_with_evergrad, DATASETS: prepare_with_datasets}


def run_side(side: str, folder: Path) -> None:
    """Run one side in this process, and print its seconds and its tokens."""
    if side == DATASETS:
        # Import before the measurement, because transformers imports its parts on first use.
        importlib.import_module("transformers.models.auto")
        importlib.import_module("datasets").disable_progress_bars()
    with tempfile.TemporaryDirectory(dir=folder) as output:
        begun = time.perf_counter()
        num_tokens = SIDES[side](folder, Path(output))
        seconds = time.perf_counter() - begun
    print(json.dumps({"seconds": seconds, "tokens": num_tokens}))


def run_alone(side: str, folder: Path) -> dict[str, float]:
    """Run one side in its own process."""
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def measure(*, megabytes: float = 64, rounds: int = 5) -> list[Row]:
    """Return wall seconds of both sides, measured in turns, and their ratio."""
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    tokens: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sources(folder, megabytes=megabytes)
        for number in range(rounds):
            # Alternate the order, because the second side finds other cache contents.
            for side in list(SIDES)[:: -1 if number % 2 else 1]:
                found = run_alone(side, folder)
                seconds[side].append(found["seconds"])
                tokens[side] = found["tokens"]
    if tokens[EVERGRAD] != tokens[DATASETS]:
        raise RuntimeError(f"the two sides made different numbers of tokens: {tokens}")
    what = f"a mixture of {megabytes:.0f} MB, JSONL and Parquet, {WORKERS} processes"
    ratios = [
        other / own for own, other in zip(seconds[EVERGRAD], seconds[DATASETS], strict=True)
    ]
    low, high = interval_of_median(ratios)
    return [
        *(
            Row(what, side, megabytes / statistics.median(values), "MB/s")
            for side, values in seconds.items()
        ),
        Row(
            what,
            f"speed: {EVERGRAD} / {DATASETS}",
            statistics.median(ratios),
            "ratio",
            goal=">= 1.5",
            note=f"n={len(ratios)}; 95 % interval {low:.2f} to {high:.2f}",
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_side(options.side, options.folder)
    else:
        print_rows(measure(megabytes=options.megabytes, rounds=options.rounds))
