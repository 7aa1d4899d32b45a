"""Rank 0 of a world records its start and its end, for any events of worlds in between."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from evergrad_common.contract import ExitCode
from evergrad_trainer.base.errors import PeerLostError
from evergrad_trainer.base.records import Event, EventType
from evergrad_trainer.distributed.world import Membership, World
from evergrad_trainer.observers.base import BaseObserver
from evergrad_trainer.observers.stateful_observers import Lasting
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.training.progress import TrainingProgress
from evergrad_trainer.worker import rank_zero, worker_loop
from evergrad_trainer.worker.channel import WorkerFinish, WorkerGo
from evergrad_trainer.worker.rank_zero import Writer
from evergrad_trainer.worker.session import Session
from evergrad_trainer.worker.states import Life, StateStatus, WorkerState
from evergrad_trainer.worker.worker_loop import Lifecycle

CPU = torch.device("cpu")
Settle = Callable[[Session], None]


class Log(BaseObserver):
    """Stores records in the order of writing; records after the close are lost."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.is_open = True

    def event(self, event: Event) -> None:
        if self.is_open:
            self.rows.append(event.type)

    def close(self) -> None:
        self.is_open = False
        self.rows.append("closed")


def open_session(directory: Path) -> Session:
    training = SimpleNamespace(reproducibility=SimpleNamespace(elastic="fast"))
    run = SimpleNamespace(training=training, metadata=SimpleNamespace(name="run"))
    lasting = Lasting(())
    code = SimpleNamespace(note_trained=lambda: None)
    return Session(
        cast(Any, SimpleNamespace(run=run, base_directory=directory)),
        RunDirectory(directory),
        lambda: False,
        Membership(World(0, 0, 1, CPU)),
        lasting,
        cast(Any, SimpleNamespace(code=code, observers=lasting)),
    )


def live(
    session: Session, monkeypatch: pytest.MonkeyPatch, *starts: tuple[int, Settle]
) -> list[str]:
    """Take part in one world after another, each with a rank and an event during the exchange of the state;
    return the records."""
    log = Log()

    def build_observers(surroundings: Any) -> Any:
        log.is_open = True
        return SimpleNamespace(observers=log, metrics_address=None)

    def announce(session: Session, machinery: Any) -> None:
        session.observers.event(Event(EventType.START, 0.0, 0, 0, {}))
        session.release_events()

    settles = iter([what for _, what in starts])
    ranks = [rank for rank, _ in starts]
    orders: list[Any] = [
        WorkerGo(number, rank, 2, "", 0, 0.0, "other")
        for number, rank in enumerate(ranks, 1)
    ]
    orders.append(WorkerFinish(0))
    worlds = SimpleNamespace(
        are_replaced=True,
        await_order=lambda step: orders.pop(0),
        meet=lambda begin, alone: World(begin.generation, begin.rank, 2, CPU),
        trains=lambda world, step: None,
        cut=lambda: None,
        leave=lambda world: False,
        left=lambda *facts, **more: None,
    )

    def settle(session: Session, machinery: Any, run: Any, life: Life) -> bool:
        next(settles)(session)
        life.held = StateStatus.WHOLE
        return True

    monkeypatch.setattr(rank_zero, "build_observers", build_observers)
    monkeypatch.setattr(worker_loop, "announce", announce)
    monkeypatch.setattr(worker_loop, "settle", settle)
    monkeypatch.setattr(worker_loop, "train", lambda run: "change")
    run = SimpleNamespace(
        observers=None,
        checkpoints=SimpleNamespace(abandon=lambda patience_seconds: None),
        stepper=SimpleNamespace(heartbeat=SimpleNamespace(rest=lambda: None)),
    )
    Lifecycle(
        session,
        cast(Any, None),
        cast(Any, run),
        worlds=cast(Any, worlds),
        writer=Writer(session, relay=None),
        life=Life(StateStatus.FRESH),
    ).live()
    return log.rows


def breaks(session: Session) -> None:
    """A checkpoint is damaged; then the world breaks, before it has trained."""
    session.emit(EventType.FALLBACK, {})
    raise PeerLostError("a peer was lost")


def restores(session: Session) -> None:
    session.emit(EventType.RESTORED, {})


def test_notes_of_rank_0_in_a_broken_world_are_written_by_the_next_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = live(open_session(tmp_path), monkeypatch, (0, breaks), (0, restores))
    assert rows == ["start", "fallback", "restored", "closed"]


