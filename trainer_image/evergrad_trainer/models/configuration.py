"""Translates the values of ``model.config`` for the configuration classes of transformers.

A manifest has a single form for each number (10000.0 is 10000), and may have keys of older configurations.
Both are translated only in this module.
"""

from collections.abc import Collection, Iterator, Mapping
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin, get_type_hints

from evergrad_manifest.errors import Problem
from evergrad_manifest.values.numbers import show

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ROPE: Final = "rope_parameters"
OLDER_ROPE_KEYS: Final = (
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "rope_local_base_freq",
)
"""Keys of older configurations, which transformers moves to ``rope_parameters``."""
DTYPE_KEYS: Final = ("dtype", "torch_dtype")
"""The current and the older key for the type of the weights. A run uses ``runtime.precision`` instead."""


def translate_numbers(
    kind: type["PreTrainedConfig"], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``values`` for the class ``kind``, with integers as floats if a field accepts only floats.

    For example, transformers refuses ``initializer_range: 1`` and accepts 1.0, which a manifest cannot
    contain.
    """
    # Annotations that are strings need no resolution: they are of fields that all classes share, and none of
    # these is a float.
    types = {name: one.type for name, one in kind.__dataclass_fields__.items()}
    translated: dict[str, Any] = {}
    for key, value in values.items():
        part = kind.sub_configs.get(key)
        if (
            isinstance(value, Mapping)
            and part is not None
            and hasattr(part, "__dataclass_fields__")
        ):
            translated[key] = translate_numbers(part, value)
        elif isinstance(value, Mapping) and key in (ROPE, "rope_scaling"):
            translated[key] = _translate_rope(value)
        else:
            # An older key has no field and so no type. It is moved to rope_parameters, whose values are
            # floats.
            older = float if key in OLDER_ROPE_KEYS else None
            translated[key] = _translate(value, types.get(key, older))
    return translated


def _translate_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate ``rope_parameters``, which is one mapping, or one mapping per type of layer."""
    from transformers.modeling_rope_utils import RopeParameters

    types = get_type_hints(RopeParameters)
    return {
        key: _translate_rope(value)
        if isinstance(value, Mapping)
        else _translate(value, types.get(key))
        for key, value in values.items()
    }


def _translate(value: Any, kind: Any) -> Any:
    members = (kind,) if isinstance(kind, GenericAlias) else (kind, *get_args(kind))
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if float in members and int not in members else value
    if isinstance(value, list):
        lists = (one for one in members if get_origin(one) in (list, tuple))
        items = [get_args(one) for one in lists]
        is_float = bool(items) and all(float in one and int not in one for one in items)
        return [_translate(item, float if is_float else None) for item in value]
    return value


def find_older_keys(values: Mapping[str, Any], known: Collection[str]) -> set[str]:
    """Return the keys of ``values`` that are not in ``known`` but that transformers translates."""
    older = {"torch_dtype"} | (set(OLDER_ROPE_KEYS) if ROPE in known else set())
    return {key for key in values if key in older and key not in known}


def check_older_keys(
    where: str,
    values: Mapping[str, Any],
    older: Collection[str],
    config: "PreTrainedConfig",
) -> list[Problem]:
    """Return a problem for each older key that has no effect in ``config`` or contradicts another key."""
    problems = []
    if values.get("rope_scaling") and values.get(ROPE):
        remedy = f"Keep {ROPE}, and remove rope_scaling"
        why = f"rope_scaling is the older name of {ROPE}"
        problems.append(Problem(f"{where}.rope_scaling", f"{ROPE} is set too", why, remedy))
    rope = values.get(ROPE) or values.get("rope_scaling") or {}
    for key in ("rope_theta", "partial_rotary_factor"):
        new = rope.get(key) if isinstance(rope, Mapping) else None
        if key in older and new is not None and new != values[key]:
            what = f"{show(values[key])} contradicts {ROPE}.{key} {show(new)}"
            why = f"{ROPE} contains it, and its value would win"
            problems.append(
                Problem(f"{where}.{key}", what, why, f"Remove {key}, and keep {ROPE}.{key}")
            )

    # A key that the class does not move remains an attribute that no layer reads.
    left = config.to_dict()
    moved = list(_leaves(left.get(ROPE)))
    for key in sorted(set(older) - {"torch_dtype", "rope_scaling"}):
        if left.get(key) is not None and values[key] not in moved:
            what = f"has no effect in a {config.model_type} configuration"
            remedy = f"Remove it, or write the value for each type of layer into {ROPE}"
            problems.append(Problem(f"{where}.{key}", what, "", remedy))
    return problems


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def find_ignored_dtype(values: Mapping[str, Any], weights: str) -> tuple[str, Any] | None:
    """Return the key and value of a weight type in ``values`` that differs from ``weights``; else None.

    ``weights``: the type that the run uses, for example ``float32``.
    """
    for key in DTYPE_KEYS:
        value = values.get(key)
        if value is not None and value != weights:
            return key, value
    return None


def check_shapes(config: "PreTrainedConfig", *, where: str) -> list[Problem]:
    """Return problems with numbers for which transformers builds a model that fails in its first step.

    ``where``: the manifest field of the configuration.
    """
    text = config.get_text_config()

    def number(*names: str) -> int | None:
        found = (getattr(text, name, None) for name in names)
        return next(
            (one for one in found if isinstance(one, int) and not isinstance(one, bool)),
            None,
        )

    problems = []
    heads, groups = number("num_attention_heads"), number("num_key_value_heads")
    if heads and groups is not None and (groups < 1 or heads % groups):
        fitting = [one for one in range(1, heads + 1) if heads % one == 0]
        what = f"{groups} does not divide num_attention_heads {heads}"
        why = "each key-value head is shared by an equal number of heads"
        remedy = f"Use one of {', '.join(map(str, fitting))}"
        problems.append(Problem(f"{where}.num_key_value_heads", what, why, remedy))
    chosen = number("num_experts_per_tok", "moe_topk", "top_k_experts")
    experts = number("num_local_experts", "num_experts", "n_routed_experts")
    if chosen is not None and experts is not None and 0 < experts < chosen:
        what = f"{chosen} is above the number of experts {experts}"
        why = "a token is sent to different experts"
        problems.append(
            Problem(f"{where}.num_experts_per_tok", what, why, f"Use at most {experts}")
        )
    return problems
