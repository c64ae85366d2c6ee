"""National numbers as named rules: how each is written, checked, and made one canonical identifier."""

from __future__ import annotations

from silodp.data.identity.national import europe, nordic, world
from silodp.data.identity.national.rule import NumberRule

__all__ = ["RULES", "NumberRule", "find_rule", "format_rules"]

RULES: tuple[NumberRule, ...] = tuple(
    sorted((*nordic.RULES, *europe.RULES, *world.RULES), key=lambda rule: (not rule.country, rule.name))
)
"""By country; numbers that name their country themselves come last."""


def find_rule(country: str, number: str) -> NumberRule | None:
    """Return the rule of a country's number, if there is one."""
    return next((rule for rule in RULES if (rule.country, rule.number) == (country, number)), None)


def format_rules() -> str:
    """Return a table of all rules in Markdown, for the documentation."""
    rows = ["| `country` | `number` | what | accepted | source |", "|---|---|---|---|---|"]
    for rule in RULES:
        layouts = ", ".join(f"`{layout}`" for layout in rule.layouts[:4])
        layouts = "by country" if len(rule.layouts) > 4 else layouts
        what = f"{rule.title}. {rule.note[:1].upper()}{rule.note[1:]}".removesuffix(". ")
        country = f"`{rule.country}`" if rule.country else ""
        rows.append(f"| {country} | `{rule.number}` | {what} | {layouts} | {rule.source} |")
    return "\n".join(rows)
