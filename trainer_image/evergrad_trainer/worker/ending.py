"""The end of a run as its ranks have agreed on it: marks, report, last event, exit code."""

import logging
import sys
import time

from evergrad_coordinator.contract import ExitCode
from evergrad_trainer.records import EventType, StopReason
from evergrad_trainer.worker.session import Session

_log = logging.getLogger(__name__)


def finish(session: Session, reason: StopReason, *, is_saved: bool) -> ExitCode:
    """Mark a complete run, write the report, close the observers."""
    code = ExitCode.DONE if reason == "complete" else ExitCode.STOPPED_SAVED
    if not is_saved:
        code = ExitCode.INTERNAL if reason == "complete" else ExitCode.STOPPED_UNSAVED
    if not session.world.is_main:
        return code
    if code == ExitCode.DONE:
        step = session.progress.finished_steps
        session.emit(EventType.COMPLETE, {"total_steps": step})
        session.directory.mark_complete(
            {
                "run": session.plan.run.metadata.name,
                "step": step,
                "time": time.time(),
                "best": session.progress.best,
            }
        )
    session.emit(EventType.END, {"exit_code": int(code)})
    session.observers.close()
    if reason == "non_finite":
        print(f"error: {session.progress.refusal}", file=sys.stderr)
    if reason == "signal":
        # Whoever asked to stop may kill next: the state is saved, and a report can be made at any time.
        print(f"stopped; for a report: evergrad report {session.directory.path}", flush=True)
    else:
        _write_report(session)
    if not is_saved:
        print(
            "error: the state of the last steps could not be saved; the newest checkpoint is older",
            file=sys.stderr,
        )
    return code


def _write_report(session: Session) -> None:
    from evergrad_trainer.report.build import write_report

    try:
        paths = write_report(session.directory.path)
        print(f"report: {paths.html}", flush=True)
    except Exception as error:  # noqa: BLE001 - the training is done and saved; a report can be made again at any time
        _log.exception("the report could not be written")
        print(
            f"warning: the report could not be written: {error}. Try: evergrad report {session.directory.path}",
            file=sys.stderr,
        )
