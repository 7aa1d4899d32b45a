"""``evergrad prepare``: writes the token files of a run before it trains; also displays the progress when
``evergrad run`` prepares them."""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TextIO

from evergrad_common.contract import PREPARED_FOLDER, PREPARING, ExitCode
from evergrad_common.secret import read_token
from evergrad_common.text import count, duration, plural, short_count, size
from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_manifest.reading.loader import (
    LoadedManifest,
    add_manifest_arguments,
    load_from,
)
from evergrad_manifest.training import RECIPES, Training
from evergrad_trainer.commands.pod import (
    StatusPage,
    add_pod_arguments,
    last_words,
    sigterm_interrupts,
    try_patiently,
)
from evergrad_trainer.data.preparation.documents import HARMLESS, IN_WORDS, KEPT, SkipReason
from evergrad_trainer.data.preparation.progress import OnProgress
from evergrad_trainer.data.prepare import (
    PrepareProgress,
    prepare,
    resolve_prepared_directory,
)
from evergrad_trainer.data.prepared import Prepared, PreparedSource
from evergrad_trainer.data.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from evergrad_trainer.recipes.setup import Opened

NAME = "prepare"
EXAMPLES = """\
  evergrad prepare trainingrun.yaml
  evergrad prepare trainingrun.yaml --workers 4 --prepared-directory runs/.prepared
  evergrad prepare trainingrun.yaml --set spec.training.data.malformed=skip
  evergrad prepare trainingrun.yaml --show-samples 10
  evergrad prepare trainingrun.yaml --json | jq '.sources[].tokens'"""

_SHOW: Final = "--show-samples"
DEFAULT_DIRECTORY: Final = Path("runs") / PREPARED_FOLDER
_SECONDS_BETWEEN_LINES: Final = 5.0
_VERBS: Final = {
    "scan": "reading",
    "tokenize": "tokenising",
    "split": "holding out",
    "wait": "another process prepares",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_manifest_arguments(parser)
    parser.add_argument(
        "--prepared-directory",
        type=Path,
        default=DEFAULT_DIRECTORY,
        metavar="DIRECTORY",
        help="directory of token files, unless data.preparedDirectory is set (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=_positive,
        metavar="N",
        help="number of helper processes (default: one for each core)",
    )
    parser.add_argument(
        _SHOW,
        type=_positive,
        metavar="N",
        help="also print up to N samples of the first step, as text",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON document with the prepared data and their paths",
    )
    add_pod_arguments(parser)
    parser.add_argument(
        "--status-port",
        type=int,
        metavar="PORT",
        help="serve the progress at /status of this port, to clients with the token of --token-file",
    )
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="file with the run's token"
    )


def execute(args: argparse.Namespace) -> int:
    """Prepare all data. Returns exit code 0, or 75 after Ctrl-C or SIGTERM; finished parts are kept.

    In a pod, errors of the host are retried for a while. Raises DataError, ConfigurationError or HostError.
    """
    with ExitStack() as stack:
        # Retry only in a pod, whose host may recover. A user at a terminal can correct the error directly.
        is_in_pod = args.termination_log is not None
        if is_in_pod:
            stack.enter_context(last_words(args.termination_log))
        work = functools.partial(_execute, args, _open_page(args, stack))

        # Finished chunks are kept, so an interruption loses at most one chunk of each helper process.
        try:
            with sigterm_interrupts():
                return try_patiently(work) if is_in_pod else work()
        except KeyboardInterrupt:
            print(
                "interrupted; finished chunks are kept, and the next prepare continues from there",
                file=sys.stderr,
            )
            return int(ExitCode.STOPPED_SAVED)


def _open_page(args: argparse.Namespace, stack: ExitStack) -> OnProgress | None:
    """Serve the status page of the preparation, if ``--status-port`` is given.

    Raises ConfigurationError if the arguments of the page are invalid.
    """
    if args.status_port is None:
        return None
    if args.token_file is None:
        why, remedy = "progress is shown to the run alone", "Name the file with its token"
        raise ConfigurationError(Problem("--token-file", "is missing", why, remedy))
    # An error of the page must not end the preparation.
    try:
        token = read_token(args.token_file)
    except (OSError, ValueError) as error:
        text = f"progress is not shown: {args.token_file} cannot be read: {error}"
        print(f"warning: {text}", file=sys.stderr, flush=True)
        return None
    page = StatusPage(token, port=args.status_port)
    stack.callback(page.close)
    page.show(describe_progress(None))
    return lambda progress: page.show(describe_progress(progress))


def describe_progress(progress: PrepareProgress | None) -> dict[str, Any]:
    """Describe the progress of the preparation for the operator. ``progress``: None before it has begun."""
    shown: dict[str, Any] = {}
    if progress is not None:
        shown = {
            "work": progress.phase,
            "source": progress.source,
            "bytesDone": progress.bytes_done,
            "bytesTotal": progress.bytes_total,
            "documents": progress.documents,
            "tokens": progress.tokens,
        }
    return {"phase": PREPARING, "preparation": shown}


