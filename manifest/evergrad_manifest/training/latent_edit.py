"""The recipe ``latent_edit``: a predictor learns how an edit of a sequence changes the state that a frozen
encoder computes for the sequence."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import LocalPath, Section, Switch
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.view import UNKNOWN, View
from evergrad_manifest.training.common import TRAINING
from evergrad_manifest.values.numbers import Real, show

RECIPE: Final = "latent_edit"
MOST_EDITS: Final = 16
"""Most edits of one item, applied one after the other."""
LONGEST_ALLELE: Final = 16
"""Most bases of a reference or an alternate. Longer edits are structural and not supported."""
WHY_NO_EXPORT: Final = "the file's model is the encoder, which stays as it is"
_SECTION: Final = f"{TRAINING}.latentEdit"
_MIXTURE: Final = f"{_SECTION}.mixture"
_ENCODER: Final = f"{_SECTION}.encoder"
_PREDICTOR: Final = f"{_SECTION}.predictor"
_HOLD_OUT: Final = f"{_SECTION}.holdOut"

Family = Literal["population", "clinical", "syntheticSnv", "syntheticIndel", "syntheticMnv"]
Synthetic = Literal["syntheticSnv", "syntheticIndel", "syntheticMnv"]
OF_TABLES: Final = ("population", "clinical")
"""Families whose edits are rows of the corpus. A window may have too few rows."""
SHORTEST_MNV, LONGEST_MNV = 2, 8
"""Bases of a synthetic edit that replaces several bases."""

CHROMOSOME: Final = r"^[^\s:]+$"
INTERVAL: Final = r"^[^\s:]+:[0-9]+-[0-9]+$"
EDIT_KEY: Final = r"^[^\s:]+:[0-9]+:[ACGT]{1,16}:[ACGT]{1,16}$"
WEIGHT_HASH: Final = r"^(sha256:)?[0-9a-f]{64}$"
Chromosome = Annotated[str, Field(min_length=1, max_length=64, pattern=CHROMOSOME)]
Interval = Annotated[str, Field(max_length=96, pattern=INTERVAL)]
EditKey = Annotated[str, Field(max_length=128, pattern=EDIT_KEY)]
RecordId = Annotated[str, Field(min_length=1, max_length=200)]
Count = Annotated[int, Field(strict=True)]
"""A plain number, without units."""


class EditQuota(Section):
    """Items of one family that each window has."""

    family: Family
    """``population`` and ``clinical``: rows of the corpus. The synthetic families are drawn: single bases,
    insertions and deletions, or several bases at once."""
    count: Count = Field(default=1, ge=1, le=64)
    """Number of items in each window."""
    edits: Count = Field(default=1, ge=1, le=MOST_EDITS)
    """Number of edits in each item, applied one after the other."""
    fallback: Synthetic | None = None
    """Family that replaces rows that a window does not have. Default: such a window is refused."""


class HoldOut(Section):
    """Data that are never trained on. Windows that it meets become the evaluation set ``heldOut``."""

    chromosomes: tuple[Chromosome, ...] = Field(default=(), max_length=256)
    """Names of whole chromosomes."""
    intervals: tuple[Interval, ...] = Field(default=(), max_length=1024)
    """``chr1:100-200``: bases from the first to the last, counted from 1."""
    edits: tuple[EditKey, ...] = Field(default=(), max_length=4096)
    """``chr1:100:A:G``: rows of edits, by chromosome, position, reference and alternate."""
    records: tuple[RecordId, ...] = Field(default=(), max_length=4096)
    """Record ids of windows."""


class EditEncoder(Section):
    """How states are made of sequences by the frozen model of ``spec.training.model``."""

    layer: Count | None = Field(default=None, ge=0, le=1024)
    """Layer whose hidden states are pooled. 0: the embeddings. Default: the last layer."""
    pooling: Literal["centeredMean", "globalMean"] = "centeredMean"
    """State after an edit. ``centeredMean``: the mean of the tokens around it. ``globalMean``: the mean of
    all tokens. The state before an edit is always a mean of all tokens."""
    radius: Count | None = Field(default=None, ge=0, le=2**16)
    """Tokens on each side of the edit. Default: 8. For ``centeredMean`` only."""
    normalize: Switch = True
    """Scale states and predictions to length 1."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the encoder's weights and of its arithmetic."""
    prefix: str = Field(default="", max_length=256)
    """Text before each sequence, for example a tag of the tokenizer."""
    suffix: str = Field(default="", max_length=256)
    """Text after each sequence."""
    pad_to: Count = Field(default=1, ge=1, le=1024)
    """Sequences are padded with A to a multiple of this number of bases."""
    weight_hash: str | None = Field(default=None, pattern=WEIGHT_HASH)
    """SHA-256 that the model's weights file must have. If there are several files, the SHA-256 of their
    index."""


