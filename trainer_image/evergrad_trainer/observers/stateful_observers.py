"""Observers of a task: on every rank, with a state that is saved and given on like the rest of the run.

The observers of a run's files and displays are rank 0's, and are made anew where rank 0 is another process.
Those of a task are made once in each process. Every rank calls them for the same steps and evaluations, so
that each holds the same state, whichever rank is lost. On rank 0 they are called for the start and for all
transitions, too.
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
"""Longest state of one observer, as JSON: it is in every checkpoint, and travels whenever a group forms."""


class Lasting(Observers):
    """A task's observers as a provider of the state registry.

    An observer fails or ends the run by its own ``essential``, in its state as in all else: a failing one
    keeps the state that it had last. Its ``listener`` are the run's own observers, on rank 0.
    """

    essential = True

    def __init__(self, observers: Sequence[Observer]) -> None:
        """Names in the checkpoint are those of the classes; of several of one class the second ends with
        ``#2``."""
        super().__init__(observers)
        self._names: dict[str, Observer] = {}
        self._states: dict[str, Any] = {}
        self._agreed: frozenset[str] = frozenset()
        """Those that all ranks of the newest world have switched off."""
        # Names are keys in the checkpoint: two observers of one class need two.
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
        """Whether one was switched off here since the ranks have agreed on which are."""
        return self.switched_off != self._agreed

    def agree_switched_off(self, names: Set[str]) -> None:
        """Switch off what is switched off on any rank: ``names``, the same on all of them."""
        for name in sorted(names - self.switched_off):
            why = "it failed several times on another rank"
            message = f"observer {name} is switched off here, too: {why}"
            self._switch_off(self._names[name], message)
        self._agreed = frozenset(names)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return none: a task's tensors are its kept ones."""
        return {}

    def values(self) -> Mapping[str, Any]:
        """Return the state of each observer after the last step it was called for, by its name; those without
        one are left out."""

        def keep(name: str, observer: Observer) -> None:
            # Written and read back at once: what is kept is what a restart would give, without shared
            # objects.
            text = json.dumps(observer.state(), allow_nan=False)
            if len(text) > MAX_STATE_BYTES:
                limit = f"at most {MAX_STATE_BYTES:,} are kept"
                raise ValueError(f"its state has {len(text):,} bytes; {limit}")
            self._states[name] = json.loads(text)

        for name, observer in self._names.items():
            self._ask(observer, functools.partial(keep, name))
        return {name: state for name, state in self._states.items() if state}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Give each observer its state; an empty one where there is none, as at the beginning."""
        self._states = dict(values)
        for name, observer in self._names.items():
            state = self._states.get(name, {})
            self._ask(observer, lambda one, state=state: one.load_state(state))  # type: ignore[misc]

    def repeat(self, record: StepRecord) -> None:
        """Have monitors say once more what has begun with the newest step: the process that was to write it
        down is gone, as is its record, ``record``."""
        for observer in self._names.values():
            if isinstance(observer, Monitors):
                self._ask(observer, lambda one: one.repeat(record))  # type: ignore[attr-defined]

    def reset(self) -> None:
        """Go back to the state before the first step."""
        self.load_values({})


class Announcer(BaseObserver):
    """Passes events of an observer on every rank to the run's own observers, which are rank 0's."""

    def __init__(self, lasting: Lasting) -> None:
        self._lasting = lasting

    def event(self, event: Event) -> None:
        self._lasting.listener.event(event)


class Together(BaseObserver):
    """Rank 0's own observers and then a task's.

    Closing it closes the former: the latter stay with their process.
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
        # The run's own observers are closed; a warning must not reach them any more.
        self.lasting.listener = BaseObserver()
        self.own.close()
