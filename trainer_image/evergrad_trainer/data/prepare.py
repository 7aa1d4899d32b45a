"""Prepares data: converts source files to token files.

Each fingerprint is prepared only one time. The work runs in parallel, resumes after an interruption, and is
published by one rename.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from evergrad_manifest.errors import Problem, raise_if
from evergrad_manifest.training import TEXT_TYPES, Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.base.machine import usable_cores
from evergrad_trainer.data.preparation.disk_errors import disk_errors
from evergrad_trainer.data.preparation.files import (
    SCANS,
    SourceEntry,
    evaluation_sources,
    find_files,
    relative_name,
    training_sources,
)
from evergrad_trainer.data.preparation.held_out import cut_tokens
from evergrad_trainer.data.preparation.pool import Pool, build_pool
from evergrad_trainer.data.preparation.progress import OnProgress, PrepareProgress, Reporter
from evergrad_trainer.data.preparation.publish import (
    Recipe,
    SourcePreparation,
    publish,
)
from evergrad_trainer.data.preparation.row_format import (
    find_changed_texts,
    identify_texts,
    row_format,
)
from evergrad_trainer.data.preparation.scan_cache import scan_cached
from evergrad_trainer.data.preparation.sources import SMALLEST_CHUNK
from evergrad_trainer.data.prepared import (
    Prepared,
    PreparedFile,
    PreparedSource,
    PublishedSource,
    open_published,
)
from evergrad_trainer.data.tokenizers import load_tokenizer

__all__ = [
    "PrepareProgress",
    "check_prepared",
    "check_published",
    "check_unchanged",
    "prepare",
    "resolve_prepared_directory",
]

_Named = TypeVar("_Named", SourceEntry, PreparedSource)
_MOST_NAMES: Final = 5
"""Maximum number of files that a message lists by name."""


def resolve_prepared_directory(
    training: Training, *, base_directory: Path, default: Path
) -> Path:
    """Return ``data.preparedDirectory``, relative to the manifest's directory; ``default`` if it is unset."""
    named = training.data.prepared_directory
    return base_directory / named if named is not None else default


def prepare(
    training: Training,
    *,
    base_directory: Path,
    prepared_directory: Path,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
    begun_with: Collection[str] = (),
) -> Prepared:
    """Prepare all sources for reading. Sources that are already published are only checked. Idempotent.

    Relative paths start at ``base_directory``. ``prepared_directory`` is used if the manifest names no
    directory. ``workers``: number of helper processes, by default one per core. ``begun_with``: fingerprints
    of the data that the run started with or continues with. Raises DataError if files, lines or the tokenizer
    cannot be used.
    """
    root = resolve_prepared_directory(
        training, base_directory=base_directory, default=prepared_directory
    )
    recipe = _build_recipe(training, base_directory)
    report = Reporter(on_progress)
    preparations = _plan_all(
        training, base_directory, root, recipe=recipe, begun_with=begun_with, report=report
    )
    with disk_errors(root):
        prepared = _prepare_all(preparations, report, workers=workers or usable_cores())
    number = len(training.data.sources)
    return Prepared(
        sources=tuple(prepared[:number]),
        evaluation=tuple(prepared[number:]),
        tokenizer_identity=recipe.tokenizer.identity,
        vocab_size=recipe.tokenizer.vocab_size,
        end_of_document=recipe.tokenizer.end_of_document,
        row_texts=identify_texts(training, base_directory),
    )


def check_published(
    training: Training,
    *,
    base_directory: Path,
    prepared_directory: Path,
    begun_with: Collection[str] = (),
) -> None:
    """Raise DataError, with each source that ``prepare`` would have to tokenise, without preparing it.

    The arguments are the same as in ``prepare``.
    """
    root = resolve_prepared_directory(
        training, base_directory=base_directory, default=prepared_directory
    )
    preparations = _plan_all(
        training,
        base_directory,
        root,
        recipe=_build_recipe(training, base_directory),
        begun_with=begun_with,
        report=Reporter(None),
    )
    raise_if(_find_unprepared(preparations), DataError)


