"""The [budgets] table: which ε every record, or every person, is to be charged at most; drawn, for experiments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from silodp.accounting.budget_curve import group_budgets
from silodp.accounting.guarantee import Unit
from silodp.config.construct import build, describe_unknown, fields_of, validate_arguments
from silodp.data.budget_distributions import PREFERENCES, Budgets
from silodp.data.federation import Federation
from silodp.errors import SilodpError, lookup

if TYPE_CHECKING:
    from silodp.methods import Method

REPRESENTATIVE_RECORDS = 1000
"""Units that stand for all of them where no data are read."""

_UNITS: dict[str, Unit] = {"records": "record", "users": "user"}


@dataclass(frozen=True)
class BudgetLevel:
    """A budget ε, and the share of the units, in (0, 1], that ask for it or for something between the last and it."""

    budget: float
    share: float


@dataclass(frozen=True)
class BudgetDistribution:
    """A distribution of budgets by its name in `PREFERENCES`, the seed of the draw, and whose budgets they are.

    options: further arguments of the distribution, such as `levels`.
    """

    distribution: str
    seed: int = 0
    of: Literal["records", "users"] = "records"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> Unit:
        """Whose budgets they are."""
        return _UNITS[self.of]

    def drawn(self, count: int) -> Budgets:
        """(count,) budgets, the same whenever they are drawn."""
        draw = lookup(self.distribution, PREFERENCES, "budgets.distribution")
        return draw(count, np.random.default_rng(self.seed), **self.options)

    def on(self, federation: Federation) -> Federation:
        """The federation with these budgets.

        Raises:
            SilodpError: its tables have budgets already.
        """
        if self.of == "records" and any(silo.budget is not None for silo in federation.silos):
            raise SilodpError(
                "budgets is set, and the tables have a column of budgets (data.schema.budget): take one of them out.",
                code="argument.conflict",
                field="budgets",
            )
        draw = partial(lookup(self.distribution, PREFERENCES, "budgets.distribution"), **self.options)
        return federation.with_budgets(draw, self.seed, self.unit)

    def levels(self) -> tuple[BudgetLevel, ...]:
        """The budgets that are asked for, ascending, and by what share of the units; no data are needed."""
        return levels(self.drawn(REPRESENTATIVE_RECORDS))


def levels(budgets: Budgets) -> tuple[BudgetLevel, ...]:
    """The distinct budgets and the shares that ask for them; of many, twentieths of the units and their largest."""
    distinct = group_budgets(budgets)
    counts = np.bincount(np.searchsorted(distinct, budgets), minlength=len(distinct))
    return tuple(
        BudgetLevel(float(b), float(n / len(budgets))) for b, n in zip(distinct, counts, strict=True)
    )


def budget_unit(method: Method) -> Unit | None:
    """Whose own budgets a method reads; None: nobody's."""
    return method.budget_unit


def samples_by_budget(name: str) -> bool:
    """Whether the method of this name finds how often a record is drawn from the record's own budget."""
    from silodp.methods import METHODS

    maker = METHODS.get(name.replace("_", "-"))
    return maker is not None and maker.samples_by_budget


def methods_for(unit: Unit) -> str:
    """The methods that keep budgets of every such unit, for messages."""
    from silodp.methods import METHODS

    names = [name for name, maker in METHODS.items() if maker.budgets_of == unit]
    with_table = " with [method.personal]" if unit == "user" else ""
    return " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names) + with_table


def build_budget_distribution(section: Mapping[str, Any]) -> BudgetDistribution:
    """The preferences of a [budgets] table, checked: a few budgets are drawn.

    Raises:
        SilodpError: an unknown field or name, or a value that the distribution refuses.
    """
    own = [name for name in fields_of(BudgetDistribution) if name != "options"]
    named = {name: value for name, value in section.items() if name in own}
    found = build(BudgetDistribution, named, "the budgets", "budgets")
    # Count and generator are ours to give.
    draw = partial(
        lookup(found.distribution, PREFERENCES, "budgets.distribution"), 0, np.random.default_rng(0)
    )
    options = {name: value for name, value in section.items() if name not in own}
    for name in options:
        if name not in fields_of(draw):
            raise SilodpError(
                describe_unknown(name, [*own, *fields_of(draw)], "the budgets", "budgets"),
                code="config.unknown_field",
                field=f"budgets.{name}",
            )
    if found.seed < 0:
        raise SilodpError(
            f"budgets.seed = {found.seed}: set a whole number ≥ 0.",
            code="argument.value",
            field="budgets.seed",
        )
    made = BudgetDistribution(
        found.distribution, found.seed, found.of, validate_arguments(draw, options, "the budgets", "budgets")
    )
    made.drawn(REPRESENTATIVE_RECORDS)
    return made
