"""Properties of an architecture that depend on its class in transformers.

They are its implementation of attention, and whether its output head shares the weights of its embeddings.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from evergrad_trainer.models.safetensors_files import find_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Attention = Literal["sdpa", "eager"]
NOT_CAUSAL: Final = frozenset({"cpmant", "xlm", "xlnet"})
"""Types among the causal models of transformers whose tokens always attend to later tokens."""
_TIED: Final = "tie_word_embeddings"
_ROWS_COMPARED: Final = 4096
"""Rows of two tables that are in memory at the same time. 4,096 rows of 16,384 floats are 256 MiB."""


def causal_class(kind: "type[PreTrainedConfig]") -> Any:
    """Return the causal language model of transformers for configurations of this class; None if none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    # The auto class reads the same table. A few types have several classes, and it uses the first class.
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    return found[0] if isinstance(found, tuple) else found


def choose_attention(config: "PreTrainedConfig") -> Attention:
    """Return SDPA if the class in transformers supports it; otherwise eager attention, which all support."""
    return (
        "sdpa" if getattr(causal_class(type(config)), "_supports_sdpa", False) else "eager"
    )


def has_attention(config: "PreTrainedConfig") -> bool:
    """Whether the model has attention. For example, a state-space model has none."""
    text: Any = config.get_text_config()
    return bool(getattr(text, "num_attention_heads", None))


def is_tied(config: "PreTrainedConfig") -> bool:
    """Whether the configuration ties the output head to the weights of the embeddings."""
    return any(bool(getattr(one, _TIED, False)) for one in _levels(config))


def untie(config: "PreTrainedConfig") -> None:
    """Change the configuration in place, so that head and embeddings share no weights."""
    for one in _levels(config):
        if hasattr(one, _TIED):
            setattr(one, _TIED, False)


def _levels(config: "PreTrainedConfig") -> Iterator["PreTrainedConfig"]:
    yield config
    if (text := config.get_text_config()) is not config:
        yield text


def find_untied(config: "PreTrainedConfig", directory: Path) -> tuple[str, str] | None:
    """Return two tensors of ``directory`` that the configuration ties but that differ, or None.

    transformers loads both tensors and does not tie them, despite the configuration.
    """
    if not is_tied(config):
        return None
    files = find_tensors(directory)
    pairs: dict[str, str] = (
        getattr(causal_class(type(config)), "_tied_weights_keys", None) or {}
    )
    for target, source in pairs.items():
        # The files of most tied models contain only one of the two tensors, and then no tensor is read.
        if target in files and source in files:
            stamps = tuple(
                (path, path.stat().st_mtime_ns, path.stat().st_size)
                for path in (files[target], files[source])
            )
            if not _are_equal(target, source, stamps):
                return target, source
    return None


@lru_cache(maxsize=4)
def _are_equal(one: str, other: str, stamps: tuple[tuple[Path, int, int], ...]) -> bool:
    """Whether two stored tensors have equal values. ``stamps``: their files, with time and size of each."""
    from safetensors import safe_open

    first, second = (path for path, _, _ in stamps)
    with (
        safe_open(first, framework="pt") as left,
        safe_open(second, framework="pt") as right,
    ):
        mine, its = left.get_slice(one), right.get_slice(other)
        shape = mine.get_shape()
        if shape != its.get_shape() or not shape:
            return False
        # Compare in parts, because whole tables of a large vocabulary have gigabytes.
        for begin in range(0, shape[0], _ROWS_COMPARED):
            rows = slice(begin, begin + _ROWS_COMPARED)
            if not bool((mine[rows] == its[rows]).all()):
                return False
    return True
