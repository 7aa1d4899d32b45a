"""Runs a script that uses torch's collectives on two nodes until its test lets it finish."""

from typing import Any

from cluster_runs import Run, Runs, wait_for

SCRIPT = """
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from evergrad import elastic

dist.init_process_group("gloo")
step = 0
while True:
    is_over = torch.tensor([float(Path(sys.argv[1]).exists())])
    dist.all_reduce(is_over, op=dist.ReduceOp.MAX)
    step += 1
    elastic.report(step)
    if is_over.item():
        break
    time.sleep(0.2)
dist.destroy_process_group()
"""


def start_script(runs: Runs, name: str) -> Run:
    """A run that has done some steps on two nodes and continues until ``finish``."""
    runs.kubectl("create", "configmap", "script", f"--from-literal=train.py={SCRIPT}")
    run = runs.start(
        name,
        steps=1,
        nodes={"min": 2, "max": 2},
        training=None,
        script={"command": ["/script/train.py", _mark_of(name)]},
        template={
            "volumes": [{"name": "script", "configMap": {"name": "script"}}],
            "volumeMounts": [{"name": "script", "mountPath": "/script"}],
        },
    )
    run.wait_for_pods(0, 1)
    wait_for(lambda: step_of(run) > 1, "the first steps")
    return run


def step_of(run: Run) -> int:
    """Return the last step that the script reported, from the status."""
    return int(run.status().get("progress", {}).get("step") or 0)


def finish(run: Run) -> dict[str, Any]:
    """Let the script finish, and return the status of the complete run."""
    pod = run.live_pods()[0]["metadata"]["name"]
    command = ("python", "-c", f"open({_mark_of(run.name)!r}, 'w')")
    run.runs.kubectl("exec", pod, "-c", "trainer", "--", *command)
    return run.wait_for_phase("Complete")


def _mark_of(name: str) -> str:
    """Return the file that ends the script when it exists."""
    return f"/volume/{name}/finish"
