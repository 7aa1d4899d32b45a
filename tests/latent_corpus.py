"""Writes tiny corpora of windows and edits for the tests of the recipe latent_edit."""

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

LENGTH = 48
Row = dict[str, Any]

ENCODER = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
PREDICTOR = {"layers": 1, "heads": 2, "actionWidth": 8, "alleleWidth": 8}


def bases(count: int, *, seed: int = 0) -> str:
    return "".join(random.Random(seed).choices("ACGT", k=count))


def window_row(
    number: int, sequence: str, *, chromosome: str = "chr1", start: int = 0
) -> Row:
    return {
        "record_id": f"w-{chromosome}-{number}",
        "source": "generated",
        "chrom": chromosome,
        "start_bp": start,
        "sequence": sequence,
    }


def edit_row(
    chromosome: str, position: int, genome: str, *, seed: int, **further: Any
) -> Row:
    """Return a substitution of the base at ``position`` (from 1) of the chromosome ``genome``."""
    old = genome[position - 1]
    new = random.Random(seed).choice([one for one in "ACGT" if one != old])
    return {"chrom": chromosome, "pos": position, "ref": old, "alt": new, **further}


def write_lines(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def write_corpus(folder: Path, *, train: int = 6, test: int = 2) -> Path:
    """Write training windows of chr1 and test windows of chr2.

    Each window has four population edits, and every second window also has a clinical edit.
    """
    for chromosome, split, count in (("chr1", "train", train), ("chr2", "test", test)):
        genome = bases(count * LENGTH, seed=len(split))
        windows, population, clinical = [], [], []
        for number in range(count):
            start = number * LENGTH
            sequence = genome[start : start + LENGTH]
            windows.append(window_row(number, sequence, chromosome=chromosome, start=start))
            population += [
                edit_row(
                    chromosome,
                    start + 10 + 6 * one,
                    genome,
                    seed=start + one,
                    af_global=0.02,
                    filter="PASS",
                )
                for one in range(4)
            ]
            if number % 2 == 0:
                clinical.append(
                    edit_row(
                        chromosome,
                        start + 20,
                        genome,
                        seed=start,
                        clinical_significance="VUS",
                    )
                )
        write_lines(folder / f"placed/{split}.jsonl", windows)
        write_lines(folder / f"gnomad/{split}.jsonl", population)
        write_lines(folder / f"clinvar/{split}.jsonl", clinical)
    return seal(folder)


def seal(folder: Path, change: Callable[[Row], None] | None = None) -> Path:
    """Write the manifest of the files in ``folder``. ``change`` edits it before it is written."""
    files: list[Row] = []
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        name = path.relative_to(folder).as_posix()
        if name == "dataset_manifest.json":
            continue
        entry: Row = {
            "path": name,
            "sha256": f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}",
            "size_bytes": path.stat().st_size,
        }
        if path.suffix == ".jsonl":
            entry["records"] = len(path.read_text("utf-8").splitlines())
        if path.stem in ("train", "test"):
            entry["split"] = path.stem
        files.append(entry)
    manifest: Row = {"schema_version": "1.0.0", "snapshot_id": "toy-snap-1", "files": files}
    if change is not None:
        change(manifest)
    (folder / "dataset_manifest.json").write_text(json.dumps(manifest), "utf-8")
    return folder


def training(section: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """``spec.training`` of a run on ``corpus``; ``section``: changes of ``latentEdit``."""
    latent = {
        "corpus": "corpus",
        "margin": 4,
        "predictor": PREDICTOR,
        "encoder": {"radius": 3},
        **(section or {}),
    }
    return {
        "recipe": "latent_edit",
        "model": {"config": ENCODER},
        "latentEdit": latent,
        "batching": {"globalBatchSize": 12, "microBatchSize": 2},
        "optimizer": {"learningRate": 3e-3},
        "horizon": {"steps": 12},
        "checkpoint": {"every": {"steps": 5}, "keep": 50},
        "evaluation": {"every": {"steps": 6}},
        "runtime": {"precision": "fp32", "threads": 1, "device": "cpu"},
        "reproducibility": {"elastic": "exact"},
        **changes,
    }
