"""The recorded values of a step: the columns of metrics.jsonl, and the metrics that a recipe declares."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Compared = Literal["exactly", "closely", "by request", "told"]
"""How compare-runs compares a column: the values must be equal, be within the tolerance, be equal only with
--exact, or are shown and never count as a difference."""
Kind = Literal["integer", "real", "hash", "word"]
"""Kind of a value. A hash has 16 hex digits. A word is a value of a vocabulary in ``causes``."""


@dataclass(frozen=True)
class Column:
    """One value of a step, as in a row of metrics.jsonl.

    ``aggregate``: how the values of the ranks become one value. ``is_optional``: a row may lack it, because
    not every step has a value or because older versions did not write it. ``is_shown``: the live page, the
    page of a run's files and the trackers show it.
    """

    name: str
    unit: str
    help: str
    aggregate: str
    compared: Compared | None = None
    kind: Kind = "real"
    is_optional: bool = False
    is_shown: bool = False


COLUMNS: Final[tuple[Column, ...]] = (
    Column("step", "", "optimizer step, from 1", "agreed", kind="integer"),
    Column(
        "generation",
        "",
        (
            "number of the group that trained the step; each start and each change of the "
            "world increases it"
        ),
        "agreed",
        "told",
        "integer",
    ),
    Column(
        "world_size",
        "",
        "number of processes that trained the step",
        "agreed",
        "told",
        "integer",
    ),
    Column(
        "loss",
        "nats per valid token",
        "mean over the whole global batch",
        "mean",
        "closely",
        is_shown=True,
    ),
    Column(
        "tokens", "", "tokens of this step, over all processes", "sum", "exactly", "integer"
    ),
    Column(
        "valid_tokens",
        "",
        "tokens of this step that have a loss",
        "sum",
        "exactly",
        "integer",
    ),
    Column(
        "sample_hash",
        "",
        "16 hex digits: the sum modulo 2⁶⁴ of a hash of each sample's id. Equal hashes mean equal samples",
        "sum",
        "exactly",
        "hash",
    ),
    Column(
        "learning_rate",
        "",
        "learning rate of this update",
        "agreed",
        "closely",
        is_shown=True,
    ),
    Column(
        "grad_norm", "", "global norm, before clipping", "norm", "by request", is_shown=True
    ),
    Column(
        "step_seconds",
        "s",
        "wall time of the step on rank 0, the sum of the next five",
        "rank 0",
    ),
    Column("data_seconds", "s", "waiting for samples", "rank 0"),
    Column("forward_backward_seconds", "s", "computing losses and gradients", "rank 0"),
    Column(
        "communication_seconds",
        "s",
        "waiting for and exchanging with other processes",
        "rank 0",
    ),
    Column("optimizer_seconds", "s", "updating the weights", "rank 0"),
    Column("other_seconds", "s", "time outside these phases", "rank 0"),
    Column(
        "rank_skew_seconds",
        "s",
        "additional compute time of the slowest rank, compared with the median rank",
        "maximum less median",
    ),
    Column("time", "Unix s", "end of the step", "rank 0"),
    Column(
        "skipped",
        "",
        (
            "why the step made no update: `loss` or `grad` (not finite), `overflow` (a gradient in fp16, "
            "which lowers the scale), `empty` (no token carries a loss) or `requested` "
            "(`spec.training.skipSteps`); otherwise `null`"
        ),
        "agreed",
        kind="word",
        is_optional=True,
    ),
    Column(
        "loss_scale",
        "",
        "factor of the loss, with precision `fp16-autocast` only; otherwise left out",
        "agreed",
        is_optional=True,
    ),
)
"""The columns of metrics.jsonl, in their order. A recipe's own metrics are next to them, under
``metrics``."""

DERIVED: Final[tuple[Column, ...]] = (
    Column(
        "tokens_per_second",
        "tokens/s",
        "tokens per second of wall time, over the last minute of the generation",
        "sum",
        is_shown=True,
    ),
)
"""Columns that no row contains. Readers compute them from the rows, for example ``tokens_per_second`` with
Throughput."""

SHOWN: Final[tuple[str, ...]] = tuple(one.name for one in COLUMNS if one.is_shown)
"""Columns of a row that each display of the run shows, in addition to DERIVED and the recipe's own
metrics."""

MOST_DECLARED: Final = 32
"""Most metrics that a recipe may declare. Each one is a series of the endpoint, and a number that ranks
exchange at every step."""
_WITH_UNIT = re.compile(r"(?P<help>.*\S)\s*\[(?P<unit>[^\[\]]{1,32})\]", re.DOTALL)
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,63}")


def declare(metrics: Mapping[str, str]) -> tuple[Column, ...]:
    """Return the columns of a recipe's own metrics. ``metrics``: name and meaning of each metric.

    They are compared like losses. A text may end with its unit in brackets: ``"divergence from the teacher
    [nats]"``. Raises ValueError that names all problems.
    """
    # A row contains these names next to the columns, or a table of the report contains them.
    taken = {column.name for column in COLUMNS} | {
        "metrics",
        "name",
        "perplexity",
        "seconds",
    }
    wrong = [
        f"{name!r} is no name; use letters, digits and _"
        for name in metrics
        if not _NAME.fullmatch(name)
    ]
    wrong += [
        f"{name!r} is a column of every run; use another name"
        for name in metrics
        if name in taken
    ]
    # Report all problems together, so that the author of a recipe can fix them in one round.
    if len(metrics) > MOST_DECLARED:
        wrong.append(f"there are {len(metrics)}; {MOST_DECLARED} are possible")
    if wrong:
        raise ValueError("; ".join(wrong))
    columns = []
    for name, text in metrics.items():
        meaning, unit = text.strip(), ""
        if found := _WITH_UNIT.fullmatch(meaning):
            meaning, unit = found["help"], found["unit"]
        columns.append(Column(name, unit, meaning, "mean", "closely"))
    return tuple(columns)
