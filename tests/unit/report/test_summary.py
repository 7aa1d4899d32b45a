"""The summary of a run: its figures, and hashes of its files that others can check."""

import hashlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from evergrad_trainer.base.records import record_row
from evergrad_trainer.report.build import write_report


@pytest.mark.acceptance("number-G-87")
@pytest.mark.capability("G-67", "G-87", "G-94", "G-95", "G-98")
def test_the_summary_counts_samples_and_skipped_steps_and_hashes_each_file(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path / "run")
    run.write(synthetic.Process(last=20, ended="killed"))
    run.write(synthetic.Process(last=50, resumed_from=20))
    start = {"type": "start", "resumed_from": 20, "samples_per_step": 32}
    # Trained twice, a skipped step counts once.
    skipped = {"type": "skipped", "why": "loss", "message": "not finite", "in_a_row": 1}
    with run.directory.events.open("a") as file:
        for event, step in ((start, 20), (skipped, 27), (skipped, 27), (skipped, 31)):
            file.write(
                json.dumps(event | {"time": run.now, "step": step, "generation": 2}) + "\n"
            )
    paths = write_report(run.directory.path, now=0.0)

    summary = json.loads(paths.summary.read_text("utf-8"))
    assert (summary["format"], summary["step"]) == (1, 50)
    assert summary["run"] == "run" and isinstance(summary["loss"], float)
    assert summary["status"] and summary["metrics"] == {}
    assert (summary["samples"], summary["newSamples"]) == (50 * 32, 30 * 32)
    assert summary["skippedSteps"] == {"loss": 2}
    rows = {row["file"]: row for row in summary["files"]}
    assert {"metrics.jsonl", "events.jsonl", "report.html", "report.md"} <= set(rows)
    for name, row in rows.items():
        content = (run.directory.path / name).read_bytes()
        assert row["bytes"] == len(content)
        assert row["sha256"] == hashlib.sha256(content).hexdigest()


def test_a_run_without_a_step_has_a_summary(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    summary = json.loads(write_report(tmp_path, now=0.0).summary.read_text("utf-8"))
    assert (summary["step"], summary["loss"], summary["samples"]) == (0, None, 0)


def test_samples_and_tokens_are_counted_for_the_own_steps_of_the_run(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    """A run that continues after step 20 of another run has no rows of the earlier steps."""
    run = synthetic.RunWriter(tmp_path / "run")
    run.write(synthetic.Process(last=50, resumed_from=20))
    start = {"type": "start", "resumed_from": 20, "samples_per_step": 32}
    with run.directory.events.open("a") as file:
        file.write(
            json.dumps(start | {"time": run.now, "step": 20, "generation": 1}) + "\n"
        )
    path = write_report(run.directory.path, now=0.0).summary
    summary = json.loads(path.read_text("utf-8"))
    assert summary["tokens"] == 30 * 8192
    assert summary["samples"] == summary["newSamples"] == 30 * 32


def test_a_row_that_a_frozen_process_writes_late_is_not_the_progress_of_the_run(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path / "run")
    run.write(synthetic.Process(last=57, ended="killed"))
    run.change_world(synthetic.World(last=200))
    expected = json.loads(
        write_report(run.directory.path, now=0.0).summary.read_text("utf-8")
    )
    late = synthetic.step_record(58, generation=1, loss=9.0, time=run.now)
    with run.directory.metrics.open("a") as file:
        file.write(json.dumps(record_row(late)) + "\n")
    paths = write_report(run.directory.path, now=0.0)
    summary = json.loads(paths.summary.read_text("utf-8"))
    for name in ("status", "step", "loss", "tokens", "evaluations"):
        assert summary[name] == expected[name], name
    assert summary["step"] == 200
    assert "reached step 200" in paths.markdown.read_text("utf-8")


def test_measurements_of_lost_steps_are_not_results(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    """Killed after step 20 and resumed at 10: step 18 was skipped, and 20 evaluated, with other weights."""
    run = synthetic.RunWriter(tmp_path / "run", evaluate_every=10)
    run.write(synthetic.Process(last=20, ended="killed"))
    skipped = {"type": "skipped", "why": "loss", "message": "not finite", "in_a_row": 1}
    event = skipped | {"time": run.now, "step": 18, "generation": 1}
    with run.directory.events.open("a") as file:
        file.write(json.dumps(event) + "\n")
    rows = run.directory.metrics.read_text("utf-8").splitlines()
    rows[17] = json.dumps(json.loads(rows[17]) | {"loss": None})
    run.directory.metrics.write_text("\n".join(rows) + "\n", "utf-8")

    def report() -> tuple[list[int], dict[str, int], str]:
        paths = write_report(run.directory.path, now=0.0)
        summary = json.loads(paths.summary.read_text("utf-8"))
        steps = [one["step"] for one in summary["evaluations"]]
        return steps, summary["skippedSteps"], paths.markdown.read_text("utf-8")

    steps, counted, page = report()
    assert (steps, counted) == ([10, 20], {"loss": 1})
    assert "1 step had a loss that is not a number" in page

    run.write(synthetic.Process(last=15, resumed_from=10, ended="killed"))
    steps, counted, page = report()
    assert (steps, counted) == ([10], {})
    assert "not a number" not in page and "step 18" not in page

    # Even if the step was repeated, and was measured with another value.
    run._evaluate_every = 7
    run.write(synthetic.Process(last=22, resumed_from=15, ended="killed"))
    assert report()[:2] == ([10, 21], {})


def test_the_step_that_stopped_a_run_counts_as_non_finite(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path / "run")
    run.write(synthetic.Process(last=20))
    found = {"why": "loss", "message": "not finite", "in_a_row": 1, "generation": 1}
    with run.directory.events.open("a") as file:
        # A skipped step has its own number; a stop has the number of the newest finished step.
        for kind, step in (("skipped", 20), ("non_finite", 20)):
            file.write(
                json.dumps(found | {"type": kind, "time": run.now, "step": step}) + "\n"
            )
    path = write_report(run.directory.path, now=0.0).summary
    assert json.loads(path.read_text("utf-8"))["skippedSteps"] == {"loss": 2}


def test_without_a_new_page_the_old_page_is_removed_and_the_figures_are_current(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path / "run")
    run.write(synthetic.Process(last=20, ended="killed"))
    old = write_report(run.directory.path, now=0.0)
    assert old.html.exists()
    run.write(synthetic.Process(last=50, resumed_from=20))
    new = write_report(run.directory.path, now=0.0, has_page=False)
    assert not new.html.exists()
    summary = json.loads(new.summary.read_text("utf-8"))
    assert summary["step"] == 50
    rows = {row["file"]: row["sha256"] for row in summary["files"]}
    assert "report.html" not in rows
    content = run.directory.metrics.read_bytes()
    assert rows["metrics.jsonl"] == hashlib.sha256(content).hexdigest()
