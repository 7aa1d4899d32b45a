"""Shared parts of the benchmarks: rows of results, the 10M model, and prepared data of real text."""

import json
import math
import operator
import pydoc_data.topics
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from evergrad_manifest.training import Training

_COMPARISONS = {">=": operator.ge, "<=": operator.le}


@dataclass(frozen=True)
class Row:
    """One value of a benchmark. ``goal`` is ``>= x`` or ``<= x``; values without a goal are for
    comparison."""

    what: str
    name: str
    value: float
    unit: str
    goal: str = ""
    note: str = ""

    @property
    def is_reached(self) -> bool | None:
        """Whether the goal is reached; None without a goal."""
        if not self.goal:
            return None
        sign, _, limit = self.goal.partition(" ")
        return math.isfinite(self.value) and bool(
            _COMPARISONS[sign](self.value, float(limit))
        )


def print_rows(rows: list[Row]) -> None:
    """Print a table."""
    for row in rows:
        outcome = {None: "", True: "reached", False: "MISSED"}[row.is_reached]
        print(
            f"{row.what:<58} {row.name:<28} {row.value:>14,.4g} {row.unit:<10} {row.goal:<10} "
            f"{outcome} {row.note}",
            flush=True,
        )


def interval_of_median(
    values: Sequence[float], *, share: float = 0.95, draws: int = 2000
) -> tuple[float, float]:
    """Return the interval that contains the median of the distribution of ``values`` with probability
    ``share``.

    A percentile bootstrap. Its generator has a fixed seed, so that the same samples give the same interval.
    """
    generator = random.Random(0)
    medians = [
        statistics.median(generator.choices(values, k=len(values))) for _ in range(draws)
    ]
    return _middle(medians, share)


def interval_of_ratio(
    above: Sequence[float],
    below: Sequence[float],
    *,
    share: float = 0.95,
    draws: int = 2000,
) -> tuple[float, float]:
    """Return the interval of the ratio of two medians, of samples that were not measured in pairs.

    Like ``interval_of_median``, but both sides are resampled in each draw.
    """
    generator = random.Random(0)
    ratios = []
    for _ in range(draws):
        numerator = statistics.median(generator.choices(above, k=len(above)))
        denominator = statistics.median(generator.choices(below, k=len(below)))
        ratios.append(numerator / denominator)
    return _middle(ratios, share)


def _middle(values: list[float], share: float) -> tuple[float, float]:
    """Return the bounds between which the middle ``share`` of the values lies."""
    values = sorted(values)
    cut = round((1 - share) / 2 * len(values))
    return values[cut], values[-1 - cut]


_SHAPES = {
    "10M": (320, 864, 8, 5),
    "50M": (640, 1728, 10, 10),
    "124M": (768, 2048, 12, 12),
    "1B": (2048, 5632, 20, 16),
}
"""Width, inner width, layers and heads."""
_VOCABULARY = {"124M": 32_768, "1B": 32_768}
"""Vocabulary sizes of the larger models. The others use only bytes."""


def model_config(parameters: str = "10M") -> dict[str, Any]:
    """Return a Llama with about that many parameters."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    vocabulary = (
        {"vocab_size": _VOCABULARY[parameters]} if parameters in _VOCABULARY else {}
    )
    return {
        "model_type": "llama",
        **dict(zip(names, _SHAPES[parameters], strict=True)),
        **vocabulary,
    }


SMALL = (2, 64)
"""Samples per step and tokens per sample if a step must be short: a CPU without bf16 units takes 1 s per
sample."""


def build_training(
    *,
    precision: str = "fp32",
    compile_mode: str = "off",
    parameters: str = "10M",
    shape: tuple[int, int] = (8, 256),
) -> Training:
    """Return ``spec.training`` of the benchmarks: ``shape`` (samples, tokens per sample) per step in two
    slots, and two threads."""
    samples, length = shape
    return Training.model_validate(
        {
            "model": {"config": model_config(parameters)},
            "data": {
                "sources": [{"name": "docs", "path": "documents.jsonl"}],
                "sequenceLength": length,
            },
            "batching": {"globalBatchSize": samples, "microBatchSize": samples // 2},
            "optimizer": {"learningRate": 1e-3},
            "horizon": {"steps": 100_000},
            "runtime": {"precision": precision, "compile": compile_mode, "threads": 2},
        }
    )


def write_documents(path: Path, *, megabytes: float = 0.7) -> Path:
    """Write Python's own documentation topics as JSONL, repeated with a running number up to
    ``megabytes``."""
    topics = sorted(pydoc_data.topics.topics.items())
    written, number = 0, 0
    with path.open("w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            for topic, text in topics:
                written += file.write(
                    json.dumps(
                        {"topic": topic, "text": text if not number else f"{number} {text}"}
                    )
                    + "\n"
                )
            number += 1
    return path


def make_prepared_data(training: Training, folder: Path) -> Any:
    """Write, prepare and open documents like ``evergrad run``."""
    from evergrad_trainer.data.prepare import prepare
    from evergrad_trainer.recipes.setup import open_recipe

    write_documents(folder / "documents.jsonl")
    prepared = prepare(
        training,
        base_directory=folder,
        prepared_directory=folder / "prepared",
        workers=1,
        on_progress=None,
    )
    return open_recipe(training, prepared, folder)


def open_without_data(training: Training) -> Any:
    """Return the recipe without samples, for code that only builds the model."""
    from evergrad_trainer.data.batch import Stage
    from evergrad_trainer.recipes import load_task
    from evergrad_trainer.recipes.setup import Opened

    data: Any = SimpleNamespace(train=SimpleNamespace(stages=(Stage({}),)))
    task, code = load_task(training, Path())
    return Opened(task, code, data, {})


def manifest(
    name: str, *, parameters: str = "10M", shape: tuple[int, int] = (8, 256)
) -> dict[str, Any]:
    """Return a TrainingRun over ``documents.jsonl``: fp32, two slots per step, two threads, and no save until
    it stops."""
    samples, length = shape
    return {
        "apiVersion": "evergrad.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": name},
        "spec": {
            "training": {
                "model": {"config": model_config(parameters)},
                "data": {
                    "sources": [{"name": "docs", "path": "documents.jsonl"}],
                    "sequenceLength": length,
                },
                "batching": {"globalBatchSize": samples, "microBatchSize": samples // 2},
                "optimizer": {"learningRate": 1e-3},
                "horizon": {"steps": 100_000},
                "checkpoint": {"every": {"steps": 100_000}},
                "runtime": {"precision": "fp32", "compile": "off", "threads": 2},
            }
        },
    }
