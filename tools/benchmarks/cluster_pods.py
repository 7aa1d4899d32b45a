"""``make bench-cluster-pods``: a killed pod on the two-node Kubernetes of tools/bed, compared with an Indexed
Job that runs stock torchrun.

Uses real kubelets, containers and the trainer image. For how to read the rows, see README.md next to this
file.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import cluster_stock as stock
import installed_operator
from cluster_runs import (
    QUICKSTART,
    Run,
    Runs,
    documents,
    make_manifest,
    merged,
    read_rows,
    wait_for,
)
from common import Row, model_config, print_rows

from bed.cluster import Bed
from bed.fixtures import Cluster
from bed.places import KUBECONFIG, STORAGE_CLASS

SAMPLES_FILE = Path(__file__).with_name("results") / "cluster-pods-samples.json"
EVENTS = 5
RESUMED_NODES = 3
"""Number of nodes of the run that is suspended and resumed."""
SETTLED_STEPS = 8
"""Number of steps of the whole group before a pod is killed."""
RESOURCES = {"requests": {"cpu": "100m", "memory": "512Mi"}}
Sample = dict[str, float]
Parts = tuple[str, ...]


@dataclass(frozen=True)
class Bench:
    """Objects that all parts need: a cluster with the operator, and a folder."""

    cluster: Cluster
    trainer_image: str
    scratch: Path

    @contextlib.contextmanager
    def namespace(self) -> Iterator[Runs]:
        """Provide a namespace for one run or Job, and delete it afterwards."""
        name = f"bench-{uuid.uuid4().hex[:6]}"
        runs = Runs(self.cluster, name, self.scratch)
        runs.kubectl("create", "namespace", name)
        try:
            yield runs
        finally:
            runs.remove()
            with contextlib.suppress(
                AssertionError
            ):  # what is left of it must not take CPU from the next
                wait_for(lambda: not runs.list("pods"), "the end of its pods")


# ---- parts -------------------------------------------------------------------------------------------------


def measure_quickstart(bench: Bench, events: int) -> list[Sample]:
    """Measure from just before `kubectl apply` to the end of the first step, according to the run's own
    record."""
    samples = []
    for _ in range(events):
        with bench.namespace() as runs:
            begun = time.time()
            runs.kubectl("apply", "-f", str(QUICKSTART))
            run = runs.adopt("quickstart")
            run.wait_for_step(0)
            samples.append({"first_step": run.rows()[0]["time"] - begun})
            _say(samples[-1])
    return samples


def measure_recipe(bench: Bench, events: int) -> list[Sample]:
    """Kill nodes of the 10M model as a recipe; the other nodes continue in process."""
    training = {
        "model": {"config": model_config()},
        "data": {"sequenceLength": 64},
        "batching": {"globalBatchSize": stock.SLOTS, "microBatchSize": 1},
        "checkpoint": {"every": {"steps": 100_000}},
        "runtime": {"threads": 1},
        "reproducibility": {"elastic": "fast"},
    }
    with bench.namespace() as runs:
        _give_documents(runs)
        changes = {
            "nodes": {"min": 1, "max": stock.NODES},
            "resources": RESOURCES,
            "training": training,
        }
        run = runs.apply(make_manifest("recipe", steps=100_000, changes=changes))
        return _kill_in_turns(run, run.rows, events)


def _give_documents(runs: Runs) -> None:
    """Create the ConfigMap that the runs read. Use a file, because an argument may not be that long."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "documents.jsonl"
        file.write_text(documents(), "utf-8")
        runs.kubectl("create", "configmap", "documents", f"--from-file={file}")


