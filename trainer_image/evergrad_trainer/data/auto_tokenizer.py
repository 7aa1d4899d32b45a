"""Compares the ids of transformers' AutoTokenizer with the ids of this program for the same directory.

The ids of a text depend on several files of the directory, and on the class that transformers selects. A
model is not usable if it was trained with other ids than its users' programs produce.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer as Backend

Encode = Callable[[str], Sequence[int]]
_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_LISTS: Final = (
    "added_tokens",
    "added_tokens_decoder",
    "additional_special_tokens",
    "extra_special_tokens",
)
"""Keys in these files that contain several tokens."""
_TEXTS: Final = (
    "The quick brown fox jumps over the lazy dog.",
    " a leading space",
    "   several  spaces   inside and behind  ",
    "\n",
    "\n\nlines\n \n\tand tabs\r\n",
    "0 1 23 456 7890 1,234.56 2023-01-31 100000",
    "CAPITALS Mixed camelCase snake_case",
    "don't I'LL we're it's",
    "caf\u00e9 na\u00efve \u4f60\u597d \U0001f642 \u0416",
    "def f(x):\n    return x**2  # {}[]<>",
    "x",
    " ",
)
"""Texts for which readers of tokenizers are known to differ: digits, spaces, capitals, lines, apostrophes."""
COMBINED: Final = ("e\u0301 A\u030a \ufb01",)
"""Texts with characters that some classes normalise to composed characters."""
_TOKENS_A_TEXT: Final = 64
"""Number of added tokens in one probe text. Some directories have thousands of added tokens."""


@dataclass(frozen=True)
class TokenizerDifference:
    """A text for which two readers give different ids. ``ours`` and ``theirs`` are these ids."""

    text: str
    ours: tuple[int, ...]
    theirs: tuple[int, ...]

    def __str__(self) -> str:
        shown = json.dumps(self.text[:60], ensure_ascii=False)
        return f"{shown} is {_show(self.ours)} here and {_show(self.theirs)} with AutoTokenizer"


def _show(ids: Sequence[int]) -> str:
    if not ids:
        return "an error"
    text = ", ".join(map(str, ids[:8]))
    return f"[{text}{', …' if len(ids) > 8 else ''}]"


def load_auto(directory: Path) -> Any:
    """Load a directory with AutoTokenizer, without remote code. Exceptions of transformers are not caught."""
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
    )


def encoder_of(auto: Any) -> Encode:
    """Return a function that encodes a text like a transformers tokenizer, without adding special tokens."""
    backend = getattr(auto, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        return lambda text: auto(text, add_special_tokens=False)["input_ids"]
    # Call the backend instead of the tokenizer: the tokenizer encodes batches, even for a single text, which
    # would start the library's threads in this process, and the process may fork later.
    backend.encode_special_tokens = bool(auto.split_special_tokens)
    backend.no_truncation()
    backend.no_padding()
    return lambda text: backend.encode(text, add_special_tokens=False).ids


def probe_texts(directory: Path) -> list[str]:
    """Return texts that show differences: known difficult texts, and each added token of the files."""
    tokens = list(dict.fromkeys(_tokens_of(directory)))
    texts = [*_TEXTS]
    # First probe single tokens, so that a message shows only one token.
    texts += tokens[:_TOKENS_A_TEXT]
    for begin in range(0, len(tokens), _TOKENS_A_TEXT):
        some = tokens[begin : begin + _TOKENS_A_TEXT]
        texts += ["a".join(("", *some, "")), " b\n".join(("", *some, ""))]
    # Probe these texts last, because a difference in another text is more serious.
    return [*texts, *COMBINED]


def ids_or_none(encode: Encode, text: str) -> tuple[int, ...]:
    """Return the ids of ``text``; an empty tuple if the reader refuses it.

    For example, a vocabulary without an unknown token refuses some texts.
    """
    try:
        return tuple(encode(text))
    except Exception:  # noqa: BLE001 - tokenizers raises a bare Exception, and a class may lack a token
        return ()


def first_difference(
    ours: Encode, theirs: Encode, texts: Sequence[str]
) -> TokenizerDifference | None:
    """Return the first difference between two readers on ``texts``; None if all ids are equal."""
    for text in texts:
        mine, its = ids_or_none(ours, text), ids_or_none(theirs, text)
        if mine != its:
            return TokenizerDifference(text, mine, its)
    return None


def listed_tokens(directory: Path) -> set[str]:
    """Return the tokens in the lists of the directory's files.

    Tokens that are named only by a role, such as ``eos_token``, are not included: they may be misspelled.
    """
    return set(_tokens_of(directory, with_roles=False))


def _tokens_of(directory: Path, *, with_roles: bool = True) -> Iterator[str]:
    """Yield the spelling of each added or special token in the files of the directory."""
    for name in _FILES:
        path = directory / name
        try:
            content = (
                json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
            )
        except (OSError, ValueError):
            # Skip the file: the code that reads its content reports the error.
            continue
        if not isinstance(content, dict):
            continue
        if name == "added_tokens.json":
            yield from content
            continue
        for key, value in content.items():
            if key.endswith("_token") and with_roles:
                yield from _spellings([value])
            elif key in _LISTS:
                yield from _spellings(value)


def _spellings(value: Any) -> Iterator[str]:
    values = value.values() if isinstance(value, dict) else value
    for one in (
        values if isinstance(values, list | tuple) or isinstance(value, dict) else ()
    ):
        text = one.get("content") if isinstance(one, dict) else one
        if isinstance(text, str) and text:
            yield text
