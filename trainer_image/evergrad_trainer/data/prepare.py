"""Prepare: source files → token files, once a fingerprint, in parallel, resumable, published by
one rename."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from evergrad_manifest.errors import Problem, raise_if
from evergrad_manifest.training import Training
from evergrad_trainer.data.preparation.disk_errors import disk_errors
from evergrad_trainer.data.preparation.pool import Pool, build_pool
from evergrad_trainer.data.preparation.progress import OnProgress, PrepareProgress, Reporter
from evergrad_trainer.data.preparation.publish import (
    Preparation,
    Recipe,
    compute_fingerprint,
    publish,
)
from evergrad_trainer.data.preparation.scan_cache import scan_cached
from evergrad_trainer.data.preparation.sources import (
    SMALLEST_CHUNK,
    evaluation_files,
    raise_if_out_of_vocabulary,
    source_problems,
    training_files,
)
from evergrad_trainer.data.prepared import (
    WIDTH,
    Prepared,
    PreparedSource,
    Published,
    Shard,
    TokenSequence,
    open_published,
)
from evergrad_trainer.data.tokenizers import load_tokenizer
from evergrad_trainer.errors import DataError

__all__ = ["PrepareProgress", "check_unchanged", "prepare", "resolve_prepared_directory"]

_HELD_OUT: Final = "spec.training.data.heldOut"


def resolve_prepared_directory(
    training: Training, *, base_directory: Path, default: Path
) -> Path:
    """``data.preparedDirectory``, relative to the manifest's directory, else ``default``."""
    named = training.data.prepared_directory
    return base_directory / named if named is not None else default


def prepare(
    training: Training,
    *,
    base_directory: Path,
    prepared_directory: Path,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
) -> Prepared:
    """Make all sources ready to be read; what is published already is only looked at. Idempotent.

    Relative paths start at ``base_directory``; ``prepared_directory`` counts where the manifest names none.
    ``workers``: helper processes, by default one a core. Raises DataError for whatever is wrong with files,
    lines or the tokenizer.
    """
    root = resolve_prepared_directory(
        training, base_directory=base_directory, default=prepared_directory
    )
    sources = training_files(training, base_directory)
    evaluation = evaluation_files(training, base_directory)
    # All files are looked at before the first one is read: every mistake in the paths is named at once.
    problems = [one for source in (*sources, *evaluation) for one in source_problems(source)]
    raise_if(problems, DataError)
    tokenizer = load_tokenizer(training.tokenizer, base_directory)
    report = Reporter(on_progress)
    recipe = Recipe(
        tokenizer,
        training.data.malformed,
        training.data.held_out,
        training.reproducibility.seed,
    )
    with disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)

        # First all scans: what is to be prepared, and in how many bytes, follows from the contents.
        files = [*sources, *evaluation]
        report.begin("scan", sum(source.path.stat().st_size for source in files))
        scans = []
        for source in files:
            report.show(source.name)
            scans.append(scan_cached(source, root / ".scans", on_bytes=report.advance))

        # Nothing is held out of a source that is only evaluated on.
        whole = replace(recipe, held_out=None)
        recipes = [recipe] * len(sources) + [whole] * len(evaluation)
        preparations = [
            Preparation(source, scan, one, root, compute_fingerprint(source, scan, one))
            for source, scan, one in zip(files, scans, recipes, strict=True)
        ]
        if not workers:
            # The cores this process may use, which in a container are fewer than the machine has.
            has_affinity = hasattr(os, "sched_getaffinity")
            workers = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        prepared = _prepare_all(preparations, report, workers=workers)
    return Prepared(
        sources=tuple(prepared[: len(sources)]),
        evaluation=tuple(prepared[len(sources) :]),
        tokenizer_identity=tokenizer.identity,
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
    )


def check_unchanged(
    recorded: Prepared, training: Training, *, base_directory: Path, prepared_directory: Path
) -> None:
    """Raise DataError naming each source whose content is not what ``recorded`` was prepared from.

    For a run that is resumed, before ``prepare`` makes anything of the new content. Reads only files that
    look touched.
    """
    root = resolve_prepared_directory(
        training, base_directory=base_directory, default=prepared_directory
    )
    pairs = (
        *zip(training_files(training, base_directory), recorded.sources, strict=False),
        *zip(evaluation_files(training, base_directory), recorded.evaluation, strict=False),
    )
    problems = [problem for source, _ in pairs for problem in source_problems(source)]
    raise_if(problems, DataError)

    # Content decides, not paths or times: a file that was copied elsewhere is still the same data.
    for source, before in pairs:
        with disk_errors(source.path):
            now = scan_cached(source, root / ".scans", on_bytes=lambda _: None)
        if now.content_hash != before.content_hash:
            what = "its content changed since this run was prepared"
            why = f"the fingerprint was {before.content_hash} and is {now.content_hash}"
            remedy = (
                "Restore the file to go on with this run, or train the new content under another "
                "run name"
            )
            problems.append(Problem(str(source.path), what, why, remedy))
    raise_if(problems, DataError)


