"""Architectures that transformers has: which of them train, and how the committed page agrees."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from evergrad_manifest.training import Model, Runtime
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.models.build import build_model, plan_model
from evergrad_trainer.models.deferred import defer_model
from evergrad_trainer.models.kernels import attention_shape, choose_kernels

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "architectures.md"
GEMMA2 = {
    "model_type": "gemma2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    path = ROOT / "tools/docs/architectures.py"
    spec = importlib.util.spec_from_file_location("architectures_page", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def plan(config: dict[str, Any]) -> Any:
    settings = Model.model_validate({"config": config})
    return plan_model(settings, base_directory=Path(), vocab_size=257)


def rows() -> dict[str, str]:
    """The state of each architecture on the committed page."""
    cells = [line.split("|") for line in PAGE.read_text().splitlines() if line[:3] == "| `"]
    cells = [one for one in cells if one[2] != " state "]
    return {name.strip(" `"): state.strip() for _, name, state, *_ in cells}


def test_a_class_without_sdpa_always_gets_eager_attention() -> None:
    import torch

    one = plan(GEMMA2)
    deferred = defer_model(one, seed=0, precision="fp32")
    assert deferred is not None
    for model in (
        build_model(one, seed=0, precision="fp32"),
        build_model(one, seed=0, precision="fp32", with_weights=False),
        deferred.model,
    ):
        assert model.config._attn_implementation == "eager"
    kernels = choose_kernels(
        torch.device("cpu"),
        Runtime(),
        shape=attention_shape(one, precision="fp32"),
        is_eager=True,
    )
    assert kernels["attention"] == "eager"


def test_a_kernel_choice_is_refused_for_a_model_with_eager_attention_only() -> None:
    import torch

    with pytest.raises(ModelError, match="only eager attention"):
        choose_kernels(
            torch.device("cpu"),
            Runtime.model_validate({"attention": "math"}),
            shape=None,
            is_eager=True,
        )


def test_a_model_with_non_causal_attention_is_refused() -> None:
    with pytest.raises(ModelError, match="is_decoder: true"):
        build_model(plan(BERT), seed=0, precision="fp32")
    build_model(plan({**BERT, "is_decoder": True}), seed=0, precision="fp32")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("vit", "no causal language model"),
        ("gemma3", "Set model_type: gemma3_text"),
    ],
)
def test_an_architecture_that_cannot_be_trained_is_refused_with_a_remedy(
    kind: str, said: str
) -> None:
    with pytest.raises(ModelError) as caught:
        plan({"model_type": kind})
    assert said in str(caught.value)


def test_the_page_lists_the_architectures_of_the_installed_transformers(
    generator: ModuleType,
) -> None:
    assert list(rows()) == generator.architectures(), "run make architectures"


@pytest.mark.parametrize("name", ["bloom", "falcon", "mamba", "phi", "xlnet"])
def test_the_page_matches_the_behaviour_of_a_small_model(
    generator: ModuleType, name: str
) -> None:
    assert generator.try_architecture(name).state == rows()[name], "run make architectures"
