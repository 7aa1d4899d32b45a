"""Reports an error that ends a worker: to the events, the log, stderr and the supervisor."""

import logging
import sys
import traceback
from collections.abc import Callable

from evergrad_common.contract import ErrorKind, ExitCode
from evergrad_manifest.errors import EvergradError, InputError
from evergrad_trainer.base.errors import is_agreed
from evergrad_trainer.base.host_errors import describe_host_trouble, trouble_of
from evergrad_trainer.base.records import EventType
from evergrad_trainer.base.redact_sequences import hide_bases
from evergrad_trainer.distributed.process_groups import read_launch
from evergrad_trainer.worker.channel import Failed, fit_text
from evergrad_trainer.worker.peer_failures import FAILURE_WORDS, is_peer_error
from evergrad_trainer.worker.session import Session

_log = logging.getLogger(__name__)


def report_failure(session: Session | None, error: Exception, *, rank: int) -> ExitCode:
    """Report an error once, in the events, the log and on stderr. Wrong input is reported without a
    traceback."""
    code = error.exit_code if isinstance(error, EvergradError) else ExitCode.INTERNAL
    # Write the traceback only to the log file: a shorter text is printed below.
    _log.info(
        "failed with %s: %s",
        type(error).__name__,
        error,
        exc_info=None if isinstance(error, InputError) else error,
    )
    if session is not None:
        name = type(error).__name__
        # Notes name the module or the samples, which a library's own message lacks.
        message = hide_bases("\n".join((str(error), *getattr(error, "__notes__", ()))))[
            :4000
        ]
        facts = {"error": name, "message": message, "exit_code": int(code)}
        last_calls: tuple[Callable[[], None], ...] = (
            session.release_events,
            lambda: session.emit(EventType.FAILED, facts),
            lambda: session.emit(EventType.END, {"exit_code": int(code)}),
            session.observers.close,
            # On rank 0, the call above also closed these observers, and a second call does nothing.
            session.opened.observers.close,
        )
        for call in last_calls:
            try:
                call()
            except Exception:  # noqa: BLE001 - the first error is the one that counts
                _log.exception("while closing after an error")
    # All ranks raised the error, so only rank 0 prints it.
    if is_agreed(error) and rank != 0:
        return code
    where = f"rank {rank}: " if rank else ""
    if isinstance(error, InputError):
        for problem in error.problems:
            print(hide_bases(f"error: {where}{problem}"), file=sys.stderr)
    elif isinstance(error, EvergradError):
        print(hide_bases(f"error: {where}{error}"), file=sys.stderr)
    elif is_peer_error(error, world_size=read_launch().world_size):
        # This error is a consequence; another rank reports its cause.
        print(f"error: rank {rank}: {FAILURE_WORDS}", file=sys.stderr)
    else:
        said = f"error: rank {rank}: {type(error).__name__}: {error}\n"
        said += "".join(traceback.format_exception(error))
        print(hide_bases(said), end="", file=sys.stderr)
    return code


def build_last_words(
    session: Session | None,
    error: Exception,
    code: ExitCode,
    *,
    generation: int,
    is_agreed: bool,
) -> Failed:
    """Build the record of the error that ends a worker, for its node.

    ``is_agreed``: all ranks raised the error together, in the same process that continues.
    """
    notes = "\n".join(getattr(error, "__notes__", ()))
    kind = error.kind if isinstance(error, EvergradError) else ErrorKind.INTERNAL
    if describe_host_trouble(error) is not None:
        kind = ErrorKind.ENVIRONMENT
    elif kind is ErrorKind.INTERNAL and is_peer_error(
        error, world_size=read_launch().world_size
    ):
        kind = ErrorKind.PEER
    return Failed(
        generation,
        step=session.progress.finished_steps if session is not None else -1,
        exit_code=int(code),
        error=type(error).__name__,
        text=fit_text(hide_bases(f"{error}\n{notes}".strip())),
        is_final=isinstance(error, InputError),
        is_agreed=is_agreed,
        kind=kind,
        trouble=trouble_of(error) if kind is ErrorKind.ENVIRONMENT else "",
    )
