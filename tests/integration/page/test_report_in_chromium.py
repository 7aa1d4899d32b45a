"""The report in a real browser: nothing on the console, no request but the page, nothing sticking out, light
and dark; charts that can be enlarged and read, and pictures on paper and without scripts."""

import base64
import http.server
import importlib.util
import math
import re
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, open_browser, wait

from evergrad_trainer.report.build import write_report

TESTS = Path(__file__).parents[2]
NUM_PLOTS = 6


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("browser")) as session:
        yield session


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """Serve a report on loopback; yield its URL and the requested paths."""
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
    spec = importlib.util.spec_from_file_location(
        "synthetic_run", TESTS / "synthetic_run.py"
    )
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


def test_the_page_loads_only_itself_and_prints_nothing_on_the_console(
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


def shown(browser: Browser, selector: str) -> list[list[float]]:
    """Left, right and height of each element that has a size."""
    boxes = f"[...document.querySelectorAll('{selector}')].map(one => one.getBoundingClientRect())"
    return list(
        browser.run(
            f"return {boxes}.filter(box => box.width).map(box => [box.left, box.right, box.height])"
        )
    )


def spans(browser: Browser) -> list[list[float]]:
    """The steps that each chart shows, from and to."""
    read = "[...Plot.all].map(one => one.chart.scales.x).map(one => [one.min, one.max])"
    return list(browser.run(f"return {read}"))


def press(browser: Browser, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        browser.send_command("Input.dispatchKeyEvent", type=kind, key=key, code=key)


class Mouse:
    """A mouse over the first chart; places are parts of its width."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        browser.run("document.querySelector('.u-over').scrollIntoView({block: 'center'})")
        over = "document.querySelector('.u-over').getBoundingClientRect()"
        self._left, self._top, self._width = browser.run(
            f"const box = {over}; return [box.left, box.top + box.height / 2, box.width]"
        )

    def _dispatch(self, kind: str, place: float, **more: Any) -> None:
        x = self._left + self._width * place
        self._browser.send_command(
            "Input.dispatchMouseEvent", type=kind, x=x, y=self._top, **more
        )

    def move(self, place: float) -> None:
        self._dispatch("mouseMoved", place)

    def drag(self, begin: float, end: float) -> None:
        self.move(begin)
        self._dispatch("mousePressed", begin, button="left", buttons=1, clickCount=1)
        for part in (0.5, 1.0):
            place = begin + (end - begin) * part
            self._dispatch("mouseMoved", place, button="left", buttons=1)
        self._dispatch("mouseReleased", end, button="left", clickCount=1)

    def double_click(self, place: float) -> None:
        for number in (1, 2):
            self._dispatch(
                "mousePressed", place, button="left", buttons=1, clickCount=number
            )
            self._dispatch("mouseReleased", place, button="left", clickCount=number)


@pytest.mark.parametrize("width", [360, 720, 1180, 1920])
def test_nothing_overflows_at_any_width(
    browser: Browser, site: tuple[str, list[str]], width: int
) -> None:
    browser.view(width=width, scheme="light")
    browser.open(site[0])
    assert browser.run(
        "return [document.documentElement.scrollWidth, window.innerWidth]"
    ) == [
        width,
        width,
    ]
    # Each plot is a chart, and none of the pictures is shown.
    charts = shown(browser, ".uplot")
    assert len(charts) == NUM_PLOTS
    assert shown(browser, "svg.plot") == []
    assert all(0 <= left < right <= width for left, right, _ in charts)
    assert all(right - left > 200 and height > 100 for left, right, height in charts)
    # So it is after the window has become narrower.
    browser.view(width=320, scheme="light")
    wait(browser, "[...Plot.all].every(one => one.chart.width <= 320)")
    assert browser.run("return document.documentElement.scrollWidth") == 320


def test_dragging_zooms_all_step_charts_and_a_double_click_resets_them(
    browser: Browser, site: tuple[str, list[str]]
) -> None:
    browser.view(width=1180, scheme="light")
    browser.log("browser")
    browser.open(site[0])
    (whole,) = {tuple(one) for one in spans(browser)}
    assert whole[0] < 1 and whole[1] > 400
    mouse = Mouse(browser)
    mouse.drag(0.25, 0.5)
    wait(browser, f"[...Plot.all].every(one => one.chart.scales.x.min > {whole[0]})")
    ((low, high),) = {(round(low), round(high)) for low, high in spans(browser)}
    assert 95 <= low <= 105 and 195 <= high <= 205
    mouse.double_click(0.5)
    wait(browser, f"[...Plot.all].every(one => one.chart.scales.x.min === {whole[0]})")
    assert {tuple(one) for one in spans(browser)} == {whole}
    assert browser.log("browser") == []


def test_one_cursor_reads_all_charts(browser: Browser, site: tuple[str, list[str]]) -> None:
    browser.view(width=1180, scheme="light")
    browser.open(site[0])
    readings = "[...document.querySelectorAll('.reading')].map(one => one.textContent)"
    assert browser.run("return document.querySelectorAll('.reading.current').length") == 0
    Mouse(browser).move(0.5)
    wait(browser, f"document.querySelectorAll('.reading.current').length === {NUM_PLOTS}")
    loss, evaluation, *others = browser.run(f"return {readings}")
    assert re.fullmatch(
        r"each step [\d.]+mean of 8 steps [\d.]+lost and trained again – at step 200", loss
    )
    # Nothing was evaluated at other steps than these.
    assert evaluation.endswith(" at step 200")
    assert all(one.endswith(" at step 200") for one in others)
    cursors = browser.run(
        "return [...document.querySelectorAll('.u-cursor-x')].filter(one => one.offsetParent).length"
    )
    assert cursors == NUM_PLOTS


def test_each_chart_can_be_reached_read_and_reset_by_keyboard(
    browser: Browser, site: tuple[str, list[str]]
) -> None:
    browser.view(width=1180, scheme="light")
    browser.open(site[0])
    labels = browser.run(
        "return [...document.querySelectorAll('.canvas')].map(one => [one.tabIndex, one.role, one.ariaLabel])"
    )
    assert [one[:2] for one in labels] == [[0, "img"]] * NUM_PLOTS
    # Each has its picture's text.
    pictures = browser.run(
        "return [...document.querySelectorAll('figure')].map(one => one.querySelector('svg').ariaLabel)"
    )
    assert [label for _, _, label in labels] == pictures
    whole = spans(browser)
    Mouse(browser).drag(0.25, 0.5)
    wait(browser, "[...Plot.all].every(one => one.isZoomed)")
    browser.run("document.querySelector('.canvas').focus()")
    # The last step that is shown, and the one before it.
    last = math.floor(spans(browser)[0][1])
    assert last < 210
    press(browser, "End")
    reading = "document.querySelector('.reading').textContent"
    wait(browser, f"{reading}.endsWith('at step {last}')")
    press(browser, "ArrowLeft")
    wait(browser, f"{reading}.endsWith('at step {last - 1}')")
    spoken = browser.run("return document.getElementById('spoken').textContent")
    assert spoken.startswith("Training loss: each step ")
    press(browser, "Escape")
    wait(browser, "document.querySelectorAll('.reading.current').length === 0")
    wait(browser, "[...Plot.all].every(one => !one.isZoomed)")
    assert spans(browser) == whole


def test_light_and_dark_schemes_are_both_drawn_and_can_change(
    browser: Browser, site: tuple[str, list[str]]
) -> None:
    browser.open(site[0])
    light, dark = (browser.view(width=1180, scheme=scheme) for scheme in ("light", "dark"))
    assert light.size == dark.size
    assert light.size[1] > 2000
    assert min(light.getpixel((2, 2))) > 230  # type: ignore[type-var,arg-type]
    assert max(dark.getpixel((2, 2))) < 40  # type: ignore[type-var,arg-type]
    for picture in (light, dark):
        colors = picture.getcolors(maxcolors=2**24)
        assert colors is not None and len(colors) > 200
    # The curves take their colours from the scheme, of charts that are drawn already and of pictures.
    line = "return getComputedStyle(document.querySelector('svg.plot [stroke=\"var(--s1)\"]')).stroke"
    for scheme, color in (("dark", (53, 185, 138)), ("light", (13, 122, 86))):
        browser.view(width=1180, scheme=scheme)
        assert browser.run(line) == f"rgb{color}"
        wait(
            browser,
            "[...document.querySelectorAll('.canvas canvas')].slice(0, 4).every(one => { const data ="
            " one.getContext('2d').getImageData(0, 0, one.width, one.height).data;"
            " for (let i = 0; i < data.length; i += 4)"
            f" if (data[i] === {color[0]} && data[i + 1] === {color[1]} && data[i + 2] === {color[2]}) return true;"
            " return false; })",
        )


def test_the_printed_page_has_the_pictures(
    browser: Browser, site: tuple[str, list[str]]
) -> None:
    browser.view(width=1180, scheme="light")
    browser.open(site[0])
    assert len(shown(browser, ".uplot")) == NUM_PLOTS
    browser.send_command("Emulation.setEmulatedMedia", media="print")
    try:
        for width in (1180, 680):
            browser.send_command(
                "Emulation.setDeviceMetricsOverride",
                width=width, height=900, deviceScaleFactor=1, mobile=False,
            )  # fmt: skip
            assert shown(browser, ".uplot") == shown(browser, "#hint") == []
            # The loss and the split have two forms each, of which one is shown.
            assert len(shown(browser, "svg.plot")) == NUM_PLOTS
        pdf = base64.b64decode(browser.send_command("Page.printToPDF")["data"])
    finally:
        browser.send_command("Emulation.setEmulatedMedia", media="")
    assert pdf.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 8


@pytest.mark.parametrize("width", [360, 1180])
def test_without_scripts_the_pictures_are_shown(
    browser: Browser, site: tuple[str, list[str]], width: int
) -> None:
    browser.view(width=width, scheme="light")
    browser.send_command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.log("browser")
        browser.open(site[0])
        # The test's own scripts run nevertheless.
        assert browser.run("return document.querySelectorAll('.uplot').length") == 0
        pictures = shown(browser, "svg.plot")
        assert len(pictures) == NUM_PLOTS
        assert all(
            0 <= left < right <= width and height > 100 for left, right, height in pictures
        )
        assert shown(browser, "#hint") == []
        assert browser.log("browser") == []
    finally:
        browser.send_command("Emulation.setScriptExecutionDisabled", value=False)


def test_an_injected_script_does_not_run(
    browser: Browser, site: tuple[str, list[str]]
) -> None:
    browser.open(site[0])
    ran = """
      const script = document.createElement('script');
      script.textContent = 'window.hasRun = true';
      document.body.append(script);
      document.body.setAttribute('onclick', 'window.hasRun = true');
      document.body.click();
      return [window.hasRun === true, document.body.onclick !== null];"""
    assert browser.run(ran) == [False, False]
    browser.log("browser")
