"""Real volumes that run full or cannot be written, and what fifty saves do to a process's memory."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_processes as processes
import pytest
import torch

from evergrad_manifest.training import Checkpoint
from evergrad_trainer.base.errors import FencedError, RunDirectoryError, VolumeError
from evergrad_trainer.checkpoint.generations import (
    check_fence,
    claim_exactly,
    claim_generation,
)
from evergrad_trainer.checkpoint.manager import CheckpointManager
from evergrad_trainer.checkpoint.manifest import Identity
from evergrad_trainer.distributed.world import Membership, World

Events = list[tuple[str, dict[str, Any]]]


def make_manager(world: World, directory: Path) -> tuple[CheckpointManager, Events]:
    events: Events = []
    manager = CheckpointManager(
        directory,
        membership=Membership(world),
        settings=Checkpoint(keep=1),
        identity=Identity("run", "recipe", "data"),
        on_event=lambda type_, fields: events.append((type_, fields)),
    )
    return manager, events


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    volume = tmp_path / "volume"
    volume.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(volume)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip("mounting needs root")
    try:
        yield volume
    finally:
        subprocess.run(["umount", "-l", str(volume)], check=True)


def alone(directory: Path) -> World:
    return World(
        generation=claim_generation(directory), rank=0, size=1, device=torch.device("cpu")
    )


def test_a_full_volume_fails_the_save_and_frees_its_space(small_volume: Path) -> None:
    directory = small_volume / "checkpoints"
    manager, events = make_manager(alone(directory), directory)
    small, large = {"model.a": torch.ones(50_000)}, {"model.a": torch.ones(250_000)}
    manager.save(10, small, extra={}, wait=True)
    manager.save(20, large, extra={}, wait=True)
    assert [type_ for type_, _ in events] == ["save", "save_failed"]
    assert "[Errno 28] No space left on device" in events[1][1]["reason"]
    assert "rank-00000.bin" in events[1][1]["reason"]
    manager.save(30, small, extra={}, wait=True)
    assert [type_ for type_, _ in events] == ["save", "save_failed", "save"]
    assert [path.name for path in directory.glob("step-*")] == ["step-30"]
    state = {"model.a": torch.zeros(50_000)}
    restored = make_manager(alone(directory), directory)[0].restore(state)
    assert (
        restored is not None and restored.step == 30 and bool((state["model.a"] == 1).all())
    )


def test_the_next_group_of_a_run_with_a_full_volume_claims_it(small_volume: Path) -> None:
    directory = small_volume / "checkpoints"
    claim_exactly(directory, 1)
    filler = (small_volume / "filler").open("wb", buffering=0)
    with filler, pytest.raises(OSError, match="No space left on device"):
        while True:
            filler.write(bytes(512))
    claim_exactly(directory, 2)
    with pytest.raises(FencedError):
        check_fence(directory, 1)
    check_fence(directory, 2)


def save_on(world: World, directory: Path) -> Events:
    manager, events = make_manager(world, directory)
    manager.save(
        20, {f"model.{key}": torch.ones(100_000) for key in "abcd"}, extra={}, wait=True
    )
    return events


def test_a_full_volume_under_two_processes_fails_the_save_on_both(
    small_volume: Path,
) -> None:
    scratch = (
        small_volume.parent / "world"
    )  # not on the volume: a rank's output may not fit while the other still saves
    pids = processes.start_world(
        save_on, size=2, directory=small_volume / "checkpoints", scratch=scratch
    )
    for events in processes.values(processes.end_world(pids, scratch)):
        assert [type_ for type_, _ in events] == ["save_failed"]
        assert "No space left on device" in events[0][1]["reason"]


def test_a_volume_that_becomes_read_only_fails_saves_and_can_be_restored_from(
    small_volume: Path,
) -> None:
    directory = small_volume / "checkpoints"
    world = alone(directory)
    manager, events = make_manager(world, directory)
    manager.save(10, {"model.a": torch.ones(100)}, extra={}, wait=True)
    subprocess.run(["mount", "-o", "remount,ro", str(small_volume)], check=True)
    manager.save(20, {"model.a": torch.ones(100)}, extra={}, wait=True)
    assert [type_ for type_, _ in events] == ["save", "save_failed"]
    assert "Read-only file system" in events[1][1]["reason"]
    state = {"model.a": torch.zeros(100)}
    restored = make_manager(world, directory)[0].restore(state)
    assert restored is not None and restored.step == 10
    with pytest.raises(
        VolumeError, match=r"this start cannot be recorded; .*Read-only file system"
    ):
        claim_generation(directory)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o500)
    with pytest.raises(
        RunDirectoryError, match=r"this start cannot be recorded; .*Permission denied"
    ):
        claim_generation(tmp_path / "run" / "checkpoints")


def save_fifty_times(world: World, directory: Path) -> list[int]:
    """Resident bytes after each asynchronous save of 8 MB."""
    manager, events = make_manager(world, directory)
    state = {f"model.{index}": torch.ones(100_000) for index in range(20)}
    sizes = []
    for step in range(1, 61):
        manager.save(step, state, extra={"step": step})
        manager.wait()
        sizes.append(
            int(Path("/proc/self/statm").read_text().split()[1])
            * os.sysconf("SC_PAGE_SIZE")
        )
    assert [type_ for type_, _ in events] == ["save"] * 60
    return sizes


def test_fifty_saves_do_not_increase_the_memory_of_the_process(tmp_path: Path) -> None:
    (sizes,) = processes.values(
        processes.run_world(save_fifty_times, size=1, directory=tmp_path / "checkpoints")
    )
    assert max(sizes[10:]) - sizes[9] < 4 * 2**20