def _prepare_all(
    preparations: Sequence[Preparation], report: Reporter, *, workers: int
) -> list[PreparedSource]:
    # Files of tokens are read where they lie. Sources of equal content share one published directory.
    texts = [one for one in preparations if one.source.type == "jsonl"]
    found = {one.fingerprint: open_published(one.final) for one in texts}
    # What is published is looked at once, before the first job: it decides how much there is to do.
    missing = {one.fingerprint: one for one in texts if found[one.fingerprint] is None}
    pending = list(missing.values())
    report.begin("tokenize", sum(one.scan.stat.size for one in pending))
    # One pool for all sources: helpers are started once.
    pool = _LazyPool(pending, workers)
    try:
        for one in pending:
            found[one.fingerprint] = publish(one, pool=pool.get, report=report)
    finally:
        # Also after an error: helpers would otherwise work on until they notice that their input has ended.
        pool.close()
    return [
        _prepared_source(one, found.get(one.fingerprint), reused=one.fingerprint not in missing)
        for one in preparations
    ]


class _LazyPool:
    """One pool for all sources, started when the first job needs it."""

    def __init__(self, pending: Sequence[Preparation], workers: int) -> None:
        self._pending = pending
        self._workers = workers
        self._pool: Pool | None = None

    def get(self) -> Pool:
        # Late: a start that finds every chunk of an earlier attempt finished needs no helper.
        if self._pool is None:
            chunks = max(len(one.scan.chunks) for one in self._pending)
            size = sum(one.scan.stat.size for one in self._pending)
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
    preparation: Preparation, published: Published | None, *, reused: bool
) -> PreparedSource:
    source = preparation.source
    # A file of tokens has no published directory; it has no documents to count either.
    if published is None:
        train, held_out = _token_spans(preparation)
        return PreparedSource(
            name=source.name,
            path=source.path.absolute(),
            content_hash=preparation.scan.content_hash,
            fingerprint=preparation.fingerprint,
            train=train,
            held_out=held_out,
            reused=reused,
        )
    return PreparedSource(
        name=source.name,
        path=source.path.absolute(),
        content_hash=preparation.scan.content_hash,
        fingerprint=preparation.fingerprint,
        train=published.train,
        held_out=published.held_out,
        documents=published.documents,
        held_out_documents=published.held_out_documents,
        skipped=published.skipped,
        repaired=published.repaired,
        reused=reused,
    )


def _token_spans(preparation: Preparation) -> tuple[TokenSequence, TokenSequence | None]:
    """The parts of a file of tokens, which is read where it lies; what is held out is its end."""
    source, recipe = preparation.source, preparation.recipe
    raise_if_out_of_vocabulary(source, preparation.scan, recipe.tokenizer.vocab_size)
    path = source.path.absolute()
    total = preparation.scan.stat.size // WIDTH[source.dtype]
    if recipe.held_out is None:
        return TokenSequence(source.dtype, (Shard(path, 0, total),)), None
    if recipe.held_out.fraction is None:
        why = f"source {source.name!r} is a flat file of tokens, which has no documents"
        raise DataError(
            Problem(
                f"{_HELD_OUT}.count",
                "cannot be kept",
                why,
                "Use heldOut.fraction, or a separate evaluation source",
            )
        )
    held_out = max(2, int(recipe.held_out.fraction * total + 0.5))
    if total - held_out < 2:
        what = f"holds {total} tokens and {held_out} would be held out"
        why = "none would remain for training"
        raise DataError(Problem(str(path), what, why, f"Lower {_HELD_OUT}.fraction"))

    # The end, not a random part: a window must not lie on both sides.
    cut = total - held_out
    train = TokenSequence(source.dtype, (Shard(path, 0, cut),))
    rest = TokenSequence(source.dtype, (Shard(path, cut, held_out),))
    return train, rest