class EditPredictor(Section):
    """Size of what is trained: the encoder of edits, and the predictor of states."""

    layers: Count = Field(default=6, ge=1, le=128)
    """Number of blocks of cross-attention between state and edits."""
    heads: Count = Field(default=8, ge=1, le=128)
    """Number of attention heads in each block."""
    width: Count | None = Field(default=None, ge=1, le=2**16)
    """Width of the blocks. Default: the width of a state."""
    state_width: Count | None = Field(default=None, ge=1, le=2**16)
    """Width that states must have. Default: any width that the encoder returns."""
    action_width: Count = Field(default=64, ge=1, le=2**16)
    """Width of an edit."""
    allele_width: Count = Field(default=256, ge=4, le=2**16)
    """Width of the small transformer that reads reference and alternate."""


class LatentEdit(Section):
    """Corpus, encoder and loss of ``recipe: latent_edit``."""

    corpus: LocalPath = Field(min_length=1)
    """Folder with ``dataset_manifest.json`` and the files that it lists."""
    windows: Literal["placed", "carbon"] | None = None
    """Folder of the windows. Required if the corpus lists files of both."""
    mixture: tuple[EditQuota, ...] = Field(default=(), max_length=16)
    """Items of each window. Default: 3 population, 3 syntheticSnv, 1 syntheticIndel, and 1 clinical with the
    fallback syntheticSnv."""
    draws: Count = Field(default=1, ge=1, le=10**6)
    """Number of times that the mixture is drawn for each window, with other edits each time."""
    margin: Count = Field(default=64, ge=0, le=2**20)
    """Bases at each end of a window without synthetic edits."""
    hold_out: HoldOut | None = None
    """Data that are never trained on."""
    features: Literal["cached", "live"] = "cached"
    """``cached``: states are computed once, before the first step. ``live``: states are computed in each
    step."""
    encoder: EditEncoder = EditEncoder.model_validate({})
    """How the encoder computes states."""
    predictor: EditPredictor = EditPredictor.model_validate({})
    """Sizes of the trained predictor."""
    alpha: Real = Field(default=1.0, ge=0, le=1e6)
    """Weight of (1 - cosine) in the loss."""
    beta: Real = Field(default=0.1, ge=0, le=1e6)
    """Weight of the squared distance, divided by the width of a state, in the loss."""
    phase: Count = Field(default=1, ge=1, le=2)
    """Phase 1 only measures the Gaussian regularizer of the states. Phase 2, in which it is part of the loss,
    is refused, because it needs an encoder that is trained."""


def published_mixture() -> tuple[EditQuota, ...]:
    """Return the mixture of a section that sets none."""
    wire: list[dict[str, Any]] = [
        {"family": "population", "count": 3},
        {"family": "syntheticSnv", "count": 3},
        {"family": "syntheticIndel", "count": 1},
        {"family": "clinical", "count": 1, "fallback": "syntheticSnv"},
    ]
    return tuple(EditQuota.model_validate(one) for one in wire)


def check_is_given(view: View) -> Iterator[Problem]:
    """Check that the section is set if and only if the recipe is ``latent_edit``."""
    recipe = view.get(f"{TRAINING}.recipe")
    # A recipe that cannot be parsed already has a problem, and it is not known which section it needs.
    if not isinstance(view.raw("spec", "training"), Mapping) or recipe is UNKNOWN:
        return
    is_given = view.is_given(_SECTION)
    if recipe == RECIPE and not is_given:
        remedy = "Add `latentEdit` with its `corpus`"
        yield Problem(_SECTION, "missing", f"recipe {RECIPE} reads a corpus", remedy)
    if recipe != RECIPE and is_given:
        what = f"has no meaning with recipe {show(recipe)}"
        yield Problem(_SECTION, what, "", f"Remove it, or set recipe: {RECIPE}")


def check_unused(view: View) -> Iterator[Problem]:
    """Refuse sections for text or for a trained model, which would have no effect."""
    if view.get(f"{TRAINING}.recipe") != RECIPE:
        return
    of_text = "it trains on the items of latentEdit.corpus, and not on text"
    of_training = "the model is an encoder, which is not trained"
    unused = [
        ("data", of_text),
        ("evaluation.sources", of_text),
        ("runtime.lossChunk", "there are no logits"),
        ("model.lora", of_training),
        ("model.embeddingNoise", of_training),
        ("model.headPrecision", "there are no logits"),
        ("checkpoint.exportAtEnd", WHY_NO_EXPORT),
    ]
    for key, why in unused:
        # The resolved file of a run also contains values that have no effect.
        is_unset = view.get(f"{TRAINING}.{key}") in ((), [], False)
        if view.is_given(f"{TRAINING}.{key}") and not is_unset:
            what = f"has no meaning with recipe {RECIPE}"
            yield Problem(f"{TRAINING}.{key}", what, why, "Remove it")

    # Refuse values that this recipe does not support, although it supports their keys.
    runtime = f"{TRAINING}.runtime"
    if view.get(f"{runtime}.precision") == "bf16":
        what = f"'bf16' is not for recipe {RECIPE}"
        why = "the weights of its predictor are fp32"
        remedy = "Use bf16-autocast or fp32"
        yield Problem(f"{runtime}.precision", what, why, remedy)
    if (mode := view.get(f"{runtime}.activationCheckpointing")) not in ("none", UNKNOWN):
        what = f"{show(mode)} has no meaning with recipe {RECIPE}"
        why = "what is trained is small, and the model stays as it is"
        yield Problem(f"{runtime}.activationCheckpointing", what, why, "Remove it")


