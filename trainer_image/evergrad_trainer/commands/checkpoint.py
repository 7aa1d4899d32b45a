"""``evergrad checkpoint list | verify | export``: reads a run's checkpoints without changing them."""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evergrad_common.contract import ExitCode, RunFile
from evergrad_common.text import size
from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import CheckpointError, RunDirectoryError
from evergrad_trainer.checkpoint.layout import BEST
from evergrad_trainer.checkpoint.manifest import (
    Candidate,
    InvalidCheckpointError,
    UnknownFormatError,
)
from evergrad_trainer.checkpoint.retention import choose_best
from evergrad_trainer.checkpoint.store import CheckpointStore, open_store, suggest_steps

NAME = "checkpoint"
EXAMPLES = """\
  evergrad checkpoint list runs/docs-lm
  evergrad checkpoint verify runs/docs-lm --step 1200
  evergrad checkpoint export runs/docs-lm --output docs-lm-hf --dtype bfloat16
  evergrad checkpoint export runs/docs-lora --output docs-lora --adapter"""


@dataclass(frozen=True)
class CheckpointRow:
    """One published checkpoint in the output of ``list``.

    ``reason``: why the checkpoint cannot be read, if it has no facts.
    """

    checkpoint: str
    step: int
    generation: int
    world_size: int | None
    bytes: int | None
    finished: float | None
    is_best: bool
    is_latest: bool
    is_permanent: bool
    tokens: int | None
    reason: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the three actions and their arguments."""
    actions = parser.add_subparsers(
        title="actions",
        metavar="ACTION",
        required=True,
    )
    _add_action(actions, "list", _list, "list the checkpoints, newest first")
    verify = _add_action(
        actions,
        "verify",
        _verify,
        "check sizes and checksums; exit with 64 if a checkpoint is damaged",
    )
    verify.add_argument(
        "--step", type=int, help="check only the checkpoints of this step (default: all)"
    )
    export = _add_action(
        actions, "export", _export, "write a checkpoint as a transformers directory"
    )
    export.add_argument(
        "--step",
        type=int,
        help="step of the checkpoint (default: the newest valid checkpoint)",
    )
    export.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIRECTORY",
        help="output directory, which must not exist",
    )
    export.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type of the exported weights (default: as trained)",
    )
    export.add_argument(
        "--weights",
        choices=("trained", "average"),
        default="trained",
        help="trained weights, or the average of spec.training.ema (default: %(default)s)",
    )
    export.add_argument(
        "--adapter",
        action="store_true",
        help="export only the adapters, in the format of peft (default: merge them into the model)",
    )


def execute(args: argparse.Namespace) -> int:
    """Run the chosen action."""
    action: Callable[[argparse.Namespace], int] = args.action
    return action(args)


def _add_action(
    actions: Any,
    name: str,
    action: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
    parser.add_argument("run_directory", type=Path, metavar="RUN_DIRECTORY")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.set_defaults(action=action)
    return parser


def _list(args: argparse.Namespace) -> int:
    catalog = _open_store(args.run_directory).catalog
    found = catalog.scan()
    # Make the same choice as the trainer, so that the marked checkpoint is the one that the trainer keeps.
    best = choose_best(found, catalog.read_pointer(BEST))
    # A resume would use the newest readable checkpoint.
    latest = next((candidate.name for candidate in found if candidate.manifest), None)
    rows = [_build_row(candidate, best=best, latest=latest) for candidate in found]
    # Show checkpoints that were set aside too, because they still use disk space.
    set_aside = catalog.set_aside()
    if args.json:
        document = {"checkpoints": [asdict(row) for row in rows], "quarantine": set_aside}
        print(json.dumps(document, indent=1))
        return ExitCode.DONE
    _print_rows(rows)
    for name in set_aside:
        print(f"set aside as damaged: {name}")
    return ExitCode.DONE


def _build_row(
    candidate: Candidate, *, best: str | None, latest: str | None
) -> CheckpointRow:
    manifest = candidate.manifest
    return CheckpointRow(
        checkpoint=candidate.name,
        step=candidate.version.step,
        generation=candidate.version.generation,
        world_size=manifest.world_size if manifest else None,
        bytes=manifest.bytes if manifest else None,
        finished=manifest.finished if manifest else None,
        is_best=candidate.name == best,
        is_latest=candidate.name == latest,
        is_permanent=manifest is not None and manifest.is_permanent,
        tokens=manifest.extra.get("tokens") if manifest else None,
        reason=candidate.reason,
    )


def _print_rows(rows: Sequence[CheckpointRow]) -> None:
    if not rows:
        print("no checkpoints")
        return
    columns = f"{'STEP':>9} {'GENERATION':>10} {'WORLD':>5} {'SIZE':>10}  {'FINISHED':<20}"
    print(f"{'CHECKPOINT':<20} {columns} MARKS")
    for row in rows:
        # Without its manifest, only the name and the reason are known.
        if row.bytes is None or row.finished is None:
            print(f"{row.checkpoint:<20} {row.step:>9} unreadable: {row.reason}")
            continue
        names = (
            ("latest", row.is_latest),
            ("best", row.is_best),
            ("permanent", row.is_permanent),
        )
        marks = " ".join(name for name, is_marked in names if is_marked)
        finished = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(row.finished))
        facts = (
            f"{row.step:>9} {row.generation:>10} {row.world_size:>5} {size(row.bytes):>10}"
        )
        print(f"{row.checkpoint:<20} {facts}  {finished:<20} {marks}".rstrip())


def _verify(args: argparse.Namespace) -> int:
    store = _open_store(args.run_directory)
    found = [one for one in store.catalog.scan() if args.step in (None, one.version.step)]
    reasons = dict.fromkeys((candidate.name for candidate in found), "")
    for name in reasons:
        # Check each checkpoint separately, so that an unreadable one does not hide problems of the others.
        try:
            with store.catalog.hold(name):
                store.reader.validate(name, checksums=True)
        except (InvalidCheckpointError, UnknownFormatError, OSError) as error:
            reasons[name] = str(error)
    if any(reasons.values()):
        # A training run may have removed listed checkpoints. They are not damaged.
        there = {candidate.name for candidate in store.catalog.scan()}
        there.update(store.catalog.set_aside())
        reasons = {name: why for name, why in reasons.items() if not why or name in there}
    if args.json:
        results = [
            {"checkpoint": name, "valid": not reason, "reason": reason}
            for name, reason in reasons.items()
        ]
        print(json.dumps({"checkpoints": results}, indent=1))
    else:
        for name, reason in reasons.items():
            print(f"{name}: {reason or 'valid'}")
    # Raise after the output, so that a program always receives the document.
    if not reasons:
        which = "" if args.step is None else f" of step {args.step}"
        what = f"there is no checkpoint{which}"
        why = "the run has removed its checkpoint in the meantime" if found else ""
        remedy = suggest_steps(store)
        raise CheckpointError(Problem(str(args.run_directory), what, why, remedy))
    return ExitCode.USER_ERROR if any(reasons.values()) else ExitCode.DONE


def _export(args: argparse.Namespace) -> int:
    from evergrad_trainer.export import export_checkpoint

    result = export_checkpoint(
        args.run_directory,
        step=args.step,
        output=args.output,
        dtype=args.dtype,
        weights=args.weights,
        is_adapter=args.adapter,
    )
    # Convert paths to text, so that both outputs show the same values.
    facts = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(result).items()
    }
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        print(f"exported to {args.output}")
        for name, value in facts.items():
            print(f"  {name}: {value}")
    return ExitCode.DONE


def _open_store(run_directory: Path) -> CheckpointStore:
    directory = run_directory / RunFile.CHECKPOINTS
    if not directory.is_dir():
        raise RunDirectoryError(
            Problem(
                str(run_directory),
                "is not a run directory",
                f"it has no {RunFile.CHECKPOINTS}/",
                "Give a run's directory",
            )
        )
    return open_store(directory)
