"""MLflow tracker: one run, found by its tag, through the client of mlflow (mlflow-skinny); offline in SQLite.

MLflow keeps every value that it receives. If a step is trained twice, it shows the first values. The records
that it already shows are read from MLflow itself.
"""

import hashlib
import importlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from evergrad_common.publishing import publish_once
from evergrad_manifest.training.observing import DEFAULT_PROJECT
from evergrad_trainer.base.durable import unique_suffix
from evergrad_trainer.observers.trackers.interface import (
    End,
    Shown,
    TrackedRun,
    Values,
    flatten,
)

_log = logging.getLogger(__name__)

_TAG: Final = "evergrad.run_id"
_NAME_TAG: Final = "evergrad.name."
"""Prefix of the tags that store the run's name of a metric that MLflow shows under another name."""
_LONGEST_NAME: Final = 250 - len(_NAME_TAG)
"""Maximum number of characters of a name, so that MLflow also accepts it after the prefix of a tag."""
_REFUSED: Final = re.compile(r"[^\w.\- :]")
"""Characters that MLflow refuses in a part of a name; parts are separated by slashes."""
_MOST_VALUES: Final = 500
"""Maximum number of values in one request; the client accepts a thousand."""
_LONGEST: Final = 500
"""Maximum number of characters of a parameter that every store accepts."""
_IN_EVERY_STEP: Final = "train/learning_rate"
"""A metric that every step has, unlike a loss. If the store has this metric for a step, it shows the step."""
_SHOWS_EVALUATION: Final = re.compile(r"evaluation/(.+)/loss")
"""Name of the metric that every evaluation has; the group is the name of the evaluation set."""
_STATUS: Final[dict[End, str]] = {
    "complete": "FINISHED",
    "stopped": "KILLED",
    "interrupted": "KILLED",
    "failed": "FAILED",
    "handed on": "RUNNING",
}


class MLflow:
    """The MLflow run to which one process writes."""

    def __init__(self, run: TrackedRun) -> None:
        # Set before the first import, which creates a client that sends telemetry, even offline.
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
        # Without a URL, the library uses its own environment variable.
        self._client: Any = tracking.MlflowClient(tracking_uri=uri)

        self.own_id = self._open_run(run, place)
        data = self._client.get_run(self.own_id).data

        self._log_parameters(run, entities, data.params)

        # Find the rows that it already shows, so that no row is sent twice.
        self._names = read_names(data.metrics, data.tags)
        evaluations = {
            match[1]: self._newest(one)
            for name, one in self._names.items()
            if (match := _SHOWS_EVALUATION.fullmatch(name))
        }
        step = self._newest(_IN_EVERY_STEP) if _IN_EVERY_STEP in data.metrics else 0
        self.shown = Shown(step, evaluations)
        self._waiting: list[Any] = []

    def _open_run(self, run: TrackedRun, place: str | None) -> str:
        """Return the id of the run, which is created if no earlier start has created it.

        ``place``: the folder of its artifacts; None: the server chooses it.
        """
        settings = run.settings
        name = settings.project or DEFAULT_PROJECT
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            number = experiment.experiment_id
        else:
            number = self._client.create_experiment(name, artifact_location=place)
        found = self._client.search_runs([number], f"tags.`{_TAG}` = '{run.run_id}'")
        if found:
            own_id = str(found[0].info.run_id)
            self._client.update_run(own_id, status="RUNNING")
            return own_id
        # Create the run with its tag, so that a kill leaves no run that later starts cannot find.
        own = {f"tag.{tag}": tag for tag in settings.tags}
        tags = {shown: own[name] for name, shown in find_names(own, {}).items()}
        made = self._client.create_run(
            number, tags={_TAG: run.run_id, **tags}, run_name=run.title
        )
        return str(made.info.run_id)

    def _log_parameters(self, run: TrackedRun, entities: Any, known: Any) -> None:
        # Also for an existing run, which may lack parameters after a kill or a refused name. Existing
        # parameters stay, because MLflow refuses to change a value.
        params = [
            entities.Param(name, text)
            for name, text in parameters_of(run.facts).items()
            if name not in known
        ]
        for first in range(0, len(params), 100):
            self._client.log_batch(self.own_id, params=params[first : first + 100])

    def write(self, step: int, time: float, values: Values) -> None:
        # Store changed names before their values, so that a later process can always map them back.
        if not values.keys() <= self._names.keys():
            names = find_names(values, self._names)
            for name in names.keys() - self._names.keys():
                if names[name] != name:
                    self._client.set_tag(self.own_id, f"{_NAME_TAG}{names[name]}", name)
            self._names = names
        # A kill may come between two requests. A row that fits into one request is not divided; in a longer
        # row, the metric that marks the row as shown comes last.
        last = [
            name
            for name in values
            if name == _IN_EVERY_STEP or _SHOWS_EVALUATION.fullmatch(name)
        ]
        moment = int(time * 1000)
        row = [
            self._metric(self._names[name], values[name], moment, step)
            for name in [*(one for one in values if one not in last), *last]
        ]
        if len(self._waiting) + len(row) > _MOST_VALUES:
            self.flush()
        self._waiting += row

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


