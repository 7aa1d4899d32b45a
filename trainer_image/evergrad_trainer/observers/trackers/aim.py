"""Aim tracker: one run in a repository, through the package aim; offline, in a folder of the run directory.

A value replaces an older value of the same step, so that a step that is trained twice is shown with its last
values.
"""

import importlib
from typing import Any

from evergrad_manifest.training.observing import DEFAULT_PROJECT
from evergrad_trainer.observers.trackers.interface import End, Shown, TrackedRun, Values


class Aim:
    """The Aim run to which one process writes."""

    def __init__(self, run: TrackedRun) -> None:
        aim: Any = importlib.import_module("aim")
        settings = run.settings
        place = settings.url
        if settings.mode == "offline":
            run.directory.mkdir(parents=True, exist_ok=True)
            place = str(run.directory)
            if not aim.Repo.exists(place):
                aim.Repo.from_path(place, init=True)
        # Collect neither console output nor host statistics.
        options: dict[str, Any] = {
            "repo": place,
            "system_tracking_interval": None,
            "capture_terminal_logs": False,
            "log_system_params": False,
        }
        if run.own_id:
            # A process that was killed has left its lock, so always take over the run.
            self._run = aim.Run(run_hash=run.own_id, force_resume=True, **options)
        else:
            self._run = aim.Run(experiment=settings.project or DEFAULT_PROJECT, **options)
            self._run.name = run.title
            for tag in settings.tags:
                self._run.add_tag(tag)
        self.own_id = str(self._run.hash)
        self._run.set("run", dict(run.facts), strict=False)
        # Write the values since the last note again; they replace the same values.
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
