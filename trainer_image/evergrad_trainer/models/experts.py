"""Checks whether a mixture of experts is trained with the loss that balances its routers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from evergrad_manifest.errors import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


def has_router_loss(config: "PreTrainedConfig") -> bool:
    """Whether transformers computes a router loss at each call of the model, even if its weight is 0."""
    return bool(getattr(config.get_text_config(), "output_router_logits", False))


def router_coefficient(config: "PreTrainedConfig") -> float:
    """Return the weight of the router loss in the loss of a token; 0 if the model computes no router loss."""
    if not has_router_loss(config):
        return 0.0
    return float(_coefficient(config.get_text_config()) or 0.0)


def check_experts(config: "PreTrainedConfig", *, where: str) -> Iterator[Problem]:
    """Yield a problem if a mixture of experts would be trained without its router loss by accident.

    Setting the coefficient to 0 states that the router loss is omitted on purpose.
    """
    text = config.get_text_config()
    counts = [
        count for name in _COUNTS if isinstance(count := getattr(text, name, None), int)
    ]
    if not hasattr(text, "output_router_logits") or (counts and max(counts) < 2):
        return
    # If the architecture has no coefficient, the user cannot set it. If it is set but not used, the user can
    # change output_router_logits.
    coefficient = _coefficient(text)
    if coefficient is None:
        what = f"{text.model_type} is a mixture of experts without a router loss"
        why = "transformers computes none for it, and experts that are not kept in balance collapse"
        yield Problem(where, what, why, "Use an architecture with router_aux_loss_coef")
    elif coefficient and not text.output_router_logits:
        what = f"the router loss of {text.model_type} is left out"
        why = "output_router_logits is false, and experts that are not kept in balance collapse"
        remedy = (
            "Set output_router_logits: true in the model's configuration, or router_aux_loss_coef: 0 "
            "to train without it"
        )
        yield Problem(where, what, why, remedy)


def _coefficient(config: Any) -> float | None:
    return next(
        (
            float(value)
            for name in _COEFFICIENTS
            if (value := getattr(config, name, None)) is not None
        ),
        None,
    )
