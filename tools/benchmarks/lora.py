"""Adapters of rank 8 of a 50M Llama: Evergrad compared with peft under transformers' Trainer.

Both train the same adapters, one for each linear layer, on samples of the same length, with fused AdamW and
clipping. Each side is a separate process; Evergrad's uses huge pages, like ``evergrad run``. Speed: turns of
some steps, with alternating order. Memory: the kernel's peak of a process that trains one turn (``VmHWM``),
including Python, torch and the imports of that side.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import Row, build_training, interval_of_median, make_prepared_data, print_rows
from sides import Turns, start_sides, take_turns

from evergrad_cli.huge_pages import begin_anew_with_huge_pages
from evergrad_manifest.training import Lora, Model, Training
from evergrad_trainer.distributed.process_groups import set_threads
from evergrad_trainer.distributed.world import World
from evergrad_trainer.models.build import build_model, plan_model
from evergrad_trainer.recipes.setup import Opened
from evergrad_trainer.training.build import build_machinery, build_stepper
from evergrad_trainer.training.exchange import NUM_FLAGS

SLOTS, SAMPLES, LENGTH = 2, 2, 256
RANK = 8
TURN = 3
"""Steps of a turn; the first step of each turn does not count."""
EVERGRAD, TRAINER = "evergrad", "Trainer with peft"
Turn = Callable[[], float]
"""Trains the steps of a turn, and returns the seconds of the steps that count."""


def build_recipe() -> Training:
    """Return ``spec.training`` of the adapters."""
    plain = build_training(parameters="50M", shape=(SLOTS * SAMPLES, LENGTH))
    lora = Lora.model_validate({"rank": RANK})
    return plain.model_copy(update={"model": plain.model.model_copy(update={"lora": lora})})


def evergrad_turn(opened: Opened, training: Training, folder: Path) -> Turn:
    """Return a turn of Evergrad's own steps, built as in ``evergrad run``."""
    del folder
    world = World(generation=1, rank=0, size=1, device=torch.device("cpu"))
    plan = plan_model(training.model, base_directory=Path(), vocab_size=257)
    machinery = build_machinery(training, opened, plan, world, with_weights=True)
    stepper = build_stepper(training, machinery, opened.data.train, total_steps=100_000)
    steps = iter(range(1, 100_000))

    def turn() -> float:
        seconds = 0.0
        for number in range(TURN):
            begun = time.perf_counter()
            stepper.run(next(steps), world, (False,) * NUM_FLAGS)
            if number:
                seconds += time.perf_counter() - begun
        return seconds

    return turn


def trainer_turn(opened: Opened, training: Training, folder: Path) -> Turn:
    """Return a turn of transformers' Trainer on the same model with peft's own adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.begun = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.begun)

    plain = Model.model_validate({"config": training.model.config})
    plan = plan_model(plain, base_directory=Path(), vocab_size=257)
    config = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model: Any = get_peft_model(build_model(plan, seed=0, precision="fp32"), config)
    stream = opened.data.train
    # Keep the samples in memory, because the Trainer would not read with Evergrad's stream.
    tensors = [
        stream.slot(step, slot).tensors for step in range(1, 9) for slot in range(SLOTS)
    ]
    rows = [
        {"input_ids": row, "labels": row} for one in tensors for row in one["input_ids"]
    ]
    seeds = iter(range(100_000))

    def turn() -> float:
        clock = Clock()
        arguments = TrainingArguments(
            output_dir=str(folder / "trainer"),
            per_device_train_batch_size=SAMPLES,
            gradient_accumulation_steps=SLOTS,
            max_steps=TURN,
            learning_rate=1e-3,
            seed=next(seeds),
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        dataset: Any = rows
        Trainer(
            model=model, args=arguments, train_dataset=dataset, callbacks=[clock]
        ).train()
        return sum(clock.seconds[1:])

    return turn


TURNS = {EVERGRAD: evergrad_turn, TRAINER: trainer_turn}


def _train(kind: str) -> None:
    """Train a few steps and print the peak resident memory in KiB."""
    set_threads(2)
    training = build_recipe()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        TURNS[kind](make_prepared_data(training, folder), training, folder)()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def _peak_bytes(kind: str) -> float:
    command = [sys.executable, __file__, "--train", kind]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(result.stdout.split()[-1]) * 1024


def _serve(kind: str) -> None:
    """Run one side: answer each turn with its tokens/s."""
    turns = Turns()
    set_threads(2)
    training = build_recipe()
    tokens = (TURN - 1) * SLOTS * SAMPLES * LENGTH
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        turn = TURNS[kind](make_prepared_data(training, folder), training, folder)
        turns.serve(lambda: tokens / turn())


def measure(*, rounds: int = 8) -> list[Row]:
    """Return tokens/s and peaks of both sides, and their ratios."""
    what = "LoRA of rank 8, 50M Llama, fp32, CPU"
    with start_sides(tuple(TURNS), __file__, []) as sides:
        speeds = take_turns(sides, num_turns=rounds)
    ratios = [
        own / other for own, other in zip(speeds[EVERGRAD], speeds[TRAINER], strict=True)
    ]
    low, high = interval_of_median(ratios)
    # Use separate processes, because the peak of a process never decreases.
    peaks = {kind: _peak_bytes(kind) for kind in TURNS}
    return [
        *(
            Row(what, kind, statistics.median(values), "tokens/s")
            for kind, values in speeds.items()
        ),
        Row(
            what,
            f"speed: evergrad / {TRAINER}",
            statistics.median(ratios),
            "ratio",
            goal=">= 1.0",
            note=f"n={len(ratios)}; 95 % interval {low:.3f} to {high:.3f}",
        ),
        *(Row(what, kind, value / 2**20, "MiB") for kind, value in peaks.items()),
        Row(
            what,
            f"peak memory: evergrad / {TRAINER}",
            peaks[EVERGRAD] / peaks[TRAINER],
            "ratio",
            goal="<= 1.0",
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--train", choices=tuple(TURNS), help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=tuple(TURNS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if EVERGRAD in (options.train, options.side):
        begin_anew_with_huge_pages()
    if options.train:
        _train(options.train)
    elif options.side:
        _serve(options.side)
    else:
        print_rows(measure(rounds=options.rounds))
