"""Pictures of runs, as SVG text that a browser without network can show.

Figures are `matplotlib.figure.Figure` objects, never pyplot's, so drawing leaves nothing behind. Colors are
those of Okabe and Ito, told apart also by people who see fewer; line styles repeat what colors say.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray

from silodp.accounting.guarantee import ADVERSARIES, Adversary
from silodp.report.formatting import as_number

_T = TypeVar("_T")

INK = "#1b1d22"  # text and axes; the page's own text color once a picture stands in a page
MUTED = "#8a8d93"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f5f3f")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)))
WIDE_RATIO = 20  # between the last values of curves, beyond which only a logarithmic axis shows them all
MOST_POINTS = 400  # drawn per curve; a picture is a few hundred pixels wide
MOST_SILOS = len(PALETTE)  # with a color of their own
MOST_BARS = 400
_LONG_LABEL = 26

WHO: dict[Adversary, str] = {
    "released": "whoever sees the models",
    "server": "the server",
    "silo": "another silo",
}

STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: small, searchable, read aloud
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # names are the user's: "$" is a dollar
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


@dataclass(frozen=True)
class Curve:
    """One method of a comparison: rounds, mean and standard deviation over runs, ε after these rounds.

    NaN where a value is missing; `reference`: tuned training without privacy, which the others are measured by.
    `is_level`: whether what has no ε may be drawn as a level against ε.
    """

    label: str
    rounds: Sequence[float]
    mean: Sequence[float]
    sd: Sequence[float]
    epsilon: Sequence[float]
    private: bool = True
    reference: bool = False
    is_level: bool = True


@dataclass(frozen=True)
class Allocation:
    """Records per person and silo, ranked by the person's total; private, but without ids.

    bars (S, B): records per person of rank b in each silo, averaged over `persons_per_bar[b]` persons of
    neighboring rank, so that no more than 400 bars are kept however many persons there are.
    """

    silos: tuple[str, ...]
    bars: tuple[tuple[float, ...], ...]
    persons_per_bar: tuple[int, ...]
    persons: int
    without_records: int
    in_several_silos: int
    most_records: int

    @classmethod
    def of(cls, counts: NDArray[np.int64], names: Sequence[str] = ()) -> Allocation:
        """Of counts (S, U); persons without records are counted, not drawn."""
        silos = tuple(names) or tuple(f"silo {s + 1}" for s in range(len(counts)))
        totals = counts.sum(axis=0)
        ranked = np.argsort(-totals, kind="stable")[: int((totals > 0).sum())]
        groups = [g for g in np.array_split(ranked, min(MOST_BARS, max(len(ranked), 1))) if len(g)]
        bars = [[round(float(row[group].mean()), 4) for group in groups] for row in counts]
        return cls(
            silos=silos,
            bars=tuple(tuple(row) for row in bars),
            persons_per_bar=tuple(len(group) for group in groups),
            persons=int(counts.shape[1]),
            without_records=int((totals == 0).sum()),
            in_several_silos=int(((counts > 0).sum(axis=0) > 1).sum()),
            most_records=int(totals.max(initial=0)),
        )


def quantities(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of what was measured, "loss" first."""
    names: dict[str, None] = {}
    for row in rows:
        if as_number(row.get("loss")) is not None:
            names.setdefault("loss")
        for name, value in (row.get("metrics") or {}).items():
            if as_number(value) is not None:
                names.setdefault(name)
    return sorted(names, key=lambda name: name != "loss")


def measured(row: Mapping[str, Any], name: str) -> float | None:
    """The loss or a metric of one row of metrics.jsonl; None where it is missing or not finite."""
    return as_number(row.get("loss") if name == "loss" else (row.get("metrics") or {}).get(name))


def utility(rows: Sequence[Mapping[str, Any]]) -> dict[str, Figure]:
    """One figure per measured quantity against rounds; untrained: a hollow mark and a dotted level."""
    figures = {}
    for name in quantities(rows):
        points = [(row["round"], value) for row in rows if (value := measured(row, name)) is not None]
        figure, axes = panel("round", name)
        rounds, values = zip(*_thinned(points), strict=True)
        axes.plot(rounds, values, color=PALETTE[0], linewidth=2, marker="o" if len(rounds) < 2 else None)
        if rounds[0] == 0:
            axes.axhline(values[0], color=MUTED, linewidth=1.2, linestyle=":")
            axes.plot(
                [0], [values[0]], "o", color=PALETTE[0], markerfacecolor="white", markersize=6, clip_on=False
            )
        figures[name] = figure
    return figures


