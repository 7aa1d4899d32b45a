"""Runs a headless Chromium for tests, controlled with the WebDriver protocol."""

import base64
import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from PIL import Image

PATIENCE_MS = 100_000
"""Time limit in milliseconds, long enough for a busy machine."""
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
    """One headless browser session, controlled with the WebDriver protocol."""

    def __init__(self, port: int, profile: Path, binary: str) -> None:
        self._base = f"http://127.0.0.1:{port}"
        # The default new-tab page would load about 100 files, which would disturb tests of requests.
        arguments = [*FLAGS, f"--user-data-dir={profile}", "about:blank"]
        options = {"binary": binary, "args": arguments}
        capabilities = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"},
        }
        session = self._ask(
            "POST", "/session", {"capabilities": {"alwaysMatch": capabilities}}
        )
        self._base += f"/session/{session['sessionId']}"

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._base + path,
            data=data,
            method=method,
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)["value"]

    def send_command(self, command: str, **parameters: Any) -> Any:
        """Send a command of the Chrome DevTools protocol, and return its result."""
        return self._ask(
            "POST", "/goog/cdp/execute", {"cmd": command, "params": parameters}
        )

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        """Run a script in the page, and return its result."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Return the log entries since the last call."""
        return list(self._ask("POST", "/se/log", {"type": kind}))

    def requested(self) -> list[str]:
        """Return the URLs requested since the last call, without the browser's internal pages."""
        messages = [
            json.loads(entry["message"])["message"] for entry in self.log("performance")
        ]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
            and not message["params"]["request"]["url"].startswith("chrome://")
        ]

    def view(self, *, width: int, scheme: str, height: int = 900) -> Image.Image:
        """Return a picture of the whole page.

        ``width`` and ``height``: size of the window in pixels. ``scheme``: light or dark.
        """
        self.send_command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.send_command(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        shot = self.send_command(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True
        )
        return Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")

    def close(self) -> None:
        self._ask("DELETE", "")


def wait(browser: Browser, condition: str) -> None:
    """Wait until a condition of the page holds."""
    script = f"""
      const until = Date.now() + {PATIENCE_MS};
      return new Promise((resolve) => {{
        const look = () => ({condition}) ? resolve(true) : Date.now() > until ? resolve(false) : setTimeout(look, 50);
        look();
      }});"""
    assert browser.run(script), (
        f"{condition}: {browser.run('return document.body.innerText')}"
    )


@contextlib.contextmanager
def open_browser(directory: Path) -> Iterator[Browser]:
    """Open a browser with its files in ``directory``. The browser and its children end with the block."""
    driver, binary = _require("chromedriver"), _require("chromium")
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
