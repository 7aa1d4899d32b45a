"""A run that sets a field in each section. The reference page takes its examples from it."""

from typing import Any, Final

EXAMPLE: Final[dict[str, Any]] = {
    "apiVersion": "evergrad.dev/v1alpha1",
    "kind": "TrainingRun",
    "metadata": {"name": "docs-lm", "labels": {"team": "search"}},
    "spec": {
        "nodes": {"min": 2, "max": 4},
        "workersPerNode": 8,
        "resources": {"requests": {"cpu": "16"}, "limits": {"nvidia.com/gpu": 8}},
        "storage": {"size": "200Gi", "storageClassName": "shared"},
        "template": {"nodeSelector": {"pool": "training"}},
        "failurePolicy": {"maxFailuresWithoutProgress": 3},
        "training": {
            "recipe": "pretrain",
            "model": {
                "config": {
                    "model_type": "llama",
                    "hidden_size": 768,
                    "num_hidden_layers": 12,
                }
            },
            "tokenizer": {"type": "transformers", "path": "/data/tokenizer"},
            "data": {
                "sources": [
                    {"name": "docs", "path": "/data/docs.jsonl", "weight": 3},
                    {"name": "code", "type": "tokens", "path": "/data/code.bin"},
                ],
                "sequenceLength": 2048,
                "heldOut": {"fraction": "1%"},
            },
            "batching": {"globalBatchSize": 256, "microBatchSize": 4},
            "optimizer": {"learningRate": "6e-4", "weightDecay": 0.1},
            "schedule": {"type": "wsd", "warmup": "1%", "decay": "20%"},
            "horizon": {"tokens": "20G"},
            "stop": {"afterStep": 10_000},
            "onNonFinite": {"skip": 2},
            "skipSteps": [1207],
            "overrides": [{"fromStep": 20_000, "learningRate": "3e-4"}],
            "checkpoint": {
                "every": {"steps": 500},
                "keep": 3,
                "keepEvery": {"tokens": "1G"},
                "best": {"metric": "heldOut/loss"},
            },
            "evaluation": {"every": {"steps": 1000}, "samples": 512},
            "initFrom": {"path": "/data/docs-lm-small"},
            "reproducibility": {"seed": 7, "elastic": "fast"},
            "runtime": {"precision": "bf16-autocast", "bucketSize": "64Mi"},
            "logging": {"every": {"steps": 10}, "trackers": [{"type": "tensorboard"}]},
            "monitors": [{"type": "divergence", "metric": "loss", "policy": "stop"}],
            "metrics": {"port": 29402, "lingerSeconds": 30},
        },
    },
}
OWN_TASK: Final[dict[str, Any]] = {
    "recipe": "task:Averaged",
    "options": {"decay": 0.999},
    "files": {"task.py": "…"},
}
"""Sections of ``spec.training`` for a custom task."""
SFT: Final[dict[str, Any]] = {
    "ema": {"decay": 0.999},
    "recipe": "sft",
    "data": {
        "sources": [{"name": "chats", "path": "/data/chats.jsonl"}],
        "sequenceLength": 2048,
        "heldOut": {"count": 200},
    },
    "rows": {"tooLong": "skip"},
}
"""Sections of ``spec.training`` for the recipe of this name."""
TWO_STAGES: Final[dict[str, Any]] = {
    "recipe": "two_stage_kl",
    "checkpoint": {"every": {"steps": 500}, "best": {"metric": "stage2/loss"}},
    "twoStageKl": {
        "stages": [
            {"tokens": "15G", "mixture": {"docs": 3, "code": 1}},
            {"mixture": {"code": 1}, "beta": 0.2},
        ],
        "estimator": "reverse",
    },
}
"""Sections of ``spec.training`` for two stages."""
PAIRS: Final[dict[str, Any]] = {
    "recipe": "preference",
    "data": {
        "sources": [{"name": "choices", "path": "/data/choices.jsonl"}],
        "sequenceLength": 2048,
        "heldOut": {"count": 200},
    },
    # A pair has two rows of tokens.
    "horizon": {"tokens": "40G"},
    "initFrom": {"path": "/data/docs-chat"},
    "preference": {"beta": 0.1, "loss": "sigmoid", "reference": "/data/docs-chat"},
}
"""Sections of ``spec.training`` for pairs."""

EDITS: Final[dict[str, Any]] = {
    "recipe": "latent_edit",
    "latentEdit": {
        "corpus": "/data/corpus",
        "mixture": [
            {"family": "population", "count": 3, "fallback": "syntheticSnv"},
            {"family": "syntheticIndel"},
        ],
        "encoder": {"layer": 20, "radius": 8},
        "predictor": {"stateWidth": 512},
    },
}
"""Sections of ``spec.training`` for edits."""
SCRIPT: Final[dict[str, Any]] = {
    "command": ["train.py", "--epochs", "3"],
    "env": {"TOKENIZERS_PARALLELISM": "false"},
    "gracePeriodSeconds": 60,
    "metrics": {"port": 29402},
}
"""A ``spec.script``, which replaces ``spec.training``."""
