"""Prepared data on disk: one directory per fingerprint, with token files and an index.

The files are checked before they are used.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from evergrad_manifest.errors import Problem, raise_if
from evergrad_manifest.training import HELD_OUT
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.preparation.documents import HARMLESS

INDEX: Final = "index.json"
FORMAT: Final = 1
TRAIN: Final = "train"

Dtype = Literal["uint16", "uint32"]
_MOST_PROBLEMS: Final = 5
WIDTH: Final[dict[Dtype, int]] = {"uint16": 2, "uint32": 4}


@dataclass(frozen=True)
class Shard:
    """Tokens [start, start + tokens) of a flat little-endian file.

    ``documents``: a file with one pair of int64 per document (first token in the shard, line in the source),
    or None.
    """

    path: Path
    start: int
    tokens: int
    documents: Path | None = None


@dataclass(frozen=True)
class TokenSequence:
    """A stream of tokens: the concatenation of its shards."""

    dtype: Dtype
    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)


@dataclass(frozen=True)
class PreparedFile:
    """One file of a source that is a folder or a pattern.

    ``name``: its path relative to the folder. ``lines``: number of lines or rows; 1 if the file is one
    document.
    """

    name: str
    content_hash: str
    size: int
    lines: int


@dataclass(frozen=True)
class PreparedSource:
    """One source, prepared for reading.

    ``documents``: number of documents, including held-out documents; None for token files. ``skipped``:
    number of lines that gave no document, by reason. ``repaired``: number of documents in which a lone
    surrogate was replaced. ``reused``: whether an earlier preparation was used. ``files``: the files of a
    folder or pattern, in order; empty if the source names a single file. ``unit``: the part of a source that
    contains one document.
    """

    name: str
    path: Path
    content_hash: str
    fingerprint: str
    train: TokenSequence
    held_out: TokenSequence | None = None
    documents: int | None = None
    held_out_documents: int | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)
    repaired: int = 0
    reused: bool = False
    files: tuple[PreparedFile, ...] = ()
    unit: Literal["line", "row", "file"] = "line"

    @property
    def malformed(self) -> int:
        """Number of lines that were skipped by the policy ``malformed: skip``."""
        return sum(
            count for reason, count in self.skipped.items() if reason not in HARMLESS
        )


@dataclass(frozen=True)
class Prepared:
    """All data of a manifest, prepared for reading.

    It is passed to other processes and stored in the run directory as JSON.
    """

    sources: tuple[PreparedSource, ...]
    evaluation: tuple[PreparedSource, ...]
    tokenizer_identity: str
    vocab_size: int
    end_of_document: int
    folder: Path | None = None
    """Directory in which a custom task prepared its data; None if it prepared no data."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the data that the custom task returned, as JSON values."""
    row_texts: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the texts that rows use from the tokenizer's directory, keyed by the kind of text."""

    @property
    def fingerprints(self) -> frozenset[str]:
        """Fingerprints of all sources."""
        return frozenset(one.fingerprint for one in (*self.sources, *self.evaluation))

    def to_json(self) -> dict[str, Any]:
        """Return the data as JSON values."""
        # Convert through JSON text, so that paths become texts and tuples become lists, as after reading.
        value: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        if self.folder is None:
            # Keep the record of runs without a custom task the same as in versions without custom tasks.
            del value["folder"], value["facts"]
        if not self.row_texts:
            del value["row_texts"]
        for source in (*value["sources"], *value["evaluation"]):
            if source["unit"] == "line":
                del source["unit"]
            if not source["files"]:
                del source["files"]
        return value

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Prepared":
        """The inverse of ``to_json``."""
        sources = tuple(map(_source_from_json, value["sources"]))
        return Prepared(
            **{
                **value,
                "sources": sources,
                "evaluation": tuple(map(_source_from_json, value["evaluation"])),
                "folder": Path(value["folder"]) if value.get("folder") else None,
            }
        )


def _source_from_json(value: dict[str, Any]) -> PreparedSource:
    # All other fields are JSON values and need no conversion.
    train, held_out = _sequence_from_json(value["train"]), value["held_out"]
    changed = {
        "path": Path(value["path"]),
        "train": train,
        "held_out": held_out and _sequence_from_json(held_out),
        "files": tuple(PreparedFile(**file) for file in value.get("files", ())),
    }
    return PreparedSource(**{**value, **changed})


