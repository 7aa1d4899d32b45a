"""Takes the pictures of the live pages in docs/images: a run in light, dark and on a telephone, and all runs.

The pages are the real pages in a headless Chromium, with runs whose clock this program controls
(``page_site``, the helper of the pages' tests). The pictures are not compared byte by byte, because fonts
differ between machines. After a change of a page, take them again and look at them:

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
"""Age of the run in seconds when its picture is taken."""
LOST_AT = 420
"""Second in which its nodes 1 and 2 are lost."""
JOINED_AT = {1: 450, 2: 500}
"""Second in which each of these nodes is back."""
PATIENCE_SECONDS = 100.0
VIEWS = (
    ("live-page", 1180, "light", 4000),
    ("live-page-dark", 1180, "dark", 1000),
    ("live-page-phone", 390, "light", 1500),
)
"""Name, width, colour scheme and maximum height of each picture of a run."""
NUM_COLORS = 256


def pass_time(site: Site) -> None:
    """Simulate a run that loses two of three nodes, waits for one, and trains with three again."""
    cluster = site.cluster
    num_told = 0
    # Nodes train at the page's rate of one step per second instead of the simulation's own rate.
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
    """Wait until a condition of the page is true; exit with an error after a timeout."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not browser.run(f"return {condition}"):
        if time.monotonic() > until:
            raise SystemExit(f"the page does not come to this: {condition}")
        time.sleep(0.1)


def take(browser: Browser, name: str, *, width: int, scheme: str, most: int) -> None:
    """Take a picture of the top of the page, at most ``most`` pixels high."""
    # Curves are drawn again one frame after the width or the scheme changes. In a low window, the page is
    # only as high as its content.
    browser.view(width=width, scheme=scheme, height=100)
    time.sleep(1)
    picture = browser.view(width=width, scheme=scheme, height=100)
    picture = picture.crop((0, 0, picture.width, min(most, picture.height)))
    # A page has few colours, so a palette reduces the file to a third.
    colors = picture.quantize(NUM_COLORS, dither=Image.Dither.NONE)
    path = FOLDER / f"{name}.png"
    colors.save(path, optimize=True)
    print(f"{path}: {picture.width} x {picture.height}, {path.stat().st_size:,} bytes")


def main() -> int:
    """Take all pictures. Needs chromium and chromedriver, like the tests."""
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
