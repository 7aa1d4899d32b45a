"""The available trackers: how to open each of them, and the packages that it needs."""

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Final

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import Training
from evergrad_trainer.observers.trackers.feeder import Opener
from evergrad_trainer.observers.trackers.interface import Library, TrackedRun

_HERE: Final = "evergrad_trainer.observers.trackers"
_CLASSES: Final = {
    "tensorboard": f"{_HERE}.tensorboard:TensorBoard",
    "wandb": f"{_HERE}.weights_and_biases:WeightsAndBiases",
    "mlflow": f"{_HERE}.mlflow:MLflow",
    "aim": f"{_HERE}.aim:Aim",
}
"""Module and class of each type."""
_PACKAGES: Final = {
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "aim": ("aim",),
}
"""Modules that each type imports. The trainer's extra with the name of the type installs them."""


def find_opener(type_: str) -> Opener:
    """Return the function that opens the library of this type. The library is imported only in the call."""
    module, _, name = _CLASSES[type_].partition(":")

    def open_library(run: TrackedRun) -> Library:
        library: Library = getattr(importlib.import_module(module), name)(run)
        return library

    return open_library


def check_trackers(training: Training) -> Iterator[Problem]:
    """Yield a problem for each tracker whose packages are not installed. Checked before the first step."""
    for index, tracker in enumerate(training.logging.trackers):
        needed: tuple[str, ...] = _PACKAGES[tracker.type]
        # MLflow's client alone is sufficient for a server, but does not include databases.
        if tracker.type == "mlflow" and tracker.mode == "offline":
            needed += ("sqlalchemy", "alembic")
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        if missing:
            plural = "packages" if len(missing) > 1 else "package"
            yield Problem(
                f"spec.training.logging.trackers[{index}].type",
                f"{tracker.type} needs the {plural} {', '.join(missing)}",
                "not installed here",
                f"Run `pip install {' '.join(missing)}`, or remove the tracker",
            )
