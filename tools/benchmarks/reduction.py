"""Gradient reduction of two processes: our flat buckets compared with torch's DDP wrapper, with the same
batches, in turns; and the transfer of a state.

``measure_reduction`` starts this file twice, as the two ranks.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from elastic_nodes import LENGTH, end_process, free_port, start_process, training_manifest

_SLOTS = 2
"""Slots of a step on each rank; gradients are exchanged in the last slot."""
_WARM_UP = 3


def measure_reduction(
    folder: Path, *, events: int, is_tiny: bool
) -> dict[str, list[dict[str, Any]]]:
    """Measure both in turns: seconds per step.

    Also measures the seconds of one transfer of parameters and optimizer state.
    """
    folder.mkdir(parents=True)
    config = training_manifest(num_nodes=2, is_tiny=is_tiny)["spec"]["training"]["model"][
        "config"
    ]
    port = str(free_port())
    ranks = [
        start_process(
            [
                sys.executable,
                str(Path(__file__).resolve()),
                json.dumps(config),
                str(3 * events),
            ],
            output=folder / f"rank-{rank}.log",
            variables={
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
        )
        for rank in range(2)
    ]
    try:
        ranks[0].wait(600)
    finally:
        for process in ranks:
            end_process(process)
    # torch may print something after the result.
    lines = (folder / "rank-0.log").read_text(encoding="utf-8").splitlines()
    found: dict[str, Any] = json.loads(
        next(line for line in reversed(lines) if line.startswith('{"turns"'))
    )
    turns = found["turns"]
    medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    print(
        f"  a step: {medians}, a transfer: {statistics.median(found['transfers']):.3f} s",
        flush=True,
    )
    return {
        "turn": turns,
        "transfer": [{"seconds": seconds} for seconds in found["transfers"]],
    }


def _be_rank(config: dict[str, Any], rounds: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    turns = {
        "evergrad": _own_turn(config),
        "DDP": _wrapped_turn(config, keeps_gradients=False),
        "DDP_kept": _wrapped_turn(config, keeps_gradients=True),
    }
    names = list(turns)
    found = []
    for number in range(rounds + _WARM_UP):
        seconds = {}
        first = number % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            before = time.perf_counter()
            turns[name](number)
            dist.barrier()
            seconds[name] = time.perf_counter() - before
        found.append(seconds)
    transfers = _time_transfers(config, count=5)
    if dist.get_rank() == 0:
        print(json.dumps({"turns": found[_WARM_UP:], "transfers": transfers}))
    dist.destroy_process_group()


def _build(config: dict[str, Any]) -> tuple[Any, Any]:
    import torch

    from evergrad_manifest.training import Model
    from evergrad_trainer.models.build import build_model, plan_model

    plan = plan_model(
        Model.model_validate({"config": config}), base_directory=Path(), vocab_size=257
    )
    model = build_model(plan, seed=0, precision="fp32")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _tokens(step: int, slot: int) -> Any:
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed((step * _SLOTS + slot) * 2 + dist.get_rank())
    return torch.randint(0, 256, (1, LENGTH), generator=generator)


def _own_turn(config: dict[str, Any]) -> Callable[[int], None]:
    """Return a step like the trainer's: gradients accumulate in flat buckets, which are summed over ranks
    during the last backward pass."""
    import torch
    import torch.distributed as dist

    from evergrad_trainer.distributed.world import Interrupt, World
    from evergrad_trainer.models.gradients import BucketedSum
    from evergrad_trainer.models.parallel import default_bucket_bytes

    model, optimizer = _build(config)
    gradients = BucketedSum(
        list(model.parameters()), bucket_bytes=default_bucket_bytes(on_accelerator=False)
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(
        1, rank, size, torch.device("cpu"), group=dist.group.WORLD, interrupt=Interrupt()
    )

    def turn(step: int) -> None:
        gradients.begin(world)
        for slot in range(_SLOTS):
            gradients.before_backward(is_last=slot == _SLOTS - 1)
            tokens = _tokens(step, slot)
            (
                model(
                    input_ids=tokens,
                    labels=tokens,
                    use_cache=False,
                ).loss
                / (_SLOTS * size)
            ).backward()
            gradients.after_backward()
        gradients.finish()
        optimizer.step()

    return turn


def _wrapped_turn(
    config: dict[str, Any], *, keeps_gradients: bool
) -> Callable[[int], None]:
    """Return the same with DDP: no_sync while gradients accumulate, and gradients as views of its buckets.

    ``keeps_gradients``: gradients are set to zero, not to None as ``zero_grad()`` does by default.
    """
    from torch.nn.parallel import DistributedDataParallel

    model, optimizer = _build(config)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def turn(step: int) -> None:
        optimizer.zero_grad(set_to_none=not keeps_gradients)
        for slot in range(_SLOTS):
            tokens = _tokens(step, slot)
            with nullcontext() if slot == _SLOTS - 1 else parallel.no_sync():
                (
                    parallel(
                        input_ids=tokens,
                        labels=tokens,
                        use_cache=False,
                    ).loss
                    / _SLOTS
                ).backward()
        optimizer.step()

    return turn


def _time_transfers(config: dict[str, Any], *, count: int) -> list[float]:
    """Send from rank 0 as much as a joining rank needs, in one piece: parameters and two moments of each."""
    import torch
    import torch.distributed as dist

    model, _ = _build(config)
    state = torch.zeros(3 * sum(p.numel() for p in model.parameters()))
    seconds = []
    for _ in range(count):
        dist.barrier()
        before = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(state, 1)
        else:
            dist.recv(state, 0)
        dist.barrier()
        seconds.append(time.perf_counter() - before)
    return seconds


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _be_rank(json.loads(sys.argv[1]), int(sys.argv[2]))
