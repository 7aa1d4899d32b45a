"""Fine-tuning on rows of mixed length: Evergrad's packed samples compared with transformers' Trainer, with
padded and with packed batches of the same rows, and with TRL's SFTTrainer with its own packing.

``padded``: each micro-batch is padded to its longest row, in random order. ``packed``: rows packed best fit
decreasing, distinguished by their positions. ``TRL``: the same rows, packed and collated by TRL, which
concatenates the samples of a micro-batch; this is fast only with an attention kernel for variable lengths.
All train the same model on the same rows, in turns. The result is learned tokens per second in steps.
"""

import argparse
import importlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import Row, interval_of_median, print_rows
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from evergrad_manifest.training import Training
from evergrad_trainer.data.prepare import prepare
from evergrad_trainer.data.token_source import IGNORE_INDEX
from evergrad_trainer.data.tokenizers import ByteTokenizer
from evergrad_trainer.distributed.process_groups import set_threads
from evergrad_trainer.distributed.world import World
from evergrad_trainer.models.build import build_model, plan_model
from evergrad_trainer.recipes.setup import Opened, open_recipe
from evergrad_trainer.training.build import build_machinery, build_stepper
from evergrad_trainer.training.exchange import NUM_FLAGS

LENGTH, SAMPLES, SLOTS = 512, 4, 2
ROWS = 2000
SHORTEST, LONGEST = 16, 500
TURN = 3
"""Steps of a turn; the first step of each turn does not count."""
EVERGRAD, PADDED, PACKED, TRL = (
    "evergrad",
    "Trainer, padded",
    "Trainer, packed",
    "TRL, packed",
)


def build_recipe() -> Training:
    """Return a Llama of 7M parameters on rows of 16 to 500 bytes."""
    return Training.model_validate(
        {
            "recipe": "sft",
            "model": {
                "config": {
                    "model_type": "llama",
                    "hidden_size": 256,
                    "intermediate_size": 688,
                    "num_hidden_layers": 8,
                    "num_attention_heads": 4,
                    "tie_word_embeddings": True,
                }
            },
            "data": {
                "sources": [{"name": "rows", "path": "rows.jsonl"}],
                "sequenceLength": LENGTH,
            },
            "batching": {"globalBatchSize": SLOTS * SAMPLES, "microBatchSize": SAMPLES},
            "optimizer": {"learningRate": 1e-3},
            "horizon": {"steps": 100_000},
            "runtime": {"precision": "fp32", "compile": "off", "threads": 2},
        }
    )


