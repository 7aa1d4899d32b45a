"""Rank 0 of a new world writes down the start, or the change, before its first step."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from evergrad_trainer.training.progress import Progress
from evergrad_trainer.worker import lifecycle
from evergrad_trainer.worker.channel import Go
from evergrad_trainer.worker.life import Held, Life, Phase
from evergrad_trainer.worker.lifecycle import Lifecycle


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
def test_a_start_that_nobody_may_have_announced_is_announced_in_the_next_world(
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
        progress=Progress(finished_steps=steps_here, steps_here=steps_here),
        is_announced=is_announced,
    )  # fmt: skip

    def announce_world(machinery: Any, begin: Go, *, is_new: bool) -> None:
        said.append("new world" if is_new else "world")

    writer = SimpleNamespace(take=lambda: True, announce_world=announce_world)
    worlds = SimpleNamespace(are_replaced=True, trains=lambda world, step: None)
    monkeypatch.setattr(lifecycle, "settle", lambda *parts: is_fresh)
    monkeypatch.setattr(lifecycle, "announce", lambda *parts: said.append("start"))
    monkeypatch.setattr(lifecycle, "train", lambda run: "change")
    life = Life(Held.FRESH)
    life.enter(Phase.SETUP)
    one = Lifecycle(
        cast(Any, session),
        cast(Any, None),
        cast(Any, SimpleNamespace(observers=None)),
        worlds=cast(Any, worlds),
        writer=cast(Any, writer),
        life=life,
    )
    one._train_in(cast(Any, SimpleNamespace(is_main=True)), cast(Go, None))
    assert said == written
