"""How text becomes token ids."""

from collections.abc import Iterator
from typing import Final, Literal

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import LocalPath, Section
from evergrad_manifest.model.view import View
from evergrad_manifest.training.common import TRAINING


class Tokenizer(Section):
    """How text becomes token ids."""

    type: Literal["byte", "transformers"] = "byte"
    """``byte``: UTF-8 bytes 0-255 plus 256 for the end of a document.

    ``transformers``: a local tokenizer directory.
    """
    path: LocalPath | None = None
    """Directory of the tokenizer. Required for the type ``transformers``, and refused for ``byte``."""


def check_tokenizer(view: View) -> Iterator[Problem]:
    """Check that a transformers tokenizer has a directory, and that the byte tokenizer has none."""
    path, kind = f"{TRAINING}.tokenizer.path", view.get(f"{TRAINING}.tokenizer.type")
    if kind == "transformers" and not view.is_given(path):
        yield Problem(
            path,
            "missing",
            "a tokenizer of type transformers is read from a local directory",
            "Add its path",
        )
    if kind == "byte" and view.is_given(path):
        why = "the byte tokenizer has no files"
        yield Problem(
            path,
            "has no meaning with type byte",
            why,
            "Remove it, or set type: transformers",
        )


RULES: Final = (check_tokenizer,)
