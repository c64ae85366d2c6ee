"""Pictures of runs and comparisons: quantities and ε against rounds, budgets, records per person."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import matplotlib as mpl
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from silodp.accounting.guarantee import format_epsilon
from silodp.accounting.views import ADVERSARIES
from silodp.report.divergence import get_measure, list_quantities
from silodp.report.figures import (
    DASHES,
    INK,
    MUTED,
    PALETTE,
    STYLE,
    add_legend,
    make_panel,
    set_log_scale,
    shorten_label,
)
from silodp.report.formatting import as_number, find_interval
from silodp.report.guarantee_text import ADVERSARY_LABELS

if TYPE_CHECKING:  # the files of runs need torch, a picture of a plan does not
    from silodp.report.held_out import CalibrationBin
    from silodp.report.run_record import Allocation

_T = TypeVar("_T")

WIDE_RATIO = 20  # of the last values of curves; beyond it the axis is logarithmic
MAX_POINTS = 400  # per curve; a picture is a few hundred pixels wide
MAX_LABELS = 10  # under bars; more are rotated
_KEPT_END = 12  # of the label of a method: variants differ in what stands last
MAX_PARTS = 40  # silos or subgroups in a picture
MAX_CLASSES = 12  # in a confusion matrix
_SHADES = LinearSegmentedColormap.from_list("shades", ["#eef4f9", PALETTE[0]])
_LINE, _WIDER, _MOST_COVERING = 0.012, 2.2, 3
"""Of curves on one another: the part of the axis that a line covers, how much wider each is, and how often at most."""
MIN_DRAWN = 1e-3
"""ε below this is not drawn unless a budget is near: a Rényi bound falls to nothing there."""


@dataclass(frozen=True)
class Curve:
    """One method of a comparison; NaN where a value is missing.

    Attributes:
        label: Name in the legend.
        rounds: (T,), the rounds that were evaluated.
        mean: (T,), over runs.
        sd: (T,), standard deviation over runs.
        epsilon: (T,), ε after these rounds.
        private: Whether the method guarantees anything.
        reference: Tuned training without privacy, which the others are compared with.
        is_level: Whether a method without ε is drawn as a level against ε.
        note: Text after the name in the legend, which is not shortened.
    """

    label: str
    rounds: Sequence[float]
    mean: Sequence[float]
    sd: Sequence[float]
    epsilon: Sequence[float]
    private: bool = True
    reference: bool = False
    is_level: bool = True
    note: str = ""


@dataclass(frozen=True)
class SamplingCurve:
    """ε against the sampling probability q at one noise multiplier.

    Attributes:
        label: Name in the legend.
        sampling: (N,), q ascending.
        epsilon: (N,), ascending.
    """

    label: str
    sampling: Sequence[float]
    epsilon: Sequence[float]


def plot_utility(
    rows: Sequence[Mapping[str, Any]], constants: Mapping[str, float | None]
) -> dict[str, Figure]:
    """Draw what was measured more than once against rounds; the untrained model is a hollow mark and a dotted level.

    Args:
        rows: The rows of metrics.jsonl.
        constants: What a constant prediction has, by name of the quantity: a dashed level.

    Returns:
        A figure by name of the quantity.
    """
    figures = {}
    for name in list_quantities(rows):
        points = [(row["round"], value) for row in rows if (value := get_measure(row, name)) is not None]
        # One value is in the table, and a picture of one mark says nothing more.
        if len(points) < 2:
            continue
        figure, axes = make_panel("round", name)
        rounds, values = zip(*thin(points), strict=True)
        axes.plot(rounds, values, color=PALETTE[0], linewidth=2)
        if rounds[0] == 0:
            axes.axhline(values[0], color=MUTED, linewidth=1.2, linestyle=":")
            hollow: dict[str, Any] = {
                "color": PALETTE[0],
                "markerfacecolor": "white",
                "markersize": 6,
                "clip_on": False,
            }
            axes.plot([0], [values[0]], "o", **hollow)
        if (constant := constants.get(name)) is not None:
            axes.axhline(constant, color=PALETTE[1], linewidth=1.2, linestyle="--")
        figures[name] = figure
    return figures


def plot_epsilon(rows: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Draw ε after every round against each adversary; those with the same ε share a line.

    Args:
        rows: The rows of metrics.jsonl.

    Returns:
        A figure; None where there is no guarantee at all.
    """
    curves = []
    for adversary in ADVERSARIES:
        spent = [(row["round"], as_number((row.get("epsilon") or {}).get(adversary))) for row in rows]
        points = [(round_, value) for round_, value in spent if value is not None]
        if any(round_ > 0 for round_, _ in points):
            curves.append((ADVERSARY_LABELS[adversary], points, None))
    return _draw_epsilon(curves)


