"""Views: what each adversary sees of a round of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

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


class _WatchedView(View):
    """A view that notes whether its round was read."""

    def __getattribute__(self, name: str) -> Any:
        # `vars(view)` holds the round, too; `repr`, `==` and `hash` of a view read its fields one by one.
        if name in ("round", "__dict__"):
            object.__setattr__(self, "was_round_read", True)
        return super().__getattribute__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Of a copy nobody would see what is read.
        object.__setattr__(self, "was_round_read", True)
        return super().__reduce_ex__(protocol)


def reads_round(compute_event: Callable[[View], object], view: View) -> bool:
    """Return whether an event of a view was computed from its round; if not, it is the same in every round."""
    if type(view) is not View:  # a class of a plug-in aggregator may hold the round elsewhere
        return True
    watched = _WatchedView(**vars(view))
    object.__setattr__(watched, "was_round_read", False)
    compute_event(watched)
    return bool(getattr(watched, "was_round_read", True))
