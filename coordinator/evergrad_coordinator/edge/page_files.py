"""Builds a page of ``web/`` as one text with its style, chart library and scripts, and its policy header.

The report of a run uses the chart library, the chart scripts and the policy of this module, too.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

CHART_STYLES = ("uplot-1.6.32.min.css", "plot.css")
"""Style sheets of charts: of uPlot, the vendored chart library (its license is next to it), and our own."""
CHART_SCRIPTS = ("uplot-1.6.32.min.js", "common.js", "plot.js")
"""Scripts that draw charts, in their order: uPlot, code that all pages share, and the charts themselves."""
_SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "run": (*CHART_SCRIPTS, "stream.js", "run.js"),
    "fleet": ("common.js", "stream.js", "fleet.js"),
}
"""Scripts of each page. The page of all runs has no chart."""
_OWN_HOSTS = ("localhost", "127.0.0.1", "[::1]")
"""Host names of requests that a browser sends to a loopback address, including forwarded ports."""


@dataclass(frozen=True)
class Page:
    """The text of a page, and the headers of its HTTP answer."""

    text: str
    headers: Mapping[str, str]


@cache
def build_page(name: str, *, needs_token: bool) -> Page:
    """Build the page ``name`` (``run`` or ``fleet``) from its files.

    A browser runs only the scripts of these files, and the page sends requests only to this server.

    ``needs_token``: whether the server requires the token for the page's data.
    """
    style = "".join(map(read_web, (*CHART_STYLES, "page.css")))
    scripts = [read_web(file) for file in _SCRIPTS[name]]
    text = read_web(f"{name}.html").replace("<!-- style -->", f"<style>{style}</style>")
    # If the server requires the token, the page asks the user for it first.
    text = text.replace("TOKEN_USE", "needed" if needs_token else "none")
    text = text.replace(
        "<!-- scripts -->", "".join(f"<script>{one}</script>" for one in scripts)
    )
    policy = f"{build_policy(scripts, style)}; connect-src 'self'; frame-ancestors 'none'"
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Page(text, headers)


def read_web(file: str) -> str:
    """Return the text of a file of ``web/``."""
    return (resources.files("evergrad_coordinator") / "web" / file).read_text("utf-8")


def build_policy(scripts: Sequence[str], style: str) -> str:
    """Build the Content-Security-Policy of a page with these scripts and this style and without requests.

    The policy has the hashes of the texts, so that the browser runs no other script that is injected.
    """
    allowed = " ".join(map(_hash, scripts)) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def is_own_request(host: str, site: str) -> bool:
    """Return whether a request comes from a page that was itself loaded from a loopback address.

    ``host`` and ``site`` are the headers Host and Sec-Fetch-Site. The check is needed because any web site
    can make a browser send requests to a loopback address, even through its own host name that resolves to
    it.
    """
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    return name in _OWN_HOSTS and site in ("", "none", "same-origin")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
    return f"'sha256-{digest}'"
