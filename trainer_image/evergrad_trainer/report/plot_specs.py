"""Drafts of the report's plots: the curves, legend and texts of each plot before it is drawn."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from evergrad_common.text import compact, duration, percent, real, short_count
from evergrad_trainer.base.records import EvaluationRecord
from evergrad_trainer.report.facts import ReportFacts
from evergrad_trainer.report.series import (
    Curve,
    Parts,
    Reals,
    SeriesRows,
    broken,
    envelope,
    means,
    smooth,
)
from evergrad_trainer.report.svg import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_SETS = 6
"""Maximum number of evaluation sets in one plot. More colours are not distinguishable."""
_MOST_CHANGES = 2000
"""Maximum number of changes of the world in one plot, newest first. More would be narrower than a pixel."""
_MOST_RESTARTS = 100
"""Maximum number of restarts that are marked, newest first. More marks would hide the curve."""
_LARGEST = 1e300
"""Largest magnitude of a value that is drawn, because the span of an axis must be finite too."""
_TIME_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
PHASES = (
    ("forward_backward_seconds", "forward and backward"),
    ("communication_seconds", "communication"),
    ("optimizer_seconds", "optimizer"),
    ("data_seconds", "waiting for data"),
    ("other_seconds", "other"),
)


@dataclass(frozen=True)
class Legend:
    """An entry of a legend. ``color``: a name of COLORS. ``style``: line, faint, dashed, dot or area.
    ``value``: text next to the label."""

    label: str
    color: str
    style: str = "line"
    value: str = ""


@dataclass(frozen=True)
class Chart:
    """A plot for a browser that can run scripts."""

    x: Reals
    curves: Sequence[Parts]
    """One curve for each of the first entries of the legend."""
    form: str = "line"
    """``line``, ``points`` (a line across all gaps), ``stairs`` or ``stack``."""
    marks: Sequence[int] = ()
    """Steps of restarts."""


@dataclass(frozen=True)
class Draft:
    """A plot before it is drawn. ``wide``: height of the variant for wide pages, if there is one."""

    title: str
    description: str
    legend: Sequence[Legend]
    paint: Callable[["Axes"], None]
    unit: str
    wide: int | None = None
    across: str = "step"
    """Quantity on the x axis. All plots against the step have the same range."""
    scale: str = ""
    """Scale of the y axis: ``zero`` (begins at 0), ``logarithmic``, or empty for the range of the values."""
    chart: Chart | None = None


def _finite(values: Any) -> Any:
    return np.where(np.abs(values) <= _LARGEST, values, np.nan)


def loss_plot(facts: ReportFacts) -> Draft:
    """Plan the plot of the training loss: each step, the trend, lost steps and restarts."""
    steps, superseded = facts.steps, facts.superseded
    # Use fifty windows over the run, so that the trend is visible and a short run shows each step.
    window = max(1, len(steps) // 50)
    loss = _finite(steps.loss)
    is_smoothed = window > 1
    trend = smooth(loss, window)
    raw = envelope(steps.step, loss)
    smoothed = means(steps.step, trend, points=500)
    lost = broken(superseded.step, _finite(superseded.loss))
    # Draw each attempt as a separate line, unless there are too many points.
    if len(lost) > 4000:
        lost = envelope(superseded.step, _finite(superseded.loss))
    rows = SeriesRows(steps.step)
    curves = [rows.bands(loss)]
    resumed = [one.resumed_from for one in facts.goodput.restarts]
    restarts = [step for step in resumed if step][-_MOST_RESTARTS:]

    def paint(axes: "Axes") -> None:
        # Draw the marks under the curves, so that the curves stay readable.
        for step in restarts:
            axes.axvline(
                step, color=COLORS["muted"], linewidth=0.8, alpha=0.7, dashes=(3, 3)
            )
        if is_smoothed:
            _line(axes, raw, "s1", width=0.9, opacity=0.38)
        else:
            _line(axes, raw, "s1", width=1.4)
        if len(lost):
            _line(axes, lost, "s2", width=1.0, opacity=0.75)
        # Draw the trend last, so that it lies above the steps.
        if is_smoothed:
            _line(axes, smoothed, "s1", width=1.8)

    # The legend lists only curves that are drawn.
    legend = [Legend("each step", "s1", "faint" if is_smoothed else "line")]
    if is_smoothed:
        legend.append(Legend(f"mean of {window} steps", "s1"))
        curves.append(rows.means(trend))
    if len(lost):
        legend.append(Legend("lost and trained again", "s2"))
        curves.append(rows.scattered(superseded.step, _finite(superseded.loss)))
    if restarts:
        legend.append(Legend("restart", "muted", "dashed"))
    first, final = real(float(steps.loss[0])), real(float(steps.loss[-1]))
    description = f"Training loss against the step, from {first} to {final}."
    return Draft(
        "Training loss",
        description,
        legend,
        paint,
        unit=facts.loss_unit,
        wide=330,
        scale=_scale_of(loss),
        chart=Chart(rows.x, curves, marks=restarts),
    )


def evaluation_plot(evaluations: Sequence[EvaluationRecord], *, unit: str) -> Draft:
    """Plan the plot of the evaluation losses, with one curve for each set."""
    names = list(dict.fromkeys(one.name for one in evaluations))
    # More colours are not distinguishable; the table lists all sets.
    shown = names[:_MOST_SETS]
    legend: list[Legend] = []
    curves: list[tuple[Curve, str]] = []
    charted: list[Parts] = []
    rows = SeriesRows(np.unique([one.step for one in evaluations if one.name in shown]))
    for number, name in enumerate(shown, start=1):
        own = [one for one in evaluations if one.name == name]
        steps = np.array([one.step for one in own], np.int64)
        losses = _finite(np.array([one.loss for one in own], np.float64))
        color = f"s{number}"
        curves.append((envelope(steps, losses), color))
        charted.append(rows.scattered(steps, losses))
        legend.append(Legend(name, color, "dot", real(own[-1].loss)))
    if more := len(names) - len(shown):
        legend.append(Legend(f"and {more} more sets in the table", "muted", "none"))

    def paint(axes: "Axes") -> None:
        for curve, color in curves:
            _line(
                axes,
                curve,
                color,
                width=1.6,
                marker=len(curve) <= 60,
            )

    sets = f"{len(names)} set{'s' if len(names) > 1 else ''}"
    description = f"Evaluation loss against the step, for {sets}."
    return Draft(
        "Evaluation loss",
        description,
        legend,
        paint,
        unit=unit,
        chart=Chart(rows.x, charted, form="points"),
    )


def learning_rate_plot(facts: ReportFacts) -> Draft:
    """Plan the plot of the learning rate."""
    rates, rows = _finite(facts.steps.learning_rate), SeriesRows(facts.steps.step)
    curve = means(facts.steps.step, rates, points=600)

    def paint(axes: "Axes") -> None:
        _line(axes, curve, "s1", width=1.6)

    peak = compact(float(np.nanmax(curve.y))) if np.isfinite(curve.y).any() else "–"
    legend = [Legend("learning rate", "s1", "line", f"peak {peak}")]
    description = f"Learning rate against the step; its peak is {peak}."
    return Draft(
        "Learning rate",
        description,
        legend,
        paint,
        unit="",
        scale="zero",
        chart=Chart(rows.x, [rows.means(rates)]),
    )


def speed_plot(facts: ReportFacts) -> Draft:
    """Plan the plot of tokens per second, or of samples per second if they are not text."""
    steps = facts.steps
    # A step without a measured duration has no speed and leaves a gap.
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = _finite(steps.tokens / steps.step_seconds)
    curve, rows = means(steps.step, speed, points=300), SeriesRows(steps.step)
    median = float(np.nanmedian(speed)) if np.isfinite(speed).any() else math.nan

    def paint(axes: "Axes") -> None:
        _line(axes, curve, "s1", width=1.4)

    shown = short_count(median)
    legend = [
        Legend(
            "while training",
            "s1",
            "line",
            f"median {shown}",
        )
    ]
    description = f"{facts.unit_read.capitalize()} per second against the step; the median is {shown}."
    return Draft(
        "Throughput",
        description,
        legend,
        paint,
        unit=f"{facts.unit_read} per second",
        scale="zero",
        chart=Chart(rows.x, [rows.means(speed)]),
    )


def norm_plot(facts: ReportFacts) -> Draft:
    """Plan the plot of the gradient norm."""
    norms = _finite(facts.steps.grad_norm)
    window = max(1, len(norms) // 50)
    trend = smooth(norms, window)
    raw = envelope(facts.steps.step, norms)
    smoothed = means(facts.steps.step, trend, points=400)
    median = real(float(np.nanmedian(norms)), 3) if np.isfinite(norms).any() else "–"

    def paint(axes: "Axes") -> None:
        if window > 1:
            _line(axes, raw, "s1", width=0.8, opacity=0.38)
        _line(axes, smoothed, "s1", width=1.6)

    label = f"mean of {window} steps" if window > 1 else "each step"
    legend = [Legend("each step", "s1", "faint")] if window > 1 else []
    legend.append(Legend(label, "s1", "line", f"median {median}"))
    # Show the norm before clipping, because clipping would hide large gradients.
    title = "Gradient norm, before clipping"
    return Draft(
        title,
        "Global gradient norm against the step.",
        legend,
        paint,
        unit="norm",
        scale=_scale_of(norms) or "zero",
        chart=_chart_of_trend(facts, trend, each=norms if window > 1 else None),
    )


def metric_plot(facts: ReportFacts, name: str) -> Draft:
    """Plan the plot of a metric of the recipe, with its declared unit and help text."""
    declared = facts.metrics.get(name, {})
    values = _finite(facts.steps.metrics[name])
    window = max(1, len(values) // 50)
    trend = smooth(values, window)
    raw = envelope(facts.steps.step, values)
    smoothed = means(facts.steps.step, trend, points=400)
    known = values[np.isfinite(values)]
    last = compact(float(known[-1])) if len(known) else "–"

    def paint(axes: "Axes") -> None:
        if window > 1:
            _line(axes, raw, "s1", width=0.8, opacity=0.38)
        _line(axes, smoothed, "s1", width=1.6)

    legend = [Legend("each step", "s1", "faint")] if window > 1 else []
    label = f"mean of {window} steps" if window > 1 else "each step"
    legend.append(Legend(label, "s1", "line", f"last {last}"))
    description = f"{name} against the step; the last is {last}."
    # The ids depend on the first part of the title. Events of older versions have no help text.
    meaning = declared.get("help", "").rstrip(".")
    title = f"{name}, {meaning}" if meaning else name
    return Draft(
        title,
        description,
        legend,
        paint,
        unit=declared.get("unit", ""),
        chart=_chart_of_trend(facts, trend, each=values if window > 1 else None),
    )


def split_plot(facts: ReportFacts) -> Draft:
    """Plan the plot of the phases of a step, stacked."""
    steps = facts.steps
    curves: list[Curve] = []
    averages: list[float] = []
    phases = [_finite(getattr(steps, name)) for name, _ in PHASES]
    for seconds in phases:
        curves.append(means(steps.step, seconds, points=150))
        # numpy warns about the mean of an empty array.
        averages.append(float(np.nanmean(seconds)) if np.isfinite(seconds).any() else 0.0)

    # Use milliseconds for small models, because an axis of 0.00 s is not readable.
    total = sum(averages) or 1.0
    scale, unit = (
        (1.0, "seconds per step") if total >= 1 else (1e3, "milliseconds per step")
    )

    def paint(axes: "Axes") -> None:
        x = curves[0].x
        layers = [np.nan_to_num(curve.y) * scale for curve in curves]
        colors = [COLORS[f"p{number}"] for number in range(1, len(layers) + 1)]
        # Draw one or two steps as bars, because areas need a width.
        if len(x) < 3:
            for index, layer in enumerate(layers):
                axes.bar(
                    x,
                    layer,
                    width=0.5,
                    bottom=np.sum(layers[:index], axis=0),
                    color=colors[index],
                    linewidth=0,
                )
        else:
            axes.stackplot(x, *layers, colors=colors, linewidth=0)

    legend = []
    for number, (_, label) in enumerate(PHASES, start=1):
        seconds = averages[number - 1]
        value = f"{duration(seconds)}, {percent(seconds / total)}"
        legend.append(Legend(label, f"p{number}", "area", value))
    description = "Seconds of a step by phase, stacked, against the step."
    rows = SeriesRows(steps.step)
    chart = Chart(rows.x, [rows.means(seconds * scale) for seconds in phases], form="stack")
    return Draft(
        "What a step consists of",
        description,
        legend,
        paint,
        unit=unit,
        wide=250,
        scale="zero",
        # Bars have no interactive chart.
        chart=chart if len(steps) >= 3 else None,
    )


def world_plot(facts: ReportFacts) -> Draft:
    """Plan the plot of the world size over time, not over steps, because pauses have no steps."""
    sizes = facts.goodput.world_sizes[-_MOST_CHANGES:]
    begin = facts.goodput.world_sizes[0][0]
    elapsed = sizes[-1][0] - begin
    # Use the largest unit of which the run has at least five: hours for a day, days for a week.
    fitting = [one for one in _TIME_UNITS if elapsed >= 5 * one[1]]
    unit, seconds = fitting[0] if fitting else _TIME_UNITS[-1]
    x = np.array([(time - begin) / seconds for time, _ in sizes], np.float64)
    y = np.array([size for _, size in sizes], np.float64)
    # Weight the mean by time: a minute with one process must not count as much as a day with ten.
    lengths = np.clip(np.diff(x), 0.0, None)
    mean = (
        float((y[:-1] * lengths).sum() / lengths.sum())
        if lengths.sum() > 0
        else float(y[0])
    )

    def paint(axes: "Axes") -> None:
        axes.step(
            x,
            y,
            where="post",
            color=COLORS["s1"],
            linewidth=1.6,
        )

    numbers = f"at most {int(y.max())}, {mean:.1f} on average"
    legend = [
        Legend(
            "processes that train together",
            "s1",
            "line",
            numbers,
        )
    ]
    description = f"Processes that train together, against time: {numbers}."
    return Draft(
        "World size",
        description,
        legend,
        paint,
        unit="processes",
        across=f"{unit} since the start",
        wide=200,
        scale="zero",
        # Clocks of hosts differ slightly, but the x values of a chart must not decrease.
        chart=Chart(np.maximum.accumulate(x), [(y,)], form="stairs"),
    )


def _chart_of_trend(facts: ReportFacts, trend: Reals, *, each: Reals | None) -> Chart:
    """Build the chart of a trend, with the values of each step under it if they differ from the trend."""
    rows = SeriesRows(facts.steps.step)
    curves = [rows.means(trend)]
    if each is not None:
        curves.insert(0, rows.bands(each))
    return Chart(rows.x, curves)


def _line(
    axes: "Axes",
    curve: Curve,
    color: str,
    *,
    width: float,
    opacity: float = 1.0,
    marker: bool = False,
) -> None:
    # A line with a single point is invisible, so draw a marker.
    is_point = marker or int(np.count_nonzero(np.isfinite(curve.y))) == 1
    axes.plot(
        curve.x,
        curve.y,
        color=COLORS[color],
        linewidth=width,
        alpha=opacity,
        marker="o" if is_point else "",
        markersize=3.4 if len(curve) > 1 else 5,
        markeredgewidth=0,
    )


def _scale_of(values: Reals) -> str:
    """Choose a logarithmic axis if a linear axis would show nearly all values at its lower edge."""
    # Quantiles of an empty array raise an error.
    finite = values[np.isfinite(values)]
    if not len(finite):
        return ""
    low, middle, high = np.quantile(finite, [0.0, 0.5, 1.0])
    return "logarithmic" if low > 0 and high > 30 * middle else ""
