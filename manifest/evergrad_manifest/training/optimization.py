"""The optimizer with its parameter groups, the schedule of the learning rate, and the average of the
weights."""

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction as Ratio
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import Section, Switch
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.view import UNKNOWN, View
from evergrad_manifest.training.common import TRAINING, Meaningless, meaningless_in
from evergrad_manifest.training.steps import show_steps, steps_of, total_steps_of
from evergrad_manifest.values.numbers import Fraction, Real, StepsOrFraction

_OPTIMIZER: Final = f"{TRAINING}.optimizer"
_GROUPS: Final = f"{_OPTIMIZER}.groups"
_SCHEDULE: Final = f"{TRAINING}.schedule"
_PIECES: Final = f"{_SCHEDULE}.pieces"
_EMA: Final = f"{TRAINING}.ema"

OF_WHOLE_TENSORS: Final = ("muon", "adafactor")
"""Optimizers whose update of an element depends on the whole tensor, and so on how the tensor is sharded."""
OWN_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "lion": {"betas": [0.9, 0.99]},
    "muon": {"momentum": 0.95, "nesterov": True},
}
"""Defaults of an optimizer that differ from the defaults of the fields. They are filled in when a file is
read, so that the record of a run contains the values with which it trains."""

Beta = Annotated[Real, Field(ge=0, lt=1)]
Pattern = Annotated[str, Field(min_length=1, max_length=253)]


class ParameterGroup(Section):
    """Parameters with a learning rate or weight decay of their own."""

    parameters: tuple[Pattern, ...] = Field(min_length=1, max_length=16)
    """Names of parameters as in checkpoints, with ``*`` and ``?``, for example ``*.bias``."""
    learning_rate_ratio: Real = Field(default=1.0, gt=0, le=1000)
    """Learning rate of the group, as a multiple of the schedule's rate."""
    weight_decay: Real | None = Field(default=None, ge=0, le=1)
    """Weight decay of the group, for matrices and vectors alike. Default: the rule of the optimizer."""


class Optimizer(Section):
    """The update rule."""

    type: Literal["adamw", "lion", "sgd", "muon", "adafactor"] = "adamw"
    """``adamw`` (fused), ``lion`` or ``sgd``. ``muon``: for matrices, with AdamW for tables, head and
    vectors. ``adafactor``: its rate is relative to the size of each tensor. ``muon`` and ``adafactor`` need
    dataParallel."""
    learning_rate: Real = Field(gt=0, le=10)
    """Peak learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the first and second moments, each in [0, 1). For adamw, lion (default 0.9, 0.99) and muon's
    AdamW."""
    epsilon: Real = Field(default=1e-8, gt=0, le=1)
    """Constant that is added to the denominator of the update. For adamw and muon's AdamW."""
    momentum: Real = Field(default=0.9, ge=0, lt=1)
    """Decay of the sum of gradients. For sgd and muon (default 0.95)."""
    nesterov: Switch = False
    """Nesterov momentum. For sgd and muon (default true)."""
    weight_decay: Real = Field(default=0.1, ge=0, le=1)
    """Decoupled weight decay of matrices. Vectors (norms, biases) are not decayed, unless a group sets a
    decay."""
    clip_norm: Real = Field(default=1.0, ge=0)
    """Maximum global norm of the gradients; larger gradients are scaled down. 0 disables clipping."""
    groups: tuple[ParameterGroup, ...] = Field(default=(), max_length=16)
    """Groups of parameters with other settings. The first group that matches a parameter applies."""

    @model_validator(mode="before")
    @classmethod
    def _fill_own_defaults(cls, raw: Any) -> Any:
        """Fill in the defaults of the optimizer that the file names."""
        if not isinstance(raw, Mapping) or not isinstance(raw.get("type"), str):
            return raw
        return {**OWN_DEFAULTS.get(raw["type"], {}), **raw}


