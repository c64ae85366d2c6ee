"""Privacy budgets of single records or users: how the core reaches the package that draws and meets them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from silodp._lazy import Registry

if TYPE_CHECKING:
    from silodp.data.federation import Federation

BUDGETS: Registry[Any] = Registry("budgets", {})
"""The parts of the package, by name.

"distributions": a mapping of names to functions (count, generator) -> (count,) budgets ε.
"table": reads a [budgets] table as a `BudgetDistribution`.
"personal": the class of a [method.personal] table, a `silodp.methods.roles.PersonalBudgets`.
"plan", "plan-lines": what a plan says of a `BudgetDistribution`, as an entry of its result and as lines of text.
"""


class BudgetDistribution(Protocol):
    """A distribution of privacy budgets, of a [budgets] table."""

    @property
    def unit(self) -> Literal["record", "user"]:
        """The unit that has the budgets."""

    def draw(self, count: int) -> NDArray[np.float64]:
        """Return ε of so many units, (count,); the same values at every call."""

    def assign_to(self, federation: Federation) -> Federation:
        """Return the federation with these budgets."""

    def list_levels(self) -> list[float]:
        """Return a few representative budgets, ascending; no data are needed."""


def load_budgets(part: str) -> Any:
    """Import a part of the package.

    Raises:
        SilodpError: `extension.missing`: the package is not installed.
    """
    return BUDGETS.load_required(part, "budgets", "a privacy budget of single records or persons")
