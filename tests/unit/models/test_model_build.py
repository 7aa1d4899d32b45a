"""Errors in a model's configuration or directory, and the model that is built from a correct one."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from evergrad_manifest.training import Model
from evergrad_manifest.training.presets import PRESETS
from evergrad_trainer.base.bytes_moved import MOVED
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.data.token_source import IGNORE_INDEX
from evergrad_trainer.models.build import (
    ModelPlan,
    build_empty_model,
    build_model,
    load_directory,
    plan_model,
)
from evergrad_trainer.models.configuration import translate_numbers
from evergrad_trainer.models.experts import check_experts
from evergrad_trainer.objectives.causal_lm import causal_lm_loss
from evergrad_trainer.preflight.memory import model_facts

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def plan(base: Path, vocab_size: int = 257, **model: Any) -> ModelPlan:
    return plan_model(
        Model.model_validate(model), base_directory=base, vocab_size=vocab_size
    )


def message(base: Path, **model: Any) -> str:
    with pytest.raises(ModelError) as raised:
        plan_ = plan(base, **model)
        model_facts(plan_)
    return str(raised.value)


@pytest.mark.capability("C-50")
def test_the_vocabulary_is_taken_from_the_tokenizer(tmp_path: Path) -> None:
    assert plan(tmp_path, config=TINY).config.vocab_size == 257
    assert plan(tmp_path, config={**TINY, "vocab_size": 300}).config.vocab_size == 300


def test_a_preset_is_counted_like_its_configuration(
    tmp_path: Path,
) -> None:
    named = plan(tmp_path, preset="llama-10M")
    written = plan(tmp_path, config=dict(PRESETS["llama-10M"]))
    assert named.describe() == written.describe()
    # The blocks with their norms, and two tables of 257 ids.
    blocks = 8 * (4 * 320**2 + 3 * 320 * 864 + 2 * 320) + 320
    assert model_facts(named).parameters == blocks + 2 * 257 * 320


def test_all_unknown_names_are_reported_with_the_nearest_one(tmp_path: Path) -> None:
    text = message(tmp_path, config={**TINY, "hiden_size": 1, "num_atention_heads": 2})
    assert "spec.training.model.config.hiden_size: unknown name 'hiden_size'" in text
    assert (
        "Did you mean 'hidden_size'?" in text
        and "Did you mean 'num_attention_heads'?" in text
    )
    assert "Did you mean 'llama'?" in message(tmp_path, config={"model_type": "lama"})


def test_a_vocabulary_smaller_than_that_of_the_tokenizer_is_refused(tmp_path: Path) -> None:
    assert "100 is below the tokenizer's 257 ids" in message(
        tmp_path, config={**TINY, "vocab_size": 100}
    )


def test_a_missing_model_is_refused_with_a_remedy_and_not_as_a_shape_problem() -> None:
    with pytest.raises(ModelError, match="Add it, or make all modules in build") as raised:
        build_empty_model(ModelPlan(None, None), precision="fp32")
    assert raised.value.problems[0].what == "missing"
    assert "spec.training.model.config" not in str(raised.value)


def test_inconsistent_shapes_are_refused(tmp_path: Path) -> None:
    text = message(tmp_path, config={**TINY, "num_attention_heads": 3})
    assert text.startswith("spec.training.model.config")


@pytest.mark.capability("T-X7")
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma4_text"])
def test_an_empty_model_has_the_names_shapes_and_types_of_the_full_model_without_memory(
    kind: str,
) -> None:
    # gemma4 computes with tables of angles and with weights while it is built.
    shared = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    sizes = shared | {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = AutoConfig.for_model(
        kind, **({"n_embd": 32, "n_layer": 1, "n_head": 2} if kind == "gpt2" else sizes)
    )
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    empty = build_empty_model(ModelPlan(config, None), precision="fp32")
    assert _shapes(empty.named_parameters()) == _shapes(whole.named_parameters())
    assert _shapes(empty.named_buffers()) == _shapes(whole.named_buffers())
    assert {one.device.type for one in (*empty.parameters(), *empty.buffers())} == {"meta"}


def _shapes(
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors}


@pytest.mark.capability("G-X23")
def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    assert (
        "contains no config.json; names of a model hub are not taken, and nothing is downloaded. "
        "Give a local transformers directory" in message(tmp_path, path="nothing")
    )


def test_a_model_type_that_needs_remote_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (tmp_path / "remote" / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": auto})
    )
    (tmp_path / "remote" / "code.py").write_text("raise SystemExit('this code was run')")
    assert "remote code is never run" in message(tmp_path, path="remote")


@pytest.mark.capability("G-X23")
@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "weights.ckpt", "model.pkl"]
)
def test_pickled_weights_alone_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "vocab_size": 257}))
    (tmp_path / name).write_bytes(b"\x80\x04.")
    assert f"weights only as pickle ({name})" in message(tmp_path, path=".")


@pytest.mark.capability("O-10")
def test_initial_weights_depend_on_the_seed_only(tmp_path: Path) -> None:
    one = plan(tmp_path, config=TINY)
    first = build_model(one, seed=4, precision="fp32").state_dict()
    torch.rand(10)
    second = build_model(one, seed=4, precision="fp32").state_dict()
    other = build_model(one, seed=5, precision="fp32").state_dict()
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_the_parameter_count_matches_the_model(tmp_path: Path) -> None:
    one = plan(tmp_path, config=TINY)
    model = build_model(one, seed=0, precision="fp32")
    assert model_facts(one).parameters == sum(
        parameter.numel() for parameter in model.parameters()
    )


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        {**TINY, "tie_word_embeddings": True},
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2},
    ],
    ids=["llama", "tied llama", "gpt2"],
)
def test_a_model_built_for_a_checkpoint_has_the_same_tensors(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    one = plan(tmp_path, config=config)
    whole = build_model(one, seed=0, precision="fp32")
    empty = build_model(one, seed=0, precision="fp32", with_weights=False)
    assert [name for name, _ in whole.named_parameters()] == [
        name for name, _ in empty.named_parameters()
    ]
    buffers = dict(empty.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in whole.named_buffers())


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16-autocast", torch.float32), ("bf16", torch.bfloat16)],
)
def test_the_precision_determines_the_type_of_the_weights(
    tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    model = build_model(plan(tmp_path, config=TINY), seed=0, precision=precision)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.training and not model.config.use_cache


def test_a_directory_whose_weights_do_not_match_its_configuration_is_refused(
    tmp_path: Path,
) -> None:
    model = build_model(plan(tmp_path, config=TINY), seed=0, precision="fp32")
    model.save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 2}))
    two_layers = plan(tmp_path, path="saved")
    with pytest.raises(ModelError, match=str(tmp_path / "saved")):
        build_model(two_layers, seed=0, precision="fp32")


def test_a_saved_directory_is_rebuilt_bit_for_bit(tmp_path: Path) -> None:
    model = build_model(plan(tmp_path, config=TINY), seed=3, precision="fp32")
    model.save_pretrained(tmp_path / "saved")
    again = build_model(plan(tmp_path, path="saved"), seed=0, precision="fp32")
    assert all(
        torch.equal(value, again.state_dict()[key])
        for key, value in model.state_dict().items()
    )


EXPERTS = {
    "model_type": "mixtral",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def trouble(base: Path, **config: Any) -> str:
    return "\n".join(
        map(
            str,
            check_experts(
                plan(base, config=config).config, where="spec.training.model.config"
            ),
        )
    )


def test_a_mixture_of_experts_without_its_router_loss_is_refused(tmp_path: Path) -> None:
    text = trouble(tmp_path, **EXPERTS)
    assert text.startswith(
        "spec.training.model.config: the router loss of mixtral is left out"
    )
    assert "Set output_router_logits: true" in text
    assert not trouble(tmp_path, **EXPERTS, router_aux_loss_coef=0.0)
    assert not trouble(tmp_path, **EXPERTS, output_router_logits=True)
    one = {**EXPERTS, "num_local_experts": 1, "num_experts_per_tok": 1}
    assert not trouble(tmp_path, **one)
    assert not trouble(tmp_path, **TINY)
    assert "without a router loss" in trouble(tmp_path, model_type="deepseek_v3")


def test_the_router_loss_of_a_mixture_of_experts_is_trained_and_not_evaluated(
    tmp_path: Path,
) -> None:
    one = plan(
        tmp_path,
        config={**EXPERTS, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    )
    model = build_model(one, seed=0, precision="fp32")
    loss_sum = causal_lm_loss(model)
    ids = torch.arange(24).reshape(2, 12)
    labels = ids.clone()
    labels[0, :5] = IGNORE_INDEX
    trained, aux = loss_sum(ids, labels).detach(), model(input_ids=ids).aux_loss.detach()
    model.eval()
    evaluated = loss_sum(ids, labels).detach()
    assert float(aux) > 0
    assert float(trained) == pytest.approx(
        float(evaluated) + 0.5 * float(aux) * 19, rel=1e-5
    )


def test_the_resolved_configuration_includes_the_defaults_of_transformers(
    tmp_path: Path,
) -> None:
    described = plan(tmp_path, config=TINY).describe()
    assert (
        described["config"]["hidden_size"] == 32
        and described["config"]["vocab_size"] == 257
    )
    assert (
        described["config"]["rms_norm_eps"] == 1e-06
        and "rope_parameters" in described["config"]
    )
    assert json.loads(json.dumps(described, allow_nan=False)) == described
    build_model(plan(tmp_path, config=TINY), seed=0, precision="bf16")
    other = plan(tmp_path, config={**TINY, "rms_norm_eps": 1e-5}).describe()["config"]
    assert {key for key in other if other[key] != described["config"][key]} == {
        "rms_norm_eps"
    }


def test_the_number_of_weight_bytes_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build_model(plan(tmp_path, config=TINY), seed=1, precision="fp32")
    made.save_pretrained(tmp_path / "weights")
    read: list[int] = []
    monkeypatch.setattr(MOVED, "_on_moved", read.append)
    load_directory(tmp_path / "weights", torch.bfloat16)
    assert sum(read) == 2 * sum(parameter.numel() for parameter in made.parameters())
    # Reported one by one while they are read, so that a long load does not count as a hang.
    assert len(read) > len(list(made.parameters()))


@pytest.mark.capability("C-49", "A-40")
def test_keys_of_a_stored_configuration_can_be_overridden_and_its_weights_stay(
    tmp_path: Path,
) -> None:
    stored = build_model(plan(tmp_path, config=TINY), seed=3, precision="fp32")
    stored.save_pretrained(tmp_path / "saved")
    overrides = {"attention_dropout": 0.25, "rms_norm_eps": 1e-5}
    one = plan(tmp_path, path="saved", configOverrides=overrides)
    model = build_model(one, seed=0, precision="fp32")
    attention: Any = model.model.layers[0].self_attn
    assert attention.attention_dropout == 0.25 and model.config.rms_norm_eps == 1e-5
    assert all(
        torch.equal(value, model.state_dict()[name])
        for name, value in stored.state_dict().items()
    )
    assert one.describe()["config"]["attention_dropout"] == 0.25


def test_an_overridden_configuration_is_checked_like_an_explicit_one(
    tmp_path: Path,
) -> None:
    stored = build_model(plan(tmp_path, config=TINY), seed=3, precision="fp32")
    stored.save_pretrained(tmp_path / "saved")
    text = message(tmp_path, path="saved", configOverrides={"atention_dropout": 0.1})
    assert "configOverrides.atention_dropout: unknown name" in text
    assert "Did you mean 'attention_dropout'?" in text
    one = plan(tmp_path, path="saved", configOverrides={"intermediate_size": 32})
    with pytest.raises(ModelError, match="of another shape"):
        build_model(one, seed=0, precision="fp32")


def test_adapters_next_to_stored_weights_are_refused_and_not_loaded(tmp_path: Path) -> None:
    stored = build_model(plan(tmp_path, config=TINY), seed=3, precision="fp32")
    stored.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ModelError, match=r"has adapters in addition to its weights.*Merge them into"
    ):
        build_model(plan(tmp_path, path="saved"), seed=0, precision="fp32")


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        ({"initializer_range": 1}, "initializer_range", 1.0),
        ({"initializer_range": 1.0}, "initializer_range", 1.0),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers", 2),
        ({"attention_dropout": 0.0}, "attention_dropout", 0),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 10000}},
            "rope_parameters",
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        ),
    ],
    ids=str,
)
def test_a_number_has_the_type_that_transformers_requires_in_any_spelling(
    tmp_path: Path, config: dict[str, Any], key: str, value: Any
) -> None:
    # The model of a manifest has one form of each number, in which 1.0 is 1, and transformers refuses 1 there.
    found = getattr(plan(tmp_path, config=TINY | config).config, key)
    assert found == value and repr(found) == repr(value)


def test_a_nested_or_overridden_number_has_the_type_that_transformers_requires(
    tmp_path: Path,
) -> None:
    parts = {"text_config": {"initializer_range": 1, "num_hidden_layers": 1}}
    found = translate_numbers(CONFIG_MAPPING["gemma3"], parts)["text_config"]
    assert repr(found) == repr({"initializer_range": 1.0, "num_hidden_layers": 1})
    AutoConfig.for_model(**TINY, vocab_size=257).save_pretrained(tmp_path)
    changed = plan(tmp_path, path=str(tmp_path), configOverrides={"rms_norm_eps": 1})
    assert repr(changed.config.rms_norm_eps) == "1.0"


@pytest.mark.parametrize(
    ("older", "rope"),
    [
        ({"rope_theta": 500000.0}, {"rope_type": "default", "rope_theta": 500000.0}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            {"type": "linear", "rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        ),
    ],
    ids=str,
)
def test_keys_of_an_older_configuration_keep_their_meaning(
    tmp_path: Path, older: dict[str, Any], rope: dict[str, Any]
) -> None:
    values = TINY | older
    found = plan(tmp_path, config=values)
    assert found.config.rope_parameters == rope
    # The same as the file that transformers itself reads.
    (tmp_path / "config.json").write_text(json.dumps({**values, "vocab_size": 257}))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == rope
    assert not older.keys() & found.describe()["config"].keys()
    # A manifest is not changed by reading it.
    assert values == TINY | older


def test_an_older_key_that_contradicts_or_has_no_effect_is_refused_by_name(
    tmp_path: Path,
) -> None:
    both = {"rope_theta": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 6}}
    text = message(tmp_path, config=TINY | both)
    assert "config.rope_theta: 5 contradicts rope_parameters.rope_theta 6" in text
    assert "has no effect in a llama configuration" in message(
        tmp_path, config=TINY | {"rope_local_base_freq": 5}
    )
    linear = {"rope_type": "linear", "factor": 2.0}
    text = message(
        tmp_path, config=TINY | {"rope_scaling": linear, "rope_parameters": linear}
    )
    assert "config.rope_scaling: rope_parameters is set too" in text
    # An architecture without rotary positions has never had it.
    text = message(tmp_path, config={"model_type": "gpt2", "rope_theta": 5})
    assert "unknown name 'rope_theta'; a gpt2 configuration has no such key" in text
