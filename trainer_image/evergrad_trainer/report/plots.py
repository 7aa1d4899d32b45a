"""The report's plots, drawn by matplotlib as SVG whose colours are the page's CSS variables."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from evergrad_coordinator.text import compact, duration, percent, real, short_count
from evergrad_trainer.records import EvaluationRecord
from evergrad_trainer.report.facts import Facts
from evergrad_trainer.report.series import Curve, broken, envelope, means, smooth
from evergrad_trainer.report.svg import COLORS, draw
from evergrad_trainer.report.tables import last_evaluations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE, NARROW = 960, (460, 270)
"""Pixels. Plots that fill a wide page have a second form of that width."""

_MOST_SETS = 6
_MOST_METRICS = 12
"""Metrics of the recipe that get a plot: a page of more would not be read."""
_MOST_CHANGES = 2000
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
    """Entry of a legend. ``color``: a name of COLORS. ``style``: line, faint, dashed, dot or area. ``value``:
    text beside it."""

    label: str
    color: str
    style: str = "line"
    value: str = ""


@dataclass(frozen=True)
class Plot:
    """Drawn plot. ``svgs``: (CSS class, markup) of one or two forms of the same plot, or none where ``note``
    says why."""

    title: str
    legend: tuple[Legend, ...] = ()
    svgs: tuple[tuple[str, str], ...] = ()
    note: str = ""


@dataclass(frozen=True)
class _Draft:
    """A plot before it is drawn. ``wide``: height of its form for wide pages, if it has one."""

    title: str
    description: str
    legend: Sequence[Legend]
    paint: Callable[["Axes"], None]
    unit: str
    wide: int | None = None
    across: str = "step"
    """Quantity on the x axis; all plots against the step share one range."""


def build_plots(facts: Facts) -> tuple[Plot, ...]:
    """Draw all plots in the order of the page; none for a run without steps. They share one range of
    steps."""
    steps = facts.steps
    if not len(steps):
        return ()
    # All plots against the step share one range, so that the eye can go down the page.
    last = float(steps.step[-1])
    evaluations = [
        one for one in last_evaluations(facts.history.evaluations) if one.step <= last
    ]
    first = min([float(steps.step[0]), *(one.step for one in evaluations)])
    margin = max(0.012 * (last - first), 0.5)
    span = (first - margin, last + margin)
    no_evaluation = Plot("Evaluation loss", note="Nothing has been evaluated.")
    return (
        _draw(_loss_plot(facts), span),
        _draw(_evaluation_plot(evaluations), span) if evaluations else no_evaluation,
        *(
            _draw(draft, span)
            for draft in (
                _learning_rate_plot(facts),
                _speed_plot(facts),
                _norm_plot(facts),
                _split_plot(facts),
                *(
                    _metric_plot(facts, name)
                    for name in list(facts.steps.metrics)[:_MOST_METRICS]
                ),
            )
        ),
        *([_draw(_world_plot(facts), span)] if facts.goodput.changes else []),
    )


def _draw(draft: _Draft, span: tuple[float, float]) -> Plot:
    # The key makes ids that do not change from one report to the next.
    key = draft.title.partition(",")[0].lower().replace(" ", "-")
    forms = (
        [("", NARROW)]
        if draft.wide is None
        else [("narrow", NARROW), ("wide", (WIDE, draft.wide))]
    )

    def paint(axes: "Axes") -> None:
        draft.paint(axes)
        if draft.across == "step":
            axes.set_xlim(*span)

    svgs = tuple(
        (
            form,
            draw(
                paint,
                size=size,
                key=f"{key}{form}",
                unit=draft.unit,
                label=draft.description,
                across=draft.across,
            ),
        )
        for form, size in forms
    )
    return Plot(draft.title, tuple(draft.legend), svgs)


def _finite(values: Any) -> Any:
    return np.where(np.isfinite(values), values, np.nan)


def _loss_plot(facts: Facts) -> _Draft:
    steps, superseded = facts.steps, facts.superseded
    # Fifty windows over the run: the trend shows, and a short run keeps each step.
    window = max(1, len(steps) // 50)
    loss = _finite(steps.loss)
    raw = envelope(steps.step, loss)
    smoothed = means(steps.step, smooth(loss, window), points=500)
    lost = broken(superseded.step, _finite(superseded.loss))
    # Each attempt is a line of its own until there are too many points to draw.
    if len(lost) > 4000:
        lost = envelope(superseded.step, _finite(superseded.loss))
    restarts = [one.resumed_from for one in facts.goodput.restarts if one.resumed_from][-100:]

    def paint(axes: "Axes") -> None:
        # Under the curves, so that they stay readable where there were many.
        for step in restarts:
            axes.axvline(step, color=COLORS["muted"], linewidth=0.8, alpha=0.7, dashes=(3, 3))
        _line(
            axes,
            raw,
            "s1",
            width=0.9 if window > 1 else 1.4,
            opacity=0.38 if window > 1 else 1.0,
        )
        if len(lost):
            _line(axes, lost, "s2", width=1.0, opacity=0.75)
        if window > 1:
            _line(axes, smoothed, "s1", width=1.8)
        _limit_outliers(axes, loss)

    # The legend has what is drawn, and nothing else.
    legend = [Legend("each step", "s1", "faint" if window > 1 else "line")]
    if window > 1:
        legend.append(Legend(f"mean of {window} steps", "s1"))
    if len(lost):
        legend.append(Legend("lost and trained again", "s2"))
    if restarts:
        legend.append(Legend("restart", "muted", "dashed"))
    final = real(float(steps.loss[-1]))
    description = (
        f"Training loss against the step, from {real(float(steps.loss[0]))} to {final}."
    )
    return _Draft("Training loss", description, legend, paint, unit="nats per token", wide=330)


def _evaluation_plot(evaluations: Sequence[EvaluationRecord]) -> _Draft:
    names = list(dict.fromkeys(one.name for one in evaluations))
    # More colours than these cannot be told apart; the table has all sets.
    shown, legend, curves = names[:_MOST_SETS], [], []
    for index, name in enumerate(shown):
        own = [one for one in evaluations if one.name == name]
        x, y = (
            np.array([one.step for one in own], np.int64),
            _finite(np.array([one.loss for one in own], np.float64)),
        )
        curves.append((envelope(x, y), f"s{1 + index}"))
        legend.append(Legend(name, f"s{1 + index}", "dot", real(own[-1].loss)))
    if len(names) > len(shown):
        legend.append(
            Legend(f"and {len(names) - len(shown)} more sets in the table", "muted", "none")
        )

    def paint(axes: "Axes") -> None:
        for curve, color in curves:
            _line(axes, curve, color, width=1.6, marker=len(curve) <= 60)

    return _Draft(
        "Evaluation loss",
        f"Evaluation loss against the step, for {len(names)} set{'s' if len(names) > 1 else ''}.",
        legend,
        paint,
        unit="nats per token",
    )


def _learning_rate_plot(facts: Facts) -> _Draft:
    curve = means(facts.steps.step, _finite(facts.steps.learning_rate), points=600)

    def paint(axes: "Axes") -> None:
        _line(axes, curve, "s1", width=1.6)
        axes.set_ylim(bottom=0)

    peak = compact(float(np.nanmax(curve.y))) if np.isfinite(curve.y).any() else "–"
    legend = [Legend("learning rate", "s1", "line", f"peak {peak}")]
    return _Draft(
        "Learning rate",
        f"Learning rate against the step; its peak is {peak}.",
        legend,
        paint,
        unit="",
    )


def _speed_plot(facts: Facts) -> _Draft:
    steps = facts.steps
    # A step of no measured duration has no speed: it leaves a gap.
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = _finite(steps.tokens / steps.step_seconds)
    curve = means(steps.step, speed, points=300)
    median = float(np.nanmedian(speed)) if np.isfinite(speed).any() else math.nan

    def paint(axes: "Axes") -> None:
        _line(axes, curve, "s1", width=1.4)
        axes.set_ylim(bottom=0)

    legend = [Legend("while training", "s1", "line", f"median {short_count(median)}")]
    return _Draft(
        "Throughput",
        f"Tokens per second against the step; the median is {short_count(median)}.",
        legend,
        paint,
        unit="tokens per second",
    )


def _norm_plot(facts: Facts) -> _Draft:
    norms = _finite(facts.steps.grad_norm)
    window = max(1, len(norms) // 50)
    raw, smoothed = (
        envelope(facts.steps.step, norms),
        means(facts.steps.step, smooth(norms, window), points=400),
    )
    median = real(float(np.nanmedian(norms)), 3) if np.isfinite(norms).any() else "–"

    def paint(axes: "Axes") -> None:
        if window > 1:
            _line(axes, raw, "s1", width=0.8, opacity=0.38)
        _line(axes, smoothed, "s1", width=1.6)
        _limit_outliers(axes, norms, from_zero=True)

    label = f"mean of {window} steps" if window > 1 else "each step"
    legend = [Legend("each step", "s1", "faint")] if window > 1 else []
    legend.append(Legend(label, "s1", "line", f"median {median}"))
    return _Draft(
        "Gradient norm, before clipping",
        "Global gradient norm against the step.",
        legend,
        paint,
        unit="norm",
    )


def _metric_plot(facts: Facts, name: str) -> _Draft:
    """Plan the plot of a metric of the recipe, with the unit and the help that it declares."""
    declared = facts.metrics.get(name, {})
    values = _finite(facts.steps.metrics[name])
    window = max(1, len(values) // 50)
    raw = envelope(facts.steps.step, values)
    smoothed = means(facts.steps.step, smooth(values, window), points=400)
    known = values[np.isfinite(values)]
    last = compact(float(known[-1])) if len(known) else "–"

    def paint(axes: "Axes") -> None:
        if window > 1:
            _line(axes, raw, "s1", width=0.8, opacity=0.38)
        _line(axes, smoothed, "s1", width=1.6)

    legend = [Legend("each step", "s1", "faint")] if window > 1 else []
    legend.append(
        Legend(
            f"mean of {window} steps" if window > 1 else "each step",
            "s1",
            "line",
            f"last {last}",
        )
    )
    description = f"{name} against the step; the last is {last}."
    # The title's first part makes the ids, and is all there is where an older version wrote the events.
    title = ", ".join(text for text in (name, declared.get("help", "").rstrip(".")) if text)
    return _Draft(title, description, legend, paint, unit=declared.get("unit", ""))


def _split_plot(facts: Facts) -> _Draft:
    steps = facts.steps
    curves = [
        means(steps.step, _finite(getattr(steps, field)), points=150) for field, _ in PHASES
    ]
    averages = [
        float(np.nanmean(getattr(steps, field)))
        if np.isfinite(getattr(steps, field)).any()
        else 0.0
        for field, _ in PHASES
    ]
    # Milliseconds for small models: an axis of 0.00 says nothing.
    total = sum(averages) or 1.0
    scale, unit = (1.0, "seconds per step") if total >= 1 else (1e3, "milliseconds per step")

    def paint(axes: "Axes") -> None:
        x, layers = curves[0].x, [np.nan_to_num(curve.y) * scale for curve in curves]
        colors = [COLORS[f"p{1 + index}"] for index in range(len(layers))]
        # Areas need a width: one or two steps are drawn as bars.
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
        axes.set_ylim(bottom=0)

    legend = [
        Legend(
            label,
            f"p{1 + index}",
            "area",
            f"{duration(averages[index])}, {percent(averages[index] / total)}",
        )
        for index, (_, label) in enumerate(PHASES)
    ]
    return _Draft(
        "What a step consists of",
        "Seconds of a step by phase, stacked, against the step.",
        legend,
        paint,
        unit=unit,
        wide=250,
    )


def _world_plot(facts: Facts) -> _Draft:
    """Plan the one plot over time: where training stands still, no step goes by."""
    sizes = facts.goodput.world_sizes[-_MOST_CHANGES:]
    begin = facts.goodput.world_sizes[0][0]
    elapsed = sizes[-1][0] - begin
    # The largest unit that makes at least five of it: hours for a day, days for a week.
    unit, seconds = next(
        ((unit, one) for unit, one in _TIME_UNITS if elapsed >= 5 * one), _TIME_UNITS[-1]
    )
    x = np.array([(time - begin) / seconds for time, _ in sizes], np.float64)
    y = np.array([size for _, size in sizes], np.float64)
    # By time, not by change: a short spell of one process must not weigh as much as a day of ten.
    lengths = np.clip(np.diff(x), 0.0, None)
    mean = float((y[:-1] * lengths).sum() / lengths.sum()) if lengths.sum() > 0 else float(y[0])

    def paint(axes: "Axes") -> None:
        axes.step(x, y, where="post", color=COLORS["s1"], linewidth=1.6)
        axes.set_ylim(bottom=0)

    numbers = f"at most {int(y.max())}, {mean:.1f} on average"
    legend = [Legend("processes that train together", "s1", "line", numbers)]
    description = f"Processes that train together, against time: {numbers}."
    return _Draft(
        "World size",
        description,
        legend,
        paint,
        unit="processes",
        across=f"{unit} since the start",
        wide=200,
    )


def _line(
    axes: "Axes",
    curve: Curve,
    color: str,
    *,
    width: float,
    opacity: float = 1.0,
    marker: bool = False,
) -> None:
    # A line through one point is invisible.
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


def _limit_outliers(axes: "Axes", values: Any, *, from_zero: bool = False) -> None:
    """Take a logarithmic axis where a linear one would press nearly everything onto its lower edge."""
    # Quantiles of nothing are an error.
    finite = values[np.isfinite(values)]
    if not len(finite):
        return
    low, middle, high = np.quantile(finite, [0.0, 0.5, 1.0])
    if low > 0 and high > 30 * middle:
        axes.set_yscale("log")
    elif from_zero:
        axes.set_ylim(bottom=0)
