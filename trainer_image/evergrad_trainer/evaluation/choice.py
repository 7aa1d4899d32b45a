"""Chooses the checkpoint and the evaluation sets that the user has named, with errors for the user."""

import functools
from collections.abc import Collection, Sequence

from evergrad_manifest.errors import ConfigurationError, Problem, raise_if
from evergrad_manifest.model.spelling import nearest
from evergrad_trainer.base.errors import CheckpointError
from evergrad_trainer.base.volume import retry
from evergrad_trainer.checkpoint.layout import BEST
from evergrad_trainer.checkpoint.manifest import (
    Candidate,
    InvalidCheckpointError,
    UnknownFormatError,
)
from evergrad_trainer.checkpoint.retention import choose_best
from evergrad_trainer.checkpoint.store import CheckpointStore
from evergrad_trainer.data.evaluation_sets import EvaluationSet
from evergrad_trainer.run.directory import reported

_MOST_NAMED = 10
"""Maximum number of steps that a message lists."""


def list_checkpoints(store: CheckpointStore) -> list[Candidate]:
    """List all checkpoints, newest first, also unreadable ones. Retries for a while if the volume fails.

    Raises VolumeError or RunDirectoryError if they cannot be listed.
    """
    where, what = store.reader.locate(""), "the checkpoints cannot be listed"
    with reported(where, what=what):
        return retry(store.catalog.scan, where=where, what=what)


def choose_checkpoint(store: CheckpointStore, asked: str) -> Candidate:
    """Return the checkpoint that ``asked`` names: ``last``, ``best``, or a step such as ``1200``.

    If several checkpoints match, the newest checkpoint whose files have the expected sizes is chosen. Raises
    CheckpointError if no checkpoint matches, ConfigurationError if ``asked`` is not a step, and VolumeError
    or RunDirectoryError if the volume fails.
    """
    where = store.reader.locate("").rstrip("/")
    if asked not in ("last", "best") and not asked.isdecimal():
        why = "a checkpoint is named by its step, or as best or last"
        raise ConfigurationError(
            Problem(
                "--checkpoint", f"{asked!r} is not a step", why, "Use a step, best or last"
            )
        )
    found = list_checkpoints(store)
    if not found:
        remedy = "Wait for the run's first save, or let --watch wait for it"
        raise CheckpointError(
            Problem(
                where, "contains no checkpoint", "the run has not saved one yet", remedy
            )
        )
    wanted = _find_wanted(store, found, asked)

    # Choose the first checkpoint whose files are complete.
    problems = []
    for candidate in wanted:
        place, what = store.reader.locate(candidate.name), "the checkpoint cannot be read"
        validate = functools.partial(store.reader.validate, candidate.name, checksums=False)
        try:
            # Retry for a while, because a short failure of the volume must not select an older checkpoint.
            with reported(place, what=what):
                manifest = retry(validate, where=place, what=what)
        except (InvalidCheckpointError, UnknownFormatError) as error:
            remedy = "Look at it with `evergrad checkpoint verify`, or choose another one"
            problems.append(Problem(place, "cannot be loaded", str(error), remedy))
        else:
            # Use the manifest just read: the list may lack it if the volume failed at that time.
            return Candidate(candidate.name, manifest.version, manifest)
    raise CheckpointError(*problems)


def _find_wanted(
    store: CheckpointStore, found: list[Candidate], asked: str
) -> list[Candidate]:
    """Return the checkpoints that ``asked`` names. Raises CheckpointError if there is none."""
    where = store.reader.locate("").rstrip("/")
    steps = sorted({candidate.version.step for candidate in found})
    listed = ", ".join(map(str, steps[-_MOST_NAMED:]))
    if asked == "last":
        return found
    if asked == "best":
        best = choose_best(found, store.catalog.read_pointer(BEST))
        wanted = [candidate for candidate in found if candidate.name == best]
        if not wanted:
            why = "spec.training.checkpoint.best is not set, or nothing was evaluated yet"
            remedy = f"Name a step; there are {listed}"
            raise CheckpointError(Problem(where, "no checkpoint is the best", why, remedy))
        return wanted
    wanted = [candidate for candidate in found if candidate.version.step == int(asked)]
    if not wanted:
        why = "the run has not saved it, or retention has removed it"
        remedy = f"Choose one of the existing ones: {listed}"
        raise CheckpointError(
            Problem(where, f"contains no checkpoint of step {asked}", why, remedy)
        )
    return wanted


def choose_sets(
    sets: Sequence[EvaluationSet], asked: Collection[str]
) -> tuple[EvaluationSet, ...]:
    """Return the sets named in ``asked``, in the run's order; if ``asked`` is empty, all sets.

    Raises ConfigurationError if a name is unknown or if the run has no sets.
    """
    names = [one.name for one in sets]
    if not names:
        why = "its file has neither data.heldOut nor evaluation.sources"
        remedy = "Add a set to the run's file and start it again; its checkpoints stay as they are"
        raise ConfigurationError(
            Problem(
                "spec.training.evaluation", "the run has no evaluation set", why, remedy
            )
        )
    problems = []
    for name in asked:
        if name not in names:
            near = nearest(name, names)
            why = f"did you mean {near}?" if near else "the run's file has no such set"
            problems.append(
                Problem(
                    "--set",
                    f"{name!r} is not an evaluation set",
                    why,
                    f"Known: {', '.join(names)}",
                )
            )
    raise_if(problems, ConfigurationError)
    return tuple(one for one in sets if not asked or one.name in asked)
