"""The report's plots: SVG pictures drawn by matplotlib, whose colours are the page's CSS variables.

If scripts can run, the browser replaces them with charts.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evergrad_coordinator.rules.downsampled_series import plain_numbers
from evergrad_trainer.report.facts import ReportFacts
from evergrad_trainer.report.plot_specs import (
    Draft,
    Legend,
    evaluation_plot,
    learning_rate_plot,
    loss_plot,
    metric_plot,
    norm_plot,
    speed_plot,
    split_plot,
    world_plot,
)
from evergrad_trainer.report.svg import draw
from evergrad_trainer.report.tables import last_evaluations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE, NARROW = 960, (460, 270)
"""Sizes in pixels. Plots that fill a wide page have a second variant with the width WIDE."""

_MOST_METRICS = 12
"""Maximum number of recipe metrics with a plot; a page with more is not readable."""


@dataclass(frozen=True)
class Plot:
    """A drawn plot. ``svgs``: (CSS class, markup) of one or two variants of the plot; empty if there is no
    plot, for the reason in ``note``."""

    title: str
    legend: tuple[Legend, ...] = ()
    svgs: tuple[tuple[str, str], ...] = ()
    note: str = ""
    chart: dict[str, Any] | None = None
    """The same plot for report.js, as JSON values."""


def build_plots(facts: ReportFacts) -> tuple[Plot, ...]:
    """Draw all plots in the order of the page; empty if the run has no steps."""
    steps = facts.steps
    if not len(steps):
        return ()
    # All plots against the step have the same range, so that they can be compared vertically.
    last = float(steps.step[-1])
    every = last_evaluations(facts.history.evaluations)
    evaluations = [one for one in every if one.step <= last]
    first = min([float(steps.step[0]), *(one.step for one in evaluations)])
    margin = max(0.012 * (last - first), 0.5)
    span = (first - margin, last + margin)

    # Show losses first, then speed and cost.
    drafts = [loss_plot(facts)]
    if evaluations:
        drafts.append(evaluation_plot(evaluations, unit=facts.loss_unit))
    drafts += [
        learning_rate_plot(facts),
        speed_plot(facts),
        norm_plot(facts),
        split_plot(facts),
    ]
    drafts += [metric_plot(facts, name) for name in list(steps.metrics)[:_MOST_METRICS]]
    if facts.goodput.changes:
        drafts.append(world_plot(facts))
    plots = [_draw(draft, span, key=f"plot{number}") for number, draft in enumerate(drafts)]

    # If a plot is missing, show the reason in its place.
    if not evaluations:
        plots.insert(1, Plot("Evaluation loss", note="Nothing has been evaluated."))
    return tuple(plots)


def _draw(draft: Draft, span: tuple[float, float], *, key: str) -> Plot:
    # The key gives ids that are the same in every report. It must not be a name from the run, because ids are
    # not escaped.
    forms = [("", NARROW)]
    if draft.wide is not None:
        # The page's style shows one of the two variants, depending on the width of the window.
        forms = [("narrow", NARROW), ("wide", (WIDE, draft.wide))]

    def paint(axes: "Axes") -> None:
        draft.paint(axes)
        if draft.across == "step":
            axes.set_xlim(*span)
        if draft.scale == "logarithmic":
            axes.set_yscale("log")
        elif draft.scale == "zero":
            axes.set_ylim(bottom=0)

    svgs = []
    for form, size in forms:
        svg = draw(
            paint,
            size=size,
            key=f"{key}{form}",
            unit=draft.unit,
            label=draft.description,
            across=draft.across,
        )
        svgs.append((form, svg))
    return Plot(
        draft.title, tuple(draft.legend), tuple(svgs), chart=_chart_values(draft, span)
    )


def _chart_values(draft: Draft, span: tuple[float, float]) -> dict[str, Any] | None:
    """Return the values of a chart as JSON values, rounded as on the live page."""
    if draft.chart is None:
        return None
    # Entries of the legend for marks have no curve and come last.
    curves = [
        {
            "name": entry.label,
            "color": entry.color,
            "isFaint": entry.style == "faint",
            "parts": [plain_numbers(part) for part in parts],
        }
        for entry, parts in zip(draft.legend, draft.chart.curves, strict=False)
    ]
    is_of_steps = draft.across == "step"
    return {
        "title": draft.title,
        "description": draft.description,
        "unit": draft.unit,
        "across": draft.across,
        "height": draft.wide,
        "form": draft.chart.form,
        "scale": draft.scale,
        "span": span if is_of_steps else None,
        "marks": draft.chart.marks,
        # Steps get more digits than values, so that a step of a long run is not rounded to its neighbour.
        "x": plain_numbers(draft.chart.x, digits=12 if is_of_steps else 6),
        "curves": curves,
    }
