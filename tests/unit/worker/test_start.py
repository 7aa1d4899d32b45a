"""The start of a worker, before it is warm."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from evergrad_trainer.bytes_moved import MOVED
from evergrad_trainer.worker import run
from evergrad_trainer.worker.heartbeat import WorkerHeartbeat


def test_what_is_read_while_the_state_is_built_is_a_sign_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class BuiltError(Exception):
        pass

    def build_state(session: Any, *, with_weights: bool) -> None:
        MOVED.note(500)
        raise BuiltError

    monkeypatch.setattr(MOVED, "_on_moved", lambda num_bytes: None)
    monkeypatch.setattr(run, "build_state", build_state)
    monkeypatch.setattr(run, "has_checkpoints", lambda directory: False)
    heartbeat = WorkerHeartbeat()
    session, nothing = cast(Any, SimpleNamespace(directory=None)), cast(Any, None)
    with pytest.raises(BuiltError):
        run._build_alone(session, nothing, nothing, heartbeat)
    assert heartbeat.moved_bytes == 500
