"""Measures checkpoints of an opened run on its sets: each once, and from where an earlier try was cut."""

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
"""How often what was measured is written down: at most so much is lost to a kill."""

OnProgress = Callable[[str, int, int], None]
"""Called with a set's name, its batches so far and all of them."""


@contextlib.contextmanager
def held(directory: RunDirectory, candidate: Candidate) -> Iterator[None]:
    """Hold a checkpoint of a run against retention. Raises RunDirectoryError or VolumeError."""
    where = directory.checkpoints
    with contextlib.ExitStack() as stack:
        with reported(where, what="the checkpoint cannot be held"):
            stack.enter_context(hold(where, candidate.name))
        yield


def mark_evaluated(
    store: CheckpointStore, directory: RunDirectory, done: Sequence[Candidate]
) -> list[int]:
    """Note that checkpoints wait for no evaluation any more; steps of those that still do, the oldest first.

    Raises RunDirectoryError or VolumeError.
    """
    where, there = directory.checkpoints, list_checkpoints(store)
    with reported(where, what="the checkpoint cannot be marked as evaluated"):
        write_marks(where, done, there=there)
        waiting = find_waiting(there, list_marks(where))
    return [one.version.step for one in waiting]


@dataclass(frozen=True)
class Measured:
    """One result. ``is_new``: it was measured now, and not found."""

    values: dict[str, Any]
    file: str
    is_new: bool


class CutError(Exception):
    """A stop has cut the evaluation; what was measured is kept."""


@dataclass(frozen=True)
class CheckpointEvaluator:
    """Evaluates checkpoints of one opened run on its chosen sets."""

    opened: OpenedRun
    store: CheckpointStore
    is_stopping: Callable[[], bool]
    on_progress: OnProgress
    marks: bool = False
    """Whether a checkpoint counts as evaluated afterwards: all sets are measured, as the run would."""
    measures_again: bool = False
    """Whether stored results are left alone, neither read nor written: each set is measured from the
    checkpoint's own bytes."""

    def find(self, candidate: Candidate) -> list[Measured] | None:
        """The results of a checkpoint, or None where one is missing or is to be measured again."""
        found = [self._find(candidate, one) for one in self.opened.sets]
        return None if None in found else [one for one in found if one is not None]

    def evaluate(self, candidate: Candidate) -> Iterator[Measured]:
        """Yield the result of each set as it is there, measured now or before.

        The checkpoint is held meanwhile. Raises CheckpointError where it is damaged, gone, or of another run,
        and CutError.
        """
        if (known := self.find(candidate)) is not None:
            yield from known
        else:
            # Held from before it is read: retention must not remove it meanwhile.
            with held(self.opened.session.directory, candidate):
                self._load(candidate)
                for one in self.opened.sets:
                    # Looked up once more: another evaluation may have measured it since.
                    yield self._find(candidate, one) or self._measure(candidate, one)
        # Last, so that one that was cut counts as not evaluated.
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
        """Load the weights of one held checkpoint, validated; its optimizer is not read.

        Raises CheckpointError, VolumeError or RunDirectoryError.
        """
        session, machinery = self.opened.session, self.opened.machinery
        where = self.store.reader.locate(candidate.name)
        gone = Problem(
            where,
            "is not there any more",
            "retention has removed it since it was found",
            "Choose another one, or raise spec.training.checkpoint.keep",
        )
        # Its name may be that of another one by now, whose result would lie under this one's. Trouble of the
        # volume says nothing of that.
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

        # All but the optimizer's. By the first part of their names, so that what the checkpoint holds beyond
        # them is still an error.
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
        # The frozen weights that it was trained beside are in the checkpoint of another step, which is kept.
        settle_snapshots(session, machinery)

    def _measure(self, candidate: Candidate, one: EvaluationSet) -> Measured:
        """Measure the loaded checkpoint on one set, and write the result. Raises CutError."""
        session, place = self.opened.session, self._place(candidate, one)
        stage = session.data.train.stage(max(1, session.progress.finished_steps))
        # From where an earlier evaluation was cut: its batches are not computed again.
        cut = {} if self.measures_again else read_cut(place)
        tally = self.opened.evaluator.open_tally(one, cut, stage=stage)
        kept = time.monotonic()

        def note(done: int, total: int) -> None:
            nonlocal kept
            self.on_progress(one.name, done, total)
            # Now and then: a kill costs at most this much work, and a short set no write.
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
        """The content of a result: a row of ``evaluation.jsonl``, and what it was measured on and with.

        ``seconds``: of all tries.
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
