"""``evergrad evaluate``: measure checkpoints of a run on its evaluation sets, beside the run or after it."""

import argparse
from pathlib import Path

from evergrad_coordinator.contract import ExitCode, RunFile
from evergrad_trainer.checkpoint.store import open_store

NAME = "evaluate"
EXAMPLES = """\
  evergrad evaluate runs/docs-lm
  evergrad evaluate runs/docs-lm --checkpoint best --set heldOut --set wiki
  evergrad evaluate runs/docs-lm --checkpoint 1200 --json | jq '.results[].loss'
  evergrad evaluate runs/docs-lm --watch      # each new checkpoint, until the run is complete"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the run, the checkpoint and the sets."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--json", action="store_true")


def execute(args: argparse.Namespace) -> int:
    from evergrad_trainer.cli.prepare import prepare_with_progress
    from evergrad_trainer.evaluation.measuring import load_checkpoint, measure
    from evergrad_trainer.evaluation.opening import open_run
    from evergrad_trainer.run_directory import dumps_strict

    opened = open_run(
        args.run,
        prepare_data=lambda run, base, shared: prepare_with_progress(
            run.training, base_directory=base, prepared_directory=shared
        ),
    )
    store = open_store(args.run / RunFile.CHECKPOINTS)
    candidate = store.catalog.scan()[0]
    restored = load_checkpoint(opened, store, candidate)
    rows = []
    for one in opened.session.data.evaluation:
        result = measure(
            opened,
            one,
            opened.evaluator.open_tally(one, {}),
            is_stopping=lambda: False,
            on_progress=lambda done, total: None,
        )
        rows.append(
            {
                "name": one.name,
                "step": restored.step,
                "loss": result.loss,
                "tokens": result.weight,
            }
        )
    print(dumps_strict({"results": rows}))
    return int(ExitCode.DONE)