def check_phase(view: View) -> Iterator[Problem]:
    """Refuse phase 2: the regularizer applies to states of the encoder, which is frozen."""
    if _is_here(view) and view.get(f"{_SECTION}.phase") == 2:
        yield Problem(
            f"{_SECTION}.phase",
            "2 is refused",
            "it adds the regulariser of the encoder's states to the loss, and the encoder is frozen: there "
            "would be no gradient",
            "Set phase: 1, in which the regulariser is the metric gaussian_kl",
        )


def check_loss(view: View) -> Iterator[Problem]:
    """Check that at least one term of the loss has a weight."""
    if (
        _is_here(view)
        and view.get(f"{_SECTION}.alpha") == view.get(f"{_SECTION}.beta") == 0
    ):
        what, why = "0, and beta is 0 as well", "the loss would be 0 whatever is predicted"
        yield Problem(f"{_SECTION}.alpha", what, why, "Raise one of both")


def check_pooling(view: View) -> Iterator[Problem]:
    """Refuse a radius for globalMean, which is the mean of all tokens."""
    radius = f"{_ENCODER}.radius"
    if not _is_here(view) or view.get(f"{_ENCODER}.pooling") != "globalMean":
        return
    if view.is_given(radius) and view.get(radius) != 0:
        why = "all tokens are in the mean"
        what = "has no meaning with pooling globalMean"
        yield Problem(radius, what, why, "Remove it, or set pooling: centeredMean")


def check_mixture(view: View) -> Iterator[Problem]:
    """Check that a family has one quota, and that only families from the corpus have a fallback."""
    first: dict[str, str] = {}
    for path, item in view.items(_MIXTURE) if _is_here(view) else ():
        family, fallback = item["family"], item["fallback"]
        if family is UNKNOWN:
            continue
        if family in first:
            what = f"{family} is also the family of {first[family]}"
            why = "the two would draw the same edits"
            yield Problem(format_path((*path, "family")), what, why, "Join them")
        first.setdefault(family, format_path(path))
        # Rows of a table may be too few. Drawn edits never are, so their fallback would hide a mistake.
        if fallback not in (None, UNKNOWN) and family not in OF_TABLES:
            what = f"has no meaning for {family}"
            why = "its edits are drawn, and never too few"
            yield Problem(format_path((*path, "fallback")), what, why, "Remove it")


def check_micro_batch(view: View) -> Iterator[Problem]:
    """Check that a micro-batch has at least two items: a collapse is detected from the spread between
    them."""
    path = f"{TRAINING}.batching.microBatchSize"
    if _is_here(view) and view.get(path) == 1:
        why = "variances and distances that show a collapse are between the items of a micro-batch"
        yield Problem(path, f"1 is too small for recipe {RECIPE}", why, "Use at least 2")


def check_heads(view: View) -> Iterator[Problem]:
    """Check that the heads divide the width into equal parts."""
    found = view.known(f"{_PREDICTOR}.width", f"{_PREDICTOR}.heads")
    if not _is_here(view) or found is None or None in found:
        return
    width, heads = found
    # Name both neighbouring values, because it is not known which one the user means.
    if width % heads:
        what, why = (
            f"{width} is not divisible by heads {heads}",
            "each head has an equal part",
        )
        remedy = f"Use {width - width % heads or heads} or {width - width % heads + heads}"
        yield Problem(f"{_PREDICTOR}.width", what, why, remedy)


def check_intervals(view: View) -> Iterator[Problem]:
    """Check that an interval ends at or after its beginning."""
    intervals = view.get(f"{_HOLD_OUT}.intervals") if _is_here(view) else None
    if not isinstance(intervals, tuple | list):
        return
    # The type has checked the format of each interval. Check only the order of the two numbers.
    for index, interval in enumerate(intervals):
        first, last = map(int, interval.rpartition(":")[2].split("-"))
        if not 1 <= first <= last:
            why = "bases are counted from 1, the last one included"
            where = f"{_HOLD_OUT}.intervals[{index}]"
            yield Problem(where, f"{interval} contains no base", why, "Write first-last")


def _is_here(view: View) -> bool:
    """Return whether the run has this recipe and a section that could be parsed."""
    return view.get(f"{TRAINING}.recipe") == RECIPE and isinstance(
        view.get(_SECTION), Mapping
    )


RULES: Final = (
    check_is_given,
    check_unused,
    check_phase,
    check_loss,
    check_pooling,
    check_mixture,
    check_micro_batch,
    check_heads,
    check_intervals,
)
