"""``evergrad top``: shows the speed of runs, and the CPU and memory that they use."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from evergrad_cli.cluster.client.api_client import Cluster, connect, runs_path
from evergrad_cli.cluster.client.arguments import (
    add_all_namespaces,
    add_cluster_arguments,
    note,
    say,
    say_json,
)
from evergrad_cli.cluster.client.errors import NotFoundError, RefusedError, UnreachableError
from evergrad_cli.cluster.client.raw import part
from evergrad_cli.cluster.render.runs import LABEL_RUN, Run, parse_run
from evergrad_cli.cluster.render.text import NOTHING, parse_short_count, table
from evergrad_common.contract import ExitCode
from evergrad_common.text import short_count, size

NAME = "top"
EXAMPLES = """\
  evergrad top
  evergrad top -A --sort memory
  evergrad top --json | jq '.runs[0].cpuCores'"""
_METRICS = "/apis/metrics.k8s.io/v1beta1"


@dataclass(frozen=True)
class ResourceUsage:
    """CPU cores and bytes of memory that all pods of a run use."""

    cores: float
    memory_bytes: float
    num_pods: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_all_namespaces(parser)
    parser.add_argument(
        "--all", action="store_true", help="include runs that have ended or are suspended"
    )
    parser.add_argument(
        "--sort",
        choices=("tokens", "cpu", "memory", "name"),
        default="tokens",
        help="column to sort by, largest first (default: tokens)",
    )
    add_cluster_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """Print the table. Return 0. Without the metrics API, the usage columns are empty and a remark has the
    reason."""
    with connect(args) as cluster:
        namespace = None if args.all_namespaces else cluster.namespace
        runs = [
            parse_run(raw)
            for raw in cluster.items(runs_path(namespace), what="trainingruns")
        ]

        usage, reason = _read_usage(cluster, namespace)

    # A run that has ended or is suspended uses nothing.
    if not args.all:
        runs = [run for run in runs if not run.is_over and run.phase != "Suspended"]
    runs = order(runs, usage or {}, by=args.sort)
    if args.json:
        rows = [
            _build_row(run, (usage or {}).get((run.namespace, run.name))) for run in runs
        ]
        say_json({"runs": rows, "metricsAvailable": usage is not None})
        return int(ExitCode.DONE)
    if not runs:
        note("No runs train." if not args.all else "No runs found.")
    else:
        for line in render(runs, usage, with_namespace=args.all_namespaces):
            say(line)
    if usage is None:
        note(f"CPU and memory are unknown: {reason}")
    return int(ExitCode.DONE)


def _read_usage(
    cluster: Cluster, namespace: str | None
) -> tuple[Mapping[tuple[str, str], ResourceUsage] | None, str]:
    """Return the usage of each run, or None with the reason.

    The table of the runs is shown without it, too.
    """
    within = f"/namespaces/{namespace}" if namespace is not None else ""
    path, query = f"{_METRICS}{within}/pods", {"labelSelector": LABEL_RUN}
    try:
        return parse_usage(cluster.items(path, what="pod metrics", query=query)), ""
    except NotFoundError:
        return None, "this cluster has no metrics API (metrics-server is not installed)"
    except RefusedError:
        return None, "this user may not read pod metrics"
    except UnreachableError:
        return None, "the metrics API does not answer"


def _build_row(run: Run, used: ResourceUsage | None) -> dict[str, Any]:
    """Return a run for scripts: numbers without units, and null for unknown values."""
    return {
        "name": run.name,
        "namespace": run.namespace,
        "phase": run.phase,
        "nodes": run.nodes or None,
        "tokensPerSecond": parse_short_count(run.tokens_per_second or None),
        "pods": used.num_pods if used else None,
        "cpuCores": round(used.cores, 3) if used else None,
        "memoryBytes": round(used.memory_bytes) if used else None,
    }


def parse_usage(raw: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], ResourceUsage]:
    """Return the usage of each (namespace, run) from PodMetrics."""
    found: dict[tuple[str, str], ResourceUsage] = {}
    for item in raw:
        metadata = item.get("metadata") or {}
        key = (
            str(metadata.get("namespace", "")),
            str(part(metadata, "labels").get(LABEL_RUN, "")),
        )

        # Injected containers count, too: they use the resources that the pod requested.
        used = [container.get("usage") or {} for container in item.get("containers") or ()]
        old = found.get(key, ResourceUsage(0.0, 0.0, 0))
        found[key] = ResourceUsage(
            old.cores + sum(_number(one.get("cpu")) for one in used),
            old.memory_bytes + sum(_number(one.get("memory")) for one in used),
            old.num_pods + 1,
        )
    return found


def _number(quantity: Any) -> float:
    from evergrad_manifest.values.quantities import quantity_value

    try:
        return float(quantity_value(str(quantity)) if quantity is not None else Fraction(0))
    except ValueError:
        return 0.0


def order(
    runs: Sequence[Run], usage: Mapping[tuple[str, str], ResourceUsage], *, by: str
) -> list[Run]:
    """Return ``runs`` with the largest value first, and runs with equal values by name."""

    # Negate values instead of sorting in reverse, so that runs with equal values stay in the order of their
    # names.
    def key(run: Run) -> tuple[float, str, str]:
        used = usage.get((run.namespace, run.name))
        values = {
            "tokens": parse_short_count(run.tokens_per_second or None) or 0.0,
            "cpu": used.cores if used else 0.0,
            "memory": used.memory_bytes if used else 0.0,
            "name": 0.0,
        }
        return -values[by], run.namespace, run.name

    return sorted(runs, key=key)


def render(
    runs: Sequence[Run],
    usage: Mapping[tuple[str, str], ResourceUsage] | None,
    *,
    with_namespace: bool = False,
) -> list[str]:
    """Return the lines of the table, with a sum at the end if there are several runs."""
    headers = (
        *(("NAMESPACE",) if with_namespace else ()),
        "NAME",
        "PHASE",
        "NODES",
        "TOK/S",
        "ETA",
        "CPU",
        "MEMORY",
    )
    rows = []
    for run in runs:
        used = (usage or {}).get((run.namespace, run.name))
        shown = (
            (f"{used.cores:.2f}", size(used.memory_bytes)) if used else (NOTHING, NOTHING)
        )
        row = (
            run.name,
            run.phase,
            run.nodes or NOTHING,
            run.tokens_per_second or NOTHING,
            run.eta or NOTHING,
            *shown,
        )
        rows.append([run.namespace, *row] if with_namespace else list(row))
    if len(runs) <= 1:
        return table(headers, rows)

    # Sum the known values: a run without metrics must not hide the usage of the other runs.
    speed = sum(parse_short_count(run.tokens_per_second or None) or 0.0 for run in runs)
    keys = [(run.namespace, run.name) for run in runs]
    known = [usage[key] for key in keys if key in usage] if usage else []
    cores, memory = sum(one.cores for one in known), sum(one.memory_bytes for one in known)
    sums = (f"{cores:.2f}", size(memory)) if known else (NOTHING, NOTHING)
    total = ("total", "", "", short_count(speed) if speed else NOTHING, "", *sums)
    rows.append(["", *total] if with_namespace else list(total))
    return table(headers, rows)
