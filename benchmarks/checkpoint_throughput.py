"""Checkpoints of a 50M-parameter training state (600 MB): what training loses to one, and how fast it becomes durable.

Against torch.save + fsync and DCP's own FileSystemWriter, both of which stop training for the whole save. All take turns in one
process. ``measure`` returns one object a figure: what, name, value, unit, goal (empty for figures that are for scale), note.
"""

import argparse
import functools
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.nn import functional

from evergrad_trainer.checkpoint.manager import CheckpointManager, Identity, claim_generation
from evergrad_trainer.config.training import Checkpoint
from evergrad_trainer.distributed import Membership, World

WHAT = "checkpoint of 50M parameters with AdamW state"
INTERVAL_SECONDS = 60.0
"""Training loses what one save costs once in this time."""


def build_state(*, hidden: int = 640, layers: int = 10) -> dict[str, torch.Tensor]:
    """Weights and both moments of a Llama-like model, fp32: about 50M parameters, 600 MB."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (1024, hidden), "head": (1024, hidden)}
    for layer in range(layers):
        shapes |= {f"{layer}.{name}": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{layer}.gate": (1728, hidden), f"{layer}.up": (1728, hidden), f"{layer}.down": (hidden, 1728)}
        shapes |= {f"{layer}.norm1": (hidden,), f"{layer}.norm2": (hidden,)}
    prefixes = {"model.": "", "optimizer.": ".exp_avg", "optimizer": ".exp_avg_sq"}
    return {f"{start}{name}{end}": torch.randn(shape) for start, end in prefixes.items() for name, shape in shapes.items()}


def build_step() -> Callable[[], None]:
    """A training step to be disturbed: forward, backward and update of a small network on all threads."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch, target = torch.randn(512, 512), torch.randn(512, 512)  # a target it cannot fit: no step gets cheaper or denormal

    def step() -> None:
        functional.mse_loss(model(batch), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def open_manager(directory: Path) -> CheckpointManager:
    """Evergrad's manager in a world of one, with the default settings but one checkpoint kept."""
    world = World(generation=claim_generation(directory), rank=0, size=1, device=torch.device("cpu"))
    return CheckpointManager(
        directory,
        membership=Membership(world),
        settings=Checkpoint(keep=1),
        identity=Identity("benchmark", "recipe", "data"),
        on_event=lambda type_, fields: None,
    )


def time_evergrad(manager: CheckpointManager, state: dict[str, torch.Tensor], step: int) -> tuple[float, float]:
    """Seconds that training stands still for one save, and until it is published."""
    blocking = manager.save(step, state, extra={})
    manager.wait()
    published = manager.published
    if published is None or published.step != step:
        raise RuntimeError("the save failed")
    return blocking, blocking + published.seconds


def time_torch_save(state: dict[str, torch.Tensor], folder: Path) -> float:
    """Seconds of torch.save into one file, with fsync; all of them stop training."""
    begun = time.perf_counter()
    with (folder / "state.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - begun


def time_plain_dcp(state: dict[str, torch.Tensor], folder: Path) -> float:
    """Seconds of dcp.save with its own FileSystemWriter (which syncs its files); all of them stop training."""
    begun = time.perf_counter()
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(folder / "dcp"), no_dist=True)
    return time.perf_counter() - begun


def time_lost(
    manager: CheckpointManager, state: dict[str, torch.Tensor], *, steps: int, number: int, train: Callable[[], None]
) -> float:
    """Seconds that the same steps take longer with one asynchronous save among them than without."""
    seconds = []
    for is_saving in (False, True):
        begun = time.perf_counter()
        if is_saving:
            manager.save(number, state, extra={})
        for _ in range(steps):
            train()
            manager.poll()
        seconds.append(time.perf_counter() - begun)
        manager.wait()
    return seconds[1] - seconds[0]


def measure(*, rounds: int = 5) -> list[dict[str, Any]]:
    """Medians over ``rounds`` turns of each."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    torch.manual_seed(0)
    state, train = build_state(), build_step()
    size = sum(value.nbytes for value in state.values())
    found: dict[str, list[float]] = {"blocking": [], "background": [], "torch": [], "dcp": [], "lost": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        manager = open_manager(folder / "run" / "checkpoints")
        _, usual = time_evergrad(manager, state, 1)  # allocates the host copy
        train()
        begun = time.perf_counter()
        train()
        steps = max(3, int(3 * usual / (time.perf_counter() - begun)))
        for number in range(1, rounds + 1):
            blocking, background = time_evergrad(manager, state, 10 * number)
            found["blocking"].append(blocking)
            found["background"].append(background)
            found["torch"].append(time_torch_save(state, folder))
            found["dcp"].append(time_plain_dcp(state, folder))
            shutil.rmtree(folder / "dcp")
            found["lost"].append(time_lost(manager, state, steps=steps, number=10 * number + 5, train=train))
        manager.close()
    return build_rows({name: statistics.median(values) for name, values in found.items()}, size=size)


def build_rows(median: dict[str, float], *, size: int) -> list[dict[str, Any]]:
    """The figures, from the medians in seconds."""
    row = functools.partial(dict, what=WHAT, goal="", note="")
    share = 100 * max(0.0, median["lost"]) / INTERVAL_SECONDS
    return [
        row(name="evergrad: training stands still", value=median["blocking"], unit="s", note=f"{size / 1e6:.0f} MB"),
        row(name="evergrad: until published", value=median["background"], unit="s", note="checksums, fsync, manifest, rename"),
        row(name="torch.save + fsync", value=median["torch"], unit="s", note="training stands still"),
        row(name="dcp.save, FileSystemWriter", value=median["dcp"], unit="s", note="training stands still"),
        row(name="stands still / torch.save", value=median["blocking"] / median["torch"], unit="ratio", goal="<= 0.5"),
        row(name="stands still / dcp.save", value=median["blocking"] / median["dcp"], unit="ratio", goal="<= 0.5"),
        row(name="until published / dcp.save", value=median["background"] / median["dcp"], unit="ratio", goal="<= 1.2"),
        row(name="training lost a save", value=median["lost"], unit="s", note="two threads training meanwhile"),
        row(name="training lost, one save a minute", value=share, unit="percent", goal="<= 1"),
    ]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    for row in measure(rounds=parser.parse_args().rounds):
        print(f"{row['name']:<36} {row['value']:>10.4g} {row['unit']:<8} {row['goal']:<8} {row['note']}")


if __name__ == "__main__":
    main()
