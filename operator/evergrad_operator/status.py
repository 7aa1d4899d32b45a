"""The status of a run: observation, decision and what came of it → the object on the wire, and when to write it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evergrad_operator.decision import Decision
from evergrad_operator.observe import ApplyFailure, Observation


@dataclass(frozen=True)
class Outcome:
    """What came of a plan. ``created``: names of pods that now exist. ``failures``: what the API server refused."""

    created: tuple[str, ...] = ()
    failures: tuple[ApplyFailure, ...] = ()


@dataclass(frozen=True)
class WriteDecision:
    """Whether the status is to be written now; if not, ``after`` so many seconds (None: no need)."""

    write: bool
    after: float | None = None


def build_status(observation: Observation, decision: Decision, outcome: Outcome, now: float) -> dict[str, Any]:
    """The whole ``status``, at most 16 KiB. ``now``: seconds since 1970."""
    raise NotImplementedError


def should_write(
    old: Mapping[str, Any], new: Mapping[str, Any], *, now: float, last_progress_write: float | None
) -> WriteDecision:
    """Whether ``new`` goes out now. Only progress differs: at most every 10 s. ``last_progress_write``: seconds since 1970."""
    raise NotImplementedError