def read_names(metrics: Iterable[str], tags: Mapping[str, str]) -> dict[str, str]:
    """Map the run's names of metrics to the names under which MLflow shows them."""
    called = {
        tag.removeprefix(_NAME_TAG): name
        for tag, name in tags.items()
        if tag.startswith(_NAME_TAG)
    }
    # Include names without values, which a kill may leave: no other metric may use these names.
    return {called.get(shown, shown): shown for shown in [*metrics, *called]}


def parameters_of(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the run's facts as parameters for MLflow: texts under names that MLflow accepts."""
    texts = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in flatten(facts).items()
    }
    names = find_names(texts, {})
    return {shown: texts[name][:_LONGEST] for name, shown in names.items()}


def find_names(names: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Map the run's names to names that MLflow accepts; the result contains ``known`` without changes.

    Refused characters become ``_``, for example ``a?b`` becomes ``a_b``. If the result is taken or too long,
    a hash of the original name is appended.
    """
    found = dict(known)
    taken, cleaned, changed = set(found.values()), dict[str, str](), list[str]()
    for name in names:
        # MLflow treats names as paths and refuses parts that are empty or consist of dots.
        parts = [_REFUSED.sub("_", part) for part in name.split("/")]
        cleaned[name] = "/".join(part if part.strip(".") else "_" for part in parts)
    # Names that MLflow accepts come first, so that they stay unchanged.
    for name in sorted(
        cleaned.keys() - found.keys(), key=lambda one: (cleaned[one] != one, one)
    ):
        shown = cleaned[name]
        if shown in taken or len(shown) > _LONGEST_NAME:
            digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:8]
            shown = f"{shown[: _LONGEST_NAME - 9]}-{digest}"
        if shown != name:
            changed.append(f"{name!r} as {shown!r}")
        found[name] = shown
        taken.add(shown)
    if changed:
        _log.warning(
            "tracker mlflow: %d names that MLflow does not take are shown changed, such as %s",
            len(changed),
            changed[0],
        )
    return found


def _make_database(path: Path, tracking: Any) -> None:
    """Create the store under a temporary name, and rename it when it is complete.

    MLflow creates its tables in dozens of migrations, which are not one transaction. A database that a kill
    left incomplete could not be opened again.
    """
    if path.exists():
        return
    making = path.with_name(f".{path.name}.{unique_suffix()}")
    try:
        tracking.MlflowClient(tracking_uri=f"sqlite:///{making}").search_experiments()
        publish_once(making, path)
    finally:
        # Remove also the temporary files of processes that were killed here.
        for one in path.parent.glob(f".{path.name}.*"):
            one.unlink(missing_ok=True)
