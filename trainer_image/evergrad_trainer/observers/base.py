"""The interface of observers, and the fan-out that isolates the training from observers that fail."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, get_args

from evergrad_trainer.base.records import (
    EvaluationRecord,
    Event,
    EventType,
    RunInfo,
    StepRecord,
    Wish,
)
from evergrad_trainer.run.directory import run_directory_error

_log = logging.getLogger(__name__)

FAILURES_BEFORE_DISABLED = 3
WISHES: tuple[Wish, ...] = get_args(Wish)


class GivesUp(Exception):  # noqa: N818 - not an error of the run: an observer raises it to end itself
    """Raised by an observer that cannot continue. It is switched off after this one failure; the text is the
    reason."""


class Observer(Protocol):
    """Receiver of the records and events of a run, on rank 0, between two steps.

    Its methods must return quickly, because the next step waits for them, and must not change the training.
    """

    essential: bool
    """Whether the run stops if this observer fails; other observers are switched off instead."""

    def run_start(self, info: RunInfo) -> None: ...

    def step_end(self, record: StepRecord) -> None: ...

    def evaluation_end(self, record: EvaluationRecord) -> None: ...

    def evaluation_progress(self, name: str, done: int, total: int) -> None: ...

    def event(self, event: Event) -> None: ...

    def wishes(self) -> frozenset[Wish]: ...

    def state(self) -> Mapping[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class BaseObserver:
    """Observer that does nothing: a subclass overrides the calls it needs."""

    essential: bool = False

    def run_start(self, info: RunInfo) -> None:
        """Called once, before all other methods."""

    def step_end(self, record: StepRecord) -> None:
        """Called after each finished step."""

    def evaluation_end(self, record: EvaluationRecord) -> None:
        """Called after each evaluation of one set."""

    def evaluation_progress(self, name: str, done: int, total: int) -> None:
        """Called while the set ``name`` is evaluated: ``done`` of ``total`` batches."""

    def event(self, event: Event) -> None:
        """Called at each transition of the run."""

    def wishes(self) -> frozenset[Wish]:
        """Return the requests of this observer, for example to stop or to save; called before each step.

        All ranks carry out the requests at the boundary after that step. The result must depend only on the
        observer's state, and the call must not change it: if a step is lost with its world, the method is
        called again for the same step.
        """
        return frozenset()

    def state(self) -> Mapping[str, Any]:
        """Return the state of this observer, as JSON values. Checkpoints store it for a task's observers.

        The state must depend only on the steps and evaluations. It must not contain values that one rank
        measures, such as seconds, because after the loss of a rank the run continues with another rank's
        state.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the value that :meth:`state` returned; start from the beginning if it is empty."""

    def close(self) -> None:
        """Called once, after all other methods, also after an error."""


class Observers(BaseObserver):
    """Several observers that are called in order and isolated from each other.

    An exception of an ordinary observer is logged and counted. After three exceptions in a row the observer
    is switched off, and the other observers receive a ``warning`` event. An exception of an essential
    observer is raised; an OSError is raised as a RunDirectoryError or a VolumeError.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._active = list(observers)
        self._in_a_row: dict[int, int] = {}
        self._last = Event(
            type=EventType.WARNING,
            time=0.0,
            step=0,
            generation=0,
        )
        self.failures: dict[str, int] = {}
        """Exceptions so far, by class name of the observer."""
        self.listener: Observer = BaseObserver()
        """Receives the ``warning`` event about an observer that is switched off, after the remaining
        observers."""

    def run_start(self, info: RunInfo) -> None:
        # A warning about an observer names the step at which it failed.
        self._last = replace(
            self._last,
            step=info.start_step,
            generation=info.generation,
        )
        self._each(lambda observer: observer.run_start(info))

    def step_end(self, record: StepRecord) -> None:
        self._last = replace(
            self._last,
            step=record.step,
            generation=record.generation,
        )
        self._each(lambda observer: observer.step_end(record))

    def evaluation_end(self, record: EvaluationRecord) -> None:
        self._each(lambda observer: observer.evaluation_end(record))

    def evaluation_progress(self, name: str, done: int, total: int) -> None:
        self._each(lambda observer: observer.evaluation_progress(name, done, total))

    def event(self, event: Event) -> None:
        self._each(lambda observer: observer.event(event))

    def wishes(self) -> frozenset[Wish]:
        """Return the requests of all observers."""
        found: set[Wish] = set()

        def ask(observer: Observer) -> None:
            asked = frozenset(observer.wishes())
            if unknown := asked - set(WISHES):
                # Requests are sent to all ranks, and no rank can carry out an unknown request.
                raise ValueError(
                    f"asks for {', '.join(sorted(map(str, unknown)))}; it may ask for {', '.join(WISHES)}"
                )
            found.update(asked)

        self._each(ask)
        return frozenset(found)

    def close(self) -> None:
        """Close all observers, even if one fails; then raise the first error of an essential observer."""
        errors: list[Exception] = []
        while self._active:
            observer = self._active.pop(0)
            try:
                self._call(observer, lambda one: one.close())
            except Exception as error:  # noqa: BLE001 - the others must be closed before it is raised
                errors.append(error)
        if errors:
            raise errors[0]

    def _each(self, call: Callable[[Observer], None]) -> None:
        for observer in tuple(self._active):
            self._call(observer, call)

    def _ask(self, observer: Observer, call: Callable[[Observer], None]) -> None:
        """Call one observer, unless it is switched off."""
        if observer in self._active:
            self._call(observer, call)

    def _call(self, observer: Observer, call: Callable[[Observer], None]) -> None:
        try:
            call(observer)
        except Exception as error:
            name = type(observer).__name__
            self.failures[name] = self.failures.get(name, 0) + 1
            # An essential observer writes the run's record. Without it the run would train unrecorded.
            if observer.essential:
                if isinstance(error, OSError):
                    what = f"cannot be written by {name}"
                    where = error.filename or "run directory"
                    raise run_directory_error(error, where, what=what) from error
                raise
            if isinstance(error, GivesUp):
                self._switch_off(observer, f"observer {name} is switched off: {error}")
                return
            _log.exception("observer %s failed: %s: %s", name, type(error).__name__, error)
            # One failure may be temporary, such as a full disk. After several in a row, more are expected.
            in_a_row = self._in_a_row.get(id(observer), 0) + 1
            self._in_a_row[id(observer)] = in_a_row
            if in_a_row >= FAILURES_BEFORE_DISABLED and observer in self._active:
                how_often = f"after {FAILURES_BEFORE_DISABLED} failures in a row"
                self._switch_off(
                    observer, f"observer {name} is switched off {how_often}: {error}"
                )
        else:
            self._in_a_row.pop(id(observer), None)

    def _switch_off(self, observer: Observer, message: str) -> None:
        name = type(observer).__name__
        # Remove it first, because the warning below goes to the remaining observers.
        if observer not in self._active:
            return
        self._active.remove(observer)
        _log.error("%s", message)
        try:
            observer.close()
        except Exception as closing:  # noqa: BLE001 - it failed already; release what it can
            _log.error("observer %s could not be closed: %s", name, closing)
        warning = replace(self._last, time=time.time(), fields={"message": message})
        self.event(warning)
        self.listener.event(warning)
