"""An aggregator outside the package: the coordinate-wise trimmed mean of the silos' noisy shares.

In every coordinate the server leaves out the `trim` largest and the `trim` smallest of the S shares, and scales the sum
of the others to S shares, so that a few silos with wild updates cannot move the model far.

What it costs: trimming is post-processing of the shares, not of their sum. Whoever sees the models sees a function of
all shares, so every adversary is charged as one who sees each share by itself; where one person's weight may lie in
a single silo, the noise of one share must then hide it. The server sees the shares under `plain` already.

In a configuration: aggregator = "trimmed.py:Trimmed", with [aggregation] trim = 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from silodp.accounting.events import Event
from silodp.accounting.views import Adversary, View
from silodp.aggregators import Plain, ServerAggregator, Visibility
from silodp.aggregators.plain import PlainServer
from silodp.aggregators.run_spec import RunSpec
from silodp.errors import SilodpError
from silodp.methods import Method
from silodp.settings import Whole


@dataclass(frozen=True)
class Trimmed(Plain):
    """The trimmed mean of the shares, times S.

    Args:
        trim: shares left out at either end of every coordinate; fewer than half of the silos.
    """

    trim: int = 1

    name = "trimmed"

    def check(self, spec: RunSpec) -> None:
        """Refuse to leave out all shares."""
        silos = spec.population.silos
        Whole(least=0).check("trim", self.trim)
        if 2 * self.trim >= silos:
            raise SilodpError(
                f"trim = {self.trim} leaves none of {silos} shares: set at most {(silos - 1) // 2}.",
                code="argument.value",
                field="trim",
            )

    def views(self, method: Method, silos: int, survivors: int | None = None) -> dict[Adversary, View]:
        """Return what each adversary sees: the models depend on every single share."""
        views = super().views(method, silos, survivors)
        return {name: replace(view, sees_shares=True) for name, view in views.items()}

    def event(self, spec: RunSpec, view: View) -> Event:
        """Return what it costs that every share is seen; a silo, which knows its noise, sees no more than the server.

        That holds for weights that do not depend on records; for others `plain` promises nothing against silos.
        """
        return super().event(spec, replace(view, adversary="server"))

    @property
    def visibility(self) -> tuple[Visibility, ...]:
        """Return the table of `plain`, with what the models show."""
        server, silo, recipient = super().visibility
        return (server, replace(silo, not_seen="other silos' records and separate counts"),
                replace(recipient, not_seen="who was sampled in a round; record counts"))  # fmt: skip

    def describe(self, spec: RunSpec) -> dict[str, Any]:
        """Return how many shares count."""
        kept = spec.population.silos - 2 * self.trim
        return {"shares that count in a coordinate": kept, **super().describe(spec)}

    def server(self, spec: RunSpec) -> ServerAggregator:
        """Return the side that trims."""
        return TrimmedServer(spec, self.trim)


@dataclass(frozen=True)
class TrimmedServer(PlainServer):
    """Sets up, charges and asks as `plain` does."""

    trim: int

    def combine(self, shares: Tensor) -> Tensor:
        """Return S times the trimmed mean (d,) of the shares (S, d)."""
        silos = len(shares)
        kept = shares.sort(dim=0).values[self.trim : silos - self.trim]
        return kept.mean(dim=0) * silos
