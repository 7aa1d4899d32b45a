"""The script of a Trainer user: the 50M model, resumed from its newest checkpoint, and saved at every step.

Prints the times at which steps end.
"""

import sys
import time
from typing import Any

import torch
from common import model_config
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Windows of 64 bytes of the same text."""

    def __init__(self) -> None:
        with open("documents.jsonl", "rb") as file:
            self._text = torch.frombuffer(bytearray(file.read(640_000)), dtype=torch.uint8)

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._text[index * 64 : index * 64 + 64].long()
        return {"input_ids": row, "labels": row}


class Clock(TrainerCallback):
    """Prints the number of each finished step and the time."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(f"step {state.global_step} {time.time()}", flush=True)


def main() -> None:
    """Train until step ``argv[1]``."""
    torch.set_num_threads(2)
    values = model_config("50M")
    config = AutoConfig.for_model(values.pop("model_type"), vocab_size=257, **values)
    arguments = TrainingArguments(
        output_dir="trainer",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=int(sys.argv[1]),
        optim="adamw_torch_fused",
        use_cpu=True,
        save_steps=1,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Windows(),
        callbacks=[Clock()],
    )
    last = get_last_checkpoint("trainer") if arguments.max_steps > 1 else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
