"""A run's token: the secret that everything which may change the run has to show."""

import hmac
import os
import secrets
from pathlib import Path

_NUM_BYTES = 32


def new_token() -> str:
    """A random token."""
    return secrets.token_hex(_NUM_BYTES)


def is_token(said: str, token: str) -> bool:
    """Whether ``said`` is the token, in a time that does not depend on how much of it is right.

    An empty token fits nothing.
    """
    # Half a character, which JSON can escape, would be an error of the codec without ``surrogatepass``.
    return bool(token) and hmac.compare_digest(
        said.encode("utf-8", "surrogatepass"), token.encode()
    )


def read_token(path: Path) -> str:
    """The token in a file.

    Raises OSError or UnicodeDecodeError, and ValueError for a file that holds none.
    """
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise ValueError("it is empty")
    return token


def obtain_token(path: Path) -> str:
    """The token in a file; where there is no such file, a new one that only its owner can read.

    Raises as ``read_token``.
    """
    # Made and opened in one step: two processes that start at once agree on one token.
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token(path)
    # A folder that cannot be written, with the file in it: a mounted Secret.
    except OSError:
        if path.exists():
            return read_token(path)
        raise
    token = new_token()
    with open(file, "w", encoding="ascii") as stream:
        stream.write(token + "\n")
    return token
