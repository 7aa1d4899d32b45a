"""Tools that build a corpus: windows of a genome, subsets and mixtures that stay when other rows come or go,
the split of each window, and the manifest."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

from evergrad_latent_edit.corpus import MANIFEST, hash_file, read_corpus
from evergrad_latent_edit.windows import Window
from evergrad_manifest.errors import Problem, raise_if
from evergrad_trainer.base.durable import replace_durably
from evergrad_trainer.base.errors import DataError

MARGIN: Final = 256
"""Bases at each end of a chromosome that no window has."""
STRIDE: Final = 8192
"""Bases from one window to the next."""
MOST_UNKNOWN: Final = 0.1
"""Share of a window's bases that may be N."""
_SCHEMA: Final = "1.0.0"
_TABLES: Final = (".jsonl", ".parquet")
Row = dict[str, Any]


def sample_windows(
    sequence: str,
    *,
    chromosome: str,
    length: int,
    source: str,
    margin: int = MARGIN,
    stride: int = STRIDE,
) -> Iterator[Row]:
    """Rows of ``placed/`` for one chromosome, from left to right.

    Windows of which more than a tenth is unknown are passed over. A record id says the place, so that it
    stays the same when windows are left out. Raises ValueError.
    """
    if length < 1 or stride < 1 or margin < 0:
        raise ValueError(
            f"length {length}, stride {stride}, margin {margin}: no window is cut like that"
        )
    for start in range(margin, len(sequence) - margin - length + 1, stride):
        bases = sequence[start : start + length].upper()
        if bases.count("N") <= MOST_UNKNOWN * length:
            yield {
                "record_id": f"{source}-{chromosome}-{start}",
                "source": source,
                "chrom": chromosome,
                "start_bp": start,
                "sequence": bases,
            }


def is_kept(name: str, *, fraction: Fraction | float, salt: str = "") -> bool:
    """Whether ``name`` belongs to the subset of ``fraction``, decided by its hash.

    Other names decide nothing, and a smaller fraction is a part of a larger one of the same salt.
    """
    return _place_of(name, salt) < fraction * 2**64


def mix_rows(
    sources: Mapping[str, Sequence[Row]],
    fractions: Mapping[str, Fraction | float],
    total: int,
) -> list[Row]:
    """``total`` rows, of each source its fraction: those with the lowest hashes of their ``record_id``.

    Counts are rounded down, and what is missing comes from the sources with the largest remainders. Raises
    DataError where the fractions are not those of the sources or a source has too few rows.
    """
    exact = {name: Fraction(fractions.get(name, 0)) * total for name in sources}
    if fractions.keys() != sources.keys() or sum(exact.values()) != total:
        what = f"{ {name: str(value) for name, value in fractions.items()} } are no mixture"
        why = f"the sources are {', '.join(sources)}, and their fractions add up to 1"
        raise DataError(Problem("fractions", what, why, "Use Fraction(1, 3) for a third"))
    counts = {name: int(count) for name, count in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1

    raise_if(
        [
            Problem(
                name,
                f"has {len(sources[name])} rows",
                f"{count} are wanted",
                "Lower the total",
            )
            for name, count in counts.items()
            if len(sources[name]) < count
        ],
        DataError,
    )
    return [
        row
        for name, count in counts.items()
        for row in sorted(
            sources[name], key=lambda one: _place_of(str(one["record_id"]), "")
        )[:count]
    ]


def list_memberships(splits: Mapping[str, Sequence[Window]]) -> Iterator[Row]:
    """The split of each window by the SHA-256 of its sequence: what may be published of a corpus that may not
    be."""
    for split, windows in splits.items():
        for window in windows:
            yield {"window": window.id, "record_id": window.record_id, "split": split}


def write_manifest(
    folder: Path, *, snapshot_id: str, splits: Mapping[str, str], windows: str | None = None
) -> Path:
    """Write the manifest of the tables and windows below ``folder``; read back, so that it is one that a run
    takes. ``splits``: of each file by its path from the folder; one that is missing belongs to all.

    Raises DataError with all that is wrong with the corpus.
    """
    files = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.glob("*/**/*")
        if path.suffix in _TABLES
    )
    entries = [
        {
            "path": name,
            "sha256": f"sha256:{hash_file(folder / name)}",
            "size_bytes": (folder / name).stat().st_size,
            **({"split": splits[name]} if name in splits else {}),
        }
        for name in files
    ]
    raise_if(
        [
            Problem(
                str(folder / name), "is not there", "a split names it", "Correct its path"
            )
            for name in sorted(splits.keys() - set(files))
        ],
        DataError,
    )
    manifest = {"schema_version": _SCHEMA, "snapshot_id": snapshot_id, "files": entries}
    replace_durably(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    read_corpus(folder, windows=windows)
    return folder / MANIFEST


def _place_of(name: str, salt: str) -> int:
    digest = hashlib.sha256(f"{salt}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
