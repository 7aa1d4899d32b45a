"""Loads a manifest from disk as a validated TrainingRun: file, overlays, ``--set``, validation, and every
problem with its line. Also defines the arguments of the commands that read a manifest."""

import argparse
import errno
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.raw import value_at
from evergrad_manifest.reading.document import Document, parse_document
from evergrad_manifest.reading.overrides import (
    Override,
    apply_overlay,
    apply_override,
    parse_override,
)
from evergrad_manifest.reading.problems import at_most
from evergrad_manifest.reading.validation import check_run
from evergrad_manifest.values.numbers import show, with_whole_numbers

MAX_BYTES: Final = 2**20
"""Most bytes of one file, equal to the limit of a ConfigMap, from which the nodes of a run read it."""
_REASONS: Final = {
    errno.ENOENT: ("does not exist", "Check the path"),
    errno.EACCES: (
        "cannot be read; permission is denied",
        "Change its permissions, or run as a user who may read it",
    ),
    errno.EISDIR: ("is a directory", "Name the file in it"),
    errno.ENOTDIR: ("does not exist; a part of the path is a file", "Check the path"),
    errno.ELOOP: ("cannot be read; its symbolic links form a loop", "Check the path"),
    errno.ENAMETOOLONG: ("cannot be read; the path is too long", "Check the path"),
}


@dataclass(frozen=True)
class LoadedManifest:
    """A validated run with its origin. ``raw`` is the merged manifest before defaults, camelCase."""

    run: TrainingRun
    path: Path
    base_directory: Path
    """Absolute path of the directory of the manifest, as it was named. Relative paths of the run, even in
    overlays, are relative to it."""
    raw: dict[str, Any]


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
            "apply this YAML to the manifest: mappings are merged, lists are replaced, null removes "
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
            "change one value after the overlays, such as spec.training.optimizer.learningRate=3e-4 "
            "(repeatable)"
        ),
    )


def load_from(args: argparse.Namespace) -> LoadedManifest:
    """Return the manifest that these arguments name. Raises ConfigurationError with every problem."""
    return load_manifest(args.manifest, overlays=args.overlay, overrides=args.overrides)


def load_manifest(
    path: Path | str, *, overlays: Sequence[Path | str] = (), overrides: Sequence[str] = ()
) -> LoadedManifest:
    """Read ``path``, merge ``overlays`` over it in their order, apply ``overrides`` (``path=value``), and
    validate.

    Raises ConfigurationError with every problem found. Reads only these files.
    """
    # Check everything that could be read, even after problems of single lines, so that all problems are shown
    # together.
    layered = _merge_all(
        Path(path), overlays=[Path(overlay) for overlay in overlays], overrides=overrides
    )
    run, found = check_run(layered.value)
    places = {format_path(keys): (keys, place) for keys, place in layered.places.items()}
    news = []
    for problem in found:
        # A value that could not be read is now null. A problem of this value, or of a value in it, would be a
        # second problem of the same line.
        where = problem.path
        ends = [index for index, character in enumerate(where) if character in ".["]
        if where in layered.lost or any(where[:end] in layered.lost for end in ends):
            continue
        keys, place = places.get(where, ((), None))
        if place is not None:
            problem = _as_written(problem, value_at(layered.value, keys), place.written)
            problem = replace(problem, what=f"{problem.what} ({place})")
        news.append(problem)

    # Only the directory of the manifest decides relative paths, even if an overlay is in another folder.
    if run is None or layered.problems or news:
        raise ConfigurationError(*at_most([*layered.problems, *news]))
    base_directory = Path(path).absolute().parent
    return LoadedManifest(
        run=run, path=Path(path), base_directory=base_directory, raw=layered.value
    )


def _as_written(problem: Problem, value: Any, written: str | None) -> Problem:
    """Return ``problem`` with the text of the file instead of ``value``: ``1e3`` and ``no`` instead of 1000.0
    and false."""
    if written is None or isinstance(value, str):
        return problem
    what, remedy = problem.what, problem.remedy
    # A number in a structure of Kubernetes has the form in which an API server stores it.
    for shown in (show(value), show(with_whole_numbers(value))):
        if what.startswith(f"{shown} "):
            what = written + what.removeprefix(shown)
        remedy = remedy.replace(f'"{shown}"', f'"{written}"')
    return replace(problem, what=what, remedy=remedy)


def _merge_all(
    path: Path, *, overlays: Sequence[Path], overrides: Sequence[str]
) -> Document:
    """Return the merged manifest. Raises ConfigurationError if a file or an argument cannot be used at
    all."""
    documents = [
        read_document(path),
        *(read_document(overlay, source=str(overlay)) for overlay in overlays),
    ]
    parsed = [parse_override(text) for text in overrides]

    # Overlays cannot be merged over an invalid file. Report all problems that are known by now.
    fatal = [
        problem
        for document in documents
        if document.value is None
        for problem in document.problems
    ]
    fatal += [item for item in parsed if isinstance(item, Problem)]
    if fatal:
        others = [
            problem
            for document in documents
            if document.value is not None
            for problem in document.problems
        ]
        raise ConfigurationError(*at_most([*fatal, *others]))

    # Apply overlays in their order and --set last, whatever their order on the command line: --set is more
    # specific.
    layered, *over = documents
    for document in over:
        layered = apply_overlay(layered, document)
    for item in parsed:
        if isinstance(item, Override):
            layered = apply_override(layered, item)
    return layered


def read_document(path: Path, *, source: str = "") -> Document:
    """Return the mapping in ``path``. If there is no mapping, its value is None, and there is a problem."""
    # Each step can fail: bytes, text, YAML, mapping.
    label = path_label(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        code = error.errno if isinstance(error, OSError) else None
        what, remedy = _REASONS.get(
            code or 0, (f"cannot be read; {error}", "Check the path and the volume")
        )
        return Document(problems=[Problem(label, what, "", remedy)])

    # Request one byte more than allowed, so that a device or an endless pipe is never read completely.
    if len(data) > MAX_BYTES:
        why = f"the largest manifest read is {MAX_BYTES} bytes (1 MiB)"
        remedy = "Check the path; a manifest is a page or two of YAML"
        return Document(problems=[Problem(label, "is too large", why, remedy)])

    # Editors on Windows begin a file with a byte order mark, which is not part of its text.
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        why = f"byte {error.start + 1}, in line {line}, is {data[error.start]:#04x}"
        return Document(
            problems=[
                Problem(f"{label}:{line}", "is not UTF-8 text", why, "Save it as UTF-8")
            ]
        )
    document = parse_document(text, label=label, source=source)
    if document.value is not None and not isinstance(document.value, dict):
        why = "its top level must be keys such as apiVersion, kind, metadata, spec"
        shown = show(document.value)
        held = shown if isinstance(document.value, list) else f"only the value {shown}"
        problem = Problem(
            label, f"contains {held} and not a mapping", why, "Write `key: value` lines"
        )
        return Document(problems=[problem])
    return document


def path_label(path: Path) -> str:
    """Return the name of a file in messages: its path, if the path can be printed and is short."""
    name = str(path)
    return name if name.isprintable() and len(name) <= 500 else show(name)
