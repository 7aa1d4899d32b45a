"""The worker of the rendezvous tests: sums ones over all ranks and writes one line per step, until it is
requested to finish.

It runs in the interpreter of the tested torch, so it imports no test packages.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from evergrad.elastic import generation, report


def work() -> None:
    """Run steps until the file ``finish`` exists."""
    directory, node = Path(os.environ["TEST_DIRECTORY"]), os.environ["EVERGRAD_NODE"]
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with (directory / f"steps-{node}-{os.getpid()}").open("a", buffering=1) as log:
        while True:
            values = torch.tensor([1.0, float((directory / "finish").exists())])
            dist.all_reduce(values)
            step = {
                "at": time.monotonic(),
                "node": node,
                "process": os.getpid(),
                "generation": generation(),
                "rank": rank,
            }
            log.write(
                json.dumps({**step, "world_size": world_size, "total": values[0].item()})
                + "\n"
            )
            if (directory / "boundary").exists():
                report(1, checkpoint_step=1)
            if values[1] > 0:
                break
            time.sleep(0.05)
    dist.destroy_process_group()
    after_training(directory, node)


def after_training(directory: Path, node: str) -> None:
    """Faults planned for the end: linger until a file exists, or fail once."""
    print(f"node {node} has finished training", flush=True)
    while (directory / f"linger-{node}").exists():
        time.sleep(0.02)
    crash = directory / f"crash-{node}"
    if crash.exists():
        crash.unlink()
        sys.exit(3)


if __name__ == "__main__":
    work()
