"""Specifications of runs from a few constants."""

from __future__ import annotations

from dataclasses import dataclass, field

from silodp.accounting.views import Adversary
from silodp.aggregators import Aggregator, Plain, RunSpec
from silodp.aggregators.run_spec import ModelSpec
from silodp.data.public import PublicData
from silodp.methods.base import Method
from silodp.methods.roles import FederationSize


def make_spec(
    run: str,
    names: tuple[str, ...],
    method: Method,
    population: FederationSize,
    size: int,
    index: str = "",
    delta: float = 1e-5,
    dtype: str = "float32",
    rounds: int = 10**6,
    aggregator: Aggregator | None = None,
) -> RunSpec:
    """A run of so many silos and users with a model of `size` parameters; nothing is checked or calibrated."""
    data = PublicData(
        "test",
        names,
        population.users,
        (),
        "real",
        user_budgets=population.budgets,
        index_digest=index,
    )
    model = ModelSpec(size, dtype)
    return RunSpec(
        data,
        model,
        method,
        aggregator or Plain(),
        population.min_survivors,
        rounds=rounds,
        delta=delta,
        run=run,
    )


@dataclass(frozen=True)
class Half(Plain):
    """Accounts its noise at half of δ, though it discloses nothing for which the other half would be kept."""

    name: str = field(default="half", init=False)
    delta_share: float = field(default=0.5, init=False, repr=False)

    def disclosure(self, spec: RunSpec) -> dict[Adversary, float]:
        return {}
