"""Models by name and size. Each name has a configuration of transformers, which never changes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from evergrad_manifest.model.base import FieldValueError
from evergrad_manifest.model.spelling import nearest
from evergrad_manifest.values.numbers import show


def _llama(width: int, inner: int, layers: int, heads: int) -> Mapping[str, Any]:
    return MappingProxyType(
        {
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        }
    )


PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama-10M": _llama(320, 864, 8, 5),
        "llama-50M": _llama(640, 1728, 10, 10),
        "llama-100M": _llama(768, 2048, 14, 12),
        "llama-300M": _llama(1024, 2816, 24, 16),
        "llama-1B": _llama(2048, 5632, 20, 16),
        "llama-3B": _llama(2560, 6912, 38, 20),
    }
)
"""Configurations by name. The size counts the blocks, without the tables for the tokenizer's vocabulary.
Never change a configuration, because a file that names it would mean another model. Give another shape
another name."""


def check_preset(name: str) -> str:
    """Return ``name``. Raises FieldValueError if no preset has this name."""
    if name in PRESETS:
        return name
    near = nearest(name, PRESETS)
    why = f"it is one of {', '.join(PRESETS)}"
    remedy = (
        f"Did you mean {near}?" if near else "Write one of them, or a `config` of your own"
    )
    raise FieldValueError(f"{show(name)} is not a preset", why, remedy)
