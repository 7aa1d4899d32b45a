"""How long a checkpoint of a 50M-parameter training state (600 MB) blocks training, and when it is durable.

Compared with torch.save + fsync and with DCP's own FileSystemWriter, which both block training for the whole
save. All three alternate in one process. For the cost of the background write to concurrent steps, see
``checkpoint_cost.py``.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from common import Row, interval_of_median, print_rows

from evergrad_manifest.training import Checkpoint
from evergrad_trainer.checkpoint.generations import claim_generation
from evergrad_trainer.checkpoint.manager import CheckpointManager
from evergrad_trainer.checkpoint.manifest import Identity
from evergrad_trainer.distributed.world import Membership, World

State = dict[str, torch.Tensor]


def build_state(*, hidden: int = 640, layers: int = 10) -> State:
    """Return weights and both moments of a Llama-like model in fp32: about 50M parameters, 600 MB."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (1024, hidden),
        "head": (1024, hidden),
    }
    for layer in range(layers):
        shapes |= {f"{layer}.{name}": (hidden, hidden) for name in "qkvo"}
        shapes |= {
            f"{layer}.gate": (1728, hidden),
            f"{layer}.up": (1728, hidden),
            f"{layer}.down": (hidden, 1728),
        }
        shapes |= {f"{layer}.norm1": (hidden,), f"{layer}.norm2": (hidden,)}
    state = {f"model.{name}": torch.randn(shape) for name, shape in shapes.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        state |= {
            f"optimizer.{name}.{moment}": torch.randn(shape)
            for name, shape in shapes.items()
        }
    return state


def open_manager(directory: Path) -> CheckpointManager:
    """Return Evergrad's manager in a world of one, with default settings except that one checkpoint is
    kept."""
    world = World(
        generation=claim_generation(directory), rank=0, size=1, device=torch.device("cpu")
    )
    return CheckpointManager(
        directory,
        membership=Membership(world),
        settings=Checkpoint(keep=1),
        identity=Identity("benchmark", "recipe", "data"),
        on_event=lambda type_, fields: None,
    )


def time_evergrad(
    manager: CheckpointManager,
    state: State,
    step: int,
) -> tuple[float, float]:
    """Return the seconds for which one save blocks training, and the seconds until it is published."""
    blocking = manager.save(step, state, extra={})
    manager.wait()
    published = manager.published
    if published is None or published.step != step:
        raise RuntimeError("the save failed")
    return blocking, blocking + published.seconds


def time_torch_save(state: State, folder: Path) -> float:
    """Return the seconds of torch.save into a new file, with fsync."""
    begun = time.perf_counter()
    with (folder / "state.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begun
    (folder / "state.pt").unlink()
    return seconds


def time_plain_dcp(state: State, folder: Path) -> float:
    """Return the seconds of dcp.save into a new directory with its own FileSystemWriter, which syncs its
    files."""
    begun = time.perf_counter()
    dcp.save(
        dict(state),
        storage_writer=dcp.FileSystemWriter(folder / "dcp"),
        no_dist=True,
    )
    seconds = time.perf_counter() - begun
    shutil.rmtree(folder / "dcp")
    return seconds


@dataclass
class Samples:
    """Seconds of each turn."""

    blocking: list[float] = field(default_factory=list)
    published: list[float] = field(default_factory=list)
    torch_save: list[float] = field(default_factory=list)
    plain_dcp: list[float] = field(default_factory=list)


def take_turns(state: State, folder: Path, rounds: int) -> tuple[Samples, float]:
    """Return the samples of ``rounds`` turns of each, and the seconds of Evergrad's first save."""
    samples = Samples()
    manager = open_manager(folder / "run" / "checkpoints")

    def ours(number: int) -> None:
        blocking, published = time_evergrad(manager, state, 10 + number)
        samples.blocking.append(blocking)
        samples.published.append(published)

    turns: list[Callable[[int], None]] = [
        ours,
        lambda number: samples.torch_save.append(time_torch_save(state, folder)),
        lambda number: samples.plain_dcp.append(time_plain_dcp(state, folder)),
    ]

    # Evergrad's first save allocates the host copy. The first saves of the others are warm-ups, too.
    first, _ = time_evergrad(manager, state, 1)
    time_torch_save(state, folder)
    time_plain_dcp(state, folder)
    for number in range(rounds):
        # Change the order in each round, because each writer finds the disk's queue as the previous one left
        # it.
        for place in range(len(turns)):
            turns[(number + place) % len(turns)](number)
    manager.close()
    return samples, first


def measure(*, rounds: int = 7) -> list[Row]:
    """Return medians over ``rounds`` turns of each. Ratios are medians of the ratios per turn."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    state = build_state()
    with tempfile.TemporaryDirectory() as scratch:
        samples, first = take_turns(state, Path(scratch), rounds)

    size = sum(value.nbytes for value in state.values())
    what = f"checkpoint of 50M parameters, {size / 1e6:.0f} MB"
    still = "training stands still"
    blocking, published = samples.blocking, samples.published
    torch_save, plain_dcp = samples.torch_save, samples.plain_dcp
    figures = (
        (still, blocking, f"first time {first:.2f}"),
        ("until published", published, "hashes, fsync, manifest, rename"),
        ("torch.save + fsync", torch_save, still),
        ("dcp.save", plain_dcp, still),
    )
    ratios = (
        ("stands still / torch.save", blocking, torch_save, "<= 0.5"),
        ("stands still / dcp.save", blocking, plain_dcp, "<= 0.5"),
        ("until published / torch.save", published, torch_save, ""),
        ("until published / dcp.save", published, plain_dcp, "<= 1.0"),
    )
    rows = [
        Row(what, name, statistics.median(seconds), "s", note=note)
        for name, seconds, note in figures
    ]
    rows += [
        _ratio_row(what, name, ours, theirs, goal=goal)
        for name, ours, theirs, goal in ratios
    ]
    return rows


def _ratio_row(
    what: str, name: str, ours: list[float], theirs: list[float], *, goal: str = ""
) -> Row:
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    low, high = interval_of_median(ratios)
    note = f"n={len(ratios)}; 95 % interval {low:.3f} to {high:.3f}"
    return Row(what, name, statistics.median(ratios), "ratio", goal, note)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    print_rows(measure(rounds=parser.parse_args().rounds))
