"""Counts the time of a run's pods by use, in pod-milliseconds. Pure.

A pod's time begins when it is created and ends with its container. Each millisecond has one use:

=======================================  =====================================================================
state of a pod                           use
=======================================  =====================================================================
has no host                              queue
has a host, and has not joined           startup; evaluation in a pod that evaluates
has joined the coordinator's group       the uses that the coordinator reports for its nodes, in proportion
has joined, and the run is over          end
has ended, or no longer exists           none
=======================================  =====================================================================

A pass counts every open pod from the time of the previous pass, and a new pod from its creation. If a status
was not written, the next pass counts again from the last written status, so that no time counts twice.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any, ClassVar, Final, get_args

from evergrad_common.causes import OFF_HOST, USEFUL, Use
from evergrad_coordinator.rules.ledger import apportion
from evergrad_operator.core.objects.names import MAX_ATTEMPT
from evergrad_operator.core.objects.raw import get_int, get_map, get_text, to_int
from evergrad_operator.core.objects.status_codec import At, Kind, Layout, TextForm
from evergrad_operator.core.objects.status_encoding import (
    pack_ranges,
    unpack_counts,
    unpack_ranges,
)
from evergrad_operator.core.objects.status_kinds import NATURAL, POSITIVE

HOUR: Final = 3_600_000
"""One hour in milliseconds."""
USE_NAMES: Final[tuple[Use, ...]] = get_args(Use)
_LETTERS: Final = re.compile(r"([ojc-])([0-9]{0,5})")
_MOST_OTHERS: Final = 256
"""Maximum number of groups of pods that are not the newest attempt of a node; about 3 KiB of the status."""
_LONGEST_NAME: Final = 63
_MOST: Final = 10**15
"""Largest valid count, in milliseconds."""
Counts = Mapping[Use, int]


# ---- kinds of values in a status ---------------------------------------------------------------------------


def parse_counts(raw: Mapping[str, Any]) -> dict[Use, int]:
    """Parse counts by use in milliseconds. Unknown uses and values that are not valid counts are left out."""
    found = {use: get_int(raw, use, most=_MOST) for use in USE_NAMES}
    return {
        use: amount for use, amount in found.items() if amount is not None and amount >= 0
    }


def _read_pair(raw: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    listed = raw.get(key)
    listed = listed if isinstance(listed, list) else []
    amounts = [one for one in listed if to_int(one, most=_MOST) is not None]
    return (amounts[0], amounts[1]) if len(amounts) == 2 else None


_COUNTS: Final = Kind(lambda raw, key: parse_counts(get_map(raw, key)), dict)
_COUNTS_ABOVE_0: Final = Kind(
    _COUNTS.read, lambda counts: {use: amount for use, amount in counts.items() if amount}
)
_PAIR: Final = Kind(_read_pair, list)
_NAMES: Final = Kind(lambda raw, key: raw.get(key))


def _pack_pods(pods: Mapping[str, Any], texts: Mapping[str, Any]) -> str:
    """Encode the names of the pods by state: ``o`` open, ``j`` joined, ``c`` closed.

    The text starts with the states of the newest attempts of all nodes, run-length encoded: ``j3o-2c`` means
    three joined nodes, one open node, two nodes without a pod and one closed node. The other pods follow:
    nodes by attempt, such as ``o:0/0-3,7``, and other pods by name.
    """
    states = dict.fromkeys(pods.get("open", ()), "o")
    states |= dict.fromkeys(pods.get("joined", ()), "j")
    states |= dict.fromkeys(pods.get("closed", ()), "c")
    letters = "".join(
        states.pop(f"{index}-{attempt}", "-")
        for index, attempt in enumerate(_find_attempts(texts))
    )
    groups = [(letter, len(list(same))) for letter, same in groupby(letters.rstrip("-"))]
    packed = "".join(
        letter if times == 1 else f"{letter}{times}" for letter, times in groups
    )

    # Then list the other pods, which are few: older attempts that are ending, and pods that are not nodes.
    others = []
    for state in "ojc":
        by_attempt: dict[str, set[int]] = {}
        for name in sorted(name for name, of in states.items() if of == state):
            index, dash, number = name.partition("-")
            if dash and index.isdecimal() and number.isdecimal():
                by_attempt.setdefault(number, set()).add(int(index))
            else:
                others.append(f"{state}:{name}")
        for number, indices in sorted(by_attempt.items()):
            others.append(f"{state}:{number}/{pack_ranges(indices)}")
    return " ".join([packed or "-", *others[:_MOST_OTHERS]]) if packed or others else ""


def _unpack_pods(text: str, texts: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Decode the text of ``_pack_pods``. Nodes under "-" have no pod."""
    attempts = _find_attempts(texts)
    found: dict[str, set[str]] = {state: set() for state in "ojc-"}
    packed, *others = text.split() or [""]
    index = 0
    for letter, times in _LETTERS.findall(packed):
        # Never read more nodes than ``attempts`` has, even if the text contains larger counts.
        last = min(index + int(times or 1), len(attempts))
        found[letter] |= {f"{one}-{attempts[one]}" for one in range(index, last)}
        index = last
    for part in others[:_MOST_OTHERS]:
        state, _, name = part.partition(":")
        number, slash, ranges = name.partition("/")
        if state in found and slash:
            found[state] |= {f"{one}-{number}" for one in unpack_ranges(ranges)}
        elif state in found and len(name) <= _LONGEST_NAME:
            found[state].add(name)
    return {
        "open": frozenset(found["o"] | found["j"]),
        "joined": frozenset(found["j"]),
        "closed": frozenset(found["c"]),
    }