def epsilon(rows: Sequence[Mapping[str, Any]]) -> Figure | None:
    """ε after every round for each adversary who is promised something; None if nobody is.

    Adversaries with the same ε share a line.
    """
    lines: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for adversary in ADVERSARIES:
        spent = [(row["round"], as_number((row.get("epsilon") or {}).get(adversary))) for row in rows]
        points = tuple((round_, _rounded(value)) for round_, value in spent if value is not None)
        if any(round_ > 0 for round_, _ in points):
            lines.setdefault(points, []).append(WHO[adversary])
    figure, axes = panel("round", "ε spent so far")
    styles = zip(lines.items(), PALETTE, DASHES, strict=False)
    drawn = [
        (points, {"label": "\n= ".join(who), "color": color, "linestyle": dashes, "linewidth": 2.2})
        for (points, who), color, dashes in styles
    ]
    _epsilon_lines(axes, drawn)
    add_legend(figure, axes, columns=1)
    return figure if lines else None


def allocation(records: Allocation) -> Figure:
    """Records per person, most first, colored by silo; beyond seven silos the smaller ones share a gray."""
    figure, axes = panel("persons, those with most records first", "records per person", size=(5.4, 3.1))
    values = np.asarray(records.bars, dtype=float).reshape(len(records.silos), -1)
    edges = np.concatenate([[0], np.cumsum(records.persons_per_bar)])
    largest = sorted(range(len(values)), key=lambda s: -float(values[s] @ np.diff(edges)))
    own = sorted(largest[: MOST_SILOS if len(values) <= MOST_SILOS else MOST_SILOS - 1])
    layers = [(_short(records.silos[s]), values[s], PALETTE[i]) for i, s in enumerate(own)]
    rest = [s for s in range(len(values)) if s not in own]
    if rest:
        layers.append((f"{len(rest)} other silos", values[rest].sum(axis=0), MUTED))
    bottom = np.zeros(values.shape[1])
    for label, layer, color in layers:
        axes.stairs(bottom + layer, edges, baseline=bottom, fill=True, color=color, linewidth=0, label=label)
        bottom = bottom + layer
    axes.set_xlim(0, max(float(edges[-1]), 1.0))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    add_legend(figure, axes, columns=min(len(layers), 3), handlelength=1.0)
    return figure


def comparison(
    curves: Sequence[Curve], quantity: str, untrained: float | None = None, against: str = "round"
) -> Figure | None:
    """Mean ± one standard deviation of every method, against rounds or (`against="epsilon"`) the released ε.

    Without privacy: dashed, and against ε the level it ends at, if it may be one, since it has no ε. Untrained: dotted.
    None when there is nothing to draw.
    """
    by_round = against == "round"
    figure, axes = panel(
        "round" if by_round else "ε against whoever sees the models", f"{quantity} (mean ± sd)"
    )
    drawn: list[float] = []
    curved = False
    for curve, line in _styles(curves):
        x = np.asarray(curve.rounds if by_round else curve.epsilon, dtype=float)
        mean, sd = np.asarray(curve.mean, dtype=float), np.asarray(curve.sd, dtype=float)
        known = mean[np.isfinite(mean)].tolist()
        good = np.flatnonzero(np.isfinite(x) & np.isfinite(mean) & (by_round | (x > 0))).tolist()
        if not by_round and not curve.private and known:
            if curve.is_level:
                axes.axhline(known[-1], **line)
                drawn.append(known[-1])
        elif good:
            kept = np.array(_thinned(good))
            x, mean, sd = x[kept], mean[kept], np.nan_to_num(sd[kept])
            axes.fill_between(x, mean - sd, mean + sd, color=line["color"], alpha=0.16, linewidth=0)
            axes.plot(x, mean, marker="o" if len(x) == 1 else None, **line)
            drawn += mean.tolist()
            curved = True
    if not curved:
        return None
    if untrained is not None:
        axes.axhline(untrained, color=MUTED, linewidth=1.4, linestyle=":", label="untrained")
    if min(drawn) > 0 and max(drawn) > WIDE_RATIO * min(
        drawn
    ):  # one that diverged must not flatten the others
        axes.set_ylim(0.8 * min(drawn), 1.5 * max(drawn))
        log_scale(axes, "y")
    if not by_round:
        log_scale(axes, "x")
    add_legend(figure, axes)
    return figure


def epsilon_comparison(curves: Sequence[Curve]) -> Figure | None:
    """ε against whoever sees the models after every round; None when no method has one.

    Methods with the same ε share a line.
    """
    lines: dict[tuple[tuple[float, float], ...], tuple[dict[str, Any], list[str]]] = {}
    for curve, line in _styles(curves):
        spent = zip(curve.rounds, curve.epsilon, strict=True)
        points = tuple((round_, _rounded(value)) for round_, value in spent if math.isfinite(value))
        if any(value > 0 for _, value in points):
            lines.setdefault(points, (line, []))[1].append(line["label"])
    figure, axes = panel("round", "ε spent so far")
    _epsilon_lines(
        axes, [(points, {**line, "label": "\n= ".join(who)}) for points, (line, who) in lines.items()]
    )
    add_legend(figure, axes, columns=1)
    return figure if lines else None


