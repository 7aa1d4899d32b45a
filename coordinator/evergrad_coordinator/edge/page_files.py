"""A page of ``web/`` as one text: style, chart library and scripts inside, and a header that allows these.

The report of a run has its chart library, charts and policy from here, too.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

CHART_STYLES = ("uplot-1.6.32.min.css", "plot.css")
"""Style of charts: that of uPlot, the vendored chart library, whose license is beside it, and ours."""
CHART_SCRIPTS = ("uplot-1.6.32.min.js", "common.js", "plot.js")
"""Scripts that draw charts, in their order: uPlot, what all pages share, and a chart over both."""
_SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "run": (*CHART_SCRIPTS, "stream.js", "run.js"),
    "fleet": ("common.js", "stream.js", "fleet.js"),
}
"""Scripts of each page. The one of all runs has no chart."""
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
    style = "".join(map(read_web, (*CHART_STYLES, "page.css")))
    scripts = [read_web(file) for file in _SCRIPTS[name]]
    text = read_web(f"{name}.html").replace("<!-- style -->", f"<style>{style}</style>")
    # The page asks for a token first where it would be refused without one.
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
    """Read a file of ``web/``."""
    return (resources.files("evergrad_coordinator") / "web" / file).read_text("utf-8")


def build_policy(scripts: Sequence[str], style: str) -> str:
    """Build the policy of a page whose elements have these texts, and that asks nobody for anything.

    By hashes, so that nothing else that ever got into the page could run.
    """
    allowed = " ".join(map(_hash, scripts)) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


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