def _plan_all(
    training: Training,
    base_directory: Path,
    root: Path,
    *,
    recipe: Recipe,
    begun_with: Collection[str],
    report: Reporter,
) -> list[SourcePreparation]:
    """Plan the preparation of the training sources, followed by the evaluation sources."""
    sources = training_sources(training, base_directory)
    entries = [*sources, *evaluation_sources(training, base_directory)]
    files = _find_all(entries, root)
    with disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        # Scan all sources first: the contents determine which sources to prepare, and their size in bytes.
        report.begin("scan", sum(path.stat().st_size for paths in files for path in paths))
        contents = []
        for source, paths in zip(entries, files, strict=True):
            report.show(source.name)
            found = scan_cached(source, paths, root / SCANS, on_bytes=report.advance)
            contents.append(found)

    # Hold out no documents of a source that is used only for evaluation.
    whole = replace(recipe, held_out=None)
    recipes = [recipe] * len(sources) + [whole] * (len(entries) - len(sources))
    return [
        SourcePreparation.plan(source, content, one, root, begun_with=begun_with)
        for source, content, one in zip(entries, contents, recipes, strict=True)
    ]


def _build_recipe(training: Training, base_directory: Path) -> Recipe:
    """Collect the settings that determine how the texts of ``data.sources`` are prepared."""
    return Recipe(
        load_tokenizer(training.tokenizer, base_directory),
        training.data.malformed,
        training.data.held_out,
        training.reproducibility.seed_of_data,
        row_format(training, base_directory),
    )


def _find_all(
    entries: Sequence[SourceEntry], prepared_directory: Path
) -> list[tuple[Path, ...]]:
    """Find the files of each source. Raises DataError with all problems in the paths of all sources."""
    # Check the paths of all files before reading the first file.
    found = [
        find_files(source, prepared_directory=prepared_directory) for source in entries
    ]
    raise_if([problem for _, problems in found for problem in problems], DataError)
    return [paths for paths, _ in found]


def check_unchanged(
    recorded: Prepared,
    training: Training,
    *,
    base_directory: Path,
    prepared_directory: Path,
) -> None:
    """Raise DataError if the data of a resumed run changed since ``recorded`` was prepared.

    The error lists each source whose content changed or would give other tokens, and each changed text that
    rows use from the tokenizer's directory. Call this before ``prepare``, which would prepare the new
    content. Only files whose size or times changed are read.
    """
    root = resolve_prepared_directory(
        training, base_directory=base_directory, default=prepared_directory
    )
    sources = training_sources(training, base_directory)
    pairs = (
        *zip(sources, recorded.sources, strict=False),
        *_pair_by_name(evaluation_sources(training, base_directory), recorded.evaluation),
    )
    files = _find_all([source for source, _ in pairs], root)

    # Compare contents, not paths or times: a file that was copied to another path is the same data.
    recipe = _build_recipe(training, base_directory)
    problems = find_changed_texts(recorded.row_texts, training, base_directory)
    contents = []
    for (source, before), paths in zip(pairs, files, strict=True):
        with disk_errors(source.path):
            now = scan_cached(source, paths, root / SCANS, on_bytes=lambda _: None)
        contents.append(now)
        if now.content_hash != before.content_hash:
            new = {
                relative_name(path, source): scan.content_hash for path, scan in now.files
            }
            is_expanded = source.is_expanded(paths)
            problems.append(
                _change_of(
                    source.path,
                    before,
                    now.content_hash,
                    new if is_expanded else {},
                    is_evaluated=before in recorded.evaluation,
                )
            )
    raise_if(problems, DataError)

    if recipe.tokenizer.identity != recorded.tokenizer_identity:
        # A changed tokenizer is reported with a separate message.
        return
    whole, known = replace(recipe, held_out=None), recorded.fingerprints
    trained, evaluated = [], []
    for (source, before), content in zip(pairs, contents, strict=True):
        if source in sources:
            plan = SourcePreparation.plan(source, content, recipe, root, begun_with=known)
            trained.append((source.path, plan.fingerprint, before))
        else:
            plan = SourcePreparation.plan(source, content, whole, root, begun_with=known)
            evaluated.append((source.field, plan.fingerprint, before))
    _check_reading(trained, evaluated)