def write_rows(path: Path) -> None:
    """Write rows whose lengths are evenly distributed in their logarithm; a third of each row is the
    prompt."""
    source = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(ROWS):
            length = round(SHORTEST * (LONGEST / SHORTEST) ** source.random())
            text = "".join(source.choices("abcdefghijklmnopqrstuvwxyz ", k=length))
            row = {"prompt": text[: length // 3], "completion": text[length // 3 :]}
            file.write(json.dumps(row) + "\n")


class _Samples(Dataset[dict[str, Any]]):
    """Samples as lists: of one row each, or of packed rows with their positions."""

    def __init__(self, samples: Sequence[dict[str, list[int]]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self._samples[index])


class _Clock(TrainerCallback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begun = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._begun)


def read_samples(opened: Opened, *, is_packed: bool) -> list[dict[str, list[int]]]:
    """Return all rows of the run as a Trainer's data set, in which labels have the positions of their own
    tokens."""
    ((source, _),) = opened.data.train.stages[0].sources.values()
    found = []
    reader: Any = source
    if not is_packed:
        for number in range(len(reader.reader)):
            row = reader.reader.read(number)
            labels = [
                one if mark else IGNORE_INDEX
                for one, mark in zip(row.ids.tolist(), row.marks.tolist(), strict=True)
            ]
            found.append({"input_ids": row.ids.tolist(), "labels": labels})
        return found
    for item in range(len(source)):
        tensors = source.read([item]).tensors
        # The Trainer's model shifts labels itself, so move each label one position back.
        labels = [IGNORE_INDEX, *tensors["labels"][0].tolist()[:-1]]
        sample = {"input_ids": tensors["input_ids"][0].tolist(), "labels": labels}
        found.append({**sample, "position_ids": tensors["position_ids"][0].tolist()})
    return found


def collate(samples: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad rows to the longest; packed samples have the same length and no mask."""
    width = max(len(one["input_ids"]) for one in samples)
    fills = {"input_ids": 0, "labels": IGNORE_INDEX, "position_ids": 0}
    batch = {
        name: torch.tensor(
            [[*one[name], *[fills[name]] * (width - len(one[name]))] for one in samples]
        )
        for name in samples[0]
    }
    if "position_ids" not in batch:
        lengths = torch.tensor([[len(one["input_ids"])] for one in samples])
        batch["attention_mask"] = (torch.arange(width)[None] < lengths).long()
    return batch


def evergrad_turn(opened: Opened, training: Training) -> Callable[[], tuple[float, int]]:
    """Return a turn of Evergrad's own steps, which returns its seconds and the number of learned tokens."""
    world = World(generation=1, rank=0, size=1, device=torch.device("cpu"))
    plan = plan_model(training.model, base_directory=Path(), vocab_size=257)
    machinery = build_machinery(training, opened, plan, world, with_weights=True)
    stepper = build_stepper(training, machinery, opened.data.train, total_steps=100_000)
    steps = iter(range(1, 100_000))

    def turn() -> tuple[float, int]:
        seconds, tokens = 0.0, 0
        for number in range(TURN):
            begun = time.perf_counter()
            outcome = stepper.run(next(steps), world, (False,) * NUM_FLAGS)
            if number:
                seconds += time.perf_counter() - begun
                tokens += outcome.weight
        return seconds, tokens

    return turn


def trainer_options(folder: Path, *, seed: int) -> dict[str, Any]:
    """Return the options for one turn of transformers' Trainer and of Trainers that are based on it."""
    return {
        "output_dir": str(folder),
        "gradient_accumulation_steps": SLOTS,
        "max_steps": TURN,
        "learning_rate": 1e-3,
        "seed": seed,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }


def trainer_turn(
    opened: Opened, training: Training, folder: Path, *, is_packed: bool
) -> Callable[[], tuple[float, int]]:
    """Return a turn of transformers' Trainer on the same model, with as many rows per step as Evergrad."""
    plan = plan_model(training.model, base_directory=Path(), vocab_size=257)
    model: Any = build_model(plan, seed=0, precision="fp32")
    samples = read_samples(opened, is_packed=is_packed)
    num_packed = len(read_samples(opened, is_packed=True))
    size = SAMPLES if is_packed else max(1, round(ROWS / num_packed * SAMPLES))
    seeds = iter(range(100_000))

    def turn() -> tuple[float, int]:
        clock, counted = _Clock(), []

        def count(chosen: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
            batch = collate(chosen)
            counted.append(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()))
            return batch

        options = trainer_options(folder / "trainer", seed=next(seeds))
        Trainer(
            model=model,
            args=TrainingArguments(
                **options, per_device_train_batch_size=size, remove_unused_columns=False
            ),
            train_dataset=_Samples(samples),
            data_collator=count,
            callbacks=[clock],
        ).train()
        # Count the batches of the steps that count; one more may have been read ahead.
        return sum(clock.seconds[1:]), sum(counted[SLOTS : TURN * SLOTS])

    return turn


def trl_turn(
    opened: Opened, training: Training, folder: Path
) -> Callable[[], tuple[float, int]]:
    """Return a turn of TRL's SFTTrainer on the same model and rows, which it packs itself."""
    datasets, trl, transformers = map(
        importlib.import_module, ("datasets", "trl", "transformers")
    )
    datasets.disable_progress_bars()
    plan = plan_model(training.model, base_directory=Path(), vocab_size=257)
    model: Any = build_model(plan, seed=0, precision="fp32")
    rows = datasets.Dataset.from_list(read_samples(opened, is_packed=False))
    ByteTokenizer().save_pretrained(folder / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    seeds = iter(range(100_000))

    def turn() -> tuple[float, int]:
        clock, counted = _Clock(), []
        trainer = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(
                **trainer_options(folder / "trl", seed=next(seeds)),
                per_device_train_batch_size=SAMPLES,
                max_length=LENGTH,
                packing=True,
                # It is on by default, and saves memory at the cost of time, which the other sides do not do.
                gradient_checkpointing=False,
                bf16=False,
            ),
            processing_class=tokenizer,
            train_dataset=rows,
            callbacks=[clock],
        )
        collate_packed = trainer.data_collator

        def count(chosen: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
            batch: dict[str, torch.Tensor] = collate_packed(chosen)
            counted.append(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()))
            return batch

        trainer.data_collator = count
        trainer.train()
        return sum(clock.seconds[1:]), sum(counted[SLOTS : TURN * SLOTS])

    return turn


def measure(*, rounds: int = 8) -> list[Row]:
    """Return learned tokens/s of all sides, and Evergrad's ratio to each of the others."""
    set_threads(2)
    training = build_recipe()
    speeds: dict[str, list[float]] = {EVERGRAD: [], PADDED: [], PACKED: [], TRL: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl")
        prepared = prepare(
            training,
            base_directory=folder,
            prepared_directory=folder / "prepared",
            workers=1,
        )
        opened = open_recipe(training, prepared, folder)
        turns = {
            EVERGRAD: evergrad_turn(opened, training),
            PADDED: trainer_turn(opened, training, folder, is_packed=False),
            PACKED: trainer_turn(opened, training, folder, is_packed=True),
            TRL: trl_turn(opened, training, folder),
        }
        for number in range(rounds):
            # Alternate the order, because the second side finds other cache contents.
            for kind in list(turns)[:: -1 if number % 2 else 1]:
                seconds, tokens = turns[kind]()
                speeds[kind].append(tokens / seconds)

    what = "sft, rows of 16 to 500 tokens, 7M Llama, fp32, CPU"
    found = [
        Row(what, kind, statistics.median(values), "completion tokens/s")
        for kind, values in speeds.items()
    ]
    for other, goal in ((PADDED, ">= 1.5"), (PACKED, ">= 1.0"), (TRL, ">= 1.0")):
        ratios = [
            own / one for own, one in zip(speeds[EVERGRAD], speeds[other], strict=True)
        ]
        low, high = interval_of_median(ratios)
        found.append(
            Row(
                what,
                f"speed: evergrad / {other}",
                statistics.median(ratios),
                "ratio",
                goal=goal,
                note=f"n={len(ratios)}; 95 % interval {low:.3f} to {high:.3f}",
            )
        )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    print_rows(measure(rounds=parser.parse_args().rounds))
