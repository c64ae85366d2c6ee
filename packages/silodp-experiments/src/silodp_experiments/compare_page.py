"""A comparison of methods as a Markdown table, and as a page with pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from silodp.accounting.guarantee import format_epsilon
from silodp.accounting.views import ADVERSARIES
from silodp.report import plots
from silodp.report.formatting import format_measure, render
from silodp.report.guarantee_text import ADVERSARY_LABELS, CLAIMED, format_requested_and_charged
from silodp.report.page import Picture, PictureFolder
from silodp.text import join_names, pluralize

Fields = dict[str, Any]


def format_table(result: Mapping[str, Any]) -> str:
    """Return the comparison as a Markdown table.

    Args:
        result: from `compare_methods`; the values are those of the last round, not of the best one.
    """
    requested = ["ε requested → charged"] if any(method["groups"] for method in result["methods"]) else []
    spent_on = [f"ε {adversary}" for adversary in ADVERSARIES]
    head = ["method", *result["quantities"], *spent_on, *requested, "seconds"]
    lines = [f"| {' | '.join(_escape_cell(text) for text in head)} |", "|" + "---|" * len(head)]
    untrained = [format_measure(result["untrained"].get(name)) for name in result["quantities"]]
    for method in result["methods"]:
        ends = [format_spread(method["final"].get(name)) for name in result["quantities"]]
        spent = [format_epsilon(method["epsilon"][adversary]) for adversary in ADVERSARIES]
        budgets = [format_requested_and_charged(method["groups"])] if requested else []
        cells = [format_label(method), *ends, *spent, *budgets, f"{method['seconds']:.1f}"]
        lines.append(f"| {' | '.join(_escape_cell(text) for text in cells)} |")
    constant = [format_measure(find_constant(result, name)) for name in result["quantities"]]
    lines.append(f"| {' | '.join(['constant', *constant, *('–' for _ in head[len(constant) + 1 :])])} |")
    lines.append(
        f"| {' | '.join(['untrained', *map(_escape_cell, untrained), '0', '0', '0', *('–' for _ in requested), '–'])} |"
    )
    claims = [
        f"[{CLAIMED}: no guarantee] {method['label']}, ε released = {format_epsilon(claim['epsilon'])}: {claim['why']}"
        for method in result["methods"]
        for claim in method["claims"]
    ]
    warnings = [f"Warning: {text}" for text in result["warnings"]]
    after = (text for one in (*warnings, result["note"], *claims) for text in ("", one))
    return "\n".join([*lines, *after, ""])


def format_label(method: Mapping[str, Any]) -> str:
    """Return the label of a method, and that it has no noise or was not tuned."""
    return f"{method['label']}{_format_note(method)}"


def _format_note(method: Mapping[str, Any]) -> str:
    notes = [*(["no noise"] if method["unit"] is None else []), *(["untuned"] if method["untuned"] else [])]
    return f" ({', '.join(notes)})" if notes else ""


def is_level(method: Mapping[str, Any]) -> bool:
    """Return whether a method without privacy shows the level without noise: tuned, and not below a private one."""
    return method["unit"] is None and not method["untuned"] and method["warning"] is None


def format_spread(end: Mapping[str, Any] | None) -> str:
    """Return "mean ± sd" of a final value, and how many runs have one if not all; "–" where none has."""
    if end is None or end["mean"] is None:
        return "–"
    few = f" ({end['n']} of {end['of']})" if end["n"] < end["of"] else ""
    return f"{end['mean']:.4g}" + ("" if end["sd"] is None else f" ± {end['sd']:.2g}") + few


def find_constant(result: Mapping[str, Any], name: str) -> float | None:
    """Return what a constant prediction has in place of a quantity; None where that is not known."""
    names = ("log_loss",) if name == "loss" else (name,)
    for method in result["methods"]:
        for one in (method["skill"] or {"comparisons": ()})["comparisons"]:
            mean = method["final"].get(name, {}).get("mean")
            if one["metric"] in names and mean is not None and math.isclose(one["value"], mean, rel_tol=1e-3):
                return float(one["constant"])
    return None


def _escape_cell(text: str) -> str:
    """Return text that cannot end its cell."""
    return " ".join(text.split()).replace("|", r"\|")


def render_comparison(result: Fields, out: Path) -> str:
    """Return the page of a comparison, and write its pictures to DIR/plots.

    Args:
        result: from `compare_methods`.
        out: DIR.
    """
    pictures = PictureFolder(out / "plots")
    utility: list[Picture] = []
    for i, name in enumerate(result["quantities"]):
        curves = [_make_curve(method, name) for method in result["methods"]]
        untrained = result["untrained"][name]
        for against, caption in (
            (
                "round",
                f"{name} after every round: mean of {pluralize(result['seeds'], 'run')}, band ± one "
                "standard deviation. Of curves that lie on one another, the lower ones are wider.",
            ),
            (
                "epsilon",
                f"{name} against the ε spent, on a logarithmic axis.{_describe_levels(result)}",
            ),
        ):
            figure = plots.plot_comparison(curves, name, untrained, against, find_constant(result, name))
            if figure is not None:
                utility.append(pictures.add(f"{i}-{against}", figure, caption))
    curves = [_make_curve(method, None) for method in result["methods"]]
    figure = plots.plot_epsilon_comparison(curves)
    caption = f"ε against {ADVERSARY_LABELS['released']}, after every round of one run."
    epsilon = None if figure is None else pictures.add("epsilon", figure, caption)
    # Names of pictures begin with a number or "epsilon": those of an earlier comparison must not stay beside the new
    # ones.
    pictures.remove_old((*"0123456789", "epsilon"))
    ends = [
        {
            **m,
            "name": format_label(m),
            "requested": format_requested_and_charged(m["groups"]),
            "ends": [format_spread(m["final"][name]) for name in result["quantities"]],
        }
        for m in result["methods"]
    ]
    constant_texts = [format_measure(find_constant(result, name)) for name in result["quantities"]]
    untrained_texts = [format_measure(result["untrained"][name]) for name in result["quantities"]]
    return render(
        Path(__file__).with_name("compare.html"),
        result=result,
        methods=ends,
        missing=_list_missing(result["methods"]),
        untrained=untrained_texts,
        constant=constant_texts,
        requested=any(method["groups"] for method in result["methods"]),
        claimed=CLAIMED,
        utility=utility,
        epsilon=epsilon,
    )


def _list_missing(methods: Sequence[Mapping[str, Any]]) -> list[tuple[list[str], str]]:
    """Return the labels of private methods and the guarantees that they do not have; equal texts once."""
    found: dict[str, list[str]] = {}
    for method in methods:
        against: dict[str, list[str]] = {}
        for adversary in ADVERSARIES:
            if method["private"] and method["reasons"][adversary]:
                against.setdefault(method["reasons"][adversary], []).append(ADVERSARY_LABELS[adversary])
        if against:
            parts = (f"no guarantee against {join_names(who)}: {reason}" for reason, who in against.items())
            found.setdefault("; ".join(parts), []).append(method["label"])
    return [(labels, text) for text, labels in found.items()]


def _describe_levels(result: Fields) -> str:
    """Return sentences on how methods without ε appear in a picture against ε."""
    levels = [format_label(method) for method in result["methods"] if is_level(method)]
    absent = [format_label(m) for m in result["methods"] if m["unit"] is None and not is_level(m)]
    drawn = f" Dashed: the level at which {join_names(levels)} ends." if levels else ""
    return drawn + (
        f" Not drawn, because it does not show the level without noise: {join_names(absent)}."
        if absent
        else ""
    )


def _make_curve(method: Fields, name: str | None) -> plots.Curve:
    """Return the curve of one quantity of a method, or of ε alone."""
    empty = [None] * len(method["rounds"])
    curve = method["curves"][name] if name is not None else {"mean": empty, "sd": empty}
    return plots.Curve(
        label=method["label"],
        note=_format_note(method),
        rounds=method["rounds"],
        mean=[math.nan if value is None else value for value in curve["mean"]],
        sd=[math.nan if value is None else value for value in curve["sd"]],
        epsilon=[math.nan if value is None else value for value in method["epsilon_by_round"]["released"]],
        private=method["private"],
        reference=is_level(method),
        is_level=method["unit"] is not None or is_level(method),
    )
