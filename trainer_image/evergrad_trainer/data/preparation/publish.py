"""Prepares one source of texts: chunks → token files → held-out split → index → one rename.

After an interruption at any point, preparation resumes there.
"""

import functools
import json
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import xxhash

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import HELD_OUT, TEXT_TYPES, HeldOut
from evergrad_trainer.base.durable import fsync_directory, write_json
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.base.lock import exclusive
from evergrad_trainer.data.chat_template import FIRST_RENDERING, RENDERING
from evergrad_trainer.data.marked_text import MARKS
from evergrad_trainer.data.preparation.chunk import (
    WHOLE,
    Attempt,
    ChunkResult,
    Job,
    TokenizeJob,
    finished,
)
from evergrad_trainer.data.preparation.content import Content
from evergrad_trainer.data.preparation.documents import (
    HARMLESS,
    KEPT,
    MOST_PROBLEMS,
    LineCounts,
    LineProblem,
    SkipReason,
)
from evergrad_trainer.data.preparation.files import SourceEntry
from evergrad_trainer.data.preparation.held_out import choose_held_out, split_jobs
from evergrad_trainer.data.preparation.missing_template import template_problem
from evergrad_trainer.data.preparation.pairs import PairFormat
from evergrad_trainer.data.preparation.pool import Pool
from evergrad_trainer.data.preparation.progress import Reporter
from evergrad_trainer.data.preparation.rows import NO_TEMPLATE, RowFormat
from evergrad_trainer.data.preparation.texts import TextFormat, TextReader
from evergrad_trainer.data.prepared import (
    FORMAT,
    INDEX,
    TRAIN,
    Dtype,
    PublishedSource,
    documents_path,
    open_published,
    tokens_path,
)
from evergrad_trainer.data.tokenizers import TextTokenizer

_SAMPLE: Final = 32
"""Maximum number of documents that are prepared twice. 32 are enough to detect random output, and take a few
milliseconds."""
_POLICY: Final = "spec.training.data.malformed"
_IF_TOO_LONG: Final = (
    "Raise sequenceLength, or set spec.training.rows.tooLong to skip or truncate; what is left out or cut is "
    "counted"
)


