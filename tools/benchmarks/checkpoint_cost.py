"""Training time lost to an asynchronous checkpoint of a 50M-parameter run, as a share of the 60 s until the
next one.

Windows of some steps alternate: one begins with a save, the next does not. A window is longer than the
background write, so the difference of the two is the whole cost of a save: the blocking copy, and slower
steps during the write.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from common import (
    SMALL,
    Row,
    build_training,
    interval_of_median,
    make_prepared_data,
    print_rows,
)

from evergrad_trainer.checkpoint.generations import claim_generation
from evergrad_trainer.checkpoint.manager import CheckpointManager
from evergrad_trainer.checkpoint.manifest import Identity
from evergrad_trainer.distributed.process_groups import set_threads
from evergrad_trainer.distributed.world import Membership, World
from evergrad_trainer.models.build import plan_model
from evergrad_trainer.training.build import build_machinery, build_stepper
from evergrad_trainer.training.exchange import NUM_FLAGS

INTERVAL_SECONDS = 60.0
WINDOW_SECONDS = 12.0


class Windows:
    """A run of the 50M model, a few steps at a time."""

    def __init__(self, folder: Path) -> None:
        training = build_training(parameters="50M", shape=SMALL)
        opened = make_prepared_data(training, folder)
        generation = claim_generation(folder / "checkpoints")
        self._world = World(
            generation=generation,
            rank=0,
            size=1,
            device=torch.device("cpu"),
        )
        plan = plan_model(training.model, base_directory=folder, vocab_size=257)
        self._machinery = build_machinery(
            training, opened, plan, self._world, with_weights=True
        )
        self._stepper = build_stepper(
            training, self._machinery, opened.data.train, total_steps=100_000
        )
        self.blocking: list[float] = []
        """Seconds for which each save has blocked training."""
        self.manager = CheckpointManager(
            folder / "checkpoints",
            membership=Membership(self._world),
            settings=training.checkpoint,
            identity=Identity("bench", "0" * 64, opened.data.fingerprint),
            on_event=lambda type_, fields: self.blocking.append(fields["blocking_seconds"]),
        )
        self._steps = iter(range(1, 100_000))

    def run(self, num_steps: int, *, save: bool) -> float:
        """Return the seconds of ``num_steps`` steps. If ``save`` is true, a save follows the first of
        them."""
        begun = time.perf_counter()
        for index in range(num_steps):
            step = next(self._steps)
            self._stepper.run(step, self._world, (False,) * NUM_FLAGS)
            if save and index == 0:
                self.manager.save(
                    step,
                    self._machinery.state(),
                    extra={"step": step},
                )
            self.manager.poll()
        return time.perf_counter() - begun


def measure(*, rounds: int = 7) -> list[Row]:
    """Return the median seconds lost per save, and their share of an interval."""
    set_threads(2)
    with tempfile.TemporaryDirectory() as name:
        windows = Windows(Path(name))
        # A window must be longer than its save. The first save allocates the host copy, so it does not count.
        one = min(windows.run(1, save=False) for _ in range(3))
        length = max(4, round(WINDOW_SECONDS / one))
        windows.run(length, save=True)
        pairs = []
        for number in range(rounds):
            order = (True, False) if number % 2 else (False, True)
            seconds = {save: windows.run(length, save=save) for save in order}
            pairs.append((seconds[True], seconds[False]))
        windows.manager.close()

    lost = [with_save - without for with_save, without in pairs]
    shares = [seconds / INTERVAL_SECONDS for seconds in lost]
    low, high = interval_of_median(shares)
    what = "asynchronous checkpoint, 50M Llama, 600 MB"
    without = statistics.median(pair[1] for pair in pairs)
    return [
        Row(
            what,
            "window without a save",
            without,
            "s",
            note=f"{length} steps",
        ),
        Row(what, "blocking", statistics.median(windows.blocking[1:]), "s"),
        Row(
            what,
            "lost a save",
            statistics.median(lost),
            "s",
            note=f"from {min(lost):.2f} to {max(lost):.2f}",
        ),
        Row(
            what,
            "lost / 60 s",
            statistics.median(shares),
            "ratio",
            goal="<= 0.01",
            note=f"n={rounds}; 95 % interval {low:.4f} to {high:.4f}",
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    print_rows(measure(rounds=parser.parse_args().rounds))
