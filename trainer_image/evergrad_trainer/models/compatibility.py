"""Compares the configuration of trained weights with the configuration of the model that loads them.

Comparing shapes is not enough. For example, a model with another base of its rotary positions, another
activation or another number of heads can load the same tensors, but computes another function.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.differences import Change, changed_fields, show_value
from evergrad_trainer.run.record import comparable_configs

_HARMLESS: Final = re.compile(
    r"""
      .*(dropout|pdrop|drop_rate|drop_prob|layerdrop).*    # nothing is dropped but while training
    | .*_token_ids?                                        # what generation begins, fills and ends with
    | initializer_.* | init_.* | .*_init_(std|range|factor) | rescale_prenorm_residual
    | router_(aux|z)_loss_coef | aux_loss_alpha | seq_aux | router_jitter_noise    # a loss of training alone
    | output_(attentions|hidden_states|router_logits) | return_dict | use_return_dict
    | problem_type | num_labels | finetuning_task | task_specific_params | summary_.* | name_or_path
    | tokenizer_class | prefix | torchscript | use_bfloat16 | gradient_checkpointing
    | chunk_size_feed_forward | pretraining_tp                            # the same sums in other pieces
    """,
    re.VERBOSE,
)
"""Keys that do not change the function of trained weights."""
_SET_BY_EXPORTS: Final = ("bos_token_id", "eos_token_id")
"""Keys that an export sets to the ids of the tokenizer, if the model was created by Evergrad."""
_COUNTS_FROM_PADDING: Final = re.compile(r".*(bert|data2vec|xlm|electra|ernie|biogpt).*")
"""Matches model types that include models whose positions start from ``pad_token_id``."""
_SAME_ACTIVATION: Final = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}
_POSITIONS: Final = "max_position_embeddings"
_INDEPENDENT_ROPE: Final = ("default", "linear", "llama3")
"""Types of rotary positions that do not depend on the largest position. A table of learned positions does:
the largest position is a part of its shape."""


def compare_functions(
    stored: Mapping[str, Any], own: Mapping[str, Any], *, where: str, field: str
) -> tuple[list[Problem], list[str]]:
    """Compare two descriptions of a model from ``ModelPlan.describe``.

    ``stored``: the description of the weights in ``where``, which the manifest field ``field`` names.
    ``own``: the description of the run's model. Returns a problem for each key with which the weights would
    compute another function, and a line of text for each other key that differs.
    """
    before, now = (_normalise(one) for one in comparable_configs(stored, own))
    defaults = _default_ids(now)
    problems, lines = [], []
    for key, was, value in _changes(before, now):
        # Ignore a difference from the default: the manifest did not choose this id, an export replaces it
        # with the id of the tokenizer, and no other code reads it.
        if key in defaults and defaults[key] in (was, value):
            continue
        if _is_harmless(key, was, value, now):
            lines.append(
                f"{key} is {show_value(value)} here and {show_value(was)} in {where}; what the weights "
                "compute does not depend on it"
            )
            continue
        problems.append(
            Problem(
                field,
                f"{where} has {key} {show_value(was)}, and spec.training.model has {show_value(value)}",
                "the weights would compute another function",
                f"Set it to {show_value(was)}, or leave spec.training.model out to use theirs; to change it "
                "on purpose, begin with model.path (an export of that run) and model.configOverrides",
            )
        )
    return problems, lines


def _default_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default ids for the beginning and the end of a text in a configuration, by their keys."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(config.get("model_type", ""))
    if kind not in CONFIG_MAPPING:
        return {}
    # Read the attributes of the class: a few configurations cannot be created without values, or log warnings
    # about their defaults.
    made = CONFIG_MAPPING[kind]
    return {key: getattr(made, key, None) for key in _SET_BY_EXPORTS}


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[Change]:
    for path, was, value in changed_fields(before, now, where=""):
        yield path.removeprefix("."), was, value


def _is_harmless(key: str, was: Any, value: Any, config: Mapping[str, Any]) -> bool:
    name = key.rpartition(".")[2].partition("[")[0]
    if name == "pad_token_id":
        return not _COUNTS_FROM_PADDING.fullmatch(str(config.get("model_type", "")))
    if name == _POSITIONS:
        parameters = config.get("rope_parameters")
        return isinstance(parameters, Mapping) and all(
            kind in _INDEPENDENT_ROPE for kind in _rope_types(parameters)
        )
    return _HARMLESS.fullmatch(name) is not None


def _rope_types(parameters: Mapping[str, Any]) -> Iterable[str]:
    # Models with several types of layers have the parameters of each type under its name.
    inner = [one for one in parameters.values() if isinstance(one, Mapping)]
    return [str(one.get("rope_type", "default")) for one in inner or [parameters]]


def _normalise(value: Any, key: str = "") -> Any:
    """Return the configuration with a single notation for values that have several notations."""
    if isinstance(value, Mapping):
        values = {name: _normalise(one, name) for name, one in value.items()}
        if key == "rope_parameters" and not any(
            isinstance(one, dict) for one in values.values()
        ):
            values.setdefault("rope_type", "default")
        return _fill_in(values)
    if isinstance(value, list):
        return [_normalise(one, key) for one in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and re.fullmatch(
        r".*(act|activation|activation_function)", key
    ):
        return _SAME_ACTIVATION.get(value, value)
    return value


def _fill_in(values: dict[str, Any]) -> dict[str, Any]:
    """Set sizes that are None to the values that the model's code derives from other sizes."""
    heads, width = values.get("num_attention_heads"), values.get("hidden_size")
    follows = {
        "num_key_value_heads": heads,
        "head_dim": width // heads if heads and width else None,
        "n_inner": 4 * values["n_embd"] if values.get("n_embd") else None,
    }
    for name, size in follows.items():
        if name in values and values[name] is None:
            values[name] = size
    return values
