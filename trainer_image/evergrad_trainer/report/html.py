"""Renders the report as one HTML file that loads nothing and is complete without scripts.

If scripts can run, the page's own scripts replace the pictures with charts. No other script can run.
"""

from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from evergrad_coordinator.edge.page_files import (
    CHART_SCRIPTS,
    CHART_STYLES,
    build_policy,
    read_web,
)
from evergrad_trainer import __version__
from evergrad_trainer.report.facts import ReportFacts
from evergrad_trainer.report.plots import Plot
from evergrad_trainer.report.series import MOST_ROWS
from evergrad_trainer.report.svg import COLORS

_SCRIPT = "report.js"


def render_html(facts: ReportFacts, plots: Sequence[Plot], *, created: str) -> str:
    """Render the page. Everything from the run is escaped; only the plots' own markup is not."""
    # Only markup that this package has drawn is safe. Names and texts come from the run, and are escaped.
    safe = [
        {
            "title": plot.title,
            "legend": plot.legend,
            "note": plot.note,
            "svgs": [(form, Markup(svg)) for form, svg in plot.svgs],
            "has_chart": plot.chart is not None,
        }
        for plot in plots
    ]
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # The filter tojson escapes text that could end the element. NaN and infinity are not valid JSON.
    environment.policies["json.dumps_kwargs"] = {
        "separators": (",", ":"),
        "allow_nan": False,
    }

    # Keep the order of the page. Charts over the same steps share their x values.
    shared: list[list[float]] = []
    charts = []
    for chart in (plot.chart for plot in plots if plot.chart is not None):
        if chart["x"] not in shared:
            shared.append(chart["x"])
        charts.append({**chart, "x": shared.index(chart["x"])})

    # Use the files of the live page's chart library. A report without plots has no script.
    own = environment.get_template("report.css.jinja").render(
        shares=facts.shares, colors=COLORS
    )
    style = "".join(map(read_web, CHART_STYLES)) + own
    scripts: list[str] = []
    if charts:
        scripts = [*map(read_web, CHART_SCRIPTS), (folder / _SCRIPT).read_text("utf-8")]
    return environment.get_template("report.html.jinja").render(
        facts=facts,
        plots=safe,
        charts={"x": shared, "charts": charts},
        most_rows=MOST_ROWS,
        created=created,
        version=__version__,
        policy=Markup(build_policy(scripts, style)),
        style=Markup(style),
        scripts=[Markup(one) for one in scripts],
    )
