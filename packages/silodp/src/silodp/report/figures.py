"""The style of all pictures, and their files: SVG that a browser shows without network, PDF and PNG.

Figures are `matplotlib.figure.Figure` objects, not those of pyplot, which keeps global state. Colors are those of Okabe
and Ito, which color-blind readers can distinguish; line styles repeat the information.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from silodp.errors import name_file
from silodp.report.formatting import check_picture_path

INK = "#1b1d22"  # text and axes; in a page replaced by the text color of the page
MUTED = "#8a8d93"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5f3f")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)))
_LONG_LABEL = 26

STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: small, searchable, read aloud
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # in the names of users "$" is a dollar
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "grid.color": INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def render_svg(figure: Figure, name: str) -> str:
    """Return a complete SVG document on white, the same bytes for the same figure.

    Args:
        figure: What to draw.
        name: Seed of the ids in the document.
    """
    buffer = io.StringIO()
    # Without the salt and the empty date, every file would differ from the one before, and so would its digest.
    with warnings.catch_warnings(), mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        # The browser of the reader has letters that the font for measuring lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", buffer.getvalue(), flags=re.DOTALL)
    return re.sub(r"(<svg[^>]*>)", r'\1<rect width="100%" height="100%" fill="#ffffff"/>', text, count=1)


def inline_svg(document: str, alt: str) -> str:
    """Return the <svg> element of a document for an HTML page, with unique ids and the text color of the page.

    Args:
        document: The document, from `render_svg`.
        alt: Text for readers who do not see the picture.
    """
    # Pictures of one page use the same ids for clip paths: the first one would be taken for all of them.
    prefix = "p" + hashlib.sha256(document.encode()).hexdigest()[:8]
    element = document[document.index("<svg") :].replace(
        '<rect width="100%" height="100%" fill="#ffffff"/>', "", 1
    )
    element = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", element)
    element = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', element)
    element = re.sub(r'(url\(|href=")#', rf"\1#{prefix}-", element)
    # The page may be dark: text and axes take the color of its text.
    element = element.replace(INK, "currentColor").replace("xlink:href", "href")
    label = alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return re.sub(
        r'<svg[^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{label}">', element, count=1
    )


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture in the format of the file name.

    Args:
        figure: What to draw.
        path: The path of the file; it ends in one of `PICTURES`.

    Raises:
        SilodpError: another ending.
    """
    check_picture_path(path)
    with name_file(path):
        if path.suffix.lower() == ".svg":
            path.write_text(render_svg(figure, path.stem), encoding="utf-8")
        else:
            with mpl.rc_context(STYLE):
                figure.savefig(path, dpi=160, facecolor="white")


_MIN_TICKS, _MAX_TICKS = 4, 8
_LOG_STEPS = (
    (1,),
    (1, 3),
    (1, 2, 5),
    (1, 1.5, 2, 3, 5, 7),
    (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8),
    tuple(step / 10 for step in range(10, 100)),
)
"""Numbers that a logarithmic axis may show, times powers of ten, from few to many."""

_PLAIN = FuncFormatter(lambda value, _: f"{value:,.10g}" if 1e-4 <= value < 1e6 else f"{value:.0e}")


def make_panel(x: str, y: str, size: tuple[float, float] = (4.7, 3.1)) -> tuple[Figure, Axes]:
    """Return an empty figure and its axes, small so that text is readable on a phone; `size` in inches."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel(x)
        axes.set_ylabel(shorten_label(y, 32))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.margins(x=0.02)
    return figure, axes


def set_log_scale(axes: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with plain numbers at four to eight places; call it after everything is drawn."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    # Ticks at powers of ten alone, as matplotlib sets them, leave an axis from 2 to 8 without any number.
    low, high = sorted(axis.get_view_interval())
    axis.set_major_locator(FixedLocator(choose_log_ticks(low, high)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(_PLAIN)


def choose_log_ticks(low: float, high: float) -> list[float]:
    """Return numbers of few digits between two positive numbers, at least four where their ratio is 1.5 or more."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in _LOG_STEPS:
        # Read as text: 3 · 10^-1 is 0.30000000000000004.
        exact = (float(f"{step}e{power}") for power in powers for step in steps)
        ticks = [tick for tick in exact if low <= tick <= high]
        if len(ticks) >= _MIN_TICKS:
            break
    return ticks[:: math.ceil(len(ticks) / _MAX_TICKS)] if ticks else []


def add_legend(figure: Figure, axes: Axes, columns: int = 2, handlelength: float = 2.4) -> None:
    """Put a legend above the axes; the figure grows by its lines."""
    with mpl.rc_context(STYLE):
        handles, labels = axes.get_legend_handles_labels()
        if max(map(len, labels), default=0) > _LONG_LABEL:
            columns = 1  # two would not fit side by side
        # The height of a line in inches, as matplotlib knows the size of a legend only when it draws it.
        lines = sum(1 + label.count("\n") for label in labels)
        width, height = figure.get_size_inches()
        # Without that the axes would shrink by the height of the legend.
        figure.set_size_inches(width, height + 0.19 * (lines / columns))
        figure.legend(
            handles,
            labels,
            loc="outside upper left",
            ncols=columns,
            columnspacing=1.4,
            handlelength=handlelength,
        )


def shorten_label(label: str, length: int = 30, keep: int = 0) -> str:
    """Return a label shortened for a legend; matplotlib would hide one that begins with an underscore.

    Args:
        label: The label.
        length: The most letters.
        keep: How many letters at its end are kept.
    """
    label = " ".join(label.split())
    if len(label) > length:
        label = f"{label[: length - 1 - keep]}…{label[len(label) - keep :]}"
    return " " + label if label.startswith("_") else label
