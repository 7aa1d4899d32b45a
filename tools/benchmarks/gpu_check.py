"""``make gpu-check``: checks that need an accelerator, each part in its own process.

Writes ``results/gpu.json`` and ``results/gpu.md``. Exit code: 0 if all parts passed, 1 if one failed, 69 if
there is no accelerator and nothing was checked. ``--device cpu`` runs the same parts on the CPU with tiny
models and gloo, which tests this program but not an accelerator.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import gpu_parts
import gpu_runs
from common import Row, print_rows
from gpu_parts import PREFIX

RESULTS = Path(__file__).with_name("results")
NO_DEVICE = 69
"""EX_UNAVAILABLE of sysexits."""
PARTS: dict[str, Callable[[str, bool], list[Row]]] = {
    "environment": gpu_parts.check_environment,
    "precision": gpu_parts.check_precisions,
    "compile": gpu_parts.check_compile,
    "offload": gpu_parts.check_offload,
    "fsdp2": gpu_parts.check_fsdp2,
    "world": gpu_parts.check_world,
    "abort": gpu_parts.check_abort,
    "staging": gpu_parts.check_staging,
    "memory": gpu_runs.check_memory,
    "run": gpu_runs.check_run,
    "recovery": gpu_runs.check_recovery,
    "speed-124M": partial(gpu_parts.check_speed, parameters="124M", is_compiled=False),
    "speed-124M-compile": partial(
        gpu_parts.check_speed, parameters="124M", is_compiled=True
    ),
    "speed-1B": partial(gpu_parts.check_speed, parameters="1B", is_compiled=False),
    "speed-1B-compile": partial(gpu_parts.check_speed, parameters="1B", is_compiled=True),
}


def run_part(name: str, *, device: str, is_tiny: bool, seconds: float) -> dict[str, Any]:
    """Run one part in its own process: an error of a device breaks everything that the process does
    afterwards."""
    begun = time.perf_counter()
    command = [sys.executable, __file__, "--device", device, "--part", name]
    command += ["--tiny"] if is_tiny else []
    result: dict[str, Any] = {"passed": False, "rows": [], "error": ""}
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False
        )
        lines = [line for line in ended.stdout.splitlines() if line.startswith(PREFIX)]
        if lines:
            result |= json.loads(lines[-1].removeprefix(PREFIX))
        else:
            result["error"] = f"ended with {ended.returncode}: {ended.stderr[-2000:]}"
    except subprocess.TimeoutExpired:
        result["error"] = f"did not end within {seconds:g} s"
    return {**result, "seconds": round(time.perf_counter() - begun, 1)}


def to_markdown(document: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = [
        "# Checks on an accelerator",
        "",
        f"Written by `make gpu-check`, {document['taken']}, device {document['device']}.",
        "",
        *([document["note"], ""] if document.get("note") else []),
        "| part | result | seconds |",
        "|---|---|---:|",
    ]
    for name, part in document["parts"].items():
        verdict = (
            "passed" if part["passed"] else f"**failed**: {part['error'].splitlines()[-1]}"
        )
        lines.append(f"| {name} | {verdict} | {part['seconds']} |")
    lines += ["", "| what | figure | value | |", "|---|---|---:|---|"]
    for part in document["parts"].values():
        for row in part["rows"]:
            value = f"{row['value']:,.4g} {row['unit']}".strip()
            lines.append(f"| {row['what']} | {row['name']} | {value} | {row['note']} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run all parts, or the parts that the arguments name."""
    parser = _build_parser()
    options = parser.parse_args(arguments)
    if options.rank_of_world:
        gpu_parts.be_rank_of_world(options.rank_of_world)
    if options.part:
        _be_part(options.part, options.device, is_tiny=options.tiny)
        return 0

    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    from evergrad_trainer.distributed.process_groups import count_accelerators

    if options.device == "cuda" and count_accelerators() == 0:
        print(
            "no cuda device is visible on this machine: nothing was checked",
            file=sys.stderr,
        )
        return NO_DEVICE
    document: dict[str, Any] = {
        "taken": time.strftime("%Y-%m-%d"),
        "device": options.device,
        "note": options.note,
        "parts": {},
    }
    for name in options.parts or PARTS:
        print(f"== {time.strftime('%T')}  {name}", flush=True)
        part = document["parts"][name] = run_part(
            name, device=options.device, is_tiny=options.tiny, seconds=options.seconds
        )
        print("passed" if part["passed"] else f"failed: {part['error']}", flush=True)
        print_rows([Row(**row) for row in part["rows"]])
        # Write after each part, so that results are kept if the device is available only for a short time.
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "gpu.json").write_text(
            json.dumps(document, indent=1) + "\n", encoding="utf-8"
        )
        (options.results / "gpu.md").write_text(to_markdown(document), encoding="utf-8")
    return 0 if all(part["passed"] for part in document["parts"].values()) else 1


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and few rounds")
    parser.add_argument(
        "--seconds", type=float, default=1800, help="of each part at most; default: 1800"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        help="where gpu.json and gpu.md are written",
    )
    parser.add_argument("--note", default="", help="a sentence for the results")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--rank-of-world", choices=("cuda", "cpu"), help=argparse.SUPPRESS)
    return parser


def _be_part(name: str, device: str, *, is_tiny: bool) -> None:
    """Run one part in this process, and print its result as one line."""
    found: dict[str, Any]
    try:
        rows = PARTS[name](device, is_tiny)
        found = {"passed": True, "rows": [asdict(row) for row in rows]}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this part's result
        found = {"error": f"{type(error).__name__}: {error}"}
    print(PREFIX + json.dumps(found), flush=True)


if __name__ == "__main__":
    sys.exit(main())