def _find_attempts(texts: Mapping[str, Any]) -> Sequence[int]:
    """Return the newest attempt of each node, which the names of the pods refer to."""
    return unpack_counts(get_text(texts, "attempts"), most=MAX_ATTEMPT)


# ---- the account -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PodLife:
    """The times of one pod, in milliseconds since 1970.

    ``name``: the pod's name without the name of its run. ``bound``: time at which it got a host; None before.
    ``joined``: time at which its node could first train; None before. ``ended``: None while it may run.
    ``use``: use of its time on a host before it joins. ``is_gone``: whether no later pass will observe the
    pod.
    """

    name: str
    created: int
    bound: int | None = None
    joined: int | None = None
    ended: int | None = None
    use: Use = "startup"
    num_accelerators: int = 0
    is_gone: bool = False


@dataclass(frozen=True)
class Reading:
    """Counters of a coordinator, which start at 0 with each coordinator. ``attempt``: attempt of its pod."""

    attempt: Annotated[int, At("memory.usage.attempt", NATURAL, always=True)] = -1
    counted: Annotated[Counts, At("memory.usage.seen", _COUNTS, always=True)] = field(
        default_factory=dict
    )

    def grown_since(self, earlier: "Reading") -> dict[Use, int]:
        """Return the increase of each counter since the earlier reading; only counters that increased."""
        before = earlier.counted if earlier.attempt == self.attempt else {}
        grown = {use: amount - before.get(use, 0) for use, amount in self.counted.items()}
        return {use: amount for use, amount in grown.items() if amount > 0}


@dataclass(frozen=True)
class PodTimeAccount:
    """Time of a run's pods up to ``at``, in milliseconds since 1970.

    ``pods``, ``accelerators``: pod-milliseconds and accelerator-milliseconds by use. ``pending``: both values
    for joined pods whose use is not known yet; negative if a pod ended before its end was observed. ``seen``:
    the coordinator's counters at the last reading. ``open``, ``joined``, ``closed``: names of existing pods
    that are still counted, are counted as joined, or are completely counted.
    """

    LAYOUT: ClassVar[Layout] = Layout(
        needs={"memory.usage": ("at",)},
        texts={"usagePods": TextForm(_unpack_pods, _pack_pods)},
        required=frozenset({"at"}),
    )
    at: Annotated[int, At("memory.usage.at", POSITIVE)] = 0
    pods: Annotated[Counts, At("memory.usage.pods", _COUNTS, always=True)] = field(
        default_factory=dict
    )
    accelerators: Annotated[
        Counts, At("memory.usage.gpus", _COUNTS_ABOVE_0, always=True)
    ] = field(default_factory=dict)
    pending: Annotated[tuple[int, int], At("memory.usage.pending", _PAIR, always=True)] = (
        0,
        0,
    )
    seen: Reading = field(default_factory=Reading)
    open: Annotated[frozenset[str], At("memory.usagePods.open", _NAMES)] = frozenset()
    joined: Annotated[frozenset[str], At("memory.usagePods.joined", _NAMES)] = frozenset()
    closed: Annotated[frozenset[str], At("memory.usagePods.closed", _NAMES)] = frozenset()

    @property
    def pod_milliseconds(self) -> int:
        """Time of all pods together, in milliseconds."""
        return sum(self.pods.values())

    @property
    def wasted(self) -> float | None:
        """Share of the time on hosts (0 to 1) without a useful step, evaluation or save.

        None if no pod has had a host yet.
        """
        held = self.pod_milliseconds - self.pods.get(OFF_HOST, 0)
        if held <= 0:
            return None
        return 1.0 - sum(self.pods.get(use, 0) for use in USEFUL) / held


