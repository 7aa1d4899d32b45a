"""The arguments every command that reads a manifest shares: the file, ``--overlay`` and ``--set``."""

import argparse
from pathlib import Path

from evergrad_manifest.reading.loader import LoadedManifest, load_manifest


def add_manifest_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``manifest``, ``--overlay FILE`` and ``--set PATH=VALUE`` to ``parser``."""
    parser.add_argument(
        "manifest", type=Path, metavar="TRAININGRUN.YAML", help="the TrainingRun to read"
    )
    parser.add_argument(
        "--overlay",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help=(
            "lay this YAML over the manifest: mappings are merged, lists are replaced, null removes "
            "a key (repeatable)"
        ),
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        dest="overrides",
        help=(
            "change one value, after the overlays, e.g. spec.training.optimizer.learningRate=3e-4 "
            "(repeatable)"
        ),
    )


def load_from(args: argparse.Namespace) -> LoadedManifest:
    """The manifest that these arguments name. Raises ConfigurationError with every problem."""
    return load_manifest(args.manifest, overlays=args.overlay, overrides=args.overrides)