def _execute(args: argparse.Namespace, on_progress: OnProgress | None) -> int:
    loaded = load_from(args)
    if loaded.run.spec.script is not None:
        name = loaded.run.metadata.name
        text = (
            f"{name} is a script, which reads its data itself: there is nothing to prepare"
        )
        # Print only the document to stdout, so that a program can parse it.
        if args.json:
            print(json.dumps({"sources": [], "evaluation": []}, indent=2), flush=True)
        print(text, file=sys.stderr if args.json else sys.stdout, flush=True)
        return int(ExitCode.DONE)

    training = loaded.run.training
    base_directory = loaded.base_directory
    if args.base_directory is not None:
        base_directory = args.base_directory.absolute()
    begun = time.monotonic()
    prepared = prepare_with_progress(
        training,
        base_directory=base_directory,
        prepared_directory=args.prepared_directory,
        workers=args.workers,
        on_progress=on_progress,
    )

    # A task may prepare data other than token files. Open it now, so that the run does not have to do it.
    directory = resolve_prepared_directory(
        training, base_directory=base_directory, default=args.prepared_directory
    )
    samples: list[dict[str, Any]] = []
    if args.show_samples or training.recipe not in RECIPES or not training.data.sources:
        from evergrad_trainer.recipes.setup import open_recipe

        opened = open_recipe(
            training, prepared, base_directory, prepared_directory=directory
        )
        if args.show_samples:
            samples = _show_samples(
                loaded, opened, base_directory, number=args.show_samples
            )
    if args.json:
        _print_document(prepared, directory, samples)
    else:
        for line in describe_prepared(prepared):
            print(line)
        print(f"prepared in {duration(time.monotonic() - begun)}, in {directory}")
        for one in samples:
            # Print JSON, so that line ends and unusual characters of a text are visible.
            texts = (json.dumps(text, ensure_ascii=False) for text in one["texts"])
            print("", one["sample"], *texts, sep="\n")
    return int(ExitCode.DONE)


def _print_document(
    prepared: Prepared, directory: Path, samples: list[dict[str, Any]]
) -> None:
    document = {
        "preparedDirectory": str(directory),
        "tokenizer": prepared.tokenizer_identity,
        "vocabSize": prepared.vocab_size,
        "sources": [_source_summary(source) for source in prepared.sources],
        "evaluation": [_source_summary(source) for source in prepared.evaluation],
        **({"firstStep": samples} if samples else {}),
    }
    print(json.dumps(document, indent=2))


def _show_samples(
    loaded: LoadedManifest, opened: "Opened", base_directory: Path, *, number: int
) -> list[dict[str, Any]]:
    """Return samples of the first step that a fresh run trains. If the run continues the data of another run,
    this is the step after that run's step.

    Raises the errors of a start that could not train on these samples.
    """
    from evergrad_manifest.identity import config_hash, hashed_recipe
    from evergrad_trainer.checkpoint.manifest import Identity
    from evergrad_trainer.data.sample_preview import show_samples
    from evergrad_trainer.worker.resume_position import (
        check_content,
        find_first_step,
        find_other,
    )

    run, training = loaded.run, loaded.run.training
    if (other := find_other(run, base_directory)) is not None:
        opened = opened.starting_at(other.start, training)
        if opened.prepared is not None:
            for doubt in check_content(other, opened.data.train.start, opened.prepared):
                print(f"warning: {doubt}", file=sys.stderr)
    stream = opened.data.train
    own = Identity(
        run.metadata.name,
        config_hash(run),
        opened.data.fingerprint,
        recipe=hashed_recipe(run),
    )
    step = find_first_step(run, base_directory, own)
    tokens = load_tokenizer(training.tokenizer, base_directory)
    return show_samples(stream, tokens, step=step, count=number, asked_by=_SHOW)


def prepare_with_progress(
    training: Training,
    *,
    base_directory: Path,
    prepared_directory: Path,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
    begun_with: Collection[str] = (),
) -> Prepared:
    """Run ``prepare`` with a bar if stderr is a terminal, or else with a line every few seconds.

    ``on_progress`` is called, too. If there is nothing to do, prints only the lines that were skipped as
    malformed and the rows that were left out or cut, which are reported at every start.
    """
    shown = sys.stderr
    chosen: _Display = _Bar(shown) if shown.isatty() else _Lines(shown)
    with closing(chosen) as display:

        def show(progress: PrepareProgress) -> None:
            display.show(progress)
            if on_progress is not None:
                on_progress(progress)

        prepared = prepare(
            training,
            base_directory=base_directory,
            prepared_directory=prepared_directory,
            workers=workers,
            on_progress=show,
            begun_with=begun_with,
        )
    # Report these at every start, because the skipped lines are missing from the run.
    for source in (*prepared.sources, *prepared.evaluation):
        _warn_of_skipped(source, shown)
    return prepared