def plot_allocation(records: Allocation) -> Figure:
    """Draw records per person, most first, colored by silo; of more than seven silos the smaller ones are gray."""
    figure, axes = make_panel("persons, those with most records first", "records per person", size=(5.4, 3.1))
    values = np.asarray(records.bars, dtype=float).reshape(len(records.silos), -1)
    edges = np.concatenate([[0], np.cumsum(records.persons_per_bar)])
    largest = sorted(range(len(values)), key=lambda s: -float(values[s] @ np.diff(edges)))
    # One color less where some silos are left over: they are one gray layer.
    colored = sorted(largest[: len(PALETTE) - (len(values) > len(PALETTE))])
    layers = [(shorten_label(records.silos[s]), values[s], PALETTE[i]) for i, s in enumerate(colored)]
    rest = [s for s in range(len(values)) if s not in colored]
    if rest:
        layers.append((f"{len(rest)} other silos", values[rest].sum(axis=0), MUTED))
    bottom = np.zeros(values.shape[1])
    for label, layer, color in layers:
        axes.stairs(bottom + layer, edges, baseline=bottom, fill=True, color=color, linewidth=0, label=label)
        bottom = bottom + layer
    axes.set(xlim=(0, max(float(edges[-1]), 1.0)), ylim=(0, None))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    add_legend(figure, axes, columns=min(len(layers), 3), handlelength=1.0)
    return figure


def plot_parts(
    parts: Sequence[tuple[str, float, tuple[float, float] | None]], metric: str, whole: float | None
) -> Figure | None:
    """Draw one metric of every silo or subgroup as a mark, and that of all records as a dotted level.

    Args:
        parts: Name, value and 95 % interval of each; None draws no interval.
        metric: The name of the metric.
        whole: Its value on all records.

    Returns:
        A figure; None where fewer than two parts have the metric.
    """
    if len(parts) < 2:
        return None
    shown = parts[:MAX_PARTS]
    figure, axes = make_panel(metric, "", size=(4.7, 0.9 + 0.27 * len(shown)))
    places = range(len(shown))
    values = [value for _, value, _ in shown]
    limits = [(value, *(interval or (value, value))) for _, value, interval in shown]
    errors = [[value - low for value, low, _ in limits], [high - value for value, _, high in limits]]
    axes.errorbar(values, places, xerr=errors, fmt="o", color=PALETTE[0], markersize=7)
    if whole is not None:
        axes.axvline(whole, color=MUTED, linewidth=1.4, linestyle=":")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.xaxis.grid(True)
    axes.yaxis.grid(False)
    axes.margins(x=0.08, y=0.12)
    axes.set_yticks(list(places), [shorten_label(name, 24) for name, *_ in shown])
    axes.invert_yaxis()
    return figure


