"""Guarantees as text: ε in a sentence, persons with several records, per-unit privacy budgets, and claims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from silodp.accounting.guarantee import ON_THE_LIST, Guarantee, describe_reservations, format_epsilon
from silodp.accounting.trade_off import MembershipAttack, TradeOff
from silodp.accounting.views import Adversary
from silodp.report.formatting import as_number, format_accuracy, format_rate

T = TypeVar("T")

ADVERSARY_LABELS: dict[Adversary, str] = {
    "released": "whoever sees the models",
    "server": "the server",
    "silo": "another silo",
}
"""Each adversary within a sentence, after "against"."""

CLAIMED = "claimed, not proven"
NOT_PROTECTED = (
    f"Not protected: {ON_THE_LIST}. Who can see the list may learn that one of the silos knows them: as a patient, a "
    "customer or a pupil, whatever its persons are."
)
IF_DEPLOYED = (
    "The ε against the server and another silo hold once the same settings are deployed, with every party on a machine "
    "of its own."
)
"""What a simulation lacks: its models are protected against whoever sees nothing else of it."""

_MAX_LISTED = 5
_EXCESS = 1e-6
"""Relative; a smaller excess is rounding of the accountant."""


def describe_cover(is_private: bool) -> str:
    """Return whether ε covers metrics by noised sums, as the end of a clause with "which"."""
    return "ε covers" if is_private else "no ε covers, as there is no guarantee"


@dataclass(frozen=True)
class EpsilonTable:
    """ε of persons who are protected less than others.

    Attributes:
        against: The adversaries, one column each.
        rows: (case, whether ε is an estimate, ε against each adversary); the case is a number of records or a phrase,
            and ε is None where nothing is guaranteed.
    """

    against: tuple[Adversary, ...]
    rows: tuple[tuple[int | str, bool, tuple[float | None, ...]], ...]


@dataclass(frozen=True)
class BudgetSpending:
    """Requested and charged ε of units with privacy budgets.

    Attributes:
        against: The adversaries for whom the numbers are the same.
        groups: The groups, as in `Guarantee.groups`.
    """

    against: tuple[Adversary, ...]
    groups: tuple[dict[str, Any], ...]

    @property
    def exceeded(self) -> int:
        """Number of units that were charged more than they requested."""
        return sum(group["units"] for group in self.groups if is_exceeded(group))

    @property
    def columns(self) -> tuple[str, ...]:
        """Further entries of the groups, in the order in which they first appear."""
        known = ("budget", "units", "planned", "realized", "book")
        return tuple(dict.fromkeys(key for group in self.groups for key in group if key not in known))


def is_exceeded(group: Mapping[str, Any]) -> bool:
    """Return whether a group was charged more than it requested."""
    charged = get_charge(group)
    return charged is not None and charged > group["budget"] * (1 + _EXCESS)


def get_charge(group: Mapping[str, Any]) -> float | None:
    """Return ε charged to a group, by the charging mode of the run ("book"); by the other mode where it is missing."""
    # "book" is which of the two the run charges by, which was fixed before it began.
    book, other = ("realized", "planned") if group.get("book") == "realized" else ("planned", "realized")
    charged = as_number(group.get(book))
    return as_number(group.get(other)) if charged is None else charged


def tabulate_persons(guarantees: Iterable[Guarantee]) -> EpsilonTable | None:
    """Return ε of persons with several records, one record first; None where no guarantee is about records."""
    known = {
        one.adversary: {**dict(one.persons), 1: one.epsilon}
        for one in guarantees
        if one.private and one.persons
    }
    numbers = sorted(set().union(*known.values()))
    rows = ((k, False, tuple(epsilons.get(k) for epsilons in known.values())) for k in numbers)
    return EpsilonTable(tuple(known), tuple(rows)) if known else None


def tabulate_linkage(guarantees: Iterable[Guarantee]) -> EpsilonTable | None:
    """Return ε of persons who are not recognized; None where no guarantee says anything of them."""
    known = {
        one.adversary: {row["case"]: row for row in one.linkage}
        for one in guarantees
        if one.private and one.linkage
    }
    rows = []
    for case in dict.fromkeys(case for cases in known.values() for case in cases):
        found = [cases.get(case, {"epsilon": None, "estimate": False}) for cases in known.values()]
        is_estimate = any(row["estimate"] for row in found)
        rows.append((case, is_estimate, tuple(row["epsilon"] for row in found)))
    return EpsilonTable(tuple(known), tuple(rows)) if known else None


def collect_spending(guarantees: Iterable[Guarantee]) -> tuple[BudgetSpending, ...]:
    """Return requested and charged budgets; adversaries for whom they are the same share an entry."""
    found: dict[str, tuple[list[Adversary], tuple[dict[str, Any], ...]]] = {}
    for guarantee in guarantees:
        if guarantee.groups:
            # By their text: groups are dicts, which are no keys, and their order is that of the budgets.
            found.setdefault(repr(guarantee.groups), ([], guarantee.groups))[0].append(guarantee.adversary)
    return tuple(BudgetSpending(tuple(against), groups) for against, groups in found.values())


def collect_claims(guarantees: Iterable[Guarantee]) -> tuple[tuple[Adversary, float, str], ...]:
    """Return (adversary, claimed ε, why it is only claimed) of claims below the proven ε."""
    return tuple(
        (guarantee.adversary, claim["epsilon"], claim["why"])
        for guarantee in guarantees
        for claim in guarantee.claims
        if is_only_claimed(claim["epsilon"], guarantee.epsilon)
    )


def is_only_claimed(claimed: float, proven: float | None) -> bool:
    """Return whether a claim is below the proven ε; other claims add nothing to the guarantee."""
    return proven is None or claimed < proven * (1 - _EXCESS)


def describe_guarantee(guarantee: Guarantee, attack: MembershipAttack | None = None) -> str:
    """Return one guarantee as a sentence, with how well an attacker can guess.

    Args:
        guarantee: Against one adversary.
        attack: Bound on an attack by the charged events; None takes the weaker bound by ε and δ alone.
    """
    if guarantee.epsilon is None:
        return describe_epsilon(guarantee)
    took_part = "it is" if guarantee.unit == "record" else "they are"
    return (
        f"{describe_epsilon(guarantee)[:-1]}; an attacker who gives even odds that {took_part} in the data guesses "
        f"right at most {format_accuracy(bound_accuracy(guarantee, attack))} of the time{_describe_rates(attack)}."
    )


def _describe_rates(attack: MembershipAttack | None) -> str:
    """Return " (...)" with the bounds on ROC curves; "" where they are not known, or loose."""
    if attack is None or attack.auc is None or attack.tpr_1 is None or attack.tpr_01 is None:
        return ""
    return (
        f" (AUC at most {format_accuracy(attack.auc)}; true positive rate at most {format_rate(attack.tpr_1)} at a "
        f"false positive rate of 1 %, and {format_rate(attack.tpr_01)} at 0.1 %)"
    )


def bound_accuracy(guarantee: Guarantee, attack: MembershipAttack | None) -> float:
    """Return a bound on the accuracy of an attack on membership; where `attack` is None by ε and δ alone."""
    if attack is not None:
        return attack.accuracy
    return TradeOff.of_pair(guarantee.epsilon or 0.0, guarantee.delta).accuracy


def collect_by_adversary(stated: Mapping[Adversary, Iterable[T]]) -> dict[T, list[Adversary]]:
    """Return each value that guarantees state once, with the adversaries that it is about."""
    found: dict[T, list[Adversary]] = {}
    for adversary, values in stated.items():
        for value in dict.fromkeys(values):
            found.setdefault(value, []).append(adversary)
    return found


def describe_epsilon(guarantee: Guarantee) -> str:
    """Return one guarantee as a sentence: adversary, ε, δ and unit."""
    who = ADVERSARY_LABELS[guarantee.adversary]
    if guarantee.epsilon is None:
        return f"Against {who}: no guarantee, because {guarantee.reason}."
    unit = "one record" if guarantee.unit == "record" else "all records of a person"
    cap = describe_reservations(guarantee.any_dropouts, guarantee.sample_known)
    epsilon = format_epsilon(guarantee.epsilon)
    return f"Against {who}: ε = {epsilon} at δ = {guarantee.delta:g}{cap} for {unit}."


def format_guarantees(guarantees: Sequence[Guarantee]) -> list[str]:
    """Return lines on persons with several records, privacy budgets, and claims, each claim labeled as such."""
    lines: list[str] = []
    table = tabulate_persons(guarantees)
    if table is not None:
        # Without the first row: the ε of a person with one record is that of the guarantee itself.
        same: dict[tuple[float | None, ...], list[str]] = {}
        for place, adversary in enumerate(table.against):
            same.setdefault(tuple(values[place] for *_, values in table.rows[1:]), []).append(adversary)
        numbers = "/".join(str(records) for records, *_ in table.rows[1:])
        for values, against in same.items():
            epsilons = "/".join(format_epsilon(value) for value in values)
            lines.append(f"A person with {numbers} records has ε = {epsilons} ({', '.join(against)}).")
    for spending in collect_spending(guarantees):
        requested = "; ".join(format_group(group) for group in spending.groups)
        lines.append(f"Requested → charged ({', '.join(spending.against)}): {requested}.")
        if spending.exceeded:
            lines.append(f"{spending.exceeded:,} of them were charged more than requested.")
    claimed: dict[tuple[float, str], list[str]] = {}
    for adversary, value, why in collect_claims(guarantees):
        claimed.setdefault((value, why), []).append(adversary)
    lines += [format_claim(value, why, f" ({', '.join(who)})") for (value, why), who in claimed.items()]
    return lines


def format_claim(epsilon: float, why: str, against: str = "") -> str:
    """Return the line of a claim, labeled as no guarantee."""
    return f"[{CLAIMED}: no guarantee] ε = {format_epsilon(epsilon)}{against}: {why}"


def format_group(group: Mapping[str, Any]) -> str:
    """Return "0.1 → 0.099 (700)": requested, charged, and number of units; both ε are rounded up alike."""
    return f"{format_requested(group)} → {format_epsilon(get_charge(group))} ({group['units']:,})"


def format_requested(group: Mapping[str, Any]) -> str:
    """Return the requested ε of a group, or its range, rounded up like the charge."""
    least = as_number(group.get("from", group.get("least")))  # "from": of records; "least": of persons
    requested = format_epsilon(group["budget"])
    if least is None or format_epsilon(least) == requested:
        return requested
    return f"{format_epsilon(least)}–{requested}"


def format_requested_and_charged(groups: Sequence[Mapping[str, Any]]) -> str:
    """Return a cell of a table: "0.1 → 0.0991, 1 → 0.99", of many groups the ranges; "–" where there are none.

    Both are rounded up alike, so a budget that was kept never looks exceeded.
    """
    if not groups:
        return "–"
    over = sum(group["units"] for group in groups if is_exceeded(group))
    alarm = f"; {over:,} charged more than requested" if over else ""
    if len(groups) <= _MAX_LISTED:
        # No line break within a pair: a page may break the list only between pairs.
        pairs = (
            f"{format_epsilon(group['budget'])}\u00a0→\u00a0{format_epsilon(get_charge(group))}"
            for group in groups
        )
        return ", ".join(pairs) + alarm
    # Of many budgets the shares of them that were spent: a list of a hundred pairs says nothing in a cell.
    parts = [100 * (get_charge(group) or 0.0) / group["budget"] for group in groups]
    requested = [group["budget"] for group in groups]
    return f"{min(requested):.3g} to {max(requested):.3g} → {min(parts):.0f} to {max(parts):.0f} %{alarm}"


def is_valid_guarantee(guarantee: Guarantee) -> bool:
    """Return whether a guarantee that was read from a file can be shown."""

    def is_epsilon(value: Any) -> bool:
        return value is None or (as_number(value) is not None and value >= 0)

    # By its type: True is an int. Below 2^63: JSON can hold whole numbers that no float and no format can.
    def is_count(value: Any) -> bool:
        return type(value) is int and 0 <= value < 1 << 63

    texts = (guarantee.accountant, guarantee.method, *guarantee.not_covered)
    optional = tuple(text for text in (guarantee.unit, guarantee.reason) if text is not None)
    try:
        return (
            all(isinstance(text, str) for text in texts + optional)
            and isinstance(guarantee.private, bool)
            and isinstance(guarantee.releasable, bool)
            and guarantee.private == (guarantee.epsilon is not None)
            and is_epsilon(guarantee.epsilon)
            and 0 < guarantee.delta < 1
            and is_count(guarantee.rounds)
            and is_epsilon(guarantee.any_dropouts)
            and is_epsilon(guarantee.sample_known)
            and all(
                isinstance(row["case"], str)
                and is_epsilon(row["epsilon"])
                and isinstance(row["estimate"], bool)
                for row in guarantee.linkage
            )
            and all(is_count(k) and k >= 1 and is_epsilon(value) for k, value in guarantee.persons)
            and all(
                (as_number(group["budget"]) or 0) > 0
                and is_count(group["units"])
                and all(is_epsilon(group.get(name)) for name in ("planned", "realized", "from", "least"))
                for group in guarantee.groups
            )
            and all(
                as_number(claim["epsilon"]) is not None
                and is_epsilon(claim["epsilon"])
                and isinstance(claim["why"], str)
                for claim in guarantee.claims
            )
        )
    except (TypeError, KeyError, AttributeError):
        return False
