"""Puts rank 0's observers together, in the order in which they hear of things."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from evergrad_manifest.training import Training
from evergrad_trainer.observers.base import Observer, Observers
from evergrad_trainer.observers.history import read_before
from evergrad_trainer.observers.jsonl import RunLog
from evergrad_trainer.observers.logs import EventLog
from evergrad_trainer.observers.progress import build_progress
from evergrad_trainer.run_directory import RunDirectory


@dataclass(frozen=True)
class BuiltObservers:
    """``metrics_address``: URL of the Prometheus endpoint, or None without one."""

    observers: Observers
    metrics_address: str | None


def build_observers(
    directory: RunDirectory,
    *,
    run: str,
    training: Training,
    stream: TextIO,
    should_stop: Callable[[], bool] = lambda: False,
    relay: Observer | None = None,
) -> BuiltObservers:
    """The run's JSON lines first, since they are the record; then the log and the progress;
    the endpoint comes last because closing it may linger.

    ``stream``: where progress goes; a bar if it is a terminal. ``should_stop`` cuts the endpoint's lingering
    short. With a ``relay`` the records go there, and the endpoint is somebody else's. Raises
    RunDirectoryError and ConfigurationError.
    """
    observers: list[Observer] = [
        RunLog(directory),
        EventLog(),
        build_progress(stream, every=training.logging.every.steps),
    ]
    address = None
    if relay is not None:
        observers.append(relay)
    elif training.metrics.port is not None:
        from evergrad_trainer.observers.prometheus import PrometheusExporter

        exporter = PrometheusExporter(
            run,
            port=training.metrics.port,
            linger_seconds=training.metrics.linger_seconds,
            before=read_before(directory),
            should_stop=should_stop,
        )
        observers.append(exporter)
        address = exporter.address
    return BuiltObservers(observers=Observers(observers), metrics_address=address)
