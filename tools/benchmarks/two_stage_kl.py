"""The second stage of ``two_stage_kl`` with a vocabulary of 32,000, compared with a simple loop.

The loop implements the formula directly: logits of all tokens of the model and of the reference, their
log-softmax, and KL(model ‖ reference) from both. Speed: both train the same model on the same batches in one
process, alternate after each step, and change their order in each turn. Memory: the kernel's peak of a
separate process (``VmHWM``), including Python and torch.
"""

import argparse
import copy
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Row, interval_of_median, make_prepared_data, print_rows
from torch.nn import functional

from evergrad_manifest.training import Training
from evergrad_trainer.distributed.process_groups import set_threads
from evergrad_trainer.distributed.world import World
from evergrad_trainer.models.build import build_model, plan_model
from evergrad_trainer.recipes.setup import Opened
from evergrad_trainer.training.build import build_machinery, build_stepper
from evergrad_trainer.training.exchange import NUM_FLAGS

BETA = 0.1
SLOTS, SAMPLES, LENGTH = 2, 4, 512
"""A step has two slots of four samples: 2,048 tokens, whose logits need 262 MB in fp32."""
STEPS = 3
"""Steps of the process whose memory is measured."""
_WARM_UP = 1
"""First turns of each side, which do not count."""
EVERGRAD, HAND = "evergrad", "two full tensors of logits"


def build_recipe(estimator: str = "reverse") -> Training:
    """Return a recipe with two stages, the first of one step."""
    return Training.model_validate(
        {
            "recipe": "two_stage_kl",
            "model": {
                "config": {
                    "model_type": "llama",
                    "hidden_size": 256,
                    "intermediate_size": 688,
                    "num_hidden_layers": 4,
                    "num_attention_heads": 4,
                    "vocab_size": 32_000,
                }
            },
            "data": {
                "sources": [{"name": "docs", "path": "documents.jsonl"}],
                "sequenceLength": LENGTH,
            },
            "batching": {"globalBatchSize": SLOTS * SAMPLES, "microBatchSize": SAMPLES},
            "optimizer": {"learningRate": 1e-3},
            "horizon": {"steps": 100_000},
            "runtime": {"precision": "fp32", "compile": "off", "threads": 2},
            "twoStageKl": {
                "stages": [{"tokens": 1}, {"beta": BETA}],
                "estimator": estimator,
            },
        }
    )


def evergrad_turn(opened: Opened, training: Training) -> Callable[[], None]:
    """Return Evergrad's own step in the second stage, built as in ``evergrad run``."""
    world = World(generation=1, rank=0, size=1, device=torch.device("cpu"))
    plan = plan_model(training.model, base_directory=Path(), vocab_size=257)
    machinery = build_machinery(training, opened, plan, world, with_weights=True)
    stepper = build_stepper(training, machinery, opened.data.train, total_steps=100_000)
    machinery.snapshots.take(1, world)
    steps = iter(range(2, 100_000))

    def turn() -> None:
        stepper.run(next(steps), world, (False,) * NUM_FLAGS)

    return turn


def hand_turn(opened: Opened, training: Training) -> Callable[[], None]:
    """Return the direct formula, with fused AdamW, gradients set to None, and clipping."""
    plan = plan_model(training.model, base_directory=Path(), vocab_size=257)
    model: Any = build_model(plan, seed=0, precision="fp32")
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    # Keep the batches in memory, because the loop would not read with Evergrad's stream.
    stream = opened.data.train
    batches = itertools.cycle(
        [stream.slot(step, slot).tensors for step in range(2, 8) for slot in range(SLOTS)]
    )

    def turn() -> None:
        for _ in range(SLOTS):
            batch = next(batches)
            labels = batch["labels"].flatten()
            with torch.no_grad():
                theirs = reference(input_ids=batch["input_ids"], use_cache=False).logits
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits
            log_p = functional.log_softmax(logits.flatten(0, 1), dim=-1)
            log_q = functional.log_softmax(theirs.flatten(0, 1), dim=-1)
            loss = functional.nll_loss(log_p, labels)
            divergence = functional.kl_div(
                log_q, log_p, reduction="batchmean", log_target=True
            )
            ((loss + BETA * divergence) / SLOTS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return turn


TURNS = {EVERGRAD: evergrad_turn, HAND: hand_turn}


def _train(kind: str) -> None:
    """Train a few steps and print the peak resident memory in KiB."""
    set_threads(2)
    training = build_recipe()
    with tempfile.TemporaryDirectory() as name:
        turn = TURNS[kind](make_prepared_data(training, Path(name)), training)
        for _ in range(STEPS):
            turn()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def _peak_bytes(kind: str) -> float:
    command = [sys.executable, __file__, "--train", kind]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(result.stdout.split()[-1]) * 1024


def _take_turns(*, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each turn, by name."""
    set_threads(2)
    training = build_recipe()
    seconds: dict[str, list[float]] = {name: [] for name in TURNS}
    with tempfile.TemporaryDirectory() as name:
        opened = make_prepared_data(training, Path(name))
        turns = {kind: build(opened, training) for kind, build in TURNS.items()}
        for number in range(rounds + _WARM_UP):
            # Alternate the order, because the second finds other cache contents.
            for kind in list(turns)[:: -1 if number % 2 else 1]:
                begun = time.perf_counter()
                turns[kind]()
                seconds[kind].append(time.perf_counter() - begun)
    return {kind: values[_WARM_UP:] for kind, values in seconds.items()}


def measure(*, rounds: int = 10) -> list[Row]:
    """Return tokens/s and peaks of both sides, and their ratios."""
    what = "two_stage_kl, second stage, vocabulary 32,000, 20M Llama, fp32, CPU"
    tokens = SLOTS * SAMPLES * LENGTH
    seconds = _take_turns(rounds=rounds)
    ratios = [
        theirs / own for own, theirs in zip(seconds[EVERGRAD], seconds[HAND], strict=True)
    ]
    low, high = interval_of_median(ratios)
    # Use separate processes, because the peak of a process never decreases.
    peaks = {kind: _peak_bytes(kind) for kind in TURNS}
    return [
        *(
            Row(what, kind, tokens / statistics.median(values), "tokens/s")
            for kind, values in seconds.items()
        ),
        Row(
            what,
            "speed: evergrad / two full tensors",
            statistics.median(ratios),
            "ratio",
            goal=">= 1.0",
            note=f"n={len(ratios)}; 95 % interval {low:.3f} to {high:.3f}",
        ),
        *(Row(what, kind, value / 2**20, "MiB") for kind, value in peaks.items()),
        Row(
            what,
            "peak memory: evergrad / two full tensors",
            peaks[EVERGRAD] / peaks[HAND],
            "ratio",
            goal="<= 0.7",
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--train", choices=tuple(TURNS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        _train(options.train)
    else:
        print_rows(measure(rounds=options.rounds))