def plot_calibration(bins: Sequence[CalibrationBin], name: str) -> Figure | None:
    """Draw the observed share of a class against its predicted probability, with 95 % intervals.

    Returns:
        A figure; None where there are fewer than two steps to draw: a table says as much as a single mark.
    """
    if len(bins) < 2:
        return None
    figure, axes = make_panel(f"predicted probability of {shorten_label(name, 18)}", "observed share")
    axes.plot([0, 1], [0, 1], color=MUTED, linewidth=1.4, linestyle=":")
    limits = [(one.observed, *find_interval(one.observed, one.error)) for one in bins]
    # No line: steps are left out where they have no records, or are lost in the noise, and it would join the others.
    axes.errorbar(
        [one.predicted for one in bins],
        [value for value, _, _ in limits],
        yerr=[[value - low for value, low, _ in limits], [high - value for value, _, high in limits]],
        color=PALETTE[0],
        fmt="o",
        elinewidth=1.2,
        capsize=3,
    )
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    return figure


def plot_confusion(counts: Sequence[Sequence[float]], names: Sequence[str]) -> Figure | None:
    """Draw records by true class (rows) and predicted class, colored by their share of the row.

    Returns:
        A figure; None where there is nothing to draw, or too many classes for a picture.
    """
    values = np.maximum(np.asarray(counts, dtype=float), 0)
    if not values.size or len(values) > MAX_CLASSES:
        return None
    side = 1.7 + 0.45 * len(values)
    figure, axes = make_panel("predicted", "true", size=(side + 0.7, side))
    # Noisy counts can add up to nothing, or to less.
    share = values / np.maximum(values.sum(axis=1, keepdims=True), 1e-9)
    axes.imshow(share, cmap=_SHADES, vmin=0, vmax=1, aspect="equal")
    for (row, column), value in np.ndenumerate(values):
        # White is readable from the middle of the scale of blues on.
        color = "white" if share[row, column] > 0.55 else "#1b1d23"
        axes.text(column, row, f"{value:,.0f}", ha="center", va="center", color=color, fontsize=9)
    labels = [shorten_label(name, 12) for name in names]
    turned = 60 if len(labels) > 3 else 0
    axes.set_xticks(range(len(labels)), labels, rotation=turned)
    axes.set_yticks(range(len(labels)), labels)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return figure


def plot_comparison(
    curves: Sequence[Curve],
    quantity: str,
    untrained: float | None = None,
    against: str = "round",
    constant: float | None = None,
) -> Figure | None:
    """Draw mean ± one standard deviation of every method.

    Args:
        curves: The methods.
        quantity: Name of what was measured.
        untrained: Value of the untrained model, a dotted level; None leaves it out.
        against: "round", or "epsilon" for the released ε. A method without privacy is dashed, and against ε the level
            at which it ends, where `is_level`.
        constant: Value of a constant prediction, a dash-dotted level; None leaves it out.

    Returns:
        A figure; None where there is nothing to draw.
    """
    by_round = against == "round"
    x_label = "round" if by_round else f"ε against {ADVERSARY_LABELS['released']}"
    figure, axes = make_panel(x_label, f"{quantity} (mean ± sd)")
    drawn, has_curve = [], False
    for (curve, line), covering in zip(_styles(curves), count_covering(curves), strict=True):
        # A curve that others are drawn over is wider than these, so that it shows on both sides.
        line["linewidth"] += _WIDER * min(covering, _MOST_COVERING)
        x = np.asarray(curve.rounds if by_round else curve.epsilon, dtype=float)
        mean, sd = np.asarray(curve.mean, dtype=float), np.asarray(curve.sd, dtype=float)
        known = mean[np.isfinite(mean)].tolist()
        good = np.flatnonzero(np.isfinite(x) & np.isfinite(mean) & (by_round | (x > 0))).tolist()
        if not by_round and not curve.private and known:
            if curve.is_level:
                axes.axhline(known[-1], **line)
                drawn.append(known[-1])
        elif good:
            # A line is drawn through gaps of rounds without a value.
            kept = np.array(thin(good))
            x, mean, sd = x[kept], mean[kept], np.nan_to_num(sd[kept])
            axes.fill_between(x, mean - sd, mean + sd, color=line["color"], alpha=0.16, linewidth=0)
            axes.plot(x, mean, marker="o" if len(x) == 1 else None, **line)
            drawn += mean.tolist()
            has_curve = True
    if not has_curve or len(drawn) < 2:
        return None
    if untrained is not None:
        axes.axhline(untrained, color=MUTED, linewidth=1.4, linestyle=":", label="untrained")
    if constant is not None:
        axes.axhline(constant, color=INK, linewidth=1.2, linestyle=DASHES[3], label="constant")
    low, high = min(drawn), max(drawn)
    # A method that diverged must not flatten the others.
    if low > 0 and high > WIDE_RATIO * low:
        axes.set_ylim(0.8 * low, 1.5 * high)
        set_log_scale(axes, "y")
    if not by_round:
        set_log_scale(axes, "x")
    add_legend(figure, axes)
    return figure


