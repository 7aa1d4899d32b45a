"""Counts how many runs of ``examples/scripts/hf_trainer.py`` on two nodes end next to busy processes.

    python tools/benchmarks/script_ends.py --runs 40 --busy 8

Every run is ``evergrad run … --nodes 2`` in a process of its own, forked from one that has imported what
the command and the script need. A run that has not ended after ``--limit`` seconds is shown with its stacks,
counts as hung, and is killed. Not a part of CI: it takes as long as its runs take.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from evergrad_cli.main import main as evergrad
from evergrad_coordinator.edge.stacks import read_stacks_of
from evergrad_trainer.commands import nodes, run
from evergrad_trainer.node.run import prepare_process

ROOT = Path(__file__).resolve().parents[2]
WARM = (LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, nodes, run)
"""Imported before the first fork, like in the launcher of a run."""


def start(folder: Path) -> int:
    """Start one run in ``folder``; return its process id."""
    folder.mkdir()
    script = ROOT / "examples" / "scripts" / "hf_trainer.py"
    command = [str(script), "--output", str(folder / "out"), "--steps", "20"]
    manifest = {
        "apiVersion": "evergrad.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": "demo"},
        "spec": {
            "nodes": {"min": 1, "max": 2},
            "workersPerNode": 1,
            "script": {"command": command, "env": {"OMP_NUM_THREADS": "1"}},
        },
    }
    (folder / "run.yaml").write_text(json.dumps(manifest))
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        log = os.open("log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os._exit(evergrad(["run", "run.yaml", "--nodes", "2"]))
    return pid


def keep_busy(count: int, *, niceness: int) -> list[int]:
    """Start ``count`` processes that compute until they are killed."""
    pids = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            os.nice(niceness)
            while True:
                sum(range(100_000))
        pids.append(pid)
    return pids


def follow(arguments: argparse.Namespace, folder: Path) -> Counter[str]:
    """Run all runs, some at the same time; return how they ended."""
    waiting = [folder / str(number) for number in range(1, arguments.runs + 1)]
    running: dict[int, tuple[Path, float]] = {}
    ends: Counter[str] = Counter()
    while waiting or running:
        while waiting and len(running) < arguments.at_once:
            place = waiting.pop(0)
            running[start(place)] = place, time.monotonic()
        time.sleep(0.2)
        for pid, (place, began) in list(running.items()):
            seconds = time.monotonic() - began
            ended, status = os.waitpid(pid, os.WNOHANG)
            how = f"exit code {os.waitstatus_to_exitcode(status)}"
            if not ended:
                if seconds < arguments.limit:
                    continue
                how = "hung"
                print(read_stacks_of(pid, native=True), flush=True)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            del running[pid]
            ends[how] += 1
            print(f"run {place.name}: {how} after {seconds:.1f} s", flush=True)
            if how != "exit code 0":
                print((place / "log").read_text(errors="replace")[-3000:], flush=True)
    return ends


def main() -> int:
    """Returns 0 if every run has ended with exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument(
        "--busy", type=int, default=8, help="processes that compute meanwhile"
    )
    parser.add_argument("--niceness", type=int, default=0, help="of the busy processes")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of one run")
    arguments = parser.parse_args()
    os.environ["TRANSFORMERS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"
    prepare_process()
    busy = keep_busy(arguments.busy, niceness=arguments.niceness)
    try:
        with tempfile.TemporaryDirectory(prefix="script-ends-") as folder:
            ends = follow(arguments, Path(folder))
    finally:
        for pid in busy:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    print(
        f"{ends['exit code 0']} of {arguments.runs} runs ended with exit code 0: {dict(ends)}"
    )
    return 0 if ends["exit code 0"] == arguments.runs else 1


if __name__ == "__main__":
    sys.exit(main())
