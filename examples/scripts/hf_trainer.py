"""transformers' Trainer, resumed from its last checkpoint.

It does not depend on Evergrad: any torchrun can start it.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class CountingTexts(Dataset):
    """Sequences that count upwards from a start value, which depends only on the index."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


class Progress(TrainerCallback):
    """Prints each step, and makes each step take at least ``step_seconds``."""

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds

    def on_step_end(self, args, state, control, **kwargs) -> None:
        time.sleep(self.step_seconds)
        if state.is_world_process_zero:
            print(f"step {state.global_step} world {args.world_size}", flush=True)


def find_last_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint: the Trainer writes its state last."""
    whole = [
        path.parent
        for path in folder.glob("checkpoint-*/trainer_state.json")
        if is_json(path)
    ]
    return max(
        whole, key=lambda path: int(path.name.removeprefix("checkpoint-")), default=None
    )


def is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    settings = TrainingArguments(
        output_dir=str(arguments.output),
        max_steps=arguments.steps,
        per_device_train_batch_size=4,
        save_steps=arguments.save_every,
        save_total_limit=2,
        logging_steps=arguments.save_every,
        # Without a GPU, tell the Trainer so; otherwise each process would train as the only one.
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=CountingTexts(4096),
        callbacks=[Progress(arguments.step_seconds)],
    )
    # None at the first start. The Trainer's own search (True) fails if there is no checkpoint or an
    # incomplete one.
    last = find_last_checkpoint(arguments.output)
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