_NO_BETAS: Final = "Remove it, or set type: adamw"
_NO_MOMENTUM: Final = "Remove it; betas are the decays of its moments, or set type: sgd"
OF_OPTIMIZER: Final = (
    Meaningless("betas", "type", ("sgd",), "Write momentum, or set type: adamw"),
    Meaningless("betas", "type", ("adafactor",), _NO_BETAS),
    Meaningless("epsilon", "type", ("lion", "sgd", "adafactor"), _NO_BETAS),
    Meaningless("momentum", "type", ("adamw", "lion"), _NO_MOMENTUM),
    Meaningless("momentum", "type", ("adafactor",), "Remove it, or set type: sgd"),
    Meaningless("nesterov", "type", ("adamw", "lion", "adafactor"), "Remove it"),
)


def check_optimizer(view: View) -> Iterator[Problem]:
    """Check that the optimizer has the keys that are set, and supports the parallelism."""
    if (optimizer := view.get(_OPTIMIZER)) is UNKNOWN:
        return
    yield from meaningless_in(view, tuple(_OPTIMIZER.split(".")), optimizer, OF_OPTIMIZER)

    # Each value is valid by itself. Only the combination fails or trains wrongly.
    found = view.known(f"{_OPTIMIZER}.type", f"{TRAINING}.runtime.parallelism")
    if found is not None and found[0] in OF_WHOLE_TENSORS and found[1] == "fsdp2":
        yield Problem(
            f"{_OPTIMIZER}.type",
            f"{found[0]} cannot be combined with runtime.parallelism fsdp2",
            "its update needs whole matrices, of which each worker holds a part, and nothing is sent between "
            "workers during an update",
            "Set runtime.parallelism: dataParallel, or type: adamw, lion or sgd",
        )
    precision = view.known(f"{_OPTIMIZER}.type", f"{TRAINING}.runtime.precision")
    if precision == ("adafactor", "bf16"):
        yield Problem(
            f"{_OPTIMIZER}.type",
            "adafactor cannot be combined with runtime.precision bf16",
            "its means grow longer with each step, until bf16 rounds what a step adds away",
            "Set runtime.precision: bf16-autocast, or another type",
        )
    muon = view.known(
        f"{_OPTIMIZER}.type", f"{_OPTIMIZER}.nesterov", f"{TRAINING}.runtime.precision"
    )
    if muon == ("muon", False, "bf16"):
        yield Problem(
            f"{_OPTIMIZER}.nesterov",
            "false cannot be combined with type muon and runtime.precision bf16",
            "torch's muon then writes over its momentum, whose length of earlier steps is lost",
            "Set nesterov: true, or runtime.precision: bf16-autocast",
        )

    # The key that should change a value is probably missing or misspelt.
    for path, item in view.items(_GROUPS):
        if item["learningRateRatio"] == 1 and item["weightDecay"] is None:
            remedy = "Add learningRateRatio or weightDecay, or remove it"
            yield Problem(format_path(path), "changes nothing", "it has only names", remedy)


Shape = Literal["linear", "cosine", "mirrorCosine", "exponential", "square", "squareRoot"]


class Piece(Section):
    """A part of the curve of the learning rate."""

    until: StepsOrFraction = Field(gt=0)
    """Step, or fraction of the horizon (``80%``), at which ``ratio`` is reached."""
    ratio: Fraction
    """Learning rate at ``until``, as a fraction of the peak. If it equals the previous ratio, the rate stays
    constant."""
    shape: Shape = "linear"
    """Shape of the curve up to ``until``."""


