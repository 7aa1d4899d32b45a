"""Checkpoints over several processes: other world sizes, sharded and plain tensors, errors and fallbacks all
ranks share."""

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import checkpoint_processes as processes
import pytest
import torch
from plain_state import read_plain_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from evergrad_manifest.training import Checkpoint
from evergrad_trainer.base.errors import (
    CheckpointError,
    FencedError,
    SaveError,
    VolumeError,
)
from evergrad_trainer.checkpoint import faults, search
from evergrad_trainer.checkpoint.attempts import Medium
from evergrad_trainer.checkpoint.generations import claim_generation
from evergrad_trainer.checkpoint.manager import CheckpointManager
from evergrad_trainer.checkpoint.manifest import Identity
from evergrad_trainer.checkpoint.store import open_store
from evergrad_trainer.checkpoint.weights import load_weights
from evergrad_trainer.distributed.world import Membership, World
from evergrad_trainer.state import transfer

IDENTITY = Identity("run", "recipe", "data")
Events = list[tuple[str, dict[str, Any]]]


def make_manager(
    world: World, directory: Path, *, hook: Any = None, **settings: Any
) -> tuple[CheckpointManager, Events]:
    events: Events = []
    medium = Medium(stale_seconds=0.2, faults=hook or faults.NoFaults())
    manager = CheckpointManager(
        directory,
        membership=Membership(world),
        settings=Checkpoint.model_validate(settings),
        identity=IDENTITY,
        on_event=lambda type_, fields: events.append((type_, fields)),
        store=open_store(directory, medium=medium),
    )
    return manager, events


