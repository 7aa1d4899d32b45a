"""Tokens per second of a Llama: Evergrad compared with a hand-written torch loop and transformers' Trainer.

All three train the same model on the same batches, each in a separate process, alternating after each step,
so that other load on the machine affects them equally. Evergrad's process uses huge pages, like
``evergrad run``; the others start as their users start them. The Trainer waits in a callback, and its time is
its own part of each turn: its data, its loop and its log. Evergrad reads its data while it trains; the
hand-written loop has its batches in memory. Evergrad's loop and its records add less than a thousandth to a
step, as measured by ``overhead.py``.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import (
    SMALL,
    Row,
    build_training,
    interval_of_median,
    make_prepared_data,
    print_rows,
)
from sides import Turns, start_sides, take_turns
from torch.nn import functional

from evergrad_cli.huge_pages import begin_anew_with_huge_pages
from evergrad_manifest.training import Training
from evergrad_trainer.data.stream import TrainingStream
from evergrad_trainer.distributed.process_groups import set_threads
from evergrad_trainer.distributed.world import World
from evergrad_trainer.models.build import build_model, plan_model
from evergrad_trainer.recipes.setup import Opened
from evergrad_trainer.training.build import build_machinery, build_stepper
from evergrad_trainer.training.exchange import NUM_FLAGS

STEPS_A_TURN = 1
SLOTS = 2
_STEPS_IN_MEMORY = 8
"""Number of steps whose batches the hand-written loop and the Trainer train repeatedly."""
_WARM_UP = 2
"""First turns of each side, which compile and allocate. They do not count."""
EVERGRAD, HAND, TRAINER = "evergrad", "hand loop", "Trainer"


def evergrad_turn(
    opened: Opened, training: Training, *, device: str = "cpu"
) -> Callable[[], None]:
    """Return Evergrad's own step, built as in ``evergrad run``."""
    world = World(generation=1, rank=0, size=1, device=torch.device(device))
    plan = plan_model(training.model, base_directory=Path(), vocab_size=257)
    machinery = build_machinery(
        training,
        opened,
        plan,
        world,
        with_weights=True,
    )
    stepper = build_stepper(
        training,
        machinery,
        opened.data.train,
        total_steps=100_000,
    )
    steps = iter(range(1, 100_000))

    def turn() -> None:
        for _ in range(STEPS_A_TURN):
            stepper.run(next(steps), world, (False,) * NUM_FLAGS)

    return turn


