"""``make bench-cluster``: Evergrad's operator compared with Kubeflow Trainer and JobSet, on a control plane
with simulated nodes.

Each load uses a new control plane for each side, and writes its samples to a file, so that parts can be
measured separately. For how to read the rows, see README.md next to this file.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import cluster_meters as meters
from cluster_evergrad import Evergrad
from cluster_kubeflow import Kubeflow
from cluster_load import NODES, LoadError, Watcher, post, quantile
from cluster_plane import DAEMONS, NAMESPACE, Plane, Usage, busy_seconds, collection, fresh
from common import Row, print_rows

SAMPLES_FILE = Path(__file__).with_name("results") / "cluster-samples.json"
SETTLE_SECONDS = 4.0
"""Seconds from the last pod's start to the end of the measurement, because statuses are written
afterwards."""
QUIET_CORES = 0.1
"""An operator that uses less CPU than this for the rest of the measurement is steady."""
WATCHED_SECONDS = 40.0
Sample = dict[str, Any]


class Side(Protocol):
    """The interface of an operator in a comparison."""

    name: str
    processes: tuple[str, ...]
    path: str

    @staticmethod
    def version() -> str:
        """Return its releases or its commit."""

    def prepare(self, *, runs: int) -> None:
        """Install and start it."""

    def start(self) -> None:
        """Start it again."""

    def body(self, number: int) -> dict[str, Any]:
        """Return one run."""

    def run_of(self, labels: dict[str, str]) -> str | None:
        """Return the run to which a pod's node belongs."""

    def owns(self, verb: str, resource: str) -> bool:
        """Return whether only operators write this."""

    def count_events(self) -> float:
        """Return the number of events that it has posted."""


SIDES: dict[str, type[Evergrad] | type[Kubeflow]] = {
    "evergrad": Evergrad,
    "kubeflow": Kubeflow,
}


@dataclass(frozen=True)
class Load:
    """Number and rate of runs, and the goals for Evergrad relative to the other side.

    ``restarts``: the operator is also restarted with all runs.
    """

    runs: int
    rate: float
    speed_goal: str = ""
    write_goal: str = ""
    restarts: bool = False


PARTS = {
    "100": Load(100, 2.0, write_goal="<= 0.7"),
    "200": Load(200, 10.0, speed_goal=">= 1.5"),
    "500": Load(500, 10.0, speed_goal=">= 1.5"),
    "1000": Load(1000, 10.0, speed_goal=">= 1.5", write_goal="<= 0.7", restarts=True),
}
"""Loads by number of runs. At 2 runs/s the machine has spare capacity, so the measured speed is the rate of
the load."""


def take(side_name: str, load: Load) -> Sample:
    """Measure one load on one side, on its own control plane. Raises BedError and LoadError."""
    with fresh() as plane:
        side = SIDES[side_name](plane)
        begun = time.monotonic()
        side.prepare(runs=load.runs)
        daemons = (*DAEMONS, *side.processes)
        plane.wait_until_quiet(daemons)
        sample = _measure(plane, side, load, daemons)
        if load.restarts:
            sample["restart"] = _measure_restart(plane, side)
        sample |= {"version": side.version(), "seconds": time.monotonic() - begun}
        return sample


