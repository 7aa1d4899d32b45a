"""The work on one chunk: texts → token file, and token file → training and held-out parts.

It runs in any process.
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
"""Name of a chunk's token file while held-out documents are still in it."""

_SPLIT_TOKENS: Final = 4 * 2**20
"""About how many tokens of a chunk are in memory while it is split."""


@dataclass(frozen=True)
class Attempt:
    """The directory of a preparation under way.

    Its ``data`` becomes the published directory by one rename.
    """

    directory: Path

    @property
    def data(self) -> Path:
        """Finished files under their final names."""
        return self.directory / "data"

    @property
    def chunks(self) -> Path:
        """Records of finished jobs, and whole chunks that are still to be split."""
        return self.directory / "chunks"

    @property
    def partial(self) -> Path:
        """Files being written."""
        return self.directory / "partial"

    def record(self, kind: str, number: int) -> Path:
        """The file that says that a job is finished."""
        return self.chunks / f"{kind}-{number:05d}.json"


@dataclass(frozen=True)
class TokenizeJob:
    """Tokenise chunks of a source, one after the other.

    ``is_whole``: held-out documents are taken out later. ``only_check``: just count what is wrong.
    """

    form: TextFormat
    attempt: Path
    chunks: tuple[Chunk, ...]
    is_whole: bool
    only_check: bool = False

    def to_json(self) -> dict[str, Any]:
        """JSON values only."""
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
    """Take some documents, by their place in the chunk, out of a whole chunk."""

    attempt: Path
    number: int
    held_out: tuple[int, ...]
    dtype: str

    def to_json(self) -> dict[str, Any]:
        """JSON values only."""
        return {"kind": "split", **asdict(self), "attempt": str(self.attempt)}


Job = TokenizeJob | SplitJob


def job_from_json(value: dict[str, Any]) -> Job:
    """The inverse of both ``to_json``."""
    # Paths and tuples are texts and lists in JSON.
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
    """The result of a job: tokens and documents of each stream, and the lines that were passed over."""

    number: int
    tokens: dict[str, int]
    documents: dict[str, int]
    tally: LineCounts

    def to_json(self) -> dict[str, Any]:
        """JSON values only."""
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
    """Do one job: an outcome for each of its chunks, whose record lies there by then.

    Raises DataError, OSError.
    """
    if isinstance(job, SplitJob):
        try:
            outcome = _split(job)
        except FileNotFoundError:
            # A helper that outlived its killed parent was doing the same job and has finished it.
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
                # A mistake in a row may show in its tokens only.
                if job.form.rows is not None:
                    job.form.rows.encode(tokenizer, texts, lines, tally)
            yield ChunkResult(chunk.number, {}, {}, tally)


def finished(attempt: Attempt, kind: str, number: int) -> ChunkResult | None:
    """The outcome of a job whose record lies there, or None.

    A record torn by a loss of power counts as none.
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
        # Block by block: memory does not depend on the size of the chunk.
        for texts, lines in reader.read(chunk, tally):
            if job.form.rows is not None:
                files.add(*job.form.rows.encode(tokenizer, texts, lines, tally))
                continue
            tokens, lengths = tokenizer.encode_documents(texts)
            numbers = np.array(lines, dtype=np.int64)
            is_document = lengths > 1
            if not is_document.all():
                # A tokenizer may drop all of a text; an end without a document is none.
                tokens = tokens[np.repeat(is_document, lengths)]
                tally.skipped[SkipReason.EMPTY_TEXT] += int(np.count_nonzero(~is_document))
            files.add(tokens, lengths[is_document], numbers[is_document])
    # The record comes last: it says that both files are whole.
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

    # A document ends where the next one begins, the last one at the end of the file.
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
            # Groups of at least one document: a chunk may hold more tokens than memory should.
            fitting = int(np.searchsorted(ends, begin + _SPLIT_TOKENS, side="right"))
            last = max(first + 1, fitting)
            group = slice(first, last)
            tokens = np.fromfile(file, dtype=dtype, count=int(lengths[group].sum()))
            # Both parts keep the order of the source, which the index of documents relies on.
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
    # Only now: a kill before the record means that the chunk is split once more, from these files.
    for path in (whole, documents_path(attempt.chunks, WHOLE, number)):
        path.unlink(missing_ok=True)
    return outcome


class _Files:
    """The token file of a chunk and its index of documents, being written."""

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
        """Append documents, which lie one after the other in ``tokens``."""
        # Where each document begins in the chunk's file, and which line of the source it was.
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
    """Write both files aside; when the body is done, make them durable and give them their names."""
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
        # Durable before they have their names: what has a final name is whole, also after a power cut.
        for aside, final in zip(asides, finals, strict=True):
            aside.rename(final)
    except BaseException:
        # Also on Ctrl-C; after a kill the next attempt removes the whole folder.
        for aside in asides:
            with suppress(OSError):
                aside.unlink(missing_ok=True)
        raise
