"""A plain DistributedDataParallel loop that resumes. It does not depend on Evergrad: any torchrun can start
it.

The task is artificial: a small network learns a fixed random linear map. Sample ``i`` depends only on ``i``,
and step ``s`` uses the samples ``s * batch`` … in order, for any number of ranks.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_samples(indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of these samples."""
    rows = [
        torch.randn(16, generator=torch.Generator().manual_seed(index)) for index in indices
    ]
    inputs = torch.stack(rows) if rows else torch.empty(0, 16)
    weight = torch.randn(16, 4, generator=torch.Generator().manual_seed(2**31))
    return inputs, inputs @ weight


def save(path: Path, state: dict[str, object]) -> None:
    """Write the file atomically: under another name, then rename it."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.rename(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--batch", type=int, default=32, help="samples a step, over all ranks"
    )
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument(
        "--step-seconds", type=float, default=0.0, help="a step takes at least so long"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    checkpoint = arguments.output / "checkpoint.pt"

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    parallel = DistributedDataParallel(model)

    for step in range(first, arguments.steps):
        began = time.monotonic()
        indices = list(range(step * arguments.batch, (step + 1) * arguments.batch))[
            rank::world_size
        ]
        inputs, targets = (one.to(device) for one in make_samples(indices))
        # DDP averages over ranks. Divide by this rank's share of the batch, so that each sample has the same
        # weight.
        loss = (
            (parallel(inputs) - targets).square().mean(dim=1).sum()
            * world_size
            / arguments.batch
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach() / world_size
        dist.all_reduce(total)
        if rank == 0:
            print(
                f"step {step + 1} loss {total.item():.6f} world {world_size} from sample {indices[0]}",
                flush=True,
            )
            if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
                save(
                    checkpoint,
                    {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step + 1,
                    },
                )
        time.sleep(max(0.0, arguments.step_seconds - (time.monotonic() - began)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