class Schedule(Section):
    """Learning rate as a pure function of the step. Its length is the horizon, not the stop step."""

    type: Literal[
        "wsd", "linear", "cosine", "constant", "polynomial", "inverseSquareRoot", "pieces"
    ] = "wsd"
    """``wsd``: warm-up, stable, decay at the end. ``inverseSquareRoot``: the peak times √(warm-up / step).
    ``pieces``: any curve."""
    warmup: StepsOrFraction = Field(default=0, ge=0)
    """Steps, or a fraction of the horizon (``5%``), of linear warm-up."""
    start_ratio: Fraction = 0.0
    """Learning rate at the start of the warm-up, as a fraction of the peak."""
    decay: StepsOrFraction = Field(default=0.2, ge=0)
    """Steps, or a fraction of the horizon (``20%``), of the final decay. For wsd only."""
    decay_shape: Shape = "linear"
    """Shape of the decay. ``square`` falls late, ``squareRoot`` (1 - √x) early, and ``mirrorCosine`` is the
    cosine mirrored at the line. For wsd only."""
    power: Real = Field(default=1.0, gt=0, le=100)
    """Exponent p of (1 - x)^p. For polynomial only."""
    minimum_ratio: Fraction = 0.0
    """Learning rate at the end, as a fraction of the peak. Not for constant, inverseSquareRoot and pieces."""
    pieces: tuple[Piece, ...] = Field(default=(), max_length=16)
    """Parts of the curve after the warm-up, in order. The ratio of the last part stays until the end. For
    pieces only."""


_BUT_WSD: Final = (
    "linear", "cosine", "constant", "polynomial", "inverseSquareRoot", "pieces",
)  # fmt: skip
OF_SCHEDULE: Final = (
    Meaningless("decay", "type", _BUT_WSD, "Remove it, or set type: wsd"),
    Meaningless("decayShape", "type", _BUT_WSD, "Remove it, or set type: wsd"),
    Meaningless(
        "power", "type", ("wsd", *(one for one in _BUT_WSD if one != "polynomial")),
        "Remove it, or set type: polynomial",
    ),
    Meaningless(
        "minimumRatio", "type", ("constant", "inverseSquareRoot"),
        "Remove it, or choose another type",
    ),
    Meaningless("minimumRatio", "type", ("pieces",), "Remove it; the last piece has a ratio"),
    Meaningless(
        "pieces", "type", ("wsd", *(one for one in _BUT_WSD if one != "pieces")),
        "Remove them, or set type: pieces",
    ),
)  # fmt: skip


def check_schedule_keys(view: View) -> Iterator[Problem]:
    """Check for keys of the schedule that would silently have no effect with its type, and for required
    keys."""
    if (schedule := view.get(_SCHEDULE)) is UNKNOWN:
        return
    yield from meaningless_in(view, tuple(_SCHEDULE.split(".")), schedule, OF_SCHEDULE)
    if schedule["startRatio"] not in (0, UNKNOWN) and schedule["warmup"] == 0:
        why = "the run begins at the peak"
        yield Problem(
            f"{_SCHEDULE}.startRatio", "has no meaning without a warm-up", why, "Add warmup"
        )
    if schedule["type"] == "pieces" and not schedule["pieces"]:
        yield Problem(
            _PIECES,
            "missing",
            "a schedule of type pieces is made of them",
            "Add one, such as `- {until: 80%, ratio: 100%}`",
        )

    # An exponential decreases by the same factor each step, so it cannot start or end at zero.
    remedy = "Write one above 0, such as 1%, or another shape"
    why = "an exponential falls by the same share each step and never reaches it"
    if (schedule["type"], schedule["decayShape"], schedule["minimumRatio"]) == (
        "wsd", "exponential", 0,
    ):  # fmt: skip
        yield Problem(
            f"{_SCHEDULE}.minimumRatio", "is 0 with decayShape exponential", why, remedy
        )
    before: Any = 1.0
    for path, piece in view.items(_PIECES):
        if piece["shape"] == "exponential" and 0 in (before, piece["ratio"]):
            where = format_path((*path, "ratio"))
            yield Problem(where, "leads to or from 0 with shape exponential", why, remedy)
        before = piece["ratio"]


