"""A comparison as a Markdown table and as a page with pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from silodp.accounting.guarantee import ADVERSARIES
from silodp.errors import counted, name_file
from silodp.report import plots
from silodp.report.formatting import format_epsilon, format_measure
from silodp.report.guarantee_text import CLAIMED, format_requested_and_spent
from silodp.report.page import Picture, render

Fields = dict[str, Any]


def table(result: Mapping[str, Any]) -> str:
    """The comparison as a Markdown table: values of the last round, never of the best one."""
    asked = ["ε asked → spent"] if any(method["groups"] for method in result["methods"]) else []
    spent_on = [f"ε {adversary}" for adversary in ADVERSARIES]
    head = ["method", *result["quantities"], *spent_on, *asked, "seconds"]
    lines = [f"| {' | '.join(_cell(text) for text in head)} |", "|" + "---|" * len(head)]
    untrained = [format_measure(result["untrained"].get(name)) for name in result["quantities"]]
    for method in result["methods"]:
        ends = [spread_text(method["final"].get(name)) for name in result["quantities"]]
        spent = [format_epsilon(method["epsilon"][adversary]) for adversary in ADVERSARIES]
        budgets = [format_requested_and_spent(method["groups"])] if asked else []
        cells = [shown_name(method), *ends, *spent, *budgets, f"{method['seconds']:.1f}"]
        lines.append(f"| {' | '.join(_cell(text) for text in cells)} |")
    lines.append(
        f"| {' | '.join(['untrained', *map(_cell, untrained), '0', '0', '0', *('–' for _ in asked), '–'])} |"
    )
    claims = [
        f"[{CLAIMED}: no guarantee] {method['label']}, ε released = {format_epsilon(claim['epsilon'])}: {claim['why']}"
        for method in result["methods"]
        for claim in method["claims"]
    ]
    warnings = [f"Warning: {text}" for text in result["warnings"]]
    after = (text for one in (*warnings, result["note"], *claims) for text in ("", one))
    return "\n".join([*lines, *after, ""])


def shown_name(method: Mapping[str, Any]) -> str:
    """A method's label, and for one without privacy that it draws no noise, and whether anybody tuned it."""
    if method["unit"] is not None:
        return str(method["label"])
    return f"{method['label']} (no noise{'' if method['has_own_settings'] else ', not tuned'})"


def is_level(method: Mapping[str, Any]) -> bool:
    """Whether a method without privacy may stand for what is possible: it was tuned, and is below no private one."""
    return method["unit"] is None and method["has_own_settings"] and method["warning"] is None


def spread_text(end: Mapping[str, Any] | None) -> str:
    """ "mean ± sd" of a final value, and how many runs have one if not all; "–" where none has."""
    if end is None or end["mean"] is None:
        return "–"
    few = f" ({end['n']} of {end['of']})" if end["n"] < end["of"] else ""
    return f"{end['mean']:.4g}" + ("" if end["sd"] is None else f" ± {end['sd']:.2g}") + few


def _cell(text: str) -> str:
    """A name cannot end its cell."""
    return " ".join(text.split()).replace("|", r"\|")


def page(result: Fields, out: Path) -> str:
    """compare.html, and its pictures under plots/."""
    (out / "plots").mkdir(exist_ok=True)
    utility: list[Picture] = []
    for i, name in enumerate(result["quantities"]):
        curves = [_curve(method, name) for method in result["methods"]]
        untrained = result["untrained"][name]
        for against, caption in (
            (
                "round",
                f"{name} after every round: mean of {counted(result['seeds'], 'run')}, band ± one standard deviation.",
            ),
            (
                "epsilon",
                f"{name} against the ε spent on it, logarithmic.{_levels(result)}",
            ),
        ):
            figure = plots.comparison(curves, name, untrained, against)
            if figure is not None:
                utility.append(_saved(figure, out, f"{i}-{against}", caption))
    curves = [_curve(method, None) for method in result["methods"]]
    figure = plots.epsilon_comparison(curves)
    caption = "ε against whoever sees the models, after every round of one run."
    epsilon = None if figure is None else _saved(figure, out, "epsilon", caption)
    ends = [
        {
            **m,
            "name": shown_name(m),
            "asked": format_requested_and_spent(m["groups"]),
            "ends": [spread_text(m["final"][name]) for name in result["quantities"]],
        }
        for m in result["methods"]
    ]
    untrained_texts = [format_measure(result["untrained"][name]) for name in result["quantities"]]
    return render(
        "compare.html",
        result=result,
        methods=ends,
        untrained=untrained_texts,
        asked=any(method["groups"] for method in result["methods"]),
        claimed=CLAIMED,
        utility=utility,
        epsilon=epsilon,
    )


def _levels(result: Fields) -> str:
    """What becomes of methods that spend no ε, in a picture against ε."""
    levels = [shown_name(method) for method in result["methods"] if is_level(method)]
    absent = [shown_name(m) for m in result["methods"] if m["unit"] is None and not is_level(m)]
    drawn = f" Dashed: the level at which {' and '.join(levels)} ends." if levels else ""
    return drawn + (
        f" Not drawn, as it does not show what is possible: {' and '.join(absent)}." if absent else ""
    )


def _curve(method: Fields, name: str | None) -> plots.Curve:
    """A method's curve of one quantity, or of ε alone."""
    empty = [None] * len(method["rounds"])
    curve = method["curves"][name] if name is not None else {"mean": empty, "sd": empty}
    return plots.Curve(
        label=shown_name(method),
        rounds=method["rounds"],
        mean=[math.nan if value is None else value for value in curve["mean"]],
        sd=[math.nan if value is None else value for value in curve["sd"]],
        epsilon=[math.nan if value is None else value for value in method["epsilon_by_round"]["released"]],
        private=method["private"],
        reference=is_level(method),
        is_level=method["unit"] is not None or is_level(method),
    )


def _saved(figure: Any, out: Path, name: str, caption: str) -> Picture:
    document = plots.svg(figure, name)
    path = out / "plots" / f"{name}.svg"
    with name_file(path):
        path.write_text(document, encoding="utf-8")
    return Picture(Markup(plots.inline(document, caption)), caption)
