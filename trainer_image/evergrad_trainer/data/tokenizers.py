"""Tokenizers: the built-in one of bytes, and any transformers tokenizer from a local directory, never with
remote code."""

import importlib.util
import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import xxhash
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import Tokenizer
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.auto_tokenizer import (
    TokenizerDifference,
    encoder_of,
    first_difference,
    ids_or_none,
    listed_tokens,
    load_auto,
    probe_texts,
)
from evergrad_trainer.data.chat_template import TEMPLATE_FOLDER

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

BYTE_END: Final = 256
BYTE_END_TOKEN: Final = "<|end_of_document|>"
"""How the end of a document is spelled in the transformers form of the byte tokenizer."""

_FIELD: Final = "spec.training.tokenizer"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_SEPARATOR: Final = 0xFF
"""A byte that UTF-8 never contains."""
_BATCH: Final = 64
_FILE = "tokenizer.json"
_CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_OTHER_FILES = (
    *(
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "spiece.model",
    ),
    *(
        "sentencepiece.bpe.model",
        "tekken.json",
        "chat_template.jinja",
        "chat_template.json",
    ),
)
_SENTENCE_PIECE_FILES: Final = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_COPIED_FILES = (_FILE, *_CONFIG_FILES, *_OTHER_FILES)


FOLLOWED: Final = "auto-"
"""How the identity of a tokenizer begins whose files give other ids than its tokenizer.json alone."""
_GENERAL_CLASS: Final = "PreTrainedTokenizerFast"
SAVE_AGAIN: Final = (
    "Correct the directory's files, or save the tokenizer again with save_pretrained as a "
    f"{_GENERAL_CLASS}, which needs no code of its own"
)
"""What to do about a directory that AutoTokenizer cannot load."""
_LONGEST_ERROR: Final = 300
"""Most characters of an error of transformers in a message; some list all classes that there are."""


class TextTokenizer(Protocol):
    """Text to ids and back. ``identity`` changes whenever the ids of some text may."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def end_of_document(self) -> int:
        """The id that follows every document."""

    @property
    def identity(self) -> str:
        """Equal for tokenizers that give equal ids."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest of uint16 and uint32 that holds every id."""

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of tokens that are found in a text as they are spelled, such as the end of a turn."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Ids of ``bos_token`` and ``pad_token``, of those that the tokenizer has."""

    @property
    def auto_error(self) -> str:
        """The reason why AutoTokenizer cannot load the directory, so that only its tokenizer.json is read;
        empty if it can, or if there is no directory."""

    def encode_many(self, texts: Sequence[str]) -> list[Tokens]:
        """The ids of each text, without any special token around them."""

    def encode_documents(
        self, texts: Sequence[str]
    ) -> tuple[Tokens, npt.NDArray[np.int64]]:
        """The ids of all texts in one array, each text followed by the end id, and the number of ids of each
        (end included)."""

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text, without any special token around them, and the characters [start, end) of each.

        The spelling of a special token in the text is that token.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids. Ends of documents are left out, and ids without a text, which a model with a
        larger vocabulary gives."""

    def save_pretrained(self, directory: Path) -> None:
        """Write the tokenizer so that transformers' AutoTokenizer gives the same ids."""


def load_tokenizer(config: Tokenizer, base_directory: Path) -> TextTokenizer:
    """The tokenizer a manifest names; its path is relative to ``base_directory``. Raises DataError."""
    if config.type == "byte":
        return ByteTokenizer()
    if config.path is None:
        raise DataError(
            Problem(
                f"{_FIELD}.path",
                "is missing",
                "type: transformers needs a directory",
                "Name a local directory",
            )
        )
    return load_directory(base_directory / config.path)


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 where it holds every id below ``vocab_size``, else uint32; little-endian, as on disk."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def describe_reader(tokenizer: TextTokenizer) -> dict[str, str]:
    """Which reader's ids are trained, for the record of a run."""
    if tokenizer.auto_error:
        return {"reader": f"{_FILE} alone", "autoTokenizer": tokenizer.auto_error}
    return {"reader": "AutoTokenizer"}


def replace_lone_surrogates(text: str) -> str:
    """Half a surrogate pair (JSON can escape one) is no character and has no UTF-8: U+FFFD stands for it."""
    return _LONE_SURROGATE.sub("\ufffd", text)


