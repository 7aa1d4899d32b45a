"""The controls and texts of a run's page in a real browser: smoothing, axes, a second run, the end, the
tab."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, open_browser, wait
from page_site import Site

from evergrad_cli.local.run_page import serving_files

LOSS = "[...Plot.all].find(one => one.kind.title === 'Training loss')"
BEGIN = 1_770_000_000.0


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("browser")) as session:
        yield session


@pytest.fixture
def site(browser: Browser) -> Iterator[Site]:
    one = Site()
    with one.serving():
        one.train(200)
        browser.log("browser")
        browser.open(one.url)
        wait(browser, "document.title.includes('step 200')")
        yield one
        assert browser.log("browser") == []
        browser.open("about:blank")
    browser.log("browser")


def click(browser: Browser, id: str) -> None:
    browser.run(f"document.getElementById('{id}').click()")


def scales(browser: Browser) -> dict[str, Any]:
    """How each plot's axis of values is divided, by title: 1 is linear, 3 logarithmic."""
    found = browser.run(
        "return [...Plot.all].map(one => [one.kind.title, one.chart.scales.y.distr])"
    )
    return dict(found)


def test_all_step_curves_get_a_logarithmic_axis_and_the_process_curves_keep_theirs(
    browser: Browser, site: Site
) -> None:
    click(browser, "log")
    found = scales(browser)
    assert found.pop("Processes and nodes") == 1
    assert set(found.values()) == {3}
    # A plot that a new number adds has it, too.
    site.call(lambda: site.group.training.values.update({"late": 1.0}))
    site.train(5)
    click(browser, "log")
    assert set(scales(browser).values()) == {1}


def test_smoothing_draws_the_mean_over_the_values(browser: Browser, site: Site) -> None:
    browser.run(
        "const one = document.getElementById('smooth'); one.value = '0.9';"
        " one.dispatchEvent(new Event('change'))"
    )
    smooth, raw, kept = browser.run(
        f"const one = {LOSS}; return [one.chart.data[1], one.chart.data[2], one.columns[0][0]]"
    )
    assert raw == kept and smooth != kept
    # The mean begins with the first value, and the number in the header is the run's.
    assert smooth[0] == pytest.approx(kept[0])
    roughness = [
        sum(abs(a - b) for a, b in zip(row[1:], row, strict=False)) for row in (smooth, raw)
    ]
    assert roughness[0] < roughness[1] / 2
    site.train(5)
    wait(browser, f"({LOSS}).chart.data[1].length === 205")


def test_a_clipped_axis_excludes_outliers(browser: Browser, site: Site) -> None:
    def spike() -> None:
        site.clock.now += 1
        site.step += 1
        site.report()
        site.group.training.loss = 50.0
        site.feed.update()

    site.call(spike)
    wait(browser, f"({LOSS}).columns[0][0].at(-1) === 50")
    click(browser, "clip")
    least, most, top = browser.run(
        f"const one = {LOSS}; const y = one.chart.scales.y;"
        " return [y.min, y.max, Math.max(...one.columns[0][0])]"
    )
    assert least < most < 10 < top == 50
    click(browser, "log")
    assert scales(browser)["Training loss"] == 3
    click(browser, "clip")
    click(browser, "log")
    assert browser.run(f"return ({LOSS}).chart.scales.y.max") >= top


