"""``evergrad validate``: checks a manifest and shows all its problems.

Reports the same problems as ``evergrad run`` before the first step, except problems of the data, of files
that exist only on a cluster, and of the machine that trains. For a script, it needs only the script's file
next to the manifest.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TextIO

import yaml

from evergrad_common.contract import ExitCode
from evergrad_manifest.derive import slots_per_step
from evergrad_manifest.errors import (
    ConfigurationError,
    Problem,
    describe_problem,
    raise_if,
)
from evergrad_manifest.files.task_files import task_problems
from evergrad_manifest.identity import config_hash, to_wire
from evergrad_manifest.model.differences import changed_fields, show_value
from evergrad_manifest.nulls import find_dropped_nulls
from evergrad_manifest.profile import (
    NAMESPACE_PROFILE_KEY,
    apply_defaults,
    check_allowed,
    check_profile,
    merge_defaults,
)
from evergrad_manifest.reading.document import parse_document
from evergrad_manifest.reading.loader import (
    LoadedManifest,
    add_manifest_arguments,
    load_from,
    path_label,
    read_document,
)
from evergrad_manifest.reading.validation import parse_run
from evergrad_manifest.script_files import portable_problems

NAME = "validate"
EXAMPLES = """\
  evergrad validate trainingrun.yaml
  evergrad validate trainingrun.yaml --overlay small.yaml --set spec.training.horizon.tokens=1M
  evergrad validate trainingrun.yaml --print-resolved > resolved.yaml
  evergrad validate trainingrun.yaml --profile default.yaml --profile configmap.yaml
  evergrad validate trainingrun.yaml --json | jq '.problems[].path'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_manifest_arguments(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document: valid, problems, resolved",
    )
    parser.add_argument(
        "--print-resolved",
        action="store_true",
        help="print the manifest with all defaults, as YAML",
    )
    parser.add_argument(
        "--profile",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help=(
            "use this profile for values that the file leaves out: a profile, or the ConfigMap of a "
            "namespace, which takes precedence over earlier ones (repeatable)"
        ),
    )


def execute(args: argparse.Namespace) -> int:
    """Validate the manifest. Return 0 if it is valid, or 64 after printing every problem."""
    try:
        given = load_from(args)
        loaded = with_profiles(given, args.profile) if args.profile else given
    except ConfigurationError as error:
        _print_problems(error.problems, as_json=args.json)
        return int(error.exit_code)

    # Check files next to the manifest, which are part of it. Files of a pod or a volume may exist only there.
    spec, base = loaded.run.spec, loaded.base_directory
    missing = (
        [] if spec.script is None else portable_problems(spec.script, base_directory=base)
    )
    missing += (
        [] if spec.training is None else task_problems(spec.training, base_directory=base)
    )
    # Make the checks that `evergrad run` makes before its first step, if they need neither data nor the
    # machine that trains.
    report = _examine(loaded) if spec.training is not None and not missing else None
    if report is not None:
        missing += report.problems
    if missing:
        _print_problems(missing, as_json=args.json)
        return int(ExitCode.USER_ERROR)
    warnings = [*find_dropped_nulls(loaded.raw), *(report.warnings if report else ())]
    for warning in warnings:
        _print(f"warning: {warning}", file=sys.stderr)
    if args.json:
        document = {
            "valid": True,
            "problems": [],
            "configHash": config_hash(loaded.run),
            "resolved": to_wire(loaded.run),
        }
        _print(json.dumps(document, indent=2))
    elif args.print_resolved:
        _print(yaml.safe_dump(to_wire(loaded.run), sort_keys=False, width=130).rstrip())
    else:
        _print(
            f"valid: {loaded.run.metadata.name} ({loaded.path}); {_summarize(loaded, report)}"
        )
        # The resolved run includes the values from profiles. Without profiles, both are the same.
        kept = ("metadata", "spec")
        before, after = (
            {key: one[key] for key in kept if key in one} for one in (given.raw, loaded.raw)
        )
        for path, _, value in changed_fields(before, after, where=""):
            _print(f"  {path.removeprefix('.')}: {show_value(value)}")
    return int(ExitCode.DONE)


