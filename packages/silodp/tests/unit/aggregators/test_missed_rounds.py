"""What a silo charges itself that did not answer every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from silodp.accounting.events import Additive, Event
from silodp.accounting.ledger import Ledger
from silodp.accounting.views import View
from silodp.aggregators.masked import Masked
from silodp.methods import FederationSize, Participation, UldpAvg
from silodp.methods.participation import Always, Poisson
from silodp.runtime.gate import Gate
from silodp.wire.messages import Message
from silodp.wire.store import MemoryStore, RoundStore
from support.masked import TRAIN
from support.specs import make_spec


@dataclass(frozen=True)
class FewAtFirst(Participation):
    """One person in a hundred in the first five rounds, and everybody later."""

    @property
    def rate(self) -> float:
        return 0.01

    def draw(self, coins, round_: int, rates) -> NDArray[np.bool_]:  # type: ignore[no-untyped-def]
        return np.ones(len(coins.draw("x", 0)), dtype=bool)

    def sample_event(self, release: Additive, view: View) -> Event:
        rule = Always() if view.round >= 5 else Poisson(self.rate)
        return rule.sample_event(release, view)


def charge(rounds: Sequence[int]) -> float | None:
    """ε against the server by the own ledger of a silo that is asked in these rounds alone."""
    names = tuple(f"silo-{place}" for place in range(4))
    method = UldpAvg(noise_multiplier=5.0, clip=1.0, local=TRAIN, participation=FewAtFirst())
    aggregator = Masked(min_silos=3)
    spec = make_spec("", names, method, FederationSize(4, 12, 3), 3, "", aggregator=aggregator, rounds=10)
    assert spec.varies_by_round
    ledger = Ledger(None, 1e-5, "rdp", run="run")
    gate = Gate(names[0], spec, RoundStore(MemoryStore()), np.zeros(12, np.int64), ledger)
    for number in rounds:
        arrays = {"params": np.zeros(spec.size, np.float32)}
        gate.charge(Message("update", "run", number, 0, {"release": 0}, arrays))
    return ledger.epsilon("server")


def test_a_silo_that_missed_cheap_rounds_charges_what_the_others_cost() -> None:
    """It would charge the first five rounds, and stay below its limit, while it answers those of everybody."""
    early, late = charge(range(5)), charge(range(5, 10))
    assert early is not None
    assert late is not None
    assert late > 5 * early
    whole = charge(range(10))
    assert whole is not None
    assert late <= 2 * whole