def measure_resume(bench: Bench, events: int) -> list[Sample]:
    """Suspend and resume one run of three nodes repeatedly; return the seconds from just before each
    change."""
    samples = []
    with bench.namespace() as runs:
        _give_documents(runs)
        changes = {"nodes": {"min": 1, "max": RESUMED_NODES}, "resources": RESOURCES}
        run = runs.apply(make_manifest("resume", steps=100_000, changes=changes))
        for _ in range(events):
            run.wait_for_world(RESUMED_NODES)
            begun = time.time()
            run.patch({"suspend": True})
            run.wait_for_phase("Suspended")
            suspended, num_rows = time.time(), len(run.rows())
            run.patch({"suspend": False})
            run.wait_for_pods(*range(RESUMED_NODES))
            all_run = time.time()
            wait_for(
                lambda before=num_rows: len(run.rows()) > before, "a step after the resume"
            )
            samples.append(
                {
                    "suspend": suspended - begun,
                    "pods": all_run - suspended,
                    "resume": run.rows()[num_rows]["time"] - suspended,
                }
            )
            _say(samples[-1])
    return samples


def measure_script(bench: Bench, events: int) -> list[Sample]:
    """Run the script that stock torchrun starts as ``spec.script``; the other nodes restart from the
    checkpoint.

    Uses one TrainingRun per event, because the script reports no progress, so the back-off would grow.
    """
    spec = {
        "nodes": {"min": 1, "max": stock.NODES},
        "resources": RESOURCES,
        "script": {
            "command": [
                stock.SCRIPT,
                *stock.arguments("."),
                "--model",
                json.dumps(model_config()),
            ]
        },
        "template": {"volumes": stock.SCRIPT_VOLUMES, "volumeMounts": stock.SCRIPT_MOUNTS},
    }
    manifest = make_manifest("script", steps=1)
    del manifest["spec"]["training"]
    manifest["spec"] = merged(manifest["spec"], spec)
    samples = []
    for _ in range(events):
        with bench.namespace() as runs:
            stock.create_script(runs)
            run = runs.apply(manifest)
            samples += _kill_in_turns(run, partial(_script_rows, run), 1)
    return samples


def _script_rows(run: Run) -> list[dict[str, Any]]:
    with contextlib.suppress(LookupError, OSError):
        found = next(iter(run.directory().rglob("steps.jsonl")), None)
        return read_rows(found) if found else []
    return []


def _kill_in_turns(
    run: Run, rows: Callable[[], list[dict[str, Any]]], events: int
) -> list[Sample]:
    """Kill node 1 of one run repeatedly, each time after all nodes have trained together for some steps."""
    samples = []
    for _ in range(events):
        wait_until_whole(rows)
        pod = wait_for(lambda: run.live_pods().get(1), "a pod to kill")
        samples.append(
            measure_kill(rows, _find_kill(run.runs.namespace, pod["metadata"]["name"]))
        )
    return samples


def measure_stock(
    bench: Bench,
    events: int,
    *,
    settings: stock.Settings,
) -> list[Sample]:
    """Use one Job per event, so that the back-off does not grow. Kill node 1, never node 0, which hosts the
    rendezvous."""
    samples = []
    for _ in range(events):
        with bench.namespace() as runs:
            stock.create_job(
                runs,
                settings,
                image=bench.trainer_image,
                resources=RESOURCES,
                model=model_config(),
            )
            rows = lambda: stock.read_steps(runs)  # noqa: E731
            wait_until_whole(rows, seconds=240)
            pod = next(
                one
                for one in runs.list("pods")
                if one["metadata"]["labels"][stock.INDEX] == "1"
            )
            samples.append(
                measure_kill(rows, _find_kill(runs.namespace, pod["metadata"]["name"]))
            )
    return samples


def wait_until_whole(
    rows: Callable[[], list[dict[str, Any]]], *, seconds: float = 180
) -> None:
    """Wait until all nodes have trained some steps together."""

    def is_whole() -> bool:
        newest = rows()[-SETTLED_STEPS:]
        return len(newest) == SETTLED_STEPS and all(
            row["world_size"] == stock.NODES for row in newest
        )

    wait_for(
        is_whole,
        f"{SETTLED_STEPS} steps of {stock.NODES} nodes",
        seconds=seconds,
        every=0.5,
    )


