"""Which process of a run reads the newest checkpoint while it imports."""

import argparse
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evergrad_manifest.reading.loader import load_manifest
from evergrad_trainer.base import machine
from evergrad_trainer.commands import run
from evergrad_trainer.commands.run import RunRequest, _restores_here
from evergrad_trainer.commands.session_plan import PlanRequest

MANIFEST = Path(__file__).parents[1] / "manifest" / "base_manifest.yaml"


def request(
    device: str = "auto",
    asked: int | None = None,
    in_file: int | None = None,
    parallelism: str = "auto",
    **more: Any,
) -> RunRequest:
    runtime = SimpleNamespace(device=device, parallelism=parallelism)
    run = SimpleNamespace(
        training=SimpleNamespace(runtime=runtime),
        spec=SimpleNamespace(workers_per_node=in_file),
    )
    loaded = cast(Any, SimpleNamespace(run=run))
    return RunRequest(loaded, Path("runs/r"), num_workers=asked, **more)


@pytest.mark.parametrize("has_driver", [False, True])
@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (request("cpu"), (True, True)),
        (request("auto"), (True, False)),
        (request("cuda"), (True, False)),
        (request(asked=1), (True, True)),
        (request(in_file=1), (True, True)),
        (request(asked=1, in_file=2), (True, True)),
        (request("cpu", asked=2), (False, False)),
        (request("cpu", in_file=2), (False, False)),
        (request("cpu", num_nodes=1), (False, False)),
    ],
)
def test_a_process_that_may_fork_workers_does_not_read_ahead(
    made: RunRequest,
    expected: tuple[bool, bool],
    has_driver: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(machine, "_DRIVERS", (tmp_path / ("." if has_driver else "none"),))
    assert _restores_here(made) is expected[has_driver]


@pytest.mark.parametrize(("rank", "expected"), [("0", True), ("1", False), ("12", False)])
def test_of_the_ranks_of_torchrun_only_the_restoring_rank_reads_ahead(
    rank: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert _restores_here(request("cpu")) is expected


@pytest.mark.parametrize(("size", "expected"), [("1", True), ("2", False)])
def test_a_rank_of_a_sharded_model_does_not_read_the_whole_checkpoint_ahead(
    size: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", size)
    assert _restores_here(request("cpu", parallelism="fsdp2")) is expected
    assert _restores_here(request("cpu"))


def test_memory_for_read_ahead_does_not_count_as_used_in_preflight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that fits would be refused or accepted when it is resumed, depending on how much has been read."""
    free = 2**40
    monkeypatch.setattr(gc, "disable", lambda: None)
    monkeypatch.setattr(machine, "_available_memory", lambda: free)
    monkeypatch.setattr(machine, "_CGROUP_LIMITS", ())
    asked: list[PlanRequest] = []

    def read(checkpoints: Path, *, memory_bytes: int | None) -> None:
        nonlocal free
        free = 2**39

    def plan(request: PlanRequest) -> None:
        asked.append(request)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "read_ahead", read)
    monkeypatch.setattr(run, "plan_session", plan)
    loaded = load_manifest(MANIFEST, overrides=["spec.training.runtime.device=cpu"])
    made = RunRequest(loaded, tmp_path / "run", num_workers=1)
    monkeypatch.setattr(run, "_read_request", lambda args: made)
    run.execute(argparse.Namespace())
    assert free == 2**39
    assert asked[0].machine.memory_bytes == 2**40
