"""Pictures of an attack: measured ROC curves beside those that the claim allows, and measured beside claimed noise."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from silodp.report.figures import DASHES, INK, MUTED, PALETTE, STYLE, set_log_scale, shorten_label
from silodp_audit.report.attacks import AttackedView, AttackRecord, NoiseTest, RocCurve

MIN_RATE = 1e-3
"""The smallest rate on logarithmic axes: a few thousand canaries say nothing about smaller ones."""


def plot_roc(record: AttackRecord) -> Figure | None:
    """Draw true against false positive rates on linear and logarithmic axes, a row for each adversary with a curve.

    The claimed bound is dashed, the measured curve has its band, and guessing is dotted.

    Returns:
        A figure; None where nothing was measured.
    """
    rows = [
        (who, view, view.measured.roc)
        for who, view in record.group_views()
        if view.measured and view.measured.roc
    ]
    if not rows:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 0.3 + 2.7 * len(rows)), layout="constrained")
        panels = figure.subplots(len(rows), 2, squeeze=False)
        for (left, right), (who, view, roc) in zip(panels, rows, strict=True):
            for axes in (left, right):
                _draw_curves(axes, view, roc)
            left.set_title(shorten_label(who, 34), loc="left", fontsize=10)
            left.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), ylabel="true positive rate")
            right.set(xlim=(MIN_RATE, 1), ylim=(MIN_RATE, 1))
            set_log_scale(right, "x")
            set_log_scale(right, "y")
        for axes in panels[-1]:
            axes.set_xlabel("false positive rate")
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=3, columnspacing=1.2, handlelength=2.2)
    return figure


def _draw_curves(axes: Axes, view: AttackedView, roc: RocCurve) -> None:
    color = PALETTE[1] if view.verdict == "violation" else PALETTE[0]
    # A rate of 0 has no place on a logarithmic axis, where the curve would begin with a gap.
    low, high, middle = (
        [max(rate, MIN_RATE / 10) for rate in rates] for rates in (roc.tpr_low, roc.tpr_high, roc.tpr)
    )
    fpr = [max(rate, MIN_RATE / 10) for rate in roc.fpr]
    axes.fill_between(fpr, low, high, color=color, alpha=0.2, linewidth=0)
    axes.plot(fpr, middle, color=color, linewidth=2, label="measured")
    if roc.claimed_tpr is not None:
        axes.plot(
            fpr, roc.claimed_tpr, color=INK, linewidth=1.4, linestyle=DASHES[1], label="promised at most"
        )
    axes.plot(
        [MIN_RATE / 10, 1], [MIN_RATE / 10, 1], color=MUTED, linewidth=1.4, linestyle=":", label="guessing"
    )


def plot_noise(tests: Sequence[NoiseTest]) -> Figure | None:
    """Draw what was measured of noise, shift and sampling as a share of what is claimed, with intervals.

    Tests whose claim is 0 have no share: they are in the table alone.

    Returns:
        A figure; None where there are fewer than two tests to draw.
    """
    shown = [one for one in tests if one.expected and None not in (one.value, one.low, one.high)]
    if len(shown) < 2:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.4, 0.9 + 0.27 * len(shown)), layout="constrained")
        axes = figure.add_subplot()
        for place, one in enumerate(shown):
            value, low, high = (
                (number or 0.0) / (one.expected or 1.0) for number in (one.value, one.low, one.high)
            )
            color = PALETTE[0] if one.passed else PALETTE[1]
            axes.hlines(place, low, high, color=color, linewidth=2)
            axes.plot([value], [place], "o" if one.passed else "X", color=color, markersize=7)
        axes.axvline(1.0, color=INK, linewidth=1.4, linestyle=DASHES[1])
        axes.set_xlabel("measured / claimed")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.xaxis.grid(True)
        axes.yaxis.grid(False)
        axes.margins(x=0.08, y=0.12)
        axes.set_yticks(range(len(shown)), [shorten_label(one.test, 34) for one in shown])
        axes.invert_yaxis()
    return figure
