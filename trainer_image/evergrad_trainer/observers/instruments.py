"""The trainer's Prometheus metrics of one run, made from the catalogue:
evergrad_common.metrics.TRAINER."""

from collections.abc import Iterable
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from evergrad_common.causes import CHANGES, LOSSES, SKIPS, TROUBLES
from evergrad_common.metrics import TRAINER, Series

KINDS = ("collapse", "divergence", "plateau", "early stop")
"""Kinds of monitors."""
PHASES = (
    "data",
    "forward_backward",
    "comm_wait",
    "optimizer",
    "checkpoint",
    "eval",
    "other",
)
"""Phases of the time after the first step, as named in the Prometheus metrics."""
NON_FINITE = ("loss", "grad")
_BEGINS: dict[str, Iterable[tuple[str, ...]]] = {
    "steps_total": [()],
    "tokens_total": [()],
    "samples_total": [()],
    "checkpoint_blocking_seconds_total": [()],
    "productive_seconds_total": [()],
    "step_phase_seconds_total": [(phase,) for phase in PHASES],
    "lost_seconds_total": [(cause,) for cause in LOSSES],
    "world_changes_total": [(cause,) for cause in CHANGES],
    "nonfinite_total": [(what,) for what in NON_FINITE],
    "skipped_steps_total": [(why,) for why in SKIPS],
    "alerts_total": [(kind,) for kind in KINDS],
    "checkpoint_failures_total": [
        *(("save", trouble) for trouble in TROUBLES),
        ("load", "invalid"),
    ],
}
"""Label values with which a counter starts at 0. If a counter first appears above 0, ``rate`` misses the
increase."""


def build_series(
    series: Iterable[Series], *labels: str, registry: CollectorRegistry
) -> dict[str, Gauge | Counter | Histogram]:
    """Build the collectors of these entries of the catalogue, by name. ``labels`` precede the own labels."""
    made: dict[str, Gauge | Counter | Histogram] = {}
    for one in series:
        own = tuple(label for label in one.labels if label not in labels)
        names = (*labels, *own)
        text = f"{one.help}."
        if one.kind == "gauge":
            made[one.name] = Gauge(one.exported, text, names, registry=registry)
        elif one.kind == "counter":
            made[one.name] = Counter(one.exported, text, names, registry=registry)
        else:
            made[one.name] = Histogram(
                one.exported,
                text,
                names,
                buckets=one.buckets,
                registry=registry,
            )
    return made


class Instruments:
    """All metrics of one run in one registry. Counters start at 0 when they are created; a gauge appears with
    its first value.

    Names are from the catalogue. In calls, labels follow the value in the catalogue's order, without ``run``.
    """

    def __init__(self, registry: CollectorRegistry, run: str) -> None:
        self._run = run
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        for name, one in build_series(TRAINER, "run", registry=registry).items():
            if isinstance(one, Gauge):
                self._gauges[name] = one
            elif isinstance(one, Counter):
                self._counters[name] = one
            else:
                self._histograms[name] = one
        # Start counters at 0, because rate() misses the increase of a counter that first appears above 0.
        for name, rows in _BEGINS.items():
            for row in rows:
                self._counters[name].labels(run, *row)

    def describe(self, name: str, more: str) -> None:
        """Append ``more`` to a gauge's help text; its values are cleared."""
        # The client library cannot change a help text, so create the gauge again.
        self._registry.unregister(self._gauges[name])
        (series,) = [one for one in TRAINER if one.name == name]
        longer = replace(series, help=f"{series.help}{more}")
        made = build_series([longer], "run", registry=self._registry)[name]
        assert isinstance(made, Gauge)  # noqa: S101 - the catalogue says so
        self._gauges[name] = made

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._gauges[name].labels(self._run, *labels).set(value)

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Raise a counter by ``amount``."""
        self._counters[name].labels(self._run, *labels).inc(amount)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add one value to a histogram."""
        self._histograms[name].labels(self._run, *labels).observe(value)

    def clear(self, *names: str) -> None:
        """Remove the values of these gauges until they are set again."""
        for name in names:
            self._gauges[name].clear()

    def forget_gauges(self) -> None:
        """Remove the values of all gauges, for example when rank 0 moves to another node. Counters stay."""
        self.clear(*self._gauges)