def check_prepared(recorded: Prepared, prepared: Prepared) -> None:
    """Raise DataError, with each source whose content or tokens differ between ``prepared`` and ``recorded``.

    Call this after ``prepare``, which expands each folder again and so includes files that were added after
    ``check_unchanged``.
    """
    trained = list(zip(prepared.sources, recorded.sources, strict=False))
    evaluated = _pair_by_name(prepared.evaluation, recorded.evaluation)
    pairs = (*trained, *evaluated)
    problems = [
        _change_of(
            now.path,
            before,
            now.content_hash,
            {file.name: file.content_hash for file in now.files},
            is_evaluated=before in recorded.evaluation,
        )
        for now, before in pairs
        if now.content_hash != before.content_hash
    ]
    raise_if(problems, DataError)
    if prepared.tokenizer_identity != recorded.tokenizer_identity:
        return
    fields = {
        one.name: f"spec.training.evaluation.sources[{index}]"
        for index, one in enumerate(prepared.evaluation)
    }
    _check_reading(
        [(now.path, now.fingerprint, before) for now, before in trained],
        [(fields[now.name], now.fingerprint, before) for now, before in evaluated],
    )


def _check_reading(
    trained: Sequence[tuple[Path, str, PreparedSource]],
    evaluated: Sequence[tuple[str, str, PreparedSource]],
) -> None:
    """Raise DataError, with each source whose files are unchanged but give other tokens.

    ``trained``, ``evaluated``: the path or the manifest field of each source, its current fingerprint, and
    the recorded source.
    """
    # The run's recipe fixes every manifest field that affects the fingerprint of a training source, so only
    # the tokenizer's files or the version can differ. It does not fix the fields of evaluation sources.
    what = "its rows would become other samples than when this run was prepared"
    why = (
        "the chat template or the special tokens of the tokenizer changed, or an older version of Evergrad "
        "took another of its templates"
    )
    remedy = "Restore the tokenizer's files to continue this run, or train under another run name"
    problems = [
        Problem(str(path), what, why, remedy)
        for path, fingerprint, before in trained
        if fingerprint != before.fingerprint
    ]
    raise_if(problems, DataError)

    what = "its files are read as other documents than when this run was prepared"
    why = "the fingerprint was {} and is {}"
    remedy = (
        "Set `type`, `textField`, `document` and `dtype` back, or give the evaluation source another "
        "name, which has its own results"
    )
    problems = [
        Problem(field, what, why.format(before.fingerprint, fingerprint), remedy)
        for field, fingerprint, before in evaluated
        if fingerprint != before.fingerprint
    ]
    raise_if(problems, DataError)


def _pair_by_name(
    now: Sequence[_Named], recorded: Sequence[PreparedSource]
) -> list[tuple[_Named, PreparedSource]]:
    """Return the evaluation sources that were also recorded, each with its record.

    Evaluation sources may be added, removed and reordered, but all results under a name must be measured on
    the same content.
    """
    before = {source.name: source for source in recorded}
    return [(source, before[source.name]) for source in now if source.name in before]


def _change_of(
    path: Path,
    before: PreparedSource,
    content_hash: str,
    new: Mapping[str, str],
    *,
    is_evaluated: bool,
) -> Problem:
    """Return the problem of a source whose content differs from the prepared content, with the changed files.

    ``new``: hashes of the files of a folder or pattern by their names; empty for a single file.
    ``is_evaluated``: the source is in ``evaluation.sources``.
    """
    other = "train the new content under another run name"
    if is_evaluated:
        other = "give the evaluation source another name, which has its own results"
    old = {file.name: file.content_hash for file in before.files}
    if not old or not new:
        what = "its content changed since this run was prepared"
        why = f"the fingerprint was {before.content_hash} and is {content_hash}"
        remedy = f"Restore the file to continue this run, or {other}"
        return Problem(str(path), what, why, remedy)

    # Compare by name, because the names determine the order of the files and so of all documents.
    changed = [name for name in old.keys() & new.keys() if old[name] != new[name]]
    differences = (
        ("added", sorted(new.keys() - old.keys())),
        ("missing", sorted(old.keys() - new.keys())),
        ("changed", sorted(changed)),
    )
    shown = []
    for word, names in differences:
        if names:
            # Shorten the list: a folder may have thousands of files.
            left = len(names) - _MOST_NAMES
            more = f" and {left} more" if left > 0 else ""
            shown.append(f"{word}: {', '.join(names[:_MOST_NAMES])}{more}")
    what = "its files are not those that this run was prepared from"
    remedy = f"Restore them to continue this run, or {other}"
    return Problem(str(path), what, "; ".join(shown), remedy)


