"""MLflow: one run, found by its tag, by the client of mlflow (mlflow-skinny); offline in a SQLite file.

It keeps each value that it was ever given, so that a step that was trained twice is shown as it was trained
first. The store itself is asked for what it shows.
"""

import importlib
import json
import os
from pathlib import Path
from typing import Any, Final

from evergrad_manifest.training.observing import DEFAULT_PROJECT
from evergrad_trainer.durable import publish_once, unique_suffix
from evergrad_trainer.observers.trackers.interface import (
    End,
    Shown,
    TrackedRun,
    Values,
    flatten,
)

_TAG: Final = "evergrad.run_id"
_MOST_VALUES: Final = 500
"""Values in one request; the client takes a thousand."""
_LONGEST: Final = 500
"""Characters of a parameter that every store takes."""
_IN_EVERY_STEP: Final = "train/learning_rate"
"""A number that a step always has, unlike a loss."""
_STATUS: Final[dict[End, str]] = {
    "complete": "FINISHED",
    "stopped": "KILLED",
    "interrupted": "KILLED",
    "failed": "FAILED",
    "handed on": "RUNNING",
}


class MLflow:
    """One process's part of a run."""

    def __init__(self, run: TrackedRun) -> None:
        # Before the first import, which makes a client that reports to MLflow's makers, offline too.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        tracking: Any = importlib.import_module("mlflow.tracking")
        entities: Any = importlib.import_module("mlflow.entities")
        self._metric: Any = entities.Metric
        settings = run.settings
        uri, place = settings.url, None
        if settings.mode == "offline":
            run.directory.mkdir(parents=True, exist_ok=True)
            database = run.directory.absolute() / "mlflow.db"
            _make_database(database, tracking)
            uri = f"sqlite:///{database}"
            place = (run.directory.absolute() / "artifacts").as_uri()
        # Without a URL: what the library's own environment variable says.
        self._client: Any = tracking.MlflowClient(tracking_uri=uri)

        name = settings.project or DEFAULT_PROJECT
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            number = experiment.experiment_id
        else:
            number = self._client.create_experiment(name, artifact_location=place)
        found = self._client.search_runs([number], f"tags.`{_TAG}` = '{run.run_id}'")
        if found:
            self.own_id = found[0].info.run_id
            self._client.update_run(self.own_id, status="RUNNING")
        else:
            # With its tag from the beginning: a kill leaves no run that nobody finds again.
            tags = {_TAG: run.run_id, **{f"tag.{tag}": tag for tag in settings.tags}}
            made = self._client.create_run(number, tags=tags, run_name=run.title)
            self.own_id = made.info.run_id
            facts = {
                name: value if isinstance(value, str) else json.dumps(value)
                for name, value in flatten(run.facts).items()
            }
            params = [entities.Param(key, text[:_LONGEST]) for key, text in facts.items()]
            for first in range(0, len(params), 100):
                self._client.log_batch(self.own_id, params=params[first : first + 100])

        # The rows that it shows already: nothing is sent twice.
        names = self._client.get_run(self.own_id).data.metrics
        evaluations: dict[str, int] = {}
        for shown in names:
            kind, _, rest = shown.partition("/")
            set_name, _, what = rest.rpartition("/")
            if kind == "evaluation" and what == "loss":
                evaluations[set_name] = self._newest(shown)
        step = self._newest(_IN_EVERY_STEP) if _IN_EVERY_STEP in names else 0
        self.shown = Shown(step, evaluations)
        self._waiting: list[Any] = []

    def write(self, step: int, time: float, values: Values) -> None:
        moment = int(time * 1000)
        self._waiting += [
            self._metric(name, value, moment, step) for name, value in values.items()
        ]
        if len(self._waiting) >= _MOST_VALUES:
            self.flush()

    def note(self, name: str, text: str) -> None:
        self._client.set_tag(self.own_id, name, text)

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), _MOST_VALUES):
            part = waiting[first : first + _MOST_VALUES]
            self._client.log_batch(self.own_id, metrics=part)

    def finish(self, end: End) -> None:
        self.flush()
        self._client.set_terminated(self.own_id, status=_STATUS[end])

    def _newest(self, name: str) -> int:
        history = self._client.get_metric_history(self.own_id, name)
        return max((int(one.step) for one in history), default=0)


def _make_database(path: Path, tracking: Any) -> None:
    """Make the store under another name, and give it its own once it is whole.

    Its tables are made by dozens of migrations, which are no one transaction: a database that a kill left
    half made could never be opened again.
    """
    if path.exists():
        return
    making = path.with_name(f".{path.name}.{unique_suffix()}")
    try:
        tracking.MlflowClient(tracking_uri=f"sqlite:///{making}").search_experiments()
        publish_once(making, path)
    finally:
        # Also those of processes that were killed while they made one.
        for one in path.parent.glob(f".{path.name}.*"):
            one.unlink(missing_ok=True)