def check_schedule_fits(view: View) -> Iterator[Problem]:
    """Check that warm-up, decay and pieces fit into the horizon."""
    total = total_steps_of(view)
    found = view.known(f"{_SCHEDULE}.type", f"{_SCHEDULE}.warmup", f"{_SCHEDULE}.decay")
    if found is None:
        return
    kind, warmup, decay = found
    # Other curves decay over all steps after the warm-up, which always fits.
    decay = decay if kind == "wsd" else 0
    if total is not None:
        yield from check_schedule(warmup, decay, total=total)
    elif (
        isinstance(warmup, float)
        and isinstance(decay, float)
        and check_schedule(warmup, decay, total=100)
    ):
        what = (
            f"the warm-up of {warmup * 100:g}% and the final decay of {decay * 100:g}% are more "
            "than the whole horizon"
        )
        yield Problem(f"{_SCHEDULE}.warmup", what, "", "Shorten warmup or decay")

    # Without a length, only fractions can be compared. Assume a run so long that rounding does not matter.
    ends = [piece["until"] for _, piece in view.items(_PIECES)]
    if kind != "pieces" or UNKNOWN in ends:
        return
    are_shares = all(isinstance(one, float) or one == 0 for one in (warmup, *ends))
    if total is not None or are_shares:
        yield from check_pieces(warmup, ends, total=10**9 if total is None else total)


def check_schedule(warmup: int | float, decay: int | float, *, total: int) -> list[Problem]:
    """Return a problem if warm-up and final decay (0 unless wsd) do not fit into ``total`` steps."""
    if isinstance(warmup, float) and isinstance(decay, float):
        # If both are fractions, the result does not depend on the length, and rounding must not affect it.
        fits = Ratio(Decimal(repr(warmup))) + Ratio(Decimal(repr(decay))) <= 1
    else:
        fits = steps_of(warmup, total) + steps_of(decay, total) <= total
    if fits:
        return []
    what = f"the warm-up of {show_steps(warmup, total)}"
    if decay:
        what += f" and the final decay of {show_steps(decay, total)} together are"
    else:
        what += " is"
    remedy = (
        "Shorten warmup or decay, or lengthen the horizon"
        if decay
        else "Shorten warmup, or lengthen the horizon"
    )
    return [
        Problem(
            f"{_SCHEDULE}.warmup",
            f"{what} longer than the horizon of {total} steps",
            "",
            remedy,
        )
    ]


def check_pieces(
    warmup: int | float, ends: Sequence[int | float], *, total: int
) -> list[Problem]:
    """Return a problem for each piece that does not end after the piece before it (the first: after the
    warm-up) and within ``total`` steps."""
    problems: list[Problem] = []
    # Compare in steps, because some pieces may be fractions and others steps.
    last, before = steps_of(warmup, total), f"the warm-up of {show_steps(warmup, total)}"
    for index, end in enumerate(ends):
        where, shown = f"{_PIECES}[{index}].until", show_steps(end, total)
        if steps_of(end, total) > total:
            remedy = f"Lower it to at most {total}, or lengthen the horizon"
            what = f"{shown} is beyond the horizon of {total} steps"
            problems.append(Problem(where, what, "", remedy))
        elif steps_of(end, total) <= last:
            why = "each piece begins where the one before it ends"
            what = f"{shown} is not after {before}"
            problems.append(Problem(where, what, why, "Sort the pieces, or remove one"))
        last, before = steps_of(end, total), f"{shown}, where the piece before it ends"
    return problems


class Ema(Section):
    """An exponential moving average of the trained weights, in fp32, in addition to them."""

    decay: Fraction = Field(gt=0, lt=1)
    """Share of the average that an update keeps, for example 0.999."""
    warmup: Switch = False
    """Start with a smaller share: (1 + n) / (10 + n) after n updates, until ``decay`` is reached."""
    evaluate: Switch = False
    """Evaluate the average instead of the weights."""


def check_ema(view: View) -> Iterator[Problem]:
    """Check that the average replaces the weights only if a worker has both completely."""
    found = view.known(f"{_EMA}.evaluate", f"{TRAINING}.runtime.parallelism")
    if found is not None and found[0] and found[1] == "fsdp2":
        yield Problem(
            f"{_EMA}.evaluate",
            "true cannot be combined with runtime.parallelism fsdp2",
            "it gathers weights from shards of its own, whose place an average cannot take",
            "Set it to false; `evergrad evaluate --weights average` measures checkpoints",
        )


RULES: Final = (check_optimizer, check_schedule_keys, check_schedule_fits, check_ema)