def _sequence_from_json(value: dict[str, Any]) -> TokenSequence:
    shards = (
        Shard(
            Path(shard["path"]),
            shard["start"],
            shard["tokens"],
            Path(shard["documents"]) if shard["documents"] else None,
        )
        for shard in value["shards"]
    )
    return TokenSequence(value["dtype"], tuple(shards))


@dataclass(frozen=True)
class PublishedSource:
    """The contents of ``index.json`` in a published directory."""

    directory: Path
    train: TokenSequence
    held_out: TokenSequence | None
    documents: int
    held_out_documents: int | None
    skipped: dict[str, int]
    repaired: int


def open_published(directory: Path) -> PublishedSource | None:
    """Open the finished preparation in ``directory``. Returns None if the directory does not exist.

    Raises DataError if files are missing or truncated.
    """
    try:
        text = (directory / INDEX).read_text(encoding="utf-8")
    except FileNotFoundError:
        if not directory.exists():
            return None
        # A directory gets its final name by a rename, after its index is written, so the index was removed.
        raise DataError(_damaged(directory, directory / INDEX, "is missing")) from None
    except (OSError, ValueError) as error:
        raise DataError(
            _damaged(directory, directory / INDEX, f"cannot be read ({error})")
        ) from error
    try:
        published = _parse_index(directory, text)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            _damaged(directory, directory / INDEX, f"is not an index ({error})")
        ) from error
    # The index was written last, so a file that is missing now was removed after publication.
    raise_if(sequence_problems(directory, published.train, published.held_out), DataError)
    return published


def _parse_index(directory: Path, text: str) -> PublishedSource:
    """Parse the index. Raises ValueError, KeyError or TypeError if it is not a valid index."""
    index: dict[str, Any] = json.loads(text)
    # Report data of another format like damaged data, because the remedy is the same: prepare again.
    if index["format"] != FORMAT:
        raise ValueError(f"format {index['format']}, not {FORMAT}")
    dtype: Dtype = "uint16" if index["dtype"] == "uint16" else "uint32"
    streams: dict[str, TokenSequence] = {}
    for name, stream in index["streams"].items():
        shards = tuple(
            Shard(
                tokens_path(directory, name, number),
                0,
                int(tokens),
                documents_path(directory, name, number),
            )
            for number, tokens in stream["shards"]
        )
        streams[name] = TokenSequence(dtype, shards)
    held_out = index["streams"].get(HELD_OUT)
    return PublishedSource(
        directory=directory,
        train=streams[TRAIN],
        held_out=streams.get(HELD_OUT),
        documents=int(index["documents"]),
        held_out_documents=int(held_out["documents"]) if held_out else None,
        skipped=dict(index["skipped"]),
        repaired=int(index["repaired"]),
    )


def tokens_path(directory: Path, stream: str, number: int) -> Path:
    """Return the path of the file with the token ids of one chunk."""
    return directory / f"{stream}-{number:05d}.tokens"


def documents_path(directory: Path, stream: str, number: int) -> Path:
    """Return the path of the file with the start positions of the documents of one chunk."""
    return directory / f"{stream}-{number:05d}.documents"


def sequence_problems(directory: Path, *sequences: TokenSequence | None) -> list[Problem]:
    """Return a problem for each of the first 5 files that are missing or have another size than indexed."""
    problems: list[Problem] = []
    for sequence in filter(None, sequences):
        for shard in sequence.shards:
            wanted = shard.tokens * WIDTH[sequence.dtype]
            try:
                size = shard.path.stat().st_size
            except OSError as error:
                what = f"cannot be read ({error.strerror})"
                problems.append(_damaged(directory, shard.path, what))
            else:
                if size != wanted:
                    what = f"has {size} bytes and should have {wanted}"
                    problems.append(_damaged(directory, shard.path, what))
            # Stop after a few problems: they show the cause, and each stat call may be slow on a volume.
            if len(problems) == _MOST_PROBLEMS:
                return problems
    return problems


def _damaged(directory: Path, path: Path, what: str) -> Problem:
    return Problem(
        str(path),
        what,
        "the prepared data is damaged",
        f"Delete the directory {directory} and prepare again; the source file is untouched",
    )
