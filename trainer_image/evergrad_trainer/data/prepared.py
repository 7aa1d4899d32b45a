"""Prepared data as it lies on disk: a directory a fingerprint with token files and an index, checked before
it is used."""

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

    ``documents``: a file of int64 pairs (first token in the shard, line in the source), one a document, where
    there are any.
    """

    path: Path
    start: int
    tokens: int
    documents: Path | None = None


@dataclass(frozen=True)
class TokenSequence:
    """One stream of tokens: its shards, one after the other."""

    dtype: Dtype
    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)


@dataclass(frozen=True)
class PreparedFile:
    """One file of a source that is a folder or a pattern: its path from the folder, and its content.

    ``lines``: lines, rows, or 1 where the file is one document.
    """

    name: str
    content_hash: str
    size: int
    lines: int


@dataclass(frozen=True)
class PreparedSource:
    """One source, ready to be read. ``documents`` counts all of them, held-out ones included; None where
    there are none to count.

    ``skipped``: lines that gave no document, by reason. ``repaired``: documents in which half a surrogate
    pair was replaced. ``reused``: nothing had to be done for it this time. ``files``: those of a folder or
    pattern as it was expanded, in their order; none for a source that names one file. ``unit``: what holds
    one document each.
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
        """Lines that were skipped by the policy ``malformed: skip``."""
        return sum(
            count for reason, count in self.skipped.items() if reason not in HARMLESS
        )


@dataclass(frozen=True)
class Prepared:
    """All of a manifest's data, ready to be read.

    Goes through JSON to other processes and into the run directory.
    """

    sources: tuple[PreparedSource, ...]
    evaluation: tuple[PreparedSource, ...]
    tokenizer_identity: str
    vocab_size: int
    end_of_document: int
    folder: Path | None = None
    """Where a task of the user's own has prepared its data; None where it has prepared none."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts that the task returned about them, as JSON values."""
    row_texts: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the texts that rows take from the tokenizer's directory, by what they are."""

    @property
    def fingerprints(self) -> frozenset[str]:
        """Those of all sources."""
        return frozenset(one.fingerprint for one in (*self.sources, *self.evaluation))

    def to_json(self) -> dict[str, Any]:
        """JSON values only."""
        # Through the text, so that paths become texts and tuples lists as at the other end.
        value: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        if self.folder is None:
            # Runs on text alone record the same as they did before there were others.
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
    # All other fields are JSON values as they are.
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
    """The facts in ``index.json`` of a prepared directory."""

    directory: Path
    train: TokenSequence
    held_out: TokenSequence | None
    documents: int
    held_out_documents: int | None
    skipped: dict[str, int]
    repaired: int


def open_published(directory: Path) -> PublishedSource | None:
    """The finished preparation in ``directory``, or None if there is none.

    Raises DataError if files are missing or cut short.
    """
    try:
        text = (directory / INDEX).read_text(encoding="utf-8")
    except FileNotFoundError:
        if not directory.exists():
            return None
        # Directories get their name by one rename, with the index in them.
        raise DataError(_damaged(directory, directory / INDEX, "is missing")) from None
    except (OSError, ValueError) as error:
        raise DataError(
            _damaged(directory, directory / INDEX, f"cannot be read ({error})")
        ) from error
    try:
        index: dict[str, Any] = json.loads(text)
        # Prepared data of another version: the same message as for damage, since preparing again helps both.
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
        published = PublishedSource(
            directory=directory,
            train=streams[TRAIN],
            held_out=streams.get(HELD_OUT),
            documents=int(index["documents"]),
            held_out_documents=int(held_out["documents"]) if held_out else None,
            skipped=dict(index["skipped"]),
            repaired=int(index["repaired"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            _damaged(directory, directory / INDEX, f"is not an index ({error})")
        ) from error
    # The index was written last and published with its files: what is missing now was removed since.
    raise_if(sequence_problems(directory, published.train, published.held_out), DataError)
    return published


def tokens_path(directory: Path, stream: str, number: int) -> Path:
    """The file of token ids of one chunk."""
    return directory / f"{stream}-{number:05d}.tokens"


def documents_path(directory: Path, stream: str, number: int) -> Path:
    """The file that says where the documents of one chunk begin."""
    return directory / f"{stream}-{number:05d}.documents"


def sequence_problems(directory: Path, *sequences: TokenSequence | None) -> list[Problem]:
    """The first files of prepared data that are missing or have another size than the index says."""
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
            # A few show what happened; each look is a call to a volume that may be slow.
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
