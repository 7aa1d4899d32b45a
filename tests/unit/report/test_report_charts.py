"""Charts of the report: the data that are embedded, their bounds, and the policy that allows its own scripts alone."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from evergrad_coordinator.edge.page_files import CHART_SCRIPTS, build_page, read_web
from evergrad_trainer.base.records import EvaluationRecord
from evergrad_trainer.observers.history import StepTable
from evergrad_trainer.observers.jsonl import RunLog
from evergrad_trainer.report import html as html_module
from evergrad_trainer.report import plots as plots_module
from evergrad_trainer.report.build import write_report
from evergrad_trainer.report.facts import ReportFacts, gather_facts
from evergrad_trainer.report.html import render_html
from evergrad_trainer.report.plots import build_plots
from evergrad_trainer.report.series import MOST_ROWS, SeriesRows
from evergrad_trainer.run.directory import RunDirectory

HOSTILE = "</script><script>alert(1)</script><!-- <style> ]]> \u2028 '\"&"
MOST_BYTES = 1_000_000
"""Bound of the charts of a report with as many plots, curves and rows as there can be."""


def _page(directory: RunDirectory) -> str:
    return write_report(directory.path, now=0.0).html.read_text("utf-8")


def _charts(html: str) -> dict[str, Any]:
    """The embedded charts by title, each with the numbers of its x."""
    (text,) = re.findall(
        r'<script type="application/json" id="charts">(.*?)</script>', html
    )
    read = json.loads(text)
    return {one["title"]: {**one, "x": read["x"][one["x"]]} for one in read["charts"]}


def _scripts(html: str) -> list[str]:
    return re.findall(r"<script>(.*?)</script>", html, re.DOTALL)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _policy(html: str) -> dict[str, list[str]]:
    (text,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    directives = (one.split() for one in text.split(";"))
    return {name: values for name, *values in directives}


def _digits(values: Any) -> list[float]:
    """Values with the six digits of the embedded ones."""
    return [float(f"{value:.6g}") for value in values]


def _long_run(
    directory: RunDirectory, synthetic: ModuleType, num_steps: int
) -> ReportFacts:
    """Facts of a run of so many steps, twelve metrics and six sets, without a file of so many rows."""
    synthetic.RunWriter(directory.path).write(synthetic.Process(last=57, ended="killed"))
    facts = gather_facts(directory)
    generator = np.random.default_rng(0)
    columns = {
        name: np.resize(values, num_steps) for name, values in facts.steps.columns.items()
    }
    columns["step"] = np.arange(1, num_steps + 1)
    for name in ("loss", "grad_norm", "learning_rate", "step_seconds"):
        columns[name] = generator.random(num_steps)
    metrics = {f"metric_{number}": generator.random(num_steps) for number in range(12)}
    evaluations = [
        EvaluationRecord(
            step, 1, f"set-{number}", float(generator.random()), 1.0, 1, 1.0, 1.0
        )
        for step in range(100, num_steps + 1, max(100, num_steps // 2000))
        for number in range(6)
    ]
    return replace(
        facts,
        steps=StepTable(columns, metrics),
        superseded=StepTable(
            {name: values[: num_steps // 2] for name, values in columns.items()}
        ),
        history=replace(facts.history, evaluations=evaluations),
    )


def test_the_content_security_policy_allows_exactly_the_scripts_and_style_of_the_page(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    html = _page(synthetic.RunWriter(tmp_path).write(synthetic.Process(last=60)).directory)
    policy = _policy(html)
    scripts = _scripts(html)
    assert len(scripts) == 4
    assert policy["script-src"] == [_hash(one) for one in scripts]
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert policy["style-src"] == [_hash(style)]
    assert (
        policy["default-src"] == policy["base-uri"] == policy["form-action"] == ["'none'"]
    )
    assert not [one for values in policy.values() for one in values if "unsafe" in one]
    # Elements of other kinds run nothing: one has data, and all have been looked at.
    assert len(re.findall("<script", html)) == len(scripts) + 1


def test_the_scripts_are_shared_with_the_live_page_and_cannot_end_their_element(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    html = _page(synthetic.RunWriter(tmp_path).write(synthetic.Process(last=60)).directory)
    own = (Path(html_module.__file__).parent / "report.js").read_text("utf-8")
    assert _scripts(html) == [*map(read_web, CHART_SCRIPTS), own]
    live = build_page("run", needs_token=False).text
    for script in _scripts(html)[:-1]:
        assert f"<script>{script}</script>" in live
    for script in _scripts(html):
        assert not re.search(r"</script|<!--", script, re.IGNORECASE)
        assert not re.search(
            r"\bfetch\b|XMLHttpRequest|WebSocket|EventSource|\beval\b", script
        )


def test_a_report_without_plots_has_no_script(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=0, ended="killed"))
    html = _page(run.directory)
    assert "<script" not in html
    assert _policy(html)["script-src"] == ["'none'"]


def test_the_embedded_data_are_the_steps_of_the_run(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=57, ended="killed"))
    run.write(synthetic.Process(last=200, resumed_from=50, downtime_seconds=30.0))
    charts = _charts(_page(run.directory))
    assert list(charts) == [
        "Training loss",
        "Evaluation loss",
        "Learning rate",
        "Throughput",
        "Gradient norm, before clipping",
        "What a step consists of",
    ]
    loss = charts["Training loss"]
    steps = range(1, 201)
    assert loss["x"] == list(steps)
    each, trend, lost = loss["curves"]
    assert each["parts"] == [_digits(synthetic.step_record(step).loss for step in steps)]
    assert (each["name"], each["color"], each["isFaint"]) == ("each step", "s1", True)
    assert (trend["name"], trend["color"], trend["isFaint"]) == (
        "mean of 4 steps",
        "s1",
        False,
    )
    # Seven steps were lost, and are shown where they were trained again.
    assert lost["name"] == "lost and trained again"
    (values,) = lost["parts"]
    assert [step for step, value in zip(steps, values, strict=True) if value is not None] == [
        51, 52, 53, 54, 55, 56, 57,
    ]  # fmt: skip
    assert loss["marks"] == [50]
    # All charts against the step have one range, as the pictures have.
    assert {tuple(one["span"]) for one in charts.values()} == {tuple(loss["span"])}
    evaluation = charts["Evaluation loss"]
    assert evaluation["x"] == [40, 80, 120, 160, 200]
    assert [one["name"] for one in evaluation["curves"]] == ["heldOut"]
    phases = charts["What a step consists of"]
    assert [one["parts"][0][0] for one in phases["curves"]] == [400, 60, 30, 2, 8]
    assert charts["Learning rate"]["scale"] == "zero"


def test_every_chart_describes_its_picture_in_text(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=57, ended="killed"))
    run.change_world(synthetic.World(last=90, world_size=1))
    plots = build_plots(gather_facts(run.directory))
    assert plots[-1].title == "World size"
    for plot in plots:
        assert plot.chart is not None
        for _, svg in plot.svgs:
            assert f'aria-label="{plot.chart["description"]}"' in svg
            assert " style=" not in svg
        assert len(plot.chart["curves"]) <= len(plot.legend)
        for curve in plot.chart["curves"]:
            assert {len(part) for part in curve["parts"]} == {len(plot.chart["x"])}
    assert plots[-1].chart is not None and plots[-1].chart["form"] == "stairs"
    assert plots[-1].chart["x"] == sorted(plots[-1].chart["x"])


def test_phases_of_a_single_step_remain_a_picture(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=1, ended="killed"))
    html = _page(run.directory)
    assert "What a step consists of" in html
    assert "What a step consists of" not in _charts(html)
    # The others have their charts in the order of the page.
    assert html.count("data-chart") - html.count("[data-chart]") == len(_charts(html))


def test_names_from_the_run_cannot_end_the_data_element(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path, name=HOSTILE)
    run.set_name = HOSTILE
    run.write(synthetic.Process(last=90, ended="killed"))
    log = RunLog(run.directory)
    log.step_end(synthetic.step_record(91, metrics={HOSTILE: 1.0}))
    log.close()
    html = _page(run.directory)
    (text,) = re.findall(r'id="charts">(.*?)</script>', html)
    assert not set("<>&'") & set(text)
    charts = _charts(html)
    assert charts["Evaluation loss"]["curves"][0]["name"] == HOSTILE
    assert HOSTILE in charts
    assert _policy(html)["script-src"] == [_hash(one) for one in _scripts(html)]
    assert len(_scripts(html)) == 4


def test_non_finite_values_are_embedded_as_null(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    directory = RunDirectory(tmp_path)
    log = RunLog(directory)
    for step in range(1, 30):
        loss = math.nan if step % 5 == 0 else math.inf if step == 3 else 2.0
        log.step_end(synthetic.step_record(step, loss=loss, grad_norm=math.nan))
    log.close()
    charts = _charts(_page(directory))
    (values,) = charts["Training loss"]["curves"][0]["parts"]
    assert [index + 1 for index, value in enumerate(values) if value is None] == [
        3, 5, 10, 15, 20, 25,
    ]  # fmt: skip
    assert set(charts["Gradient norm, before clipping"]["curves"][0]["parts"][0]) == {None}


def test_the_charts_of_a_long_run_with_everything_have_a_bounded_size(
    tmp_path: Path, synthetic: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = _long_run(RunDirectory(tmp_path), synthetic, 100_000)
    # Pictures have separate limits, and take longer than all the rest.
    monkeypatch.setattr(plots_module, "draw", lambda *_, **__: "<svg></svg>")
    html = render_html(facts, build_plots(facts), created="now")
    assert len(html) < MOST_BYTES
    charts = _charts(html)
    assert len(charts) == 6 + 12
    for chart in charts.values():
        assert len(chart["x"]) <= MOST_ROWS
        for curve in chart["curves"]:
            assert all(len(part) == len(chart["x"]) for part in curve["parts"])
    # No spike is lost by thinning, and a long run's steps keep all their digits.
    loss = charts["Training loss"]
    _, least, most = loss["curves"][0]["parts"]
    assert min(least) == _digits([facts.steps.loss.min()])[0]
    assert max(most) == _digits([facts.steps.loss.max()])[0]
    assert loss["x"][-2:] == [99_900, 100_000]


@pytest.mark.parametrize("num_steps", [1, MOST_ROWS, MOST_ROWS + 1, 12_345])
def test_rows_have_mean_minimum_and_maximum_of_their_steps(num_steps: int) -> None:
    steps = np.arange(1, num_steps + 1)
    y = np.sin(steps * 12.9898)
    y[::7] = np.nan
    rows = SeriesRows(steps)
    ends = rows.x.astype(int)
    assert len(ends) == min(num_steps, MOST_ROWS) and ends[-1] == num_steps
    parts = rows.bands(y)
    assert len(parts) == (3 if num_steps > MOST_ROWS else 1)
    for index, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        part = y[begin:end][np.isfinite(y[begin:end])]
        expected = (part.mean(), part.min(), part.max()) if len(part) else (math.nan,) * 3
        assert [one[index] for one in parts] == pytest.approx(
            expected[: len(parts)], nan_ok=True
        )
    np.testing.assert_array_equal(rows.means(y)[0], parts[0])


def test_values_of_several_attempts_share_the_row_of_their_step() -> None:
    rows = SeriesRows(np.array([1, 2, 3, 4]))
    steps, y = np.array([2, 3, 2, 9]), np.array([5.0, 6.0, 1.0, 7.0])
    mean, least, most = rows.scattered(steps, y)
    assert mean[1:3].tolist() == [3.0, 6.0]
    assert (least[1], most[1]) == (1.0, 5.0)
    assert np.isnan(mean[[0, 3]]).all()
    (alone,) = rows.scattered(steps[:2], y[:2])
    assert alone[1:3].tolist() == [5.0, 6.0]
