"""Shows the status of a run on this machine, read from its run directory."""

import json
import time
from pathlib import Path
from typing import Any, Final

from evergrad_cli.cluster.client.errors import ClusterInputError
from evergrad_cli.local.run_files import RunFiles
from evergrad_common.contract import ExitCode, RunFile
from evergrad_common.text import count, duration, short_count
from evergrad_manifest.errors import Problem

_NEXT: Final = {
    "Running": "`evergrad open {directory}` shows its curves; `touch {directory}/stop` saves and stops it",
    "Stopped": "The command that started it resumes it",
    "Failed": "Read the logs in {directory}/logs and fix the cause; then start it with the same command",
    "Complete": "`evergrad report {directory}` writes its report; `evergrad checkpoint export` its model",
    "Waiting": "Start it with `evergrad run`",
}
"""Next action for the user, by phase."""


def require_events(directory: Path) -> None:
    """Raise ClusterInputError if no process of a run has written into this directory."""
    if not (directory / RunFile.EVENTS).exists():
        raise ClusterInputError(
            Problem(
                str(directory),
                "is not a run directory, or no process of the run has written anything yet",
                f"it has no {RunFile.EVENTS}",
                "Name the directory of a run, such as runs/docs-lm",
            )
        )


def show_local_status(directory: Path, *, as_json: bool) -> int:
    """Print the status of the run in ``directory`` and return 0. Raises ClusterInputError."""
    require_events(directory)
    status = RunFiles(directory).look(time.time())
    if as_json:
        print(json.dumps(status, indent=2))
    else:
        print("\n".join(render_local_status(status, directory)))
    return int(ExitCode.DONE)


def render_local_status(status: dict[str, Any], directory: Path) -> list[str]:
    """Return the lines of the status that ``RunFiles.look`` returned. Unknown facts have no line."""
    step, total, saved = (status[key] for key in ("step", "totalSteps", "checkpointStep"))
    progress = ""
    if step is not None:
        share = f" ({100 * step // total} %)" if total else ""
        progress = (
            f"step {count(step)}/{count(total)}{share}" if total else f"step {count(step)}"
        )
    speed = [
        f"loss {status['loss']:.4f}" if isinstance(status["loss"], float) else "",
        f"{short_count(status['tokensPerSecond'])} tokens/s"
        if status["tokensPerSecond"]
        else "",
        f"ETA {duration(status['etaSeconds'])}" if status["etaSeconds"] else "",
    ]
    restarts = status["restarts"]
    causes = ", ".join(f"{number} {cause}" for cause, number in sorted(restarts.items()))
    facts = [
        ("Name", status["run"]),
        ("Directory", str(directory)),
        ("Phase", status["phase"]),
        ("Message", status["message"]),
        ("Progress", progress),
        ("", "  ".join(part for part in speed if part)),
        ("Processes", str(status["worldSize"] or "")),
        ("Checkpoint", "none yet" if saved is None else f"step {count(saved)}"),
        ("Restarts", f"{sum(restarts.values())} ({causes})" if restarts else "0"),
    ]
    lines = [f"{f'{label}:' if label else '':<12}{text}" for label, text in facts if text]
    following = _NEXT.get(status["phase"], "")
    return (
        [*lines, "", "Next:", f"  {following.format(directory=directory)}"]
        if following
        else lines
    )
