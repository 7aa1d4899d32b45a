"""Draws with matplotlib, and converts the result to SVG markup for an HTML page: themed by CSS, without
external resources."""

import io
import re
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from evergrad_common.text import short_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMES = (
    "axis",
    "grid",
    "muted",
    "s1",
    "s2",
    "s3",
    "s4",
    "s5",
    "s6",
    "p1",
    "p2",
    "p3",
    "p4",
    "p5",
)
COLORS = {name: f"#fe{index:02x}ef" for index, name in enumerate(_NAMES)}
"""Placeholder colours for matplotlib. In the markup, each is replaced with the CSS variable ``--<name>``."""

_PIXELS_PER_INCH = 72
_FONT_PIXELS = 10.5

Paint = Callable[["Axes"], None]


def draw(
    paint: Paint,
    *,
    size: tuple[int, int],
    key: str,
    unit: str,
    label: str,
    across: str = "step",
) -> str:
    """Draw onto axes of ``size`` pixels and return the markup. ``across`` labels the x axis.

    ``key`` makes ids unique within the page and the output repeatable. ``unit`` labels the y axis. ``label``
    tells screen readers what the plot shows.
    """
    # Import matplotlib only when a plot is drawn, because the import takes most of a report's time.
    import matplotlib.backends.backend_svg
    import matplotlib.figure
    import matplotlib.ticker

    style: dict[Any, Any] = {**_STYLE, "svg.hashsalt": key}
    with matplotlib.rc_context(style):
        figure = matplotlib.figure.Figure(
            figsize=(size[0] / _PIXELS_PER_INCH, size[1] / _PIXELS_PER_INCH),
            layout="constrained",
        )
        # Set the style only for this figure, because other code may use another style.
        axes = figure.subplots()
        paint(axes)
        # Use the same ticks, labels and formats on all plots.
        ticker, steps = matplotlib.ticker, [1, 2, 2.5, 5, 10]
        nbins = max(4, size[0] // 110)
        axes.xaxis.set_major_locator(
            ticker.MaxNLocator(nbins=nbins, integer=True, min_n_ticks=1, steps=steps)
        )
        axes.xaxis.set_major_formatter(
            ticker.FuncFormatter(lambda value, _: f"{value:,.0f}")
        )
        if axes.get_yscale() == "linear":
            axes.yaxis.set_major_locator(ticker.MaxNLocator(nbins=6, steps=steps))

        # Abbreviate large values, show small values with enough digits, and show 0 instead of "0.000".
        def shorten(value: float, _: object) -> str:
            if abs(value) >= 1000:
                return short_count(value)
            return f"{value:.4g}" if value else "0"

        axes.yaxis.set_major_formatter(ticker.FuncFormatter(shorten))
        axes.set_xlabel(across, loc="right")
        axes.set_title(
            unit, loc="left", fontsize=_FONT_PIXELS, color=COLORS["muted"], pad=8
        )
        buffer = io.StringIO()
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    return clean(buffer.getvalue(), key=key, label=label)


_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": _FONT_PIXELS,
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": COLORS["axis"],
    "axes.labelcolor": COLORS["muted"],
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "grid.color": COLORS["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": COLORS["axis"],
    "ytick.color": COLORS["axis"],
    "xtick.labelcolor": COLORS["muted"],
    "ytick.labelcolor": COLORS["muted"],
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "xtick.major.width": 0.8,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
}


_COLOR_OF = {color: f"var(--{name})" for name, color in COLORS.items()}
_COLOR = re.compile("|".join(_COLOR_OF))
_FONT = re.compile(r"font: (\d+(?:\.\d+)?)px [^;\"]*")
_FAMILY = re.compile(r"font-family: [^;\"]*;? ?")
_NO_ROTATION = re.compile(r' transform="rotate\(-0 [^"]*"')
_LONG_NUMBER = re.compile(r"\d+\.\d{3,}")
_STYLE_OF = re.compile(r' style="([^"]*)"')
_DECLARATION = re.compile(r"([a-z-]+): ([^;]+)(?:; ?)?")
_TAG = re.compile(r"<[^>]+>")
_ID = re.compile(r' id="([^"]+)"')
_REFERENCE = re.compile(r'(url\(#|href="#)([^")]+)')


def clean(svg: str, *, key: str, label: str) -> str:
    """Remove the parts that only a separate file needs, make ids unique, and let the page's style set colours
    and fonts."""
    # A page must not contain an XML declaration or a document type.
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = svg.replace("xlink:href", "href")
    view_box = re.search(r'viewBox="[^"]+"', svg)
    svg = svg[svg.index(">") + 1 :]
    # A page has several plots, so ids must be unique. Remove ids without references.
    used = {match[2] for match in _REFERENCE.finditer(svg)}
    svg = _ID.sub(lambda match: f' id="{key}-{match[1]}"' if match[1] in used else "", svg)
    svg = _REFERENCE.sub(lambda match: f"{match[1]}{key}-{match[2]}", svg)
    # Keep font sizes and remove font families, because the page sets the font.
    svg = _FONT.sub(lambda match: f"font-size: {match[1]}px", svg)
    svg = _NO_ROTATION.sub("", _FAMILY.sub("", svg))
    # Round to a hundredth of a pixel, which is below the resolution of screens and halves the page's size.
    svg = _TAG.sub(
        lambda tag: _LONG_NUMBER.sub(
            lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), tag[0]
        ),
        svg,
    )
    # The page's content security policy forbids style attributes, so convert them to SVG attributes.
    svg = _TAG.sub(
        lambda tag: _STYLE_OF.sub(
            lambda style: _DECLARATION.sub(r' \1="\2"', style[1]), tag[0]
        ),
        svg,
    )
    # Replace placeholders with CSS variables, so that the dark theme has its own colours.
    svg = _COLOR.sub(lambda match: _COLOR_OF[match[0]], svg)
    svg = re.sub(r"\n\s*", "\n", svg).strip()
    # Add the label last, so that the replacements above do not change its numbers.
    opening = f'<svg class="plot" role="img" aria-label="{escape(label)}" {view_box[0] if view_box else ""}>'
    return f"{opening}\n{svg}"
