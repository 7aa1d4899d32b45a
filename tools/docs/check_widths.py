"""Opens every page of the built site at three widths, and finds text that a reader cannot reach.

A page may not scroll sideways, and nothing in it may be cut off. Long lines of a file or a command wrap; a
table or a block of output that is wider than the page scrolls in its own container. ``make docs`` runs this
program after the build:

    PYTHONPATH=tests:tests/integration/helpers python tools/docs/check_widths.py build/site

With ``--pictures FOLDER`` it also writes a picture of the home page at each width. The exit code is 1 if a
page has a problem. If Chromium is not installed, the program checks nothing; in CI it then exits with 1.
"""

import argparse
import contextlib
import functools
import http
import http.server
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from browser import Browser, open_browser

WIDTHS: Final = (390, 820, 1400)
"""Widths of the window in pixels: a phone, a tablet, a laptop."""
EMPTY_PAGE: Final = "/frame"
"""Path of the page whose frame shows the pages of the site."""
BINARIES: Final = ("chromium", "chromedriver")
FIND_PROBLEMS: Final = """
  const name = (element) => [element.tagName.toLowerCase(), ...element.classList].join('.');
  const start = (element) => (element.textContent || '').trim().slice(0, 60);
  const show = (element) => `${name(element)} ${JSON.stringify(start(element))}`;
  const parts = 'pre, pre > code, table, th, td, img, svg, p, li, h1, h2, h3, h4';

  function findProblem(element, root) {
    const box = element.getBoundingClientRect(), style = getComputedStyle(element);
    const hidden = element.scrollWidth - element.clientWidth;
    if (!box.width || style.display === 'inline') return null;
    const scrolls = (flow) => flow === 'auto' || flow === 'scroll';
    if (hidden > 1 && !scrolls(style.overflowX) && style.overflowX !== 'visible')
      return `${hidden} px are cut off: ${show(element)}`;

    // The right edge of what the element draws, as far as the elements around it show or scroll it.
    let right = box.right + (style.overflowX === 'visible' ? Math.max(hidden, 0) : 0);
    for (let outer = element.parentElement; outer !== root; outer = outer.parentElement) {
      const flow = getComputedStyle(outer).overflowX, excess = right - outer.getBoundingClientRect().right;
      if (flow === 'visible' || excess <= 1) continue;
      if (!scrolls(flow)) return `${Math.round(excess)} px are cut off by ${name(outer)}: ${show(element)}`;
      right -= excess;
    }
    const excess = right - root.clientWidth;
    return excess > 1 ? `ends ${Math.round(excess)} px outside of the window: ${show(element)}` : null;
  }

  function findProblems(root) {
    const problems = [];
    if (root.scrollWidth > root.clientWidth)
      problems.push(`scrolls sideways: the page is ${root.scrollWidth} px wide`);
    for (const block of root.querySelectorAll(WRAPPED))
      if (block.scrollWidth > block.clientWidth + 1)
        problems.push(`must be scrolled, but should wrap: ${show(block)}`);
    for (const element of root.querySelectorAll('article :is(' + parts + ')'))
      problems.push(findProblem(element, root));
    return problems.filter(Boolean);
  }

  // A page is loaded once, in a frame that is then given each width: media queries follow the frame.
  let frame = document.querySelector('iframe');
  if (!frame) {
    frame = document.body.appendChild(document.createElement('iframe'));
    frame.style.cssText = 'border: 0; position: absolute; height: 900px';
  }
  const loaded = new Promise((resolve) => { frame.onload = resolve; });
  frame.src = PAGE;
  await loaded;
  // A transition would be measured half-way.
  const still = frame.contentDocument.createElement('style');
  still.textContent = '* { transition: none !important; animation: none !important }';
  frame.contentDocument.head.append(still);
  const found = [];
  for (const width of WIDTHS) {
    frame.style.width = width + 'px';
    for (const problem of findProblems(frame.contentDocument.documentElement))
      found.push(`at ${width} px: ${problem}`);
  }
  return found;
"""
"""Compares the right edge of each part of a page with the edges of the elements around the part."""
WRAPPED: Final = ".highlight:not(.language-text) code"
"""Blocks of code whose long lines wrap. Other blocks show output in columns, and scroll."""


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine, and yield the URL of its root."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != EMPTY_PAGE:
                super().do_GET()
                return
            self.send_response(http.HTTPStatus.OK)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><body>")

        def log_message(self, *arguments: Any) -> None:
            """Print no line for each request."""

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def check_page(browser: Browser, url: str) -> list[str]:
    """Return the problems of one page, each with its width."""
    values = {"PAGE": url, "WIDTHS": WIDTHS, "WRAPPED": WRAPPED}
    constants = "".join(
        f"const {name} = {json.dumps(value)};\n" for name, value in values.items()
    )
    return list(browser.run(f"return (async () => {{{constants}{FIND_PROBLEMS}}})()"))


def check_site(site: Path, pictures: Path | None) -> int:
    """Print the problems of all pages, and return the exit code."""
    pages = sorted(page.relative_to(site).as_posix() for page in site.rglob("*.html"))
    if not pages:
        print(f"{site}: has no pages; nothing can be checked. Run make docs.")
        return 1

    problems = 0
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        open_browser(Path(folder)) as browser,
        serve(site) as root,
    ):
        # The search's index is large, and each page would read it.
        browser.send_command("Network.enable")
        browser.send_command("Network.setBlockedURLs", urls=["*/search_index.json"])
        browser.open(root + EMPTY_PAGE.lstrip("/"))
        for page in pages:
            for problem in check_page(browser, root + page):
                print(f"{page}: {problem}")
                problems += 1
        if pictures is not None:
            take_pictures(browser, root, pictures)
        browser.open("about:blank")

    seconds = time.monotonic() - started
    widths = ", ".join(str(width) for width in WIDTHS)
    print(f"{len(pages)} pages at {widths} px: {problems} problems, {seconds:.0f} s")
    return int(problems > 0)


def take_pictures(browser: Browser, url: str, folder: Path) -> None:
    """Write a picture of one page at each width."""
    for width in WIDTHS:
        browser.open(url)
        browser.view(width=width, scheme="light").save(folder / f"site-{width}.png")


def main(arguments: list[str]) -> int:
    """Check the site in the folder that the arguments name."""
    parser = argparse.ArgumentParser(description="Check the widths of the built site.")
    parser.add_argument("site", type=Path, help="folder with the built site")
    parser.add_argument(
        "--pictures", type=Path, help="folder for pictures of the home page"
    )
    options = parser.parse_args(arguments)

    missing = [binary for binary in BINARIES if shutil.which(binary) is None]
    if missing:
        print(f"{', '.join(missing)}: not on PATH; the widths of the site are not checked.")
        return int(bool(os.environ.get("CI")))
    return check_site(options.site, options.pictures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
