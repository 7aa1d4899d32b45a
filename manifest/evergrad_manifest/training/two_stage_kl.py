"""The recipe ``two_stage_kl``: a mixture for each of two stages, and a penalty that keeps the second stage
close to the model at the end of the first."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import Section
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.spelling import nearest
from evergrad_manifest.model.view import UNKNOWN, View
from evergrad_manifest.training.common import TRAINING
from evergrad_manifest.training.steps import HORIZON, steps_for_tokens, total_steps_of
from evergrad_manifest.values.numbers import Count, Real, show

RECIPE: Final = "two_stage_kl"
DEFAULT_BETA: Final = 0.1
"""Weight of the penalty in the second stage, if the file sets none."""
CHUNK_TOKENS: Final = 512
"""Tokens whose logits are in memory at the same time, if ``runtime.lossChunk`` is not set."""
STAGE_SETS: Final = ("stage1", "stage2")
"""Evaluation sets that ``data.heldOut`` creates: the held-out documents of each stage's sources."""
MEASURED: Final = ("reference_loss", "kl")
"""Metrics of each evaluation set in the second stage, in addition to the metrics of all recipes."""
_SECTION: Final = f"{TRAINING}.twoStageKl"
_STAGES: Final = f"{_SECTION}.stages"
_SOURCES: Final = f"{TRAINING}.data.sources"

Share = Annotated[Real, Field(gt=0, le=1e9)]
"""A weight in a mixture."""


class KlStage(Section):
    """One of the two stages."""

    tokens: Count | None = Field(default=None, ge=1, le=10**18)
    """Tokens after which the second stage starts, rounded up to whole steps. The second stage lasts until the
    horizon. For the first stage only."""
    mixture: dict[str, Share] = Field(default_factory=dict, max_length=64)
    """Shares of the samples by names of ``data.sources``, relative to one another. Default: all sources by
    their weights."""
    beta: Real | None = Field(default=None, ge=0, le=1e6)
    """Weight of the penalty that is added to the loss. Default: 0.1. For the second stage only."""


class TwoStageKl(Section):
    """The stages of ``recipe: two_stage_kl`` and the penalty of the second."""

    stages: tuple[KlStage, ...] = Field(min_length=2, max_length=2)
    """The two stages, in order."""
    estimator: Literal["nll_difference", "forward", "reverse"] = "reverse"
    """The penalty. ``reverse``: KL(model ‖ reference) over the vocabulary. ``forward``: KL(reference ‖
    model). ``nll_difference``: the model's loss minus the reference's loss, which has the gradient of the
    loss only."""


def check_is_given(view: View) -> Iterator[Problem]:
    """Check that the section is set if and only if the recipe is ``two_stage_kl``."""
    recipe = view.get(f"{TRAINING}.recipe")
    if not isinstance(view.raw("spec", "training"), Mapping) or recipe is UNKNOWN:
        return
    is_given = view.is_given(_SECTION)
    if recipe == RECIPE and not is_given:
        remedy = "Add `twoStageKl` with its two `stages`"
        yield Problem(_SECTION, "missing", f"recipe {RECIPE} has two stages", remedy)
    if recipe != RECIPE and is_given:
        what = f"has no meaning with recipe {show(recipe)}"
        yield Problem(_SECTION, what, "", f"Remove it, or set recipe: {RECIPE}")


def check_stages(view: View) -> Iterator[Problem]:
    """Check that the first stage has a length and no penalty, and that the second stage has no length."""
    for index, (path, stage) in enumerate(_stages_of(view)):
        tokens, beta = (format_path((*path, key)) for key in ("tokens", "beta"))
        if index == 0 and stage["tokens"] is None:
            why = "it says where the second stage begins"
            yield Problem(tokens, "missing", why, "Add it, such as `tokens: 20M`")
        if index == 0 and stage["beta"] not in (None, UNKNOWN, 0):
            why = "the reference is the model as it is at the end of this stage"
            yield Problem(beta, "has no meaning in the first stage", why, "Remove it")
        if index == 1 and stage["tokens"] is not None:
            why = "the second stage lasts to the horizon, which may be lengthened"
            remedy = "Remove it, and let horizon.tokens be the sum of both stages"
            yield Problem(tokens, "has no meaning in the second stage", why, remedy)


