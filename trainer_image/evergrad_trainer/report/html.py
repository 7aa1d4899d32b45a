"""Renders the report as one HTML file that fetches nothing and runs no script."""

from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from evergrad_trainer import __version__
from evergrad_trainer.report.facts import Facts
from evergrad_trainer.report.plots import Plot


def render_html(facts: Facts, plots: Sequence[Plot], *, created: str) -> str:
    """Render the page. Everything from the run is escaped; only the plots' own markup is not."""
    # Only what we have drawn ourselves is markup: names and texts come from the run, and are escaped.
    safe = [
        {
            "title": plot.title,
            "legend": plot.legend,
            "note": plot.note,
            "svgs": [(form, Markup(svg)) for form, svg in plot.svgs],
        }
        for plot in plots
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.get_template("report.html.jinja")
    return template.render(facts=facts, plots=safe, created=created, version=__version__)
