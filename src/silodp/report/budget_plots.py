"""Pictures about budgets of one's own: who asked for what and was charged what; ε against a sampling probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from silodp.errors import SilodpError, name_file
from silodp.report.formatting import as_number, format_epsilon
from silodp.report.plots import (
    INK,
    MUTED,
    PALETTE,
    STYLE,
    add_legend,
    log_scale,
    panel,
    svg,
)

MOST_LABELS = 10  # under the bars, before they are turned
LEAST_DRAWN = 1e-3
"""ε below this, unless a budget is near, is not drawn: a Rényi bound falls to nothing there."""
FORMATS = ("svg", "pdf", "png")


@dataclass(frozen=True)
class SamplingCurve:
    """ε against the sampling probability q at one noise multiplier; both ascending, of one length."""

    label: str
    sampling: Sequence[float]
    epsilon: Sequence[float]


def spending(groups: Sequence[Mapping[str, Any]], unit: str) -> Figure | None:
    """How many units asked for which ε (above), and what each was charged (below); None where nobody asked.

    groups: as in `Guarantee.groups`. What was charged is drawn at the unit that was charged most of its group.
    """
    if not groups:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.4, 3.7), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.0, 1.7))
    places = range(len(groups))
    above.bar(places, [group["units"] for group in groups], color=MUTED, width=0.6)
    above.set_ylabel(f"{unit}s")
    above.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    above.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    below.hlines(
        [group["budget"] for group in groups],
        [place - 0.3 for place in places],
        [place + 0.3 for place in places],
        color=INK,
        linewidth=2,
        label="asked for",
    )
    for key, label, marker, shift, color in (
        ("planned", "planned", "o", -0.1, PALETTE[0]),
        ("realized", "realized", "D", 0.1, PALETTE[1]),
    ):
        points = [
            (place + shift, value)
            for place, group in zip(places, groups, strict=True)
            if (value := as_number(group.get(key))) is not None and value > 0
        ]
        if points:
            below.plot(*zip(*points, strict=True), marker, color=color, markersize=6, label=label)
    below.set_ylabel("ε")
    below.margins(y=0.1)
    log_scale(below, "y")
    below.set_xlabel("ε asked for")
    below.set_xticks(
        list(places),
        [format_epsilon(group["budget"]) for group in groups],
        rotation=60 if len(groups) > MOST_LABELS else 0,
    )
    add_legend(figure, below, columns=1)
    return figure


def against_sampling(
    curves: Sequence[SamplingCurve],
    budgets: Sequence[float] = (),
    name: str = "sampling probability",
    costs: str = "ε after the run",
) -> Figure:
    """ε against q on logarithmic axes, one curve for each noise multiplier, budgets as levels (rPDP-FL, Figure 6).

    name, costs: what the two axes show.
    """
    figure, axes = panel(name, costs, size=(5.6, 3.9))
    floor = min([*budgets, 10 * LEAST_DRAWN]) / 10
    for turn, curve in enumerate(curves):
        points = [
            point
            for point in zip(curve.sampling, curve.epsilon, strict=True)
            if as_number(point[1]) is not None
        ]
        points = [point for point in points if point[1] >= floor]
        if points:
            color = PALETTE[turn % len(PALETTE)]
            axes.plot(*zip(*points, strict=True), color=color, linewidth=2, label=curve.label)
    for turn, budget in enumerate(budgets):
        label = {} if turn else {"label": "budgets"}
        axes.axhline(budget, color=INK, linewidth=1.1, linestyle=(0, (4, 2)), **label)  # type: ignore[arg-type]
        axes.annotate(
            format_epsilon(budget),
            (1.0, budget),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )
    log_scale(axes, "x")
    log_scale(axes, "y")
    add_legend(figure, axes)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a picture in the format that the file's name ends in.

    Raises:
        SilodpError: an ending that is none of `FORMATS`.
    """
    check_picture(path)
    with name_file(path):
        if path.suffix.lower() == ".svg":
            path.write_text(svg(figure, path.stem), encoding="utf-8")
        else:
            with mpl.rc_context(STYLE):
                figure.savefig(path, dpi=160, facecolor="white")


def check_picture(path: Path) -> None:
    """Refuse a file name that says no format."""
    if path.suffix.lower().removeprefix(".") not in FORMATS:
        raise SilodpError(
            f"plot = '{path}': let the file's name end in .{', .'.join(FORMATS)}.",
            code="argument.value",
            field="plot",
        )
