"""A run's token: the secret that each client must present before it may change the run."""

import contextlib
import hmac
import os
import secrets
from pathlib import Path

from evergrad_common.publishing import publish_once

_NUM_BYTES = 32


def new_token() -> str:
    """Return a random token: 64 hex digits."""
    return secrets.token_hex(_NUM_BYTES)


def is_token(said: str, token: str) -> bool:
    """Return whether ``said`` is the token. The time does not depend on how much of it is correct.

    An empty token matches nothing.
    """
    # JSON can escape half a character. Without ``surrogatepass``, encoding it would raise an error.
    return bool(token) and hmac.compare_digest(
        said.encode("utf-8", "surrogatepass"), token.encode()
    )


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises OSError or UnicodeDecodeError, and ValueError if the file is empty.
    """
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise ValueError("it is empty")
    return token


def obtain_token(path: Path) -> str:
    """Return the token in a file. If the file does not exist, create it with a new token that only its owner
    can read.

    Raises the errors of ``read_token``, and OSError.
    """
    # Read first, because the folder of a mounted Secret is not writable.
    with contextlib.suppress(FileNotFoundError):
        return read_token(path)
    # Write the file completely before it gets its name, so that a kill or a full disk does not leave an empty
    # file that every later start refuses.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(6)}")
    try:
        file = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        with open(file, "w", encoding="ascii") as stream:
            stream.write(new_token() + "\n")
            stream.flush()
            os.fsync(file)
        # Publish only if the name is free, so that two processes that start at the same time use the same
        # token.
        publish_once(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return read_token(path)
