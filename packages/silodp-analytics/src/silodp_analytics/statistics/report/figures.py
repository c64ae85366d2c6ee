"""Pictures of statistics: bars of counts with their noise, and Kaplan-Meier curves with their bands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from silodp.report.figures import DASHES, INK, PALETTE, add_legend, make_panel, shorten_label
from silodp_analytics.statistics.report.estimates import NoisyTable, SurvivalCurve, estimate_count, is_certain

MAX_BARS = 30
"""Categories in a picture; a table has all of them."""


def plot_histogram(table: NoisyTable, counted: str) -> Figure:
    """Draw the noisy counts of the bins, with the intervals of their noise."""
    edges = np.asarray(table.edges)
    counts = table.values[: len(edges) - 1]
    figure, axes = make_panel(table.column, counted)
    middles = (edges[:-1] + edges[1:]) / 2
    heights, ends = find_bars(counts, table.noise_std)
    axes.bar(middles, heights, 0.92 * np.diff(edges), color=PALETTE[0], alpha=0.75)
    axes.errorbar(middles, heights, yerr=ends, fmt="none", color=INK, linewidth=1.2)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.set_ylim(bottom=0)
    return figure


def plot_categories(table: NoisyTable, counted: str) -> Figure:
    """Draw the noisy counts of the categories, with the intervals of their noise."""
    names, counts = table.names[:MAX_BARS], table.values[:MAX_BARS]
    figure, axes = make_panel(counted, "", size=(4.7, 0.9 + 0.3 * len(names)))
    heights, ends = find_bars(counts, table.noise_std)
    places = np.arange(len(names))
    axes.barh(places, heights, color=PALETTE[0], alpha=0.75)
    axes.errorbar(heights, places, xerr=ends, fmt="none", color=INK, linewidth=1.2)
    axes.set_yticks(places, [shorten_label(name, 24) for name in names])
    axes.invert_yaxis()
    axes.xaxis.grid(True)
    axes.yaxis.grid(False)
    axes.set_xlim(left=0)
    return figure


def find_bars(counts: NDArray[np.float64], noise_std: float) -> tuple[list[float], list[list[float]]]:
    """Return the lengths of bars, and how far the interval of each reaches below and above its end.

    A count that is lost in the noise has no bar: a table shows it as "< x", and its interval alone reaches from 0 to x.
    """
    shown = [estimate_count(count, noise_std) for count in counts]
    lengths = [
        one.value if is_certain(count, noise_std) else 0.0 for count, one in zip(counts, shown, strict=True)
    ]
    below = [max(length - one.low, 0.0) for length, one in zip(lengths, shown, strict=True)]
    return lengths, [below, [one.high - length for length, one in zip(lengths, shown, strict=True)]]


def plot_survival(curves: Sequence[SurvivalCurve], time: str) -> Figure:
    """Draw the curves from time 0 on, with the bands of their noise."""
    figure, axes = make_panel(time, "share that survives")
    for place, curve in enumerate(curves):
        color, dash = PALETTE[place % len(PALETTE)], DASHES[place % len(DASHES)]
        times = np.concatenate([[0.0], curve.times])
        # The curve is known at the marks alone: between them it falls somewhere.
        low, high = (np.concatenate([[1.0], end]) for end in (curve.low, curve.high))
        axes.fill_between(times, low, high, color=color, alpha=0.18)
        survival = np.concatenate([[1.0], curve.survival])
        label = shorten_label(curve.group) if curve.group else None
        axes.plot(times, survival, color=color, linestyle=dash, marker="o", markersize=4, label=label)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    if len(curves) > 1:
        add_legend(figure, axes)
    return figure
