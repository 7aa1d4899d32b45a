"""Aim: one run in a repository, by the aim package; offline a folder of the run directory.

A value at a step takes the place of an older one there, so that a step that was trained twice is shown as it
was trained last.
"""

import importlib
from typing import Any

from evergrad_manifest.training.observing import DEFAULT_PROJECT
from evergrad_trainer.observers.trackers.interface import End, Shown, TrackedRun, Values


class Aim:
    """One process's part of a run."""

    def __init__(self, run: TrackedRun) -> None:
        aim: Any = importlib.import_module("aim")
        settings = run.settings
        place = settings.url
        if settings.mode == "offline":
            run.directory.mkdir(parents=True, exist_ok=True)
            place = str(run.directory)
            if not aim.Repo.exists(place):
                aim.Repo.from_path(place, init=True)
        # Nothing is collected that nobody has asked for: no console, no statistics of the host.
        options: dict[str, Any] = {
            "repo": place,
            "system_tracking_interval": None,
            "capture_terminal_logs": False,
            "log_system_params": False,
        }
        if run.own_id:
            # A process that was killed has left its lock; a newer one may always go on.
            self._run = aim.Run(run_hash=run.own_id, force_resume=True, **options)
        else:
            self._run = aim.Run(experiment=settings.project or DEFAULT_PROJECT, **options)
            self._run.name = run.title
            for tag in settings.tags:
                self._run.add_tag(tag)
        self.own_id = str(self._run.hash)
        self._run.set("run", dict(run.facts), strict=False)
        # Values that were shown since the last note are written once more, in their own places.
        done = max(0, min(run.noted.step, run.start_step) - 1)
        self.shown = Shown(done, {}, done if run.noted.step else -1)

    def write(self, step: int, time: float, values: Values) -> None:
        for name, value in values.items():
            self._run.track(value, name=name, step=step)

    def note(self, name: str, text: str) -> None:
        self._run.set(name, text, strict=False)

    def flush(self) -> None:
        """Do nothing: a value is in the repository when `track` returns."""

    def finish(self, end: End) -> None:
        self._run.close()
