"""``make bench-recovery``: the cost of a lost node in process, with fresh workers and with stock torchrun,
and the cost of elasticity.

Each part writes its samples to a file, so that parts can be measured separately: ratios use all samples in
the file. For how to read the rows, see README.md next to this file.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import elastic_cost
import recovery_inprocess
import recovery_restart
import reduction
from common import Row, interval_of_median, interval_of_ratio, print_rows
from elastic_nodes import warm_up_this_process

SAMPLES_FILE = Path(__file__).with_name("results") / "recovery-samples.json"
EVENTS = 10
Samples = dict[str, list[dict[str, Any]]]

PARTS: dict[str, Callable[..., Samples]] = {
    "level1": recovery_inprocess.measure_events,
    "level2": recovery_restart.measure_script,
    "stock_tuned": partial(recovery_restart.measure_stock, settings="stock_tuned"),
    "stock_default": partial(recovery_restart.measure_stock, settings="stock_default"),
    "compile": recovery_inprocess.measure_compiled,
    "reduction": reduction.measure_reduction,
    "cost": elastic_cost.measure_cost,
    "memory": elastic_cost.measure_memory,
}
"""In the order of measurement. Parts whose ratios have goals are next to each other."""


def measure(
    *,
    only: Collection[str] = (),
    events: int = EVENTS,
    is_tiny: bool = False,
    samples_file: Path = SAMPLES_FILE,
) -> list[Row]:
    """Measure the parts in ``only`` (default: all), write their samples to the file, and return rows of all
    samples in it.

    If a part fails, this is printed, and its older samples are kept. Raises SystemExit if all parts fail.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    # Raise an exception, like Ctrl-C, so that processes and folders are cleaned up.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    warm_up_this_process()
    known: dict[str, Any] = (
        json.loads(samples_file.read_text(encoding="utf-8"))
        if samples_file.exists()
        else {}
    )
    begun, failed = time.strftime("%Y-%m-%d %H:%M"), []
    for name in only or PARTS:
        print(
            f"== {time.strftime('%T')}  {name}, load {os.getloadavg()[0]:.1f}", flush=True
        )
        load = os.getloadavg()[0]
        try:
            with tempfile.TemporaryDirectory(prefix="evergrad-bench-") as folder:
                samples = PARTS[name](Path(folder) / name, events=events, is_tiny=is_tiny)
        except Exception as error:  # noqa: BLE001 - a part that fails must not take the others' hours with it
            print(
                f"{name} failed: {type(error).__name__}: {error}",
                file=sys.stderr,
                flush=True,
            )
            failed.append(name)
            continue
        known[name] = {"taken": begun, "load_before": round(load, 1), "samples": samples}
        samples_file.parent.mkdir(exist_ok=True)
        samples_file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    if failed and len(failed) == len(only or PARTS):
        raise SystemExit(f"every part failed: {', '.join(failed)}")
    return build_rows(
        {name: part["samples"] for name, part in known.items()},
        times={name: part["taken"] for name, part in known.items()},
    )


def build_rows(samples: dict[str, Samples], *, times: dict[str, str]) -> list[Row]:
    """Convert samples to rows: medians, with the range in the note, and the date of a part that is older than
    the newest. Pure."""
    rows: list[Row] = []
    for name, build in _ROWS.items():
        if name in samples:
            late = (
                ""
                if times[name] == max(times.values())
                else f"; {name} taken {times[name]}"
            )
            rows += [
                replace(row, note=f"{row.note}{late}")
                for row in build(samples[name], samples)
            ]
    return rows


def _level1(own: Samples, taken: dict[str, Samples]) -> list[Row]:
    what = "level 1: SIGKILL of 1 of 3 nodes -> a step of the other 2"
    kills = own["node_kill"]
    rows = [
        *_loss(what, kills, over=_over_steps),
        *_ratios(
            what,
            kills,
            taken,
            goals={"stock_tuned": 8, "stock_default": 40},
        ),
    ]
    what = "level 1: SIGKILL of a worker -> next finished step"
    rows += _loss(what, own["worker_kill"], over=_over_steps)
    what = "level 1: SIGTERM of 1 of 3 nodes"
    leaves = own["sigterm"]
    rows += [
        _row(
            what,
            "agreed boundary -> the rest go on",
            [one["pause_seconds"] / one["step_seconds"] for one in leaves],
            "steps",
            "<= 1",
        ),
        _row(
            what,
            "agreed boundary -> their next finished",
            [one["after_boundary_seconds"] for one in leaves],
            "s",
        ),
        _row(
            what,
            "SIGTERM -> their next finished",
            [one["seconds"] for one in leaves],
            "s",
        ),
        _lost_row(what, leaves),
    ]
    what = "level 1: a node joins 2 others"
    pauses = [one["pause_seconds"] for one in own["join"]]
    rows.append(_row(what, "the others stand still", pauses, "s"))
    if "reduction" in taken:
        transfer = statistics.median(_of(taken["reduction"]["transfer"], "seconds"))
        note = f"bare transfer {transfer:.3f} s"
        rows.append(
            _row(
                what,
                "of it above the bare transfer",
                [one - transfer for one in pauses],
                "s",
                "<= 0.5",
                note,
            )
        )
    return rows