def hand_turn(
    stream: TrainingStream, training: Training, *, compiled: bool, device: str = "cpu"
) -> Callable[[], None]:
    """Return a carefully written loop: autocast, fused AdamW, gradients set to None, clipping, and one read
    of the loss per step."""
    plan = plan_model(training.model, base_directory=Path(), vocab_size=257)
    model = build_model(plan, seed=0, precision="fp32")
    model.to(device)  # type: ignore[arg-type]
    is_bf16 = training.runtime.precision == "bf16-autocast"

    def mean_loss(input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=input_ids, use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    loss_of = torch.compile(mean_loss, dynamic=False) if compiled else mean_loss
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    # Keep the batches in memory, because a hand-written loop would not read with Evergrad's stream.
    batches = itertools.cycle(_batches(stream))

    def turn() -> None:
        for _ in range(STEPS_A_TURN):
            total = 0.0
            for _ in range(SLOTS):
                batch = next(batches)
                input_ids = batch["input_ids"].to(device)
                labels = batch["labels"].to(device)
                with torch.autocast(device, dtype=torch.bfloat16, enabled=is_bf16):
                    loss = loss_of(input_ids, labels) / SLOTS
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return turn


def _batches(stream: TrainingStream) -> list[dict[str, torch.Tensor]]:
    """Return the micro-batches of the first steps."""
    return [
        dict(stream.slot(step, slot).tensors)
        for step in range(1, _STEPS_IN_MEMORY + 1)
        for slot in range(SLOTS)
    ]


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The same samples for the Trainer, which shifts labels itself, so that a sample has one label less."""

    def __init__(self, stream: TrainingStream) -> None:
        self._rows = torch.cat([batch["input_ids"] for batch in _batches(stream)])

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index % len(self._rows)]
        return {"input_ids": row, "labels": row}


class Clock:
    """Measures turns in wall seconds and in seconds of this process's cores."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.begun = self.read()

    def read(self) -> tuple[float, float]:
        """Return both times, after the device has finished its work."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def take(self) -> tuple[float, float]:
        """Return the times since the last call."""
        now, begun = self.read(), self.begun
        self.begun = self.read()
        return now[0] - begun[0], now[1] - begun[1]


@dataclass(frozen=True)
class Setting:
    """The training setup of all three. ``shape``: samples of a step, and tokens of each sample."""

    precision: str = "fp32"
    compiled: bool = False
    parameters: str = "10M"
    shape: tuple[int, int] | None = None
    device: str = "cpu"
    threads: int = 2

    def training(self) -> Training:
        """Return the recipe."""
        default = (8, 256) if self.precision == "fp32" else SMALL
        return build_training(
            precision=self.precision,
            compile_mode="on" if self.compiled else "off",
            parameters=self.parameters,
            shape=self.shape or default,
        )


def measure(setting: Setting | None = None, *, rounds: int = 10) -> list[Row]:
    """Return median tokens/s of each side, and Evergrad's ratio to the others (median over turns)."""
    setting = setting or Setting()
    training = setting.training()
    names = (EVERGRAD, HAND, TRAINER)
    with start_sides(names, __file__, ["--setting", json.dumps(asdict(setting))]) as sides:
        seconds = take_turns(sides, num_turns=rounds + _WARM_UP)
    kept = {name: values[_WARM_UP:] for name, values in seconds.items()}

    # Tokens/s are only for comparison, because they change with the machine's load.
    what = (
        f"tokens/s, {setting.parameters} Llama, {setting.device}, {setting.precision}, "
        f"compile {'on' if setting.compiled else 'off'}"
    )
    tokens = (
        STEPS_A_TURN * training.batching.global_batch_size * training.data.sequence_length
    )
    rows = []
    for name, values in kept.items():
        wall = statistics.median(one for one, _ in values)
        rows.append(Row(what, name, tokens / wall, "tokens/s"))

    goals = {HAND: 0.98, TRAINER: 1.15 if setting.compiled else 1.03}
    for name, goal in goals.items():
        pairs = list(zip(kept[EVERGRAD], kept[name], strict=True))
        wall_ratios = [other[0] / own[0] for own, other in pairs]
        rows.append(
            _ratio_row(
                what,
                f"evergrad / {name}",
                wall_ratios,
                goal=f">= {goal}",
            )
        )
        # Other load affects processor time less. Use it only with one thread: a waiting helper thread spins
        # for a while, which counts.
        if setting.threads == 1 and setting.device == "cpu":
            core_ratios = [other[1] / own[1] for own, other in pairs]
            rows.append(_ratio_row(what, f"evergrad / {name}, processor time", core_ratios))
    return rows


def _serve(side: str, setting: Setting) -> None:
    """Run one side: train one step per turn, and answer with its (wall, processor) seconds."""
    turns = Turns()
    training = setting.training()
    if setting.device == "cpu":
        set_threads(setting.threads)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        opened = make_prepared_data(training, Path(folder))
        stream = opened.data.train
        if side == TRAINER:
            _serve_trainer(turns, stream, training, setting)
            return
        turn = (
            evergrad_turn(opened, training, device=setting.device)
            if side == EVERGRAD
            else hand_turn(
                stream, training, compiled=setting.compiled, device=setting.device
            )
        )
        clock = Clock(setting.device)

        def timed() -> tuple[float, float]:
            clock.take()
            turn()
            return clock.take()

        turns.serve(timed)


def _serve_trainer(
    turns: Turns, stream: TrainingStream, training: Training, setting: Setting
) -> None:
    """Let the Trainer train one step per turn."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Waits(TrainerCallback):
        """Answers after each step, and waits for the next turn."""

        clock = Clock(setting.device)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            turns.answer(self.clock.take())
            control.should_training_stop = not turns.wait()
            self.clock.take()

    # Use its defaults except for the values of the recipe, like its users.
    plan = plan_model(training.model, base_directory=Path(), vocab_size=257)
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=training.batching.micro_batch_size,
            gradient_accumulation_steps=SLOTS,
            max_steps=100_000,
            learning_rate=1e-3,
            weight_decay=0.1,
            optim="adamw_torch_fused",
            bf16=setting.precision != "fp32",
            use_cpu=setting.device == "cpu",
            torch_compile=setting.compiled,
            save_strategy="no",
            logging_steps=10,
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=0,
        )
        trainer = Trainer(
            model=build_model(plan, seed=0, precision="fp32"),
            args=arguments,
            train_dataset=Windows(stream),
            callbacks=[Waits()],
        )
        if turns.wait():
            trainer.train()


def _ratio_row(
    what: str,
    name: str,
    ratios: list[float],
    *,
    goal: str = "",
) -> Row:
    low, high = interval_of_median(ratios)
    note = f"n={len(ratios)}; 95 % interval {low:.3f} to {high:.3f}"
    return Row(what, name, statistics.median(ratios), "ratio", goal, note)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--precision", choices=("fp32", "bf16-autocast"), default="bf16-autocast"
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument(
        "--threads",
        type=int,
        default=2,
        help="with 1, ratios of processor time too, which other work on the cores moves less",
    )
    parser.add_argument("--side", choices=(EVERGRAD, HAND, TRAINER), help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        if options.side == EVERGRAD:
            begin_anew_with_huge_pages()
        _serve(options.side, Setting(**json.loads(options.setting)))
    else:
        chosen = Setting(
            precision=options.precision,
            compiled=options.compile,
            threads=options.threads,
        )
        print_rows(measure(chosen, rounds=options.rounds))
