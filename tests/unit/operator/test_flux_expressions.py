"""The health expressions for Flux: evaluated by Flux's own code for every state of a run."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from run_samples import make_samples

from bed import toolbox

ROOT = Path(__file__).resolve().parents[3]
AT_ITS_END = {"suspended", "stopped", "complete"}
FAILED = {
    "image_missing_for_minutes",
    "refused_by_a_policy",
    "invalid",
    "unreadable",
    "unreadable_edit",
    "not_finite",
    "failed",
}


def find_check() -> dict[str, Any]:
    for one in yaml.safe_load_all(
        (ROOT / "examples/gitops/flux/runs.yaml").read_text("utf-8")
    ):
        if one["kind"] == "Kustomization":
            [check] = one["spec"]["healthCheckExprs"]
            return dict(check)
    raise AssertionError("no Kustomization")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_flux_waits_for_the_end_of_a_run_and_fails_if_a_person_must_act() -> None:
    if reason := toolbox.unavailable("fluxhealth"):
        pytest.skip(reason)
    samples = make_samples()
    question = {"check": find_check(), "objects": list(samples.values())}
    answers = toolbox.ask("fluxhealth", question)
    found = {name: one["status"] for name, one in zip(samples, answers, strict=True)}
    assert [one["error"] for one in answers if one["error"]] == []
    assert {name for name, status in found.items() if status == "Current"} == AT_ITS_END
    assert {name for name, status in found.items() if status == "Failed"} == FAILED
    assert set(found.values()) == {"Current", "Failed", "InProgress"}


def test_expressions_match_the_kind_and_conditions_that_the_operator_writes() -> None:
    check = find_check()
    run = make_samples()["complete"]
    assert (check["apiVersion"], check["kind"]) == (run["apiVersion"], run["kind"])
    kinds = {one["type"] for one in run["status"]["conditions"]}
    named = {word for word in ("Failed", "Stalled") if f"'{word}'" in check["failed"]}
    named |= {word for word in ("Complete", "Suspended") if f"'{word}'" in check["current"]}
    assert named == {"Failed", "Stalled", "Complete", "Suspended"} <= kinds
