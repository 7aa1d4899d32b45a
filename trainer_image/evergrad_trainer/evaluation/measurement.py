"""Measures checkpoints of an opened run on its sets, each once; continues interrupted measurements."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import CheckpointError
from evergrad_trainer.base.records import EvaluationRecord, record_row
from evergrad_trainer.base.volume import retry
from evergrad_trainer.checkpoint.evaluated_marks import (
    find_waiting,
    list_marks,
    write_marks,
)
from evergrad_trainer.checkpoint.leases import hold
from evergrad_trainer.checkpoint.manifest import (
    Candidate,
    InvalidCheckpointError,
    Manifest,
    UnknownFormatError,
)
from evergrad_trainer.checkpoint.restore import load_newest
from evergrad_trainer.checkpoint.search import Search
from evergrad_trainer.checkpoint.store import CheckpointStore
from evergrad_trainer.data.evaluation_sets import EvaluationSet
from evergrad_trainer.evaluation.choice import list_checkpoints
from evergrad_trainer.evaluation.results import (
    ResultPlace,
    place_of,
    read_cut,
    read_result,
    write_cut,
    write_result,
)
from evergrad_trainer.evaluation.setup import OpenedRun
from evergrad_trainer.optim.average import AVERAGE
from evergrad_trainer.run.directory import RunDirectory, reported
from evergrad_trainer.state.registry import from_extra
from evergrad_trainer.training.components import perplexity_of
from evergrad_trainer.training.evaluation import EvaluationResult
from evergrad_trainer.worker.start_state import settle_snapshots

KEPT_SECONDS = 10.0
"""Seconds between two writes of the partial result; a kill loses at most the work of this time."""

OnProgress = Callable[[str, int, int], None]
"""Called with a set's name, its number of finished batches and its total number of batches."""


@contextlib.contextmanager
def held(directory: RunDirectory, candidate: Candidate) -> Iterator[None]:
    """Protect a checkpoint from retention inside the block.

    Raises RunDirectoryError or VolumeError if the checkpoint cannot be held.
    """
    where = directory.checkpoints
    with contextlib.ExitStack() as stack:
        with reported(where, what="the checkpoint cannot be held"):
            stack.enter_context(hold(where, candidate.name))
        yield


def mark_evaluated(
    store: CheckpointStore, directory: RunDirectory, done: Sequence[Candidate]
) -> list[int]:
    """Mark checkpoints as evaluated; returns the steps of checkpoints that still wait, oldest first.

    Raises RunDirectoryError or VolumeError if the marks cannot be written.
    """
    where, there = directory.checkpoints, list_checkpoints(store)
    with reported(where, what="the checkpoint cannot be marked as evaluated"):
        write_marks(where, done, there=there)
        waiting = find_waiting(there, list_marks(where))
    return [one.version.step for one in waiting]


@dataclass(frozen=True)
class Measured:
    """One result. ``is_new``: it was measured now, not read from a file."""

    values: dict[str, Any]
    file: str
    is_new: bool


class CutError(Exception):
    """Raised if a stop interrupts the evaluation; the partial result is kept."""


