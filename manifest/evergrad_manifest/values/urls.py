"""Credentials in addresses: found, and hidden in texts that are about to be shown or written down. Pure."""

import re
from typing import Final

REDACTED: Final = "<redacted>"

_CREDENTIALS: Final = re.compile(r"(?<=://)[^/?#\s]+@")
"""User and password of a URL, up to the last ``@`` before its path, since a password may have one, too."""


def has_credentials(url: str) -> bool:
    """Whether a user or a password stands in ``url``."""
    return _CREDENTIALS.search(url) is not None


def hide_credentials(text: str) -> str:
    """Return ``text`` without the users and passwords of the URLs in it."""
    return _CREDENTIALS.sub(f"{REDACTED}@", text)
