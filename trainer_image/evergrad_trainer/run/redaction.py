"""Removal of secrets and of the home directory from texts that are about to be written down.

Pure but for the home directory's name.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path, PurePath

from evergrad_manifest.values.urls import REDACTED, hide_credentials

_SECRET_WORDS = frozenset(
    {
        "password",
        "passwd",
        "passphrase",
        "token",
        "secret",
        "secrets",
        "credential",
        "credentials",
        "apikey",
    }
)
_SECRET_PAIRS = frozenset(
    {
        ("api", "key"),
        ("access", "key"),
        ("private", "key"),
        ("secret", "key"),
        ("auth", "key"),
    }
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def is_secret(key: str) -> bool:
    """Tell whether a key names a secret: ``hf_token`` and ``spec.registryPassword`` do, ``tokenizer`` and
    ``horizon.tokens`` do not."""
    # Whole words: "tokenizer" begins with a secret's name, and is none.
    words = [word.lower() for word in _WORD.findall(key)]
    pairs = set(pairwise(words))
    return bool(_SECRET_WORDS & set(words)) or bool(_SECRET_PAIRS & pairs)


def redact_command(words: Sequence[str]) -> list[str]:
    """Return the words of a command without the values of secret keys and without credentials in URLs; the
    home directory becomes ~.

    Covers ``--set key=value``, ``--set=key=value``, ``--key=value``, ``--key value``, ``KEY=value`` and
    structured values that name a secret inside.
    """
    redacted: list[str] = []
    # ``--key value`` are two words: the first decides about the second.
    is_value_secret = False
    for word in words:
        prefix = "--set=" if word.startswith("--set=") else ""
        key, equals, value = word.removeprefix(prefix).partition("=")
        # A structured value may hold a secret under a key of its own.
        names_secret = is_secret(key) or (value.startswith(("{", "[")) and is_secret(value))
        if is_value_secret and not word.startswith("--"):
            redacted.append(REDACTED)
        elif equals and names_secret:
            redacted.append(f"{prefix}{key}={REDACTED}")
        else:
            redacted.append(hide_home(hide_credentials(word)))
        is_value_secret = word.startswith("-") and not equals and is_secret(word)
    return redacted


def public_path(path: Path | str) -> str:
    """Return ``path`` as it may be published: relative ones with ``/``; of absolute ones, and of those that
    lead upwards, the name alone."""
    pure = PurePath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        return pure.name if pure.name != ".." else ""
    return pure.as_posix()


def hide_home(text: str) -> str:
    """Return ``text`` with the home directory written as ~."""
    home = str(Path.home()).rstrip("/")
    # A home at the root is every path's beginning, and nobody's name.
    if not home:
        return text
    return re.sub(rf"{re.escape(home)}(?=/|$|[:,;\s'\"])", "~", text)