def with_profiles(loaded: LoadedManifest, files: Sequence[Path]) -> LoadedManifest:
    """Return the run with the defaults of the profiles in these files; later files take precedence.

    Raises ConfigurationError with every problem of the profiles, or of the run with them.
    """
    defaults: dict[str, Any] = {}
    rdma: list[str] = []
    problems: list[Problem] = []
    for file in files:
        raw, found = _read_profile(file)
        problems += found
        if not found:
            defaults = merge_defaults(defaults, raw.get("defaults") or {})
            rdma += (raw.get("allows") or {}).get("rdma") or ()
    # Report problems of the profiles alone: with half of the defaults, problems of the run would be guesses.
    raise_if(problems, ConfigurationError)
    merged = apply_defaults(loaded.raw, defaults)
    run = parse_run(merged)
    raise_if(check_allowed(merged, rdma), ConfigurationError)
    return replace(loaded, run=run, raw=merged)


def _read_profile(file: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Return the profile in a file, and its problems."""
    document, label = read_document(file, source=str(file)), path_label(file)
    if document.value is None or document.problems:
        return {}, document.problems
    value = document.value

    # The profile of a namespace is stored, and shown by kubectl, as the ConfigMap that contains it.
    is_of_namespace = value.get("kind") == "ConfigMap"
    if is_of_namespace:
        data = value.get("data")
        text = data.get(NAMESPACE_PROFILE_KEY) if isinstance(data, dict) else None
        if not isinstance(text, str):
            what = f"the ConfigMap has no text {NAMESPACE_PROFILE_KEY}"
            return {}, [Problem(label, what, "it is the profile", "Add that key")]
        inner = parse_document(text, label=f"{label}: {NAMESPACE_PROFILE_KEY}")
        if inner.problems:
            return {}, inner.problems
        value = inner.value
    found = check_profile(value, of_namespace=is_of_namespace)
    return value, [
        replace(one, path=f"{label}: {one.path}" if one.path else label) for one in found
    ]


def _print_problems(problems: Sequence[Problem], *, as_json: bool) -> None:
    if as_json:
        listed = [{**describe_problem(one), "message": str(one)} for one in problems]
        _print(json.dumps({"valid": False, "problems": listed}, indent=2))
        return
    for problem in problems:
        _print(f"error: {problem}", file=sys.stderr)


class _Report(Protocol):
    """The trainer's report on a file: ``evergrad_trainer.preflight.checks.FileReport``."""

    problems: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    summary: str


def _examine(loaded: LoadedManifest) -> _Report | None:
    """Return the report of the trainer's packages on the file, or None if they are not installed."""
    for entry in metadata.entry_points(group="evergrad.describe"):
        try:
            examine = entry.load()
        except (AttributeError, ModuleNotFoundError):
            # The packages are not installed, or have another version.
            continue
        report: _Report = examine(loaded.run, loaded.base_directory)
        return report
    return None


def _summarize(loaded: LoadedManifest, report: _Report | None) -> str:
    """Describe the run in a few words, so that a user notices a wrong number before the run starts."""
    run = loaded.run
    if run.spec.script is not None:
        nodes, program = run.spec.nodes, run.script.program
        number = (
            f"{nodes.min}"
            if nodes.max in (None, nodes.min)
            else f"{nodes.min} to {nodes.max}"
        )
        command = shlex.join([program.name, *program.arguments])
        text = f"runs the {program.kind} {command} on {number} node"
        if number != "1":
            text += "s"
        if (workers := run.spec.workers_per_node) is not None:
            text += f" with {workers} worker" + ("s" if workers > 1 else "")
            text += " each" if number != "1" else ""
        return text

    # Describe a typed run in the units of its file. A task that prepares its data itself names no source.
    training = run.training
    slots = slots_per_step(training.batching)
    sources = ", ".join(source.name for source in training.data.sources)
    trained_on = f", trained on {sources}" if sources else ""
    horizon = training.horizon
    if horizon.steps is not None:
        length = f"{horizon.steps} steps"
    elif horizon.tokens is not None:
        length = f"{horizon.tokens} tokens"
    else:
        length = f"{horizon.epochs:g} epochs"
    text = f"{length}, {training.batching.global_batch_size} samples a step in {slots} slots{trained_on}"

    # Add the size of model and training state if the trainer's packages and the model's files are on this
    # machine.
    return f"{text}; {report.summary}" if report is not None and report.summary else text


def _print(text: str, *, file: TextIO | None = None) -> None:
    """Print ``text``. Characters that the terminal's encoding cannot show are escaped and never cause a
    traceback."""
    stream = sys.stdout if file is None else file
    encoding = stream.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)
