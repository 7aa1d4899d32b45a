"""Removes secrets and the home directory from texts before they are stored.

Pure, except that it reads the name of the home directory.
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
    """Return whether a key names a secret. For example, ``hf_token`` and ``spec.registryPassword`` do;
    ``tokenizer`` and ``horizon.tokens`` do not."""
    # Compare whole words, because "tokenizer" begins with "token" but is not a secret.
    words = [word.lower() for word in _WORD.findall(key)]
    pairs = set(pairwise(words))
    return bool(_SECRET_WORDS & set(words)) or bool(_SECRET_PAIRS & pairs)


def redact_command(words: Sequence[str]) -> list[str]:
    """Return the words of a command without values of secret keys and credentials in URLs; the home directory
    becomes ~.

    Covers ``--set key=value``, ``--set=key=value``, ``--key=value``, ``--key value``, ``KEY=value`` and
    structured values that name a secret inside.
    """
    redacted: list[str] = []
    # ``--key value`` has two words; the first decides whether the second is secret.
    is_value_secret = False
    for word in words:
        prefix = "--set=" if word.startswith("--set=") else ""
        key, equals, value = word.removeprefix(prefix).partition("=")
        # A structured value may contain a secret under a nested key.
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
    """Return ``path`` in a form that is safe to publish: a relative path with ``/``; only the name of a path
    that is absolute or contains ``..``."""
    pure = PurePath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        return pure.name if pure.name != ".." else ""
    return pure.as_posix()


def hide_home(text: str) -> str:
    """Return ``text`` with the home directory written as ~."""
    home = str(Path.home()).rstrip("/")
    # If the home directory is the root, it contains no user name and every path begins with it.
    if not home:
        return text
    return re.sub(rf"{re.escape(home)}(?=/|$|[:,;\s'\"])", "~", text)