def count(
    usage: PodTimeAccount,
    lives: Sequence[PodLife],
    *,
    now: int,
    reading: Reading | None,
    fallback: Use | None = None,
) -> PodTimeAccount:
    """Return the account with the time up to ``now``, in milliseconds since 1970.

    ``reading``: counters of the run's coordinator; None if it has not answered. ``fallback``: use for joined
    pods if the account should not wait for a reading; None to wait.
    """
    now = max(now, usage.at)
    tally = _Tally(dict(usage.pods), dict(usage.accelerators), *usage.pending)
    for life in lives:
        if life.name not in usage.closed:
            since = usage.at if life.name in usage.open else life.created
            until = max(life.created, now if life.ended is None else life.ended)
            has_joined = life.name in usage.joined
            for use, amount in _divide(life, since, until, has_joined=has_joined):
                tally.add(use, amount, life.num_accelerators)

    # The use of joined nodes is known after the coordinator has reported it.
    weights = {} if reading is None else reading.grown_since(usage.seen)
    if not weights and fallback is not None:
        weights = {fallback: 1}
    if weights:
        tally.settle(weights)
    still_open = {
        life.name: life
        for life in lives
        if life.ended is None and life.name not in usage.closed
    }
    if not still_open:
        tally.take_back()
    closed = {
        life.name
        for life in lives
        if not life.is_gone and (life.ended is not None or life.name in usage.closed)
    }
    return PodTimeAccount(
        # Without pods, keep the old time, so that the status of a run without pods does not change.
        at=now if still_open or usage.open or closed != usage.closed else usage.at,
        pods=tally.pods,
        accelerators=tally.accelerators,
        pending=(tally.pending_pods, tally.pending_accelerators),
        seen=usage.seen if reading is None else reading,
        open=frozenset(still_open),
        joined=frozenset(
            name
            for name, life in still_open.items()
            if name in usage.joined or life.joined is not None
        ),
        closed=frozenset(closed),
    )


def _divide(
    life: PodLife, since: int, until: int, *, has_joined: bool
) -> Iterable[tuple[Use | None, int]]:
    """Yield the time from ``since`` to ``until`` by use, in milliseconds; the use is None for a joined
    pod."""
    # If a pod ended before the last pass, which counted it as open, the difference is negative and corrects
    # that.
    if until <= since or has_joined:
        yield None, until - since
        return
    bound = until if life.bound is None else min(max(life.bound, since), until)
    joined = until if life.joined is None else min(max(life.joined, bound), until)
    yield OFF_HOST, bound - since
    yield life.use, joined - bound
    yield None, until - joined


@dataclass
class _Tally:
    """The counts of the current pass."""

    pods: dict[Use, int]
    accelerators: dict[Use, int]
    pending_pods: int
    pending_accelerators: int

    def add(self, use: Use | None, amount: int, num_accelerators: int) -> None:
        """Add time of a pod in milliseconds. ``use``: None if the use is not known yet."""
        held = amount * num_accelerators
        if use is None:
            self.pending_pods += amount
            self.pending_accelerators += held
        elif amount:
            self.pods[use] = self.pods.get(use, 0) + amount
            if use != OFF_HOST:
                self.accelerators[use] = self.accelerators.get(use, 0) + held

    def settle(self, weights: Counts) -> None:
        """Distribute the pending time by the weights. Negative pending time waits for later positive time."""
        if self.pending_pods > 0:
            _add(self.pods, apportion(self.pending_pods, weights))
            self.pending_pods = 0
        if self.pending_accelerators > 0:
            _add(self.accelerators, apportion(self.pending_accelerators, weights))
            self.pending_accelerators = 0

    def take_back(self) -> None:
        """Subtract negative pending time from the largest counts.

        Call this if no pod is open, because then no later time can compensate it.
        """
        self.pending_pods = _take_back(self.pods, self.pending_pods)
        self.pending_accelerators = _take_back(self.accelerators, self.pending_accelerators)


def _add(counts: dict[Use, int], more: Counts) -> None:
    for use, amount in more.items():
        counts[use] = counts.get(use, 0) + amount


def _take_back(counts: dict[Use, int], pending: int) -> int:
    for use in sorted(counts, key=lambda one: -counts[one]):
        amount = min(counts[use], max(0, -pending))
        counts[use] -= amount
        pending += amount
    return pending


# ---- for users ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Price:
    """Prices per hour on a host, or 0."""

    accelerator_hour: float = 0.0
    pod_hour: float = 0.0
    currency: str = ""


NO_PRICE: Final = Price()


def show_usage(usage: PodTimeAccount, price: Price) -> dict[str, Any]:
    """Build the part of the status for users, for example ``{"podHours": "1.50", "waste": "12%", …}``."""
    if not usage.pods:
        return {}
    held = sum(usage.accelerators.values()) / HOUR
    on_hosts = (usage.pod_milliseconds - usage.pods.get(OFF_HOST, 0)) / HOUR
    cost = None
    if price.accelerator_hour or price.pod_hour:
        amount = held * price.accelerator_hour + on_hosts * price.pod_hour
        cost = f"{amount:.2f} {price.currency}".rstrip()
    return {
        "podHours": f"{usage.pod_milliseconds / HOUR:.2f}",
        "gpuHours": f"{held:.2f}",
        "waste": None if usage.wasted is None else f"{100 * usage.wasted:.0f}%",
        "cost": cost,
        "byCause": {
            use: round(usage.pods[use] / 1000) for use in USE_NAMES if usage.pods.get(use)
        },
    }
