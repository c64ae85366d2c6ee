"""What a guarantee says beyond its one ε: to persons with several records, by personal budgets; and mere claims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from silodp.accounting.guarantee import Adversary, Guarantee, format_rounded_up
from silodp.report.formatting import as_number, format_epsilon

CLAIMED = "claimed, not proven"

_MOST_LISTED = 5
_EXCESS = 1e-6
"""Relative; less is the accountant's arithmetic."""


@dataclass(frozen=True)
class PersonTable:
    """Rows (k, ε towards each of `against`); an ε is None where nothing is promised to somebody with k records."""

    against: tuple[Adversary, ...]
    rows: tuple[tuple[int, tuple[float | None, ...]], ...]


@dataclass(frozen=True)
class BudgetSpending:
    """What units with budgets of their own asked for and were charged, towards each of `against` alike."""

    against: tuple[Adversary, ...]
    groups: tuple[dict[str, Any], ...]

    @property
    def exceeded(self) -> int:
        """How many units were charged more than they asked for."""
        return sum(group["units"] for group in self.groups if exceeds(group))

    @property
    def columns(self) -> tuple[str, ...]:
        """What else the entries say, in the order in which it first appears."""
        known = ("budget", "units", "planned", "realized", "book")
        return tuple(dict.fromkeys(key for group in self.groups for key in group if key not in known))


def exceeds(group: Mapping[str, Any]) -> bool:
    """Whether a group was charged more than it asked for, by the run's book."""
    charged = charge(group)
    return charged is not None and charged > group["budget"] * (1 + _EXCESS)


def charge(group: Mapping[str, Any]) -> float | None:
    """What the book of the run charged a group; the other one where it does not keep it."""
    book, other = ("realized", "planned") if group.get("book") == "realized" else ("planned", "realized")
    charged = as_number(group.get(book))
    return as_number(group.get(other)) if charged is None else charged


def persons(guarantees: Iterable[Guarantee]) -> PersonTable | None:
    """The table for persons with several records, one record first; None where no guarantee is about records."""
    told = [said for said in guarantees if said.private and said.persons]
    if not told:
        return None
    numbers = sorted({records for said in told for records, _ in said.persons})
    rows = [(1, tuple(said.epsilon for said in told))]
    rows += [(k, tuple(dict(said.persons).get(k) for said in told)) for k in numbers if k > 1]
    return PersonTable(tuple(said.adversary for said in told), tuple(rows))


def spending(guarantees: Iterable[Guarantee]) -> tuple[BudgetSpending, ...]:
    """Budgets asked for and spent; adversaries towards whom it is the same stand together."""
    found: dict[str, tuple[list[Adversary], tuple[dict[str, Any], ...]]] = {}
    for said in guarantees:
        if said.groups:
            found.setdefault(repr(said.groups), ([], said.groups))[0].append(said.adversary)
    return tuple(BudgetSpending(tuple(against), groups) for against, groups in found.values())


def claims(guarantees: Iterable[Guarantee]) -> tuple[tuple[Adversary, float, str], ...]:
    """(adversary, claimed ε, why it is only claimed), where it is less than what is proven."""
    return tuple(
        (said.adversary, claim["epsilon"], claim["why"])
        for said in guarantees
        for claim in said.claims
        if is_only_claimed(claim["epsilon"], said.epsilon)
    )


def is_only_claimed(claimed: float, proven: float | None) -> bool:
    """Whether a claim goes beyond the guarantee; some claims are no less than what holds anyway."""
    return proven is None or claimed < proven * (1 - _EXCESS)


