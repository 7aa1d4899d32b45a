"""``evergrad evaluate``: the same bits as the run's own evaluation, cut and resumed, beside a living run."""

import json
from typing import Any

from run_helpers import Experiment, read_lines, recipe

EVALUATED: dict[str, Any] = {
    "data": {"heldOut": {"count": 6}},
    "evaluation": {
        "every": {"steps": 2},
        "sources": [{"name": "other", "path": "other.jsonl"}],
    },
}


def test_a_finished_run_is_evaluated_with_the_bits_of_its_own_evaluation(
    experiment: Experiment,
) -> None:
    from run_helpers import write_documents

    write_documents(experiment.path / "other.jsonl", count=20, seed=5)
    experiment.write(recipe(**EVALUATED))
    experiment.run()
    own = [row for row in read_lines(experiment.at() / "evaluation.jsonl") if row["step"] == 8]
    ended = experiment.command("evaluate", "runs/tiny", "--json").expect(0)
    found = json.loads(ended.out)["results"]
    assert [(row["name"], row["loss"], row["tokens"]) for row in found] == [
        (row["name"], row["loss"], row["tokens"]) for row in own
    ]
    assert len(own) == 2
