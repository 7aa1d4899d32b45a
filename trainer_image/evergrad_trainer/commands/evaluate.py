"""``evergrad evaluate``: measures checkpoints of a run on its evaluation sets, during or after the run."""

import argparse
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from evergrad_common.contract import ExitCode, RunFile
from evergrad_common.evaluation_report import encode_evaluated
from evergrad_common.text import count, duration
from evergrad_manifest.errors import InputError, Problem
from evergrad_trainer.base.errors import CheckpointError
from evergrad_trainer.checkpoint.store import CheckpointStore, open_store
from evergrad_trainer.commands.pod import last_words, try_patiently
from evergrad_trainer.run.directory import RunDirectory, dumps_strict, reported

if TYPE_CHECKING:
    from evergrad_trainer.checkpoint.manifest import Candidate
    from evergrad_trainer.evaluation.comparison import Compared
    from evergrad_trainer.evaluation.measurement import CheckpointEvaluator, Measured
    from evergrad_trainer.evaluation.setup import RecordedRun
    from evergrad_trainer.worker.signals import StopSignals

NAME = "evaluate"
EXAMPLES = """\
  evergrad evaluate runs/docs-lm
  evergrad evaluate runs/docs-lm --checkpoint best --set heldOut --set wiki
  evergrad evaluate runs/docs-lm --checkpoint 1200 --json | jq '.results[].loss'
  evergrad evaluate runs/docs-lm --checkpoint 1200 --compare    # compare with the run's own result
  evergrad evaluate runs/docs-lm --watch      # every new checkpoint, until the run is complete"""
POLL_SECONDS: Final = 1.0
"""Interval at which --watch looks for a new checkpoint."""
DIFFERENT: Final = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments for the run, the checkpoint and the sets."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--checkpoint",
        default="last",
        metavar="STEP|best|last",
        help="checkpoint to evaluate (default: %(default)s)",
    )
    which.add_argument(
        "--watch",
        action="store_true",
        help="evaluate every checkpoint, and each new one when it is published, until the run is complete",
    )
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="NAME",
        help="evaluate only this set (repeatable; default: all sets)",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="exit with 1 if a loss differs from the loss that the run measured at this step",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-5,
        help="largest relative difference of losses with --compare (default: 1e-5; 0: bit by bit)",
    )
    parser.add_argument(
        "--weights",
        choices=("trained", "average"),
        help="trained weights, or the average of spec.training.ema (default: as the run evaluates)",
    )
    parser.add_argument(
        "--micro-batch-size",
        type=int,
        metavar="N",
        help="samples in each forward pass (default: the run's batching.microBatchSize)",
    )
    parser.add_argument(
        "--termination-log",
        type=Path,
        metavar="FILE",
        help="file for the results of one checkpoint, or the root cause of a failure, at most 4 KiB",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document; with --watch one object in each line",
    )


def execute(args: argparse.Namespace) -> int:
    """Evaluate. Returns 0, or 1 if --compare has found a difference, or 75 if a stop interrupted the
    evaluation; the partial result is then kept.

    Raises InputError, RunDirectoryError, CheckpointError and ConfigurationError.
    """
    from evergrad_trainer.evaluation.choice import choose_checkpoint
    from evergrad_trainer.evaluation.comparison import compare_with_run
    from evergrad_trainer.evaluation.measurement import CutError, held
    from evergrad_trainer.evaluation.setup import read_recorded
    from evergrad_trainer.worker.signals import StopSignals

    if args.termination_log is not None:
        with last_words(args.termination_log):
            return try_patiently(functools.partial(_execute_in_pod, args))
    _check_arguments(args)
    recorded, compared = read_recorded(args.run), list["Compared"]()
    store, signals = open_store(args.run / RunFile.CHECKPOINTS), StopSignals()
    with contextlib.ExitStack() as stack:
        candidate = None
        if not args.watch:
            # Hold the checkpoint from here on, because the next save may remove it while the run opens.
            candidate = choose_checkpoint(store, args.checkpoint)
            stack.enter_context(held(recorded.directory, candidate))
        evaluator = _open(args, recorded, store, signals)
        signals.install()
        stack.callback(signals.uninstall)
        try:
            if candidate is None:
                return _watch(args, evaluator, signals)
            measured = list(evaluator.evaluate(candidate))
        except CutError:
            print(
                "stopped; a comparison starts again"
                if args.compare
                else "stopped; the results so far are kept, and the next start continues from there",
                file=sys.stderr,
            )
            return int(ExitCode.STOPPED_SAVED)
    if args.compare:
        rows = [one.values for one in measured]
        compared = compare_with_run(recorded.directory, rows, tolerance=args.tolerance)
    if args.json:
        _print_document(candidate, measured, compared if args.compare else None)
    else:
        _print_table(measured)
        for one in compared:
            print(f"{one.name}: {one.verdict}")
    return int(ExitCode.DONE) if all(one.is_equal for one in compared) else DIFFERENT