def format_text(guarantees: Sequence[Guarantee]) -> list[str]:
    """All of it for reading in a terminal; claims last, each labelled."""
    lines: list[str] = []
    table = persons(guarantees)
    towards: dict[tuple[float | None, ...], list[str]] = {}
    for place, adversary in enumerate(table.against if table else ()):
        promised = tuple(values[place] for _, values in table.rows[1:])  # type: ignore[union-attr]
        towards.setdefault(promised, []).append(adversary)
    for promised, against in towards.items():
        numbers = "/".join(str(records) for records, _ in table.rows[1:])  # type: ignore[union-attr]
        epsilons = "/".join(format_rounded_up(value) for value in promised)
        lines.append(f"A person with {numbers} records gets ε = {epsilons} ({', '.join(against)}).")
    for spent in spending(guarantees):
        asked = "; ".join(format_group(group) for group in spent.groups)
        lines.append(f"Asked for → charged ({', '.join(spent.against)}): {asked}.")
        if spent.exceeded:
            lines.append(f"More than asked for was charged to {spent.exceeded:,} of them.")
    claimed: dict[tuple[float, str], list[str]] = {}
    for adversary, value, why in claims(guarantees):
        claimed.setdefault((value, why), []).append(adversary)
    for (value, why), against in claimed.items():
        lines.append(
            f"[{CLAIMED}: no guarantee] ε = {format_rounded_up(value)} ({', '.join(against)}): {why}."
        )
    return lines


def format_group(group: Mapping[str, Any]) -> str:
    """ "0.1 → 0.099 (700)": asked for, charged, by how many; where several budgets stand together from which to which.

    Both are rounded up to the same decimals: what was kept never looks exceeded.
    """
    return f"{format_requested(group)} → {format_rounded_up(charge(group))} ({group['units']:,})"


def format_requested(group: Mapping[str, Any]) -> str:
    """The budget of a group, or from which to which, rounded up as what is charged is."""
    least = as_number(group.get("from", group.get("least")))  # of records, of persons
    asked = format_rounded_up(group["budget"])
    return (
        asked if least is None or format_rounded_up(least) == asked else f"{format_rounded_up(least)}–{asked}"
    )


def format_requested_and_spent(groups: Sequence[Mapping[str, Any]]) -> str:
    """A cell: "0.100 → 0.0991, 1.00 → 0.99"; of many the range of the parts spent; "–" where nobody asked.

    Of what was asked for and what was charged both are rounded up alike: what was kept never looks exceeded.
    """
    if not groups:
        return "–"
    over = sum(group["units"] for group in groups if exceeds(group))
    alarm = f"; {over:,} charged more than asked" if over else ""
    if len(groups) <= _MOST_LISTED:
        # Unbroken pairs: a page may break the list only between them.
        pairs = (
            f"{format_epsilon(group['budget'])}\u00a0→\u00a0{format_epsilon(charge(group))}"
            for group in groups
        )
        return ", ".join(pairs) + alarm
    parts = [100 * (charge(group) or 0.0) / group["budget"] for group in groups]
    asked = [group["budget"] for group in groups]
    return f"{min(asked):.3g} to {max(asked):.3g} → {min(parts):.0f} to {max(parts):.0f} %{alarm}"


def is_valid_guarantee(said: Guarantee) -> bool:
    """Whether what was read from a file can be shown."""

    def costs(value: Any) -> bool:
        return value is None or (as_number(value) is not None and value >= 0)

    def is_count(value: Any) -> bool:
        return type(value) is int and 0 <= value < 1 << 63

    texts = (said.accountant, said.method, *said.assumptions, *said.not_covered)
    optional = tuple(text for text in (said.unit, said.reason) if text is not None)
    try:
        return (
            all(isinstance(text, str) for text in texts + optional)
            and isinstance(said.private, bool)
            and isinstance(said.releasable, bool)
            and is_count(said.rounds)
            and costs(said.any_dropouts)
            and all(is_count(k) and k >= 1 and costs(value) for k, value in said.persons)
            and all(
                (as_number(group["budget"]) or 0) > 0
                and is_count(group["units"])
                and all(costs(group.get(name)) for name in ("planned", "realized", "from", "least"))
                for group in said.groups
            )
            and all(
                costs(claim["epsilon"]) and claim["epsilon"] is not None and isinstance(claim["why"], str)
                for claim in said.claims
            )
        )
    except (TypeError, KeyError, AttributeError):
        return False
