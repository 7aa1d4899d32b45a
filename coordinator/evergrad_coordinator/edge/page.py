"""A page of ``web/`` as one text: style, chart library and script inside, and a header that allows these."""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

_CHART = "uplot-1.6.32.min"
"""The vendored chart library, uPlot; its license is beside it."""
_OWN_HOSTS = ("localhost", "127.0.0.1", "[::1]")
"""Names under which a browser asks a loopback address of its own machine, also one that is forwarded."""


@dataclass(frozen=True)
class Page:
    """A page and the headers of its answer."""

    text: str
    headers: Mapping[str, str]


@cache
def build_page(name: str, *, needs_token: bool) -> Page:
    """Build the page ``name`` (``run`` or ``fleet``) from its files.

    A browser runs the scripts of exactly these files and asks nobody but this server for anything.
    """
    web = resources.files("evergrad_coordinator") / "web"

    def read(file: str) -> str:
        return (web / file).read_text("utf-8")

    style = read(f"{_CHART}.css") + read("page.css")
    scripts = (read(f"{_CHART}.js"), read("common.js"), read(f"{name}.js"))
    text = read(f"{name}.html").replace("<!-- style -->", f"<style>{style}</style>")
    # The page asks for a token first where it would be refused without one.
    text = text.replace("TOKEN_USE", "needed" if needs_token else "none")
    text = text.replace(
        "<!-- scripts -->", "".join(f"<script>{one}</script>" for one in scripts)
    )

    # By hashes, so that nothing else that ever got into the page could run.
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Page(text, headers)


def is_own_request(host: str, site: str) -> bool:
    """Whether a page that was itself loaded from a loopback address asks, as far as a browser says.

    ``host`` and ``site`` are the headers Host and Sec-Fetch-Site. Any site can make a browser ask a loopback
    address, also under a name of its own that it lets point there.
    """
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    return name in _OWN_HOSTS and site in ("", "none", "same-origin")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
    return f"'sha256-{digest}'"