def _print_document(
    candidate: "Candidate",
    measured: Sequence["Measured"],
    compared: Sequence["Compared"] | None,
) -> None:
    """Print the results as JSON. ``compared``: None if nothing was compared."""
    document = {
        "checkpoint": candidate.name,
        "step": candidate.version.step,
        "results": [_row(one) for one in measured],
    }
    if compared is not None:
        document["comparison"] = [one.__dict__ for one in compared]
    print(dumps_strict(document, indent=1))


def _check_arguments(args: argparse.Namespace) -> None:
    if args.compare and (args.watch or args.weights or not args.tolerance >= 0):
        what = "--watch" if args.watch else f"--tolerance {args.tolerance}"
        why = "one checkpoint is compared, within a difference of at least 0"
        if args.weights:
            what, why = (
                "--weights",
                "the weights are those that the run itself has evaluated",
            )
        raise InputError(
            Problem("--compare", f"cannot be combined with {what}", why, "Leave it out")
        )
    if args.micro_batch_size is not None and args.micro_batch_size < 1:
        what = f"{args.micro_batch_size} is below 1"
        raise InputError(Problem("--micro-batch-size", what, "", "Give a positive number"))


def _execute_in_pod(args: argparse.Namespace) -> int:
    """Evaluate one checkpoint, and write its results for the operator.

    A checkpoint that is damaged or removed is skipped, so that the next checkpoint can be evaluated.
    """
    from evergrad_trainer.evaluation.choice import choose_checkpoint, list_checkpoints
    from evergrad_trainer.evaluation.measurement import CutError, held, mark_evaluated
    from evergrad_trainer.evaluation.setup import read_recorded
    from evergrad_trainer.worker.signals import StopSignals

    step = int(args.checkpoint) if args.checkpoint.isdecimal() else -1
    if args.watch or args.compare or args.sets or step < 0:
        why = "a pod evaluates all sets of the checkpoint of one step"
        raise InputError(
            Problem(
                "--termination-log", "needs --checkpoint STEP alone", why, "Leave it out"
            )
        )
    recorded = read_recorded(args.run)
    store, signals = open_store(args.run / RunFile.CHECKPOINTS), StopSignals()
    rows: list[dict[str, Any]] = []
    passed_over = ""
    # A later checkpoint of the same step needs a separate evaluation.
    of_step = [one for one in list_checkpoints(store) if one.version.step == step]
    with contextlib.ExitStack() as stack:
        signals.install()
        stack.callback(signals.uninstall)
        try:
            candidate = choose_checkpoint(store, args.checkpoint)
            stack.enter_context(held(recorded.directory, candidate))
            evaluator = _open(args, recorded, store, signals)
            for one in evaluator.evaluate(candidate):
                rows.append(one.values)
                print(f"{one.file}", flush=True)
        except CheckpointError as error:
            passed_over = str(error)
            print(f"warning: skipped: {error}", file=sys.stderr, flush=True)
        except CutError:
            print(
                "stopped; the results so far are kept, and the next start continues from there",
                file=sys.stderr,
            )
            return int(ExitCode.STOPPED_SAVED)
        waiting = mark_evaluated(store, recorded.directory, of_step)
    report = encode_evaluated(
        step, [] if passed_over else rows, waiting=waiting, passed_over=passed_over
    )
    with reported(args.termination_log, what="cannot be written"):
        args.termination_log.write_bytes(report)
    return int(ExitCode.DONE)


