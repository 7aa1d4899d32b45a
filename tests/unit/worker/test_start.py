"""The two ends of a worker: its start, before it is warm, and an error after its end."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from evergrad_common.contract import ExitCode
from evergrad_trainer.base.bytes_moved import MOVED
from evergrad_trainer.worker import run
from evergrad_trainer.worker.channel import Failed, Warm
from evergrad_trainer.worker.liveness import WorkerHeartbeat
from evergrad_trainer.worker.states import Life, LifeEnd, StateStatus, WorkerState


def test_reading_while_the_state_is_built_counts_as_a_heartbeat(
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


def test_an_error_after_the_end_of_a_worker_life_is_reported_to_its_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Closing an essential observer of a task, for instance."""

    class Observers:
        def event(self, event: Any) -> None:
            """Show nothing."""

        def close(self) -> None:
            raise OSError("an observer could not be closed")

    life = Life(StateStatus.WHOLE)

    def live() -> LifeEnd:
        life.enter(WorkerState.ENDED)
        return LifeEnd(0)

    opened = SimpleNamespace(observers=Observers())
    lasting = SimpleNamespace(life=life, live=live, generation=3)
    transport = SimpleNamespace(prepare=lambda: None)
    watchdog = SimpleNamespace(
        start=lambda: None, is_changing=None, can_wait=None, saves_first=None
    )
    for name, value in {
        "Watchdog": lambda channel: watchdog,
        "setup_logging": lambda *places, **more: None,
        "set_threads": lambda threads: None,
        "choose_device": lambda *kind, **place: torch.device("cpu"),
        "choose_transport": lambda device: transport,
        "open_plan": lambda plan: opened,
        "_build_alone": lambda *parts: lasting,
    }.items():
        monkeypatch.setattr(run, name, value)
    training = SimpleNamespace(runtime=SimpleNamespace(device="cpu"))
    plan = SimpleNamespace(
        run=SimpleNamespace(training=training),
        run_directory=tmp_path / "run",
        threads=1,
        marks={},
    )
    sent: list[Any] = []
    channel, nothing = SimpleNamespace(send=sent.append), cast(Any, None)
    code = run.run_worker(
        cast(Any, plan), cast(Any, channel), nothing, node=0, local_rank=0
    )
    assert code == ExitCode.INTERNAL
    assert [type(one) for one in sent] == [Warm, Failed]
    assert sent[1].text == "an observer could not be closed"
