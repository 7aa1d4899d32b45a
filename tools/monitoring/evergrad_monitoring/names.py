"""Names of metrics for queries, checked against the catalogue as they are used."""

import re
from typing import Final

from evergrad_common.metrics import COORDINATOR, NODE, OPERATOR, TRAINER
from evergrad_common.metrics.series import Series

RUN: Final = "run_namespace, run"
"""The labels that tell runs apart. The chart's PodMonitor gives them to what trainers and coordinators
serve; the operator serves them itself."""
_CATALOGUE: Final[dict[str, Series]] = {
    one.name: one for one in (*TRAINER, *NODE, *COORDINATOR, *OPERATOR)
}
_OF_TARGETS: Final = frozenset(
    {"namespace", "pod", "container", "endpoint", "job", "instance", "run_namespace", "run"}
)
"""Labels that the monitors' jobs and relabelings give to whatever a target serves."""
_MATCHER: Final = re.compile(r'(\w+)(?:=|!=|=~|!~)"[^"]*"')
_SUFFIXES: Final = {"histogram": ("_bucket", "_sum", "_count")}


def metric(name: str, selector: str = "") -> str:
    """The exported name of a metric of the catalogue, with a selector such as ``phase="Running"``.

    Of a histogram, ``name`` ends with ``_bucket``, ``_sum`` or ``_count``. Raises KeyError for a metric that
    nothing exports, and ValueError for a label that it does not have, so that a renamed one cannot leave an
    empty panel behind.
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
"""Metrics of a process that every client library has, under names without a prefix."""


def process(name: str, selector: str) -> str:
    """A metric of PROCESS with a selector of labels that targets have. Raises KeyError and ValueError as
    `metric` does: everything that is scraped has such a metric, so that none is shown without a selector."""
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
    """All labels of a metric of the catalogue as Prometheus stores it. ``name`` is as in `metric`."""
    base, _, suffix = name.rpartition("_")
    found = _CATALOGUE[name] if name in _CATALOGUE else _CATALOGUE[base]
    of_histogram = {"le"} if name not in _CATALOGUE and suffix == "bucket" else set()
    return _OF_TARGETS | of_histogram | {*found.labels}


def by_run(aggregate: str, expression: str) -> str:
    """``expression``, one value a run: several pods may serve a metric, and a replaced pod is another one."""
    return f"{aggregate} by ({RUN}) ({expression})"


def rate(name: str, window: str, selector: str = "") -> str:
    """What a counter gains a second, one value a run."""
    return by_run("sum", f"rate({metric(name, selector)}[{window}])")


def increase(name: str, window: str, selector: str = "") -> str:
    """What a counter gains in ``window``, one value a run."""
    return by_run("sum", f"increase({metric(name, selector)}[{window}])")


def count_increase(name: str, window: str, selector: str = "") -> str:
    """The same of a counter of whole things. ``increase`` estimates up to the window's ends: 5.06 for 5."""
    return f"round({increase(name, window, selector)})"


def in_phase(*phases: str) -> str:
    """1 for each run that is in one of these phases."""
    among = "|".join(phases)
    return by_run("max", metric("operator_run_phase", f'phase=~"{among}"'))
