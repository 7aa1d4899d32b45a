"""A loop with Accelerate that resumes from its newest complete state.

It does not depend on Evergrad: any torchrun can start it.
"""

import argparse
import shutil
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples, 16, generator=generator)
    weight = torch.randn(16, 4, generator=generator)
    return TensorDataset(inputs, inputs @ weight)


def find_newest(folder: Path) -> Path | None:
    """Return the newest state. States are created by a rename, so each existing state is complete."""
    states = sorted(
        folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-"))
    )
    return states[-1] if states else None


def save(accelerator: Accelerator, folder: Path, step: int) -> None:
    temporary, final = folder / "unfinished", folder / f"step-{step}"
    accelerator.save_state(str(temporary))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        for old in sorted(
            folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-"))
        )[:-2]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="samples a step of one rank")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument(
        "--step-seconds", type=float, default=0.0, help="a step takes at least so long"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    arguments.output.mkdir(parents=True, exist_ok=True)
    # Without a GPU, tell Accelerate so; otherwise each process would train as the only one.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(make_data(4096), batch_size=arguments.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = 0
    newest = find_newest(arguments.output)
    if newest is not None:
        accelerator.load_state(str(newest))
        step = int(newest.name.removeprefix("step-"))
    while step < arguments.steps:
        for inputs, targets in loader:
            began = time.monotonic()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            total = accelerator.reduce(loss.detach(), reduction="mean")
            if accelerator.is_main_process:
                print(
                    f"step {step} loss {total.item():.6f} world {accelerator.num_processes}",
                    flush=True,
                )
            if step % arguments.save_every == 0 or step == arguments.steps:
                save(accelerator, arguments.output, step)
            if step == arguments.steps:
                break
            time.sleep(max(0.0, arguments.step_seconds - (time.monotonic() - began)))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
