"""Which silos take part in which rounds: drawn once, stored by the server, and counted for the guarantees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from silodp.aggregators.run_spec import RunSpec
from silodp.mechanisms.noise import Randomness
from silodp.wire.messages import Message
from silodp.wire.store import RoundStore, Store, get_or_make

COMPLETED_ROUNDS_KEY = "rounds over"
"""Key in the store of the server: the number of completed rounds, and in how many each silo took part, (S,)."""
CHARGES_KEY = "charges"
"""Key in the store of the server: the number of charges that the ledger of the run had after the last round."""


def count_charges(store: Store) -> int:
    """Return how many charges the ledger of the run had after the last round.

    Args:
        store: Store of the server; stores of earlier versions lack the number, which counts as 0.
    """
    stored = store.get(CHARGES_KEY)
    return 0 if stored is None else int(stored)


@dataclass(frozen=True)
class Participation:
    """The silos that take part in each round.

    Attributes:
        spec: The specification of the run.
        store: The store of the server for this run.
        randomness: The random streams of the server.
    """

    spec: RunSpec
    store: RoundStore
    randomness: Randomness

    def load_completed(self) -> tuple[int, np.ndarray]:
        """Return the number of completed rounds, and in how many of them each silo took part, (S,)."""
        stored = self.store.run.get(COMPLETED_ROUNDS_KEY)
        if stored is None:
            return 0, np.zeros(len(self.spec.names), np.int64)
        kept = Message.decode(stored)
        return kept.round, kept.arrays["joined"]

    def complete(self, rounds: int) -> None:
        """Store durably that this many rounds are completed, and in how many of them each silo took part."""
        arrays = {"joined": self.count(rounds)}
        self.store.run.put(
            COMPLETED_ROUNDS_KEY, Message("over", self.spec.run, rounds, arrays=arrays).encode()
        )

    def draw(self, round_: int) -> np.ndarray:
        """Return the silos that take part in a round, (S,) bool; empty where the method samples none."""

        def sample() -> np.ndarray:
            stream = self.randomness.stream("clients", round_)
            silos = self.spec.method.sample_silos(self.spec.population, stream)
            return np.empty(0, dtype=bool) if silos is None else silos

        return get_or_draw(self.store.round(round_), "clients", self.spec.run, sample)

    def count(self, rounds: int) -> np.ndarray:
        """Return in how many of the first `rounds` rounds each silo took part, (S,)."""
        over, joined = self.load_completed()
        for round_ in range(over, rounds):
            silos = self.draw(round_)
            joined = joined + (silos if silos.size else 1)
        return joined


def get_or_draw(store: Store, key: str, run: str, draw: Callable[[], np.ndarray]) -> np.ndarray:
    """Return the array that is stored under a key; draw and store it durably if there is none.

    Args:
        store: Store of the round or of the run.
        key: Key in the store.
        run: Id of the run.
        draw: Returns a new array.
    """
    stored = get_or_make(store, key, lambda: Message("kept", run, arrays={"value": draw()}).encode())
    return Message.decode(stored).arrays["value"]
