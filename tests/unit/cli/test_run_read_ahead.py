"""Which process of a run reads the newest checkpoint while it imports."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evergrad_trainer import machine
from evergrad_trainer.cli.run import _restores_here
from evergrad_trainer.cli.run_arguments import RunRequest


def request(
    device: str = "auto", asked: int | None = None, in_file: int | None = None, **more: Any
) -> RunRequest:
    run = SimpleNamespace(
        training=SimpleNamespace(runtime=SimpleNamespace(device=device)),
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
def test_a_process_that_may_fork_workers_reads_nothing_ahead(
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
def test_of_the_ranks_that_torchrun_starts_only_the_one_that_restores_reads_ahead(
    rank: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert _restores_here(request("cpu")) is expected
