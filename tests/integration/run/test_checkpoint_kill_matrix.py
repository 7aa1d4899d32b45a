"""SIGKILL of each rank at each point of the publish protocol: the next start loads the newest whole
checkpoint, bit for bit."""

import mmap
import os
import signal
from pathlib import Path
from typing import Any

import checkpoint_processes as processes
import pytest
import torch

from evergrad_manifest.training import Checkpoint
from evergrad_trainer.checkpoint import faults
from evergrad_trainer.checkpoint.attempts import Medium
from evergrad_trainer.checkpoint.manager import CheckpointManager
from evergrad_trainer.checkpoint.manifest import Identity
from evergrad_trainer.checkpoint.store import open_store
from evergrad_trainer.distributed.world import Membership, World

IDENTITY = Identity("run", "recipe", "data")


def state_of(step: int) -> dict[str, torch.Tensor]:
    """Every value depends on the step, so that a mix of two steps cannot pass for either."""
    generator = torch.Generator().manual_seed(step)
    state: dict[str, torch.Tensor] = {
        f"model.layer{index}.weight": torch.randn(317 + index, 5, generator=generator)
        for index in range(6)
    }
    return {
        **state,
        "optimizer.step": torch.tensor(float(step)),
        "model.half": torch.randn(9, generator=generator).bfloat16(),
    }


class KillAt:
    """Kills the victim when the armed point is reached: a rank kills itself at its own points, and rank 0
    kills it at rank 0's points."""

    def __init__(self, point: str, victim: int, pids: list[int]) -> None:
        self._point, self._victim, self._pids = point, victim, pids
        self.is_armed = False

    def reached(self, point: str, rank: int) -> None:
        own = point in (faults.MID_SHARD, faults.BEFORE_FSYNC)
        if not self.is_armed or point != self._point or (own and rank != self._victim):
            return
        os.kill(self._pids[self._victim], signal.SIGKILL)
        processes.wait_until_dead(self._pids[self._victim])


def save_two_steps(
    world: World, directory: Path, point: str, victim: int, permanent: bool = False
) -> dict[str, Any]:
    """Publish step 100, then die (or lose a peer) at ``point`` of saving step 200."""
    hook = KillAt(point, victim, world.gather_json(os.getpid()))
    events: list[Any] = []
    manager = CheckpointManager(
        directory,
        membership=Membership(world),
        settings=Checkpoint(keep=1),
        identity=IDENTITY,
        on_event=lambda type_, fields: events.append([type_, fields]),
        store=open_store(directory, medium=Medium(faults=hook, block_bytes=mmap.PAGESIZE)),
    )
    if permanent:
        # Add a rolling checkpoint: without any, retention would have nothing to remove, so the kill point
        # would not occur.
        manager.save(50, state_of(50), extra={"step": 50, "permanent": True}, wait=True)
    manager.save(100, state_of(100), extra={"step": 100}, wait=True)
    hook.is_armed = True
    manager.save(200, state_of(200), extra={"step": 200})
    manager.wait()
    if world.rank == victim:
        signal.pause()  # its own part of the save is over; rank 0 will see to it
    return {"events": events, "attempts": sorted(os.listdir(directory / ".tmp"))}


def restart(world: World, directory: Path) -> dict[str, Any]:
    """Return the state that a new start finds; then it continues and saves step 300."""
    events: list[Any] = []
    manager = CheckpointManager(
        directory,
        membership=Membership(world),
        settings=Checkpoint(keep=1),
        identity=IDENTITY,
        on_event=lambda type_, fields: events.append([type_, fields]),
    )
    state = {key: torch.zeros_like(value) for key, value in state_of(0).items()}
    restored = manager.restore(state)
    assert restored is not None
    expected = state_of(restored.step)
    exact = all(torch.equal(state[key], expected[key]) for key in expected)
    manager.save(300, state_of(300), extra={"step": 300}, wait=True)
    return {
        "step": restored.step,
        "extra": restored.extra,
        "exact": exact,
        "events": events,
    }


@pytest.mark.acceptance("8d-2b:pretrain")
@pytest.mark.capability("G-70", "O-57")
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("point", faults.POINTS)
def test_after_a_kill_at_any_point_the_newest_complete_checkpoint_loads_bit_equal(
    tmp_path: Path, point: str, victim: int
) -> None:
    directory = tmp_path / "checkpoints"
    ended = processes.run_world(
        save_two_steps, size=2, directory=directory, point=point, victim=victim
    )
    assert ended[victim].status == -signal.SIGKILL, ended[victim].errors

    results = processes.values(processes.run_world(restart, size=2, directory=directory))

    # Rank 0 publishes as soon as all shards are durable; from then on losing rank 1 no longer matters.
    is_published = point in (faults.AFTER_RENAME, faults.RETENTION) or (
        victim == 1 and point not in (faults.MID_SHARD, faults.BEFORE_FSYNC)
    )
    for result in results:
        assert result["step"] == (200 if is_published else 100)
        assert result["extra"] == {"step": result["step"]}
        assert result["exact"]
        assert [event[0] for event in result["events"]] == ["restored", "save"]
    assert sorted(
        path.name for path in directory.iterdir() if path.name.startswith("step-")
    ) == ["step-300"]
    assert list((directory / ".tmp").iterdir()) == []
    assert list((directory / ".trash").iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("point", faults.POINTS)
def test_a_permanent_checkpoint_survives_a_kill_at_any_point_of_later_saves(
    tmp_path: Path, point: str, victim: int
) -> None:
    options: Any = {"directory": tmp_path / "checkpoints", "point": point, "victim": victim}
    ended = processes.run_world(save_two_steps, size=2, permanent=True, **options)
    assert ended[victim].status == -signal.SIGKILL, ended[victim].errors
    processes.values(processes.run_world(restart, size=2, directory=options["directory"]))
    names = sorted(path.name for path in options["directory"].glob("step-*"))
    assert names == ["step-300", "step-50"]


@pytest.mark.parametrize("point", [faults.MID_SHARD, faults.BEFORE_FSYNC])
def test_a_peer_killed_while_writing_fails_the_save_and_the_survivor_removes_the_attempt(
    tmp_path: Path, point: str
) -> None:
    ended = processes.run_world(
        save_two_steps, size=2, directory=tmp_path / "checkpoints", point=point, victim=1
    )
    assert ended[0].status == 0, ended[0].errors
    types = [event[0] for event in ended[0].value["events"]]
    assert types == ["save", "save_failed"]
    failure = ended[0].value["events"][1][1]
    assert failure["failures"] == 1
    assert failure["reason"]
    assert ended[0].value["attempts"] == []


@pytest.mark.parametrize(
    "point", [faults.BEFORE_MANIFEST, faults.BEFORE_RENAME, faults.AFTER_RENAME]
)
def test_a_checkpoint_published_although_a_peer_died_is_reported_as_saved(
    tmp_path: Path, point: str
) -> None:
    ended = processes.run_world(
        save_two_steps, size=2, directory=tmp_path / "checkpoints", point=point, victim=1
    )
    assert ended[0].status == 0, ended[0].errors
    assert [event[0] for event in ended[0].value["events"]] == ["save", "save"]