def _find_unprepared(preparations: Sequence[SourcePreparation]) -> list[Problem]:
    """Return a problem for each source whose tokens are not published."""
    why = "this start may prepare nothing (--require-prepared), and {} has no tokens of its content"
    remedy = "Run `evergrad prepare` with this file first, or leave --require-prepared out"
    # `evergrad prepare` has no run as input, so it always renders the texts of the current version.
    of_run = (
        "Leave --require-prepared out once: the run makes the text of the version that began it, which "
        "`evergrad prepare` does not"
    )
    return [
        Problem(
            str(one.source.path),
            "is not prepared",
            why.format(one.final.parent),
            of_run if one.is_of_earlier_version else remedy,
        )
        for one in preparations
        if one.source.type in TEXT_TYPES and open_published(one.final) is None
    ]


def _prepare_all(
    preparations: Sequence[SourcePreparation], report: Reporter, *, workers: int
) -> list[PreparedSource]:
    # Token files are read in place and not prepared. Sources of equal content share a published directory.
    texts = [one for one in preparations if one.source.type in TEXT_TYPES]
    found = {one.fingerprint: open_published(one.final) for one in texts}
    # Find the published sources before the first job, because the rest determines the amount of work.
    missing = {one.fingerprint: one for one in texts if found[one.fingerprint] is None}
    pending = list(missing.values())
    report.begin("tokenize", sum(_work_of(one) for one in pending))
    # Use one pool for all sources, so that the helper processes start only one time.
    pool = _LazyPool(pending, workers)
    try:
        for one in pending:
            found[one.fingerprint] = publish(one, pool=pool.get, report=report)
    finally:
        # Close the pool after an error too: helpers would otherwise work until they detect the end of input.
        pool.close()
    return [
        _prepared_source(
            one, found.get(one.fingerprint), reused=one.fingerprint not in missing
        )
        for one in preparations
    ]


def _work_of(preparation: SourcePreparation) -> int:
    """Return the bytes of all chunks of a source."""
    return sum(chunk.size for chunk in preparation.content.chunks)


class _LazyPool:
    """One pool for all sources, started when the first job needs it."""

    def __init__(self, pending: Sequence[SourcePreparation], workers: int) -> None:
        self._pending = pending
        self._workers = workers
        self._pool: Pool | None = None

    def get(self) -> Pool:
        # Start the pool late: if an earlier attempt finished every chunk, no helper process is needed.
        if self._pool is None:
            chunks = max(len(one.content.chunks) for one in self._pending)
            size = sum(_work_of(one) for one in self._pending)
            tokenizer = self._pending[0].recipe.tokenizer
            self._pool = build_pool(
                tokenizer,
                workers=min(self._workers, chunks),
                pending_bytes=size,
                smallest=SMALLEST_CHUNK,
            )
        return self._pool

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _prepared_source(
    preparation: SourcePreparation, published: PublishedSource | None, *, reused: bool
) -> PreparedSource:
    source, content = preparation.source, preparation.content
    # Record the files of a folder, because the folder may change later.
    files: tuple[PreparedFile, ...] = ()
    if source.is_expanded(tuple(path for path, _ in content.files)):
        files = tuple(
            PreparedFile(relative_name(path, source), one.content_hash, one.size, one.lines)
            for path, one in content.files
        )

    # Token files have no published directory and no documents to count.
    if published is None:
        recipe = preparation.recipe
        train, held_out = cut_tokens(
            source, content, recipe.held_out, vocab_size=recipe.tokenizer.vocab_size
        )
        return PreparedSource(
            name=source.name,
            path=source.path.absolute(),
            content_hash=content.content_hash,
            fingerprint=preparation.fingerprint,
            train=train,
            held_out=held_out,
            reused=reused,
            files=files,
        )
    return PreparedSource(
        name=source.name,
        path=source.path.absolute(),
        content_hash=content.content_hash,
        fingerprint=preparation.fingerprint,
        train=published.train,
        held_out=published.held_out,
        documents=published.documents,
        held_out_documents=published.held_out_documents,
        skipped=published.skipped,
        repaired=published.repaired,
        reused=reused,
        files=files,
        unit=source.unit,
    )
