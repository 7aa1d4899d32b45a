"""Factories: a checkpoint manager in a world of one that saves into a temporary directory, and a small state
whose values depend on the step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from evergrad_manifest.training import Checkpoint
from evergrad_trainer.checkpoint.attempts import Medium
from evergrad_trainer.checkpoint.faults import FaultPoints, NoFaults
from evergrad_trainer.checkpoint.generations import claim_generation
from evergrad_trainer.checkpoint.manager import CheckpointManager
from evergrad_trainer.checkpoint.manifest import Identity
from evergrad_trainer.checkpoint.store import open_store
from evergrad_trainer.distributed.world import Membership, World


@dataclass
class Solo:
    """A manager in a world of one, its events, and its state."""

    manager: CheckpointManager
    directory: Path
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def save(self, step: int, **options: Any) -> None:
        """Save the state of ``step`` and wait for the end of the save."""
        self.manager.save(step, state_of(step), extra={"step": step}, wait=True, **options)

    def restore(self) -> int | None:
        """Load into a blank state. Returns the step, after a bit-by-bit check of its values."""
        state = {key: torch.zeros_like(value) for key, value in state_of(0).items()}
        restored = self.manager.restore(state)
        if restored is None:
            return None
        assert all(
            torch.equal(value, state_of(restored.step)[key]) for key, value in state.items()
        )
        assert restored.extra == {"step": restored.step}
        return restored.step

    def names(self) -> list[str]:
        """Return the published names."""
        return sorted(path.name for path in self.directory.glob("step-*"))

    def types(self) -> list[str]:
        """Return the types of the events so far."""
        return [type_ for type_, _ in self.events]


def state_of(step: int) -> dict[str, torch.Tensor]:
    """Return tensors of every kind whose values depend on ``step``."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.weight": torch.randn(33, 7, generator=generator),
        "model.half": torch.randn(11, generator=generator).bfloat16(),
        "model.flags": torch.randn(9, generator=generator) > 0,
        "optimizer.step": torch.tensor(float(step)),
        "optimizer.count": torch.arange(5) + step,
        "optimizer.empty": torch.zeros(0, 4),
    }


MakeSolo = Callable[..., Solo]


@pytest.fixture
def make_solo(tmp_path: Path) -> MakeSolo:
    """``make_solo(keep=3, ...)``: a fresh start on the directory, with its own generation."""

    def make(
        *,
        directory: Path | None = None,
        hook: FaultPoints | None = None,
        identity: Identity | None = None,
        keep_waiting: int = 0,
        **settings: Any,
    ) -> Solo:
        directory = directory or tmp_path / "checkpoints"
        world = World(
            generation=claim_generation(directory),
            rank=0,
            size=1,
            device=torch.device("cpu"),
        )
        events: list[tuple[str, dict[str, Any]]] = []
        medium = Medium(stale_seconds=0.0, faults=hook or NoFaults())
        manager = CheckpointManager(
            directory,
            membership=Membership(world),
            settings=Checkpoint.model_validate(settings),
            identity=identity or Identity("run", "recipe", "data"),
            on_event=lambda type_, fields: events.append((type_, fields)),
            store=open_store(directory, medium=medium, keep_waiting=keep_waiting),
        )
        return Solo(manager, directory, events)

    return make


@pytest.fixture
def make_state() -> Callable[[int], dict[str, torch.Tensor]]:
    """Return the state of a step, as ``Solo.save`` saves it."""
    return state_of
