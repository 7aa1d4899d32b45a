"""Names of metrics for queries, checked against the catalogue as they are used."""

from typing import Final

from evergrad_coordinator.metrics import COORDINATOR, NODE, OPERATOR, TRAINER
from evergrad_coordinator.metrics.series import Series

RUN: Final = "run_namespace, run"
"""The labels that tell runs apart. The chart's PodMonitor gives them to what trainers and coordinators
serve; the operator serves them itself."""
_CATALOGUE: Final[dict[str, Series]] = {
    one.name: one for one in (*TRAINER, *NODE, *COORDINATOR, *OPERATOR)
}
_SUFFIXES: Final = {"histogram": ("_bucket", "_sum", "_count")}


def metric(name: str, selector: str = "") -> str:
    """The exported name of a metric of the catalogue, with a selector such as ``phase="Running"``.

    Of a histogram, ``name`` ends with ``_bucket``, ``_sum`` or ``_count``. Raises KeyError for a metric that
    nothing exports, so that a renamed metric cannot leave an empty panel behind.
    """
    found = _CATALOGUE.get(name)
    if found is None:
        base, _, suffix = name.rpartition("_")
        found = _CATALOGUE[base]
        if f"_{suffix}" not in _SUFFIXES.get(found.kind, ()):
            raise KeyError(name)
        exported = f"{found.exported}_{suffix}"
    else:
        if found.kind == "histogram":
            raise KeyError(f"{name}: is a histogram, which has no series of that name")
        exported = found.exported
    return f"{exported}{{{selector}}}" if selector else exported


def by_run(aggregate: str, expression: str) -> str:
    """``expression``, one value a run: several pods may serve a metric, and a replaced pod is another one."""
    return f"{aggregate} by ({RUN}) ({expression})"


def rate(name: str, window: str, selector: str = "") -> str:
    """What a counter gains a second, one value a run."""
    return by_run("sum", f"rate({metric(name, selector)}[{window}])")


def increase(name: str, window: str, selector: str = "") -> str:
    """What a counter gains in ``window``, one value a run."""
    return by_run("sum", f"increase({metric(name, selector)}[{window}])")


def in_phase(*phases: str) -> str:
    """1 for each run that is in one of these phases."""
    among = "|".join(phases)
    return by_run("max", metric("operator_run_phase", f'phase=~"{among}"'))
