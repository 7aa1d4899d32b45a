"""Finds credentials in URLs, and hides them in texts before they are shown or stored. Pure."""

import re
from typing import Final

REDACTED: Final = "<redacted>"

_CREDENTIALS: Final = re.compile(r"(?<=://)[^/?#\s]+@")
"""User and password of a URL, up to the last ``@`` before its path, because a password may contain ``@``."""


def has_credentials(url: str) -> bool:
    """Return whether ``url`` contains a user or a password."""
    return _CREDENTIALS.search(url) is not None


def hide_credentials(text: str) -> str:
    """Return ``text`` without the users and passwords of the URLs in it."""
    return _CREDENTIALS.sub(f"{REDACTED}@", text)
