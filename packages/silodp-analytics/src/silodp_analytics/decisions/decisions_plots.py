"""The picture of decisions: net benefit against the threshold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from silodp.report.estimates import find_limits
from silodp.report.figures import MUTED, PALETTE, make_panel
from silodp_analytics.decisions.decisions import Threshold


def plot_decisions(thresholds: Sequence[Threshold]) -> Figure | None:
    """Draw the net benefit of a model and of calling everyone positive against the threshold, with 95 % intervals.

    Returns:
        A figure; None where there are fewer than two thresholds to draw.
    """
    known = [(one.probability, one.net_benefit, one.treat_all) for one in thresholds]
    drawn = [
        (at, ours, everyone) for at, ours, everyone in known if ours is not None and everyone is not None
    ]
    if len(drawn) < 2:
        return None
    figure, axes = make_panel("threshold of the probability", "net benefit")
    places, ours = [at for at, _, _ in drawn], [one for _, one, _ in drawn]
    limits = np.array([find_limits("net_benefit", one) for one in ours])
    values = [one.value for one in ours]
    axes.axhline(0, color=MUTED, linewidth=1.4, linestyle=":")
    axes.plot(
        places, [one.value for _, _, one in drawn], color=PALETTE[1], linestyle="--", label="all positive"
    )
    axes.fill_between(places, limits[:, 0], limits[:, 1], color=PALETTE[0], alpha=0.2, linewidth=0)
    axes.plot(places, values, color=PALETTE[0], marker="o", label="by the model")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    # Calling everyone positive soon costs far more than anything else on the page.
    low, high = min(0.0, *limits[:, 0]), max(0.0, *limits[:, 1])
    margin = 0.08 * (high - low) or 0.1  # a model that calls nobody positive has the net benefit 0 everywhere
    axes.set(xlim=(0, 1), ylim=(low - margin, high + margin))
    axes.legend(frameon=False)
    return figure