def _find_kill(namespace: str, pod: str) -> Callable[[], None]:
    """Return a function that sends SIGKILL to a pod's first process."""
    (process, *_) = Bed().faults.processes(namespace, pod)
    return process.kill


def measure_kill(
    rows: Callable[[], list[dict[str, Any]]], kill: Callable[[], None]
) -> Sample:
    """Return the seconds from SIGKILL to the end of the next step, and to the end of the next step with a
    replacement."""
    killed = time.time()
    kill()
    before = sorted(
        (row for row in rows() if row["time"] <= killed), key=lambda row: float(row["time"])
    )
    old = before[-1]

    def later() -> list[dict[str, Any]]:
        return [
            row
            for row in rows()
            if row["time"] > killed and row["generation"] != old["generation"]
        ]

    wait_for(
        lambda: any(row["world_size"] == stock.NODES for row in later()),
        "the replacement's first step",
        seconds=240,
    )
    found = later()
    whole = next(row for row in found if row["world_size"] == stock.NODES)
    finished = max(row["step"] for row in rows() if row["generation"] == old["generation"])
    lost = max(0, finished + 1 - found[0]["step"])
    sample = {
        "rest": found[0]["time"] - killed,
        "replacement": whole["time"] - killed,
        "lost_steps": float(lost),
        "step": statistics.median(
            b["time"] - a["time"] for a, b in pairwise(before[-SETTLED_STEPS:])
        ),
    }
    _say(sample)
    return sample


def _say(sample: Sample) -> None:
    print(
        f"   {time.strftime('%T')}  {', '.join(f'{key} {value:.2f}' for key, value in sample.items())}",
        flush=True,
    )


PARTS: dict[str, Callable[[Bench, int], list[Sample]]] = {
    "quickstart": measure_quickstart,
    "recipe": measure_recipe,
    "script": measure_script,
    "resume": measure_resume,
    "stock_tuned": lambda bench, events: measure_stock(bench, events, settings=stock.TUNED),
    "stock_default": lambda bench, events: measure_stock(
        bench, events, settings=stock.DEFAULT
    ),
}

# ---- rows --------------------------------------------------------------------------------------------------

_WHAT = {
    "recipe": "TrainingRun, recipe",
    "script": "TrainingRun, script",
    "stock_tuned": "Indexed Job, torchrun tuned",
    "stock_default": "Indexed Job, torchrun default",
}
_GOALS = {"rest": "<= 2", "replacement": "<= 10"}
_FIGURES = {"rest": "next step of the rest", "replacement": "replacement trains"}


def make_rows(
    samples: dict[str, list[Sample]], times: Mapping[str, str] | None = None
) -> list[Row]:
    """Return medians, with the range in the note, and ratios against stock torchrun if both were measured.

    ``times``: date of each part. The row of a part that is older than the newest part contains its date.
    Pure.
    """
    times = times or {}
    newest = max(times.values(), default="")
    rows = []
    for parts, row in (*_make_single_rows(samples), *_make_kill_rows(samples)):
        old = [part for part in parts if times.get(part, newest) != newest]
        notes = [row.note] * bool(row.note) + [
            f"{part} taken {times[part]}" for part in old
        ]
        rows.append(replace(row, note="; ".join(notes)))
    return rows


def _make_single_rows(samples: dict[str, list[Sample]]) -> Iterator[tuple[Parts, Row]]:
    if "quickstart" in samples:
        seconds = [one["first_step"] for one in samples["quickstart"]]
        what = "quickstart: kubectl apply → first step"
        yield ("quickstart",), _row(what, "median", seconds, "<= 30")
    if "resume" in samples:
        what = f"a run of {RESUMED_NODES} pods, suspended and resumed"
        for key, name, goal in (
            ("suspend", "suspend → Suspended", ""),
            ("pods", "resume → all pods run", ""),
            ("resume", "resume → next new step", "<= 15"),
        ):
            seconds = [one[key] for one in samples["resume"]]
            yield ("resume",), _row(what, name, seconds, goal)


