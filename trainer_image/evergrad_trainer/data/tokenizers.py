"""Tokenizers: the built-in byte tokenizer, and transformers tokenizers from a local directory.

Remote code is never run.
"""

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
"""The spelling of the end of a document in the transformers form of the byte tokenizer."""

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
"""Prefix of the identity of a tokenizer for which AutoTokenizer gives other ids than its tokenizer.json."""
_GENERAL_CLASS: Final = "PreTrainedTokenizerFast"
SAVE_AGAIN: Final = (
    "Correct the directory's files, or save the tokenizer again with save_pretrained as a "
    f"{_GENERAL_CLASS}, which needs no code of its own"
)
"""The remedy for a directory that AutoTokenizer cannot load."""
_LONGEST_ERROR: Final = 300
"""Maximum number of characters of a transformers error in a message. Some errors list all classes."""


class TextTokenizer(Protocol):
    """Converts text to ids and back. ``identity`` changes if the ids of any text may change."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def end_of_document(self) -> int:
        """The id that follows every document."""

    @property
    def identity(self) -> str:
        """A text that is equal for two tokenizers only if they give equal ids."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest of uint16 and uint32 that holds every id."""

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of tokens that are matched in a text by their spelling, for example the end of a turn."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Ids of ``bos_token`` and ``pad_token``, by name. A token that the tokenizer lacks is absent."""

    @property
    def auto_error(self) -> str:
        """The reason why AutoTokenizer cannot load the directory, so that only its tokenizer.json is read.

        Empty if AutoTokenizer can load it, or if there is no directory.
        """

    def encode_many(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the ids of each text, without special tokens around them."""

    def encode_documents(
        self, texts: Sequence[str]
    ) -> tuple[Tokens, npt.NDArray[np.int64]]:
        """Return the ids of all texts in one array, and the number of ids of each text.

        Each text is followed by the end id, which its number of ids includes.
        """

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text, and the characters [start, end) of each id.

        No special tokens are added around the text. A special token that is spelled in the text gets its id.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of some ids.

        Ends of documents are left out. Ids without a text, which a model with a larger vocabulary can
        produce, are left out too.
        """

    def save_pretrained(self, directory: Path) -> None:
        """Write the tokenizer to a directory, from which transformers' AutoTokenizer gives the same ids."""


def load_tokenizer(config: Tokenizer, base_directory: Path) -> TextTokenizer:
    """Load the tokenizer that a manifest names. Its path is relative to ``base_directory``.

    Raises DataError if the path is missing or the directory cannot be used.
    """
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
    """Return uint16 if it holds every id below ``vocab_size``, else uint32; little-endian, as on disk.

    For example, a vocabulary of 50,257 ids fits in uint16 and a vocabulary of 128,256 ids needs uint32.
    """
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def describe_reader(tokenizer: TextTokenizer) -> dict[str, str]:
    """Describe the reader that produced the ids, for the record of a run."""
    if tokenizer.auto_error:
        return {"reader": f"{_FILE} alone", "autoTokenizer": tokenizer.auto_error}
    return {"reader": "AutoTokenizer"}


def replace_lone_surrogates(text: str) -> str:
    """Replace each lone surrogate with U+FFFD.

    JSON can escape half of a surrogate pair, which is not a character and cannot be encoded as UTF-8.
    """
    return _LONE_SURROGATE.sub("\ufffd", text)


class ByteTokenizer:
    """The built-in tokenizer: ids 0-255 are UTF-8 bytes, and id 256 is the end of a document."""

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
        # Join all documents into one array. The separator, a byte that no text contains, becomes the end id
        # and marks the lengths.
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
            # Every byte of a character except the first one begins with the bits 10.
            starts: list[int] = (np.cumsum((data & 0xC0) != 0x80) - 1 + place).tolist()
            offsets += [(start, start + 1) for start in starts]
            ids += data.tolist()
            place += len(part)
        return ids, offsets

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(one for one in ids if one < BYTE_END).decode("utf-8", errors="replace")

    def save_pretrained(self, directory: Path) -> None:
        """Write a BPE tokenizer without merges over GPT-2's printable names of the 256 bytes."""
        # The id of a byte is the byte itself, and the end of a document gets the next free id, 256. The names
        # follow a published format (GPT-2's ``bytes_to_unicode``), which other tools read: the name of a
        # printable byte is its own character, and the other bytes are named by the characters from U+0100.
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

    ``files``: the files that ``save_pretrained`` copies, by their name in the new directory. ``in_batches``:
    encode many texts per call, which is about 20% faster. Use it only if the library's threads are switched
    off, as in the helper processes of ``prepare``.
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
        # Append the end id here: an end token added by the library depends on settings in the tokenizer file.
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
        # Remove dropout of merges: a tokenizer with dropout would give other ids than the trained ids.
        stored = directory / _FILE
        if stored.is_file():
            value = json.loads(stored.read_text(encoding="utf-8"))
            model = value.get("model")
            if isinstance(model, dict) and model.get("dropout"):
                model["dropout"] = None
                stored.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")

    def to_json(self) -> str:
        """Return the whole tokenizer in the format of ``tokenizer.json``."""
        return str(self._backend.to_str())

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            return self._encode(texts)
        except TypeError:
            # The library raises TypeError for a str that cannot be encoded as UTF-8.
            return self._encode([replace_lone_surrogates(text) for text in texts])

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if not self._in_batches:
            # Encode texts one at a time: a batch starts the library's threads, and this process may fork.
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
    """Load the tokenizer of a transformers directory. It is cached until the files of the directory change.

    Raises DataError, with the directory and a remedy, if there is no usable tokenizer.
    """
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise _problem(
            directory,
            what,
            "a transformers tokenizer is a local directory",
            "Check the path; nothing is ever downloaded",
        )
    # Cache by the state of the files: preflight, preparation and the task each load the tokenizer, and
    # loading a large one takes seconds.
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
    """Load the tokenizer. ``stamps`` is only a cache key: name, inode, size and time of each file."""
    path = directory / _FILE
    if not path.is_file():
        return _load_with_transformers(directory)
    try:
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _problem(path, "cannot be read", str(error), "Copy the file again") from error
    except Exception as error:
        # The library raises a plain Exception for a file that it cannot use.
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
    # Skip AutoTokenizer if the end token is misspelled: transformers would add it as a new token. The
    # misspelled token is refused below.
    if is_known or end_token in listed_tokens(directory):
        try:
            auto = load_auto(directory)
        except Exception as error:  # noqa: BLE001 - transformers raises whatever its classes raise
            # Use tokenizer.json alone, as other programs do. Preflight logs a warning.
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
    """Return the first line of a transformers error, with the name of ``directory`` in place of its path."""
    line = str(error).strip().partition("\n")[0].replace(str(directory), directory.name)
    line = line[:_LONGEST_ERROR].rstrip(" .")
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _follow_auto(backend: Backend, auto: Any, directory: Path) -> tuple[Backend, str]:
    """Return ``backend``, or the tokenizer of AutoTokenizer if it gives other ids for a probe text.

    ``auto``: the tokenizer that AutoTokenizer loads from the directory. Also returns a digest of its ids,
    which distinguishes them from the ids of ``tokenizer.json`` alone; the digest is empty if the ids are the
    same. Raises DataError if only Python code of transformers can produce the ids.
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
    """Return a transformers tokenizer as a tokenizer of the tokenizers library, for helper processes.

    Raises DataError if it has no such form, or if only Python code of transformers can produce its ids.
    """
    remedy = f"Load it with transformers once and save it again with save_pretrained, which writes a {_FILE}"
    backend = getattr(auto, "backend_tokenizer", None)
    # Helper processes of preparation receive the tokenizer as JSON. A tokenizer in Python has no JSON form.
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
    """Compare a tokenizer with the tokenizer that AutoTokenizer loads from a directory it was saved in.

    The directory's ``config.json``, if it has one, determines the class that transformers loads. If the ids
    of a probe text differ, the files are written again for the general class, and the comparison is repeated.
    Returns the remaining difference, or None. Raises DataError if transformers cannot load the directory.
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
    # Name transformers' general class, which uses tokenizer.json without changes.
    (directory / _FILE).write_text(tokenizer.to_json(), encoding="utf-8")
    path = directory / _CONFIG_FILES[0]
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    config["tokenizer_class"] = _GENERAL_CLASS
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return compare()


def problem_of_difference(difference: TokenizerDifference) -> Problem:
    """Return the problem that transformers gives other ids for a text in an export."""
    return Problem(
        _FIELD,
        f"transformers would give other ids in an export: {difference}",
        "it chooses a tokenizer by the model_type in config.json, whatever the files say",
        "Train with a tokenizer of this architecture, or with an architecture such as llama",
    )


def _load_auto(directory: Path, found: Sequence[Path]) -> Any:
    """Call ``load_auto``, and raise DataError if it fails.

    ``found``: the files that it reads, for the message.
    """
    try:
        return load_auto(directory)
    except Exception as error:
        # The first byte distinguishes a SentencePiece model from a tiktoken text file of the same name.
        pieces = [
            path.name
            for path in found
            if path.name in _SENTENCE_PIECE_FILES and path.read_bytes()[:1] == b"\n"
        ]
        if pieces and importlib.util.find_spec("sentencepiece") is None:
            # transformers tries its readers in turn, and its error names only the package of the last reader.
            raise _problem(
                directory,
                f"contains a SentencePiece model ({pieces[0]}) and no {_FILE}",
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
    """Switch off dropout of merges, which some training recipes save. Returns whether it was on.

    With dropout, every call gives other ids for the same text, so ids could not be compared.
    """
    model = getattr(backend, "model", None)
    if not getattr(model, "dropout", None):
        return False
    model.dropout = None  # type: ignore[union-attr]
    return True


def load_json(text: str, *, end_of_document: int, identity: str) -> BackendTokenizer:
    """Load a tokenizer from the text of ``to_json``, in a helper process without the library's threads."""
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
    """Build the tokenizer and its identity. Raises DataError if it has no end of document.

    ``decisive``: the files that the ids depend on. ``further``: a digest of ids that these files do not
    determine alone. ``had_dropout``: whether dropout of merges was switched off.
    """
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
    # Reset saved settings of other uses: a document is never truncated or padded.
    backend.no_truncation()
    backend.no_padding()
    # Hash the content, so that data is not prepared again after the directory is copied or touched.
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
    # Earlier versions prepared data with dropout of merges, which gives other ids. The suffix makes the
    # identity differ from the identity of such data.
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
        # The token is a text or an object that contains the text, depending on the version that saved it.
        token = config.get(key) if isinstance(config, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None


def _load_with_transformers(directory: Path) -> BackendTokenizer:
    """Load an older directory without a tokenizer.json: transformers converts it.

    The conversion works offline and runs no code from the directory.
    """
    found = [
        directory / name
        for name in (*_CONFIG_FILES, *_OTHER_FILES)
        if (directory / name).is_file()
    ]
    if not found:
        raise _problem(
            directory,
            "contains no tokenizer",
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
