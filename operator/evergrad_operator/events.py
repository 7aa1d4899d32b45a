"""Events of a run, on transitions only. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evergrad_operator.observe import Observation


@dataclass(frozen=True)
class Event:
    """One event. ``type``: Normal or Warning. ``reason``: CamelCase."""

    type: str
    reason: str
    message: str


def derive_events(old_status: Mapping[str, Any], new_status: Mapping[str, Any], observation: Observation) -> tuple[Event, ...]:
    """What a change of status tells people; nothing for what has been told before."""
    raise NotImplementedError
