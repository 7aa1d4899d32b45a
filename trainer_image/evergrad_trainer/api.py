"""Runs training from Python: ``run`` trains a manifest like ``evergrad run`` and returns a typed report.

For example::

    from evergrad_trainer.api import run

    found = run(manifest="trainingrun.yaml", overrides=["spec.training.optimizer.learningRate=3e-4"])
    print(found.loss, found.checkpoint)

Training runs in a separate process, whose output is printed as it arrives: threads, devices and signals of
the caller stay as they are. If the caller is interrupted, that process is asked to stop, and saves its state.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from evergrad_common.contract import ExitCode
from evergrad_manifest.errors import EvergradError, InputError, Problem
from evergrad_manifest.reading.loader import load_manifest
from evergrad_trainer.base.records import EventType
from evergrad_trainer.checkpoint.layout import parse_checkpoint_name
from evergrad_trainer.checkpoint.store import open_store
from evergrad_trainer.report.facts import gather_facts
from evergrad_trainer.report.summary import summarise
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.run.redaction import public_path

STOPPED_WELL: Final = (ExitCode.DONE, ExitCode.STOPPED_SAVED)
"""Exit codes of a run that ended as it was asked to."""


class RunFailedError(EvergradError):
    """A run neither completed nor stopped on request; ``exit_code`` gives the kind of failure.

    The output of the run contains the reason.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = ExitCode(exit_code)


@dataclass(frozen=True)
class RunReport:
    """The result of a run so far. A path is None if there is no such file.

    ``samples``: the number of samples of the whole run. ``loss``: the loss of the newest step.
    ``resumed_from``: the step that the newest process resumed from, 0 for a fresh run. ``data``: the
    fingerprint of the training data.
    """

    run: str
    directory: Path
    data: str
    is_complete: bool
    requested_steps: int
    completed_steps: int
    resumed_from: int
    samples: int
    loss: float | None
    checkpoint: Path | None
    resumed_checkpoint: Path | None
    requested: Path | None
    configuration: Path | None
    preflight: Path | None
    provenance: Path | None
    metrics: Path | None
    evaluation: Path | None
    events: Path | None

    def to_dict(self, *, is_public: bool = True) -> dict[str, Any]:
        """The report as JSON values, paths as texts.

        ``is_public``: paths are relative to the run directory, and only the name of that directory is given.
        """
        values: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value == self.directory and is_public:
                value = value.resolve().name
            elif isinstance(value, Path) and is_public:
                value = public_path(value.relative_to(self.directory))
            values[field.name] = str(value) if isinstance(value, Path) else value
        return values


def run(
    *,
    manifest: Path | str,
    overrides: Sequence[str] = (),
    run_directory: Path | str | None = None,
    arguments: Sequence[str] = (),
) -> RunReport:
    """Train ``manifest`` until it completes or is stopped, and return a report.

    ``overrides``: assignments as for ``--set``, for example
    ``["spec.training.optimizer.learningRate=3e-4"]``. ``arguments``:
    further arguments of ``evergrad run``, for example ``("--nodes", "2")``. Raises ConfigurationError before
    a process is started, RunFailedError if the run fails, and KeyboardInterrupt after the state is saved.
    """
    loaded = load_manifest(Path(manifest), overrides=list(overrides)).run
    where = (
        Path("runs") / loaded.metadata.name
        if run_directory is None
        else Path(run_directory)
    )
    if loaded.spec.script is not None:
        what = "is a script; only the script knows its steps and losses"
        raise InputError(Problem(str(manifest), what, "", "Start it with `evergrad run`"))
    # Without the current directory on its path, as the command `evergrad`.
    command = [sys.executable, "-P", "-m", "evergrad_cli", "run", str(manifest)]
    command += [word for one in overrides for word in ("--set", one)]
    # The last occurrence takes precedence: the report below is made from this directory.
    command += [*arguments, "--run-directory", str(where)]
    code = _wait_for(command)
    if code not in STOPPED_WELL:
        known = code if code in tuple(ExitCode) else ExitCode.INTERNAL
        raise RunFailedError(f"{loaded.metadata.name} ended with exit code {code}", known)
    return report(where)


def _wait_for(command: Sequence[str]) -> int:
    """Run ``command`` to its end, also if this process is interrupted; return its exit code."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except BaseException:
        # subprocess.run would kill it, and lose the steps since the last checkpoint. A signal that a
        # terminal has sent to both is the same request.
        process.terminate()
        process.wait()
        raise


def report(run_directory: Path | str) -> RunReport:
    """Report on a run from its directory, finished or not. Raises RunDirectoryError if it is not a run."""
    directory = RunDirectory(Path(run_directory))
    facts = gather_facts(directory)
    figures = summarise(facts)
    resolved = directory.read_resolved() or {}
    starts = [event for event in facts.history.events if event.type == EventType.START]
    resumed_from = int(starts[-1].fields.get("resumed_from") or 0) if starts else 0

    # A resume would use the newest checkpoint that can be read.
    found = open_store(directory.checkpoints).catalog.scan()
    names = [one.name for one in found if one.manifest is not None]
    versions = {name: parse_checkpoint_name(name) for name in names}
    resumed = [
        name
        for name, version in versions.items()
        if resumed_from and version is not None and version.step == resumed_from
    ]
    return RunReport(
        run=facts.name,
        directory=directory.path,
        data=str(resolved.get("dataFingerprint", "")),
        is_complete=directory.is_complete(),
        requested_steps=int((resolved.get("derived") or {}).get("totalSteps") or 0),
        completed_steps=int(figures["step"]),
        resumed_from=resumed_from,
        samples=int(figures["samples"]),
        loss=figures["loss"],
        checkpoint=directory.checkpoints / names[0] if names else None,
        resumed_checkpoint=directory.checkpoints / resumed[0] if resumed else None,
        requested=_there(directory.requested),
        configuration=_there(directory.resolved),
        preflight=_there(directory.preflight),
        provenance=_there(directory.provenance),
        metrics=_there(directory.metrics),
        evaluation=_there(directory.evaluation),
        events=_there(directory.events),
    )


def _there(path: Path) -> Path | None:
    return path if path.exists() else None
