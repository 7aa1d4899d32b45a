"""Takes the pictures of the live pages in docs/images: a run in light, dark and on a telephone, and all runs.

The pages are the real ones in a headless Chromium, with runs whose time is the program's (``page_site``, the
helper of the pages' tests). The pictures are not compared byte by byte, since fonts differ between machines:
make them anew after a change of a page, and look at them.

    PYTHONPATH=tests:tests/integration/helpers:tests/unit/coordinator python tools/docs/page_pictures.py
"""

import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from browser import Browser, open_browser
from page_site import FLEET, Site, fleet_page
from PIL import Image

FOLDER = Path(__file__).resolve().parents[2] / "docs/images"
RUN_SECONDS = 1320
"""Age of the run when its picture is taken."""
LOST_AT = 420
"""Second in which its nodes 1 and 2 are lost."""
JOINED_AT = {1: 450, 2: 500}
"""Second in which each of them is back."""
PATIENCE_SECONDS = 100.0
VIEWS = (
    ("live-page", 1180, "light", 4000),
    ("live-page-dark", 1180, "dark", 1000),
    ("live-page-phone", 390, "light", 1500),
)
"""Name, width, scheme and greatest height of each picture of a run."""
NUM_COLORS = 256


def pass_time(site: Site) -> None:
    """Let a run lose two of three nodes, wait for one, and train with three again."""
    cluster = site.cluster
    num_told = 0
    # Its nodes train at the page's pace of a step a second, and not at the simulation's own.
    with mock.patch.object(cluster, "train"):
        for second in range(RUN_SECONDS):
            if second == LOST_AT:
                cluster.nodes[1].die()
                cluster.nodes[2].die()
            for node, at in JOINED_AT.items():
                if second == at:
                    cluster.start(node)
            cluster.run(1)
            site.clock.now = cluster.now
            for log in cluster.logs[num_told:]:
                site.feed.log(log.event, **log.fields)
            num_told = len(cluster.logs)
            if cluster.condition.phase == "Running":
                site.step += 1
                site.report()
                for one in cluster.nodes:
                    one.step = site.step
            site.feed.update()


def wait(browser: Browser, condition: str) -> None:
    """Wait until a condition of the page holds; exit with an error where it does not."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not browser.run(f"return {condition}"):
        if time.monotonic() > until:
            raise SystemExit(f"the page does not come to this: {condition}")
        time.sleep(0.1)


def take(browser: Browser, name: str, *, width: int, scheme: str, most: int) -> None:
    """Take a picture of the page from its top on, ``most`` pixels high at most."""
    # Curves are drawn anew a frame after the width and the scheme have changed. In a low window the page is
    # no higher than what it shows.
    browser.view(width=width, scheme=scheme, height=100)
    time.sleep(1)
    picture = browser.view(width=width, scheme=scheme, height=100)
    picture = picture.crop((0, 0, picture.width, min(most, picture.height)))
    # A page has few colours: a palette takes a third of the bytes.
    colors = picture.quantize(NUM_COLORS, dither=Image.Dither.NONE)
    path = FOLDER / f"{name}.png"
    colors.save(path, optimize=True)
    print(f"{path}: {picture.width} x {picture.height}, {path.stat().st_size:,} bytes")


def main() -> int:
    """Take all pictures. Needs chromium and chromedriver, as the tests do."""
    with tempfile.TemporaryDirectory() as folder, open_browser(Path(folder)) as browser:
        site = Site()
        with site.serving():
            site.call(lambda: pass_time(site))
            browser.open(site.url)
            wait(browser, f"document.title.includes('step {site.step:,}')")
            for name, width, scheme, most in VIEWS:
                take(browser, name, width=width, scheme=scheme, most=most)
            browser.open("about:blank")
        with fleet_page(list(FLEET)) as url:
            browser.open(url)
            wait(browser, "document.title.startsWith('2 running')")
            take(browser, "fleet-page", width=1280, scheme="light", most=4000)
            browser.open("about:blank")
    return 0


if __name__ == "__main__":
    sys.exit(main())
