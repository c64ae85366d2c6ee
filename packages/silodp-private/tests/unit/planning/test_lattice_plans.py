"""Plans of `lattice`, whose silos never give a person all their weight in one silo."""

from __future__ import annotations

from silodp.planning.epsilon import compute_epsilon_for
from support.refusals import refused


def test_an_aggregator_for_fewer_rounds_is_refused() -> None:
    """Its ciphertexts are chosen for the ε of its attempts: after more, they may disclose more than was kept."""
    fields = {"noise_multiplier": 3.0, "user_sampling": 0.3, "weighting": "records"}
    asked = {"silos": 3, "users": 500, "adversary": "server", "aggregator": "lattice"}
    with refused("argument.conflict"):
        compute_epsilon_for("uldp-avg", fields, rounds=201, **asked)
    compute_epsilon_for("uldp-avg", fields, rounds=200, **asked)
    compute_epsilon_for("uldp-avg", fields, rounds=201, aggregation={"attempts": 201}, **asked)
