"""The report of a pod that has evaluated a checkpoint: its termination message, which the operator reads.

A termination message needs neither a port nor a permission on the API server. It exists as long as the pod,
even if no operator runs when the pod ends.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from evergrad_common.contract import MAX_TERMINATION_BYTES

MOST_SETS: Final = 16
MOST_VALUES: Final = 12
"""Most values of one set in a report: loss, perplexity and the task's own metrics."""
MOST_WAITING: Final = 64
"""Most steps in a report, equal to the number of checkpoints that can wait in a run."""
LONGEST_NAME: Final = 64
_LONGEST_NOTE: Final = 512
_LONGEST_VALUE: Final = 32

Values = Mapping[str, str]
"""Values of one set by name, written as Python does, so that no bit is lost."""


@dataclass(frozen=True)
class Evaluated:
    """The evaluation of the checkpoint of ``step``.

    ``passed_over``: why there are no results; empty if there are results. ``waiting``: steps of the other
    checkpoints that are not evaluated yet, the oldest first. ``left_out``: number of sets that did not fit.
    """

    step: int
    results: Mapping[str, Values]
    waiting: tuple[int, ...] = ()
    passed_over: str = ""
    left_out: int = 0


def encode_evaluated(
    step: int,
    rows: Sequence[Mapping[str, Any]],
    *,
    waiting: Sequence[int] = (),
    passed_over: str = "",
) -> bytes:
    """Return the report, at most 4096 bytes. ``rows``: the rows in ``evaluations/``.

    If the rows do not fit, the last sets are left out and counted in the report, and then ``passed_over`` is
    shortened.
    """
    sets: dict[str, dict[str, str]] = {}
    for row in rows:
        found = {
            "loss": row["loss"],
            "perplexity": row["perplexity"],
            **row.get("metrics", {}),
        }
        known = {key: value for key, value in found.items() if value is not None}
        sets[str(row["name"])[:LONGEST_NAME]] = {
            str(key)[:LONGEST_NAME]: repr(value)[:_LONGEST_VALUE]
            for key, value in list(known.items())[:MOST_VALUES]
        }
    names = list(sets)
    kept, note = min(len(names), MOST_SETS), passed_over[:_LONGEST_NOTE]
    while True:
        report = {
            "step": step,
            "results": {name: sets[name] for name in names[:kept]},
            "waiting": list(waiting[:MOST_WAITING]),
            "passedOver": note,
            "leftOut": len(names) - kept,
        }
        data = json.dumps(report, separators=(",", ":")).encode("ascii", errors="replace")
        if len(data) <= MAX_TERMINATION_BYTES or not (kept or note):
            return data[:MAX_TERMINATION_BYTES]
        # Shorten the text, because a report that is cut at a byte cannot be read. A character has up to 12
        # bytes.
        if kept:
            kept -= 1
        else:
            note = note[:-8]


def decode_evaluated(message: str) -> Evaluated | None:
    """Return the report in a termination message, or None if it is not a report. All its parts are
    bounded."""
    # A pod may run any image, so the message may be any text.
    try:
        found: Any = json.loads(message)
        step, waiting = _natural(found["step"]), [_natural(one) for one in found["waiting"]]
        results = {
            str(name)[:LONGEST_NAME]: {
                str(key)[:LONGEST_NAME]: str(value)[:_LONGEST_VALUE]
                for key, value in list(values.items())[:MOST_VALUES]
            }
            for name, values in list(found["results"].items())[:MOST_SETS]
        }
        passed_over, left_out = str(found["passedOver"]), _natural(found["leftOut"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return Evaluated(
        step, results, tuple(waiting[:MOST_WAITING]), passed_over[:_LONGEST_NOTE], left_out
    )


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise ValueError(f"{value!r} is not a step")
    return value