def _measure(
    plane: Plane,
    side: Side,
    load: Load,
    daemons: Sequence[str],
) -> Sample:
    watcher = Watcher(
        plane.kubeconfig,
        collection("v1", "pods", NAMESPACE),
        side.run_of,
    )
    try:
        bodies = [side.body(number) for number in range(load.runs)]
        writes, events = meters.read_writes(plane.api), side.count_events()
        usage, busy = _read(plane, daemons), busy_seconds()
        posted = post(plane.kubeconfig, side.path, bodies, rate=load.rate)
        watcher.wait(load.runs, seconds=60 + load.runs)
        busy = busy_seconds()[0] - busy[0], busy_seconds()[1] - busy[1]
        time.sleep(SETTLE_SECONDS)
        after = _read(plane, daemons)
        seen = watcher.finish()
    finally:
        watcher.close()
    done = meters.read_writes(plane.api) - writes
    events = side.count_events() - events
    created, running = seen.whole(seen.created), seen.whole(seen.running)
    first = min(posted.at.values())
    return {
        "runs": load.runs,
        "rate": load.rate,
        "created": [created[run] - at for run, at in posted.at.items()],
        "running": [running[run] - at for run, at in posted.at.items()],
        "created_seconds": max(created.values()) - first,
        "running_seconds": max(running.values()) - first,
        "post": posted.took,
        "extra_pods": seen.extra,
        "other_pods": seen.others,
        "deleted_pods": seen.deleted,
        "busy": busy[0] / busy[1],
        "writes": sum(done.values()) / load.runs,
        "writers": {
            name: count / load.runs
            for name, count in meters.by_writer(done, side.owns, events=events).items()
        },
        "requests": meters.describe(done, load.runs),
        "usage": {
            name: asdict(Usage(now.cpu - usage[name].cpu, now.rss, now.peak))
            for name, now in after.items()
        },
    }


def _read(plane: Plane, daemons: Sequence[str]) -> dict[str, Usage]:
    return {name: plane.usage(name) for name in daemons}


def _measure_restart(plane: Plane, side: Side) -> Sample:
    """Stop the operator, and start it again two seconds later, while nothing else happens."""
    plane.wait_until_quiet((*DAEMONS, *side.processes), level=0.5)
    before = meters.read_writes(plane.api)
    for name in side.processes:
        plane.stop(name)
    time.sleep(2.0)
    begun = time.monotonic()
    side.start()
    ready = time.monotonic() - begun
    times, totals = [time.monotonic() - begun], [_total(plane, side)]
    while times[-1] < WATCHED_SECONDS:
        time.sleep(1.0)
        times.append(time.monotonic() - begun)
        totals.append(_total(plane, side))
    writes = meters.read_writes(plane.api) - before
    return {
        "ready": ready,
        "steady": find_steady(times, totals),
        "cpu": totals[-1],
        "writes": sum(writes.values()),
        "requests": meters.describe(writes, 1),
        "usage": {name: asdict(plane.usage(name)) for name in side.processes},
        "cpu_by_second": [round(total, 2) for total in totals],
    }


def _total(plane: Plane, side: Side) -> float:
    return sum(plane.usage(name).cpu for name in side.processes)


def find_steady(times: Sequence[float], totals: Sequence[float]) -> float:
    """Return the time after which CPU seconds grow by less than ``QUIET_CORES`` per second, or infinity."""
    end = times[0]
    pairs = list(zip(times, totals, strict=True))
    for (at, total), (later, more) in pairwise(pairs):
        if (more - total) / (later - at) > QUIET_CORES:
            end = later
    return end if end < times[-1] else float("inf")


# ---- rows --------------------------------------------------------------------------------------------------


def make_rows(samples: dict[str, dict[str, Sample]]) -> list[Row]:
    """Return rows of all samples, with the two sides and the goals next to each other."""
    rows: list[Row] = []
    for name, load in PARTS.items():
        sides = samples.get(name)
        if not sides:
            continue
        taken = next(iter(sides.values()))
        what = f"{taken['runs']:,} runs, {taken['rate']:g}/s"
        rows += [*_latency_rows(what, sides), *_speed_rows(what, sides, load.speed_goal)]
        rows += _write_rows(what, sides, load.write_goal)
        if load.restarts:
            rows += _usage_rows(what, sides)
    return rows


