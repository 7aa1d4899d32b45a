"""``evergrad compare-runs``: compares the samples, losses and final states of two runs."""

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evergrad_common.contract import ExitCode
from evergrad_manifest.errors import InputError, Problem

if TYPE_CHECKING:
    from evergrad_trainer.checkpoint.compare import StateComparison
    from evergrad_trainer.observers.history import History
    from evergrad_trainer.report.compare import Comparison, Rules, StepDifference

NAME = "compare-runs"
EXAMPLES = """\
  evergrad compare-runs runs/a runs/b                     # losses within 1e-5 of each other
  evergrad compare-runs runs/a runs/b --exact             # bit by bit, gradient norms too
  evergrad compare-runs runs/a runs/b --steps 100:200 --tolerance 1e-3
  evergrad compare-runs runs/a runs/b --exact --state     # also compare the newest checkpoint of A
  evergrad compare-runs runs/a runs/b --json

The last row of each step is compared. Exit codes: 0 the same steps, with equal samples and agreeing values;
1 they differ; 64 invalid input."""

DIFFERENT = 1
_MOST_SHOWN = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments for the two runs and the tolerance."""
    parser.add_argument("a", type=Path, metavar="A", help="run directory")
    parser.add_argument("b", type=Path, metavar="B", help="run directory")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-5,
        help="largest relative difference of losses (default: 1e-5)",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="require bit-identical losses, gradient norms and learning rates",
    )
    parser.add_argument(
        "--steps",
        metavar="FROM:TO",
        help="compare only these steps, including both; you can leave out either end",
    )
    parser.add_argument(
        "--state",
        action="store_true",
        help="also compare weights and optimizer bit by bit: A's newest checkpoint and B's at that step",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the comparison as one JSON document"
    )


def execute(args: argparse.Namespace) -> int:
    """Compare and print.

    Raises InputError (exit 64) if arguments or files are invalid, but not if the runs differ.
    """
    from evergrad_trainer.report.compare import compare
    from evergrad_trainer.run.directory import dumps_strict

    rules = _rules(args.tolerance, args.steps, exact=args.exact)
    comparison = compare(_read(args.a), _read(args.b), rules)
    # Two runs without steps would agree trivially, so refuse the comparison.
    if not (comparison.num_compared or comparison.only_in_a or comparison.only_in_b):
        where = f"--steps {args.steps}" if args.steps else "both runs"
        raise InputError(
            Problem(
                where,
                "there is no step to compare",
                "",
                "Compare runs that have trained these steps",
            )
        )
    state = None
    if args.state:
        from evergrad_trainer.checkpoint.compare import compare_states

        state = compare_states(args.a, args.b)
    if args.json:
        document = _as_json((args.a, args.b), rules, comparison)
        if state is not None:
            document["state"] = {
                "equal": state.is_equal,
                "step": state.step,
                "tensors": state.num_tensors,
                "differences": [one.__dict__ for one in state.differences],
            }
        print(dumps_strict(document, indent=2))
    else:
        lines = [*_as_text((args.a, args.b), rules, comparison)]
        if state is not None:
            lines += _describe_state(state)
        print("\n".join(lines))
    is_equal = comparison.is_equal and (state is None or state.is_equal)
    return int(ExitCode.DONE) if is_equal else DIFFERENT


def _describe_state(state: "StateComparison") -> list[str]:
    """Return lines with either the amount of equal state, or the first differences."""
    tensors = _number(state.num_tensors, "tensor")
    after = f"The states after step {state.step:,}"
    if state.is_equal:
        return [f"{after} are equal bit by bit: {tensors}."]
    lines = [f"{after} differ in {len(state.differences):,} of {tensors}:"]
    for one in state.differences[:_MOST_SHOWN]:
        size = "" if one.largest is None else f", by at most {one.largest:.3g}"
        lines.append(f"differs  {one.name}: {one.what}{size}")
    if len(state.differences) > _MOST_SHOWN:
        lines.append(f"         and {len(state.differences) - _MOST_SHOWN:,} more")
    return lines


def _rules(tolerance: float, steps: str | None, *, exact: bool) -> "Rules":
    """Parse the rules of the comparison. ``steps``: FROM:TO. Raises InputError if an argument is invalid."""
    from evergrad_trainer.report.compare import Rules

    # With a tolerance of NaN no values agree, and with infinity all values agree.
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise InputError(
            Problem(
                "--tolerance",
                f"{tolerance} is not a finite number of at least 0",
                "",
                "Use e.g. 1e-5",
            )
        )
    if steps is None:
        return Rules(tolerance, exact)
    # One end may be omitted, but not both, because all steps are the default without the option.
    first, colon, last = steps.partition(":")
    bounds = [int(text) if text.strip().isdecimal() else None for text in (first, last)]
    is_wrong = any(
        text.strip() and bound is None
        for text, bound in zip((first, last), bounds, strict=True)
    )
    if (
        not colon
        or is_wrong
        or bounds == [None, None]
        or (bounds[0] is not None and bounds[1] is not None and bounds[0] > bounds[1])
    ):
        raise InputError(
            Problem(
                "--steps",
                f"{steps!r} is not a range of steps",
                "",
                "Use FROM:TO, e.g. 100:200, 100: or :200",
            )
        )
    return Rules(tolerance, exact, first=bounds[0], last=bounds[1])


def _read(path: Path) -> "History":
    from evergrad_trainer.observers.history import read_history
    from evergrad_trainer.run.directory import RunDirectory

    directory = RunDirectory(path)
    directory.require_run()
    # A run without steps is an error of the command, not a difference.
    if not directory.metrics.exists():
        raise InputError(
            Problem(
                str(directory.metrics),
                "does not exist",
                "the run has not trained a step",
                "Compare runs that have",
            )
        )
    return read_history(directory)


def _as_json(
    runs: tuple[Path, Path], rules: "Rules", comparison: "Comparison"
) -> dict[str, Any]:
    return {
        "equal": comparison.is_equal,
        "a": str(runs[0]),
        "b": str(runs[1]),
        "tolerance": None if rules.exact else rules.tolerance,
        "exact": rules.exact,
        "steps": {
            "compared": comparison.num_compared,
            "first": comparison.first_step,
            "last": comparison.last_step,
        },
        "differences": [difference.__dict__ for difference in comparison.differences],
        "steps_only_in_a": comparison.only_in_a,
        "steps_only_in_b": comparison.only_in_b,
        "evaluations": {
            "compared": comparison.evaluations_compared,
            "only_in_a": comparison.evaluations_only_in_a,
            "only_in_b": comparison.evaluations_only_in_b,
        },
        "changes": {
            "a": [change.__dict__ for change in comparison.changes_a],
            "b": [change.__dict__ for change in comparison.changes_b],
        },
        "repeated_steps": {
            "a": comparison.repeats_a.__dict__,
            "b": comparison.repeats_b.__dict__,
        },
    }


def _as_text(
    runs: tuple[Path, Path], rules: "Rules", comparison: "Comparison"
) -> Iterable[str]:
    yield f"A  {runs[0]}"
    yield f"B  {runs[1]}"

    # Print the compared steps and the changes and repeats of both runs, which explain differences.
    span = (
        f", {comparison.first_step:,} to {comparison.last_step:,}"
        if comparison.first_step is not None
        else ""
    )
    evaluations = _number(comparison.evaluations_compared, "evaluation")
    yield f"   {_number(comparison.num_compared, 'step')} compared{span}, and {evaluations}"
    for name, repeats in (("A", comparison.repeats_a), ("B", comparison.repeats_b)):
        if repeats.num_steps:
            others = repeats.num_with_other_samples
            same = "each time on the same samples"
            if others:
                same = f"{_number(others, 'step')} of them on other samples"
            again = f"{_number(repeats.num_steps, 'step')} more than once"
            yield f"   {name} trained {again}: {_ranges(repeats.ranges)}; {same}"
    for name, changes in (("A", comparison.changes_a), ("B", comparison.changes_b)):
        for one in changes:
            where = f"   {name} continued after step {one.step:,} with another file"
            yield f"{where}: {one.field}: {one.old} → {one.new}"

    # Print differences that count before differences that are only shown.
    for name, missing in (("A", comparison.only_in_a), ("B", comparison.only_in_b)):
        if missing:
            yield f"differs  steps only in {name}: {_ranges(missing)}"
    for name, keys in (
        ("A", comparison.evaluations_only_in_a),
        ("B", comparison.evaluations_only_in_b),
    ):
        if keys:
            shown = _shortened([f"{where} at {step:,}" for step, where in keys])
            yield f"differs  evaluations only in {name}: {shown}"
    yield from (
        _difference(difference)
        for difference in sorted(comparison.differences, key=lambda one: not one.counts)
    )
    if comparison.is_equal:
        how = "bit by bit" if rules.exact else f"within {rules.tolerance:g} relative"
        yield f"The runs agree: equal samples in every step, losses equal {how}."
    else:
        yield "The runs differ."


def _difference(difference: "StepDifference") -> str:
    what = (
        f"{difference.where}: {difference.field}" if difference.where else difference.field
    )
    # Hashes and counts have no relative difference.
    relative = difference.largest_relative
    size = (
        f", at most {relative:.3g} relative"
        if relative is not None and math.isfinite(relative)
        else ""
    )
    kind = "differs" if difference.counts else "  note "
    many = _number(difference.num_steps, "step")
    return (
        f"{kind}  {what}: first at step {difference.first_step:,} (A {difference.a!r}, B "
        f"{difference.b!r}); {many}{size}"
    )


def _ranges(found: Sequence[tuple[int, int]]) -> str:
    return _shortened(
        [
            f"{first:,}" if first == last else f"{first:,} to {last:,}"
            for first, last in found
        ]
    )


def _shortened(texts: Sequence[str]) -> str:
    rest = f" and {len(texts) - _MOST_SHOWN} more" if len(texts) > _MOST_SHOWN else ""
    return ", ".join(texts[:_MOST_SHOWN]) + rest


def _number(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
