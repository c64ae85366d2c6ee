"""The [budgets] table: privacy budgets of records or persons, drawn from a distribution, for experiments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np

from silodp.accounting.views import Unit
from silodp.config.build import build, get_fields, make_unknown_error, validate_arguments
from silodp.data.federation import Federation
from silodp.errors import SilodpError, lookup
from silodp.settings import Settings, Whole
from silodp_budgets.budget_curve import group_budgets
from silodp_budgets.budget_distributions import PREFERENCES, Budgets

REPRESENTATIVE_RECORDS = 1000
"""Units that represent all of them where no data are read."""

_UNITS: dict[str, Unit] = {"records": "record", "users": "user"}


@dataclass(frozen=True)
class BudgetDistribution(Settings, prefix="budgets."):
    """A distribution of privacy budgets.

    Attributes:
        distribution: The name of the distribution in `PREFERENCES`.
        seed: The seed of the draw.
        of: Whether records or users have the budgets.
        options: Further arguments of the distribution, such as `levels`.
    """

    distribution: str
    seed: Annotated[int, Whole(0, limit=2**63)] = 0
    of: Literal["records", "users"] = "records"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> Unit:
        """The unit that has the budgets."""
        return _UNITS[self.of]

    def draw(self, count: int) -> Budgets:
        """Return ε of so many units, (count,); the same values at every call."""
        return self._sampler(count, np.random.default_rng(self.seed))

    def assign_to(self, federation: Federation) -> Federation:
        """Return the federation with these budgets.

        Raises:
            SilodpError: its tables have budgets already.
        """
        if self.of == "records" and any(silo.budget is not None for silo in federation.silos):
            raise SilodpError(
                "budgets is set, and the tables have a column of budgets (data.schema.budget): take one of them out.",
                code="argument.conflict",
                field="budgets",
            )
        return federation.with_budgets(self._sampler, self.seed, self.unit)

    @property
    def _sampler(self) -> partial[Budgets]:
        return partial(lookup(self.distribution, PREFERENCES, "budgets.distribution"), **self.options)

    def list_levels(self) -> list[float]:
        """Return the budgets of `REPRESENTATIVE_RECORDS` units, ascending; no data are needed."""
        # At most twenty levels, each of which is then accounted for by itself.
        return [float(level) for level in group_budgets(self.draw(REPRESENTATIVE_RECORDS))]


def build_budget_distribution(section: Mapping[str, Any]) -> BudgetDistribution:
    """Make the distribution of a [budgets] table, and check it by drawing a few budgets.

    Args:
        section: The table; fields that are not of `BudgetDistribution` are options of the distribution.

    Raises:
        SilodpError: an unknown field or name, or a value that the distribution refuses.
    """
    fields = [name for name in get_fields(BudgetDistribution) if name != "options"]
    named = {name: value for name, value in section.items() if name in fields}
    found = build(BudgetDistribution, named, "the budgets", "budgets")
    # The first two arguments, count and generator, are given by `draw`, so they are no options; the others are.
    draw = partial(
        lookup(found.distribution, PREFERENCES, "budgets.distribution"), 0, np.random.default_rng(0)
    )
    options = {name: value for name, value in section.items() if name not in fields}
    for name in options:
        if name not in get_fields(draw):
            raise make_unknown_error(name, [*fields, *get_fields(draw)], "the budgets", "budgets")
    made = replace(found, options=validate_arguments(draw, options, "the budgets", "budgets"))
    made.draw(
        REPRESENTATIVE_RECORDS
    )  # values that do not fit together are refused now, not after the data are read
    return made