def count_covering(curves: Sequence[Curve]) -> list[int]:
    """Return for each curve how many of those that are drawn later lie on it, to the width of a line."""
    means = [np.asarray(curve.mean, float) for curve in curves]
    known = [mean[np.isfinite(mean)] for mean in means]
    everything = np.concatenate([*known, [0.0]])[:-1]
    width = _LINE * float(np.ptp(everything)) if len(everything) else 0.0

    def is_covered(first: int, second: int) -> bool:
        same = list(curves[first].rounds) == list(curves[second].rounds)
        return same and bool(np.allclose(means[first], means[second], rtol=0, atol=width, equal_nan=True))

    places = range(len(curves))
    return [sum(is_covered(place, later) for later in places[place + 1 :]) for place in places]


def plot_epsilon_comparison(curves: Sequence[Curve]) -> Figure | None:
    """Draw the released ε of every method after every round; methods with the same ε share a line.

    Returns:
        A figure; None where no method has an ε.
    """
    drawn = []
    for curve, line in _styles(curves):
        spent = zip(curve.rounds, curve.epsilon, strict=True)
        points = [(round_, value) for round_, value in spent if math.isfinite(value)]
        if any(value > 0 for _, value in points):
            drawn.append((line.pop("label"), points, line))
    return _draw_epsilon(drawn)


def _draw_epsilon(
    curves: Iterable[tuple[str, Iterable[tuple[float, float]], dict[str, Any] | None]],
) -> Figure | None:
    """Draw curves of ε against rounds, each given as name, points and style; without a style it gets the next one."""
    lines: dict[tuple[tuple[float, float], ...], tuple[dict[str, Any], list[str]]] = {}
    for name, spent, style in curves:
        # Six figures, so that curves which differ less than a line is wide share one line and one entry of the legend.
        points = tuple((round_, float(f"{epsilon:.6g}")) for round_, epsilon in spent)
        turn = len(lines)
        style = style or {"color": PALETTE[turn], "linestyle": DASHES[turn], "linewidth": 2.2}
        lines.setdefault(points, (style, []))[1].append(name)
    if not lines:
        return None
    last = [points[-1][1] for points in lines]
    wide = max(last) > WIDE_RATIO * min(last)
    # A logarithmic axis has no place for the ε = 0 of the untrained model.
    shown = [
        (line, thin([point for point in points if point[1] > 0 or not wide]))
        for points, line in lines.items()
    ]
    if sum(len(kept) for _, kept in shown) < 2:  # one mark says no more than the number
        return None
    figure, axes = make_panel("round", "ε spent so far")
    for (style, names), kept in shown:
        marker = "o" if len(kept) == 1 else None
        axes.plot(*zip(*kept, strict=True), marker=marker, label="\n= ".join(names), **style)
    if wide:
        set_log_scale(axes, "y")
    else:
        axes.set_ylim(bottom=0)
    add_legend(figure, axes, columns=1)
    return figure


