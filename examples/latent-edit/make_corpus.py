"""Write a corpus of generated windows and edits, with its manifest: no download, and no data of any
person."""

import argparse
import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LENGTH = 96
"""Bases in a window."""
WINDOWS = {"chr1": 120, "chr2": 24}
"""Number of windows of each chromosome; the second chromosome is the split ``test``."""
SPLITS = {"chr1": "train", "chr2": "test"}
MOTIF = "TATAAT"
Row = dict[str, Any]


def genome(chromosome: str) -> str:
    """Return bases that follow one another with different probabilities, and contain a motif in some
    places."""
    draw = random.Random(chromosome)
    following = {"A": "AATG", "C": "CCGT", "G": "GCCA", "T": "TTAC"}
    bases = ["A"]
    while len(bases) < LENGTH * WINDOWS[chromosome]:
        if draw.random() < 0.02:
            bases += MOTIF
        bases.append(draw.choice(following[bases[-1]] + "ACGT"))
    return "".join(bases[: LENGTH * WINDOWS[chromosome]])


def windows(chromosome: str, text: str) -> Iterator[Row]:
    """Yield one row per window, with its position."""
    for number in range(WINDOWS[chromosome]):
        start = number * LENGTH
        yield {
            "record_id": f"{chromosome}-{number}",
            "source": "generated",
            "chrom": chromosome,
            "start_bp": start,
            "sequence": text[start : start + LENGTH],
        }


def variants(chromosome: str, text: str, *, every: int, **columns: Any) -> Iterator[Row]:
    """Yield substitutions, one per ``every`` bases, as rows of a table. Positions start at 1."""
    draw = random.Random(f"{chromosome} {every}")
    for position in range(every // 2, len(text), every):
        others = [base for base in "ACGT" if base != text[position - 1]]
        edit = {"ref": text[position - 1], "alt": draw.choice(others)}
        yield {"chrom": chromosome, "pos": position, **edit, **columns}


def write_manifest(folder: Path) -> None:
    """List all files with their checksums."""
    entries = [
        {
            "path": path.relative_to(folder).as_posix(),
            "split": path.stem,
            "records": len(path.read_text("utf-8").splitlines()),
            "size_bytes": path.stat().st_size,
            "sha256": f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}",
        }
        for path in sorted(folder.glob("*/*.jsonl"))
    ]
    manifest = {"schema_version": "1.0.0", "snapshot_id": "generated-1", "files": entries}
    text = json.dumps(manifest, indent=2) + "\n"
    (folder / "dataset_manifest.json").write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "path",
        nargs="?",
        type=Path,
        default=Path(__file__).with_name("corpus"),
        help="default: %(default)s",
    )
    folder: Path = parser.parse_args().path
    # Remove the old folder, because a file that is left there would not be in the manifest.
    shutil.rmtree(folder, ignore_errors=True)
    for chromosome, split in SPLITS.items():
        text = genome(chromosome)
        common = {"af_global": 0.04, "filter": "PASS"}
        tables = {
            "placed": windows(chromosome, text),
            "gnomad": variants(chromosome, text, every=16, **common),
            "clinvar": variants(chromosome, text, every=150, clinical_significance="OTHER"),
        }
        for name, rows in tables.items():
            path = folder / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    write_manifest(folder)
    print(f"{folder}: {sum(WINDOWS.values())} windows of {LENGTH} bases")


if __name__ == "__main__":
    main()