def test_a_second_run_is_drawn_from_its_file_over_the_first(
    browser: Browser, site: Site
) -> None:
    browser.requested()
    rows = [
        {"step": step, "loss": 3.0 - step / 200, "learning_rate": 1e-3, "metrics": {}}
        for step in range(1, 301)
    ]
    text = "\n".join(json.dumps(row) for row in rows)

    def choose(text: str) -> None:
        browser.run(
            f"const files = new DataTransfer(); files.items.add(new File([{json.dumps(text)}], 'metrics.jsonl'));"
            "const one = document.getElementById('other'); one.files = files.files;"
            "one.dispatchEvent(new Event('change'))"
        )

    choose(text)
    wait(browser, f"({LOSS}).kind.curves.length === 2")
    names, last, own = browser.run(
        f"const one = {LOSS}; return [one.kind.curves.map(curve => curve.name), one.columns[1][0].at(-1),"
        " one.columns[0][0].filter(value => value != null).length]"
    )
    assert names == ["docs-lm", "metrics.jsonl"]
    assert last == 1.5 and own == 200
    # The first run continues, and the file is still there.
    site.train(5)
    wait(
        browser,
        f"({LOSS}).columns[0][0].filter(value => value != null).length === 205",
    )
    assert browser.requested() == []
    choose("no rows")
    wait(browser, f"({LOSS}).kind.curves.length === 1")
    note = browser.run("return document.getElementById('other-note').textContent")
    assert note == "The file contains no steps. Choose a metrics.jsonl."


def test_tile_and_curve_header_show_the_same_throughput_and_annotations_have_a_legend(
    browser: Browser, site: Site
) -> None:
    site.train(1000)
    wait(browser, "document.title.includes('step 1,200')")
    tile = browser.run(
        "return [...document.querySelectorAll('#figures > div')].find(one =>"
        " one.firstChild.textContent === 'Tokens per second').querySelector('.value').textContent"
    )
    header = browser.run(
        "return [...Plot.all].find(one => one.kind.title === 'Throughput').reading.textContent"
    )
    assert tile == header != "–"
    legends = "[...document.querySelectorAll('.legend')].map(one => one.textContent)"
    assert browser.run(f"return {legends}") == ["▲a checkpoint"]


def write_run(directory: Path, *, ends: str) -> None:
    """A run that was stopped by a signal after 20 steps, and resumed ten minutes later."""
    events: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []

    def event(kind: str, at: float, **fields: Any) -> None:
        events.append(
            {"type": kind, "time": BEGIN + at, "step": 0, "generation": 1, **fields}
        )

    for first, at in ((1, 0.0), (21, 620.0)):
        event("start", at, run="docs-lm", world_size=2, total_steps=40)
        for step in range(first, first + 20):
            at += 1.0
            rows.append({
                "step": step, "generation": 1, "world_size": 2, "loss": 5 - step / 10, "tokens": 1000,
                "step_seconds": 0.5, "time": BEGIN + at,
            })  # fmt: skip
        reason = "signal" if first == 1 else ends
        event("complete" if reason == "complete" else "stop", at, reason=reason)
        event("end", at, exit_code=0)
    if ends == "complete":
        (directory / "complete.json").write_text("{}", encoding="utf-8")
    for name, lines in (("events.jsonl", events), ("metrics.jsonl", rows)):
        text = "\n".join(json.dumps(line) for line in lines) + "\n"
        (directory / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("ends", "said"), [("complete", "complete"), ("signal", "stopped")]
)
def test_an_ended_run_is_not_live_and_a_requested_stop_is_not_a_restart(
    browser: Browser, tmp_path: Path, ends: str, said: str
) -> None:
    directory = tmp_path / "third-try"
    directory.mkdir()
    write_run(directory, ends=ends)
    with serving_files(directory, port=0) as port:
        browser.open(f"http://127.0.0.1:{port}/")
        wait(browser, "document.title.includes('step 40')")
        link = browser.run("return document.getElementById('link').textContent")
        figures = browser.run(
            "return Object.fromEntries([...document.querySelectorAll('#figures > div')].map(one =>"
            " [one.firstChild.textContent, one.querySelector('.value').textContent]))"
        )
        title, icon = browser.run(
            "return [document.title, document.querySelector('link[rel=icon]').href]"
        )
        browser.open("about:blank")
    browser.log("browser")
    assert link == said
    assert figures["Restarts"] == "0"
    assert figures["Waste"] in ("–", "0.0s")
    # Tabs of one recipe's folders differ.
    assert title.startswith("docs-lm (third-try) · ")
    assert icon.startswith("data:image/svg+xml,")
