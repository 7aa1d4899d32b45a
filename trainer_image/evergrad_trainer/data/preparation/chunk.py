"""The jobs on chunks: texts → token file, and token file → training and held-out parts.

A job can run in any process.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from evergrad_manifest.training import HELD_OUT
from evergrad_trainer.base.durable import unique_suffix, write_json
from evergrad_trainer.data.preparation.content import Chunk
from evergrad_trainer.data.preparation.documents import LineCounts, SkipReason
from evergrad_trainer.data.preparation.texts import TextFormat, TextReader
from evergrad_trainer.data.prepared import TRAIN, documents_path, tokens_path
from evergrad_trainer.data.tokenizers import TextTokenizer

WHOLE: Final = "whole"
"""Name of the stream of a chunk that still contains its held-out documents."""

_SPLIT_TOKENS: Final = 4 * 2**20
"""Approximate number of tokens in memory while a chunk is split."""


@dataclass(frozen=True)
class Attempt:
    """The directory of an unfinished preparation.

    One rename turns its subdirectory ``data`` into the published directory.
    """

    directory: Path

    @property
    def data(self) -> Path:
        """Finished files with their final names."""
        return self.directory / "data"

    @property
    def chunks(self) -> Path:
        """Records of finished jobs, and whole chunks that must still be split."""
        return self.directory / "chunks"

    @property
    def partial(self) -> Path:
        """Files that are still being written."""
        return self.directory / "partial"

    def record(self, kind: str, number: int) -> Path:
        """Return the path of the record of a finished job."""
        return self.chunks / f"{kind}-{number:05d}.json"


@dataclass(frozen=True)
class TokenizeJob:
    """A job that tokenises chunks of a source in order.

    ``is_whole``: held-out documents will be split off later. ``only_check``: only count malformed lines.
    """

    form: TextFormat
    attempt: Path
    chunks: tuple[Chunk, ...]
    is_whole: bool
    only_check: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return {
            "kind": "tokenize",
            "form": self.form.to_json(),
            "attempt": str(self.attempt),
            "chunks": [chunk.to_json() for chunk in self.chunks],
            "is_whole": self.is_whole,
            "only_check": self.only_check,
        }


@dataclass(frozen=True)
class SplitJob:
    """A job that splits a whole chunk. ``held_out``: positions of the held-out documents in the chunk."""

    attempt: Path
    number: int
    held_out: tuple[int, ...]
    dtype: str

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return {"kind": "split", **asdict(self), "attempt": str(self.attempt)}


Job = TokenizeJob | SplitJob


def job_from_json(value: dict[str, Any]) -> Job:
    """Build a job from its JSON values. The inverse of both ``to_json`` methods."""
    # JSON has texts and lists in place of paths and tuples.
    fields = {key: item for key, item in value.items() if key != "kind"}
    fields["attempt"] = Path(value["attempt"])
    if value["kind"] == "split":
        fields["held_out"] = tuple(value["held_out"])
        return SplitJob(**fields)
    fields["form"] = TextFormat.from_json(value["form"])
    fields["chunks"] = tuple(map(Chunk.from_json, value["chunks"]))
    return TokenizeJob(**fields)


@dataclass(frozen=True)
class ChunkResult:
    """The result of a job: numbers of tokens and documents by stream, and counts of skipped lines."""

    number: int
    tokens: dict[str, int]
    documents: dict[str, int]
    tally: LineCounts

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "number": self.number,
            "tokens": self.tokens,
            "documents": self.documents,
            "tally": self.tally.to_json(),
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> "ChunkResult":
        """The inverse of ``to_json``."""
        return ChunkResult(
            value["number"],
            value["tokens"],
            value["documents"],
            LineCounts.from_json(value["tally"]),
        )


def execute(job: Job, tokenizer: TextTokenizer) -> Iterator[ChunkResult]:
    """Run a job, and yield a result for each of its chunks after its record is written.

    Raises DataError if the source has changed or cannot be read, and OSError if the disk fails.
    """
    if isinstance(job, SplitJob):
        try:
            outcome = _split(job)
        except FileNotFoundError:
            # Another helper, which outlived its killed parent, may have finished the same job.
            known = finished(Attempt(job.attempt), "split", job.number)
            if known is None:
                raise
            outcome = known
        yield outcome
        return
    with TextReader(job.form) as reader:
        for chunk in job.chunks:
            if not job.only_check:
                yield _tokenize(job, chunk, reader, tokenizer)
                continue
            tally = LineCounts()
            for texts, lines in reader.read(chunk, tally):
                # Encode rows too, because some problems are detected only in the tokens.
                if job.form.rows is not None:
                    job.form.rows.encode(tokenizer, texts, lines, tally)
            yield ChunkResult(chunk.number, {}, {}, tally)


def finished(attempt: Attempt, kind: str, number: int) -> ChunkResult | None:
    """Return the result of a finished job, or None if it has no valid record.

    A record that a power failure truncated is not valid.
    """
    try:
        text = attempt.record(kind, number).read_text(encoding="utf-8")
        return ChunkResult.from_json(json.loads(text))
    except (FileNotFoundError, ValueError):
        return None


def _tokenize(
    job: TokenizeJob, chunk: Chunk, reader: TextReader, tokenizer: TextTokenizer
) -> ChunkResult:
    attempt = Attempt(job.attempt)
    number = chunk.number
    stream, directory = (WHOLE, attempt.chunks) if job.is_whole else (TRAIN, attempt.data)
    tally = LineCounts()
    with _written(attempt, directory, stream, number) as files:
        # Read block by block, so that memory does not depend on the size of the chunk.
        for texts, lines in reader.read(chunk, tally):
            if job.form.rows is not None:
                files.add(*job.form.rows.encode(tokenizer, texts, lines, tally))
                continue
            tokens, lengths = tokenizer.encode_documents(texts)
            numbers = np.array(lines, dtype=np.int64)
            is_document = lengths > 1
            if not is_document.all():
                # A tokenizer may drop a whole text. The end id alone is not a document.
                tokens = tokens[np.repeat(is_document, lengths)]
                tally.skipped[SkipReason.EMPTY_TEXT] += int(np.count_nonzero(~is_document))
            files.add(tokens, lengths[is_document], numbers[is_document])
    # Write the record last, because it states that both files are complete.
    outcome = ChunkResult(
        number,
        tokens={stream: files.num_tokens},
        documents={stream: files.num_documents},
        tally=tally,
    )
    write_json(attempt.record("tokenize", number), outcome.to_json(), aside=attempt.partial)
    return outcome


def _split(job: SplitJob) -> ChunkResult:
    attempt = Attempt(job.attempt)
    number = job.number
    dtype = np.dtype(job.dtype).newbyteorder("<")
    whole = tokens_path(attempt.chunks, WHOLE, number)
    index = np.fromfile(documents_path(attempt.chunks, WHOLE, number), dtype="<i8")
    documents = index.reshape(-1, 2)

    # A document ends at the beginning of the next document, and the last document at the end of the file.
    total = whole.stat().st_size // dtype.itemsize
    begins, lines = documents[:, 0], documents[:, 1]
    ends = np.append(begins[1:], total) if len(documents) else begins
    lengths = ends - begins
    is_held_out = np.zeros(len(documents), dtype=np.bool_)
    is_held_out[list(job.held_out)] = True
    with (
        whole.open("rb") as file,
        _written(attempt, attempt.data, TRAIN, number) as kept,
        _written(attempt, attempt.data, HELD_OUT, number) as held_out,
    ):
        first = 0
        begin = 0
        while first < len(ends):
            # Process groups of at least one document, because a whole chunk may need too much memory.
            fitting = int(np.searchsorted(ends, begin + _SPLIT_TOKENS, side="right"))
            last = max(first + 1, fitting)
            group = slice(first, last)
            tokens = np.fromfile(file, dtype=dtype, count=int(lengths[group].sum()))
            # Keep the order of the source in both parts, because the index of documents depends on it.
            is_out = is_held_out[group]
            for files, chosen in ((kept, ~is_out), (held_out, is_out)):
                of_chosen = np.repeat(chosen, lengths[group])
                files.add(tokens[of_chosen], lengths[group][chosen], lines[group][chosen])
            first = last
            begin = int(ends[last - 1])

    outcome = ChunkResult(
        number,
        tokens={TRAIN: kept.num_tokens, HELD_OUT: held_out.num_tokens},
        documents={TRAIN: kept.num_documents, HELD_OUT: held_out.num_documents},
        tally=LineCounts(),
    )
    write_json(attempt.record("split", number), outcome.to_json(), aside=attempt.partial)
    # Remove these files only after the record is written: after a kill before it, the chunk is split again.
    for path in (whole, documents_path(attempt.chunks, WHOLE, number)):
        path.unlink(missing_ok=True)
    return outcome


class _Files:
    """Writes the token file of a chunk and its index of documents."""

    def __init__(self, tokens: BinaryIO, documents: BinaryIO) -> None:
        self._tokens = tokens
        self._documents = documents
        self.num_tokens = 0
        self.num_documents = 0

    def add(
        self,
        tokens: npt.NDArray[Any],
        lengths: npt.NDArray[np.int64],
        lines: npt.NDArray[np.int64],
    ) -> None:
        """Append documents, whose ids are concatenated in ``tokens``.

        ``lengths`` and ``lines``: number of ids and line of each document, both of shape (documents,).
        """
        # The index has the start of each document in the chunk's file, and its line in the source.
        starts = np.cumsum(lengths) - lengths + self.num_tokens
        index = np.stack([starts, lines], axis=1).astype("<i8")
        ids = np.ascontiguousarray(tokens, dtype=tokens.dtype.newbyteorder("<"))
        self._tokens.write(ids.data)
        self._documents.write(index.data)
        self.num_tokens += len(tokens)
        self.num_documents += len(lengths)


@contextmanager
def _written(
    attempt: Attempt, directory: Path, stream: str, number: int
) -> Iterator[_Files]:
    """Write both files under temporary names. After the body, make them durable and rename them."""
    suffix = unique_suffix()
    finals = (
        tokens_path(directory, stream, number),
        documents_path(directory, stream, number),
    )
    asides = [attempt.partial / f"{path.name}.{suffix}" for path in finals]
    try:
        with asides[0].open("wb") as tokens, asides[1].open("wb") as documents:
            yield _Files(tokens, documents)
            for file in (tokens, documents):
                file.flush()
                os.fsync(file.fileno())
        # Rename only after fsync, so that a file with its final name is complete even after a power failure.
        for aside, final in zip(asides, finals, strict=True):
            aside.rename(final)
    except BaseException:
        # Clean up on Ctrl-C too. After a kill, the next attempt removes the whole folder.
        for aside in asides:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
        raise
