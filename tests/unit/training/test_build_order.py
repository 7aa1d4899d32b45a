"""The order in which the parts of a run are made, and what each is made of."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evergrad_manifest.training import Training
from evergrad_trainer.data.batch import Stage
from evergrad_trainer.distributed.world import World
from evergrad_trainer.models.build import plan_model
from evergrad_trainer.recipes import load_task
from evergrad_trainer.recipes.setup import Opened
from evergrad_trainer.training import build

TRAINING = Training.model_validate(
    {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
            }
        },
        "data": {"sources": [{"name": "docs", "path": "docs.jsonl"}], "sequenceLength": 8},
        "batching": {"globalBatchSize": 4, "microBatchSize": 2},
        "optimizer": {
            "learningRate": 1e-3,
            "groups": [{"parameters": ["*norm.weight"], "learningRateRatio": 0.5}],
        },
        "horizon": {"steps": 3},
        "runtime": {"precision": "fp32", "activationCheckpointing": "full"},
    }
)
PARTS = (
    "choose_determinism",
    "_build_modules",
    "recompute",
    "build_optimizer",
    "build_loss",
)


@pytest.mark.capability("O-32")
@pytest.mark.parametrize("is_resumed", [False, True])
def test_parts_are_built_in_one_order_each_from_earlier_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_resumed: bool
) -> None:
    made: list[str] = []
    given: dict[str, inspect.BoundArguments] = {}

    def note(name: str) -> Any:
        original = getattr(build, name)

        def call(*arguments: Any, **named: Any) -> Any:
            made.append(name)
            given[name] = inspect.signature(original).bind(*arguments, **named)
            return original(*arguments, **named)

        return call

    for name in PARTS:
        monkeypatch.setattr(build, name, note(name))
    task, code = load_task(TRAINING, tmp_path)
    data: Any = SimpleNamespace(train=SimpleNamespace(stages=(Stage({}),)))
    machinery = build.build_machinery(
        TRAINING,
        # The data are opened first: a run that cannot read them builds no model.
        Opened(task, code, data, {}),
        plan_model(TRAINING.model, base_directory=tmp_path, vocab_size=257),
        World(1, rank=0, size=1, device=torch.device("cpu")),
        with_weights=not is_resumed,
    )
    assert tuple(made) == PARTS
    # The build receives whether a checkpoint provides the weights.
    assert given["_build_modules"].arguments["with_weights"] is not is_resumed
    # The optimizer is one over its parameters, in groups.
    assert given["build_optimizer"].arguments["model"] is machinery.model
    assert machinery.optimizer is not None
    groups = [group["params"] for group in machinery.optimizer.param_groups]
    grouped = [one for group in groups for one in group]
    assert len(groups) > 1
    assert {*map(id, grouped)} == {*map(id, machinery.model.parameters())}
    assert given["build_loss"].arguments["modules"] is machinery.modules