def _level2(own: Samples, taken: dict[str, Samples]) -> list[Row]:
    what = "level 2: SIGKILL of 1 of 3 nodes -> a step of the other 2"
    kills = own["node_kill"]
    reload = statistics.median(_of(own["reload"], "seconds"))
    return [
        _row(
            what,
            "seconds",
            _of(kills, "seconds"),
            "s",
            note=_start_note(kills),
        ),
        _row(
            what,
            "above the bare reload",
            [one["seconds"] - reload for one in kills],
            "s",
            "<= 0.8",
            f"reload {reload:.3f} s",
        ),
        _row(what, "one undisturbed step", _of(kills, "step_seconds"), "s"),
        _row(
            what,
            "steps trained again",
            _of(kills, "steps_lost"),
            "steps",
            note="a checkpoint every 5 steps",
        ),
        *_ratios(
            what,
            kills,
            taken,
            goals={"stock_tuned": 6, "stock_default": 30},
        ),
    ]


def _stock(own: Samples, taken: dict[str, Samples], *, name: str) -> list[Row]:
    what = f"torchrun c10d, {name}: SIGKILL of 1 of 3 nodes -> a step"
    kills = own["node_kill"]
    return [
        _row(
            what,
            "seconds",
            _of(kills, "seconds"),
            "s",
            note=_start_note(kills),
        ),
        _row(what, "one undisturbed step", _of(kills, "step_seconds"), "s"),
        _row(
            what,
            "steps trained again",
            _of(kills, "steps_lost"),
            "steps",
            note="a checkpoint every 5 steps",
        ),
    ]


def _compiled(own: Samples, taken: dict[str, Samples]) -> list[Row]:
    what = "level 1, torch.compile: SIGKILL of 1 of 3 nodes -> a step"
    kills = own["compiled_kill"]
    graphs = (
        f"of {max(_of(kills, 'graphs')):.0f} each, in {sum(_of(kills, 'survivors')):.0f} survivors "
        f"of {len(kills)} kills"
    )
    return [
        Row(
            what,
            "graphs compiled again",
            sum(_of(kills, "recompiled")),
            "graphs",
            "<= 0",
            graphs,
        ),
        _row(
            what,
            "seconds",
            _of(kills, "seconds"),
            "s",
            note=f"a step {statistics.median(_of(kills, 'step_seconds')):.3f} s",
        ),
    ]


def _reduction(own: Samples, taken: dict[str, Samples]) -> list[Row]:
    what = "gradient reduction, 2 processes, tokens/s"
    ratios = [one["DDP"] / one["evergrad"] for one in own["turn"]]
    kept = [one["DDP_kept"] / one["evergrad"] for one in own["turn"]]
    return [
        _row(
            what,
            "step with flat buckets",
            _of(own["turn"], "evergrad"),
            "s",
        ),
        _row(what, "step with DDP", _of(own["turn"], "DDP"), "s"),
        _row(what, "evergrad / DDP", ratios, "ratio", ">= 1.15"),
        _row(
            what,
            "the same, DDP's gradients kept",
            kept,
            "ratio",
            note="for scale: zero_grad(set_to_none=False)",
        ),
    ]


def _cost(own: Samples, taken: dict[str, Samples]) -> list[Row]:
    what = "being elastic, 2 nodes, nothing happens"
    low, high = elastic_cost.interval_of_ratio(own["turn"])
    return [
        _row(what, "evergrad node", _of(own["turn"], "elastic"), "tokens/s"),
        _row(what, "plain torchrun", _of(own["turn"], "static"), "tokens/s"),
        _row(
            what,
            "elastic / torchrun",
            [one["elastic"] / one["static"] for one in own["turn"]],
            "ratio",
            ">= 0.99",
        ),
        Row(
            what,
            "half the interval's width",
            (high - low) / 2,
            "ratio",
            f"<= {elastic_cost.HALF_WIDTH}",
        ),
    ]


def _memory(own: Samples, taken: dict[str, Samples]) -> list[Row]:
    what = "memory of a supervisor with 1 worker"
    return [
        _row(
            what,
            "proportional (shared counted once)",
            _of(own["memory"], "supervisor_Pss"),
            "MB",
        ),
        _row(
            what,
            "written by it, shared with nobody",
            _of(own["memory"], "supervisor_own"),
            "MB",
        ),
        _row(
            what,
            "for scale: worker, proportional",
            _of(own["memory"], "worker_Pss"),
            "MB",
        ),
    ]


