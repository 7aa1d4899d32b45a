"""Models by name: the meaning of a name never changes, and the configuration identifies a run."""

import json
from hashlib import sha256
from pathlib import Path

import pytest

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.identity import config_hash, hashed_recipe, settings_hash, to_wire
from evergrad_manifest.reading.loader import load_manifest
from evergrad_manifest.training import Model
from evergrad_manifest.training.presets import PRESETS

BASE = Path(__file__).parent / "base_manifest.yaml"
FIRST = {
    "llama-10M": "16546d0c5e7c9dcd",
    "llama-50M": "48dc9349a9f671f5",
    "llama-100M": "8dc3f1e709ef970a",
    "llama-300M": "e8e099099dad3b79",
    "llama-1B": "a365d8cca5c089e1",
    "llama-3B": "68badddd938bf5a0",
}
"""The first digits of the SHA-256 of each configuration, unchanged since its name was added."""


def load(text: str) -> TrainingRun:
    return load_manifest(BASE, overrides=[f"spec.training.model={text}"]).run


def test_a_preset_name_never_changes_its_meaning() -> None:
    hashes = {
        name: sha256(json.dumps(dict(config), sort_keys=True).encode()).hexdigest()[:16]
        for name, config in PRESETS.items()
    }
    assert {name: hashes[name] for name in FIRST} == FIRST


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_with_a_preset_equals_the_run_with_its_configuration(name: str) -> None:
    run = load(f"{{preset: {name}}}")
    written = load(f"{{config: {json.dumps(dict(PRESETS[name]))}}}")
    assert config_hash(run) == config_hash(written)
    assert settings_hash(run) == settings_hash(written)
    assert hashed_recipe(run)["model"] == {"config": dict(PRESETS[name])}
    # The records of a run, in run.json and in the cluster, contain the configuration and not the name.
    model = to_wire(run)["spec"]["training"]["model"]
    assert model["config"] == dict(PRESETS[name]) and model.get("preset") is None


@pytest.mark.capability("C-5")
@pytest.mark.parametrize("name", PRESETS)
def test_the_size_in_a_preset_name_is_the_size_of_its_blocks(name: str) -> None:
    config = PRESETS[name]
    width, inner = config["hidden_size"], config["intermediate_size"]
    blocks = config["num_hidden_layers"] * (4 * width**2 + 3 * width * inner)
    number = name.partition("-")[2]
    size = float(number[:-1]) * {"M": 1e6, "B": 1e9}[number[-1]]
    assert blocks == pytest.approx(size, rel=0.03)
    assert width % config["num_attention_heads"] == 0


def test_model_settings_can_be_combined_with_a_preset() -> None:
    model = Model.model_validate({"preset": "llama-10M", "embeddingNoise": 5})
    assert model.config is not None and model.config["hidden_size"] == 320
    assert (model.preset, model.embedding_noise) == (None, 5)