def _open(
    args: argparse.Namespace,
    recorded: "RecordedRun",
    store: CheckpointStore,
    signals: "StopSignals",
) -> "CheckpointEvaluator":
    """Open the run with the chosen sets, and remove stale partial results of earlier evaluations."""
    from evergrad_trainer.commands.prepare import prepare_with_progress
    from evergrad_trainer.evaluation.choice import list_checkpoints
    from evergrad_trainer.evaluation.measurement import CheckpointEvaluator
    from evergrad_trainer.evaluation.results import remove_stale_cuts
    from evergrad_trainer.evaluation.setup import open_run

    opened = open_run(
        recorded,
        args.sets,
        weights=args.weights,
        prepare_data=lambda one, shared: prepare_with_progress(
            one.run.training,
            base_directory=one.base_directory,
            prepared_directory=shared,
            begun_with=one.prepared.fingerprints,
        ),
    )
    if args.micro_batch_size is not None:
        sets = tuple(one.in_batches_of(args.micro_batch_size) for one in opened.sets)
        opened = dataclasses.replace(opened, sets=sets)
    remove_stale_cuts(args.run, lambda: [one.name for one in list_checkpoints(store)])

    def show_progress(name: str, done: int, total: int) -> None:
        # Show progress only on a terminal, because a log would get a line for each batch.
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\r{name}: {done}/{total} batches", end=end, file=sys.stderr, flush=True)

    return CheckpointEvaluator(
        opened,
        store,
        is_stopping=lambda: signals.is_requested,
        on_progress=show_progress,
        marks=recorded.run.spec.evaluation is not None
        and not (args.sets or args.weights or args.micro_batch_size or args.compare),
        # A stored result does not show whether the files on the volume are still the same.
        measures_again=args.compare,
    )


def _watch(
    args: argparse.Namespace, evaluator: "CheckpointEvaluator", signals: "StopSignals"
) -> int:
    """Evaluate each checkpoint as it is published, oldest first, until the run is complete."""
    from evergrad_trainer.evaluation.follower import watch

    for measured in watch(
        evaluator,
        RunDirectory(args.run),
        wait=lambda: signals.wait(POLL_SECONDS),
        warn=lambda text: print(f"warning: {text}", file=sys.stderr, flush=True),
    ):
        if args.json:
            print(dumps_strict(_row(measured)), flush=True)
        else:
            # Print each result on one line, for a log.
            cells = zip(_TITLES, _cells(measured.values), strict=True)
            shown = [f"{title.lower()}={cell}" for title, cell in cells]
            metrics = measured.values.get("metrics", {})
            shown += [f"{name}={value}" for name, value in metrics.items()]
            print(" ".join(shown), flush=True)
    if signals.is_requested:
        print("stopped while it waited for the next checkpoint", file=sys.stderr)
        return int(ExitCode.STOPPED_SAVED)
    return int(ExitCode.DONE)


def _row(measured: "Measured") -> dict[str, Any]:
    """Return a result as JSON values for programs."""
    return {**measured.values, "file": measured.file, "is_new": measured.is_new}


_TITLES: Final = ("STEP", "SET", "LOSS", "PERPLEXITY", "TOKENS", "TOOK")


def _cells(values: dict[str, Any]) -> tuple[str, ...]:
    loss, perplexity = (
        "–" if values[name] is None else f"{values[name]:.{digits}f}"
        for name, digits in (("loss", 4), ("perplexity", 2))
    )
    return (
        str(values["step"]),
        values["name"],
        loss,
        perplexity,
        count(values["tokens"]),
        duration(values["seconds"]),
    )


def _print_table(measured: Sequence["Measured"]) -> None:
    """Print the results as a table, and the paths of their files."""
    rows = [_TITLES, *(_cells(one.values) for one in measured)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(_TITLES))]
    for row in rows:
        print(
            "  ".join(
                cell.ljust(width) for cell, width in zip(row, widths, strict=True)
            ).rstrip()
        )
    for one in measured:
        for name, value in one.values.get("metrics", {}).items():
            print(f"{one.values['name']}/{name}: {value}")
    for one in measured:
        note = "" if one.is_new else " (measured before)"
        print(f"{one.file}{note}")