_ROWS: dict[str, Callable[[Samples, dict[str, Samples]], list[Row]]] = {
    "level1": _level1,
    "level2": _level2,
    "stock_tuned": partial(_stock, name="tuned"),
    "stock_default": partial(_stock, name="default"),
    "compile": _compiled,
    "reduction": _reduction,
    "cost": _cost,
    "memory": _memory,
}


def _loss(
    what: str, samples: list[dict[str, Any]], *, over: Callable[[dict[str, Any]], float]
) -> list[Row]:
    return [
        _row(what, "seconds", _of(samples, "seconds"), "s"),
        _row(
            what,
            "one undisturbed step",
            _of(samples, "step_seconds"),
            "s",
        ),
        _row(
            what,
            "above 1.5 undisturbed steps",
            [over(one) for one in samples],
            "s",
            "<= 0.1",
        ),
        _lost_row(what, samples),
    ]


def _over_steps(sample: dict[str, Any]) -> float:
    return float(sample["seconds"] - 1.5 * sample["step_seconds"])


def _lost_row(what: str, samples: list[dict[str, Any]]) -> Row:
    return Row(
        what,
        "steps trained again, in all",
        sum(_of(samples, "steps_lost")),
        "steps",
        "<= 0",
        f"n={len(samples)}",
    )


def _ratios(
    what: str,
    kills: list[dict[str, Any]],
    taken: dict[str, Samples],
    *,
    goals: dict[str, int],
) -> list[Row]:
    """Return how many times faster than stock torchrun: ratios of medians."""
    own = _of(kills, "seconds")
    rows = []
    for name, goal in goals.items():
        if name not in taken:
            continue
        samples = taken[name]["node_kill"]
        theirs = _of(samples, "seconds")
        middle = statistics.median(theirs)
        title = f"{name.replace('_', ' ')} / evergrad"
        note = f"theirs {middle:.1f} s, n={len(theirs)}"
        rows.append(_ratio_row(what, title, theirs, own, goal=f">= {goal}", note=note))

        # Each new worker of torchrun imports torch and transformers. Evergrad's workers have inherited them.
        warm = [one["seconds"] - one["start"]["imports"] for one in samples]
        note = "for scale: theirs without its imports"
        rows.append(_ratio_row(what, f"{title}, warm", warm, own, note=note))
    return rows


def _ratio_row(
    what: str,
    name: str,
    theirs: list[float],
    own: list[float],
    *,
    goal: str = "",
    note: str,
) -> Row:
    low, high = interval_of_ratio(theirs, own)
    ratio = statistics.median(theirs) / statistics.median(own)
    interval = f"95 % interval {low:.3g} to {high:.3g}"
    return Row(what, name, ratio, "ratio", goal, f"{interval}; {note}")


def _row(
    what: str, name: str, values: list[float], unit: str, goal: str = "", note: str = ""
) -> Row:
    """Return a row with the median; its range and its 95 % interval are in the note."""
    low, high = interval_of_median(values)
    span = f"{min(values):.3g} to {max(values):.3g}, n={len(values)}"
    parts = [span, f"95 % interval {low:.4g} to {high:.4g}", note]
    return Row(
        what,
        name,
        statistics.median(values),
        unit,
        goal,
        "; ".join(part for part in parts if part),
    )


def _of(samples: list[dict[str, Any]], key: str) -> list[float]:
    return [float(one[key]) for one in samples]


def _start_note(kills: list[dict[str, Any]]) -> str:
    """Return a note with the part of the time that the workers' own start took."""
    names = kills[0]["start"]
    parts = [
        f"{name} {statistics.median(one['start'][name] for one in kills):.2f}"
        for name in names
    ]
    return f"of it in rank 0: {', '.join(parts)}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Define the options that ``run.py`` passes on."""
    parser.add_argument(
        "--only",
        type=_parts,
        default=(),
        metavar="PART,...",
        help=f"of recovery: {', '.join(PARTS)}; default: all",
    )
    parser.add_argument(
        "--events",
        type=int,
        default=EVENTS,
        help=f"of recovery: events of each kind ({EVENTS})",
    )


def _parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no such part: {', '.join(unknown)}. There are {', '.join(PARTS)}"
        )
    return names


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument(
        "--tiny", action="store_true", help="a model that is only for trying"
    )
    parser.add_argument(
        "--samples", type=Path, default=SAMPLES_FILE, help="where samples are kept"
    )
    options = parser.parse_args()
    print_rows(
        measure(
            only=options.only,
            events=options.events,
            is_tiny=options.tiny,
            samples_file=options.samples,
        )
    )
