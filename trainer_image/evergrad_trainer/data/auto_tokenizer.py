"""What transformers' AutoTokenizer makes of a directory, compared with what this program makes of it.

Several files of a directory decide the ids of a text, and the class that transformers chooses does, too. A
model that was trained on other ids than its users' programs make is of no use to them.
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
"""Keys of those files that hold several tokens."""
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
"""Texts in which readers of tokenizers are known to differ: digits, spaces, capitals, lines, apostrophes."""
COMBINED: Final = ("e\u0301 A\u030a \ufb01",)
"""Characters that some classes compose."""
_TOKENS_A_TEXT: Final = 64
"""Added tokens in one probe: some directories have thousands."""


@dataclass(frozen=True)
class TokenizerDifference:
    """A text of which two readers make other ids."""

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
    """transformers' tokenizer of a directory, without remote code. Raises whatever transformers raises."""
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
    )


def encoder_of(auto: Any) -> Encode:
    """How a tokenizer of transformers encodes a text without special tokens around it."""
    backend = getattr(auto, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        return lambda text: auto(text, add_special_tokens=False)["input_ids"]
    # As a call of it, but one text at a time: a batch, even of one text, would start the library's threads
    # in this process, which may fork later.
    backend.encode_special_tokens = bool(auto.split_special_tokens)
    backend.no_truncation()
    backend.no_padding()
    return lambda text: backend.encode(text, add_special_tokens=False).ids


def probe_texts(directory: Path) -> list[str]:
    """Texts that show differences: each added token of each file among others, and the usual traps."""
    tokens = list(dict.fromkeys(_tokens_of(directory)))
    texts = [*_TEXTS]
    # First by themselves, so that a message shows one token.
    texts += tokens[:_TOKENS_A_TEXT]
    for begin in range(0, len(tokens), _TOKENS_A_TEXT):
        some = tokens[begin : begin + _TOKENS_A_TEXT]
        texts += ["a".join(("", *some, "")), " b\n".join(("", *some, ""))]
    # Last: a difference in another one is the worse.
    return [*texts, *COMBINED]


def ids_or_none(encode: Encode, text: str) -> tuple[int, ...]:
    """The ids of ``text``; none if the reader refuses it, as a vocabulary without an unknown token does."""
    try:
        return tuple(encode(text))
    except Exception:  # noqa: BLE001 - tokenizers raises a bare Exception, and a class may lack a token
        return ()


def first_difference(
    ours: Encode, theirs: Encode, texts: Sequence[str]
) -> TokenizerDifference | None:
    """The first of ``texts`` of which two readers make other ids; None if there is none."""
    for text in texts:
        mine, its = ids_or_none(ours, text), ids_or_none(theirs, text)
        if mine != its:
            return TokenizerDifference(text, mine, its)
    return None


def listed_tokens(directory: Path) -> set[str]:
    """The tokens that a list of the directory's files has; not those that only a role such as ``eos_token``
    names, which may be misspelled."""
    return set(_tokens_of(directory, with_roles=False))


def _tokens_of(directory: Path, *, with_roles: bool = True) -> Iterator[str]:
    """The spelling of each added and special token that a file of the directory names."""
    for name in _FILES:
        path = directory / name
        try:
            content = (
                json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
            )
        except (OSError, ValueError):
            # Reported by whoever reads the file for its content.
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
