"""Compares the results of a reloaded checkpoint with the results that the run measured when it saved it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evergrad_trainer.base.records import EvaluationRecord
from evergrad_trainer.observers.history import read_beginnings, read_evaluations_in_time
from evergrad_trainer.run.directory import RunDirectory


@dataclass(frozen=True)
class Compared:
    """Result for one evaluation set. ``verdict``: ``is_equal`` as a text. ``live``: the run's own loss."""

    name: str
    live: float | None
    reloaded: float | None
    is_equal: bool
    verdict: str


def compare_with_run(
    directory: RunDirectory, rows: Sequence[Mapping[str, Any]], *, tolerance: float
) -> list[Compared]:
    """Compare each result in ``rows`` with the run's newest result of the same step and set.

    ``tolerance``: largest relative difference. A set that the run has not measured at this step counts as
    different, because nothing was compared.
    """
    # The last row of a step is valid, as in all reports.
    rows_of_run = read_evaluations_in_time(
        directory.evaluation, [], read_beginnings(directory)
    )
    live = {(one.step, one.name): one for one in rows_of_run}
    found = []
    for row in rows:
        name, step, loss = row["name"], row["step"], row["loss"]
        own = live.get((step, name))
        if own is None:
            verdict = (
                f"the run itself has not measured it at step {step:,}; nothing to compare"
            )
            found.append(Compared(name, None, loss, is_equal=False, verdict=verdict))
            continue
        found.append(_compare(row, own, tolerance))
    return found


def _compare(row: Mapping[str, Any], own: EvaluationRecord, tolerance: float) -> Compared:
    """Compare one result with the run's own result."""
    loss = row["loss"]
    is_known = loss is not None and math.isfinite(loss) and math.isfinite(own.loss)
    is_equal = own.tokens == row["tokens"] and (
        math.isclose(loss, own.loss, rel_tol=tolerance, abs_tol=0.0)
        if is_known
        else loss is None and not math.isfinite(own.loss)
    )
    how = (
        "bit by bit" if is_known and loss == own.loss else f"within {tolerance:g} relative"
    )
    verdict = (
        f"as the run measured it, {how}"
        if is_equal
        else f"differs: {loss!r} over {row['tokens']:,} tokens, and the run measured {own.loss!r} over "
        f"{own.tokens:,}"
    )
    return Compared(
        row["name"],
        own.loss if math.isfinite(own.loss) else None,
        loss,
        is_equal=is_equal,
        verdict=verdict,
    )
