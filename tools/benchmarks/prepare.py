"""prepare compared with the tokenizers library alone: bytes per second of one core, for the byte tokenizer
and for a BPE tokenizer.

Both sides run in separate processes, pinned to one core, in turns. The library's side reads the same file,
parses each line with json and encodes the texts in batches; it stores and writes nothing. For prepare, the
whole call is measured: scanning and hashing the file, starting a helper process, parsing, encoding, creating
arrays of ids, writing, fsyncing and publishing.

The goal applies to processor time, including the helper's, because other work on the machine does not affect
it. Wall time is shown, too.
"""

import argparse
import json
import os
import pydoc_data.topics
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from common import Row, print_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from evergrad_manifest.training import Training
from evergrad_trainer.data.prepare import prepare
from evergrad_trainer.data.tokenizers import ByteTokenizer

GOAL = ">= 0.8"
VOCABULARY = 8192
BATCH = 256


def write_varied_documents(path: Path, *, megabytes: float) -> Path:
    """Write pieces of 200 to 6,000 characters of Python's documentation topics, cut at random places, as
    JSONL."""
    topics, rng, written = list(pydoc_data.topics.topics.values()), random.Random(0), 0
    with path.open("w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            topic = rng.choice(topics)
            begin = rng.randrange(max(1, len(topic) - 200))
            written += file.write(
                json.dumps(
                    {"id": written, "text": topic[begin : begin + rng.randrange(200, 6000)]}
                )
                + "\n"
            )
    return path


def train_bpe(directory: Path) -> Path:
    """Train a byte-level BPE tokenizer on the topics, in a transformers directory."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(pydoc_data.topics.topics.values(), trainer)
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return directory


@dataclass(frozen=True)
class Cost:
    """Seconds of one turn."""

    processor: float
    wall: float


class Clock:
    """Wall and processor time since its creation, of this process and of child processes that have been
    reaped."""

    def __init__(self) -> None:
        self._wall, self._processor = time.perf_counter(), self._used()

    def read(self) -> Cost:
        return Cost(
            processor=self._used() - self._processor, wall=time.perf_counter() - self._wall
        )

    def _used(self) -> float:
        usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def read_and_encode(documents: Path, tokenizer: Path) -> Cost:
    """Run the tokenizers library alone."""
    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    clock = Clock()
    with documents.open("rb") as file:
        texts = []
        for line in file:
            texts.append(json.loads(line)["text"])
            if len(texts) == BATCH:
                backend.encode_batch_fast(texts, add_special_tokens=False)
                texts.clear()
        backend.encode_batch_fast(texts, add_special_tokens=False)
    return clock.read()


def prepare_documents(
    documents: Path,
    tokenizer: Path | None,
    folder: Path,
) -> Cost:
    """Run a whole ``prepare`` with one helper process."""
    section = (
        {"type": "transformers", "path": str(tokenizer)} if tokenizer else {"type": "byte"}
    )
    training = Training.model_validate(
        {
            "model": {"config": {"model_type": "llama"}},
            "tokenizer": section,
            "data": {
                "sources": [{"name": "docs", "path": str(documents)}],
                "sequenceLength": 256,
            },
            "batching": {"globalBatchSize": 8, "microBatchSize": 4},
            "optimizer": {"learningRate": 1e-3},
            "horizon": {"steps": 100},
        }
    )
    clock = Clock()
    prepare(
        training,
        base_directory=folder,
        prepared_directory=folder,
        workers=1,
    )
    return clock.read()


def run_alone(side: str, documents: Path, tokenizer: str, exported: Path) -> Cost:
    """Run one side in its own process on one core, and return the cost that it prints."""
    command = [
        sys.executable,
        __file__,
        "--side",
        side,
        "--documents",
        str(documents),
        "--tokenizer",
        tokenizer,
        str(exported),
    ]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    return Cost(
        **json.loads(
            subprocess.run(
                command, env=environment, check=True, stdout=subprocess.PIPE, text=True
            ).stdout
        )
    )


def run_side(side: str, documents: Path, tokenizer: str, exported: Path) -> Cost:
    """Run one side in this process."""
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    if side == "library":
        return read_and_encode(documents, exported)
    with tempfile.TemporaryDirectory(dir=documents.parent) as folder:
        return prepare_documents(
            documents, exported if tokenizer == "bpe" else None, Path(folder)
        )


def measure(*, megabytes: float = 64, rounds: int = 3) -> list[Row]:
    """Return rows for both tokenizers: the speed of both sides, and the median of the ratios per round."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = write_varied_documents(folder / "documents.jsonl", megabytes=megabytes)
        ByteTokenizer().save_pretrained(folder / "byte")
        exports = {"byte": folder / "byte", "bpe": train_bpe(folder / "bpe")}
        size = documents.stat().st_size / 1e6
        for tokenizer, exported in exports.items():
            turns = [
                (
                    run_alone("prepare", documents, tokenizer, exported),
                    run_alone("library", documents, tokenizer, exported),
                )
                for _ in range(rounds)
            ]
            what = f"prepare {size:.0f} MB of JSONL on one core, {tokenizer} tokenizer"
            for name, costs in zip(
                ("evergrad prepare", "read + tokenizers library"),
                zip(*turns, strict=True),
                strict=True,
            ):
                wall = f"{size / statistics.median(cost.wall for cost in costs):.2f} MB/s of wall time"
                rows.append(
                    Row(
                        what,
                        name,
                        size / statistics.median(cost.processor for cost in costs),
                        "MB/s",
                        note=wall,
                    )
                )
            ratio = statistics.median(
                library.processor / own.processor for own, library in turns
            )
            rows.append(
                Row(
                    what,
                    "prepare / library",
                    ratio,
                    "ratio",
                    goal=GOAL,
                )
            )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--side",
        choices=["prepare", "library"],
        help=argparse.SUPPRESS,
    )
    parser.add_argument("--documents", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        cost = run_side(
            options.side,
            options.documents,
            options.tokenizer[0],
            Path(options.tokenizer[1]),
        )
        print(json.dumps(asdict(cost)))
    else:
        print_rows(measure(megabytes=options.megabytes, rounds=options.rounds))
