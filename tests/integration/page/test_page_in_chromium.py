"""The page of a run in a real browser: live, without the network, with a keyboard, at any width, for hours."""

from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from browser import Browser, open_browser, wait
from page_site import FLEET, Site, fleet_page, run_of
from patience import PATIENCE

from evergrad_common.causes import USES
from evergrad_common.evaluation_report import MOST_SETS
from evergrad_coordinator.edge.live_feed import MOST_PAGES, encode_event
from evergrad_coordinator.protocol import EvaluationReport
from evergrad_coordinator.rules.downsampled_series import MOST_COLUMNS, MOST_ROWS

MOST_BYTES = 50 * 1024 * 1024


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("browser")) as session:
        yield session


@pytest.fixture
def site(browser: Browser) -> Iterator[Site]:
    one = Site()
    with one.serving():
        yield one
        # Leave the page before its server stops: a page without its coordinator writes messages to the
        # console.
        browser.open("about:blank")
    browser.log("browser")


def text_of(browser: Browser, id: str) -> str:
    return str(browser.run(f"return document.getElementById('{id}').innerText"))


def figure(browser: Browser, title: str) -> str:
    return str(
        browser.run(
            f"return [...document.querySelectorAll('#figures > div')]"
            f".find(one => one.querySelector('dt').textContent === '{title}').querySelector('.value').textContent"
        )
    )


def requested(browser: Browser) -> list[str]:
    """Return the addresses that were requested since the last call, except for the browser's own new-tab
    page."""
    return [one for one in browser.requested() if not one.startswith(("chrome:", "data:"))]


def open_page(browser: Browser, site: Site, *, step: int) -> None:
    browser.requested()
    browser.log("browser")
    browser.open(site.url)
    wait(browser, f"document.title.includes('step {step:,}')")


def test_the_page_shows_the_run_and_loads_nothing_else(
    browser: Browser, site: Site
) -> None:
    site.note("broken", generation=4, node="2", rank=2, cause="worker_crash")
    site.train(400)
    open_page(browser, site, step=400)
    assert text_of(browser, "run") == "docs-lm"
    assert text_of(browser, "phase") == "Running"
    assert text_of(browser, "link").lower() == "live"
    assert figure(browser, "Step") == "400"
    assert figure(browser, "Checkpoint") == "400"
    assert figure(browser, "Processes") == "3"
    titles = browser.run(
        "return [...document.querySelectorAll('h3')].map(one => one.textContent)"
    )
    assert titles[0] == "Training loss, nats per token"
    assert set(titles) >= {
        "Evaluation loss, nats per token", "Evaluation: exact", "Throughput, tokens per second", "Learning rate",
        "Gradient norm, before clipping", "router_loss", "Processes and nodes",
    }  # fmt: skip
    assert "process ended or was killed" in text_of(browser, "events")
    assert (
        len(
            browser.run(
                "return [...document.querySelectorAll('#members tbody tr')].map(one => one.innerText)"
            )
        )
        == 3
    )
    assert "400" in text_of(browser, "checkpoints")
    # Three nodes trained for 400 seconds, and the page shows how the other time was used.
    uses = browser.run(
        "return [...document.querySelectorAll('#uses tbody tr')]"
        ".map(one => [...one.children].map(cell => cell.textContent))"
    )
    assert uses[0][:2] == ["training", "19m59s"]
    assert [row[3] for row in uses] == [USES[row[0]] for row in uses]
    assert sum(float(row[2].rstrip("%")) for row in uses) == pytest.approx(100, abs=0.5)
    # Every curve is drawn: something of each canvas is not empty.
    wait(
        browser,
        "[...document.querySelectorAll('.canvas canvas')].every(one => one.getContext('2d')"
        ".getImageData(0, 0, one.width, one.height).data.some(value => value > 0))",
    )
    assert browser.log("browser") == []
    assert requested(browser) == [site.url, f"{site.url}live"]


