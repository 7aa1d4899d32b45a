"""Observers of a task: they run on every rank, and their state is saved and transferred with the run's state.

Observers of a run's files and displays run only on rank 0, and are created again if another process becomes
rank 0. Observers of a task are created once in each process. Every rank calls them for the same steps and
evaluations, so that all ranks hold the same state and any rank can be lost. Rank 0 also calls them for the
start and for all events.
"""

import functools
import json
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

import torch

from evergrad_trainer.base.records import EvaluationRecord, Event, RunInfo, StepRecord, Wish
from evergrad_trainer.observers.base import BaseObserver, Observer, Observers
from evergrad_trainer.observers.monitors import Monitors

MAX_STATE_BYTES: Final = 64 * 1024
"""Maximum size of one observer's state as JSON. The state is in every checkpoint, and is transferred whenever
a group forms."""


class Lasting(Observers):
    """A task's observers as a provider of the state registry.

    An error in an observer's state is treated like its other errors, according to its ``essential``. An
    observer that fails keeps its last valid state. On rank 0, ``listener`` is the run's own observers.
    """

    essential = True

    def __init__(self, observers: Sequence[Observer]) -> None:
        """Name the observers in the checkpoint by their classes; a second one of a class ends with ``#2``."""
        super().__init__(observers)
        self._names: dict[str, Observer] = {}
        self._states: dict[str, Any] = {}
        self._agreed: frozenset[str] = frozenset()
        """Names of the observers that all ranks of the newest world have switched off."""
        # Names are keys in the checkpoint, so they must be unique.
        for observer in observers:
            kind = type(observer)
            number = 1 + sum(type(one) is kind for one in self._names.values())
            name = kind.__name__ if number == 1 else f"{kind.__name__}#{number}"
            self._names[name] = observer

    @property
    def switched_off(self) -> frozenset[str]:
        """Names of the observers that are switched off in this process."""
        names = (name for name, one in self._names.items() if one not in self._active)
        return frozenset(names)

    @property
    def is_disagreeing(self) -> bool:
        """Whether an observer was switched off here after the ranks last agreed on the list."""
        return self.switched_off != self._agreed

    def agree_switched_off(self, names: Set[str]) -> None:
        """Switch off the observers ``names``, which are switched off on any rank; the same on all ranks."""
        for name in sorted(names - self.switched_off):
            why = "it failed several times on another rank"
            message = f"observer {name} is switched off here, too: {why}"
            self._switch_off(self._names[name], message)
        self._agreed = frozenset(names)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return an empty mapping, because observers have no tensors."""
        return {}

    def values(self) -> Mapping[str, Any]:
        """Return the state of each observer after its last step, by name, without empty states."""

        def keep(name: str, observer: Observer) -> None:
            # Encode and decode the state: the result is the same as after a restart, and shares no objects.
            text = json.dumps(observer.state(), allow_nan=False)
            if len(text) > MAX_STATE_BYTES:
                limit = f"at most {MAX_STATE_BYTES:,} are kept"
                raise ValueError(f"its state has {len(text):,} bytes; {limit}")
            self._states[name] = json.loads(text)

        for name, observer in self._names.items():
            self._ask(observer, functools.partial(keep, name))
        return {name: state for name, state in self._states.items() if state}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Load the state of each observer; an observer without a state gets an empty one, as at the start."""
        self._states = dict(values)
        for name, observer in self._names.items():
            state = self._states.get(name, {})
            self._ask(observer, lambda one, state=state: one.load_state(state))  # type: ignore[misc]

    def repeat(self, record: StepRecord) -> None:
        """Let monitors report the alerts of the newest step again, after the loss of the process that should
        have recorded them. ``record``: the record of that step."""
        for observer in self._names.values():
            if isinstance(observer, Monitors):
                self._ask(observer, lambda one: one.repeat(record))  # type: ignore[attr-defined]

    def reset(self) -> None:
        """Reset all observers to the state before the first step."""
        self.load_values({})


class Announcer(BaseObserver):
    """Passes events from an observer on every rank to the run's own observers, which exist only on rank 0."""

    def __init__(self, lasting: Lasting) -> None:
        self._lasting = lasting

    def event(self, event: Event) -> None:
        self._lasting.listener.event(event)


class Together(BaseObserver):
    """Calls rank 0's own observers, and then the task's observers.

    ``close`` closes only rank 0's own observers, because a task's observers live as long as their process.
    """

    def __init__(self, own: Observer, lasting: Lasting) -> None:
        self.own = own
        self.lasting = lasting
        lasting.listener = own

    def run_start(self, info: RunInfo) -> None:
        self.own.run_start(info)
        self.lasting.run_start(info)

    def step_end(self, record: StepRecord) -> None:
        self.own.step_end(record)
        self.lasting.step_end(record)

    def evaluation_end(self, record: EvaluationRecord) -> None:
        self.own.evaluation_end(record)
        self.lasting.evaluation_end(record)

    def evaluation_progress(self, name: str, done: int, total: int) -> None:
        self.own.evaluation_progress(name, done, total)
        self.lasting.evaluation_progress(name, done, total)

    def event(self, event: Event) -> None:
        self.own.event(event)
        self.lasting.event(event)

    def wishes(self) -> frozenset[Wish]:
        return self.own.wishes() | self.lasting.wishes()

    def close(self) -> None:
        # Warnings must not reach the run's own observers after they are closed.
        self.lasting.listener = BaseObserver()
        self.own.close()