def check_boundary(view: View) -> Iterator[Problem]:
    """Check that each stage has at least one step, if the horizon does not depend on the data."""
    stages = _stages_of(view)
    found = view.known(
        f"{TRAINING}.batching.globalBatchSize", f"{TRAINING}.data.sequenceLength"
    )
    total = total_steps_of(view)
    if len(stages) != 2 or found is None or total is None:
        return
    tokens = stages[0][1]["tokens"]
    if tokens in (None, UNKNOWN):
        return
    samples, length = found
    if problem := problem_of_boundary(tokens, samples=samples, length=length, total=total):
        yield problem


def problem_of_boundary(
    tokens: int, *, samples: int, length: int, total: int
) -> Problem | None:
    """Return a problem if a run of ``total`` steps would have no second stage, otherwise None."""
    end = steps_for_tokens(tokens, samples=samples, length=length)
    if end < total:
        return None
    what = f"{tokens:,} tokens are {end:,} steps, and the horizon is {total:,}"
    least = (end + 1) * samples * length
    remedy = f"Lower it, or lengthen {HORIZON.removeprefix(f'{TRAINING}.')} to at least {least:,} tokens"
    return Problem(
        f"{_STAGES}[0].tokens", what, "no step is left for the second stage", remedy
    )


def check_mixtures(view: View) -> Iterator[Problem]:
    """Check that a mixture names sources of this file, and that each source is in at least one mixture."""
    sources = view.items(_SOURCES)
    names = [item["name"] for _, item in sources]
    stages = _stages_of(view)
    if view.get(f"{TRAINING}.recipe") != RECIPE or not names or UNKNOWN in names:
        return
    for path, stage in stages:
        for name in stage["mixture"] if isinstance(stage["mixture"], Mapping) else ():
            if name in names:
                continue
            near = nearest(name, names)
            why = (
                f"did you mean `{near}`?"
                if near
                else "a mixture is of sources of this file"
            )
            remedy = f"Known here: {', '.join(names)}"
            where = format_path((*path, "mixture", name))
            yield Problem(where, f"{name!r} is not a name of data.sources", why, remedy)
    # A source that is prepared but never trained on is probably a mistake.
    mixtures = [stage["mixture"] for _, stage in stages]
    if len(mixtures) == 2 and all(isinstance(one, Mapping) and one for one in mixtures):
        for (path, _), name in zip(sources, names, strict=True):
            if not any(name in one for one in mixtures):
                what = f"{name!r} is in the mixture of no stage"
                remedy = "Add it to one of them, or remove the source"
                yield Problem(
                    format_path(path), what, "nothing would be trained on it", remedy
                )


def check_mixing(view: View) -> Iterator[Problem]:
    """Check that each stage uses shares: a stage ends by its tokens, in the middle of a pass."""
    where, recipe = f"{TRAINING}.data.mixing", view.get(f"{TRAINING}.recipe")
    if view.is_given(f"{TRAINING}.twoStageKl") and view.get(where) == "passes":
        why = "a stage ends by its tokens, in the middle of a pass"
        yield Problem(
            where, f"passes cannot be used with recipe {recipe}", why, "Remove it"
        )


def check_set_names(view: View) -> Iterator[Problem]:
    """Check that no evaluation source has the name of a stage's evaluation set."""
    if view.get(f"{TRAINING}.recipe") != RECIPE or not view.is_given(
        f"{TRAINING}.data.heldOut"
    ):
        return
    for path, item in view.items(f"{TRAINING}.evaluation.sources"):
        name = item["name"]
        if name is not UNKNOWN and name.casefold() in STAGE_SETS:
            why = "it is the name of an evaluation set that data.heldOut makes"
            where = format_path((*path, "name"))
            yield Problem(where, f"{name!r} is reserved", why, "Rename the source")


def _stages_of(view: View) -> list[tuple[Any, dict[str, Any]]]:
    """Return the known stages of a run of this recipe, each with its path."""
    if view.get(f"{TRAINING}.recipe") != RECIPE or not isinstance(
        view.get(_SECTION), Mapping
    ):
        return []
    return view.items(_STAGES)


def without_default_beta(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON form of the section without weights of the penalty that equal the defaults."""
    stages = [
        {
            key: value
            for key, value in stage.items()
            if key != "beta" or value not in (None, default)
        }
        for stage, default in zip(section["stages"], (0.0, DEFAULT_BETA), strict=True)
    ]
    return {**section, "stages": stages}


RULES: Final = (
    check_is_given,
    check_stages,
    check_boundary,
    check_mixtures,
    check_mixing,
    check_set_names,
)
