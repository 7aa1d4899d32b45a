"""Reports of a worker whose world lasts as long as itself to its node, about the error that ends it."""

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from evergrad_common.contract import ErrorKind
from evergrad_manifest.errors import EvergradError, InputError, Problem
from evergrad_trainer.base.errors import PeerLostError, SaveError, VolumeError
from evergrad_trainer.node import run
from evergrad_trainer.worker import run as launched
from evergrad_trainer.worker.channel import Failed, channel_pair
from evergrad_trainer.worker.liveness import WorkerHeartbeat
from evergrad_trainer.worker.session import SessionPlan


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize(
    ("error", "kind", "is_final"),
    [
        (VolumeError("/volume: stale"), ErrorKind.ENVIRONMENT, False),
        (PeerLostError("rank 1 is gone"), ErrorKind.PEER, False),
        (SaveError("three saves in a row failed"), ErrorKind.INTERNAL, False),
        (InputError(Problem("x", "is wrong")), ErrorKind.INPUT, True),
    ],
)
def test_a_fresh_worker_reports_the_kind_of_its_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: EvergradError,
    kind: ErrorKind,
    is_final: bool,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(launched, "open_in_world", fail)
    plan = cast(SessionPlan, SimpleNamespace(run_directory=tmp_path / "run"))
    ours, theirs = channel_pair()
    try:
        code = run._run_fresh(plan, theirs, WorkerHeartbeat(), generation=7)
        words = ours.receive(0)
    finally:
        ours.close()
        theirs.close()
    assert isinstance(words, Failed)
    assert (
        words.generation,
        words.exit_code,
        words.kind,
        words.is_final,
        words.is_agreed,
    ) == (
        7,
        code,
        kind,
        is_final,
        False,
    )
    assert str(error) in words.text
