"""Ends a run: saves unsaved state, then, as rank 0, marks, reports and closes the run. The exit code shows
how it ended.

All ranks of a world call this together after they have agreed to stop. A worker that leaves the run alone
calls it in a world of its own. An error ends a worker through ``worker.error_reports`` instead; nothing is
saved then.
"""

import logging
import re
import shutil
import sys
import time
from pathlib import Path

from evergrad_common.contract import ExitCode
from evergrad_trainer.base.durable import fsync_directory
from evergrad_trainer.base.records import EventType, StopReason
from evergrad_trainer.run.directory import reported
from evergrad_trainer.training.components import TrainingComponents
from evergrad_trainer.training.loop import save_together
from evergrad_trainer.worker.rank_zero import Writer
from evergrad_trainer.worker.session import Session

_log = logging.getLogger(__name__)
_LEFTOVER = re.compile(r"\.step-\d+\.(new|old)|\.\.step-\d+\.new\.[0-9a-f]+\.tmp")
"""Names that ``_export`` and ``export_checkpoint`` give to an incomplete export of this run."""


def save_all(run: TrainingComponents) -> bool:
    """Save, with all ranks of this world, state that no checkpoint contains yet; return whether all is saved.

    Raises SaveError or FencedError on all ranks together.
    """
    progress = run.progress
    save_together(run)
    if progress.finished_steps == 0:
        # The state before the first step is derived from the manifest, so nothing can be lost.
        progress.saved_step = 0
    return progress.saved_step == progress.finished_steps


def close_run(
    session: Session,
    writer: Writer,
    reason: StopReason,
    *,
    is_saved: bool,
    is_alone: bool = False,
) -> ExitCode:
    """Record on rank 0 how the run ended, and close the observers. Returns the exit code on every rank.

    ``is_alone``: this worker leaves a run that other workers may continue, so no completion mark and no page
    is written.
    """
    code = _choose_code(reason, is_saved=is_saved)
    if not session.world.is_main:
        return code

    if is_alone:
        # This worker may never have been the rank that writes the start event.
        session.release_events()
    step = session.progress.finished_steps
    # Before its first step, a run has no state to save, so no checkpoint exists or is missing.
    session.emit(EventType.STOP, {"reason": reason, "saved": is_saved and step > 0})
    if code == ExitCode.DONE:
        _complete(session, step)
    session.emit(EventType.END, {"exit_code": int(code)})
    # Release before printing and drawing, because the sender of the stop request may kill this process next.
    writer.release()

    if reason == "non_finite":
        print(f"error: {session.progress.refusal}", file=sys.stderr)
    later = f"evergrad report {session.directory.path}"
    if reason == "signal":
        # The state is saved. Figures and text take milliseconds. A page with plots can be created at any
        # time, and the sender of the signal may not wait for it.
        _write_summary(session)
        print(f"stopped after step {step}; for a report: {later}", flush=True)
    else:
        _write_page(session, later)
    if code == ExitCode.STOPPED_SAVED and reason != "non_finite":
        print(f"to go on behind step {step}: the same command", flush=True)
    if not is_saved:
        message = "error: the state of the last steps could not be saved; the newest checkpoint is older"
        print(message, file=sys.stderr)
    return code


def _choose_code(reason: StopReason, *, is_saved: bool) -> ExitCode:
    if reason == "complete":
        return ExitCode.DONE if is_saved else ExitCode.INTERNAL
    return ExitCode.STOPPED_SAVED if is_saved else ExitCode.STOPPED_UNSAVED


def _complete(session: Session, step: int) -> None:
    """Export the final weights if the manifest asks for it, and mark the run as complete."""
    if session.plan.run.training.checkpoint.export_at_end:
        # Export before the run is marked: if it is killed or the disk is full, the next start exports again.
        print(f"exported: {_export(session, step)}", flush=True)
    session.emit(EventType.COMPLETE, {"total_steps": step})
    facts = {"run": session.plan.run.metadata.name, "step": step, "time": time.time()}
    session.directory.mark_complete({**facts, "best": session.progress.best})


def _write_page(session: Session, later: str) -> None:
    """Write the report with its page. A failure is only reported, with the command ``later`` to try again."""
    from evergrad_trainer.report.build import write_report

    try:
        print(f"report: {write_report(session.directory.path).html}", flush=True)
    except Exception as error:  # noqa: BLE001 - the training is done and saved; a report can be made again at any time
        _log.exception("the report could not be written")
        print(
            f"warning: no report was made: {str(error).rstrip('.')}. Try: {later}",
            file=sys.stderr,
        )


def _write_summary(session: Session) -> None:
    """Write the run's figures and text, without the page. A failure is only reported."""
    from evergrad_trainer.report.build import write_report

    try:
        write_report(session.directory.path, has_page=False)
    except Exception as error:  # noqa: BLE001 - the training is saved; a report can be made again at any time
        _log.exception("the summary could not be written")
        print(f"warning: summary.json is not current: {error}", file=sys.stderr)


def _export(session: Session, step: int) -> Path:
    """Write the final weights as a transformers directory, replacing an older export of this step.

    Raises VolumeError, RunDirectoryError or CheckpointError if the export fails.
    """
    from evergrad_trainer.export import export_checkpoint

    target = session.directory.exports / f"step-{step}"
    with reported(target, what="cannot be written"):
        # Remove only folders that a killed process of this run has left: volumes and desktops keep hidden
        # files here, and a user may export into the same folder.
        for rest in session.directory.exports.glob(".*"):
            if _LEFTOVER.fullmatch(rest.name) and rest.is_dir():
                shutil.rmtree(rest)
    fresh, old = (target.with_name(f".{target.name}.{name}") for name in ("new", "old"))
    export_checkpoint(session.directory.path, step=step, output=fresh, dtype=None)
    with reported(target, what="cannot be written"):
        if target.exists():
            target.rename(old)
        fresh.rename(target)
        shutil.rmtree(old, ignore_errors=True)
        fsync_directory(target.parent)
    return target