def _latency_rows(what: str, sides: dict[str, Sample]) -> Iterator[Row]:
    theirs = sides.get("kubeflow")
    limit = f"<= {quantile(theirs['created'], 0.99):.4g}" if theirs else ""
    for share in (0.5, 0.95, 0.99):
        for side, sample in sides.items():
            goal = limit if (side, share) == ("evergrad", 0.99) else ""
            note = f"Running {quantile(sample['running'], share):.2f} s"
            yield Row(
                f"{what}: apply → all 4 pods created, {side}",
                f"p{share * 100:g}",
                quantile(sample["created"], share),
                "s",
                goal,
                note,
            )


def _describe_taking(sides: dict[str, Sample]) -> str:
    """Return releases and dates of both samples: a ratio of measurements from different hours is less
    reliable."""
    return "; ".join(f"{sample['version']}, {sample['taken']}" for sample in sides.values())


def _write_rows(what: str, sides: dict[str, Sample], goal: str) -> Iterator[Row]:
    for side, sample in sides.items():
        writers = sorted(sample["writers"].items(), key=lambda item: -item[1])
        note = ", ".join(f"{name} {count:.1f}" for name, count in writers if count)
        yield Row(
            f"{what}: API writes a run, {side}",
            "mean",
            sample["writes"],
            "",
            "",
            note,
        )
    if len(sides) == len(SIDES):
        yield Row(
            f"{what}: API writes a run",
            "ours / theirs",
            sides["evergrad"]["writes"] / sides["kubeflow"]["writes"],
            "",
            goal,
            _describe_taking(sides),
        )


def _speed_rows(what: str, sides: dict[str, Sample], goal: str) -> Iterator[Row]:
    speeds = {
        side: sample["runs"] / sample["created_seconds"] for side, sample in sides.items()
    }
    for side, sample in sides.items():
        note = f"p50 {statistics.median(sample['created']):.2f} s, machine {sample['busy']:.0%} busy"
        yield Row(
            f"{what}: sustained, {side}",
            "runs a second",
            speeds[side],
            "1/s",
            "",
            note,
        )
    if len(sides) == len(SIDES):
        yield Row(
            f"{what}: sustained",
            "ours / theirs",
            speeds["evergrad"] / speeds["kubeflow"],
            "",
            goal,
            _describe_taking(sides),
        )


def _usage_rows(what: str, sides: dict[str, Sample]) -> Iterator[Row]:
    for side, sample in sides.items():
        usage, ours = sample["usage"], side == "evergrad"
        operators = [name for name in usage if name not in DAEMONS]
        peak = sum(usage[name]["peak"] for name in operators)
        rss = sum(usage[name]["rss"] for name in operators)
        note = f"at most {peak:.0f}; {', '.join(operators)}"
        yield Row(
            f"{what}: memory (RSS), {side}",
            "at the end",
            rss,
            "MiB",
            "<= 350" if ours else "",
            note,
        )
        cpu = {name: usage[name]["cpu"] * 1000 / sample["runs"] for name in usage}
        note = ", ".join(
            f"{name} {value:.0f}" for name, value in cpu.items() if name in DAEMONS
        )
        mine = sum(cpu[name] for name in operators)
        yield Row(
            f"{what}: CPU a run, {side}",
            "operator",
            mine,
            "ms",
            "<= 60" if ours else "",
            note,
        )
        if not ours:
            yield Row(
                f"{what}: CPU a run, {side}",
                "with kcm",
                mine + cpu["kcm"],
                "ms",
                "",
                "its Jobs are kcm's work",
            )
    for side, sample in sides.items():
        if "restart" in sample:
            yield from _restart_rows(
                f"restart over {sample['runs']:,} running runs, {side}",
                sample["restart"],
                side == "evergrad",
            )


