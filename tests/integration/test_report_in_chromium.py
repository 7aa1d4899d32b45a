"""The report in a real browser: nothing on the console, no request but the page, nothing sticking out, light
and dark."""

import base64
import http.server
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from evergrad_trainer.report.build import write_report

TESTS = Path(__file__).parents[1]
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


def _require(binary: str) -> str:
    path = shutil.which(binary)
    if path is None:
        message = f"{binary} is not on PATH; Debian's packages 'chromium' and 'chromium-driver' have it"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path


class Browser:
    """One headless browser session, spoken to in WebDriver's own protocol."""

    def __init__(self, port: int, profile: Path, binary: str) -> None:
        self._base = f"http://127.0.0.1:{port}"
        options = {"binary": binary, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        capabilities = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"},
        }
        session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._base += f"/session/{session['sessionId']}"

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._base + path,
            data=data,
            method=method,
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def tell(self, command: str, **parameters: Any) -> Any:
        """A command of Chrome's own protocol."""
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What has been logged since the last call."""
        return list(self._ask("POST", "/se/log", {"type": kind}))

    def requested(self) -> list[str]:
        """URLs asked for since the last call."""
        messages = [
            json.loads(entry["message"])["message"] for entry in self.log("performance")
        ]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]

    def view(self, *, width: int, scheme: str) -> Image.Image:
        """A picture of the whole page at a width, in the light or dark scheme."""
        self.tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.tell(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        shot = self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")

    def close(self) -> None:
        self._ask("DELETE", "")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    driver, binary = _require("chromedriver"), _require("chromium")
    directory = tmp_path_factory.mktemp("browser")
    environment = os.environ | {
        "HOME": str(directory),
        "XDG_CONFIG_HOME": str(directory),
        "XDG_CACHE_HOME": str(directory),
    }
    process = subprocess.Popen(
        [driver, "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        start_new_session=True,
    )
    with process:
        try:
            session = Browser(_port_of(process), directory / "profile", binary)
            yield session
            session.close()
        finally:
            # The browser and its children are in the driver's own session.
            os.killpg(process.pid, signal.SIGKILL)


def _port_of(process: "subprocess.Popen[str]") -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(r"started successfully on port (\d+)", line):
            return int(match[1])
    pytest.fail("chromedriver ended without saying on which port it listens")


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
