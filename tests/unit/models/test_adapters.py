"""Adapters with frozen weights: their results, their state, refused settings, and the merge."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import PATIENCE
from peft.tuners.lora import LoraLayer
from torch.nn import functional

from evergrad_manifest.training import Lora, Model
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.distributed.world import World
from evergrad_trainer.models.adapters import adapter_key, check_initial, merge_adapters
from evergrad_trainer.models.build import build_empty_model, build_model, plan_model
from evergrad_trainer.models.deferred import defer_model
from evergrad_trainer.state.providers import base_tensors, module_tensors
from evergrad_trainer.task import Modules, Snapshot
from evergrad_trainer.training.frozen import compare_frozen, find_bases, hash_frozen
from evergrad_trainer.training.modules import module_problems

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2}
IDS = torch.arange(20).view(2, 10) % 11


def build(
    config: dict[str, Any] = LLAMA, *, seed: int = 0, precision: str = "fp32", **lora: Any
) -> Any:
    settings = Model.model_validate({"config": config, "lora": {"rank": 4, **lora}})
    plan = plan_model(settings, base_directory=Path(), vocab_size=257)
    return build_model(plan, seed=seed, precision=precision)


def learn(model: Any, *, seed: int = 1) -> Any:
    """Give the adapters values that change the results."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def refusal(config: dict[str, Any] = LLAMA, **lora: Any) -> str:
    with pytest.raises(ModelError) as raised:
        build(config, **lora)
    return str(raised.value)


@pytest.mark.capability("A-40")
def test_an_adapter_adds_the_scaled_product_of_its_two_matrices() -> None:
    model = learn(build(rank=2, alpha=3, targetModules=["down_proj"])).eval()
    layer = model.model.layers[0].mlp.down_proj
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(2))
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert down.shape == (2, 48) and up.shape == (32, 2)
    expected = functional.linear(x, layer.base_layer.weight) + 3 / 2 * (x @ down.T @ up.T)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(
    ("lora", "factor"), [({}, 2.0), ({"alpha": 1}, 0.25), ({"rankStabilized": True}, 4.0)]
)
def test_the_adapter_scale_is_alpha_divided_by_the_rank_or_its_root(
    lora: dict[str, Any], factor: float
) -> None:
    layers = [one for one in build(**lora).modules() if isinstance(one, LoraLayer)]
    assert {one.scaling["default"] for one in layers} == {factor}


def test_by_default_every_linear_layer_but_the_head_has_an_adapter() -> None:
    names = {name for name, one in build().named_modules() if isinstance(one, LoraLayer)}
    assert len(names) == 2 * 7 and not any("lm_head" in name for name in names)


def test_adapter_weights_depend_on_the_seed_and_initially_add_zero() -> None:
    settings = Model.model_validate({"config": LLAMA})
    plain = build_model(
        plan_model(settings, base_directory=Path(), vocab_size=257),
        seed=3,
        precision="fp32",
    )
    one, again, other = build(seed=3), build(seed=3), build(seed=4)
    assert torch.equal(one.eval()(IDS).logits, plain.eval()(IDS).logits)
    first, second, third = (module_tensors(model) for model in (one, again, other))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], third[name]) for name in first)
    # The base is the model that the seed makes without adapters.
    stored = {
        name.replace(".base_layer", ""): value for name, value in base_tensors(one).items()
    }
    assert stored.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(value, stored[name]) for name, value in plain.named_parameters())


def test_the_state_has_only_trained_parameters_and_the_base_has_a_hash() -> None:
    model = build()
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert set(module_tensors(model)) == trained and all(
        "lora_" in name for name in trained
    )
    modules = Modules({"model": model})
    assert set(find_bases(modules)) == {"model.base"}
    built = hash_frozen(modules)
    assert set(built) == {"model.base"}
    learn(model)
    assert hash_frozen(modules) == built
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    assert hash_frozen(modules) != built
    world, code = World(1, rank=0, size=1, device=torch.device("cpu")), _Code()
    with pytest.raises(ValueError, match=r"the frozen modules model\.base have changed"):
        compare_frozen(modules, built, world, code=code)  # type: ignore[arg-type]


class _Code:
    def explain(self, problem: Any) -> Exception:
        return ValueError(str(problem))


def test_a_model_without_adapters_has_no_base() -> None:
    assert find_bases(Modules({"model": torch.nn.Linear(2, 2)})) == {}


def test_the_base_has_its_weights_although_a_checkpoint_is_loaded_later() -> None:
    settings = Model.model_validate({"config": LLAMA, "lora": {"rank": 4}})
    plan = plan_model(settings, base_directory=Path(), vocab_size=257)
    one = base_tensors(build_model(plan, seed=1, precision="fp32"))
    other = base_tensors(build_model(plan, seed=1, precision="fp32", with_weights=False))
    assert one and all(torch.equal(value, other[name]) for name, value in one.items())
    assert defer_model(plan, seed=1, precision="fp32") is None


