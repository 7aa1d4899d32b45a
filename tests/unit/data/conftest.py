"""Factories for the data tests: manifests, sources on disk, prepared data."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from evergrad_manifest.training import Training
from evergrad_trainer.data.prepare import prepare
from evergrad_trainer.data.prepared import Prepared

TOPICS = [
    "Evergrad trains.",
    "Ä, ö und ü kosten zwei Bytes.",
    "漢字 and 👩‍🚀 cost more.",
    "tab\tand\nnewline",
    "x" * 300,
]


def build_training(**sections: Any) -> Training:
    """Return a small recipe over ``docs.jsonl``. ``data`` is merged, every other section is replaced."""
    data = {
        "sources": [{"name": "docs", "path": "docs.jsonl"}],
        "sequenceLength": 16,
        **sections.pop("data", {}),
    }
    return Training.model_validate(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": data,
            "batching": {"globalBatchSize": 8, "microBatchSize": 2},
            "optimizer": {"learningRate": 1e-3},
            "horizon": {"steps": 10},
            **sections,
        }
    )


def write_documents(path: Path, texts: Sequence[str]) -> Path:
    """Write one object per line."""
    path.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8"
    )
    return path


@pytest.fixture
def training() -> Callable[..., Training]:
    return build_training


@pytest.fixture
def documents() -> Callable[[Path, Sequence[str]], Path]:
    return write_documents


@pytest.fixture
def topics() -> list[str]:
    """Some texts, many of them unusual."""
    return [f"{number}: {TOPICS[number % len(TOPICS)]}" for number in range(50)]


@pytest.fixture
def prepared_in(tmp_path: Path) -> Callable[..., Prepared]:
    """Run ``prepare`` for a recipe whose sources are in ``tmp_path``."""

    def run(recipe: Training, **options: Any) -> Prepared:
        return prepare(
            recipe,
            base_directory=tmp_path,
            prepared_directory=tmp_path / "prepared",
            **{"workers": 1, **options},
        )

    return run


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Split sources into chunks of about 1 KiB, so that small files have many. The preparation still runs in
    this process."""
    monkeypatch.setattr("evergrad_trainer.data.preparation.sources.SMALLEST_CHUNK", 1024)
    return 1024
