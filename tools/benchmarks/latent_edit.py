"""The recipe ``latent_edit`` with stored states, compared with states that are computed in each step.

Both train the same predictor on the same items of one corpus in one process, with the same bits, and
alternate after each step. The stored states are computed before; the time for this is a separate row.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import Row, interval_of_median, print_rows

from evergrad_manifest.training import Training
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.distributed.process_groups import set_threads
from evergrad_trainer.distributed.world import World
from evergrad_trainer.models.build import plan_model
from evergrad_trainer.recipes.setup import open_recipe
from evergrad_trainer.training.build import build_machinery, build_stepper
from evergrad_trainer.training.exchange import NUM_FLAGS

CACHED, LIVE = "cached", "live"
ITEMS = 32
"""Items of a step. A step has two slots with half of the items each."""
_MAKE_CORPUS = Path(__file__).resolve().parents[2] / "examples/latent-edit/make_corpus.py"
_WARM_UP = 1
_NO_TEXT = Prepared(
    (), (), tokenizer_identity="byte-1", vocab_size=257, end_of_document=256
)


def build_recipe(features: str) -> Training:
    """Return a recipe with an encoder of 3M parameters and a predictor of 1M."""
    return Training.model_validate(
        {
            "recipe": "latent_edit",
            "model": {
                "config": {
                    "model_type": "llama",
                    "hidden_size": 256,
                    "intermediate_size": 688,
                    "num_hidden_layers": 4,
                    "num_attention_heads": 4,
                }
            },
            "latentEdit": {
                "corpus": "corpus",
                "margin": 16,
                "features": features,
                "predictor": {"layers": 1, "heads": 4, "width": 128, "alleleWidth": 32},
            },
            "batching": {"globalBatchSize": ITEMS, "microBatchSize": ITEMS // 2},
            "optimizer": {"learningRate": 1e-3},
            "horizon": {"steps": 100_000},
            "runtime": {"precision": "fp32", "compile": "off", "threads": 2},
        }
    )


def build_turn(features: str, folder: Path) -> Callable[[], None]:
    """Return a step of Evergrad, built as in ``evergrad run``."""
    training = build_recipe(features)
    opened = open_recipe(training, _NO_TEXT, folder, prepared_directory=folder / "prepared")
    world = World(generation=1, rank=0, size=1, device=torch.device("cpu"))
    plan = plan_model(training.model, base_directory=folder, vocab_size=257)
    machinery = build_machinery(training, opened, plan, world, with_weights=True)
    stepper = build_stepper(training, machinery, opened.data.train, total_steps=100_000)
    steps = itertools.count(1)

    def turn() -> None:
        stepper.run(next(steps), world, (False,) * NUM_FLAGS)

    return turn


def measure(*, rounds: int = 10) -> list[Row]:
    """Return items/s of both, measured in turns, and their ratio."""
    what = "latent_edit, 96 bases, a 3M encoder, fp32, CPU"
    set_threads(2)
    seconds: dict[str, list[float]] = {CACHED: [], LIVE: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, str(_MAKE_CORPUS), str(folder / "corpus")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        begun = time.perf_counter()
        turns = {CACHED: build_turn(CACHED, folder)}
        preparing = time.perf_counter() - begun
        turns[LIVE] = build_turn(LIVE, folder)
        for number in range(rounds + _WARM_UP):
            # Alternate the order, because the second finds other contents in the processor's caches.
            for kind in list(turns)[:: -1 if number % 2 else 1]:
                begun = time.perf_counter()
                turns[kind]()
                seconds[kind].append(time.perf_counter() - begun)
    kept = {kind: values[_WARM_UP:] for kind, values in seconds.items()}
    ratios = [live / own for own, live in zip(kept[CACHED], kept[LIVE], strict=True)]
    low, high = interval_of_median(ratios)
    rows = [
        Row(what, kind, ITEMS / statistics.median(values), "items/s")
        for kind, values in kept.items()
    ]
    return [
        *rows,
        Row(
            what,
            "speed: cached / live",
            statistics.median(ratios),
            "ratio",
            goal=">= 5",
            note=f"n={len(ratios)}; 95 % interval {low:.1f} to {high:.1f}",
        ),
        Row(what, "preparing, once", preparing, "s"),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    print_rows(measure(rounds=parser.parse_args().rounds))
