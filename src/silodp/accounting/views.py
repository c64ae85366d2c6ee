"""Views: what each adversary sees of a round of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Adversary = Literal["released", "server", "silo"]
ADVERSARIES: tuple[Adversary, ...] = ("released", "server", "silo")
Unit = Literal["user", "record"]


@dataclass(frozen=True)
class View:
    """What one adversary sees of a round (docs/privacy.md, section 3); built by the aggregator, read by the method.

    Attributes:
        adversary: The name of the adversary.
        silos: The number S of silos.
        sees_shares: Whether the adversary sees the noisy share of each silo, and not only their sum.
        knows_sample: Whether the adversary knows who was sampled.
        counts_disclosed: Whether the numbers of records per user and silo are disclosed.
        noise_sized_for: The number m of survivors that noise shares were sized for; None for S.
        survivors: The number n of noise shares in the sum; None for S.
        colluding: The number t of silos that subtract the noise they drew.
        round: The round, counted from 0; units with their own budgets retire after publicly known rounds and then cost
            nothing.
    """

    adversary: Adversary
    silos: int
    sees_shares: bool = False
    knows_sample: bool = False
    counts_disclosed: bool = False
    noise_sized_for: int | None = None
    survivors: int | None = None
    colluding: int = 1
    round: int = 0

    @property
    def min_survivors(self) -> int:
        """m, the number of survivors that noise shares were sized for: the fewest that a sum is made of."""
        return self.silos if self.noise_sized_for is None else self.noise_sized_for

    @property
    def shares_in_sum(self) -> int:
        """n, the number of noise shares in the sum."""
        return self.silos if self.survivors is None else self.survivors

    @property
    def unknown_shares(self) -> int:
        """Noise shares in the sum that the adversary does not know; below 1 if colluding silos know all of them."""
        # Colluding silos subtract the shares that they drew themselves; server and released models know none.
        return self.shares_in_sum - (self.colluding if self.adversary == "silo" else 0)
