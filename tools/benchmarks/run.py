"""``make bench``: all benchmarks, one after another, into ``tools/benchmarks/results/`` with a description of
the machine."""

import argparse
import importlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Row, print_rows

RESULTS = Path(__file__).with_name("results")


def _speed(
    precision: str,
    *,
    compiled: bool,
    rounds: int,
) -> Callable[[], list[Row]]:
    def measure() -> list[Row]:
        module = importlib.import_module("training_speed")
        setting = module.Setting(precision=precision, compiled=compiled)
        rows: list[Row] = module.measure(setting, rounds=rounds)
        return rows

    return measure


RECOVERY = "recovery"
"""Takes as long as all others together, and has options: ``make bench-recovery``. It is not run by
default."""
CLUSTER = "cluster"
"""Needs the control plane of tools/bed, and has options: ``make bench-cluster``."""
CLUSTER_PODS = "cluster-pods"
"""Needs the nodes of tools/bed, and has options: ``make bench-cluster-pods``."""

SFT_PACKING, PREPARE_MIXTURE = "sft-packing", "prepare-mixture"
"""Need libraries that no other part needs (TRL, datasets): ``make bench-peers``."""


def _simple(module: str) -> Callable[[], list[Row]]:
    return lambda: importlib.import_module(module).measure()


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {
    "speed-fp32": _speed("fp32", compiled=False, rounds=30),
    "speed-fp32-compile": _speed("fp32", compiled=True, rounds=30),
    "speed-bf16": _speed("bf16-autocast", compiled=False, rounds=6),
    "speed-bf16-compile": _speed("bf16-autocast", compiled=True, rounds=6),
    "resume": _simple("resume_time"),
    "start": _simple("start_time"),
    "checkpoint-cost": _simple("checkpoint_cost"),
    "checkpoint-throughput": _simple("checkpoint_throughput"),
    "memory": _simple("memory"),
    "overlap": _simple("overlap"),
    "sharded-memory": _simple("sharded_memory"),
    "overhead": _simple("overhead"),
    "two-stage-kl": _simple("two_stage_kl"),
    "latent-edit": _simple("latent_edit"),
    "lora": _simple("lora"),
    "data-reading": _simple("data_reading"),
    "prepare": _simple("prepare"),
    SFT_PACKING: _simple("sft_packing"),
    PREPARE_MIXTURE: _simple("prepare_mixture"),
    "coordinator": _simple("coordinator"),
    RECOVERY: _simple(RECOVERY),
    CLUSTER: _simple("cluster_scale"),
    CLUSTER_PODS: _simple("cluster_pods"),
}
_NOT_BY_DEFAULT = (RECOVERY, CLUSTER, CLUSTER_PODS, SFT_PACKING, PREPARE_MIXTURE)


def describe_machine() -> dict[str, object]:
    """Return a description of the machine on which the values were measured."""
    facts = {key.strip(): value.strip() for key, _, value in _cpu_lines()}
    flags = set(facts.get("flags", "").split())
    return {
        "cpu": facts.get("model name", platform.processor()),
        "bf16_units": bool(flags & {"amx_bf16", "avx512_bf16"}),
        "cores": os.cpu_count(),
        "memory_gib": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
        ),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0],
    }


def _cpu_lines() -> list[tuple[str, str, str]]:
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8").split("\n\n")[0] if path.exists() else ""
    return [line.partition(":") for line in text.splitlines()]


def write_results(name: str, rows: list[Row], machine: dict[str, object]) -> None:
    """Replace one benchmark's rows in ``latest.json``, and write all rows to ``latest.md``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "latest.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = [asdict(row) | {"reached": row.is_reached} for row in rows]
    # Other benchmarks keep their rows and the machine of their measurement, because not all are run together.
    known[name] = {"taken": time.strftime("%Y-%m-%d"), "machine": machine, "rows": found}
    document = {key: known[key] for key in BENCHMARKS if key in known}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "latest.md").write_text(
        "\n".join(_to_markdown(document)) + "\n", encoding="utf-8"
    )


def _to_markdown(document: dict[str, Any]) -> list[str]:
    lines = [
        "# Results",
        "",
        (
            "Written by `make bench`. Ratios are of figures taken in turns in one run, but for rows "
            "that name another time: those were taken then, perhaps on another machine. Compare no "
            "times of different runs."
        ),
    ]
    outcomes = {None: "", True: "reached", False: "**missed**"}
    for name, part in document.items():
        machine = ", ".join(
            f"{key.replace('_', ' ')} {value}" for key, value in part["machine"].items()
        )
        lines += [
            "",
            f"## {name}",
            "",
            f"{part['taken']}; {machine}",
            "",
            "| what | figure | value | goal | |",
            "|---|---|---:|---|---|",
        ]
        for row in part["rows"]:
            end = f"{outcomes[row['reached']]} {row['note']}".strip()
            lines.append(
                f"| {row['what']} | {row['name']} | {row['value']:,.4g} {row['unit']} | "
                f"{row['goal']} | {end} |"
            )
    return lines


def main() -> None:
    """Run the benchmarks that the arguments name, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(BENCHMARKS)}; default: all but {', '.join(_NOT_BY_DEFAULT)}",
    )
    recovery = importlib.import_module(RECOVERY)
    recovery.add_options(parser)
    options = parser.parse_args()
    names = options.names or [name for name in BENCHMARKS if name not in _NOT_BY_DEFAULT]
    BENCHMARKS[RECOVERY] = partial(
        recovery.measure,
        only=options.only,
        events=options.events,
    )
    for name in names:
        # Describe the machine before the benchmark, because afterwards the load would be the benchmark's own.
        machine = describe_machine()
        print(f"== {time.strftime('%T')}  {name}", flush=True)
        rows = BENCHMARKS[name]()
        print_rows(rows)
        write_results(name, rows, machine)


if __name__ == "__main__":
    main()
