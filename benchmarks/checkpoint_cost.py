"""Training time lost to an asynchronous checkpoint of a 50M-parameter run, as a share of the 60 s until the
next one.

Windows of some steps take turns: one begins with a save, one does not. A window lasts longer than the
background write, so the difference of the two is everything a save costs: the blocking copy and the slower
steps while it is written.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from common import SMALL, Row, build_training, make_prepared_data, print_rows

from evergrad_trainer.checkpoint.generations import claim_generation
from evergrad_trainer.checkpoint.manager import CheckpointManager
from evergrad_trainer.checkpoint.manifest import Identity
from evergrad_trainer.distributed import set_threads
from evergrad_trainer.models.build import plan_model
from evergrad_trainer.training.build import build_machinery, build_stepper
from evergrad_trainer.training.exchange import NUM_FLAGS
from evergrad_trainer.world import Membership, World

INTERVAL_SECONDS = 60.0
WINDOW_SECONDS = 12.0


def measure(*, rounds: int = 7) -> list[Row]:
    """Median seconds lost a save, and their share of an interval."""
    set_threads(2)
    training = build_training(parameters="50M", shape=SMALL)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        opened = make_prepared_data(training, folder)
        generation = claim_generation(folder / "checkpoints")
        world = World(generation=generation, rank=0, size=1, device=torch.device("cpu"))
        plan = plan_model(training.model, base_directory=folder, vocab_size=257)
        machinery = build_machinery(training, opened, plan, world, with_weights=True)
        stepper = build_stepper(training, machinery, opened.data.train, total_steps=100_000)
        blocking: list[float] = []
        manager = CheckpointManager(
            folder / "checkpoints",
            membership=Membership(world),
            settings=training.checkpoint,
            identity=Identity("bench", "0" * 64, opened.data.fingerprint),
            on_event=lambda type_, fields: blocking.append(fields["blocking_seconds"]),
        )
        steps = iter(range(1, 100_000))

        def window(num_steps: int, *, save: bool) -> float:
            begun = time.perf_counter()
            for index in range(num_steps):
                step = next(steps)
                stepper.run(step, world, (False,) * NUM_FLAGS)
                if save and index == 0:
                    manager.save(step, machinery.state(), extra={"step": step})
                manager.poll()
            return time.perf_counter() - begun

        one = min(window(1, save=False) for _ in range(3))
        length = max(4, round(WINDOW_SECONDS / one))
        window(length, save=True)
        pairs = []
        for number in range(rounds):
            order = (True, False) if number % 2 else (False, True)
            seconds = {save: window(length, save=save) for save in order}
            pairs.append((seconds[True], seconds[False]))
        manager.close()
    lost = [with_save - without for with_save, without in pairs]
    what = "asynchronous checkpoint, 50M Llama, 600 MB"
    return [
        Row(
            what,
            "window without a save",
            statistics.median(pair[1] for pair in pairs),
            "s",
            note=f"{length} steps",
        ),
        Row(what, "blocking", statistics.median(blocking[1:]), "s"),
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
            statistics.median(lost) / INTERVAL_SECONDS,
            "ratio",
            goal="<= 0.01",
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    print_rows(measure(rounds=parser.parse_args().rounds))
