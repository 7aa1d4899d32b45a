"""The report in a real browser: nothing on the console, no request but the page, nothing sticking out, light
and dark."""

import base64
import http.server
import importlib.util
import re
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from browser import Browser, open_browser

from evergrad_trainer.report.build import write_report

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("browser")) as session:
        yield session


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """URL of a report on loopback, and the paths that are asked for."""
    directory = tmp_path_factory.mktemp("run")
    _write_run(directory)
    write_report(directory)
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            asked.append(self.path)

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Handler, directory=directory)
    ) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/report.html", asked
        server.shutdown()
        thread.join()


def _write_run(directory: Path) -> None:
    spec = importlib.util.spec_from_file_location("synthetic_run", TESTS / "synthetic_run.py")
    assert spec is not None and spec.loader is not None
    synthetic = importlib.util.module_from_spec(spec)
    sys.modules["synthetic_run"] = synthetic
    spec.loader.exec_module(synthetic)
    run = synthetic.RunWriter(
        directory, total_steps=400, name="a-run-with-a-rather-long-name-" + "x" * 30
    )
    run.set_name = "<img src=//127.0.0.1:9/x onerror=alert(1)>"
    run.write(synthetic.Process(last=157, ended="killed"))
    run.write(synthetic.Process(last=400, resumed_from=150, downtime_seconds=30.0))
    run.directory.write_resolved(
        {"manifest": {"metadata": {"name": "x"}, "long": "word " * 60}}
    )


def test_the_page_loads_nothing_but_itself_and_says_nothing_on_the_console(
    browser: Browser, site: tuple[str, list[str]]
) -> None:
    url, asked = site
    browser.requested()
    browser.log("browser")
    browser.open(url)
    browser.run(
        "document.querySelector('details').open = true; return new Promise(done => setTimeout(done, 300))"
    )
    assert browser.log("browser") == []
    assert [one for one in browser.requested() if not one.startswith("data:")] == [url]
    assert asked == ["/report.html"]


@pytest.mark.parametrize("width", [360, 720, 1180, 1920])
def test_nothing_sticks_out_at_any_width(
    browser: Browser, site: tuple[str, list[str]], width: int
) -> None:
    browser.open(site[0])
    browser.view(width=width, scheme="light")
    assert browser.run("return [document.documentElement.scrollWidth, window.innerWidth]") == [
        width,
        width,
    ]
    boxes = (
        "[...document.querySelectorAll('svg.plot')].map(plot => plot.getBoundingClientRect())"
    )
    plots = browser.run(
        f"return {boxes}.filter(box => box.width).map(box => [box.width, box.height])"
    )
    # The loss and the split have two forms each, of which one is shown.
    assert len(plots) == 6
    assert all(
        200 < plot_width <= width and plot_height > 100 for plot_width, plot_height in plots
    )


def test_light_and_dark_are_both_drawn(browser: Browser, site: tuple[str, list[str]]) -> None:
    browser.open(site[0])
    light, dark = (browser.view(width=1180, scheme=scheme) for scheme in ("light", "dark"))
    assert light.size == dark.size
    assert light.size[1] > 2000
    assert min(light.getpixel((2, 2))) > 230  # type: ignore[type-var,arg-type]
    assert max(dark.getpixel((2, 2))) < 40  # type: ignore[type-var,arg-type]
    for picture in (light, dark):
        colors = picture.getcolors(maxcolors=2**24)
        assert colors is not None and len(colors) > 200
    # The lines of the plots take their colours from the scheme.
    line = "return getComputedStyle(document.querySelector('svg.plot path[style*=\"--s1\"]')).stroke"
    assert browser.run(line) == "rgb(53, 185, 138)"
    browser.view(width=1180, scheme="light")
    assert browser.run(line) == "rgb(13, 122, 86)"


def test_it_prints_on_a_few_pages(browser: Browser, site: tuple[str, list[str]]) -> None:
    browser.open(site[0])
    pdf = base64.b64decode(browser.tell("Page.printToPDF")["data"])
    assert pdf.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 8
