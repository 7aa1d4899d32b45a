"""``make bench``: all benchmarks, one after the other, into ``benchmarks/results/`` with the machine's description."""

import argparse
import importlib
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import Row, print_rows

RESULTS = Path(__file__).with_name("results")


def _speed(precision: str, *, compiled: bool, rounds: int) -> Callable[[], list[Row]]:
    return lambda: importlib.import_module("training_speed").measure(rounds=rounds, precision=precision, compiled=compiled)


def _simple(module: str) -> Callable[[], list[Row]]:
    return lambda: importlib.import_module(module).measure()


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {
    "speed-fp32": _speed("fp32", compiled=False, rounds=12),
    "speed-fp32-compile": _speed("fp32", compiled=True, rounds=12),
    "speed-bf16": _speed("bf16-autocast", compiled=False, rounds=6),
    "speed-bf16-compile": _speed("bf16-autocast", compiled=True, rounds=6),
    "resume": _simple("resume_time"),
    "checkpoint-cost": _simple("checkpoint_cost"),
    "checkpoint-throughput": _simple("checkpoint_throughput"),
    "memory": _simple("memory"),
    "overhead": _simple("overhead"),
    "data-reading": _simple("data_reading"),
    "prepare": _simple("prepare"),
}


def describe_machine() -> dict[str, object]:
    """What the figures were taken on."""
    facts = {key.strip(): value.strip() for key, _, value in _cpu_lines()}
    flags = set(facts.get("flags", "").split())
    return {
        "cpu": facts.get("model name", platform.processor()),
        "bf16_units": bool(flags & {"amx_bf16", "avx512_bf16"}),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0],
    }


def _cpu_lines() -> list[tuple[str, str, str]]:
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8").split("\n\n")[0] if path.exists() else ""
    return [line.partition(":") for line in text.splitlines()]


def write_results(rows: list[Row], machine: dict[str, object]) -> None:
    """``latest.json`` for scripts and ``latest.md`` for people."""
    RESULTS.mkdir(exist_ok=True)
    taken = time.strftime("%Y-%m-%d")
    document = {"taken": taken, "machine": machine, "rows": [vars(row) | {"reached": row.is_reached} for row in rows]}
    (RESULTS / "latest.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    lines = [f"# Results of {taken}", "", ", ".join(f"{key} {value}" for key, value in machine.items()), ""]
    lines += ["| what | figure | value | goal | |", "|---|---|---:|---|---|"]
    verdicts = {None: "", True: "reached", False: "**missed**"}
    for row in rows:
        note = f" {row.note}" if row.note else ""
        lines.append(f"| {row.what} | {row.name} | {row.value:,.4g} {row.unit} | {row.goal} | {verdicts[row.is_reached]}{note} |")
    (RESULTS / "latest.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Run those that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default: all")
    names = parser.parse_args().names or list(BENCHMARKS)
    machine, rows = describe_machine(), []
    for name in names:
        print(f"== {time.strftime('%T')}  {name}", flush=True)
        found = BENCHMARKS[name]()
        print_rows(found)
        rows += found
        if len(names) == len(BENCHMARKS):
            write_results(rows, machine)


if __name__ == "__main__":
    main()