def test_an_empty_model_has_the_names_and_types_of_the_full_model() -> None:
    settings = Model.model_validate(
        {"config": LLAMA, "lora": {"rank": 4, "baseDtype": "bf16"}}
    )
    plan = plan_model(settings, base_directory=Path(), vocab_size=257)
    empty = build_empty_model(plan, precision="fp32")
    whole = build_model(plan, seed=0, precision="fp32")
    facts = [
        {
            name: (one.shape, one.dtype, one.requires_grad)
            for name, one in m.named_parameters()
        }
        for m in (empty, whole)
    ]
    assert facts[0] == facts[1]
    assert all(one.is_meta for one in empty.parameters())
    types = {one.requires_grad: one.dtype for one in whole.parameters()}
    assert types == {True: torch.float32, False: torch.bfloat16}


def test_a_base_in_bf16_trains_adapters_in_fp32() -> None:
    model = build(baseDtype="bf16", precision="bf16-autocast")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(IDS).logits.float().square().mean().backward()
    gradients = [one.grad for one in model.parameters() if one.requires_grad]
    assert all(one is not None and one.dtype == torch.float32 for one in gradients)
    assert all(one.grad is None for one in model.parameters() if not one.requires_grad)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (
            {"targetModules": ["q_prj"]},
            (
                "targetModules[0]: 'q_prj' names no module; the linear layers are q_proj, k_proj, v_proj, "
                "o_proj, gate_proj, up_proj and 2 more. Did you mean q_proj?"
            ),
        ),
        (
            {"targetModules": ["q_proj", "norm"]},
            "targetModules[1]: 'norm' names model.norm, a Llama",
        ),
        (
            {"targetModules": ["embed_tokens"]},
            "adapters can only be added to linear layers",
        ),
        ({"rank": 33}, "lora.rank: 33 is above the 32 of model.layers.0.self_attn.q_proj"),
    ],
)
def test_invalid_adapters_are_refused_with_the_available_layers(
    lora: dict[str, Any], said: str
) -> None:
    assert said in refusal(**lora)


def test_a_tied_head_gets_no_adapter() -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    assert "which shares its weights with the embeddings" in refusal(
        tied, targetModules=["lm_head"]
    )
    assert build(targetModules=["lm_head"]).lm_head.lora_A["default"].weight.shape == (
        4,
        32,
    )


def test_all_unknown_names_are_reported_together() -> None:
    text = refusal(targetModules=["one", "two"])
    assert "'one' names no module" in text and "'two' names no module" in text


def test_without_peft_adapters_are_refused_with_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "the package peft is not installed. Run `pip install peft`" in refusal()


@pytest.mark.long
def test_a_model_without_adapters_is_built_without_importing_peft() -> None:
    code = (
        "import sys; from pathlib import Path; from evergrad_manifest.training import Model; "
        "from evergrad_trainer.models.build import build_model, plan_model; "
        f"settings = Model.model_validate({{'config': {LLAMA!r}}}); "
        "plan = plan_model(settings, base_directory=Path(), vocab_size=257); "
        "build_model(plan, seed=0, precision='fp32'); print('peft' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.stdout.split() == ["False"], done.stderr


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_merged_model_has_no_adapters_and_the_same_outputs(
    config: dict[str, Any],
) -> None:
    model = learn(build(config)).eval()
    before = model(IDS).logits
    merge_adapters(model)
    assert not any(isinstance(one, LoraLayer) for one in model.modules())
    settings = Model.model_validate({"config": config})
    plan = plan_model(settings, base_directory=Path(), vocab_size=257)
    plain = build_empty_model(plan, precision="fp32")
    assert list(dict(model.named_parameters())) == list(dict(plain.named_parameters()))
    assert find_bases(Modules({"model": model})) == {}
    torch.testing.assert_close(model(IDS).logits, before, rtol=1e-4, atol=1e-4)


def test_adapter_parameters_are_exported_under_peft_names() -> None:
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    found = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert adapter_key(name) == found


def test_initial_weights_are_refused_together_with_adapters(tmp_path: Path) -> None:
    lora = Lora.model_validate({"rank": 4})
    assert check_initial(tmp_path, lora) == []
    (tmp_path / "config.json").write_text("{}")
    assert check_initial(tmp_path, None) == []
    [problem] = check_initial(tmp_path, lora)
    assert "Write it as model.path" in str(problem)


def test_a_snapshot_of_adapters_is_refused() -> None:
    runtime = type("Runtime", (), {"parallelism": "", "precision": "fp32"})
    training: Any = type("Training", (), {"runtime": runtime, "ema": None})
    modules = Modules(
        {"model": build()},
        {"reference": build()},
        snapshots={"reference": Snapshot("model", 3)},
    )
    [problem] = module_problems(modules, training)
    assert "'model' has adapters, and a checkpoint holds those alone" in str(problem)
