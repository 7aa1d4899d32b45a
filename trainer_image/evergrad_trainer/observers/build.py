"""The registry of the built-in observers of rank 0, and the construction of a run's observers.

A task declares its own observers; this module declares the built-in observers. Both implement
:class:`~evergrad_trainer.observers.base.Observer` and are isolated in the same way: an exception of an
observer with ``essential`` ends the run, and other observers that fail are switched off.
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
    """The inputs from which built-in observers are built."""

    directory: RunDirectory
    run: str
    training: Training
    base_directory: Path
    """The directory that relative paths of the manifest refer to."""
    stream: TextIO
    """The output of the progress display; a bar if it is a terminal."""
    should_stop: Callable[[], bool]
    """Returns true to end the lingering of the endpoint early."""
    relay: Observer | None
    """Receives the records instead of an endpoint in this process."""


@runtime_checkable
class Served(Protocol):
    """An observer that serves an endpoint."""

    address: str


def _build_exporter(around: Surroundings) -> "PrometheusExporter | None":
    metrics = around.training.metrics
    if around.relay is not None or metrics.port is None:
        return None
    # Import the client library only for a run with an endpoint, because the import is slow.
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
    # Share the timeouts, because the end of a run waits for all trackers together.
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
        # If all ranks trace, ``build_lasting`` builds the profiler.
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
"""Builders by name. A builder returns None if the run does not have the observer, or several trackers.

Observers are called in this order: the JSON lines first, because they are the record, and the endpoint last,
because closing it may take time.
"""


def build_lasting(
    training: Training, own: Sequence[Observer], run_directory: Path | None
) -> Lasting:
    """Build the observers of every rank: the task's observers, and the monitors and traces of the manifest.

    ``run_directory``: None if only the data are inspected.
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
    """Build the observers of rank 0. Raises RunDirectoryError or ConfigurationError."""
    # Build them in the registry's order, in which they are also called.
    made = {name: build(around) for name, build in BUILT_IN.items()}
    endpoint: object = made["endpoint"]
    observers: list[Observer] = []
    for one in made.values():
        observers += one if isinstance(one, list) else [one] if one is not None else []
    return BuiltObservers(
        observers=Observers(observers),
        metrics_address=endpoint.address if isinstance(endpoint, Served) else None,
    )
