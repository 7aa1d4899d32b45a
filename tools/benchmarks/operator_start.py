"""The cost of the operator's start with many runs, compared with an earlier commit: processor time of the
first pass, memory of the cache, time of a scrape, and the age of the progress that it shows.

    python tools/benchmarks/operator_start.py [--commit 10950962] [--runs 10000] [--passes 150] [--rounds 5]

No cluster is needed. Both trees are measured in one call, in turns, each in separate processes: the
reconciler with the tests' fake API server, the cache with generated lists, and polls and probes with a
virtual clock. The memory of kopf and the time of requests are not measured.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = 500
"""Objects in a page of a list, as the operator requests them."""
NODES = (1, 2)
"""Numbers of nodes of the runs, in turn. With one coordinator each, 10,000 runs have 25,000 pods."""
MANAGED_BYTES = 3000
"""Size of an object's managed fields, which an API server adds."""
NAME = "zzrunzz"
"""Name of the run that is copied. No other text contains it."""
PARTS = ("passes", "memory", "scrape", "polls", "probes")


# ---- one tree, in a process of its own ---------------------------------------------------------------------


def measure_passes(runs: int) -> dict[str, float]:
    """Return the milliseconds of processor time of the first pass and of a later pass over a settled run.

    A pass over a settled run writes nothing, so that no time of the fake API server is counted.
    """
    from fake_kubernetes.simulation import Simulation

    simulation = Simulation()
    keys = [("ns", f"r{number}") for number in range(runs)]
    for _, name in keys:
        simulation.create_run(name)
    for key in keys:
        simulation.settle(key)
    simulation.start_pods()
    for _ in range(3):
        for key in keys:
            simulation.settle(key)
        # Some parts of a status are written later, so advance the clock.
        simulation.now += 120
    simulation.start_operator()

    async def pass_over_all() -> None:
        for key in keys:
            await simulation.reconciler.reconcile(key)

    found = {}
    before = [simulation.store.get("trainingruns", *key) for key in keys]
    for name in ("first", "later"):
        gc.collect()
        started = time.process_time()
        asyncio.run(pass_over_all())
        found[name] = 1000 * (time.process_time() - started) / runs
    if before != [simulation.store.get("trainingruns", *key) for key in keys]:
        raise SystemExit("a pass has written the status of a run that was settled")
    return found


def make_templates() -> dict[str, list[list[dict[str, Any]]]]:
    """Return the objects of one trained run for each number of nodes: runs, pods, claims and other
    children."""
    from fake_kubernetes.simulation import Simulation

    key = ("ns", NAME)
    templates: dict[str, list[list[dict[str, Any]]]] = {}
    for nodes in NODES:
        simulation = Simulation()
        simulation.create_run(NAME, nodes={"min": 1, "max": nodes})
        simulation.settle(key)
        simulation.start_pods()
        simulation.settle(key)
        simulation.train()
        simulation.coordinators.answers[key] = next(
            iter(simulation.coordinators.answers.values())
        )
        simulation.settle(key)
        for plural in (
            "trainingruns",
            "pods",
            "persistentvolumeclaims",
            "configmaps",
            "services",
        ):
            templates.setdefault(plural, []).append(simulation.store.list(plural))
    return templates


