"""Returns names of metrics for queries, and checks them against the catalogue."""

import re
from typing import Final

from evergrad_common.metrics import COORDINATOR, NODE, OPERATOR, TRAINER
from evergrad_common.metrics.series import Series

RUN: Final = "run_namespace, run"
"""The labels that identify a run. The chart's PodMonitor adds them to the metrics of trainers and
coordinators; the operator exports them itself."""
_CATALOGUE: Final[dict[str, Series]] = {
    one.name: one for one in (*TRAINER, *NODE, *COORDINATOR, *OPERATOR)
}
_OF_TARGETS: Final = frozenset(
    {"namespace", "pod", "container", "endpoint", "job", "instance", "run_namespace", "run"}
)
"""Labels that the monitors' jobs and relabelings add to the metrics of every target."""
_MATCHER: Final = re.compile(r'(\w+)(?:=|!=|=~|!~)"[^"]*"')
_SUFFIXES: Final = {"histogram": ("_bucket", "_sum", "_count")}


def metric(name: str, selector: str = "") -> str:
    """Return the exported name of a metric of the catalogue, with a selector such as ``phase="Running"``.

    For a histogram, ``name`` ends with ``_bucket``, ``_sum`` or ``_count``. Raises KeyError if no component
    exports the metric, and ValueError if it lacks a label of the selector. A renamed metric therefore cannot
    leave an empty panel.
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
    if not selector:
        return exported
    for matcher in selector.split(", "):
        parsed = _MATCHER.fullmatch(matcher)
        if parsed is None or parsed[1] not in labels_of(name):
            raise ValueError(f"{name}: {matcher!r} is no matcher of a label that it has")
    return f"{exported}{{{selector}}}"


PROCESS: Final = (
    "process_resident_memory_bytes",
    "process_cpu_seconds_total",
    "process_start_time_seconds",
)
"""Metrics of a process that every client library exports, under names without a prefix."""


def process(name: str, selector: str) -> str:
    """Return a metric of PROCESS with a selector of labels that targets have. Raises KeyError and ValueError
    like `metric`. The selector is required, because everything that is scraped has such a metric."""
    if name not in PROCESS:
        raise KeyError(name)
    for matcher in selector.split(", "):
        parsed = _MATCHER.fullmatch(matcher)
        if parsed is None or parsed[1] not in _OF_TARGETS:
            raise ValueError(
                f"{name}: {matcher!r} is no matcher of a label that a target has"
            )
    return f"{name}{{{selector}}}"


def labels_of(name: str) -> frozenset[str]:
    """Return all labels of a metric of the catalogue, as Prometheus stores it. ``name``: as in `metric`."""
    base, _, suffix = name.rpartition("_")
    found = _CATALOGUE[name] if name in _CATALOGUE else _CATALOGUE[base]
    of_histogram = {"le"} if name not in _CATALOGUE and suffix == "bucket" else set()
    return _OF_TARGETS | of_histogram | {*found.labels}


def by_run(aggregate: str, expression: str) -> str:
    """Return ``expression`` as one value per run: several pods may export a metric, and a replaced pod is a
    new one."""
    return f"{aggregate} by ({RUN}) ({expression})"


def rate(name: str, window: str, selector: str = "") -> str:
    """Return the increase of a counter per second, as one value per run."""
    return by_run("sum", f"rate({metric(name, selector)}[{window}])")


def increase(name: str, window: str, selector: str = "") -> str:
    """Return the increase of a counter in ``window``, as one value per run."""
    return by_run("sum", f"increase({metric(name, selector)}[{window}])")


def count_increase(name: str, window: str, selector: str = "") -> str:
    """Return the increase of a counter of whole items. ``increase`` extrapolates, for example to 5.06 for 5
    items."""
    return f"round({increase(name, window, selector)})"


def in_phase(*phases: str) -> str:
    """Return 1 for each run that is in one of these phases."""
    among = "|".join(phases)
    return by_run("max", metric("operator_run_phase", f'phase=~"{among}"'))
