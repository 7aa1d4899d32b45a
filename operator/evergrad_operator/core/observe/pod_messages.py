"""Formats texts of pods for messages: quotes and shortens them, and adds remedies. Pure."""

from typing import Final

from evergrad_common.causes import PodCause
from evergrad_operator.core.objects.raw import keep_end
from evergrad_operator.core.observe.memory import LastFailure
from evergrad_operator.core.observe.spec import ParsedRun

MAX_CAUSE: Final = 640
"""Maximum length of a quoted root cause in a message, in bytes."""


def quote(text: str, longest: int = MAX_CAUSE) -> str:
    """Return the end of a text on one line, because the end usually contains the cause.

    For example, "a\\nb" becomes "a | b".
    """
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    joined = " | ".join(lines)
    kept = keep_end(joined, longest)
    return kept if len(kept) >= len(joined) else f"…{kept}"


def describe_end(failure: LastFailure, *, where: str = "") -> str:
    """Return a failure as one line. ``where``: the node or pod; empty to leave it out."""
    text = f"{failure.cause} on {where}" if where else failure.cause
    if failure.rank is not None:
        text += f", rank {failure.rank}"
    if failure.exit_code is not None:
        text += f", exit code {failure.exit_code}"
    # Explain the number, which does not show that the process was killed from outside.
    if failure.exit_code in (137, -9) and failure.cause == PodCause.WORKER_CRASH:
        text += " (killed by SIGKILL)"
    said = quote(failure.message)
    return f"{text}: {said}" if said else text


def describe_disk_remedy(resources: str, *, then: str) -> str:
    """Return the remedy for a pod that wrote too much to its host's disk. ``resources``: path of the
    field."""
    return (
        f"Set or raise {resources}.limits.ephemeral-storage, or the sizeLimit of the emptyDir that is named, "
        f"or write to the run's volume; then {then}"
    )


def describe_volume_remedy(
    run: ParsedRun, checkpoint_step: int | None, *, is_over: bool
) -> str:
    """Return the newest valid checkpoint of a run whose volume is full, the remedy, and how to resume.

    ``is_over``: the run has failed, so that a person must start it again.
    """
    newest = (
        "There is no checkpoint yet."
        if checkpoint_step is None
        else f"The newest valid checkpoint is of step {checkpoint_step}."
    )
    fix = (
        f"Enlarge the PersistentVolumeClaim {run.claim_name} (spec.resources.requests.storage), or delete "
        "what is not needed there"
    )
    if not is_over:
        return f"{newest} {fix}; the run then saves again by itself."
    command = f"evergrad restart {run.name} -n {run.namespace}"
    return f"{newest} {fix}; then resume with: {command} (or set spec.restartNonce to a new text)."


def stop(text: str) -> str:
    """Return the text with a full stop added if it does not end with ".", "!" or "?"."""
    return text if text.endswith((".", "!", "?")) else f"{text}."