def _restart_rows(what: str, restart: Sample, is_ours: bool) -> Iterator[Row]:
    note = ", ".join(f"{count:g} {name}" for name, count in restart["requests"].items())
    yield Row(
        what,
        "API writes",
        restart["writes"],
        "",
        "<= 0" if is_ours else "",
        note,
    )
    note = f"ready after {restart['ready']:.1f} s, {restart['cpu']:.1f} s CPU"
    yield Row(
        what,
        "steady after",
        restart["steady"],
        "s",
        "<= 15" if is_ours else "",
        note,
    )
    peak = sum(usage["peak"] for usage in restart["usage"].values())
    rss = sum(usage["rss"] for usage in restart["usage"].values())
    yield Row(
        what,
        "memory (RSS), at most",
        peak,
        "MiB",
        "<= 350" if is_ours else "",
        f"{rss:.0f} in the end",
    )


# ---- the command -------------------------------------------------------------------------------------------


def measure(
    *,
    only: Collection[str] = (),
    sides: Collection[str] = (),
    scale: float = 1.0,
    restarts: bool = True,
    samples_file: Path = SAMPLES_FILE,
) -> list[Row]:
    """Measure the parts in ``only`` on ``sides`` (default: all), write their samples to the file, and return
    rows of all samples in it.

    ``scale`` makes all loads smaller, for a quick test. ``restarts``: also restart the operators. Raises
    BedError and LoadError.
    """
    for side in sides or SIDES:
        SIDES[side].build()
    known, begun = read_samples(samples_file), time.monotonic()
    for part in only or PARTS:
        load = PARTS[part]
        load = replace(
            load,
            runs=max(NODES, round(load.runs * scale)),
            restarts=load.restarts and restarts,
        )
        for side in sides or SIDES:
            print(
                f"== {time.strftime('%T')}  {part}, {side}, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            taken = {"taken": time.strftime("%Y-%m-%d %H:%M"), "load": os.getloadavg()[0]}
            known.setdefault(part, {})[side] = {**taken, **take(side, load)}
            known[part] = {name: known[part][name] for name in SIDES if name in known[part]}
            samples_file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
            print_rows(make_rows({part: {side: known[part][side]}}))
    print(
        f"== {time.strftime('%T')}  done in {(time.monotonic() - begun) / 60:.1f} min",
        flush=True,
    )
    return make_rows(known)


def read_samples(samples_file: Path) -> dict[str, dict[str, Sample]]:
    """Return the samples in the file, without parts that no longer exist and without other releases of
    Kubeflow, which are not used for ratios."""
    if not samples_file.exists():
        return {}
    found: dict[str, dict[str, Sample]] = json.loads(
        samples_file.read_text(encoding="utf-8")
    )
    return {
        part: {
            side: sample
            for side, sample in sides.items()
            if side != "kubeflow" or sample["version"] == Kubeflow.version()
        }
        for part, sides in found.items()
        if part in PARTS
    }


def main() -> None:
    """Parse arguments, measure, print and write."""
    from run import CLUSTER, describe_machine, write_results

    parser = argparse.ArgumentParser(description=__doc__)
    names = lambda known: lambda text: [_check(name, known) for name in text.split(",")]  # noqa: E731
    parser.add_argument(
        "--only",
        type=names(PARTS),
        default=[],
        help=f"parts, with commas between them: {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--sides",
        type=names(SIDES),
        default=[],
        help=f"of {', '.join(SIDES)}",
    )
    parser.add_argument(
        "--without-restarts",
        action="store_true",
        help="do not start the operators again over 1,000 runs",
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="make all loads smaller, to try things"
    )
    parser.add_argument(
        "--samples",
        type=Path,
        help="another file for the samples; results are printed only",
    )
    options = parser.parse_args()
    machine = describe_machine()
    try:
        rows = measure(
            only=options.only,
            sides=options.sides,
            scale=options.scale,
            restarts=not options.without_restarts,
            samples_file=options.samples or SAMPLES_FILE,
        )
    except LoadError as error:
        sys.exit(f"error: {error}")
    print_rows(rows)
    if options.samples is None:
        write_results(CLUSTER, rows, machine)


def _check(name: str, known: Collection[str]) -> str:
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name}: there is {', '.join(known)}")
    return name


if __name__ == "__main__":
    main()
