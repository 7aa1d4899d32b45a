"""The checkpoint of one step, which no other can replace: an error of the volume does not mean that it is
lost."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evergrad_trainer.base.errors import CheckpointError, VolumeError
from evergrad_trainer.checkpoint.reader import CheckpointReader
from evergrad_trainer.checkpoint.restore import load_of_step
from evergrad_trainer.checkpoint.search import Search
from evergrad_trainer.distributed.world import World

MakeSolo = Callable[..., Any]
MakeState = Callable[[int], dict[str, torch.Tensor]]
STEP = 10


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses between two attempts without waiting."""
    made: list[float] = []
    monkeypatch.setattr("evergrad_trainer.base.volume.time.sleep", made.append)
    return made


def load(solo: Any, state: dict[str, torch.Tensor], *, is_right: bool = True) -> Path:
    alone = World(generation=1, rank=0, size=1, device=torch.device("cpu"))
    search = Search(solo.manager._store, checksums=True)
    return load_of_step(search, state, step=STEP, world=alone, is_right=lambda: is_right)


def refuse(
    monkeypatch: pytest.MonkeyPatch, solo: Any, method: str, *, times: int
) -> list[str]:
    """Let a method of the reader fail this number of times. Returns the names with which it was called."""
    reader: CheckpointReader = solo.manager._store.reader
    original, refused = getattr(reader, method), list[str]()

    def fail(name: str, *args: Any, **options: Any) -> Any:
        if len(refused) < times:
            refused.append(name)
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return original(name, *args, **options)

    monkeypatch.setattr(reader, method, fail)
    return refused


def test_a_checkpoint_of_a_step_is_loaded_although_newer_ones_exist(
    make_solo: MakeSolo, make_state: MakeState
) -> None:
    solo, state = make_solo(), make_state(0)
    for step in (STEP, STEP + 10):
        solo.save(step)
    assert load(solo, state).name == f"step-{STEP}"
    assert all(torch.equal(value, make_state(STEP)[key]) for key, value in state.items())


def test_a_valid_checkpoint_that_becomes_unreadable_is_not_reported_as_lost(
    make_solo: MakeSolo,
    make_state: MakeState,
    monkeypatch: pytest.MonkeyPatch,
    pauses: list[float],
) -> None:
    """If it were reported as lost, the run would end permanently, although a later start may read it."""
    solo = make_solo()
    solo.save(STEP)
    refuse(monkeypatch, solo, "open_shard", times=10**6)
    with pytest.raises(VolumeError, match="the checkpoint cannot be read") as raised:
        load(solo, make_state(0))
    assert raised.value.exit_code == 70
    assert sum(pauses) >= 20.0


def test_the_only_checkpoint_of_a_run_is_not_reported_as_lost_if_unreadable(
    make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_solo().save(STEP)
    solo = make_solo()
    refuse(monkeypatch, solo, "open_shard", times=10**6)
    with pytest.raises(VolumeError, match="the checkpoint cannot be read"):
        solo.restore()
    assert solo.names() == [f"step-{STEP}"]


def test_a_manifest_that_is_temporarily_unreadable_costs_no_checkpoint(
    make_solo: MakeSolo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had validated, so an older one would have been loaded instead."""
    solo = make_solo()
    solo.save(STEP)
    solo.save(STEP + 10)
    again = make_solo()
    refused = refuse(monkeypatch, again, "read_document", times=1)
    assert again.restore() == STEP + 10
    assert refused == [f"step-{STEP + 10}"] and again.types() == ["restored"]


def test_a_checkpoint_that_the_listing_does_not_show_yet_is_found_by_its_name(
    make_solo: MakeSolo, make_state: MakeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    solo, state = make_solo(), make_state(0)
    solo.save(STEP)
    monkeypatch.setattr(solo.manager._store.catalog, "scan", list)
    assert load(solo, state).name == f"step-{STEP}"
    assert all(torch.equal(value, make_state(STEP)[key]) for key, value in state.items())


def test_a_listing_that_fails_temporarily_is_retried(
    make_solo: MakeSolo, make_state: MakeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    solo = make_solo()
    solo.save(STEP)
    catalog = solo.manager._store.catalog
    scan, refused = catalog.scan, list[int]()

    def fail() -> Any:
        if not refused:
            refused.append(1)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return scan()

    monkeypatch.setattr(catalog, "scan", fail)
    assert load(solo, make_state(0)).name == f"step-{STEP}" and refused


def test_a_missing_damaged_or_different_checkpoint_of_the_step_is_lost(
    make_solo: MakeSolo, make_state: MakeState
) -> None:
    solo = make_solo()
    solo.save(STEP + 10)
    lost = f"contains no checkpoint of step {STEP} from which this run continued"
    with pytest.raises(CheckpointError, match=lost):
        load(solo, make_state(0))
    solo.save(STEP)
    with pytest.raises(CheckpointError, match="has other weights"):
        load(solo, make_state(0), is_right=False)
    os.truncate(solo.directory / f"step-{STEP}" / "rank-00000.bin", 100)
    with pytest.raises(CheckpointError, match="has 100 bytes"):
        load(solo, make_state(0))
    assert f"step-{STEP}" in solo.names(), "nothing is set aside"
