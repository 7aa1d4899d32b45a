"""The recipe ``preference``: pairs of completions of one prompt, one of which is preferred, with a frozen
reference."""

from collections.abc import Iterator
from typing import Annotated, Final, Literal

from pydantic import Field

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import LocalPath, Section
from evergrad_manifest.model.view import UNKNOWN, View
from evergrad_manifest.training.common import PREFERENCE, RECIPES, TRAINING, reads_pairs
from evergrad_manifest.values.numbers import Real, show

METRICS: Final = {
    "accuracy": "Share of pairs whose chosen completion has the larger reward.",
    "margin": "Mean reward of the chosen completion less that of the rejected one.",
    "chosen_reward": "Mean reward of a chosen completion: beta · log(model / reference).",
    "rejected_reward": "The same of a rejected completion.",
    "chosen_log_probability": "Mean log-probability of a chosen completion, summed over its tokens, in nats.",
    "rejected_log_probability": "The same of a rejected completion.",
}
"""Metrics in addition to the loss, in each step and on each evaluation set, each with a line of help."""
_SECTION: Final = f"{TRAINING}.preference"
_ROWS: Final = f"{TRAINING}.rows"
_PACKING: Final = f"{TRAINING}.data.packing"

FieldName = Annotated[str, Field(min_length=1, max_length=200)]


class Preference(Section):
    """The loss of ``recipe: preference``, what it compares with, and the keys of a pair."""

    beta: Real = Field(default=0.1, gt=0, le=1e6)
    """Scale of the rewards. With a larger value, the model stays closer to the reference."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """``sigmoid``: DPO. ``ipo``: squared distance of the difference of log-ratios from 1 / (2 beta).
    ``hinge``: 1 minus the margin of the rewards, if that is positive."""
    label_smoothing: Real = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of pairs whose order is wrong. For sigmoid only."""
    reference: LocalPath | None = Field(default=None, min_length=1)
    """The frozen model: a transformers directory, a run directory (its newest valid checkpoint) or one
    checkpoint. Default: the weights from which the run starts."""
    chosen_field: FieldName = "chosen"
    """Key of the preferred completion: a text, or a list of messages."""
    rejected_field: FieldName = "rejected"
    """Key of the rejected completion: a text, or a list of messages."""


def check_section(view: View) -> Iterator[Problem]:
    """Check that the section is set only for recipes that read pairs."""
    recipe = view.get(f"{TRAINING}.recipe")
    if recipe in RECIPES and recipe != PREFERENCE and view.is_given(_SECTION):
        what, why = f"has no meaning with recipe {recipe}", "its samples are not pairs"
        yield Problem(_SECTION, what, why, f"Remove it, or set recipe: {PREFERENCE}")


def check_smoothing(view: View) -> Iterator[Problem]:
    """Check that label smoothing is used only with a loss that is a likelihood, which can be mixed with the
    likelihood of the reversed pair."""
    if not reads_pairs(view) or not view.is_given(_SECTION):
        return
    found = view.known(f"{_SECTION}.loss", f"{_SECTION}.labelSmoothing")
    if found is None or found[0] == "sigmoid" or not found[1]:
        return
    what = f"has no meaning with loss {found[0]}"
    why = "only the loss of sigmoid is that of a probability"
    yield Problem(
        f"{_SECTION}.labelSmoothing", what, why, "Remove it, or set loss: sigmoid"
    )


def check_keys(view: View) -> Iterator[Problem]:
    """Check that each key names one part of a pair, and that keys of other rows are not set."""
    if not reads_pairs(view) or UNKNOWN in (view.get(_SECTION), view.get(_ROWS)):
        return
    for name in ("messagesField", "completionField", "learn"):
        # The resolved file of a run contains their defaults.
        if view.is_given(_ROWS) and view.get(f"{_ROWS}.{name}") not in (
            *_UNSET[name],
            UNKNOWN,
        ):
            why = "a pair has a prompt and two completions, which are learned"
            remedy = f"Remove it; {_SECTION} has chosenField and rejectedField"
            yield Problem(f"{_ROWS}.{name}", "has no meaning for pairs", why, remedy)
    first: dict[str, str] = {}
    for path, default in (
        (f"{_ROWS}.promptField", "prompt"),
        (f"{_SECTION}.chosenField", "chosen"),
        (f"{_SECTION}.rejectedField", "rejected"),
    ):
        value = view.get(path) if view.is_given(path) else default
        if value is UNKNOWN:
            continue
        if value in first:
            what = f"{value!r} is also {first[value]}"
            why = "each names another part of a pair"
            yield Problem(path, what, why, "Name different keys")
        first.setdefault(value, path.rpartition(".")[2])


_UNSET: Final = {
    "messagesField": ("messages",),
    "completionField": ("completion",),
    "learn": ("completions",),
}


def check_pair_packing(view: View) -> Iterator[Problem]:
    """Check that the two rows of a pair are separate rows of a tensor."""
    packing = view.get(_PACKING)
    if not reads_pairs(view) or packing is UNKNOWN or not view.is_given(_PACKING):
        return
    if packing != "none":
        why = "each completion of a pair has its own row, which is padded at its end"
        yield Problem(_PACKING, f"{show(packing)} is not for pairs", why, "Leave it out")


RULES: Final = (check_section, check_smoothing, check_keys, check_pair_packing)