class Lists:
    """Answers lists of all objects page by page, like an API server."""

    def __init__(self, runs: int) -> None:
        self.runs = runs
        self._templates = make_templates()

    async def send(self, request: Any) -> Any:
        """Return the page that ``request`` asks for, parsed from JSON."""
        start = int(request.query.get("continue") or 0)
        count = max(1, PAGE // 3)
        numbers = range(start, min(self.runs, start + count))
        is_brief = "PartialObjectMetadata" in request.accept
        items = [text for one in numbers for text in self._copies(request.kind.plural, one)]
        page = json.loads("[" + ",".join(items) + "]")
        if is_brief:
            page = [{"metadata": item["metadata"]} for item in page]
        more = {"continue": str(numbers.stop)} if numbers.stop < self.runs else {}
        return {"items": page, "metadata": {"resourceVersion": "999999999", **more}}

    def _copies(self, plural: str, number: int) -> Iterator[str]:
        for raw in self._templates.get(plural, [[]] * len(NODES))[number % len(NODES)]:
            metadata = raw["metadata"]
            changed = {
                **metadata,
                "namespace": f"team-{number // 2}",
                "uid": f"{metadata['uid']}-{number}",
                "managedFields": [{"manager": "m", "fieldsV1": {"f": "x" * MANAGED_BYTES}}],
            }
            yield json.dumps({**raw, "metadata": changed}).replace(NAME, f"run-{number}")


def read_memory(field: str) -> float:
    """Return the MiB of this process: ``VmRSS`` is the current value, and ``VmHWM`` the maximum."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {field}")


def measure_memory(runs: int) -> dict[str, float]:
    """Return MiB and seconds of two lists of all objects, the second like a resync, and of the specs."""
    import evergrad_operator.edge.service  # noqa: F401 - its imports are measured with the rest
    from evergrad_operator.core.objects.config import Config
    from evergrad_operator.core.observe.profiles import NO_PROFILE
    from evergrad_operator.core.observe.spec import SpecCache
    from evergrad_operator.edge.api.kube import Kube
    from evergrad_operator.edge.cache.cache import InformerCache
    from evergrad_operator.edge.cache.queue import WorkQueue
    from evergrad_operator.edge.cache.store import PODS
    from evergrad_operator.edge.cache.sync import CacheSync

    lists = Lists(runs)
    kube = Kube(None)  # type: ignore[arg-type]
    kube._transport = lists  # type: ignore[assignment]
    cache = InformerCache()
    queue: Any = WorkQueue()
    sync = CacheSync(kube, cache=cache, queue=queue, scopes=[None], resync_seconds=600.0)
    specs = SpecCache(Config("t", "o").installation)
    gc.collect()
    before = read_memory("VmRSS")

    asyncio.run(sync.resync())
    for raw in cache.runs().values():
        specs.parse(raw, NO_PROFILE)
    asyncio.run(sync.resync())
    gc.collect()
    return {
        "before": before,
        "kept": read_memory("VmRSS"),
        "peak": read_memory("VmHWM"),
        "pods": float(cache.store.count()[PODS]),
    }


def measure_scrape(runs: int) -> dict[str, float]:
    """Return the microseconds per run for which a scrape blocks the event loop, after 1 % of the runs have
    changed."""
    from evergrad_operator.edge.api.kube import Kube
    from evergrad_operator.edge.api.transport import OpenGate
    from evergrad_operator.edge.cache.cache import InformerCache
    from evergrad_operator.edge.cache.queue import WorkQueue
    from evergrad_operator.edge.cache.store import RUNS
    from evergrad_operator.edge.cache.sync import CacheSync
    from evergrad_operator.edge.metrics.health_checks import Vitals

    kube = Kube(None)  # type: ignore[arg-type]
    kube._transport = Lists(runs)  # type: ignore[assignment]
    cache = InformerCache()
    queue: Any = WorkQueue()
    sync = CacheSync(kube, cache=cache, queue=queue, scopes=[None], resync_seconds=600.0)
    asyncio.run(sync.resync())
    vitals = Vitals(queue=queue, cache=cache, gate=OpenGate())
    vitals.read_facts()
    times = []
    for version in range(2, 7):
        for raw in list(cache.runs().values())[::100]:
            metadata = {**raw["metadata"], "resourceVersion": str(10**10 + version)}
            cache.see(RUNS, {**raw, "metadata": metadata}, is_watched=True)
        started = time.process_time()
        facts = vitals.read_facts()
        times.append(time.process_time() - started)
        if len(facts.runs) != runs:
            raise SystemExit(f"{len(facts.runs)} runs are exported, and not {runs}")
    return {"run": 1e6 * statistics.median(times) / runs}


def measure_polls(runs: int) -> dict[str, float]:
    """Return the longest time between two polls of the same coordinator, in seconds of a virtual clock."""
    import virtual_time

    from evergrad_operator.edge.reconcile.coordinator_poller import (
        CoordinatorResponse,
        Coordinators,
    )

    asked: dict[Any, list[float]] = {}

    class Answering(Coordinators):
        async def _read_status(self, key: Any, followed: Any) -> CoordinatorResponse:
            now = asyncio.get_running_loop().time()
            asked.setdefault(key, []).append(now)
            await asyncio.sleep(0.01)
            return CoordinatorResponse({}, followed.attempt, now)

    async def poll() -> float:
        loop = asyncio.get_running_loop()
        coordinators = Answering(clock=loop.time)
        for number in range(runs):
            coordinators.follow(("ns", f"r{number}"), "127.0.0.1", 1, token="t")
        task = asyncio.create_task(coordinators.run())
        await asyncio.sleep(600)
        end = loop.time()
        await coordinators.close()
        await task
        # Each coordinator is polled for the first time as soon as it is followed.
        return max(
            later - earlier
            for times in asked.values()
            for earlier, later in zip(times, [*times[1:], end], strict=True)
        )

    return {"age": virtual_time.run(poll())}


def measure_probes(runs: int, *, pass_seconds: float) -> dict[str, float]:
    """Return the number of failed liveness probes during the first pass over each run.

    Probes are sent every 10 s of a virtual clock. ``pass_seconds``: measured duration of one pass; passes run
    one after another, because they share one thread.
    """
    import virtual_time

    from evergrad_operator.edge.api.transport import OpenGate
    from evergrad_operator.edge.cache.cache import InformerCache
    from evergrad_operator.edge.cache.queue import WorkQueue
    from evergrad_operator.edge.metrics.health_checks import Vitals

    async def start() -> dict[str, float]:
        loop = asyncio.get_running_loop()
        turn = asyncio.Lock()
        done: list[Any] = []

        async def reconcile(key: Any) -> None:
            async with turn:
                await asyncio.sleep(pass_seconds)
            done.append(key)

        queue: Any = WorkQueue(clock=loop.time)
        vitals = Vitals(queue=queue, cache=InformerCache(), gate=OpenGate())
        for number in range(runs):
            queue.add(("ns", f"r{number}"))
        begin = loop.time()
        task = asyncio.create_task(queue.run(reconcile, workers=16))
        failed = 0
        while len(done) < runs:
            await asyncio.sleep(10.0)
            failed += vitals.find_stall() is not None
        seconds = loop.time() - begin
        await queue.close(seconds=0.0)
        await task
        return {"failed": float(failed), "seconds": seconds}

    return virtual_time.run(start())


# ---- both trees --------------------------------------------------------------------------------------------


class Tree:
    """A checkout whose packages take precedence over the installed packages."""

    def __init__(self, name: str, root: Path, scratch: Path) -> None:
        self.name = name
        # Use links in a separate folder, because neither the root nor operator/ may be on the import path.
        packages = scratch / f"{name}-packages"
        packages.mkdir()
        for package in root.glob("*/evergrad_*"):
            (packages / package.name).symlink_to(package)
        folders = (packages, root / "tests", root / "tests/unit/operator")
        self._path = os.pathsep.join(map(str, folders))

    def measure(self, part: str, *arguments: str) -> dict[str, float]:
        """Measure one part in a new process."""
        command = [sys.executable, __file__, "--part", part, *arguments]
        environ = {**os.environ, "PYTHONPATH": self._path, "PYTHONSAFEPATH": "1"}
        done = subprocess.run(
            command, env=environ, stdout=subprocess.PIPE, text=True, check=True
        )
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def compare(arguments: argparse.Namespace) -> int:
    """Measure both trees in turns, print a table, and return 1 if a goal is missed."""
    from common import Row, print_rows

    runs = str(arguments.runs)
    with tempfile.TemporaryDirectory(prefix="evergrad-operator-start-") as scratch:
        folder = Path(scratch)
        earlier = folder / "earlier"
        earlier.mkdir()
        archive = ["git", "-C", str(ROOT), "archive", arguments.commit]
        with subprocess.Popen(archive, stdout=subprocess.PIPE) as packed:
            unpack = ["tar", "-x", "-C", str(earlier)]
            subprocess.run(unpack, stdin=packed.stdout, check=True)
        trees = [Tree("now", ROOT, folder), Tree("then", earlier, folder)]

        # Measure in turns, because other load on the machine changes over time.
        passes: dict[str, list[float]] = {tree.name: [] for tree in trees}
        for _ in range(arguments.rounds):
            for tree in trees:
                found = tree.measure("passes", "--runs", str(arguments.passes))
                passes[tree.name].append(found["first"])
        first = {name: statistics.median(values) for name, values in passes.items()}
        probes = {
            tree.name: tree.measure(
                "probes", "--runs", runs, "--pass-seconds", str(first[tree.name] / 1000)
            )
            for tree in trees
        }
        others = {
            part: {tree.name: tree.measure(part, "--runs", runs) for tree in trees}
            for part in ("memory", "scrape", "polls")
        }

    def rows_of(tree: str) -> list[Row]:
        what = f"operator, {tree}, {runs} runs"
        has_goal = tree == "now"
        memory = others["memory"][tree]
        ratio = first[tree] / first["then"]
        return [
            Row(what, "first pass", first[tree], "ms CPU"),
            Row(what, "first pass to then", ratio, "times", "<= 0.6" if has_goal else ""),
            Row(what, "first passes", probes[tree]["seconds"], "s"),
            Row(
                what,
                "failed probes",
                probes[tree]["failed"],
                "",
                "<= 0" if has_goal else "",
            ),
            Row(what, "pods", memory["pods"], ""),
            Row(what, "memory, lists and specs", memory["kept"], "MiB"),
            Row(what, "memory, peak", memory["peak"], "MiB", "<= 400" if has_goal else ""),
            Row(
                what,
                "scrape on the event loop",
                others["scrape"][tree]["run"],
                "us a run",
                "<= 10" if has_goal else "",
            ),
            Row(
                what,
                "age of progress",
                others["polls"][tree]["age"],
                "s",
                "<= 30" if has_goal else "",
            ),
        ]

    rows = [*rows_of("then"), *rows_of("now")]
    print_rows(rows)
    content = {
        "commit": arguments.commit,
        "rows": [vars(row) for row in rows],
        "first_pass_samples": passes,
    }
    target = ROOT / "tools/benchmarks/results/operator-start.json"
    target.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if any(row.is_reached is False for row in rows) else 0


def main() -> int:
    """Measure both trees, or one part of the tree whose packages are imported."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", default="10950962")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--passes", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--pass-seconds", type=float, default=0.01)
    arguments = parser.parse_args()
    if arguments.part is None:
        return compare(arguments)
    if arguments.part == "probes":
        found = measure_probes(arguments.runs, pass_seconds=arguments.pass_seconds)
    else:
        measure = {
            "passes": measure_passes,
            "memory": measure_memory,
            "scrape": measure_scrape,
            "polls": measure_polls,
        }[arguments.part]
        found = measure(arguments.runs)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