@dataclass(frozen=True)
class CheckpointEvaluator:
    """Evaluates checkpoints of one opened run on its chosen sets."""

    opened: OpenedRun
    store: CheckpointStore
    is_stopping: Callable[[], bool]
    on_progress: OnProgress
    marks: bool = False
    """Whether a checkpoint is marked as evaluated afterwards, because all sets of the run are measured."""
    measures_again: bool = False
    """Whether each set is measured again from the checkpoint. Stored results are then neither read nor
    written."""

    def find(self, candidate: Candidate) -> list[Measured] | None:
        """Return the stored results of a checkpoint, or None if one is missing or must be measured again."""
        found = [self._find(candidate, one) for one in self.opened.sets]
        return None if None in found else [one for one in found if one is not None]

    def evaluate(self, candidate: Candidate) -> Iterator[Measured]:
        """Yield the result of each set when it is available, measured now or before.

        The checkpoint is held during the measurement. Raises CheckpointError if the checkpoint is damaged,
        removed or of another run, and CutError if a stop interrupts the evaluation.
        """
        if (known := self.find(candidate)) is not None:
            yield from known
        else:
            # Hold the checkpoint before it is read, so that retention does not remove it.
            with held(self.opened.session.directory, candidate):
                self._load(candidate)
                for one in self.opened.sets:
                    # Look it up again, because another evaluator may have measured it in the meantime.
                    yield self._find(candidate, one) or self._measure(candidate, one)
        # Mark it last, so that a checkpoint whose evaluation was interrupted does not count as evaluated.
        if self.marks:
            mark_evaluated(self.store, self.opened.session.directory, [candidate])

    def _find(self, candidate: Candidate, one: EvaluationSet) -> Measured | None:
        if self.measures_again:
            return None
        place = self._place(candidate, one)
        values = read_result(place)
        return None if values is None else Measured(values, str(place.path), is_new=False)

    def _place(self, candidate: Candidate, one: EvaluationSet) -> ResultPlace:
        assert candidate.manifest is not None  # noqa: S101 - only readable ones are evaluated
        return place_of(
            self.opened.session.directory.path,
            checkpoint=candidate.name,
            checksum=candidate.manifest.checksum,
            name=one.name,
            key=self.opened.evaluator.key(one),
        )

    def _load(self, candidate: Candidate) -> None:
        """Validate and load the weights of one held checkpoint; the optimizer's state is not read.

        Raises CheckpointError if the checkpoint is invalid or removed, and VolumeError or RunDirectoryError
        if it cannot be read.
        """
        session, machinery = self.opened.session, self.opened.machinery
        where = self.store.reader.locate(candidate.name)
        gone = Problem(
            where,
            "no longer exists",
            "retention has removed it since it was found",
            "Choose another one, or raise spec.training.checkpoint.keep",
        )
        # The name may now refer to another checkpoint, whose result would be stored as the result of this
        # checkpoint. An error of the volume does not prove that the checkpoint has changed.
        now: Manifest | None = None
        what = "the checkpoint cannot be read"
        with (
            contextlib.suppress(InvalidCheckpointError, UnknownFormatError),
            reported(where, what=what),
        ):
            reader = self.store.reader
            now = retry(
                lambda: reader.read_manifest(candidate.name), where=where, what=what
            )
        found_then = candidate.manifest
        if now is None or found_then is None or now.checksum != found_then.checksum:
            raise CheckpointError(gone)

        # Select all tensors except the optimizer's, by the first part of their names, so that unexpected
        # tensors in the checkpoint still cause an error.
        state = machinery.state()
        prefixes = tuple({f"{name.partition('.')[0]}." for name in state})
        search = Search(
            self.store,
            checksums=True,
            identity=session.identity,
            prefix=prefixes,
            only=candidate.name,
        )
        found = load_newest(search, state, world=session.world)
        if found is None:
            raise CheckpointError(gone)
        machinery.registry.load_values(from_extra(found[0].extra))
        # The frozen weights are in the kept checkpoint of another step.
        settle_snapshots(session, machinery)

    def _measure(self, candidate: Candidate, one: EvaluationSet) -> Measured:
        """Measure the loaded checkpoint on one set and write the result. Raises CutError if it is stopped."""
        session, place = self.opened.session, self._place(candidate, one)
        stage = session.data.train.stage(max(1, session.progress.finished_steps))
        # Continue an interrupted evaluation, so that its finished batches are not computed again.
        cut = {} if self.measures_again else read_cut(place)
        tally = self.opened.evaluator.open_tally(one, cut, stage=stage)
        kept = time.monotonic()

        def note(done: int, total: int) -> None:
            nonlocal kept
            self.on_progress(one.name, done, total)
            # Write the partial result every KEPT_SECONDS; a short set does not need a write.
            is_due = time.monotonic() - kept > KEPT_SECONDS
            if tally.done and is_due and not self.measures_again:
                write_cut(place, tally.to_json())
                kept = time.monotonic()

        result = self.opened.evaluator.run(
            one,
            session.world,
            tally,
            stage=stage,
            is_stopping=self.is_stopping,
            on_progress=note,
        )
        if result is None:
            if not self.measures_again:
                write_cut(place, tally.to_json())
            raise CutError
        values = self._describe(candidate, one, result, tally.seconds)
        if self.measures_again:
            return Measured(values, "", is_new=True)
        values = write_result(place, values)
        return Measured(values, str(place.path), is_new=True)

    def _describe(
        self,
        candidate: Candidate,
        one: EvaluationSet,
        result: EvaluationResult,
        seconds: float,
    ) -> dict[str, Any]:
        """Build the content of a result: a row of ``evaluation.jsonl``, and the hashes of its inputs.

        ``seconds``: time of all attempts.
        """
        manifest = candidate.manifest
        assert manifest is not None  # noqa: S101 - it was loaded
        record = EvaluationRecord(
            step=candidate.version.step,
            generation=candidate.version.generation,
            name=one.name,
            loss=result.loss,
            perplexity=perplexity_of(result.loss),
            tokens=result.weight,
            seconds=seconds,
            time=time.time(),
            metrics=result.metrics,
        )
        session = self.opened.session
        average = {} if self.opened.evaluator.averaging is None else {"weights": AVERAGE}
        return {
            "run": session.plan.run.metadata.name,
            **average,
            **record_row(record),
            "checkpoint": candidate.name,
            "checkpoint_hash": manifest.checksum,
            "samples": one.num_samples,
            "batches": one.num_batches,
            "seconds_per_batch": seconds / max(1, one.num_batches),
            "set_hash": one.fingerprint,
            "task_hash": session.plan.task_hash,
            "device": session.world.device.type,
        }
