"""Tokens a second of a Llama: Evergrad against a hand-written torch loop and transformers' Trainer.

All three train the same model on the same batches in one process, taking turns of a few steps, so that
whatever else the machine does hits them alike. Turns are taken inside a Trainer callback; what is timed for
the Trainer is its own part of each turn.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
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
from torch.nn import functional

from evergrad_manifest.training import Training
from evergrad_trainer.data.stream import TrainingStream
from evergrad_trainer.distributed import set_threads
from evergrad_trainer.models.build import build_model, plan_model
from evergrad_trainer.recipes.opening import Opened
from evergrad_trainer.training.build import build_machinery, build_stepper
from evergrad_trainer.training.exchange import NUM_FLAGS
from evergrad_trainer.world import World

STEPS_A_TURN = 1
SLOTS = 2


def evergrad_turn(
    opened: Opened, training: Training, *, device: str = "cpu"
) -> Callable[[], None]:
    """Evergrad's own step, as ``evergrad run`` builds it."""
    world = World(generation=1, rank=0, size=1, device=torch.device(device))
    plan = plan_model(training.model, base_directory=Path(), vocab_size=257)
    machinery = build_machinery(training, opened, plan, world, with_weights=True)
    stepper = build_stepper(training, machinery, opened.data.train, total_steps=100_000)
    steps = iter(range(1, 100_000))

    def turn() -> None:
        for _ in range(STEPS_A_TURN):
            stepper.run(next(steps), world, (False,) * NUM_FLAGS)

    return turn


def hand_turn(
    stream: TrainingStream, training: Training, *, compiled: bool, device: str = "cpu"
) -> Callable[[], None]:
    """What a careful person writes: autocast, fused AdamW, gradients set to none, clipping, one loss read a
    step."""
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
    steps = iter(range(1, 100_000))

    def turn() -> None:
        for _ in range(STEPS_A_TURN):
            step = next(steps)
            total = 0.0
            for slot in range(SLOTS):
                batch = stream.slot(step, slot)
                input_ids, labels = (
                    batch.tensors[name].to(device) for name in ("input_ids", "labels")
                )
                with torch.autocast(device, dtype=torch.bfloat16, enabled=is_bf16):
                    loss = loss_of(input_ids, labels) / SLOTS
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return turn


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The same samples for the Trainer, which shifts labels itself."""

    def __init__(self, stream: TrainingStream) -> None:
        batches = [stream.slot(step, slot) for step in range(1, 9) for slot in range(SLOTS)]
        self._rows = torch.cat([batch.tensors["input_ids"] for batch in batches])

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index % len(self._rows)]
        return {"input_ids": row, "labels": row}


class Clock:
    """Times turns: seconds, and seconds of this process's cores."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.begun = self.read()

    def read(self) -> tuple[float, float]:
        """Both, once the device has done what was asked of it."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def take(self) -> tuple[float, float]:
        """What has passed since the last call."""
        now, begun = self.read(), self.begun
        self.begun = self.read()
        return now[0] - begun[0], now[1] - begun[1]


def measure(
    *,
    rounds: int = 10,
    precision: str = "fp32",
    compiled: bool = False,
    parameters: str = "10M",
    shape: tuple[int, int] | None = None,
    device: str = "cpu",
) -> list[Row]:
    """Median tokens/s of each, and Evergrad's ratio to the others (median over turns).

    ``shape``: samples, and tokens each, of a step.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    if device == "cpu":
        set_threads(2)
    warnings.simplefilter("ignore")
    training = build_training(
        precision=precision,
        compile_mode="on" if compiled else "off",
        parameters=parameters,
        shape=shape or ((8, 256) if precision == "fp32" else SMALL),
    )
    with tempfile.TemporaryDirectory() as folder:
        opened = make_prepared_data(training, Path(folder))
        turns = {
            "evergrad": evergrad_turn(opened, training, device=device),
            "hand loop": hand_turn(
                opened.data.train, training, compiled=compiled, device=device
            ),
        }
        names = ("evergrad", "hand loop", "Trainer")
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}

        class Turns(TrainerCallback):
            """Lets the others train every few steps of the Trainer, and times all three."""

            clock = Clock(device)

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step % STEPS_A_TURN:
                    return
                seconds["Trainer"].append(self.clock.take())
                # The one that comes second finds other caches: the two change places.
                order = list(turns.items())[:: -1 if len(seconds["Trainer"]) % 2 else 1]
                for name, turn in order:
                    turn()
                    seconds[name].append(self.clock.take())

        plan = plan_model(training.model, base_directory=Path(), vocab_size=257)
        arguments = TrainingArguments(
            output_dir=str(Path(folder) / "trainer"),
            per_device_train_batch_size=training.batching.micro_batch_size,
            gradient_accumulation_steps=SLOTS,
            max_steps=STEPS_A_TURN * (rounds + 2),
            learning_rate=1e-3,
            weight_decay=0.1,
            optim="adamw_torch_fused",
            bf16=precision != "fp32",
            use_cpu=device == "cpu",
            torch_compile=compiled,
            save_strategy="no",
            logging_steps=10,
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=0,
        )
        model = build_model(plan, seed=0, precision="fp32")
        Trainer(
            model=model,
            args=arguments,
            train_dataset=Windows(opened.data.train),
            callbacks=[Turns()],
        ).train()
    # The first two turns warm up (and compile).
    kept = {name: values[2:] for name, values in seconds.items()}
    tokens = STEPS_A_TURN * training.batching.global_batch_size * training.data.sequence_length
    what = f"tokens/s, {parameters} Llama, {device}, {precision}, compile {'on' if compiled else 'off'}"
    rows = [
        Row(what, name, tokens / statistics.median(wall for wall, _ in values), "tokens/s")
        for name, values in kept.items()
    ]
    goals = {"hand loop": 0.98, "Trainer": 1.15 if compiled else 1.03}
    for name, goal in goals.items():
        pairs = list(zip(kept["evergrad"], kept[name], strict=True))
        wall, cores = ([other[kind] / own[kind] for own, other in pairs] for kind in range(2))
        rows += [
            _ratio_row(what, f"evergrad / {name}", wall, goal=f">= {goal}"),
            # Other work on the cores moves it less.
            _ratio_row(what, f"evergrad / {name}, by processor time", cores),
        ]
    return rows


def _ratio_row(what: str, name: str, ratios: list[float], *, goal: str = "") -> Row:
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
    options = parser.parse_args()
    print_rows(
        measure(rounds=options.rounds, precision=options.precision, compiled=options.compile)
    )