def plot_spending(groups: Sequence[Mapping[str, Any]], unit: str) -> Figure | None:
    """Draw how many units requested which ε (above), and how much they were charged (below).

    Args:
        groups: The groups, as in `Guarantee.groups`; the charge of a group is that of the unit that was charged most.
        unit: Noun for one unit.

    Returns:
        A figure; None where there are no groups.
    """
    if not groups:
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.4, 3.7), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.0, 1.7))
    above.bar(range(len(groups)), [group["units"] for group in groups], color=MUTED, width=0.6)
    above.set_ylabel(f"{unit}s")
    above.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    above.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    budgets, ticks = [group["budget"] for group in groups], np.arange(len(groups))
    below.hlines(budgets, ticks - 0.3, ticks + 0.3, color=INK, linewidth=2, label="requested")
    for key, label, marker, shift, color in (
        ("planned", "planned", "o", -0.1, PALETTE[0]),
        ("realized", "realized", "D", 0.1, PALETTE[1]),
    ):
        charged = [as_number(group.get(key)) or 0.0 for group in groups]
        points = [(place + shift, value) for place, value in enumerate(charged) if value > 0]
        if points:
            below.plot(*zip(*points, strict=True), marker, color=color, markersize=6, label=label)
    below.set_ylabel("ε")
    below.margins(y=0.1)
    set_log_scale(below, "y")
    below.set_xlabel("requested ε")
    turned = 60 if len(groups) > MAX_LABELS else 0
    below.set_xticks(ticks, [format_epsilon(budget) for budget in budgets], rotation=turned)
    add_legend(figure, below, columns=1)
    return figure


def plot_epsilon_by_sampling(
    curves: Sequence[SamplingCurve],
    budgets: Sequence[float] = (),
    name: str = "sampling probability",
    costs: str = "ε after the run",
) -> Figure:
    """Draw ε against q on logarithmic axes.

    Args:
        curves: One for each noise multiplier.
        budgets: Ε that are drawn as levels.
        name: Label of the axis of q.
        costs: Label of the axis of ε.

    Source: rPDP-FL, Figure 6.
    """
    figure, axes = make_panel(name, costs, size=(5.6, 3.9))
    # A decade below the smallest budget: the axis would otherwise begin where bounds are of no use to anybody.
    floor = min([*budgets, 10 * MIN_DRAWN]) / 10
    for turn, curve in enumerate(curves):
        pairs = zip(curve.sampling, curve.epsilon, strict=True)
        points = [(q, epsilon) for q, epsilon in pairs if (as_number(epsilon) or 0) >= floor]
        if points:
            color = PALETTE[turn % len(PALETTE)]
            axes.plot(*zip(*points, strict=True), color=color, linewidth=2, label=curve.label)
    for turn, budget in enumerate(budgets):
        # Matplotlib leaves a label that begins with "_" out of the legend.
        label = "_" if turn else "budgets"
        axes.axhline(budget, color=INK, linewidth=1.1, linestyle=(0, (4, 2)), label=label)
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
    set_log_scale(axes, "x")
    set_log_scale(axes, "y")
    add_legend(figure, axes)
    return figure


def _styles(curves: Sequence[Curve]) -> Iterable[tuple[Curve, dict[str, Any]]]:
    """Yield a line style for each curve: the reference in ink, methods without privacy dashed."""
    turn = 0
    for curve in curves:
        color, dashes = (INK, 0) if curve.reference else (PALETTE[turn % len(PALETTE)], turn // len(PALETTE))
        turn += not curve.reference
        line = DASHES[1] if not curve.private else ("-", *DASHES[2:])[dashes % 3]
        label = shorten_label(curve.label, keep=_KEPT_END) + curve.note
        yield curve, {"color": color, "linestyle": line, "linewidth": 2, "label": label}


def thin(points: Sequence[_T], most: int = MAX_POINTS) -> list[_T]:
    """Return at most so many points: the first, the last, and evenly spread ones between."""
    # The last point is always kept: its value is the one that captions and tables state.
    if len(points) <= most:
        return list(points)
    return [points[i] for i in np.linspace(0, len(points) - 1, most).round().astype(int)]