def test_notes_of_a_rank_0_are_written_before_another_rank_takes_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its own part of the next start is left to the new rank 0, which notes the same."""
    rows = live(open_session(tmp_path), monkeypatch, (0, breaks), (1, restores))
    assert rows == ["fallback", "closed"]


def test_notes_of_a_rank_0_are_written_if_the_run_ends_without_another_world(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert live(open_session(tmp_path), monkeypatch, (0, breaks)) == ["fallback", "closed"]


def test_other_ranks_keep_notes_that_a_lost_rank_0_may_not_have_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = live(open_session(tmp_path), monkeypatch, (1, breaks), (0, restores))
    assert rows == ["start", "fallback", "restored", "closed"]


@pytest.mark.parametrize("others_go_on", [True, False])
def test_a_stop_file_is_kept_until_other_ranks_know_that_the_run_has_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, others_go_on: bool
) -> None:
    """If rank 0 dies before, the other ranks write it; if none continues, the next start trains."""
    session = open_session(tmp_path)
    session.directory.stop.touch()
    seen: list[bool] = []

    def look(*facts: Any, **more: Any) -> None:
        seen.append(session.directory.stop_requested())

    def close_run(*parts: Any, **more: Any) -> ExitCode:
        look()
        return ExitCode.STOPPED_SAVED

    monkeypatch.setattr(worker_loop, "close_run", close_run)
    monkeypatch.setattr(worker_loop, "settle", lambda *parts: True)
    monkeypatch.setattr(worker_loop, "announce", lambda *parts: None)
    monkeypatch.setattr(worker_loop, "train", lambda run: "stop_file")
    monkeypatch.setattr(worker_loop, "save_all", lambda run: True)
    worlds = SimpleNamespace(
        are_replaced=others_go_on, trains=lambda world, step: None, agreed_end=look
    )
    writer = SimpleNamespace(take=lambda: False, is_on_duty=True)
    life = Life(StateStatus.WHOLE)
    life.enter(WorkerState.SETUP)
    one = Lifecycle(
        session,
        cast(Any, None),
        cast(Any, SimpleNamespace(observers=None)),
        worlds=cast(Any, worlds),
        writer=cast(Any, writer),
        life=life,
    )
    one._train_in(World(1, 0, 1, CPU), cast(WorkerGo, None))
    assert seen == [others_go_on, others_go_on]
    assert not session.directory.stop_requested()


def test_a_record_that_cannot_be_closed_is_an_error_of_a_running_life(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def release() -> None:
        raise OSError("no space left")

    life = Life(StateStatus.WHOLE)
    one = Lifecycle(
        open_session(tmp_path),
        cast(Any, None),
        cast(Any, None),
        worlds=cast(Any, SimpleNamespace(await_order=lambda step: WorkerFinish(0))),
        writer=cast(Any, SimpleNamespace(release=release)),
        life=life,
    )
    with pytest.raises(OSError, match="no space left"):
        one.live()
    assert not life.is_over


@pytest.mark.parametrize(
    ("is_fresh", "steps_here", "is_announced", "written"),
    [
        (True, 0, False, ["start"]),
        (False, 0, False, ["start", "world"]),
        (False, 0, True, ["new world"]),
        (False, 3, False, ["new world"]),
    ],
    ids=["a start", "nobody may have announced it", "this rank has", "with steps it was"],
)
def test_a_start_that_may_not_have_been_announced_is_announced_in_the_next_world(
    monkeypatch: pytest.MonkeyPatch,
    is_fresh: bool,
    steps_here: int,
    is_announced: bool,
    written: list[str],
) -> None:
    said: list[str] = []
    session = SimpleNamespace(
        membership=SimpleNamespace(move_to=lambda world: None),
        mark=lambda phase: None,
        opened=SimpleNamespace(code=SimpleNamespace(note_trained=lambda: None), observers=None),
        observers=None,
        progress=TrainingProgress(finished_steps=steps_here, steps_here=steps_here),
        is_announced=is_announced,
        waiting=None,
    )  # fmt: skip

    def announce_world(machinery: Any, begin: WorkerGo, *, is_new: bool) -> None:
        said.append("new world" if is_new else "world")

    writer = SimpleNamespace(
        take=lambda: True, announce_world=announce_world, is_on_duty=True
    )
    worlds = SimpleNamespace(are_replaced=True, trains=lambda world, step: None)
    monkeypatch.setattr(worker_loop, "settle", lambda *parts: is_fresh)
    monkeypatch.setattr(worker_loop, "announce", lambda *parts: said.append("start"))
    monkeypatch.setattr(worker_loop, "train", lambda run: "change")
    life = Life(StateStatus.FRESH)
    life.enter(WorkerState.SETUP)
    one = Lifecycle(
        cast(Any, session),
        cast(Any, None),
        cast(Any, SimpleNamespace(observers=None)),
        worlds=cast(Any, worlds),
        writer=cast(Any, writer),
        life=life,
    )
    one._train_in(cast(Any, SimpleNamespace(is_main=True)), cast(WorkerGo, None))
    assert said == written
