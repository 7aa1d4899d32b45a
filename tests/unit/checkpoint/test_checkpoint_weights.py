"""Checkpoints read from outside their run: weights for another run, plain tensors for export."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_state import read_plain_state

from evergrad_trainer.base.errors import CheckpointError
from evergrad_trainer.checkpoint.catalog import Catalog
from evergrad_trainer.checkpoint.leases import find_leased
from evergrad_trainer.checkpoint.manifest import Identity
from evergrad_trainer.checkpoint.reader import CheckpointReader
from evergrad_trainer.checkpoint.weights import (
    hold_checkpoint,
    load_weights,
    look_at,
    open_tensors,
)

MakeSolo = Callable[..., Any]
MakeState = Callable[[int], dict[str, torch.Tensor]]


def find(path: Path, *, step: int | None = None) -> Path:
    with hold_checkpoint(path, step=step) as found:
        return found


@pytest.fixture
def run(make_solo: MakeSolo, tmp_path: Path) -> Path:
    """A run directory with checkpoints of steps 10 and 20."""
    solo = make_solo(
        directory=tmp_path / "run" / "checkpoints",
        identity=Identity("other", "recipe", "data"),
    )
    solo.save(10)
    solo.save(20)
    return tmp_path / "run"


@pytest.mark.capability("O-60")
@pytest.mark.parametrize(
    ("inner", "step"), [("", 20), ("checkpoints", 20), ("checkpoints/step-10", 10)]
)
def test_weights_load_from_a_run_from_its_checkpoints_or_from_one_checkpoint(
    run: Path, make_state: MakeState, inner: str, step: int
) -> None:
    state = make_state(0)
    restored = load_weights(run / inner, state)
    assert restored.step == step
    for key, value in state.items():
        assert torch.equal(value, make_state(step if key.startswith("model.") else 0)[key])


@pytest.mark.capability("G-11")
def test_the_checkpoint_of_a_step_is_loaded_and_a_missing_step_is_named(
    run: Path, make_state: MakeState
) -> None:
    state = make_state(0)
    assert load_weights(run, state, step=10, prefix="").step == 10
    assert all(torch.equal(value, make_state(10)[key]) for key, value in state.items())
    for where, known in ((run, "20, 10"), (run / "checkpoints" / "step-20", "20")):
        with pytest.raises(CheckpointError) as error:
            load_weights(where, make_state(0), step=15)
        assert f"contains no checkpoint of step 15; the available steps are {known}" in str(
            error.value
        )


@pytest.mark.acceptance("input-O-61")
@pytest.mark.capability("O-61")
def test_an_optimizer_of_another_type_is_refused_with_a_remedy(
    run: Path, make_state: MakeState
) -> None:
    state = {**make_state(0), "optimizer.other": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"optimizer\.other.*Use the same optimizer"):
        load_weights(run, state, prefix=("model.", "optimizer."))


def test_a_relative_path_and_a_renamed_copy_of_a_checkpoint_work(
    run: Path, make_state: MakeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "checkpoints" / "step-10").rename(run / "mine")
    monkeypatch.chdir(run / "mine")
    state = make_state(0)
    assert load_weights(Path("."), state).step == 10
    assert torch.equal(
        read_plain_state(Path("."))["model.weight"], make_state(10)["model.weight"]
    )


def test_a_run_with_the_name_of_a_checkpoint_is_a_run(
    run: Path, make_state: MakeState, tmp_path: Path
) -> None:
    named = run.rename(tmp_path / "step-100")
    (tmp_path / "link").symlink_to(named)
    for path in (named, tmp_path / "link"):
        assert load_weights(path, make_state(0)).step == 20
        assert look_at(path, step=10)[1].step == 10
        assert find(path) == named / "checkpoints" / "step-20"


def test_weights_of_another_precision_are_converted_with_a_log_message(
    run: Path, make_state: MakeState, caplog: pytest.LogCaptureFixture
) -> None:
    state = {key: value for key, value in make_state(0).items() if key.startswith("model.")}
    state["model.weight"] = state["model.weight"].bfloat16()
    load_weights(run, state)
    assert torch.equal(state["model.weight"], make_state(20)["model.weight"].bfloat16())
    assert (
        "stored as torch.float32, loaded as torch.bfloat16: values are converted"
        in caplog.text
    )


def test_a_damaged_checkpoint_of_another_run_is_skipped_and_left_unchanged(
    run: Path, make_state: MakeState
) -> None:
    os.truncate(run / "checkpoints" / "step-20" / "rank-00000.bin", 1)
    assert load_weights(run, make_state(0)).step == 10
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == [
        "step-10",
        "step-20",
    ]
    with pytest.raises(
        CheckpointError,
        match=r"step-20: cannot be loaded; file rank-00000\.bin: has 1 bytes",
    ):
        load_weights(run / "checkpoints" / "step-20", make_state(0))


@pytest.mark.capability("G-64")
def test_weights_of_another_model_are_refused_by_name(
    run: Path, make_state: MakeState
) -> None:
    state = {**make_state(0), "model.head": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"tensors are missing; model\.head"):
        load_weights(run, state)


def test_a_path_without_checkpoints_is_named(tmp_path: Path, make_state: MakeState) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=f"{path}: contains no checkpoint"):
            load_weights(path, make_state(0))
        with pytest.raises(
            CheckpointError, match=f"{path}: contains no checkpoint of step 7"
        ):
            find(path, step=7)


def test_all_tensors_of_a_checkpoint_are_read_completely(
    run: Path, make_state: MakeState
) -> None:
    state = read_plain_state(run / "checkpoints" / "step-20")
    assert all(
        torch.equal(value, state[key]) for key, value in make_state(20).items()
    ) and len(state) == len(make_state(20))
    assert set(read_plain_state(run / "checkpoints" / "step-20", prefix="model.")) == {
        "model.weight",
        "model.half",
        "model.flags",
    }


def test_a_damaged_checkpoint_is_not_read(run: Path) -> None:
    os.truncate(run / "checkpoints" / "step-20" / "manifest.json", 9)
    with pytest.raises(
        CheckpointError, match=r"step-20: cannot be loaded; file manifest\.json"
    ):
        read_plain_state(run / "checkpoints" / "step-20")


def test_the_newest_valid_checkpoint_or_the_checkpoint_of_a_step_is_found(
    run: Path,
) -> None:
    assert find(run) == run / "checkpoints" / "step-20"
    assert find(run, step=10) == run / "checkpoints" / "step-10"
    os.truncate(run / "checkpoints" / "step-20" / "rank-00000.bin", 1)
    assert find(run) == run / "checkpoints" / "step-10"
    with pytest.raises(CheckpointError, match="step-20: cannot be loaded"):
        find(run, step=20)


def test_a_tensor_is_converted_while_it_is_read(run: Path, make_state: MakeState) -> None:
    stored = open_tensors(run / "checkpoints" / "step-20", prefix="model.")
    assert set(stored.table) == {"model.weight", "model.half", "model.flags"}
    narrow = stored.read("model.weight", torch.bfloat16)
    same = stored.read("model.weight")
    weight = make_state(20)["model.weight"]
    assert torch.equal(same, weight) and torch.equal(narrow, weight.bfloat16())


def test_inspection_finds_the_checkpoint_that_a_load_would_use_and_reads_no_tensors(
    run: Path,
) -> None:
    where, choice = look_at(run)
    assert (where, choice.step, choice.data_fingerprint) == (
        run / "checkpoints" / "step-20",
        20,
        "data",
    )
    assert (
        look_at(run / "checkpoints" / "step-10")[1].step
        == look_at(run, step=10)[1].step
        == 10
    )
    # A truncated checkpoint is skipped; the bits are checked by the load.
    shards = sorted((run / "checkpoints" / "step-20").glob("rank-*.bin"))
    flipped = bytearray(shards[0].read_bytes())
    flipped[0] ^= 1
    shards[0].write_bytes(flipped)
    assert look_at(run)[1].step == 20
    os.truncate(shards[0], 1)
    assert look_at(run)[1].step == 10


def test_inspection_without_a_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    for path, step, said in (
        (tmp_path / "nowhere", None, "contains no checkpoint"),
        (run, 15, "the available steps are 20, 10"),
    ):
        with pytest.raises(CheckpointError, match=said):
            look_at(path, step=step)


def test_a_training_run_does_not_retire_a_checkpoint_that_is_being_read(
    make_solo: MakeSolo,
    make_state: MakeState,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, real = tmp_path / "run", CheckpointReader.validate
    solo = make_solo(directory=run / "checkpoints", keep=1)
    solo.save(10)

    def validate(reader: CheckpointReader, name: str, **options: Any) -> Any:
        # As slow as a large checkpoint: the run saves in the meantime.
        found = real(reader, name, **options)
        monkeypatch.setattr(CheckpointReader, "validate", real)
        solo.save(next(steps))
        return found

    steps = iter((20, 30))
    monkeypatch.setattr(CheckpointReader, "validate", validate)
    assert load_weights(run, make_state(0)).step == 10
    monkeypatch.setattr(CheckpointReader, "validate", validate)
    with hold_checkpoint(run) as checkpoint:
        assert checkpoint.name == "step-20"
        assert read_plain_state(checkpoint).keys() == make_state(20).keys()
    solo.save(40)
    assert solo.names() == ["step-40"]
    assert list((run / "checkpoints" / "leases").iterdir()) == []


@pytest.mark.parametrize("reader", ["load", "hold"])
def test_a_checkpoint_retired_before_its_lease_is_replaced_by_a_newer_one(
    make_solo: MakeSolo,
    make_state: MakeState,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reader: str,
) -> None:
    run, real = tmp_path / "run", Catalog.hold
    solo = make_solo(directory=run / "checkpoints", keep=1)
    # The best one is kept, and is older than the one that a reader wants.
    solo.save(10, best=True)
    solo.save(20)

    def hold(catalog: Catalog, name: str) -> contextlib.AbstractContextManager[None]:
        monkeypatch.setattr(Catalog, "hold", real)
        solo.save(30)
        return real(catalog, name)

    monkeypatch.setattr(Catalog, "hold", hold)
    found = find(run) if reader == "hold" else load_weights(run, make_state(0)).path
    assert found.name == "step-30"
    assert solo.names() == ["step-10", "step-30"]


def test_a_copy_of_a_checkpoint_is_read_without_a_lease(
    run: Path, make_state: MakeState, tmp_path: Path
) -> None:
    shutil.copytree(run / "checkpoints" / "step-10", tmp_path / "mine" / "step-10")
    assert load_weights(tmp_path / "mine" / "step-10", make_state(0)).step == 10
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["step-10"]


def test_a_read_only_run_is_read_without_a_lease_and_with_a_log_message(
    run: Path, make_state: MakeState, caplog: pytest.LogCaptureFixture
) -> None:
    # As on a volume that is mounted read-only.
    (run / "checkpoints" / "leases").touch()
    assert load_weights(run, make_state(0)).step == 20
    assert find(run).name == "step-20"
    assert "step-20: cannot be protected while it is read" in caplog.text
    (run / "checkpoints" / "leases").unlink()
    with hold_checkpoint(run):
        assert find_leased(run / "checkpoints", now=time.time()) == {"step-20"}
