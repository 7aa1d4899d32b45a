"""The time of a run's pods in its report: read from the run's object of a cluster, and refused if it is
invalid."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from evergrad_common.causes import USES
from evergrad_trainer.base.errors import RunDirectoryError
from evergrad_trainer.report.build import write_report
from evergrad_trainer.report.pod_time import read_pod_time

USAGE = {
    "podHours": "41.20",
    "gpuHours": "312.80",
    "waste": "6%",
    "cost": "782.00 EUR",
    "byCause": {"queue": 7560, "training": 131040, "recovery": 2400},
}


def make_object(
    usage: Any = USAGE, *, name: str = "docs-lm", kind: str = "TrainingRun"
) -> str:
    return json.dumps(
        {"kind": kind, "metadata": {"name": name}, "status": {"usage": usage}}
    )


def test_the_sums_and_each_use_are_read_in_the_order_of_the_catalogue() -> None:
    found = read_pod_time(make_object(), source="run.json", run="docs-lm")
    sums, _, note = found.summary.partition(". ")
    assert sums == "41.20 pod-hours, 312.80 GPU-hours, 6% waste, 782.00 EUR"
    assert note.startswith("Counted by the cluster")
    assert found.table.rows == (
        (USES["training"], "yes", "36h24m", "92.9%"),
        (USES["recovery"], "", "40m00s", "1.7%"),
        (USES["queue"], "", "2h06m", "5.4%"),
    )
    assert found.raw == USAGE


def test_an_unknown_use_and_a_missing_sum_are_omitted() -> None:
    usage = {
        "podHours": "1.00",
        "byCause": {"training": 3600, "holidays": 10, "idle": "many"},
    }
    found = read_pod_time(make_object(usage), source="run.json", run=None)
    assert found.summary.startswith("1.00 pod-hours. Counted")
    assert [row[0] for row in found.table.rows] == [USES["training"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is neither JSON nor YAML"),
        ("", "is not one TrainingRun"),
        (make_object(kind="List"), "is not one TrainingRun"),
        (make_object(name="other"), "is run other, and the report is on docs-lm"),
        (make_object(None), "its status has no usage"),
        (make_object({"byCause": []}), "its status has no usage"),
    ],
)
def test_an_object_of_another_run_is_refused(text: str, message: str) -> None:
    with pytest.raises(RunDirectoryError, match=f"^run.json: {message}"):
        read_pod_time(text, source="run.json", run="docs-lm")


def test_the_report_has_a_section_on_the_time_of_pods(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path / "run").write(synthetic.Process(last=20))
    name = json.loads(write_report(run.directory.path).summary.read_text("utf-8"))["run"]
    # Without the object, the report contains nothing about pods.
    assert "time of pods" not in (run.directory.path / "report.html").read_text("utf-8")

    object_path = tmp_path / "object.json"
    object_path.write_text(make_object(name=name))
    paths = write_report(run.directory.path, cluster_run=object_path)
    for path in (paths.html, paths.markdown):
        text = path.read_text("utf-8")
        assert "Where the time of pods went" in text
        assert "41.20 pod-hours, 312.80 GPU-hours, 6% waste, 782.00 EUR." in text
        assert USES["queue"] in text and "2h06m" in text
    assert json.loads(paths.summary.read_text("utf-8"))["usage"] == USAGE


def test_no_report_is_written_if_the_object_cannot_be_read(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run = synthetic.RunWriter(tmp_path / "run").write(synthetic.Process(last=1))
    with pytest.raises(RunDirectoryError, match=r"missing\.json: cannot be read"):
        write_report(run.directory.path, cluster_run=tmp_path / "missing.json")
    assert not (run.directory.path / "report.html").exists()
