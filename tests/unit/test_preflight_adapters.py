"""Preflight of adapters: the weights that they are trained with, their memory, and incompatible settings."""

from pathlib import Path
from typing import Any

from evergrad_manifest.training import Ema, Training
from evergrad_trainer.models.build import plan_model
from evergrad_trainer.models.memory import checkpoint_bytes, memory_of
from evergrad_trainer.preflight.memory import Finding, check_base, model_facts

TINY = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def training(**changes: Any) -> Training:
    values: dict[str, Any] = {
        "model": {"config": {"model_type": "llama"}},
        "data": {"sources": [{"name": "docs", "path": "docs.jsonl"}], "sequenceLength": 64},
        "batching": {"globalBatchSize": 8, "microBatchSize": 2},
        "optimizer": {"learningRate": 1e-3},
        "horizon": {"steps": 100},
    }
    return Training.model_validate(values | changes)


def base_findings(tmp_path: Path, *, lora: Any, **changes: Any) -> list[Finding]:
    one = training(model={"config": TINY, "lora": lora}, **changes)
    plan = plan_model(one.model, base_directory=tmp_path, vocab_size=257)
    facts = model_facts(plan)
    assert facts.trained is None or facts.num_trained < facts.parameters
    return list(check_base(one, tmp_path, plan))


def test_adapters_on_untrained_weights_give_a_warning(
    tmp_path: Path,
) -> None:
    [finding] = base_findings(tmp_path, lora={"rank": 2})
    assert finding.level == "warning"
    assert "has no weights, and model.lora freezes what the seed makes" in str(
        finding.problem
    )
    assert base_findings(tmp_path, lora=None) == []


def test_initial_weights_and_settings_incompatible_with_adapters_are_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text("{}")
    lora = {"rank": 2, "targetModules": ["lm_head"]}
    found = base_findings(
        tmp_path, lora=lora, initFrom={"path": "."}, runtime={"lossChunk": 64}
    )
    errors = [str(one.problem) for one in found if one.level == "error"]
    assert (
        "lossChunk: cannot be combined with an adapter beside the output head" in errors[0]
    )
    assert (
        "names a transformers directory together with model.lora" in errors[1]
        and len(errors) == 2
    )


def test_adapters_need_the_memory_of_their_own_gradients_and_moments(
    tmp_path: Path,
) -> None:
    plain = training(model={"config": TINY}, runtime={"precision": "fp32"})
    adapted = training(
        model={"config": TINY, "lora": {"rank": 2}}, runtime={"precision": "fp32"}
    )
    needs = {}
    for name, one in (("plain", plain), ("adapted", adapted)):
        plan = plan_model(one.model, base_directory=tmp_path, vocab_size=257)
        facts = model_facts(plan)
        needs[name] = memory_of(
            facts, one, world_size=1, on_accelerator=False, compiles=False
        ).state
        whole, trained = facts.parameters, facts.num_trained
    assert needs["adapted"] == 4 * (whole + 3 * trained)
    assert needs["plain"] == 16 * (whole - trained)
    averaged = adapted.model_copy(update={"ema": Ema.model_validate({"decay": 0.9})})
    assert checkpoint_bytes(facts, averaged) == 4 * 4 * trained