def _make_kill_rows(samples: dict[str, list[Sample]]) -> Iterator[tuple[Parts, Row]]:
    there = {part: what for part, what in _WHAT.items() if part in samples}
    for key, figure in _FIGURES.items():
        killed = f"SIGKILL of 1 of {stock.NODES} pods → {figure}"
        for part, what in there.items():
            goal = _GOALS[key] if part == "recipe" else ""
            seconds = [one[key] for one in samples[part]]
            yield (part,), _row(killed, what, seconds, goal)
        for ours in ("recipe", "script"):
            for theirs in ("stock_tuned", "stock_default"):
                if ours in samples and theirs in samples:
                    ratio = _median(samples[theirs], key) / _median(samples[ours], key)
                    name = f"{theirs.replace('_', ' ')} / {ours}"
                    yield (ours, theirs), Row(f"… {figure}", name, ratio, "times")
    for part, what in there.items():
        lost = [one["lost_steps"] for one in samples[part]]
        goal, note = "<= 0" if part == "recipe" else "", f"in {len(lost)} events"
        yield (part,), Row("finished steps trained again", what, sum(lost), "", goal, note)


def _row(what: str, name: str, seconds: Sequence[float], goal: str) -> Row:
    note = f"{min(seconds):.2f} to {max(seconds):.2f}, n = {len(seconds)}"
    return Row(what, name, statistics.median(seconds), "s", goal, note)


def _median(samples: Sequence[Sample], key: str) -> float:
    return statistics.median(one[key] for one in samples)


# ---- the command -------------------------------------------------------------------------------------------


def measure(
    *, only: Collection[str] = (), events: int = EVENTS, samples_file: Path = SAMPLES_FILE
) -> list[Row]:
    """Measure the parts in ``only`` (default: all), write their samples to the file, and return rows of all
    samples in it.

    Starts the bed, and stops it if it was not up before. Raises BedError, or AssertionError if an expected
    event does not happen.
    """
    known: dict[str, Any] = (
        json.loads(samples_file.read_text(encoding="utf-8"))
        if samples_file.exists()
        else {}
    )
    was_up = Bed.is_up()
    Bed.up()
    try:
        with tempfile.TemporaryDirectory(prefix="evergrad-bench-") as scratch:
            cluster = Cluster(
                KUBECONFIG,
                Bed().api,
                is_bed=True,
                storage_class=STORAGE_CLASS,
            )
            operator = installed_operator.install(cluster)
            bench = Bench(cluster, operator.trainer_image, Path(scratch))
            for part in only or PARTS:
                print(
                    f"== {time.strftime('%T')}  {part}, load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
                taken, load = time.strftime("%Y-%m-%d %H:%M"), os.getloadavg()[0]
                known[part] = {
                    "taken": taken,
                    "load": load,
                    "samples": PARTS[part](bench, events),
                }
                samples_file.write_text(
                    json.dumps(known, indent=1) + "\n", encoding="utf-8"
                )
    finally:
        if not was_up:
            Bed.down()
    return make_rows(
        {part: entry["samples"] for part, entry in known.items()},
        {part: entry["taken"] for part, entry in known.items()},
    )


def main() -> None:
    """Parse arguments, measure, print and write."""
    from run import CLUSTER_PODS, describe_machine, write_results

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[],
        help=f"of {', '.join(PARTS)}, with commas",
    )
    parser.add_argument(
        "--events",
        type=int,
        default=EVENTS,
        help=f"of each part; {EVENTS}",
    )
    parser.add_argument(
        "--samples",
        type=Path,
        help="another file for the samples; results are printed only",
    )
    options = parser.parse_args()
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(unknown))}: there is {', '.join(PARTS)}")
    machine = describe_machine()
    rows = measure(
        only=options.only,
        events=options.events,
        samples_file=options.samples or SAMPLES_FILE,
    )
    print_rows(rows)
    if options.samples is None:
        write_results(CLUSTER_PODS, rows, machine)


if __name__ == "__main__":
    main()