def _warn_of_skipped(source: PreparedSource, shown: TextIO) -> None:
    """Print the lines of a source that were skipped as malformed, and the rows that were left out or cut."""
    if source.malformed:
        skipped = (
            f"{source.unit} was skipped"
            if source.malformed == 1
            else f"{source.unit}s were skipped"
        )
        # Empty lines are skipped too, but contain no data.
        harmful = {
            reason: number
            for reason, number in source.skipped.items()
            if reason not in HARMLESS
        }
        what = f"{count(source.malformed)} malformed {skipped} ({_reasons(harmful)})"
        print(f"warning: {source.path}: {what}", file=shown)
    lost: dict[str, int] = {
        reason: source.skipped[reason]
        for reason in (SkipReason.LEFT_OUT, *sorted(KEPT))
        if source.skipped.get(reason)
    }
    if lost:
        print(f"warning: {source.path}: rows {_reasons(lost)}", file=shown)


def describe_prepared(prepared: Prepared) -> list[str]:
    """Describe each source in one line."""
    sources = (*prepared.sources, *prepared.evaluation)
    width = max((len(source.name) for source in sources), default=0)
    lines = []
    for source in sources:
        # Token files have no documents, so leave the counts out instead of showing 0.
        parts = []
        if source.files:
            parts.append(plural(len(source.files), "file"))
        if source.documents is not None:
            parts.append(plural(source.documents, "document"))
        parts.append(f"{short_count(source.train.tokens)} tokens")
        if source.held_out is not None:
            held_out = f"{short_count(source.held_out.tokens)} tokens held out"
            if source.held_out_documents is not None:
                held_out += f" in {plural(source.held_out_documents, 'document')}"
            parts.append(held_out)

        # Data that were left out or changed.
        passed = {reason: n for reason, n in source.skipped.items() if reason not in KEPT}
        if passed:
            parts.append(f"{source.unit}s skipped: {_reasons(passed)}")
        cut = {reason: n for reason, n in source.skipped.items() if reason in KEPT}
        if cut:
            parts.append(f"{source.unit}s cut: {_reasons(cut)}")
        if source.repaired:
            documents = plural(source.repaired, "document")
            parts.append(f"half surrogate pairs replaced in {documents}")
        line = f"{source.name:<{width}}  {', '.join(parts)}"
        if source.reused and source.documents is not None:
            line += " (prepared before)"
        lines.append(line)
    return lines


def _reasons(skipped: Mapping[str, int]) -> str:
    return ", ".join(
        f"{count(number)} {IN_WORDS[SkipReason(reason)]}"
        for reason, number in sorted(skipped.items())
    )


def _source_summary(source: PreparedSource) -> dict[str, Any]:
    return {
        "name": source.name,
        "path": str(source.path),
        "fingerprint": source.fingerprint,
        "tokens": source.train.tokens,
        "heldOutTokens": source.held_out.tokens if source.held_out else 0,
        "documents": source.documents,
        "heldOutDocuments": source.held_out_documents,
        "skipped": dict(source.skipped),
        "repaired": source.repaired,
        "reused": source.reused,
        "files": [file.name for file in source.files],
    }


class _Display(Protocol):
    def show(self, progress: PrepareProgress) -> None: ...

    def close(self) -> None: ...


class _Lines:
    """Display that prints a line every few seconds."""

    def __init__(
        self,
        stream: TextIO,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._printed = clock()

    def show(self, progress: PrepareProgress) -> None:
        now = self._clock()
        # A line for every chunk would make the log unreadable.
        if now - self._printed < _SECONDS_BETWEEN_LINES:
            return
        self._printed = now
        total = progress.bytes_total
        share = progress.bytes_done / total if total else 1.0
        line = f"{_VERBS[progress.phase]} {progress.source}: {share:.0%} of {size(total)}"
        if progress.tokens:
            line += f", {short_count(progress.tokens)} tokens"
        print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Does nothing, because lines need no cleanup."""


class _Bar:
    """Display with a bar that appears if there is work to do and disappears afterwards."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
        )
        console = Console(file=stream, highlight=False)
        self._progress = Progress(
            *columns,
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=None)
        self._phase = ""

    def show(self, progress: PrepareProgress) -> None:
        # Known files need no scan, and a bar for no work would only flicker.
        if progress.phase == "scan" and not progress.bytes_done:
            return
        if progress.phase in ("scan", "tokenize") and progress.phase != self._phase:
            # Reset the bar, because scanning and tokenizing have different speeds.
            self._phase = progress.phase
            self._progress.reset(self._task, total=progress.bytes_total)
        description = f"{_VERBS[progress.phase]} {progress.source}"
        self._progress.update(
            self._task, description=description, completed=progress.bytes_done
        )
        self._progress.start()

    def close(self) -> None:
        self._progress.stop()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number