def whole_state(step: int) -> dict[str, torch.Tensor]:
    """Sizes that no world of 2, 3 or 4 divides, one row, fewer rows than ranks, every kind of dtype."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.embedding": torch.randn(13, 6, generator=generator),
        "model.row": torch.randn(1, 8, generator=generator),
        "model.few": torch.randn(2, 3, generator=generator).bfloat16(),
        "model.vector": torch.randn(7, generator=generator),
        "model.cube": torch.randn(5, 4, 3, generator=generator),
        "optimizer.step": torch.tensor(float(step)),
        "optimizer.count": torch.arange(5) + step,
    }


def sharded(
    state: dict[str, torch.Tensor], world: World, *, dim: int = 0
) -> dict[str, torch.Tensor]:
    """Everything with a dimension as a DTensor split along ``dim``; counters stay plain, as under FSDP2."""
    mesh = init_device_mesh("cpu", (world.size,))
    return {
        key: distribute_tensor(value, mesh, [Shard(min(dim, value.dim() - 1))])
        if key.startswith("model.")
        else value
        for key, value in state.items()
    }


def as_whole(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in state.items()
    }


def is_exact(state: dict[str, torch.Tensor], step: int) -> bool:
    expected = whole_state(step)
    return set(state) == set(expected) and all(
        torch.equal(value, expected[key]) for key, value in as_whole(state).items()
    )


def build(kind: str, step: int, world: World) -> dict[str, torch.Tensor]:
    """A state as it is held under each parallelism."""
    whole = whole_state(step)
    if kind == "plain" or world.size == 1:
        return whole
    if kind == "columns":
        return sharded(whole, world, dim=1)
    if kind == "hybrid":
        mesh = init_device_mesh(
            "cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard")
        )
        return {
            key: distribute_tensor(value, mesh, [Replicate(), Shard(0)])
            if value.dim()
            else value
            for key, value in whole.items()
        }
    return sharded(whole, world)


def save_as(world: World, directory: Path, kind: str, step: int) -> None:
    manager, events = make_manager(world, directory)
    manager.save(step, build(kind, step, world), extra={"step": step}, wait=True)
    assert [type_ for type_, _ in events] == ["save"], events


def load_as(world: World, directory: Path, kind: str, step: int) -> bool:
    manager, _ = make_manager(world, directory)
    state = build(kind, 0, world)
    addresses = {key: _address(value) for key, value in state.items()}
    restored = manager.restore(state)
    assert restored is not None and restored.step == step
    assert {key: _address(value) for key, value in state.items()} == addresses  # in place
    return is_exact(state, step)


def _address(value: torch.Tensor) -> int:
    return (value.to_local() if isinstance(value, DTensor) else value).data_ptr()


def load_then_save(world: World, directory: Path, step: int) -> bool:
    exact = step == 0 or load_as(world, directory, "plain", step)
    save_as(world, directory, "plain", step + 10)
    return exact


def test_a_state_saved_by_four_processes_loads_in_three_and_then_in_one(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "checkpoints"
    for size, step in ((4, 0), (3, 10), (1, 20)):
        assert all(
            processes.values(
                processes.run_world(
                    load_then_save, size=size, directory=directory, step=step
                )
            )
        )
    assert all(
        torch.equal(value, whole_state(30)[key])
        for key, value in read_plain_state(directory / "step-30").items()
    )


def test_replicated_tensors_are_written_once_and_distributed_over_the_ranks(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "checkpoints"
    processes.values(
        processes.run_world(save_as, size=2, directory=directory, kind="plain", step=10)
    )
    sizes = [
        (directory / "step-10" / f"rank-0000{rank}.bin").stat().st_size for rank in range(2)
    ]
    total = sum(value.nbytes for value in whole_state(0).values())
    assert total <= sum(sizes) < total + 64 * len(whole_state(0))
    assert max(sizes) < 0.7 * sum(sizes)


@pytest.mark.parametrize(
    ("saved_by", "saved_as", "loaded_by", "loaded_as"),
    [
        (2, "rows", 1, "plain"),
        (1, "plain", 2, "rows"),
        (3, "rows", 2, "rows"),
        (2, "rows", 3, "columns"),
        (2, "columns", 3, "plain"),
        (4, "hybrid", 2, "rows"),
        (4, "rows", 3, "rows"),
    ],
)
def test_a_state_loads_under_another_parallelism_and_world_size(
    tmp_path: Path, saved_by: int, saved_as: str, loaded_by: int, loaded_as: str
) -> None:
    directory = tmp_path / "checkpoints"
    processes.values(
        processes.run_world(
            save_as, size=saved_by, directory=directory, kind=saved_as, step=10
        )
    )
    loaded = processes.run_world(
        load_as, size=loaded_by, directory=directory, kind=loaded_as, step=10
    )
    assert all(processes.values(loaded))


def train_sharded(world: World, directory: Path) -> list[float]:
    """Two steps of a small FSDP2 model with AdamW, saved after the first; the weights' sums after
    the second."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    mesh = init_device_mesh("cpu", (world.size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    manager, _ = make_manager(world, directory)
    for step in (1, 2):
        model(torch.ones(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            manager.save(1, _training_state(model, optimizer), extra={})
    manager.wait()
    return [float(_whole(parameter).double().sum()) for parameter in model.parameters()]


def resume_plain(world: World, directory: Path) -> list[float]:
    """The second of those steps, from the checkpoint, in one process."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # allocates the moments
    manager, _ = make_manager(world, directory)
    assert manager.restore(_training_state(model, optimizer)) is not None
    optimizer.zero_grad()
    model(torch.ones(4, 6)).square().sum().backward()
    optimizer.step()
    return [float(parameter.double().sum()) for parameter in model.parameters()]


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _training_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {
        f"model.{name}": parameter for name, parameter in model.named_parameters()
    }
    for name, parameter in model.named_parameters():
        state |= {
            f"optimizer.{name}.{key}": value
            for key, value in optimizer.state[parameter].items()
        }
    return state


def test_a_run_under_fsdp2_continues_in_one_plain_process_with_the_same_numbers(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "checkpoints"
    sharded_sums = processes.values(
        processes.run_world(train_sharded, size=2, directory=directory)
    )
    (plain_sums,) = processes.values(
        processes.run_world(resume_plain, size=1, directory=directory)
    )
    assert sharded_sums[0] == pytest.approx(plain_sums, rel=1e-5)


class FailAt:
    """Raises an OSError of this number at a point of one rank, once it is armed."""

    def __init__(self, point: str, *, rank: int, number: int = errno.ENOSPC) -> None:
        self._point, self._rank, self._number = point, rank, number
        self.is_armed = True

    def reached(self, point: str, rank: int) -> None:
        if self.is_armed and (point, rank) == (self._point, self._rank):
            raise OSError(self._number, os.strerror(self._number))


def fail_then_recover(world: World, directory: Path, point: str, rank: int) -> Events:
    hook = FailAt(point, rank=rank)
    manager, events = make_manager(world, directory, hook=hook)
    manager.save(10, whole_state(10), extra={}, wait=True)
    hook.is_armed = False
    assert os.listdir(directory / ".tmp") == [] or not world.is_main
    manager.save(20, whole_state(20), extra={}, wait=True)
    return events


@pytest.mark.parametrize(
    ("point", "rank"),
    [(faults.MID_SHARD, 1), (faults.BEFORE_FSYNC, 1), (faults.BEFORE_RENAME, 0)],
)
def test_one_rank_without_space_fails_the_save_on_every_rank_and_training_continues(
    tmp_path: Path, point: str, rank: int
) -> None:
    directory = tmp_path / "checkpoints"
    for events in processes.values(
        processes.run_world(
            fail_then_recover, size=2, directory=directory, point=point, rank=rank
        )
    ):
        assert [type_ for type_, _ in events] == ["save_failed", "save"]
        assert f"rank {rank}: [Errno 28] No space left on device" in events[0][1]["reason"]
    assert [path.name for path in directory.glob("step-*")] == ["step-20"]


class FullUntilGone:
    """A volume that is full for one rank as long as a checkpoint exists, once it is armed."""

    def __init__(self, checkpoint: Path, *, rank: int) -> None:
        self._checkpoint, self._rank, self.is_armed = checkpoint, rank, False

    def reached(self, point: str, rank: int) -> None:
        is_here = (point, rank) == (faults.MID_SHARD, self._rank)
        if self.is_armed and is_here and self._checkpoint.exists():
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def save_on_a_full_volume(world: World, directory: Path) -> Events:
    hook = FullUntilGone(directory / "step-10", rank=1)
    manager, events = make_manager(world, directory, hook=hook, keep=2)
    for step in (10, 20):
        manager.save(step, whole_state(step), extra={}, wait=True)
    hook.is_armed = True
    for step in (30, 40):
        manager.save(step, whole_state(step), extra={}, wait=True)
    return events


def test_all_ranks_save_again_after_the_oldest_checkpoint_was_removed_for_one_of_them(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "checkpoints"
    first, second = processes.values(
        processes.run_world(save_on_a_full_volume, size=2, directory=directory)
    )
    assert [type_ for type_, _ in first] == ["save", "save", "save", "warning", "save"]
    assert [type_ for type_, _ in second] == ["save"] * 4
    assert sorted(path.name for path in directory.glob("step-*")) == ["step-30", "step-40"]


def fail_until_error(world: World, directory: Path) -> str:
    manager, events = make_manager(
        world, directory, hook=FailAt(faults.MID_SHARD, rank=1), maxFailures=3
    )
    for step in (1, 2, 3):
        try:
            manager.save(step, whole_state(step), extra={})
            while manager._flight is not None:
                manager.poll()
                time.sleep(0.005)
        except SaveError as error:
            assert len(events) == 3
            return f"{step}: {error}"
    return "no error"


def test_poll_raises_on_every_rank_after_the_allowed_number_of_failures_in_a_row(
    tmp_path: Path,
) -> None:
    for message in processes.values(
        processes.run_world(fail_until_error, size=2, directory=tmp_path / "checkpoints")
    ):
        assert message.startswith("3: ")
        assert (
            "3 saves in a row have failed; the last one: rank 1: [Errno 28] No space left on device"
            in message
        )


def load_with_one_rank_refused(
    world: World, directory: Path, kind: str, refused: int
) -> Any:
    """Rank ``refused`` cannot open the newest checkpoint's shards; both ranks must take the older one."""
    manager, events = make_manager(world, directory)
    if world.rank == refused:
        reader = manager._store.reader
        opened = reader.open_shard

        def open_shard(name: str, file: str) -> Any:
            if name == "step-20":
                raise OSError(errno.EIO, os.strerror(errno.EIO), f"{name}/{file}")
            return opened(name, file)

        reader.open_shard = open_shard  # type: ignore[method-assign]
    state = build(kind, 0, world)
    restored = manager.restore(state)
    assert restored is not None
    return {
        "step": restored.step,
        "exact": is_exact(state, restored.step),
        "events": events,
    }


@pytest.mark.parametrize(
    ("kind", "refused"),
    [pytest.param("plain", 0, marks=pytest.mark.long), ("sharded", 1)],
    ids=["the one that reads", "one of many"],
)
def test_if_one_rank_cannot_read_a_checkpoint_all_ranks_fall_back_together(
    tmp_path: Path, kind: str, refused: int
) -> None:
    directory = tmp_path / "checkpoints"
    for step in (10, 20):
        processes.values(
            processes.run_world(
                save_as, size=2, directory=directory, kind="plain", step=step
            )
        )
    for result in processes.values(
        processes.run_world(
            load_with_one_rank_refused,
            size=2,
            directory=directory,
            kind=kind,
            refused=refused,
        )
    ):
        assert result["step"] == 10
        assert result["exact"]
        (fallback, fields), (restored, _) = result["events"]
        assert (fallback, restored) == ("fallback", "restored")
        assert (
            fields["reason"].startswith(f"rank {refused}: ")
            and "Input/output error" in fields["reason"]
        )
        assert fields["quarantined_as"] is None
    assert (directory / "step-20").is_dir()  # readable for others: not set aside


def load_without_a_volume(world: World, directory: Path) -> Any:
    """Only rank 0 sees the volume, which is slow. Return what each rank loaded, and how often rank 0 reported
    progress."""
    manager, _ = make_manager(
        world, directory if world.is_main else directory / "not-mounted"
    )
    reader, beats = manager._store.reader, []
    if world.is_main:
        validate, broadcast = reader.validate, World.broadcast_json

        def slowly(name: str, **options: Any) -> Any:
            while len(beats) < 3:
                time.sleep(0.01)
            return validate(name, **options)

        def count(self: World, value: Any, **options: Any) -> Any:
            beats.append(value)
            return broadcast(self, value, **options)

        reader.validate = slowly  # type: ignore[method-assign]
        World.broadcast_json = count  # type: ignore[method-assign]
        search.BEAT_SECONDS = 0.01
    transfer._CHUNK_BYTES = 64
    state = build("plain", 0, world)
    restored = manager.restore(state)
    assert restored is not None
    return {"exact": is_exact(state, 10), "extra": restored.extra, "beats": beats}


@pytest.mark.capability("O-62")
def test_one_rank_reads_a_checkpoint_and_the_others_need_no_volume(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    processes.values(
        processes.run_world(save_as, size=2, directory=directory, kind="plain", step=10)
    )
    results = processes.values(
        processes.run_world(load_without_a_volume, size=3, directory=directory)
    )
    assert all(result["exact"] and result["extra"] == {"step": 10} for result in results)
    # Others wait for a beat, not for the whole validation.
    assert results[0]["beats"][:3] == [None, None, None]


def stall(world: World, directory: Path) -> str:
    """The volume hangs while rank 0 validates."""
    manager, _ = make_manager(world, directory)
    reader = manager._store.reader
    reader.validate = lambda name, **options: threading.Event().wait()  # type: ignore[method-assign, assignment, return-value]
    search.BEAT_SECONDS, search.STALL_SECONDS = 0.01, 0.1
    try:
        manager.restore(build("plain", 0, world))
    except VolumeError as error:
        return str(error)
    return ""


def test_a_volume_that_stalls_ends_the_restore_on_all_ranks(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "checkpoints"
    processes.values(
        processes.run_world(save_as, size=2, directory=directory, kind="plain", step=10)
    )
    messages = processes.values(processes.run_world(stall, size=2, directory=directory))
    assert messages[0] == messages[1] and "nothing could be read" in messages[0]


def restore_message(world: World, directory: Path) -> str:
    manager, _ = make_manager(world, directory)
    try:
        manager.restore(build("plain", 0, world))
    except CheckpointError as error:
        return str(error)
    return ""


def test_if_no_checkpoint_validates_every_rank_stops_with_the_same_error(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "checkpoints"
    processes.values(
        processes.run_world(save_as, size=2, directory=directory, kind="plain", step=10)
    )
    (directory / "step-10" / "rank-00001.bin").unlink()
    messages = processes.values(
        processes.run_world(restore_message, size=2, directory=directory)
    )
    assert messages[0] == messages[1]
    assert "step-10: cannot be loaded; file rank-00001.bin: is missing" in messages[0]


def save_while_fenced(world: World, directory: Path) -> str:
    manager, events = make_manager(world, directory)
    manager.save(10, whole_state(10), extra={}, wait=True)
    if world.is_main:
        claim_generation(directory)
    world.barrier()
    manager.save(20, whole_state(20), extra={})
    try:
        manager.save(30, whole_state(30), extra={})
    except FencedError as error:
        assert [type_ for type_, _ in events] == ["save", "save_failed"]
        assert manager.is_fenced()
        return str(error)
    return ""


def test_every_rank_of_the_older_of_two_runs_stops_and_publishes_nothing_more(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "checkpoints"
    for message in processes.values(
        processes.run_world(save_while_fenced, size=2, directory=directory)
    ):
        assert "generation 2 has claimed this run directory" in message
    assert [path.name for path in directory.glob("step-*")] == ["step-10"]
    assert list((directory / ".tmp").iterdir()) == []


def save_differing_states(world: World, directory: Path) -> Events:
    manager, events = make_manager(world, directory)
    state = whole_state(10)
    if world.rank == 1:
        del state["model.row"]
    manager.save(10, state, extra={}, wait=True)
    return events


def test_ranks_that_hold_different_tensors_do_not_publish_a_checkpoint_with_holes(
    tmp_path: Path,
) -> None:
    for events in processes.values(
        processes.run_world(
            save_differing_states, size=2, directory=tmp_path / "checkpoints"
        )
    ):
        assert events[0][0] == "save_failed"
        assert "ranks 1 have other tensors than rank 0" in events[0][1]["reason"]


def take_weights(world: World, directory: Path, source: str) -> bool:
    state = {
        key: value
        for key, value in build("rows", 0, world).items()
        if key.startswith("model.")
    }
    load_weights(Path(source), state, world=world)
    return all(
        torch.equal(value, whole_state(10)[key]) for key, value in as_whole(state).items()
    )


def test_weights_of_another_run_load_into_shards(tmp_path: Path) -> None:
    processes.values(
        processes.run_world(
            save_as,
            size=1,
            directory=tmp_path / "old" / "checkpoints",
            kind="plain",
            step=10,
        )
    )
    directory = tmp_path / "new" / "checkpoints"
    taken = processes.run_world(
        take_weights, size=2, directory=directory, source=str(tmp_path / "old")
    )
    assert all(processes.values(taken))


def leave_a_frozen_peer(world: World, directory: Path) -> None:
    """Rank 1 blocks within a save; rank 0 must leave by an exception and end without help, including atexit
    hooks."""
    pids = world.gather_json(os.getpid())

    class Freeze:
        def reached(self, point: str, rank: int) -> None:
            if point == faults.MID_SHARD and rank == 1:
                os.kill(pids[1], signal.SIGSTOP)

    manager, events = make_manager(world, directory, hook=Freeze())
    manager.save(10, whole_state(10), extra={})
    if world.rank == 1:
        manager.wait()
    time.sleep(0.3)
    manager.abandon(patience_seconds=0.1)
    assert events == []
    assert any(
        thread.name == "checkpoint-10" and thread.is_alive()
        for thread in threading.enumerate()
    )


def test_a_process_that_abandons_a_save_with_a_frozen_peer_ends_at_once(
    tmp_path: Path,
) -> None:
    directory, scratch = tmp_path / "checkpoints", tmp_path / "world"
    pids = processes.start_world(
        leave_a_frozen_peer, size=2, directory=directory, scratch=scratch, finalizes=True
    )
    try:
        (leaver,) = processes.end_world(pids[:1], scratch)
    finally:
        os.kill(pids[1], signal.SIGKILL)
        processes.end_world(pids[1:], scratch)
    assert leaver.status == 0, leaver.errors
    # The group's own timeout is an hour: a leaver that waited for it would have been killed by then.
