"""The registry of the built-in observers, which are rank 0's, and how a run's are made from it.

An observer of a task is declared by the task, an observer of the product here. Both have the same hook
points, those of :class:`~evergrad_trainer.observers.base.Observer`, and the same isolation, which each
declares by ``essential``: an exception of an essential one ends the run, any other one is switched off.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TextIO, runtime_checkable

from evergrad_manifest.training import Training
from evergrad_trainer.observers.base import Observer, Observers
from evergrad_trainer.observers.history import read_before
from evergrad_trainer.observers.jsonl import RunLog
from evergrad_trainer.observers.logs import EventLog
from evergrad_trainer.observers.monitors import build_monitors
from evergrad_trainer.observers.profiler import Profiler
from evergrad_trainer.observers.progress import build_progress
from evergrad_trainer.observers.stateful_observers import Announcer, Lasting
from evergrad_trainer.observers.trackers.libraries import find_opener
from evergrad_trainer.observers.trackers.observer import TrackerObserver, TrackerTimeouts
from evergrad_trainer.run.directory import RunDirectory

if TYPE_CHECKING:
    from evergrad_trainer.observers.prometheus import PrometheusExporter


@dataclass(frozen=True)
class Surroundings:
    """Everything that built-in observers are made from."""

    directory: RunDirectory
    run: str
    training: Training
    base_directory: Path
    """Where relative paths of the file begin."""
    stream: TextIO
    """Where progress goes; a bar if it is a terminal."""
    should_stop: Callable[[], bool]
    """Cuts the endpoint's lingering short."""
    relay: Observer | None
    """Gets the records in the place of an endpoint of this process's own."""


@runtime_checkable
class Served(Protocol):
    """An observer with an endpoint of its own."""

    address: str


def _build_exporter(around: Surroundings) -> "PrometheusExporter | None":
    metrics = around.training.metrics
    if around.relay is not None or metrics.port is None:
        return None
    # The client library takes a while to import, which a run without an endpoint need not wait for.
    from evergrad_trainer.observers.prometheus import PrometheusExporter

    return PrometheusExporter(
        around.run,
        port=metrics.port,
        linger_seconds=metrics.linger_seconds,
        before=read_before(around.directory),
        should_stop=around.should_stop,
    )


def _build_trackers(around: Surroundings) -> list[Observer]:
    trackers = around.training.logging.trackers
    # One patience for all: each end waits for them together.
    patience = TrackerTimeouts()
    made: list[Observer] = []
    for one in trackers:
        if one.directory is not None:
            place = str(around.base_directory / one.directory)
            one = one.model_copy(update={"directory": place})
        opener = find_opener(one.type)
        made.append(TrackerObserver(one, opener, around.directory, patience=patience))
    return made


def _build_profiler(around: Surroundings) -> Observer | None:
    profile = around.training.logging.profile
    if profile is None or profile.ranks == "all":
        # Where all ranks trace, it is none of rank 0's: see ``build_lasting``.
        return None
    return Profiler(profile, around.directory.profiles)


BUILT_IN: Final[dict[str, Callable[[Surroundings], Observer | list[Observer] | None]]] = {
    "record": lambda around: RunLog(around.directory),
    "log": lambda _: EventLog(),
    "progress": lambda around: build_progress(
        around.stream, every=around.training.logging.every.steps
    ),
    "relay": lambda around: around.relay,
    "trackers": _build_trackers,
    "profiler": _build_profiler,
    "endpoint": _build_exporter,
}
"""By name, how each is made, or None where the run has it not; of trackers there may be several.

In this order they are called: the JSON lines first, since they are the record, and the endpoint last,
because closing it may linger.
"""


def build_lasting(
    training: Training, own: Sequence[Observer], run_directory: Path | None
) -> Lasting:
    """A task's observers and those of the file that every rank has: its monitors, and traces of all ranks.

    ``run_directory``: None where only the data are looked at.
    """
    observers = list(own)
    monitors = build_monitors(training)
    if monitors is not None:
        observers.append(monitors)
    profile = training.logging.profile
    if profile is not None and profile.ranks == "all" and run_directory is not None:
        observers.append(Profiler(profile, RunDirectory(run_directory).profiles))
    lasting = Lasting(observers)
    if monitors is not None:
        monitors.listener = Announcer(lasting)
    return lasting


@dataclass(frozen=True)
class BuiltObservers:
    """Observers of rank 0. ``metrics_address``: URL of the Prometheus endpoint, or None without one."""

    observers: Observers
    metrics_address: str | None


def build_observers(around: Surroundings) -> BuiltObservers:
    """Make the observers of rank 0. Raises RunDirectoryError and ConfigurationError."""
    # In the registry's order, which is also that of the calls.
    made = {name: build(around) for name, build in BUILT_IN.items()}
    endpoint: object = made["endpoint"]
    observers: list[Observer] = []
    for one in made.values():
        observers += one if isinstance(one, list) else [one] if one is not None else []
    return BuiltObservers(
        observers=Observers(observers),
        metrics_address=endpoint.address if isinstance(endpoint, Served) else None,
    )
