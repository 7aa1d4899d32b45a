"""Records the request of a start and the findings of preflight before the training, so that a failed start
leaves both."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import Problem, describe_problem
from evergrad_manifest.identity import to_wire
from evergrad_trainer.base.errors import RunDirectoryError
from evergrad_trainer.run.directory import (
    RunDirectory,
    dumps_strict,
    read_json_object,
    write_atomically,
)
from evergrad_trainer.run.redaction import hide_home, redact_command

FORMAT = 1

_log = logging.getLogger(__name__)


def record_request(
    directory: RunDirectory, run: TrainingRun, *, command: Sequence[str]
) -> None:
    """Write the manifest with all defaults and the command line to ``requested.json``.

    Every node of a run calls this before it joins. The file is replaced only if the manifest differs.
    Raises RunDirectoryError or VolumeError if the file cannot be written.
    """
    manifest = to_wire(run)
    try:
        before = read_json_object(directory.requested)
    except RunDirectoryError:
        # Training never reads this file, so a damaged file does not prevent a start.
        _log.warning("%s: is damaged, and written anew", directory.requested)
        before = None
    if before is not None and before.get("manifest") == manifest:
        return
    document = {
        "format": FORMAT,
        "time": time.time(),
        "command": redact_command(command),
        "working_directory": hide_home(str(Path.cwd())),
        "manifest": manifest,
    }
    write_atomically(directory.requested, dumps_strict(document, indent=2) + "\n")


def record_findings(
    directory: RunDirectory,
    findings: Sequence[tuple[str, Problem]],
    *,
    num_workers: int,
    is_overruled: bool,
) -> None:
    """Write the findings of the newest start to ``preflight.json``.

    ``findings``: pairs of a level (``ok``, ``warning`` or ``error``) and a problem. ``num_workers``: number
    of workers on the examined machine. ``is_overruled``: training continues despite errors. Raises
    RunDirectoryError or VolumeError if the file cannot be written.
    """
    document = {
        "format": FORMAT,
        "time": time.time(),
        "workers": num_workers,
        "overruled": is_overruled,
        **describe_findings(findings),
    }
    write_atomically(directory.preflight, dumps_strict(document, indent=2) + "\n")


def describe_findings(findings: Sequence[tuple[str, Problem]]) -> dict[str, Any]:
    """Return the findings as JSON values; ``fine``: whether none of them is an error."""
    rows = [{"level": level, **describe_problem(problem)} for level, problem in findings]
    return {"fine": all(row["level"] != "error" for row in rows), "findings": rows}