class ByteTokenizer:
    """UTF-8 bytes 0-255, and 256 for the end of a document."""

    vocab_size: int = 257
    end_of_document: int = BYTE_END
    identity: str = "byte-1"
    added_ids: frozenset[int] = frozenset({BYTE_END})
    special_ids: Mapping[str, int] = MappingProxyType({})
    auto_error: str = ""
    dtype: np.dtype[Any] = smallest_dtype(257)

    def encode_many(self, texts: Sequence[str]) -> list[Tokens]:
        return [
            np.frombuffer(data, dtype=np.uint8).astype(np.uint16) for data in _utf8(texts)
        ]

    def encode_documents(
        self, texts: Sequence[str]
    ) -> tuple[Tokens, npt.NDArray[np.int64]]:
        # One array for all documents: the separator, which no text contains, becomes the end id and marks the
        # lengths.
        joined = bytes([_SEPARATOR]).join([*_utf8(texts), b""])
        data = np.frombuffer(joined, dtype=np.uint8)
        ends = np.flatnonzero(data == _SEPARATOR)
        tokens = data.astype(np.uint16)
        tokens[ends] = BYTE_END
        return tokens, np.diff(ends, prepend=-1)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        place = 0
        for at, part in enumerate(text.split(BYTE_END_TOKEN)):
            if at:
                ids.append(BYTE_END)
                offsets.append((place, place + len(BYTE_END_TOKEN)))
                place += len(BYTE_END_TOKEN)
            data = np.frombuffer(_utf8([part])[0], dtype=np.uint8)
            # All but the first byte of a character begin with the bits 10.
            starts: list[int] = (np.cumsum((data & 0xC0) != 0x80) - 1 + place).tolist()
            offsets += [(start, start + 1) for start in starts]
            ids += data.tolist()
            place += len(part)
        return ids, offsets

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(one for one in ids if one < BYTE_END).decode("utf-8", errors="replace")

    def save_pretrained(self, directory: Path) -> None:
        """A BPE without merges over GPT-2's printable names of the 256 bytes."""
        # The ids of the bytes are the bytes; the end of a document gets the next free id, which is 256.
        # The names are part of a published format (GPT-2's ``bytes_to_unicode``), which other tools read: a
        # byte that can be printed stands for itself, and the others for the next characters after those.
        printable = {
            *range(ord("!"), ord("~") + 1),
            *range(ord("¡"), ord("¬") + 1),
            *range(ord("®"), ord("ÿ") + 1),
        }
        others = [byte for byte in range(256) if byte not in printable]
        names = {chr(byte): byte for byte in printable}
        names |= {chr(256 + place): byte for place, byte in enumerate(others)}
        backend = Backend(models.BPE(vocab=names, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(
            [AddedToken(BYTE_END_TOKEN, special=True, normalized=False)]
        )
        directory.mkdir(parents=True, exist_ok=True)
        backend.save(str(directory / _FILE))
        config = {
            "tokenizer_class": _GENERAL_CLASS,
            "eos_token": BYTE_END_TOKEN,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 10**30,
        }
        (directory / _CONFIG_FILES[0]).write_text(
            json.dumps(config, indent=2) + "\n", encoding="utf-8"
        )


def _utf8(texts: Sequence[str]) -> list[bytes]:
    try:
        return [text.encode() for text in texts]
    except UnicodeEncodeError:
        return [replace_lone_surrogates(text).encode() for text in texts]


class BackendTokenizer:
    """A tokenizer of the tokenizers library.

    ``files``: what ``save_pretrained`` copies, by its name there. ``in_batches``: encode many texts a call,
    about a fifth quicker; only where the library's own threads are switched off, as in the helpers of
    ``prepare``.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        end_of_document: int,
        identity: str,
        files: Mapping[str, Path] = MappingProxyType({}),
        special_ids: Mapping[str, int] = MappingProxyType({}),
        in_batches: bool = False,
    ) -> None:
        self._backend = backend
        self._in_batches = in_batches
        self._files = files
        self.end_of_document = end_of_document
        self.identity = identity
        self.added_ids = frozenset(backend.get_added_tokens_decoder())
        self.special_ids = special_ids
        self.auto_error = ""
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.dtype = smallest_dtype(self.vocab_size)

    def encode_many(self, texts: Sequence[str]) -> list[Tokens]:
        return [np.array(ids, dtype=self.dtype) for ids in self._ids(texts)]

    def encode_documents(
        self, texts: Sequence[str]
    ) -> tuple[Tokens, npt.NDArray[np.int64]]:
        # The library's own end token would depend on settings of the tokenizer's file.
        ids = self._ids(texts)
        for one in ids:
            one.append(self.end_of_document)
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        return np.fromiter(
            chain.from_iterable(ids), dtype=self.dtype, count=int(lengths.sum())
        ), lengths

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Iterable[int]) -> str:
        wanted = [one for one in ids if one != self.end_of_document]
        return str(self._backend.decode(wanted, skip_special_tokens=False))

    def save_pretrained(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for name, file in self._files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, directory / name)
        # A directory with dropout of merges would give other ids than those that were trained.
        stored = directory / _FILE
        if stored.is_file():
            value = json.loads(stored.read_text(encoding="utf-8"))
            model = value.get("model")
            if isinstance(model, dict) and model.get("dropout"):
                model["dropout"] = None
                stored.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")

    def to_json(self) -> str:
        """The whole tokenizer in the format of ``tokenizer.json``."""
        return str(self._backend.to_str())

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            return self._encode(texts)
        except TypeError:
            # The library's answer to a str that has no UTF-8.
            return self._encode([replace_lone_surrogates(text) for text in texts])

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not self._in_batches:
            # One at a time: a batch would start the library's threads in this process, which may fork later.
            return [
                self._backend.encode(text, add_special_tokens=False).ids for text in texts
            ]
        encode = self._backend.encode_batch_fast
        parts = (
            encode(list(texts[first : first + _BATCH]), add_special_tokens=False)
            for first in range(0, len(texts), _BATCH)
        )
        return [encoding.ids for part in parts for encoding in part]


def load_directory(directory: Path) -> BackendTokenizer:
    """The tokenizer of a transformers directory, read once in a process as long as its files do not change.

    Raises DataError naming the directory and what to do.
    """
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise _problem(
            directory,
            what,
            "a transformers tokenizer is a local directory",
            "Check the path; nothing is ever downloaded",
        )
    # Preflight, preparation and the task ask one after the other, and a large tokenizer takes seconds.
    try:
        entries = [
            (path.name, path.stat()) for path in directory.iterdir() if path.is_file()
        ]
    except OSError as error:
        raise _problem(
            directory, "cannot be read", str(error), "Check its rights"
        ) from error
    stamps = sorted(
        (name, one.st_ino, one.st_size, one.st_mtime_ns) for name, one in entries
    )
    return _load_files(directory, tuple(stamps))


@lru_cache(maxsize=2)
def _load_files(
    directory: Path, stamps: tuple[tuple[str, int, int, int], ...]
) -> BackendTokenizer:
    """``stamps``: what tells the directory's files from others that were there before."""
    path = directory / _FILE
    if not path.is_file():
        return _load_with_transformers(directory)
    try:
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _problem(path, "cannot be read", str(error), "Copy the file again") from error
    except Exception as error:
        # The library raises plain Exception for a file it cannot use.
        raise _problem(
            path,
            "is not a tokenizer",
            str(error),
            "Copy the file again, or save it with a current transformers",
        ) from error
    had_dropout = _switch_off_dropout(backend)
    end_token = _read_token(directory, "eos_token")
    is_known = end_token is None or backend.token_to_id(end_token) is not None
    followed, further, auto_error = backend, "", ""
    # transformers makes a new token of a misspelled one. It is refused below.
    if is_known or end_token in listed_tokens(directory):
        try:
            auto = load_auto(directory)
        except Exception as error:  # noqa: BLE001 - transformers raises whatever its classes raise
            # There is nothing else to follow: this file alone is what other programs have, too. Preflight
            # warns of it.
            auto_error = _first_line(error, directory)
        else:
            followed, further = _follow_auto(backend, auto, directory)
    tokenizer = _build(
        followed,
        directory=directory,
        end_token=end_token,
        decisive=[path],
        further=further,
        had_dropout=had_dropout,
    )
    tokenizer.auto_error = auto_error
    return tokenizer


def _first_line(error: Exception, directory: Path) -> str:
    """The first line of an error of transformers, which may have many, without the place of ``directory``."""
    line = str(error).strip().partition("\n")[0].replace(str(directory), directory.name)
    line = line[:_LONGEST_ERROR].rstrip(" .")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _follow_auto(backend: Backend, auto: Any, directory: Path) -> tuple[Backend, str]:
    """``backend``, or what AutoTokenizer makes of the directory's files if that gives a text other ids.

    ``auto``: what AutoTokenizer makes of them. Returns what tells the ids from those of ``tokenizer.json``
    alone, too; empty if they are the same. Raises DataError for ids that only transformers' own code makes.
    """
    _switch_off_dropout(getattr(auto, "backend_tokenizer", None))
    texts = probe_texts(directory)
    theirs = encoder_of(auto)

    def encode(text: str) -> list[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    backend.no_truncation()
    backend.no_padding()
    if first_difference(encode, theirs, texts) is None:
        return backend, ""
    followed = _portable(auto, directory)
    digest = xxhash.xxh3_128()
    for text in texts:
        digest.update(json.dumps([text, list(ids_or_none(theirs, text))]).encode())
    return followed, digest.hexdigest()


def _portable(auto: Any, directory: Path) -> Backend:
    """transformers' tokenizer as one of the tokenizers library, as helper processes get it.

    Raises DataError for a tokenizer without one, and for ids that only transformers' own code makes.
    """
    remedy = f"Load it with transformers once and save it again with save_pretrained, which writes a {_FILE}"
    backend = getattr(auto, "backend_tokenizer", None)
    # Preparation runs in helper processes that get the tokenizer as text: one in Python has no such form.
    if not isinstance(backend, Backend):
        raise _problem(
            directory,
            "the tokenizer is written in Python",
            f"it has no {_FILE} form, which preparation needs",
            remedy,
        )
    portable = Backend.from_str(backend.to_str())
    portable.no_truncation()
    portable.no_padding()
    difference = first_difference(
        lambda text: portable.encode(text, add_special_tokens=False).ids,
        encoder_of(auto),
        probe_texts(directory),
    )
    if difference is not None:
        raise _problem(
            directory,
            "the tokenizer cannot be read as AutoTokenizer reads it",
            str(difference),
            remedy,
        )
    return portable


def check_saved(tokenizer: TextTokenizer, directory: Path) -> TokenizerDifference | None:
    """Compare a tokenizer with what AutoTokenizer makes of a directory that it was saved in.

    The directory's ``config.json``, if it has one, decides about the class that transformers takes. Where
    the files give a text other ids, they are written again so that they do not, if that can be done. Returns
    the difference that is left. Raises DataError if transformers cannot load it.
    """

    def compare() -> TokenizerDifference | None:
        try:
            auto = load_auto(directory)
        except Exception as error:
            why, remedy = _first_line(error, directory), SAVE_AGAIN
            problem = Problem(
                _FIELD, "AutoTokenizer cannot load an export of it", why, remedy
            )
            raise DataError(problem) from error
        return first_difference(
            lambda text: tokenizer.encode_with_offsets(text)[0],
            encoder_of(auto),
            probe_texts(directory),
        )

    difference = compare()
    if difference is None or not isinstance(tokenizer, BackendTokenizer):
        return difference
    # By transformers' general class, which takes tokenizer.json as it is.
    (directory / _FILE).write_text(tokenizer.to_json(), encoding="utf-8")
    path = directory / _CONFIG_FILES[0]
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    config["tokenizer_class"] = _GENERAL_CLASS
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return compare()


def problem_of_difference(difference: TokenizerDifference) -> Problem:
    """The problem of a text to which transformers gives other ids in an export."""
    return Problem(
        _FIELD,
        f"transformers would give other ids in an export: {difference}",
        "it chooses a tokenizer by the model_type in config.json, whatever the files say",
        "Train with a tokenizer of this architecture, or with an architecture such as llama",
    )


def _load_auto(directory: Path, found: Sequence[Path]) -> Any:
    """As ``load_auto``. ``found``: the files that it has to read, for messages. Raises DataError."""
    try:
        return load_auto(directory)
    except Exception as error:
        # A file of tiktoken, which may have the same name, is a text.
        pieces = [
            path.name
            for path in found
            if path.name in _SENTENCE_PIECE_FILES and path.read_bytes()[:1] == b"\n"
        ]
        if pieces and importlib.util.find_spec("sentencepiece") is None:
            # transformers tries its readers one after the other, and names the package of the last one.
            raise _problem(
                directory,
                f"holds a SentencePiece model ({pieces[0]}) and no {_FILE}",
                "the package sentencepiece, which reads it, is not installed here",
                "Where sentencepiece and transformers are installed, load the directory with AutoTokenizer "
                f"and save it with save_pretrained, which writes a {_FILE}; or install sentencepiece here",
            ) from error
        raise _problem(
            directory,
            "transformers cannot load this tokenizer",
            str(error).partition("\n")[0],
            f"Load it with transformers once and save it again with save_pretrained, which writes a {_FILE}",
        ) from error


def _switch_off_dropout(backend: Any) -> bool:
    """Switch dropout of merges off, which some training recipes save. Returns whether there was any.

    It gives other ids for one text at every call, so that ids could not be compared either.
    """
    model = getattr(backend, "model", None)
    if not getattr(model, "dropout", None):
        return False
    model.dropout = None  # type: ignore[union-attr]
    return True


def load_json(text: str, *, end_of_document: int, identity: str) -> BackendTokenizer:
    """The tokenizer written by ``to_json``, for a helper process without the library's threads."""
    return BackendTokenizer(
        Backend.from_str(text),
        end_of_document=end_of_document,
        identity=identity,
        in_batches=True,
    )


def _build(
    backend: Backend,
    *,
    directory: Path,
    end_token: str | None,
    decisive: Sequence[Path],
    further: str = "",
    had_dropout: bool = False,
) -> BackendTokenizer:
    """``decisive``: the files that the ids depend on. ``further``: tells other ids apart that they give.
    ``had_dropout``: dropout of merges, which they save, was switched off."""
    end = backend.token_to_id(end_token) if end_token is not None else None
    if end is None:
        why = (
            "no eos_token is named there"
            if end_token is None
            else f"its eos_token {end_token!r} is not in the vocabulary"
        )
        raise _problem(
            directory,
            "the tokenizer has no end of document",
            why,
            "Set eos_token in tokenizer_config.json",
        )
    # Saved settings of some other use: a document is never cut or filled up.
    backend.no_truncation()
    backend.no_padding()
    # By content: a directory that is copied or touched prepares nothing again.
    digest = xxhash.xxh3_128()
    for path in decisive:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(further.encode())
    templates = (directory / TEMPLATE_FOLDER).glob("*.jinja")
    names = (*_COPIED_FILES, *(f"{TEMPLATE_FOLDER}/{path.name}" for path in templates))
    files = {name: directory / name for name in names if (directory / name).is_file()}
    named = {name: _read_token(directory, name) for name in ("bos_token", "pad_token")}
    ids = {
        name: None if one is None else backend.token_to_id(one)
        for name, one in named.items()
    }
    # Data that was prepared with dropout of merges is other data: the identity differs from the one that
    # versions with dropout gave.
    prefix, suffix = FOLLOWED if further else "files-", "-no-dropout" if had_dropout else ""
    return BackendTokenizer(
        backend,
        end_of_document=end,
        identity=f"{prefix}{digest.hexdigest()}-{end}{suffix}",
        files=files,
        special_ids={name: one for name, one in ids.items() if one is not None},
    )


def _read_token(directory: Path, key: str) -> str | None:
    for name in _CONFIG_FILES:
        path = directory / name
        if not path.is_file():
            continue
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _problem(
                path, "is not valid JSON", str(error), "Copy the file again"
            ) from error
        # Either a text or an object with the text in it, by the version that saved it.
        token = config.get(key) if isinstance(config, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None


def _load_with_transformers(directory: Path) -> BackendTokenizer:
    """Older directories without a tokenizer.json: transformers converts them, offline and without
    their code."""
    found = [
        directory / name
        for name in (*_CONFIG_FILES, *_OTHER_FILES)
        if (directory / name).is_file()
    ]
    if not found:
        raise _problem(
            directory,
            "holds no tokenizer",
            f"there is no {_FILE}",
            "Name a directory written by save_pretrained",
        )
    auto = _load_auto(directory, found)
    had_dropout = _switch_off_dropout(getattr(auto, "backend_tokenizer", None))
    backend = _portable(auto, directory)
    return _build(
        backend,
        directory=directory,
        end_token=auto.eos_token,
        decisive=found,
        had_dropout=had_dropout,
    )


def _problem(path: Path, what: str, why: str, remedy: str) -> DataError:
    return DataError(Problem(str(path), what, f"{why} ({_FIELD}.path names it)", remedy))
