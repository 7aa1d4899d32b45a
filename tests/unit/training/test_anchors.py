"""The save that the next step waits for: retried with pauses until it is published, and never assumed to be
made."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from evergrad_trainer.base.errors import PeerLostError
from evergrad_trainer.base.records import Event
from evergrad_trainer.distributed.world import Interrupt, World
from evergrad_trainer.training.components import TrainingComponents
from evergrad_trainer.training.loop import _anchor
from evergrad_trainer.training.progress import TrainingProgress

STEP = 40


class Saves:
    """Saves of which the first ones fail."""

    def __init__(self, *, failures: int = 0, published: int | None = None) -> None:
        self.tried: list[int] = []
        self.published = None if published is None else SimpleNamespace(step=published)
        self._failures = failures

    def save(self, step: int, tensors: Any, **options: Any) -> None:
        self.tried.append(step)
        if len(self.tried) > self._failures:
            self.published = SimpleNamespace(step=step)

    def wait(self) -> None: ...


class Told:
    """The events of a run, and the steps at which its snapshots were taken."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.taken: list[int] = []

    def event(self, event: Event) -> None:
        self.events.append(event.type)

    def take(self, step: int, world: World) -> dict[str, str]:
        self.taken.append(step)
        return {"reference": "0" * 16}


def run_of(
    saves: Saves, told: Told, *, interrupt: Interrupt | None = None
) -> TrainingComponents:
    cpu = torch.device("cpu")
    world = World(generation=1, rank=0, size=1, device=cpu, interrupt=interrupt)
    parts = {
        "progress": TrainingProgress(finished_steps=STEP, resumed_step=30, saved_step=30),
        "checkpoints": saves,
        "snapshots": told,
        "observers": told,
        "membership": SimpleNamespace(world=world),
        "state": SimpleNamespace(tensors=dict, values=dict),
        "is_comparing": False,
        "limits": SimpleNamespace(keep_every=None),
        "tokens_per_step": 4,
        "clock": lambda: 0.0,
    }
    return cast(TrainingComponents, SimpleNamespace(**parts))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Records the requested waits without waiting."""
    made: list[float] = []
    monkeypatch.setattr("evergrad_trainer.training.loop.time.sleep", made.append)
    return made


@pytest.mark.parametrize(("failures", "seconds"), [(0, 0), (1, 5), (2, 15), (4, 55)])
def test_a_save_that_fails_is_retried_after_growing_pauses(
    pauses: list[float], failures: int, seconds: float
) -> None:
    """Without them trouble of a second would be as many failures as a run may have."""
    saves, told = Saves(failures=failures), Told()
    _anchor(run_of(saves, told))
    assert saves.tried == [STEP] * (failures + 1)
    assert sum(pauses) == pytest.approx(seconds)
    assert told.taken == [STEP] and told.events == ["snapshot"]


def test_an_existing_checkpoint_is_not_saved_again(pauses: list[float]) -> None:
    saves, told = Saves(published=STEP), Told()
    _anchor(run_of(saves, told))
    assert saves.tried == pauses == [] and told.taken == [STEP]


def test_a_pause_ends_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt, saves, told = Interrupt(), Saves(failures=1), Told()
    monkeypatch.setattr(
        "evergrad_trainer.training.loop.time.sleep", lambda seconds: interrupt.set()
    )
    with pytest.raises(PeerLostError):
        _anchor(run_of(saves, told, interrupt=interrupt))
    assert saves.tried == [STEP] and told.taken == []
