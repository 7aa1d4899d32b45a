"""The report: its facts, its page, its text; for runs of every length and state, with every name escaped."""

import argparse
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from evergrad_trainer.base.errors import RunDirectoryError
from evergrad_trainer.base.records import (
    EvaluationRecord,
    Event,
    EventType,
    RunInfo,
    record_row,
)
from evergrad_trainer.commands import report as report_command
from evergrad_trainer.observers.jsonl import RunLog
from evergrad_trainer.report.build import write_report
from evergrad_trainer.report.facts import gather_facts
from evergrad_trainer.report.html import render_html
from evergrad_trainer.report.markdown import escape, render_markdown
from evergrad_trainer.report.plots import build_plots
from evergrad_trainer.report.series import broken, envelope, means, smooth
from evergrad_trainer.run.directory import RunDirectory, dumps_strict, write_atomically

HOSTILE = "<script>alert(1)</script>\"'&amp;$\\frac{x}$ | `x` *b* </style></title>"
VOID = {"meta", "link", "br", "use", "path", "rect", "input"}


class Page(HTMLParser):
    """Collects tags and text; refuses a page whose tags are not balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] not in ("style", "script"):
            self.text += data


INFO = RunInfo(
    "docs-lm", 1, 2, 200, 0, 8192, 32, 10**7, "bf16", "dataParallel", "llama", "run"
)


def _report(directory: RunDirectory) -> tuple[Page, str]:
    paths = write_report(directory.path, now=0.0)
    html = paths.html.read_text("utf-8")
    _check_self_contained(html)
    return Page(html), paths.markdown.read_text("utf-8")


def _check_self_contained(html: str) -> None:
    page = Page(html)
    assert not [
        tag
        for tag, _ in page.tags
        if tag in ("img", "iframe", "object", "embed", "base", "form")
    ]
    for tag, attributes in page.tags:
        assert "style" not in attributes, tag
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            target = attributes.get(name)
            assert target is None or target.startswith("#") or target == "data:,", (
                tag,
                target,
            )
    style = "".join(re.findall(r"<style>(.*?)</style>", html, re.DOTALL))
    assert "url(" not in style and "@import" not in style
    # The chart library names its home page in a comment, which the browser does not load.
    without_scripts = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert "http://" not in without_scripts and "https://" not in without_scripts
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', without_scripts)) <= set(ids)


def test_a_finished_run_shows_its_numbers_tables_and_plots(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=57, ended="killed"))
    run.write(synthetic.Process(last=200, resumed_from=50, downtime_seconds=30.0))
    page, markdown = _report(run.directory)
    for text in (
        "docs-lm",
        "Complete",
        "1 killed; 7 steps lost",
        "Where the time went",
        "118 MiB",
        "Went on after step",
        "30.0s",
    ):
        assert text in page.text, text
    for title in (
        "Training loss",
        "Evaluation loss",
        "Learning rate",
        "Throughput",
        "Gradient norm",
        "What a step consists of",
    ):
        assert title in page.text
    assert "lost and trained again" in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == 8
    assert "| 200 | heldOut | 2.3177 | 10.15 | 40,960 | 2.0s | best |" in markdown
    assert "| killed | 50 | 7 | 30.0s |" in markdown
    assert "| Training steps that were kept | 1m40s |" in markdown


def test_the_figures_of_the_summary_match_the_run(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=200))
    figures = {
        figure.title: (figure.value, figure.note)
        for figure in gather_facts(run.directory).figures
    }
    mean = np.mean([synthetic.step_record(step).loss for step in range(181, 201)])
    assert figures["Steps"] == ("200", "of 200")
    assert figures["Training loss"][0] == f"{mean:.4f}"
    assert figures["heldOut loss"] == ("2.3177", "perplexity 10.15")
    assert figures["Tokens"][0] == "1.64M"
    assert figures["Tokens per second"] == ("16.4k", "while training; a step takes 500ms")
    assert figures["Restarts"] == ("0", "trained in one go")
    assert figures["Goodput"][0].endswith("%")


def test_hostile_names_are_shown_as_text(tmp_path: Path, synthetic: ModuleType) -> None:
    run = synthetic.RunWriter(tmp_path, name=HOSTILE)
    run.set_name = HOSTILE
    run.write(synthetic.Process(last=90, ended="failed"))
    log = RunLog(run.directory)
    log.event(Event(EventType.WARNING, run.now, 90, 1, {"message": HOSTILE}))
    log.event(
        Event(EventType.SAVE_FAILED, run.now, 90, 1, {"reason": HOSTILE, "failures": 1})
    )
    log.close()
    run.directory.write_resolved(
        {
            "manifest": {
                "metadata": {"name": HOSTILE},
                "spec": {"training": {"model": {"path": HOSTILE}}},
            }
        }
    )
    entry = {
        "command": HOSTILE,
        "versions": {"python": HOSTILE},
        "hardware": {"cpu": HOSTILE, "gpus": [HOSTILE]},
        "git": {"commit": HOSTILE},
    }
    write_atomically(run.directory.provenance, dumps_strict({"processes": [entry]}))
    page, markdown = _report(run.directory)
    assert page.text.count(HOSTILE) >= 10
    # Outside of the code block, none of it is markup; inside, nothing is.
    outside = re.sub(r"```yaml.*?```", "", markdown, flags=re.DOTALL)
    assert "<script" not in outside and "</" not in outside
    assert escape(HOSTILE) in outside
    for line in outside.splitlines():
        if line.startswith("| 40 "):
            assert len(re.findall(r"(?<!\\)\|", line)) == 8


def test_markdown_special_characters_and_line_breaks_are_neutralised() -> None:
    assert (
        escape("a|b\n# *c* <d> `e` [f](g) \\")
        == "a\\|b \\# \\*c\\* &lt;d&gt; \\`e\\` \\[f\\](g) \\\\"
    )


def test_the_configuration_is_folded_and_a_fence_inside_it_does_not_end_its_block(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=3, ended="killed"))
    run.directory.write_resolved(
        {"manifest": {"metadata": {"name": "x"}, "note": "```` and ```"}}
    )
    page, markdown = _report(run.directory)
    assert ("details", {}) in page.tags
    assert "`````yaml\n" in markdown and markdown.count("`````") == 2


@pytest.mark.parametrize("num_steps", [0, 1, 2, 51])
def test_short_runs_have_a_report(
    tmp_path: Path, synthetic: ModuleType, num_steps: int
) -> None:
    run = synthetic.RunWriter(tmp_path).write(
        synthetic.Process(last=num_steps, ended="killed")
    )
    page, markdown = _report(run.directory)
    assert "No end recorded" in page.text
    assert ("No step has been trained yet" in page.text) == (num_steps == 0)
    assert f"| Steps | {num_steps} |" in markdown


def test_a_run_directory_with_only_a_configuration_has_a_report(
    tmp_path: Path,
) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_resolved({"manifest": {"metadata": {"name": "waiting"}}})
    page, markdown = _report(directory)
    assert "waiting" in page.text and "Not started" in page.text
    assert markdown.startswith("# waiting\n")


def test_a_live_run_with_an_incomplete_last_line_has_a_report(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=20, ended="killed"))
    with run.directory.metrics.open("a") as file:
        file.write('{"step":21,')
    page, _ = _report(run.directory)
    assert "metrics.jsonl ends with 11 bytes of an unfinished line" in page.text


@pytest.mark.parametrize(
    ("ended", "label", "detail"),
    [
        ("signal", "Stopped", "stopped by a signal after step 60"),
        ("stop_file", "Stopped", "stopped by the stop file after step 60"),
        ("after_step", "Stopped", "stopped after the requested step after step 60"),
        ("failed", "Failed", "SaveError: 3 saves in a row have failed."),
        (
            "killed",
            "No end recorded",
            "running, or killed; last sign at 2026-02-02 02:40:36 UTC, step 60",
        ),
        ("complete", "Complete", "reached step 60"),
    ],
)
def test_the_status_describes_the_state_of_the_run(
    tmp_path: Path, synthetic: ModuleType, ended: str, label: str, detail: str
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=60, ended=ended))
    status = gather_facts(run.directory).status
    assert (status.label, status.detail) == (label, detail)


def test_a_run_in_several_worlds_shows_them_and_counts_no_restart(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=57, ended="killed"))
    run.change_world(
        synthetic.World(
            last=90, cause="node_lost", detail="node 0 lost", world_size=1, ended="killed"
        )
    )
    run.change_world(
        synthetic.World(
            last=200,
            cause="node_joined",
            detail="node <0> joined",
            world_size=3,
            paused_seconds=60.0,
        )
    )
    page, markdown = _report(run.directory)
    assert "## Changes of the world" in markdown and "Changes of the world" in page.text
    assert "| 57 | 300ms | node 0 lost |" in markdown and "2 → 1" in markdown
    assert "| 90 | 1m00s | node &lt;0&gt; joined |" in markdown
    assert "| node lost | 1 | 300ms | 300ms |" in markdown
    assert "1 × node lost, 1 × node joined; training stood still for 1m00s" in page.text
    assert (
        "1–3 processes" in page.text and "None: the run was trained in one go." in markdown
    )
    assert "World size" in page.text and "since the start" in page.text
    assert (
        "Changes of the world: from the last step before to the first step after"
        in markdown
    )


def test_a_run_in_one_world_shows_no_world_changes(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    page, markdown = _report(
        synthetic.RunWriter(tmp_path).write(synthetic.Process(last=57)).directory
    )
    assert "Changes of the world" not in markdown + page.text
    assert "World size" not in page.text


def test_steps_lost_in_a_kill_and_not_yet_repeated_are_not_progress(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=57, ended="killed"))
    run.write(synthetic.Process(last=53, resumed_from=50, ended="killed"))
    facts = gather_facts(run.directory)
    assert facts.figures[0].value == "53"
    assert facts.steps.step.tolist() == list(range(1, 54))
    assert facts.superseded.step.tolist() == list(range(51, 58))


def test_non_finite_values_leave_gaps_and_a_warning(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    directory = RunDirectory(tmp_path)
    log = RunLog(directory)
    for step in range(1, 200):
        log.step_end(
            synthetic.step_record(
                step,
                loss=math.nan if step % 5 == 0 else 2.0,
                grad_norm=math.nan,
                step_seconds=0.0,
            )
        )
    log.evaluation_end(
        EvaluationRecord(50, 1, "heldOut", math.nan, math.nan, 1, 1.0, synthetic.BEGIN)
    )
    log.close()
    page, _ = _report(directory)
    assert "39 steps had a loss that is not a number" in page.text
    assert "NaN" not in page.text and ">nan" not in page.text


def test_a_run_with_only_non_finite_losses_has_a_report(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    directory = RunDirectory(tmp_path)
    log = RunLog(directory)
    for step in range(1, 30):
        log.step_end(
            synthetic.step_record(
                step, loss=math.nan, learning_rate=math.nan, step_seconds=math.nan
            )
        )
    log.close()
    page, markdown = _report(directory)
    assert "29" in page.text and "Training loss" in page.text
    assert "29" in markdown


def test_an_exploding_loss_is_drawn_on_a_logarithmic_axis(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    directory = RunDirectory(tmp_path)
    log = RunLog(directory)
    for step in range(1, 100):
        log.step_end(
            synthetic.step_record(
                step, loss=2.0 if step < 95 else 10.0**step, grad_norm=10.0 ** (step % 7)
            )
        )
    log.close()
    page, _ = _report(directory)
    assert "Training loss" in page.text and "99" in page.text


@pytest.mark.parametrize("largest", [1e300, 1.7e308])
def test_values_near_the_largest_float_have_a_report(
    tmp_path: Path, synthetic: ModuleType, largest: float
) -> None:
    """From -1.7e308 to 1.7e308 is a span that no floating-point number holds, which ended in a traceback."""
    directory = RunDirectory(tmp_path)
    log = RunLog(directory)
    for step in range(1, 7):
        huge = largest * (-1) ** step
        log.step_end(
            synthetic.step_record(step, loss=huge, grad_norm=-huge, metrics={"kl": huge})
        )
        log.evaluation_end(
            EvaluationRecord(step, 1, "heldOut", huge, 1.0, 1, 1.0, synthetic.BEGIN)
        )
    log.close()
    page, _ = _report(directory)
    assert "Training loss" in page.text and "Evaluation loss" in page.text


def test_the_same_files_give_the_same_report_except_for_its_time(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path / "run").write(synthetic.Process(last=60))
    first = write_report(run.directory.path, output=tmp_path / "a", now=1000.0)
    second = write_report(run.directory.path, output=tmp_path / "b", now=2000.0)
    for left, right in ((first.html, second.html), (first.markdown, second.markdown)):
        lines = [path.read_text().splitlines() for path in (left, right)]
        different = [pair for pair in zip(*lines, strict=True) if pair[0] != pair[1]]
        assert len(different) == 1
        assert (
            "1970-01-01 00:16:40" in different[0][0]
            and "1970-01-01 00:33:20" in different[0][1]
        )


def test_a_hundred_thousand_steps_give_a_page_of_bounded_size(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    row = dumps_strict(record_row(synthetic.step_record(1)))
    head, rest = row.split(",", 1)
    assert head == '{"step":1'
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.writelines(f'{{"step":{step},{rest}\n' for step in range(1, 100_001))
    paths = write_report(tmp_path, now=0.0)
    assert paths.html.stat().st_size < 500_000


def test_long_tables_show_their_ends_and_state_what_is_omitted(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(
        tmp_path, total_steps=300, save_every=2, evaluate_every=3
    ).write(synthetic.Process(last=300))
    facts = gather_facts(run.directory)
    markdown, html = render_markdown(facts, created=""), render_html(facts, (), created="")
    assert "100 rows are left out here" in Page(html).text
    assert "| … 50 rows are left out here |" in markdown
    assert "| 300 |" in markdown and "| 3 | heldOut |" in markdown


def test_metrics_of_a_recipe_have_a_plot_each_and_columns_in_the_evaluation_table(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=3, ended="killed"))
    log = RunLog(run.directory)
    for step in (4, 5):
        log.step_end(synthetic.step_record(step, metrics={"kl": 0.5 * step}))
    log.evaluation_end(
        EvaluationRecord(5, 1, "heldOut", 2.5, 12.2, 100, 1.0, run.now, {"accuracy": 0.625})
    )
    log.close()
    facts = gather_facts(run.directory)
    plots = {plot.title: plot for plot in build_plots(facts)}
    assert plots["kl"].legend[-1].value == "last 2.5"
    assert facts.evaluations.titles[3:6] == ("Perplexity", "accuracy", "Tokens")
    assert facts.evaluations.rows[-1][4] == "0.6250"


def test_a_metric_plot_has_the_unit_and_the_meaning_that_the_recipe_declares(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    directory = RunDirectory(tmp_path)
    directory.create()
    log = RunLog(directory)
    kl = {"unit": "nats", "help": "divergence from the teacher"}
    log.run_start(replace(INFO, metrics={"kl": kl}))
    log.event(Event(EventType.START, synthetic.BEGIN, 0, 1, {"resumed_from": None}))
    for step in (1, 2):
        log.step_end(synthetic.step_record(step, metrics={"kl": 0.5 * step}))
    log.close()
    facts = gather_facts(directory)
    assert facts.metrics == {"kl": kl}
    plots = {plot.title: plot for plot in build_plots(facts)}
    (_, markup) = plots["kl, divergence from the teacher"].svgs[0]
    assert "nats" in markup


@pytest.mark.parametrize("items", ["tokens", "pairs"])
def test_a_loss_has_the_unit_over_which_the_recipe_averages(
    tmp_path: Path, synthetic: ModuleType, items: str
) -> None:
    directory = RunDirectory(tmp_path)
    directory.create()
    log = RunLog(directory)
    log.run_start(replace(INFO, loss_items=items))
    log.event(Event(EventType.START, synthetic.BEGIN, 0, 1, {"resumed_from": None}))
    for step in (1, 2):
        log.step_end(synthetic.step_record(step))
    log.evaluation_end(
        EvaluationRecord(2, 1, "heldOut", 2.5, 12.2, 40, 1.0, synthetic.BEGIN)
    )
    log.close()
    page, markdown = _report(directory)
    is_of_tokens = items == "tokens"
    assert ("nats per token" in page.text, "nats per token" in markdown) == (
        is_of_tokens,
    ) * 2
    assert ("mean over pairs" in page.text) == (not is_of_tokens)
    assert ("erplexity" in page.text) == is_of_tokens
    assert ("| Pairs | Took" in markdown, "| Tokens | Took" in markdown) == (
        not is_of_tokens,
        is_of_tokens,
    )
    assert (
        "of them carried a loss" if is_of_tokens else "pairs carried a loss"
    ) in markdown


@pytest.mark.parametrize("samples", [256, 8])
def test_samples_without_text_are_counted_as_samples(
    tmp_path: Path, synthetic: ModuleType, samples: int
) -> None:
    """One without text counts as one token in the rows; a step of as many of both has no text."""
    directory = RunDirectory(tmp_path)
    directory.create()
    log = RunLog(directory)
    info = replace(INFO, tokens_per_step=256, samples_per_step=samples, loss_items="edits")
    log.run_start(info)
    log.event(Event(EventType.START, synthetic.BEGIN, 0, 1, {"resumed_from": None}))
    for step in (1, 2):
        log.step_end(synthetic.step_record(step))
    log.close()
    unit, other = ("Samples", "Tokens") if samples == 256 else ("Tokens", "Samples")
    page, markdown = _report(directory)
    for text in (page.text, markdown):
        assert f"{unit} per second" in text and f"{other} per second" not in text
    assert f"{unit.lower()} per second" in page.text
    assert re.search(rf"\*?{unit}\b.*edits carried a loss", markdown)


def test_many_evaluation_sets_are_all_in_the_table_and_six_in_the_plot(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=30))
    log = RunLog(run.directory)
    for index in range(9):
        log.evaluation_end(
            EvaluationRecord(30, 1, f"set-{index}", 2.0 + index, 7.4, 100, 1.0, run.now)
        )
    log.close()
    page, markdown = _report(run.directory)
    assert "and 3 more sets in the table" in page.text
    assert all(f"| set-{index} |" in markdown for index in range(9))


def test_an_invalid_row_is_reported_with_its_line_and_no_report_is_written(
    tmp_path: Path,
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl line 1"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_report_that_cannot_be_written_names_the_path(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path / "run").write(
        synthetic.Process(last=1, ended="killed")
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RunDirectoryError,
        match="file: cannot be created; a file of that name is in the way",
    ):
        write_report(run.directory.path, output=tmp_path / "file")


def _run_command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    report_command.add_arguments(parser)
    return report_command.execute(parser.parse_args(list(arguments)))


def test_the_command_prints_the_path_of_the_report(
    tmp_path: Path, synthetic: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    run = synthetic.RunWriter(tmp_path / "run").write(synthetic.Process(last=60))
    assert _run_command(str(run.directory.path)) == 0
    directory = run.directory
    written = (directory.report_html, directory.report_markdown, directory.summary)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"report: {written[0]}", *(f"        {path}" for path in written[1:])]
    assert run.directory.report_html.exists() and run.directory.report_markdown.exists()


def test_the_command_prints_the_figures_as_json(
    tmp_path: Path, synthetic: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    run = synthetic.RunWriter(tmp_path / "run").write(
        synthetic.Process(last=57, ended="killed")
    )
    run.write(synthetic.Process(last=60, resumed_from=50))
    assert (
        _run_command(str(run.directory.path), "--json", "--output", str(tmp_path / "out"))
        == 0
    )
    summary: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert summary["html"] == str(tmp_path / "out" / "report.html")
    assert (summary["run"], summary["status"], summary["step"]) == (
        "docs-lm",
        "Complete",
        60,
    )
    assert summary["loss"] == synthetic.step_record(60).loss
    assert summary["goodput"]["lost_seconds"]["recompute"] == pytest.approx(3.5)
    assert summary["restarts"][0]["cause"] == "killed"


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="is not a run directory"):
        _run_command(str(tmp_path))


def test_thinning_keeps_every_spike_and_the_ends() -> None:
    x = np.arange(1, 100_001)
    y = np.zeros(100_000)
    y[77_777] = 50.0
    y[12_345] = -3.0
    curve = envelope(x, y)
    assert len(curve) <= 700
    assert (float(curve.y.max()), float(curve.y.min())) == (50.0, -3.0)
    assert curve.x[0] <= 300 and curve.x[-1] >= 99_700
    assert np.all(np.diff(curve.x) > 0)


def test_thinned_means_are_the_means_of_their_spans() -> None:
    curve = means(
        np.arange(1, 1001), np.where(np.arange(1000) % 2 == 0, 1.0, np.nan), points=10
    )
    assert curve.y.tolist() == [1.0] * 10
    assert curve.x.tolist() == [50.5 + 100 * index for index in range(10)]


def test_smoothing_is_centred_and_skips_non_finite_values() -> None:
    values = np.array([1.0, 2.0, np.nan, 4.0, 5.0])
    assert smooth(values, 3).tolist() == [1.5, 1.5, 3.0, 4.5, 4.5]
    assert smooth(np.array([2.0]), 1).tolist() == [2.0]
    assert np.isnan(smooth(np.array([np.nan]), 5)).all()
    spiky = np.concatenate([[1e15], np.full(1000, 2.0)])
    assert smooth(spiky, 3)[500] == pytest.approx(2.0)


def test_a_curve_breaks_at_restarted_steps() -> None:
    curve = broken(np.array([5, 6, 7, 5, 6]), np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert np.isnan(curve.x[3]) and curve.x[[0, 1, 2, 4, 5]].tolist() == [5, 6, 7, 5, 6]


def test_a_run_without_steps_has_no_plots(tmp_path: Path, synthetic: ModuleType) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=0, ended="killed"))
    assert build_plots(gather_facts(run.directory)) == ()


def test_each_change_of_the_manifest_is_a_row_with_step_field_and_values(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path).write(synthetic.Process(last=3, ended="killed"))
    changes = [
        {"path": "spec.training.overrides", "old": None, "new": [{"fromStep": 9}]},
        {"path": "spec.training.horizon.steps", "old": 100, "new": 200},
        {
            "path": "spec.training.checkpoint.every",
            "old": {"steps": 5},
            "new": {"steps": 2},
        },
        {"path": "spec.training.recipe (own.py)", "old": "sha256:1", "new": "sha256:2"},
    ]
    log = RunLog(run.directory)
    log.event(Event(EventType.CHANGED, run.now, 3, 1, {"changes": changes}))
    log.close()
    facts = gather_facts(run.directory)
    assert facts.changes.rows == (
        ("3", "spec.training.overrides", "null", '[{"fromStep": 9}]'),
        ("3", "spec.training.horizon.steps", "100", "200"),
        ("3", "spec.training.checkpoint.every", '{"steps": 5}', '{"steps": 2}'),
        ("3", "spec.training.recipe (own.py)", '"sha256:1"', '"sha256:2"'),
    )
    assert "Changes of the file" in render_html(facts, (), created="now")
    assert "| 3 | spec.training.horizon.steps | 100 | 200 |" in render_markdown(
        facts, created="now"
    )
