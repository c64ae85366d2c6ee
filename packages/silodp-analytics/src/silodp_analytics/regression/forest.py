"""The forest plot of a regression."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from silodp.report.figures import INK, MUTED, PALETTE, make_panel, set_log_scale, shorten_label

if TYPE_CHECKING:
    from silodp_analytics.regression.result import RegressionResult


def plot_forest(result: RegressionResult) -> Figure:
    """Draw the coefficients of columns with their intervals: ratios on a scale of logarithms, where there are any.

    Coefficients that are lost in the noise have a name and no mark.
    """
    shown = result.slopes
    title = f"{result.ratio or 'coefficient'}, {100 * result.method.interval:g} % interval"
    figure, axes = make_panel(title, "", size=(4.7, 0.9 + 0.34 * len(shown)))
    move = (lambda value: math.exp(min(max(value, -50.0), 50.0))) if result.ratio else (lambda value: value)
    for place, one in enumerate(shown):
        if one.interval is None:
            axes.text(
                0.5,
                place,
                "lost in the noise",
                color=MUTED,
                ha="center",
                va="center",
                transform=axes.get_yaxis_transform(),
            )
            continue
        low, high = map(move, one.interval)
        axes.plot([low, high], [place, place], color=INK, linewidth=1.2)
        axes.plot([move(one.estimate)], [place], marker="s", markersize=5, color=PALETTE[0])
    axes.set_yticks(range(len(shown)), [shorten_label(one.term, 24) for one in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.axvline(1.0 if result.ratio else 0.0, color=MUTED, linewidth=0.8)
    if result.ratio:
        set_log_scale(axes, "x")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.xaxis.grid(True)
    axes.yaxis.grid(False)
    return figure
