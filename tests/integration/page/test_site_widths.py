"""The check of the site's widths finds text that a reader cannot reach, and accepts text that wraps or scrolls."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from browser import Browser, open_browser

ROOT = Path(__file__).resolve().parents[3]
LONG = "x" * 400
PAGES = {
    "wraps": f"<p style='overflow-wrap: anywhere'>{LONG}</p>",
    "scrolls": f"<pre style='overflow: auto'>{LONG}</pre>",
    "scrolls-around": f"<div style='overflow: auto'><table><td>{LONG}</table></div>",
    "sideways": f"<p>{LONG}</p>",
    "cut": f"<p style='overflow: hidden'>{LONG}</p>",
    "cut-around": f"<div style='overflow: hidden'><table><td>{LONG}</table></div>",
    "yaml": f"<div class='highlight language-yaml'><pre style='overflow: auto'><code>{LONG}</code></pre></div>",
    "phone": "<div style='width: 600px; background: red'>&nbsp;</div>",
}


@pytest.fixture(scope="module")
def widths() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "check_widths", ROOT / "tools/docs/check_widths.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("browser")) as session:
        yield session


@pytest.fixture(scope="module")
def found(
    widths: ModuleType, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """The problems of each page."""
    site = tmp_path_factory.mktemp("site")
    style = "body { margin: 0 } code { display: block }"
    for name, content in PAGES.items():
        text = f"<!doctype html><style>{style}</style><article>{content}</article>"
        (site / f"{name}.html").write_text(text, "utf-8")
    with widths.serve(site) as url:
        browser.open(url + widths.EMPTY_PAGE.lstrip("/"))
        problems = {name: widths.check_page(browser, f"{url}{name}.html") for name in PAGES}
        browser.open("about:blank")
    return problems


@pytest.mark.parametrize("name", ["wraps", "scrolls", "scrolls-around"])
def test_text_that_wraps_or_scrolls_is_accepted(
    found: dict[str, list[str]], name: str
) -> None:
    assert found[name] == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("sideways", "scrolls sideways"),
        ("cut", "px are cut off: p"),
        ("cut-around", "px are cut off by div: table"),
        ("yaml", "must be scrolled, but should wrap"),
    ],
)
def test_text_that_a_reader_cannot_reach_is_found_at_every_width(
    widths: ModuleType, found: dict[str, list[str]], name: str, problem: str
) -> None:
    for width in widths.WIDTHS:
        at_width = [one for one in found[name] if one.startswith(f"at {width} px: ")]
        assert any(problem in one for one in at_width)


def test_a_page_that_only_a_phone_must_scroll_is_found_at_its_width(
    found: dict[str, list[str]],
) -> None:
    assert found["phone"] == ["at 390 px: scrolls sideways: the page is 600 px wide"]
