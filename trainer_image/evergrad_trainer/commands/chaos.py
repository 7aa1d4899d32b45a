"""Finds the package that ``evergrad run --chaos`` needs."""

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Protocol, cast

from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_trainer.node.local import LocalCoordinator, LocalNodes

_GROUP = "evergrad.chaos"


class ChaosModule(Protocol):
    """What the package evergrad-chaos provides: its module ``evergrad_chaos.disturb``."""

    def make_nodes(self, main: Callable[[int], int], num_nodes: int) -> LocalNodes:
        """Nodes of this machine that can be killed, frozen and asked to leave."""

    def run_disturbed(
        self,
        seed: int,
        coordinator: LocalCoordinator,
        nodes: LocalNodes,
        *,
        directory: Path,
    ) -> int:
        """Run the nodes, disturb them in the order that ``seed`` gives, and return the run's exit code."""


def load_chaos() -> ChaosModule:
    """Import what the package provides. Raises ConfigurationError if the package is not installed."""
    for entry in metadata.entry_points(group=_GROUP):
        return cast(ChaosModule, entry.load())
    why = "it kills processes at random, so that the images do not contain it"
    remedy = "Install it, in a clone of Evergrad: pip install ./chaos"
    raise ConfigurationError(
        Problem("--chaos", "needs the Python package evergrad-chaos", why, remedy)
    )
