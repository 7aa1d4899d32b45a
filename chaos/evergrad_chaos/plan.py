"""The plan of a disturbed run: endless, and a function of its seed. Pure."""

import random
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "kill_node",
    "kill_worker",
    "freeze_node",
    "freeze_supervisor",
    "freeze_worker",
    "leave",
    "join",
    "kill_coordinator",
    "lose_all",
    "starve",
    "kill_source",
]
_WEIGHTS: dict[Kind, int] = {
    "kill_node": 22,
    "kill_worker": 22,
    "freeze_node": 10,
    "freeze_supervisor": 8,
    "freeze_worker": 10,
    "leave": 9,
    "join": 8,
    "kill_coordinator": 9,
    "lose_all": 2,
}
_ONLY: dict[str, Kind] = {"transfer": "starve", "coordinator": "kill_coordinator"}
"""Kinds of chaos that consist of one disturbance: members that die while
they hand their state over; coordinators that die."""
KIND_VARIABLE = "EVERGRAD_CHAOS_KIND"
"""``transfer`` (with two nodes) or ``coordinator``, for tests; without it events of all kinds are drawn."""
_FREEZES = frozenset({"freeze_node", "freeze_supervisor", "freeze_worker"})
_PAIRS = 0.25
"""Share of events with a second disturbance, which often meets the recovery from the first."""


@dataclass(frozen=True)
class Disturbance:
    """One thing that happens. ``pick``: which of those it can happen to, from 0 to 1, rather a late one.

    ``seconds``: how long it is frozen. ``delay_seconds``: after the first disturbance of its event.
    """

    kind: Kind
    pick: float
    seconds: float = 0.0
    delay_seconds: float = 0.0


@dataclass(frozen=True)
class ChaosEvent:
    """After ``pause_seconds`` of undisturbed training.

    ``awaits_all``: the next one waits until all nodes train again.
    """

    pause_seconds: float
    disturbances: tuple[Disturbance, ...]
    awaits_all: bool


def plan_events(seed: int, kind: str = "") -> Iterator[ChaosEvent]:
    """The endless sequence of that seed; ``kind``: see ``KIND_VARIABLE``."""
    source = random.Random(seed)
    while kind:
        one = Disturbance(_ONLY[kind], source.random(), round(source.uniform(0.0, 0.8), 3))
        yield ChaosEvent(source.uniform(0.0, 0.6), (one,), awaits_all=True)
    while True:
        first = _draw(source, delay_seconds=0.0)
        disturbances = [first]
        if first.kind != "lose_all" and source.random() < _PAIRS:
            delay = 0.0 if source.random() < 0.4 else source.uniform(0.0, 1.6)
            second = _draw(source, delay_seconds=delay)
            disturbances += [second] if second.kind != "lose_all" else []
        yield ChaosEvent(
            source.uniform(0.0, 0.6), tuple(disturbances), awaits_all=source.random() < 0.5
        )


def _draw(source: random.Random, *, delay_seconds: float) -> Disturbance:
    kind = source.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
    # A freeze of less than 3 s is not noticed. After a longer freeze, the node is lost and joins again.
    length = source.uniform(1.0, 2.5) if source.random() < 0.7 else source.uniform(3.2, 6.0)
    # Prefer high indices, so that some nodes live long, as in a cluster: their memory must not grow.
    pick = source.random() ** 0.6
    return Disturbance(
        kind, pick, round(length, 3) if kind in _FREEZES else 0.0, round(delay_seconds, 3)
    )


def choose_victim(
    pick: float,
    alive: Mapping[int, int],
    whole: Set[int],
) -> int | None:
    """Return the index of a node that may be disturbed, so that another node still holds the newest state, or
    None.

    ``alive``: process id by index. ``whole``: process ids of the nodes that hold the state.
    """
    can_go = sorted(index for index, pid in alive.items() if whole - {pid})
    return can_go[min(int(pick * len(can_go)), len(can_go) - 1)] if can_go else None
