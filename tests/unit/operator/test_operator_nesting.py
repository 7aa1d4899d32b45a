"""Objects with thousands of levels, as stored by an API server: they do not affect other runs."""

import json
import subprocess
import sys
from typing import Any

from fake_kubernetes.recipe import TRAINING
from patience import PATIENCE

from evergrad_operator.core.objects.slim import slim_run
from evergrad_operator.core.observe.spec import parse_run

READ = """
import copy, json, sys
from evergrad_operator.__main__ import DEEPEST
sys.setrecursionlimit(DEEPEST)
text = json.dumps({"items": [{"metadata": {"name": "other"}}]})[:-2]
text += ', {"spec": ' + '{"a":' * 9990 + "1" + "}" * 9990 + "}]}"
first, deep = copy.deepcopy(json.loads(text))["items"]
print(first["metadata"]["name"], len(json.dumps(deep)))
"""


def deep_run(levels: int = 900) -> dict[str, Any]:
    options = json.loads('{"a":' * levels + "1" + "}" * levels)
    return {
        "metadata": {"name": "deep", "namespace": "ns", "uid": "u"},
        "spec": {"training": {**TRAINING, "options": options}},
    }


def test_an_object_with_the_deepest_nesting_that_an_api_server_stores_can_be_read() -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "other"), done.stderr[-500:]


def test_a_run_that_is_nested_too_deeply_has_one_problem_and_is_cut_before_it_is_cached() -> (
    None
):
    kept = slim_run(deep_run())
    assert len(json.dumps(kept)) < 3_000
    run = parse_run(kept)
    [problem] = run.parsed.problems
    assert (
        problem.path == "spec.training.options" and "deeper than 64 levels" in problem.what
    )
    # Its envelope can be read, so that it can be explained, suspended and deleted.
    assert (run.spec.nodes.min, run.parsed.is_whole) == (1, False)
    assert run.find_obstacles(has_begun=True) == (problem,)