def test_the_page_follows_the_run_while_it_is_open(browser: Browser, site: Site) -> None:
    site.train(20)
    open_page(browser, site, step=20)
    site.train(30)
    site.note("gone", node="1", why="silence")
    site.train(1)
    wait(browser, "document.title.includes('step 51')")
    wait(
        browser,
        "document.getElementById('events').innerText.includes('node 1 is gone: silence')",
    )
    # A restart from a checkpoint goes back; lost steps are removed from the curve.
    site.step = 30
    site.train(2)
    wait(browser, "document.title.includes('step 32')")
    assert browser.log("browser") == []


def test_curves_and_buttons_can_be_used_by_keyboard(browser: Browser, site: Site) -> None:
    site.train(100)
    open_page(browser, site, step=100)

    def press(key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            browser.send_command("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    browser.run("document.querySelector('.canvas').focus()")
    assert browser.run("return getComputedStyle(document.activeElement).outlineStyle") != ""
    press("End")
    press("ArrowLeft")
    wait(browser, "document.querySelector('.reading').textContent.endsWith('at step 99')")
    press("Home")
    wait(browser, "document.querySelector('.reading').textContent.endsWith('at step 1')")
    assert text_of(browser, "spoken").startswith("Training loss: ")
    press("Escape")
    wait(browser, "!document.querySelector('.reading').textContent.includes('at step')")
    # All that can be used is reached by the tabulator, in the order of the page.
    names = browser.run(
        "return [...document.querySelectorAll('button, [tabindex]')].filter(one => one.offsetParent)"
        ".map(one => one.tabIndex)"
    )
    assert len(names) >= 2 + 7 + 5 and set(names) == {0}
    browser.run("document.getElementById('log').click()")
    assert (
        browser.run("return document.getElementById('log').getAttribute('aria-pressed')")
        == "true"
    )
    # A paused page does not change, and then shows everything that arrived meanwhile.
    browser.run("document.getElementById('pause').click()")
    site.train(50)
    browser.run("document.getElementById('pause').click()")
    wait(browser, "document.title.includes('step 150')")
    assert browser.log("browser") == []


@pytest.mark.parametrize("width", [360, 720, 1180, 1920])
def test_nothing_overflows_at_any_width(browser: Browser, site: Site, width: int) -> None:
    site.train(300)
    browser.view(width=width, scheme="light")
    open_page(browser, site, step=300)
    wait(browser, "document.querySelectorAll('.canvas canvas').length >= 7")
    assert browser.run(
        "return [document.documentElement.scrollWidth, window.innerWidth]"
    ) == [
        width,
        width,
    ]
    boxes = browser.run(
        "return [...document.querySelectorAll('.uplot')].map(one => one.getBoundingClientRect())"
        ".map(box => [box.left, box.right])"
    )
    assert all(0 <= left < right <= width for left, right in boxes)


def test_light_and_dark_schemes_are_both_drawn_and_can_change(
    browser: Browser, site: Site
) -> None:
    site.train(300)
    open_page(browser, site, step=300)
    pictures = {
        scheme: browser.view(width=1180, scheme=scheme) for scheme in ("light", "dark")
    }
    assert min(pictures["light"].getpixel((2, 2))) > 230  # type: ignore[type-var,arg-type]
    assert max(pictures["dark"].getpixel((2, 2))) < 40  # type: ignore[type-var,arg-type]
    # The curve's colour follows the scheme, in the canvas that is drawn already.
    for scheme, color in (("dark", (53, 185, 138)), ("light", (13, 122, 86))):
        browser.view(width=1180, scheme=scheme)
        wait(
            browser,
            "(() => { const one = document.querySelector('.canvas canvas'); const data = one.getContext('2d')"
            ".getImageData(0, 0, one.width, one.height).data; for (let i = 0; i < data.length; i += 4)"
            f" if (data[i] === {color[0]} && data[i + 1] === {color[1]} && data[i + 2] === {color[2]}) return true;"
            " return false; })()",
        )


def test_names_and_messages_of_nodes_are_shown_as_text(browser: Browser) -> None:
    evil = "<img src=//127.0.0.1:9/x onerror=alert(1)>"
    one = Site(name=evil)
    one.group.training.values = {}
    with one.serving():
        one.note("gone", node=evil, why=evil)
        one.train(60)
        one.call(lambda: one.group.training.values.update({evil: 1.0}))
        one.call(one.feed.update)
        open_page(browser, one, step=60)
        assert text_of(browser, "run") == evil
        assert evil in text_of(browser, "events")
        assert browser.run("return document.images.length") == 0
        assert browser.log("browser") == []
        browser.open("about:blank")
    browser.log("browser")


def test_on_other_addresses_than_loopback_the_page_asks_for_the_token(
    browser: Browser,
) -> None:
    one = Site()
    with one.serving("0.0.0.0"):
        one.train(10)
        # Without a token nothing is asked but the page itself.
        browser.requested()
        browser.log("browser")
        browser.open(one.url)
        wait(browser, "!document.getElementById('ask').hidden")
        assert requested(browser) == [one.url]
        assert browser.run("return document.getElementById('all').hidden")
        assert browser.log("browser") == []
        # A wrong one is refused, and forgotten.
        browser.run(
            "const box = document.getElementById('token'); box.value = 'wrong'; box.form.requestSubmit()"
        )
        wait(
            browser,
            "document.getElementById('refusal').textContent.startsWith('This is not')",
        )
        assert browser.run("return sessionStorage.length") == 0
        browser.log("browser")
        # The token after the address's # is removed immediately, and is valid for the tab.
        browser.open("about:blank")
        browser.open(f"{one.url}#token={one.token}")
        wait(browser, "document.title.includes('step 10')")
        assert browser.run("return location.href") == one.url
        browser.open(one.url)
        wait(browser, "document.title.includes('step 10')")
        assert all(one.token not in asked for asked in browser.requested())
        assert browser.log("browser") == []
        browser.run("sessionStorage.clear()")
        browser.open("about:blank")
    browser.log("browser")


class RichSite(Site):
    """A run with as many numbers of a step and evaluation sets as a coordinator keeps, and more numbers of
    evaluations than a page draws."""

    num_sets = 1

    def report(self) -> None:
        super().report()
        training = self.group.training
        numbers = {f"number_{one:02}": 1.0 for one in range(MOST_COLUMNS)}
        training.values = {"learning_rate": 1e-3, **numbers}
        scores = {f"score_{one:02}": 1.0 for one in range(30)}
        training.evaluations = {
            f"set_{one:02}": EvaluationReport(self.step, {"loss": 2.0 + one, **scores})
            for one in range(self.num_sets)
        }


def test_all_evaluation_sets_have_a_curve_and_sets_without_a_plot_are_named(
    browser: Browser,
) -> None:
    one = RichSite()
    titles = "[...document.querySelectorAll('h3')].map(one => one.textContent)"
    curves = (
        "[...document.querySelectorAll('figure')].find(one => one.textContent.startsWith('Evaluation loss'))"
        ".querySelectorAll('.reading .name')"
    )
    with one.serving():
        one.train(10)
        open_page(browser, one, step=10)
        shown = browser.run(f"return {titles}")
        # The curve over the time is the last one, after any number of others.
        assert len(shown) == 65 and shown[-1] == "Processes and nodes"
        assert "number_36" in shown
        assert len([name for name in shown if name.startswith("Evaluation")]) == 24
        left_out = text_of(browser, "left-out")
        assert left_out.startswith(
            "7 more numbers have no plot here: Evaluation: score_23, "
        )
        assert left_out.endswith(", Evaluation: score_29.")

        # Existing plots get a curve for each set that is added later.
        one.num_sets = MOST_SETS
        one.train(1)
        wait(browser, f"{curves}.length === {MOST_SETS}")
        assert browser.run(f"return {titles}") == shown
        assert text_of(browser, "left-out") == left_out
        looks = browser.run(
            f"return [...{curves}].map(one => one.previousSibling)"
            ".map(key => key.className + key.style.borderColor)"
        )
        assert len(set(looks)) == MOST_SETS, "no two look the same"
        for width in (360, 1180):
            browser.view(width=width, scheme="light")
            assert browser.run("return document.documentElement.scrollWidth") == width
        assert browser.log("browser") == []
        browser.open("about:blank")
    browser.log("browser")


NAMES_OF_OBJECTS = ("constructor", "toString", "valueOf", "__proto__", "hasOwnProperty")


class OddSite(Site):
    """Metrics, evaluation sets and numbers of evaluations with names that every object of JavaScript has, and
    a number below another one's name."""

    def report(self) -> None:
        super().report()
        training = self.group.training
        training.values = dict.fromkeys(NAMES_OF_OBJECTS, 1.0)
        results = {"loss": 2.0, "loss/x": 1.0, **dict.fromkeys(NAMES_OF_OBJECTS, 3.0)}
        training.evaluations = {
            name: EvaluationReport(self.step, results)
            for name in ("held_out", *NAMES_OF_OBJECTS)
        }


def test_names_of_javascript_properties_and_nested_names_get_their_plots(
    browser: Browser,
) -> None:
    one = OddSite()
    with one.serving():
        one.train(20)
        open_page(browser, one, step=20)
        titles = browser.run(
            "return [...document.querySelectorAll('h3')].map(one => one.textContent)"
        )
        assert {"Evaluation loss, nats per token", "Evaluation: loss/x"} <= set(titles)
        assert titles[1] == "Evaluation loss, nats per token"
        assert {*NAMES_OF_OBJECTS, *(f"Evaluation: {n}" for n in NAMES_OF_OBJECTS)} <= {
            *titles
        }
        # It continues with the run.
        one.train(5)
        wait(browser, "document.title.includes('step 25')")
        assert text_of(browser, "link").lower() == "live"
        assert browser.log("browser") == []
        browser.open("about:blank")
    browser.log("browser")


def test_a_faulty_update_is_not_shown_as_a_lost_connection(
    browser: Browser, site: Site
) -> None:
    site.train(20)
    open_page(browser, site, step=20)
    began_at = site.feed._began_at_unix
    faulty = encode_event({"beganAt": began_at, "status": {}, "steps": 1})
    site.call(lambda: [page.write(faulty) for page in site.feed._pages])
    wait(browser, "document.getElementById('link').textContent.startsWith('an update')")
    (logged,) = browser.log("browser")
    assert "RangeError" in logged["message"]
    # The connection stays open, and later updates are shown.
    site.train(5)
    wait(browser, "document.title.includes('step 25')")
    assert [one for one in requested(browser) if one.endswith("live")] == [
        f"{site.url}live"
    ]


def test_a_drawing_error_is_shown_on_the_page(browser: Browser, site: Site) -> None:
    site.train(20)
    open_page(browser, site, step=20)
    began_at = site.feed._began_at_unix
    # Can be read, and not drawn: events are pairs.
    faulty = encode_event({"beganAt": began_at, "events": [None]})
    site.call(lambda: [page.write(faulty) for page in site.feed._pages])
    wait(browser, "document.getElementById('link').textContent.startsWith('an update')")
    (logged, *_) = browser.log("browser")
    assert "TypeError" in logged["message"]


def heap_bytes(browser: Browser) -> int:
    browser.send_command("HeapProfiler.collectGarbage")
    return int(browser.send_command("Runtime.getHeapUsage")["usedSize"])


def count(browser: Browser, what: str) -> int:
    return int(browser.run(f"return {what}"))


@pytest.mark.long
@pytest.mark.slow
def test_eight_hours_at_ten_steps_a_second_use_bounded_browser_memory(
    browser: Browser, site: Site
) -> None:
    """288,000 steps: an update for each of 28,800 seconds, as fast as they can be read."""
    site.train(1, steps_a_second=10)
    open_page(browser, site, step=10)
    seconds = 8 * 3600
    for begin in range(1, seconds, 600):
        site.train(min(600, seconds - begin), steps_a_second=10)
        # The page has read all updates before the next ones are sent.
        wait(browser, f"document.title.includes('step {site.step:,}')")
        if begin % 2400 == 1:
            assert heap_bytes(browser) < MOST_BYTES
    assert site.step == 288_000
    assert heap_bytes(browser) < MOST_BYTES
    assert (
        count(browser, "document.querySelectorAll('#events tr, #checkpoints tr').length")
        < 320
    )
    assert count(browser, "document.querySelectorAll('*').length") < 3000
    points = browser.run(
        "return [...document.querySelectorAll('.canvas')].map(one => +one.ariaLabel.match(/: (\\d+) points/)[1])"
    )
    assert points and max(points) <= 2 * MOST_ROWS
    assert browser.log("browser") == []


def test_a_page_beyond_the_bound_shows_that_it_was_refused(
    browser: Browser, site: Site
) -> None:
    site.train(5)
    answers: list[Any] = []
    try:
        for _ in range(MOST_PAGES):
            answers.append(urlopen(f"{site.url}live", timeout=PATIENCE))
            assert answers[-1].readline() == b"event: update\n"
        with pytest.raises(HTTPError, match="503") as refused:
            urlopen(f"{site.url}live", timeout=PATIENCE)
        refused.value.close()
    finally:
        for one in answers:
            one.close()
    # Those that are closed make room again.
    open_page(browser, site, step=5)


def test_the_fleet_page_lists_sorts_and_searches_the_runs(browser: Browser) -> None:
    names = (
        "[...document.querySelectorAll('tbody tr')].map(row => row.children[1].textContent)"
    )
    runs = list(FLEET)
    with fleet_page(runs) as url:
        browser.requested()
        browser.log("browser")
        browser.open(url)
        wait(browser, "document.title.startsWith('2 running')")
        assert text_of(browser, "heading") == "5 runs"
        assert browser.run(f"return {names}")[-2:] == ["<b>molecules</b>", "small"]
        # Sorted by a column's head, which is a button, in both directions; and searched.
        browser.run(
            "[...document.querySelectorAll('th button')].find(one => one.textContent === 'Step').click()"
        )
        assert browser.run(f"return {names}")[0] == "<b>molecules</b>"
        browser.run(
            "[...document.querySelectorAll('th button')].find(one => one.textContent === 'Step').click()"
        )
        assert browser.run(f"return {names}")[0] == "small"
        assert (
            browser.run(
                "return document.querySelector('[aria-sort=descending]').textContent"
            )
            == "Step"
        )
        # A time is sorted by its length, and not by its text.
        lengths = "[...document.querySelectorAll('tbody tr')].map(row => row.children[7].textContent)"
        for order in (["11h12m", "19h12m", "–"], ["19h12m", "11h12m", "–"]):
            browser.run(
                "[...document.querySelectorAll('th button')].find(one => one.textContent === 'Time left').click()"
            )
            assert browser.run(f"return {lengths}")[:3] == order
        runs.append(run_of("long", "Running", 2, eta_seconds=55 * 3600))
        wait(browser, f"{lengths}[0] === '2d7h'")
        runs.pop()
        wait(browser, f"{lengths}[0] === '19h12m'")
        browser.run(
            "const box = document.getElementById('find'); box.value = 'waiting'; box.dispatchEvent(new Event('input'))"
        )
        wait(browser, f"{names}.join() === 'preference'")
        browser.run(
            "const box = document.getElementById('find'); box.value = ''; box.dispatchEvent(new Event('input'))"
        )
        # It follows: a run that is new is there without a reload.
        runs.append(run_of("new", "Running", 1))
        wait(browser, f"{names}.includes('new')")
        for width in (360, 1180):
            browser.view(width=width, scheme="dark")
            assert browser.run("return document.documentElement.scrollWidth") == width
        assert browser.log("browser") == []
        assert requested(browser) == [url, f"{url}live"]
        browser.open("about:blank")
    browser.log("browser")