def svg(figure: Figure, name: str) -> str:
    """A complete SVG document on white, the same bytes for the same figure."""
    buffer = io.StringIO()
    with warnings.catch_warnings(), mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        # The reader's browser has letters that our measuring font lacks.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", buffer.getvalue(), flags=re.DOTALL)
    return re.sub(r"(<svg[^>]*>)", r'\1<rect width="100%" height="100%" fill="#ffffff"/>', text, count=1)


def inline(document: str, alt: str) -> str:
    """The <svg> element of `svg`'s document for an HTML page: own ids, and the page's text color."""
    prefix = "p" + hashlib.sha256(document.encode()).hexdigest()[:8]
    element = document[document.index("<svg") :].replace(
        '<rect width="100%" height="100%" fill="#ffffff"/>', "", 1
    )
    element = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", element)
    element = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', element)
    element = re.sub(r'(url\(|href=")#', rf"\1#{prefix}-", element)
    element = element.replace(INK, "currentColor").replace("xlink:href", "href")
    label = alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return re.sub(
        r'<svg[^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{label}">', element, count=1
    )


_PLAIN = FuncFormatter(lambda value, _: f"{value:,.10g}" if 1e-4 <= value < 1e6 else f"{value:.0e}")


def panel(x: str, y: str, size: tuple[float, float] = (4.7, 3.1)) -> tuple[Figure, Axes]:
    """Small on purpose: text keeps its size on a phone, and two stand side by side on a desk."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        axes.set_xlabel(x)
        axes.set_ylabel(_short(y, 32))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.margins(x=0.02)
    return figure, axes


def _rounded(epsilon: float) -> float:
    """What differs by less than a part in a million looks, and is, the same."""
    return float(f"{epsilon:.6g}")


def _epsilon_lines(axes: Axes, lines: Sequence[tuple[Sequence[tuple[float, float]], dict[str, Any]]]) -> None:
    """Growing curves (round, ε); on a logarithmic axis, where 0 has no place, when they end far apart."""
    last = [points[-1][1] for points, _ in lines]
    wide = bool(last) and max(last) > WIDE_RATIO * min(last)
    for points, line in lines:
        kept = _thinned([point for point in points if point[1] > 0 or not wide])
        axes.plot(*zip(*kept, strict=True), marker="o" if len(kept) == 1 else None, **line)
    if wide:
        log_scale(axes, "y")
    else:
        axes.set_ylim(bottom=0)


def log_scale(axes: Axes, which: Literal["x", "y"]) -> None:
    """Logarithmic, with plain numbers at 1, 2 and 5 times powers of ten, or at powers alone."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high > 300 * low else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(_PLAIN)
    axis.set_minor_formatter(NullFormatter())


def add_legend(figure: Figure, axes: Axes, columns: int = 2, handlelength: float = 2.4) -> None:
    """Above the axes; the figure grows by as many lines."""
    with mpl.rc_context(STYLE):
        handles, labels = axes.get_legend_handles_labels()
        if max(map(len, labels), default=0) > _LONG_LABEL:
            columns = 1  # two would not fit beside each other
        lines = sum(1 + label.count("\n") for label in labels)
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + 0.19 * (lines / columns))  # else the axes would shrink
        figure.legend(
            handles,
            labels,
            loc="outside upper left",
            ncols=columns,
            columnspacing=1.4,
            handlelength=handlelength,
        )


def _styles(curves: Sequence[Curve]) -> Iterable[tuple[Curve, dict[str, Any]]]:
    """A line for each: the reference in ink, what is not private dashed, beyond seven other dashes too."""
    turn = 0
    for curve in curves:
        color, dashes = (INK, 0) if curve.reference else (PALETTE[turn % len(PALETTE)], turn // len(PALETTE))
        turn += not curve.reference
        line = DASHES[1] if not curve.private else ("-", *DASHES[2:])[dashes % 3]
        yield curve, {"color": color, "linestyle": line, "linewidth": 2, "label": _short(curve.label)}


def _thinned(points: Sequence[_T]) -> list[_T]:
    """At most MOST_POINTS of them, the first and the last kept."""
    if len(points) <= MOST_POINTS:
        return list(points)
    return [points[i] for i in np.linspace(0, len(points) - 1, MOST_POINTS).round().astype(int)]


def _short(label: str, length: int = 30) -> str:
    """Fit for a legend; matplotlib would hide a label that begins with an underscore."""
    label = " ".join(label.split())
    label = label if len(label) <= length else label[: length - 1] + "…"
    return " " + label if label.startswith("_") else label
