"""The script that stock torchrun and ``spec.script`` both start: plain DDP with a checkpoint, and the
benchmarks' model and batch.

It does not depend on its starter. Each finished step is a line of ``steps.jsonl``; a process's first line
contains the duration of its start.
"""

import argparse
import ctypes
import json
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

_BEGUN = time.time()
_PARENT = os.getppid()
# A killed torchrun leaves workers behind; in a container they would die, too.
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != _PARENT:
    os._exit(1)

import torch  # noqa: E402 - imports are timed, too
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402


def build(config: dict[str, Any]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return model and optimizer."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**config))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def reload(
    checkpoint: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> int:
    """Load the checkpoint, and return its step."""
    state = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def save(
    checkpoint: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Save atomically."""
    temporary = checkpoint.with_suffix(".tmp")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
        temporary,
    )
    temporary.rename(checkpoint)


def train_step(
    parallel: DistributedDataParallel, *, step: int, num_slots: int, length: int
) -> None:
    """Compute the gradients of this rank's slots of a step; DDP exchanges them in the last slot."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = range(rank, num_slots, world_size)
    for slot in own:
        generator = torch.Generator().manual_seed(step * num_slots + slot)
        tokens = torch.randint(0, 256, (1, length), generator=generator)
        with nullcontext() if slot == own[-1] else parallel.no_sync():
            loss = parallel(
                input_ids=tokens,
                labels=tokens,
                use_cache=False,
            ).loss
            (loss * world_size / num_slots).backward()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--model", type=json.loads, required=True, help="a transformers configuration"
    )
    parser.add_argument("--slots", type=int, default=6)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument(
        "--reloads",
        type=int,
        help="only load the checkpoint so often, and print the seconds of each",
    )
    return parser.parse_args()


def time_reloads(arguments: argparse.Namespace) -> None:
    """Measure loading alone, each time into a new model and optimizer."""
    seconds = []
    for _ in range(arguments.reloads):
        model, optimizer = build(arguments.model)
        before = time.perf_counter()
        reload(arguments.output / "checkpoint.pt", model, optimizer)
        seconds.append(time.perf_counter() - before)
    print(json.dumps(seconds))


def main() -> None:
    imported = time.time()
    arguments = parse_arguments()
    torch.set_num_threads(1)
    if arguments.reloads is not None:
        time_reloads(arguments)
        return
    dist.init_process_group("gloo")
    met = time.time()
    checkpoint = arguments.output / "checkpoint.pt"
    model, optimizer = build(arguments.model)
    built = time.time()
    first = reload(checkpoint, model, optimizer) if checkpoint.exists() else 0
    start = {
        "imports": imported - _BEGUN,
        "group": met - imported,
        "model": built - met,
        "reload": time.time() - built,
    }
    beginning = {"begun": _BEGUN, "start": start}
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    steps = os.open(
        arguments.output / "steps.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
    )
    generation = time.time_ns()
    for step in range(first + 1, 1_000_000):
        optimizer.zero_grad()
        train_step(
            parallel,
            step=step,
            num_slots=arguments.slots,
            length=arguments.length,
        )
        optimizer.step()
        if dist.get_rank() == 0:
            row = {
                "step": step,
                "generation": generation,
                "world_size": dist.get_world_size(),
                "time": time.time(),
            }
            os.write(
                steps,
                json.dumps(row | (beginning if step == first + 1 else {})).encode() + b"\n",
            )
            if step % arguments.save_every == 0:
                save(checkpoint, model, optimizer, step)


if __name__ == "__main__":
    main()
