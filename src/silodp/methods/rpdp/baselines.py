"""rPDP-FL's baselines that protect all records alike: *minimum* and *dropout*."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from silodp.data.public import PublicData
from silodp.errors import SilodpError
from silodp.methods.rpdp.method import TwoStageSampling
from silodp.settings import Epsilon


@dataclass(frozen=True, kw_only=True, repr=False)
class RpdpMinimum(TwoStageSampling):
    """The baseline *minimum*: everyone is protected at one budget.

    Attributes:
        budget: ε, a public constant; no record may ask for less.

    Source: rPDP-FL (Liu et al.), section 7.2, baseline Minimum.
    """

    budget: Epsilon

    name: str = field(default="rpdp-minimum", init=False)

    epsilon_ignores: ClassVar = {**TwoStageSampling.epsilon_ignores, "budget": 1.0}

    def cap_budgets(self, budget: np.ndarray) -> np.ndarray:
        """Return the same ε for all."""
        return np.full(len(budget), self.budget)

    def check(self, data: PublicData, rounds: int, delta: float) -> None:
        """Check, too, that no record asks for less."""
        super().check(data, rounds, delta)
        own = np.concatenate(data.silo_budgets or (np.empty(0),))
        if (own < self.budget).any():
            raise SilodpError(
                f"rpdp-minimum: {int((own < self.budget).sum())} of {len(own)} records ask for less than budget = "
                f"{self.budget:g}: set budget = {own.min():g}, or leave them out (rpdp-dropout).",
                code="data.budgets",
                field="budget",
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class RpdpDropout(TwoStageSampling):
    """The baseline *dropout*: records that ask for a threshold or more take part, all protected at the threshold.

    Attributes:
        threshold: ε, a public constant.

    Source: rPDP-FL (Liu et al.), section 7.2, baseline Dropout.
    """

    threshold: Epsilon

    name: str = field(default="rpdp-dropout", init=False)

    epsilon_ignores: ClassVar = {**TwoStageSampling.epsilon_ignores, "threshold": 1.0}

    def cap_budgets(self, budget: np.ndarray) -> np.ndarray:
        """Return the threshold, or 0 below it."""
        return np.where(budget >= self.threshold, self.threshold, 0.0)