@dataclass(frozen=True)
class Recipe:
    """The settings that determine the prepared bytes of a source, together with its content."""

    tokenizer: TextTokenizer
    malformed: Literal["refuse", "skip"]
    held_out: HeldOut | None
    seed: int
    rows: RowFormat | PairFormat | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of a stored token: its id or, for rows, its id with a mark."""
        if self.rows is None:
            return self.tokenizer.dtype
        return self.rows.dtype(self.tokenizer)


def compute_fingerprint(source: SourceEntry, content: Content, recipe: Recipe) -> str:
    """Return 32 hex digits that are equal if and only if the prepared bytes are equal.

    The sequence length, the batch size and file names do not affect the fingerprint, so data is not prepared
    again if they change.
    """
    held_out = recipe.held_out
    is_text = source.type in TEXT_TYPES
    # Omit settings that a type of source does not use: changing them would prepare the same bytes again.
    facts: dict[str, Any] = {
        "format": FORMAT,
        "type": source.type,
        "content": content.content_hash,
        "size": content.size,
        "tokenizer": recipe.tokenizer.identity,
        "field": source.text_field if source.type in ("jsonl", "parquet") else None,
        "malformed": recipe.malformed if is_text else None,
        "dtype": None if is_text else source.dtype,
        "heldOut": [held_out.fraction, held_out.count] if held_out else None,
        "seed": recipe.seed if held_out and is_text else None,
    }
    if source.type == "text":
        facts["document"] = source.document
    if recipe.rows is not None:
        facts["rows"] = recipe.rows.to_json()
        facts["marks"] = MARKS
        rows = recipe.rows.rows if isinstance(recipe.rows, PairFormat) else recipe.rows
        # The first versions had no such key. Omit it for these texts, and for rows without a template, which
        # have not changed since.
        rendering = facts["rows"].pop("rendering", RENDERING)
        if rendering > FIRST_RENDERING and rows.template is not None:
            facts["rendering"] = rendering
    text = json.dumps(facts, sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


@dataclass(frozen=True)
class SourcePreparation:
    """The preparation of one source, which will be published as ``root/<fingerprint>``."""

    source: SourceEntry
    content: Content
    recipe: Recipe
    root: Path
    fingerprint: str

    @staticmethod
    def plan(
        source: SourceEntry,
        content: Content,
        recipe: Recipe,
        root: Path,
        *,
        begun_with: Collection[str] = (),
    ) -> "SourcePreparation":
        """Plan the preparation of ``source``.

        ``begun_with``: fingerprints of the data that the run started with. If an earlier version prepared
        this data, the plan uses the rule of that version, because the run has already trained on its tokens.
        """
        fingerprint = compute_fingerprint(source, content, recipe)
        if recipe.rows is not None and fingerprint not in begun_with:
            for rendering in range(RENDERING - 1, FIRST_RENDERING - 1, -1):
                earlier = replace(recipe, rows=recipe.rows.of_rendering(rendering))
                known = compute_fingerprint(source, content, earlier)
                if known in begun_with:
                    return SourcePreparation(source, content, earlier, root, known)
        return SourcePreparation(source, content, recipe, root, fingerprint)

    @property
    def is_of_earlier_version(self) -> bool:
        """Whether it renders texts by the rule of an earlier version."""
        rows = self.recipe.rows
        rows = rows.rows if isinstance(rows, PairFormat) else rows
        return rows is not None and rows.rendering < RENDERING

    @property
    def final(self) -> Path:
        """The directory that is published."""
        return self.root / self.fingerprint

    @property
    def attempt(self) -> Attempt:
        """The directory of the work in progress, which is the same after an interruption.

        Its name also depends on the boundaries of the chunks, because a finished chunk can only be reused by
        a version of Evergrad that divides the content in the same way.
        """
        return Attempt(
            self.root / f".tmp-{self.fingerprint}-{self.content.boundaries_hash}"
        )

    @property
    def dtype(self) -> Dtype:
        """The type of the ids in its token files."""
        return "uint16" if self.recipe.dtype.itemsize == 2 else "uint32"


def publish(
    preparation: SourcePreparation, *, pool: Callable[[], Pool], report: Reporter
) -> PublishedSource:
    """Prepare and publish the source, or open it if another process has published it in the meantime.

    Raises DataError if the source cannot be prepared, OSError if the disk fails, and EvergradError if a
    helper process fails.
    """
    # Use one lock per fingerprint, so that sources of different content are prepared in parallel.
    final = preparation.final
    name = preparation.source.name
    lock = preparation.root / f".lock-{preparation.fingerprint}"
    waiting = functools.partial(report.show, name, "wait")
    with exclusive(lock, is_done=final.exists, on_wait=waiting) as is_alone:
        published = open_published(final)
        if published is None:
            published = _publish_attempt(
                preparation, pool=pool, report=report, is_alone=is_alone
            )
        # Remove the attempt under the lock, because another process may start an attempt of the same name.
        # An attempt of another version, which had other chunks, is of no use anymore either.
        for attempt in preparation.root.glob(f".tmp-{preparation.fingerprint}*"):
            shutil.rmtree(attempt, ignore_errors=True)
    return published


def _publish_attempt(
    preparation: SourcePreparation,
    *,
    pool: Callable[[], Pool],
    report: Reporter,
    is_alone: bool,
) -> PublishedSource:
    """Resume the attempt, and rename it to its final name."""
    attempt, final = preparation.attempt, preparation.final
    if is_alone:
        # Remove partially written files of a killed attempt.
        shutil.rmtree(attempt.partial, ignore_errors=True)
    for directory in (attempt.data, attempt.chunks, attempt.partial):
        directory.mkdir(parents=True, exist_ok=True)
    try:
        _fill(preparation, pool=pool, report=report)
        # The fingerprint describes the scanned content, so the tokenised content must be the same.
        preparation.content.raise_if_changed()
        # Make the file names durable before the rename, and the rename before the data is used.
        fsync_directory(attempt.data)
        attempt.data.rename(final)
        fsync_directory(preparation.root)
    except DataError:
        # Remove the attempt: after a change of content, policy or split, the fingerprint differs, so no
        # process would ever resume this attempt.
        shutil.rmtree(attempt.directory, ignore_errors=True)
        raise
    except OSError:
        # If the file system has no locks, another process may have published the same bytes.
        published = open_published(final)
        if published is None:
            raise
        return published
    published = open_published(final)
    if published is None:
        raise DataError(
            Problem(
                str(final),
                "vanished as soon as it was published",
                "another process removed it",
                "Prepare again",
            )
        )
    return published


def _fill(
    preparation: SourcePreparation, *, pool: Callable[[], Pool], report: Reporter
) -> None:
    """Write all files of the published directory. The index is written last."""
    outcomes, tally = _tokenize(preparation, pool=pool, report=report)
    if preparation.recipe.malformed == "refuse" and tally.malformed:
        raise DataError(*_malformed_lines(preparation, tally))
    if tally.skipped[SkipReason.TOO_LONG]:
        # A row that is too long is not malformed, so `malformed: skip` does not skip it.
        shown = [problem for problem in tally.problems if problem.is_too_long]
        problems = [
            Problem(_place(preparation, one), one.what, one.why, _IF_TOO_LONG)
            for one in shown
        ]
        number = tally.skipped[SkipReason.TOO_LONG]
        if number > len(shown):
            what = f"{number} of {preparation.content.lines} rows are too long"
            why = f"the first {len(shown)} are named above"
            path = str(preparation.source.path)
            problems.append(Problem(path, what, why, _IF_TOO_LONG))
        raise DataError(*problems)

    stream = WHOLE if preparation.recipe.held_out else TRAIN
    documents = sum(outcome.documents.get(stream, 0) for outcome in outcomes)
    if documents == 0:
        raise DataError(_no_documents(preparation, tally))

    check_sample(preparation, outcomes)
    # Split after the last chunk, because the number of held-out documents depends on the total number.
    outcomes = _split(preparation, outcomes, documents, pool=pool, report=report)
    index = _build_index(preparation, outcomes, tally, documents)
    attempt = preparation.attempt
    write_json(attempt.data / INDEX, index, aside=attempt.partial)


def _tokenize(
    preparation: SourcePreparation, *, pool: Callable[[], Pool], report: Reporter
) -> tuple[list[ChunkResult], LineCounts]:
    """Tokenise every chunk. Returns the results, in order, and the total counts of skipped lines.

    Chunks that an earlier attempt finished are reused.
    """
    source, recipe = preparation.source, preparation.recipe
    attempt, chunks = preparation.attempt, preparation.content.chunks
    form, tally = TextFormat.of(source, recipe.rows), LineCounts()
    outcomes: dict[int, ChunkResult] = {}

    def jobs() -> Iterator[TokenizeJob]:
        missing = [chunk for chunk in chunks if chunk.number not in outcomes]
        for run in preparation.content.runs(missing):
            # The pool requests a job when a helper process is free, so this job depends on earlier results:
            # after the first malformed line nothing will be published, and helpers only count errors.
            yield TokenizeJob(
                form,
                attempt.directory,
                run,
                is_whole=recipe.held_out is not None,
                only_check=recipe.malformed == "refuse" and tally.malformed > 0,
            )

    report.show(source.name)
    # Read all records before the first job, because jobs() skips the chunks in ``outcomes``. Reuse only
    # chunks whose files are intact. After a split, the files of the two parts replace the files of the chunk.
    recorded = []
    for chunk in chunks:
        known = finished(attempt, "tokenize", chunk.number)
        if known is None:
            continue
        parts = finished(attempt, "split", chunk.number) if recipe.held_out else None
        if any(one is not None and _is_intact(preparation, one) for one in (parts, known)):
            recorded.append(known)
    for outcome in chain(recorded, _run_lazily(pool, jobs())):
        outcomes[outcome.number] = outcome
        tally.add(outcome.tally)
        chunk = chunks[outcome.number]
        report.advance(
            chunk.size,
            documents=sum(outcome.documents.values()),
            tokens=sum(outcome.tokens.values()),
        )
    return [outcomes[chunk.number] for chunk in chunks], tally


def check_sample(preparation: SourcePreparation, outcomes: list[ChunkResult]) -> None:
    """Prepare the first documents again in this process, and compare their hash with the hash of the files.

    Usually, another process wrote the files. If a tokenizer or template gives other tokens each time, the
    same content would become other data after prepared data is lost. Raises DataError if the hashes differ.
    """
    recipe, attempt = preparation.recipe, preparation.attempt
    stream, directory = WHOLE, attempt.chunks
    if recipe.held_out is None:
        stream, directory = TRAIN, attempt.data
    number = next((one.number for one in outcomes if one.documents.get(stream)), None)
    if number is None:
        return
    path = tokens_path(directory, stream, number)
    if not path.exists():
        # An earlier attempt has already split this chunk and removed its file.
        return

    form = TextFormat.of(preparation.source, recipe.rows)
    chunk = preparation.content.chunks[number]
    with TextReader(form) as reader:
        blocks = reader.read(chunk, LineCounts())
        texts, lines = next((block for block in blocks if block[0]), ([], []))
        del blocks
    texts, lines = texts[:_SAMPLE], lines[:_SAMPLE]
    if recipe.rows is not None:
        tokens, *_ = recipe.rows.encode(recipe.tokenizer, texts, lines, LineCounts())
    else:
        tokens, lengths = recipe.tokenizer.encode_documents(texts)
        # Drop texts without any id except the end id, because they are not documents.
        tokens = tokens[np.repeat(lengths > 1, lengths)]
    ours = np.ascontiguousarray(tokens, dtype=recipe.dtype.newbyteorder("<")).tobytes()
    with path.open("rb") as file:
        theirs = file.read(len(ours))
    hashes = [xxhash.xxh3_64_hexdigest(data) for data in (theirs, ours)]
    if hashes[0] != hashes[1]:
        what = "becomes different tokens each time it is prepared"
        why = (
            f"the first {len(texts)} documents have the hash {hashes[0]} in one process and {hashes[1]} in "
            "another; the tokenizer or the chat template is not a function of the text alone"
        )
        remedy = "Remove what is random from the tokenizer's files or from the template"
        raise DataError(Problem(str(preparation.source.path), what, why, remedy))


def _run_lazily(pool: Callable[[], Pool], jobs: Iterator[Job]) -> Iterator[ChunkResult]:
    """Run the jobs, and yield their results. If there are no jobs, no helper process is started."""
    first = next(jobs, None)
    if first is not None:
        yield from pool().run(chain([first], jobs))


def _is_intact(preparation: SourcePreparation, outcome: ChunkResult) -> bool:
    """Whether the files of a result have the expected sizes. A crash may keep a record but lose a file."""
    attempt, number = preparation.attempt, outcome.number
    width = preparation.recipe.dtype.itemsize
    for stream in outcome.tokens:
        directory = attempt.chunks if stream == WHOLE else attempt.data
        wanted = {
            tokens_path(directory, stream, number): outcome.tokens[stream] * width,
            documents_path(directory, stream, number): outcome.documents[stream] * 16,
        }
        try:
            sizes = {path: path.stat().st_size for path in wanted}
        except FileNotFoundError:
            return False
        if sizes != wanted:
            return False
    return True


def _split(
    preparation: SourcePreparation,
    outcomes: list[ChunkResult],
    documents: int,
    *,
    pool: Callable[[], Pool],
    report: Reporter,
) -> list[ChunkResult]:
    """Split every chunk into its training documents and its held-out documents."""
    attempt, recipe = preparation.attempt, preparation.recipe
    if recipe.held_out is None:
        return outcomes
    chosen = choose_held_out(
        preparation.source,
        preparation.content,
        held_out=recipe.held_out,
        seed=recipe.seed,
        documents=documents,
    )

    # Splits of an interrupted attempt stay valid, because the choice depends only on content and seed.
    recorded = (finished(attempt, "split", outcome.number) for outcome in outcomes)
    split = {
        outcome.number: outcome
        for outcome in recorded
        if outcome is not None and _is_intact(preparation, outcome)
    }
    jobs = split_jobs(
        attempt, outcomes, chosen, dtype=preparation.dtype, is_done=split.__contains__
    )
    for outcome in _run_lazily(pool, jobs):
        split[outcome.number] = outcome
        report.show(preparation.source.name, "split")
    return [split[outcome.number] for outcome in outcomes]


def _build_index(
    preparation: SourcePreparation,
    outcomes: list[ChunkResult],
    tally: LineCounts,
    documents: int,
) -> dict[str, Any]:
    """Build the index. It depends only on the content, so two preparations write the same bytes."""
    # Omit the shard if a chunk has no tokens in a stream, because its file is empty.
    streams = {}
    for stream in (TRAIN, HELD_OUT) if preparation.recipe.held_out else (TRAIN,):
        shards = [
            [outcome.number, outcome.tokens[stream]]
            for outcome in outcomes
            if outcome.tokens[stream]
        ]
        num_documents = sum(outcome.documents[stream] for outcome in outcomes)
        streams[stream] = {"documents": num_documents, "shards": shards}
    tokenizer = preparation.recipe.tokenizer
    return {
        "format": FORMAT,
        "fingerprint": preparation.fingerprint,
        "content": preparation.content.content_hash,
        "size": preparation.content.size,
        "lines": preparation.content.lines,
        "dtype": preparation.dtype,
        "tokenizer": {
            "identity": tokenizer.identity,
            "vocabSize": tokenizer.vocab_size,
            "endOfDocument": tokenizer.end_of_document,
        },
        "documents": documents,
        "skipped": dict(tally.skipped),
        "repaired": tally.repaired,
        "streams": streams,
    }


def _malformed_lines(preparation: SourcePreparation, tally: LineCounts) -> list[Problem]:
    """Return one problem for each of the first malformed lines, rows or files, and one with their number."""
    source, unit = preparation.source, preparation.source.unit
    # A missing template affects every conversation and cannot be corrected in a line, so report it only one
    # time and without a count.
    lacking = [one for one in tally.problems if one.why == NO_TEMPLATE]
    problems = [template_problem(_place(preparation, one)) for one in lacking[:1]]
    for problem in tally.problems[:MOST_PROBLEMS]:
        if problem in lacking:
            continue
        why = problem.why
        remedy = f"Correct the {unit}, or set {_POLICY} to skip"
        if problem.is_too_long:
            remedy = _IF_TOO_LONG
        if problem.is_torn:
            why += "; the file ends within this line, so it may be truncated"
            remedy = f"Copy the file again, or set {_POLICY} to skip"
        where = _place(preparation, problem)
        problems.append(Problem(where, problem.what, why, remedy))
    # List the first problems and count the rest.
    if tally.malformed > len(problems) and not lacking:
        what = f"{tally.malformed} of {preparation.content.lines} {unit}s are malformed"
        why = f"the first {len(problems)} are named above"
        remedy = f"Correct them, or set {_POLICY} to skip"
        problems.append(Problem(str(source.path), what, why, remedy))
    return problems


def _place(preparation: SourcePreparation, problem: LineProblem) -> str:
    """Return the file of a problem, with the line or row number."""
    path, line = preparation.content.place(problem.line)
    if preparation.source.unit == "file":
        return str(path)
    return f"{path}:{line}" if preparation.source.unit == "line" else f"{path}, row {line}"


def _no_documents(preparation: SourcePreparation, tally: LineCounts) -> Problem:
    # Include the first malformed line, which usually shows the cause: a wrong field name or another format.
    source, unit = preparation.source, preparation.source.unit
    if tally.problems and tally.problems[0].why == NO_TEMPLATE:
        return template_problem(_place(preparation, tally.problems[0]))
    too_long = tally.skipped[SkipReason.LEFT_OUT]
    harmless = sum(tally.skipped[reason] for reason in HARMLESS - KEPT) - too_long
    what = f"contains no document in {preparation.content.lines} {unit}s"
    why = f"{harmless} are blank or have an empty text, {tally.malformed} are malformed"
    if tally.problems:
        first = tally.problems[0]
        place = f"line {first.line}"
        if unit != "line" or len(preparation.content.files) > 1:
            place = _place(preparation, first)
        why += f", the first in {place}: {first.what}"
    if too_long:
        why += f", {too_long} are too long"
    remedy = "Check how it was made"
    if preparation.recipe.rows is not None:
        remedy = "Check the names of its fields in spec.training.rows, and spec.training.data.sequenceLength"
    elif source.type != "text":
        remedy = f"Check {source.field}.textField ({source.text_field!r}) and how the file was made"
    return Problem(str(source.path), what, why, remedy)
